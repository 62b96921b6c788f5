"""The array form of COCO's average precision against pycocotools and by hand."""

import numpy as np
import pytest

from cldetr.evaluation import average_precision
from cldetr.evaluation.average_precision import (
    Detections,
    GroundTruth,
    Source,
    match,
    summarise_precision,
)

from .coco_oracle import make_data, make_detections, run_pycocotools


def truth_of(*objects):
    """Builds ground truth from (image, label, box, crowd) on as many images as are named."""
    images, labels, boxes, crowd = (np.array(column) for column in zip(*objects, strict=True))
    boxes = boxes.astype(np.float64)
    areas = boxes[:, 2] * boxes[:, 3]
    ids = np.arange(images.max() + 1)
    sources = (Source("hand", frozenset(range(10))),)
    origin = np.zeros_like(ids)
    return GroundTruth(sources, origin, ids, images, labels, boxes, areas, crowd.astype(bool))


def detections_of(*found):
    images, labels, boxes, scores = (np.array(column) for column in zip(*found, strict=True))
    return Detections(images, labels, boxes.astype(np.float64), scores.astype(np.float64))


FIELDS = ("images", "labels", "boxes", "scores")
NOTHING = Detections(
    np.empty(0, np.int64), np.empty(0, np.int64), np.empty((0, 4)), np.empty(0, np.float64)
)


@pytest.mark.parametrize("seed", range(40))
def test_precision_equals_pycocotools_to_the_last_bit(seed):
    rng = np.random.default_rng(seed)
    data = make_data(rng, objects=rng.choice([1.0, 4.0, 15.0]), crowd=rng.choice([0.0, 0.1, 0.5]))
    detections = make_detections(rng, data, per_image=rng.choice([2, 10, 30]))
    expected, scores = run_pycocotools(data, detections)

    matching = match(GroundTruth.from_coco(data, range(5)), detections)
    table = matching.precision(range(5))

    np.testing.assert_array_equal(table, expected)
    assert summarise_precision(table) == scores


@pytest.mark.parametrize("group", [[0], [1, 3], [0, 2, 4], [4]])
def test_a_group_read_from_the_whole_table_equals_a_run_restricted_to_it(group):
    rng = np.random.default_rng(7)
    data = make_data(rng, images=20, without=[4])
    detections = make_detections(rng, data)
    table = match(GroundTruth.from_coco(data, range(5)), detections).precision(range(5))

    expected, scores = run_pycocotools(data, detections, labels=group)

    np.testing.assert_array_equal(table[:, :, group], expected)
    assert summarise_precision(table[:, :, group]) == scores


def test_restricted_images_equal_pycocotools_with_image_ids():
    rng = np.random.default_rng(3)
    data = make_data(rng, images=20)
    detections = make_detections(rng, data)
    truth = GroundTruth.from_coco(data, range(5))
    images = rng.random(20) < 0.5
    expected, _ = run_pycocotools(data, detections, [1, 3], truth.image_ids[images])

    table = match(truth, detections).precision([1, 3], images)

    np.testing.assert_array_equal(table, expected)


def test_only_the_best_hundred_detections_of_an_image_and_class_count():
    rng = np.random.default_rng(5)
    data = make_data(rng, images=2, classes=2, objects=30.0)
    detections = make_detections(rng, data, per_image=300)
    assert np.bincount(detections.images * 2 + detections.labels).max() > 100
    expected, _ = run_pycocotools(data, detections)

    table = match(GroundTruth.from_coco(data, range(2)), detections).precision(range(2))

    np.testing.assert_array_equal(table, expected)


def test_overlaps_computed_in_small_chunks_give_the_same(monkeypatch):
    rng = np.random.default_rng(11)
    data = make_data(rng)
    detections = make_detections(rng, data)
    truth = GroundTruth.from_coco(data, range(5))
    whole = match(truth, detections).precision(range(5))

    monkeypatch.setattr(average_precision, "_CHUNK", 3)

    np.testing.assert_array_equal(match(truth, detections).precision(range(5)), whole)


def test_no_detection_at_all_scores_zero_and_not_na():
    data = make_data(np.random.default_rng(1), crowd=0.0)
    expected, scores = run_pycocotools(data, NOTHING)

    table = match(GroundTruth.from_coco(data, range(5)), NOTHING).precision(range(5))

    np.testing.assert_array_equal(table, expected)
    assert summarise_precision(table) == scores
    assert scores["AP"] == 0.0


def test_class_without_object_is_na_and_left_out_of_the_mean():
    truth = truth_of((0, 0, [0, 0, 100, 100], 0))
    detections = detections_of((0, 0, [0, 0, 100, 100], 0.9), (0, 1, [0, 0, 100, 100], 0.8))

    table = match(truth, detections).precision([0, 1])

    assert summarise_precision(table[:, :, [1]]) == dict.fromkeys(average_precision.METRICS)
    assert summarise_precision(table)["AP"] == pytest.approx(100.0)
    assert summarise_precision(table)["APs"] is None


def test_class_with_only_crowds_is_na():
    truth = truth_of((0, 0, [0, 0, 100, 100], 1))
    detections = detections_of((0, 0, [0, 0, 100, 100], 0.9))

    assert summarise_precision(match(truth, detections).precision([0]))["AP"] is None


def test_a_better_scored_miss_halves_the_precision():
    truth = truth_of((0, 0, [0, 0, 100, 100], 0))
    detections = detections_of((0, 0, [300, 300, 100, 100], 0.9), (0, 0, [0, 0, 100, 100], 0.8))

    scores = summarise_precision(match(truth, detections).precision([0]))

    # One hit among two detections, at every recall up to 1.
    assert scores["AP"] == pytest.approx(50.0)


def test_second_detection_of_an_object_is_a_miss_but_of_a_crowd_is_not_counted():
    box = [0, 0, 100, 100]
    elsewhere = [500, 500, 100, 100]
    objects = [(0, 0, box, 0), (0, 0, elsewhere, 0)]
    found = [(0, 0, box, 0.9), (0, 0, box, 0.8), (0, 0, elsewhere, 0.7)]

    doubled = summarise_precision(match(truth_of(*objects), detections_of(*found)).precision([0]))
    with_crowd = truth_of(*objects, (0, 0, box, 1))
    spared = summarise_precision(match(with_crowd, detections_of(*found)).precision([0]))

    # Recall 0 to 0.5 (51 of 101 points) at precision 1, the rest at 2/3.
    assert doubled["AP"] == pytest.approx(100 * (51 + 50 * 2 / 3) / 101)
    assert spared["AP"] == pytest.approx(100.0)


def test_overlap_of_exactly_a_threshold_matches():
    truth = truth_of((0, 0, [0, 0, 100, 100], 0))
    # 50 of 100 columns: IoU = 0.5, enough for the first of the ten thresholds alone.
    scores = summarise_precision(
        match(truth, detections_of((0, 0, [0, 0, 50, 100], 0.9))).precision([0])
    )

    assert scores["AP50"] == pytest.approx(100.0)
    assert scores["AP"] == pytest.approx(10.0)


def test_of_equal_overlaps_the_last_object_is_taken():
    first, second = [0, 0, 100, 100], [40, 0, 100, 100]
    truth = truth_of((0, 0, first, 0), (0, 0, second, 0))
    # The better scored one overlaps both by 80 / 120, the other one fits the second object.
    detections = detections_of((0, 0, [20, 0, 100, 100], 0.9), (0, 0, second, 0.8))

    scores = summarise_precision(match(truth, detections).precision([0]))

    # The second object is gone: recall stops at a half (51 of 101 points).
    assert scores["AP50"] == pytest.approx(100 * 51 / 101)


def test_images_with_marks_images_of_objects_and_of_crowds():
    box = [0, 0, 10, 10]
    truth = truth_of((0, 0, box, 0), (1, 1, box, 1), (2, 2, box, 0), (3, 0, box, 0))
    assert truth.images_with([0, 1]).tolist() == [True, True, False, True]


def test_from_coco_renumbers_labels_and_leaves_unmapped_categories_out():
    data = make_data(np.random.default_rng(2), classes=3)
    truth = GroundTruth.from_coco(data, [5, -1, 0])

    assert (np.diff(truth.image_ids) > 0).all()
    numbers = np.repeat(np.arange(len(data.image_ids)), np.diff(data.starts))
    kept = data.labels != 1
    np.testing.assert_array_equal(truth.labels, np.array([5, -1, 0])[data.labels[kept]])
    np.testing.assert_array_equal(truth.image_ids[truth.images], data.image_ids[numbers[kept]])
    np.testing.assert_array_equal(truth.boxes, data.boxes[kept])


def test_from_coco_refuses_a_label_list_of_the_wrong_length():
    data = make_data(np.random.default_rng(2), classes=3)
    with pytest.raises(ValueError, match="3 categories"):
        GroundTruth.from_coco(data, [0, 1])


def test_joined_data_sets_judge_each_class_where_it_is_annotated():
    rng = np.random.default_rng(4)
    first, second = make_data(rng, images=9, classes=3), make_data(rng, images=7, classes=2)
    # Labels 0, 1, 2 in the first, 3 and 4 in the second; both get detections of all five.
    truths = [
        GroundTruth.from_coco(first, [0, 1, 2], "first"),
        GroundTruth.from_coco(second, [3, 4], "second"),
    ]
    alone = [make_detections(rng, first), make_detections(rng, second)]
    strange = Detections(np.arange(9), np.full(9, 3), np.full((9, 4), 20.0), np.full(9, 0.99))
    parts = [
        alone[0],
        strange,
        Detections(alone[1].images + 9, alone[1].labels + 3, alone[1].boxes, alone[1].scores),
    ]
    together = Detections(
        *(np.concatenate([getattr(part, name) for part in parts]) for name in FIELDS)
    )

    table = match(GroundTruth.join(truths), together).precision(range(5))

    np.testing.assert_array_equal(table[:, :, :3], run_pycocotools(first, alone[0])[0])
    np.testing.assert_array_equal(table[:, :, 3:], run_pycocotools(second, alone[1])[0])


def test_joined_data_sets_need_different_names():
    data = make_data(np.random.default_rng(2), classes=3)
    truth = GroundTruth.from_coco(data, [0, 1, 2])
    with pytest.raises(ValueError, match="same name"):
        GroundTruth.join([truth, truth])
