"""The confusion matrix against a brute-force count, and the curves against pycocotools."""

import json
import logging
from dataclasses import replace

import numpy as np
import pytest

from cldetr.evaluation.average_precision import Detections, GroundTruth, Source
from cldetr.evaluation.confusion import (
    count_confusions,
    describe_confusions,
    summarise_confusions,
    total_confusions,
)
from cldetr.evaluation.evaluator import IncrementalEvaluator, split_details, to_scalars
from cldetr.scenario import Category, Phase, Scenario

from .coco_oracle import make_data, make_detections, run_pycocotools
from .test_evaluation import evaluate, make_scenario, split_by_image, to_instances


def overlap(box, other, crowd=False):
    (x, y, w, h), (u, v, s, t) = box, other
    inner = max(min(x + w, u + s) - max(x, u), 0) * max(min(y + h, v + t) - max(y, v), 0)
    whole = w * h if crowd else w * h + s * t - inner
    return inner / whole if whole and inner else 0.0


def count_slowly(truth, detections, labels, min_score):
    """The matrix by plain loops over images, detections and objects."""
    index = {label: k for k, label in enumerate(labels)}
    counts = np.zeros((len(labels) + 1, len(labels) + 1), int)
    for image in range(len(truth.image_ids)):
        objects = [j for j in np.flatnonzero(truth.images == image) if truth.labels[j] in index]
        free = [j for j in objects if not truth.crowd[j]]
        rows = np.flatnonzero((detections.images == image) & (detections.scores >= min_score))
        for row in rows[np.argsort(-detections.scores[rows], kind="stable")]:
            box, column = detections.boxes[row], index[int(detections.labels[row])]
            near = [(overlap(box, truth.boxes[j]), j) for j in free]
            best = max(near, default=(0.0, -1))
            if best[0] >= 0.5:
                free.remove(best[1])
                counts[index[truth.labels[best[1]]], column] += 1
            elif not any(
                overlap(box, truth.boxes[j], crowd=True) >= 0.5
                for j in objects
                if truth.crowd[j] and truth.labels[j] == detections.labels[row]
            ):
                counts[-1, column] += 1
        for j in free:
            counts[index[truth.labels[j]], -1] += 1
    return counts


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("min_score", [0.0, 0.3])
def test_counts_equal_those_of_plain_loops(seed, min_score):
    rng = np.random.default_rng(seed)
    data = make_data(rng, images=25, classes=6, crowd=0.2)
    detections = make_detections(rng, data)
    labels = (4, 1, 5, 0)  # the other two classes are not learnt yet
    seen = detections.take(np.flatnonzero(np.isin(detections.labels, labels)))
    truth = GroundTruth.from_coco(data, range(6))

    counts = count_confusions(truth, seen, labels, min_score)

    assert counts.tolist() == count_slowly(truth, seen, labels, min_score).tolist()
    assert (counts[:-1, :-1].sum() > np.trace(counts[:-1, :-1]) > 0) or min_score
    assert counts[:-1].sum(axis=1).tolist() == [
        np.count_nonzero((truth.labels == label) & ~truth.crowd) for label in labels
    ]


def one_image(objects, found, crowd=()):
    """Ground truth and detections of one image, from (label, x) and (label, x, score)."""
    side = 40.0
    truth = GroundTruth(
        sources=(Source("one", frozenset(range(4))),),
        image_sources=np.zeros(1, np.int64),
        image_ids=np.array([7]),
        images=np.zeros(len(objects), np.int64),
        labels=np.array([label for label, _ in objects], np.int64),
        boxes=np.array([[x, 0, side, side] for _, x in objects], float).reshape(-1, 4),
        areas=np.full(len(objects), side**2),
        crowd=np.array([number in crowd for number in range(len(objects))], bool),
    )
    labels, xs, scores = zip(*found, strict=True) if found else ((), (), ())
    detections = Detections(
        np.zeros(len(found), np.int64),
        np.array(labels, np.int64),
        np.array([[x, 0, side, side] for x in xs], float).reshape(-1, 4),
        np.array(scores, float),
    )
    return truth, detections


def test_the_best_scored_detection_names_the_object_and_a_second_one_is_background():
    truth, detections = one_image([(0, 0), (1, 100)], [(0, 2, 0.5), (2, 0, 0.9), (2, 200, 0.4)])
    counts = count_confusions(truth, detections, (0, 1, 2), 0.3)
    #                          as 0  as 1  as 2  missed
    assert counts.tolist() == [[0, 0, 1, 0], [0, 0, 0, 1], [0, 0, 0, 0], [1, 0, 1, 0]]


def test_a_detection_in_a_crowd_of_its_class_counts_nowhere():
    truth, detections = one_image([(0, 0)], [(0, 0, 0.9), (1, 0, 0.8)], crowd=(0,))
    assert count_confusions(truth, detections, (0, 1), 0.3).tolist() == [
        [0, 0, 0],
        [0, 0, 0],
        [0, 1, 0],
    ]


def test_images_without_objects_or_detections_are_counted():
    for objects, found, expected in (
        ([], [], [[0, 0], [0, 0]]),
        ([(0, 0)], [], [[0, 1], [0, 0]]),
        ([], [(0, 0, 0.5)], [[0, 0], [1, 0]]),
    ):
        assert count_confusions(*one_image(objects, found), (0,), 0.3).tolist() == expected


def test_the_summary_adds_up_old_and_new_classes():
    counts = np.array(
        [  # old 0, old 1, new 2, missed
            [10, 2, 3, 4],
            [1, 20, 5, 6],
            [7, 0, 30, 8],
            [9, 1, 2, 0],
        ]
    )
    summary = summarise_confusions(counts, np.array([True, True, False]))
    assert summary == {
        "old": {"objects": 51, "correct": 30, "as_old": 3, "as_new": 8, "missed": 10},
        "new": {"objects": 45, "correct": 30, "as_old": 7, "as_new": 0, "missed": 8},
        "background": {"as_old": 10, "as_new": 2},
    }
    text = describe_confusions(summary)
    assert "51 old objects 30 are detected as what they are, 8 as new, 3 as another old" in text
    assert "45 new objects 30 are detected as what they are, 7 as old, 0 as another new" in text


def test_classes_of_domains_are_one_group(caplog):
    """One object is right, one confused and one missed; those of the other domain are missed."""
    truth, detections = one_image([(0, 0), (0, 100), (1, 200)], [(0, 0, 0.9), (1, 100, 0.8)])
    truth = GroundTruth.join([truth, replace(truth, sources=(Source("fog", frozenset(range(4))),))])
    classes = (Category(1, "cat"), Category(2, "dog"))
    phases = (Phase(1, (0, 1), (), "one"), Phase(2, (), (), "fog", refreshed=(0, 1)))
    scenario = Scenario("2 domains", "domains", classes, phases, "list", None, None, ())
    evaluator = IncrementalEvaluator(truth, scenario, 2)
    found = to_instances(detections.boxes, detections.labels, detections.scores)
    evaluator.process([{"image_id": 7, "source": "one"}], [{"instances": found}])
    with caplog.at_level(logging.INFO):
        summary = evaluator.evaluate()["confusion"]["summary"]
    assert total_confusions(summary) == {"objects": 6, "correct": 1, "confused": 1, "missed": 4}
    assert summary["old"]["objects"] == 0
    assert summary["background"]["as_old"] == 0
    said = "of 6 objects 1 are detected as what they are, 1 as another class, 4 are missed"
    assert caplog.messages[-1].endswith(said)


@pytest.fixture
def problem():
    """Six classes, the last without any object; arrival order differs from label order."""
    rng = np.random.default_rng(21)
    data = make_data(rng, images=25, classes=6, without=[5])
    scenario = make_scenario(data.categories, (4, 1), (5, 0), (3, 2))
    return data, make_detections(rng, data), scenario


@pytest.mark.parametrize("phase", [1, 3])
def test_curves_equal_the_precision_of_pycocotools(problem, phase):
    data, detections, scenario = problem
    truth = GroundTruth.from_coco(data, range(6))
    evaluator = IncrementalEvaluator(truth, scenario, phase)

    curves = evaluate(evaluator, split_by_image(data, detections))["precision_recall"]

    assert curves["phases"] == [1, 1, 2, 2, 3, 3][: 2 * phase]
    for name, label in zip(curves["categories"], scenario.seen(phase), strict=True):
        assert name == f"class {label}"
        expected = run_pycocotools(data, detections, labels=[label])[0][:, :, 0, 0]  # (T, R)
        k = curves["categories"].index(name)
        if label == 5:
            assert expected.max() == -1
            assert curves["AP50"][k] is curves["AP"][k] is None
        else:
            assert curves["AP50"][k] == np.round(expected[0], 4).tolist()
            assert curves["AP"][k] == np.round(expected.mean(axis=0), 4).tolist()


def test_an_evaluation_has_its_details_apart_from_its_metrics(problem):
    data, detections, scenario = problem
    truth = GroundTruth.from_coco(data, range(6))
    batch = split_by_image(data, detections)
    entry = evaluate(IncrementalEvaluator(truth, scenario, 2, confusion_score=0.5), batch)
    metrics, details = split_details(entry)
    assert set(details) == {"confusion", "precision_recall"}
    assert not set(details) & set(metrics)
    assert not [name for name in to_scalars(entry) if name.startswith(tuple(details))]
    json.dumps(details, allow_nan=False)
    confusion = details["confusion"]
    assert confusion["min_score"] == 0.5
    assert confusion["categories"] == ["class 4", "class 1", "class 5", "class 0"]
    assert confusion["phases"] == [1, 1, 2, 2]
    seen = detections.take(np.flatnonzero(np.isin(detections.labels, scenario.seen(2))))
    assert confusion["counts"] == count_slowly(truth, seen, scenario.seen(2), 0.5).tolist()


def test_restricted_images_restrict_the_confusion_matrix(problem):
    data, detections, scenario = problem
    truth = GroundTruth.from_coco(data, range(6))
    batch = split_by_image(data, detections)
    entries = [
        evaluate(IncrementalEvaluator(truth, scenario, 1, restrict_images=restricted), batch)
        for restricted in (False, True)
    ]
    plain, restricted = (np.array(entry["confusion"]["counts"]) for entry in entries)
    assert plain[:-1].tolist() == restricted[:-1].tolist()
    assert plain[-1].sum() > restricted[-1].sum()
