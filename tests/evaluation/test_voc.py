"""Pascal VOC's metrics: worked by hand, and equal to those of Detectron2's evaluator."""

import csv
import itertools
import json

import numpy as np
import pytest
import torch
from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.data.datasets import register_pascal_voc
from detectron2.evaluation import PascalVOCDetectionEvaluator, pascal_voc_evaluation
from detectron2.structures import Boxes, Instances

from cldetr.data.datasets import read_dataset
from cldetr.evaluation import IncrementalEvaluator
from cldetr.evaluation.average_precision import METRICS, Detections, GroundTruth, Source
from cldetr.evaluation.evaluator import to_scalars
from cldetr.evaluation.results import format_table, summarise, write_results
from cldetr.evaluation.voc import VOC_METRICS, match_voc
from cldetr.scenario import Category, Phase, Scenario, make_scenario

CLASSES = ["bird", "boat", "cat", "cow"]
SIZE = 100
YEARS = {2007: "VOC07", 2012: "VOC12"}


def truth_of(boxes, difficult=None):
    """Objects of one class in one image, x y w h."""
    count = len(boxes)
    crowd = np.array(difficult or [False] * count, dtype=bool)
    return GroundTruth(
        sources=(Source("test", frozenset([0])),),
        image_sources=np.zeros(1, dtype=np.int64),
        image_ids=np.array([1]),
        images=np.zeros(count, dtype=np.int64),
        labels=np.zeros(count, dtype=np.int64),
        boxes=np.array(boxes, dtype=np.float64),
        areas=np.ones(count),
        crowd=crowd,
    )


def score(truth, boxes, scores):
    zeros = np.zeros(len(scores), dtype=np.int64)
    found = Detections(zeros, zeros, np.array(boxes, np.float64).reshape(-1, 4), np.array(scores))
    return match_voc(truth, found).average([0])


A, B, C = (0, 0, 10, 10), (40, 40, 10, 10), (70, 70, 20, 20)


def test_averages_worked_by_hand():
    """Found, found again, two on a difficult object, found: precisions 1, 1/2, -, -, 2/3."""
    truth = truth_of([A, B, C], [False, False, True])
    found = score(truth, [A, A, C, C, B], [0.9, 0.8, 0.7, 0.6, 0.5])
    assert found["VOC12"] == pytest.approx(100 * (0.5 * 1 + 0.5 * 2 / 3))
    # Recalls of 0 to 0.5 have a precision of 1, those of 0.6 to 1 have 2/3.
    assert found["VOC07"] == pytest.approx(100 * (6 * 1 + 5 * 2 / 3) / 11)


def test_a_detection_is_not_passed_on_to_its_second_best_object():
    """Where COCO's rules give it the other object, VOC's count it as found twice."""
    near = (0, 2, 10, 10)  # IoU of 80 / 120 with A
    truth = truth_of([A, near])
    assert score(truth, [A, A], [0.9, 0.8])["VOC12"] == pytest.approx(50.0)


def test_a_detection_goes_to_the_object_that_it_overlaps_most_and_of_equals_to_the_first():
    near, difficult = (0, 2, 10, 10), [True, False]
    assert score(truth_of([near, A], difficult), [A], [0.9])["VOC12"] == pytest.approx(100.0)
    assert score(truth_of([near, A], difficult), [near], [0.9])["VOC12"] == 0.0
    assert score(truth_of([A, A], difficult), [A], [0.9])["VOC12"] == 0.0
    assert score(truth_of([A, A], difficult[::-1]), [A], [0.9])["VOC12"] == pytest.approx(100.0)


def test_three_of_ten_objects_do_not_reach_the_recall_of_three_tenths():
    """VOC's code adds up the recalls, and the fourth is 0.30000000000000004."""
    boxes = [(20 * i, 0, 10, 10) for i in range(10)]
    found = score(truth_of(boxes), boxes[:3], [0.9, 0.8, 0.7])
    assert found == {"VOC07": pytest.approx(100 * 3 / 11), "VOC12": pytest.approx(30.0)}


def test_an_overlap_of_exactly_one_half_is_too_little():
    assert score(truth_of([A]), [(0, 0, 10, 5)], [0.9])["VOC12"] == 0.0
    assert score(truth_of([A]), [(0, 0, 10, 5.1)], [0.9])["VOC12"] == pytest.approx(100.0)


def test_difficult_objects_overlap_by_iou_unlike_crowd_regions():
    """A small box inside a difficult object is a miss, not ignored."""
    truth = truth_of([A, C], [False, True])
    inside = (72, 72, 4, 4)
    assert score(truth, [inside, A], [0.9, 0.8])["VOC12"] == pytest.approx(50.0)


def test_without_detections_the_average_is_zero_and_without_objects_there_is_none():
    assert score(truth_of([A]), [], []) == {"VOC07": 0.0, "VOC12": 0.0}
    assert score(truth_of([C], [True]), [C], [0.9]) == {"VOC07": None, "VOC12": None}


# Detectron2's evaluator


@pytest.fixture
def voc(tmp_path):
    """A data set in VOC's layout, registered for both years: annotations of 30 images."""
    rng = np.random.default_rng(5)
    root = tmp_path / "VOC"
    for folder in ("Annotations", "ImageSets/Main", "JPEGImages"):
        (root / folder).mkdir(parents=True)
    names = [f"{index:06d}" for index in range(1, 31)]
    (root / "ImageSets/Main/test.txt").write_text("\n".join(names))
    for name in names:
        (root / f"JPEGImages/{name}.jpg").touch()  # nothing reads the image itself
        objects, known = "", []
        for _ in range(int(rng.integers(0, 7))):
            x, y = rng.integers(1, 60, 2)
            w, h = rng.integers(8, 40, 2)
            label = int(rng.integers(0, 3))
            if known and rng.random() < 0.4:  # on or beside an earlier object of its class
                x, y, w, h, label = known[-1]
                x += int(rng.integers(0, 3))
            known.append((x, y, w, h, label))
            # Of cows all are difficult: there is no object to find.
            difficult = int(rng.random() < 0.25)
            label, difficult = (3, 1) if rng.random() < 0.05 else (label, difficult)
            objects += (
                f"<object><name>{CLASSES[label]}</name><pose>Left</pose><truncated>0</truncated>"
                f"<difficult>{difficult}</difficult><bndbox><xmin>{x}</xmin><ymin>{y}</ymin>"
                f"<xmax>{x + w}</xmax><ymax>{y + h}</ymax></bndbox></object>"
            )
        (root / f"Annotations/{name}.xml").write_text(
            f"<annotation><size><width>{SIZE}</width><height>{SIZE}</height></size>{objects}"
            "</annotation>"
        )
    for year in YEARS:
        register_pascal_voc(f"test_voc_{year}", str(root), "test", year, CLASSES)
    yield "test_voc_{}"
    for year in YEARS:
        DatasetCatalog.remove(f"test_voc_{year}")
        MetadataCatalog.remove(f"test_voc_{year}")


def predict(dicts, seed, draw_score, step):
    """Several detections near each object, and some of nothing; coordinates in steps of `step`."""
    rng = np.random.default_rng(seed)
    outputs = []
    for entry in dicts:
        boxes, labels = [], []
        for annotation in entry["annotations"]:
            for _ in range(int(rng.integers(0, 4))):
                boxes.append(np.array(annotation["bbox"]) + rng.normal(0, 3, 4))
                labels.append(annotation["category_id"])
        for _ in range(int(rng.integers(0, 4))):
            x, y, w, h = rng.uniform(1, 40, 4)
            boxes.append(np.array([x, y, x + w, y + h]))
            labels.append(int(rng.integers(0, 4)))
        instances = Instances((SIZE, SIZE))
        corners = np.array(boxes).reshape(-1, 4)
        corners = corners if step is None else np.round(corners / step) * step
        instances.pred_boxes = Boxes(torch.tensor(corners, dtype=torch.float32))
        instances.scores = torch.tensor([draw_score(rng) for _ in boxes], dtype=torch.float32)
        instances.pred_classes = torch.tensor(labels, dtype=torch.int64)
        outputs.append({"instances": instances})
    return outputs


class StableNumpy:
    """NumPy whose argsort keeps ties in their order, which by default depends on the processor."""

    def __getattr__(self, name):
        return getattr(np, name)

    @staticmethod
    def argsort(values):
        return np.argsort(values, kind="stable")


def detectron2_averages(name, dicts, outputs, monkeypatch):
    """AP50 of each class by Detectron2's evaluator, in percent."""
    found = {}
    original = pascal_voc_evaluation.voc_eval

    def record(*args, ovthresh, **options):
        result = original(*args, ovthresh=ovthresh, **options)
        if ovthresh == 0.5:
            found[args[3]] = result[2] * 100
        return result

    with monkeypatch.context() as patch, np.errstate(invalid="ignore"):
        patch.setattr(pascal_voc_evaluation, "voc_eval", record)
        patch.setattr(pascal_voc_evaluation, "np", StableNumpy())
        evaluator = PascalVOCDetectionEvaluator(name)
        evaluator.reset()
        evaluator.process(dicts, outputs)
        mean = evaluator.evaluate()["bbox"]["AP50"]
    assert mean == pytest.approx(np.mean(list(found.values())), nan_ok=True)
    return found


def our_entry(name, dicts, outputs):
    evaluator = IncrementalEvaluator.from_dataset(name, voc_metrics=True)
    evaluator.process(dicts, outputs)
    return evaluator.evaluate()


@pytest.mark.parametrize(("year", "seed"), list(itertools.product(YEARS, range(5))))
def test_each_class_has_the_average_of_detectron2s_evaluator(voc, monkeypatch, year, seed):
    """Scores of few values, so that there are ties; coordinates that its text files can hold."""
    name, metric = voc.format(year), YEARS[year]
    dicts = DatasetCatalog.get(name)
    outputs = predict(dicts, seed, lambda rng: rng.integers(1, 40) / 40, step=0.5)
    theirs = detectron2_averages(name, dicts, outputs, monkeypatch)
    entry = our_entry(name, dicts, outputs)
    # Cows are all difficult. Detectron2 has 0 or NaN of 0 objects; here such a class has no AP.
    assert not theirs.pop("cow") > 0
    assert entry["per_category"].pop("cow")[metric] is None
    assert 5 < min(theirs.values()) < max(theirs.values()) < 95
    ours = {key: scores[metric] for key, scores in entry["per_category"].items()}
    assert ours == pytest.approx(theirs, abs=1e-9)
    assert entry["all"][metric] == pytest.approx(np.mean(list(theirs.values())), abs=1e-9)


@pytest.mark.parametrize("year", YEARS)
def test_detectron2_rounds_predictions_and_ours_does_not(voc, monkeypatch, year):
    """Its files hold scores to 0.001 and coordinates to 0.1 pixel.

    Rounded in the same way, predictions of any precision give the same averages; without, close
    scores are ranked as they are.
    """
    name, metric = voc.format(year), YEARS[year]
    dicts = DatasetCatalog.get(name)
    outputs = predict(dicts, 7, lambda rng: 0.5 + rng.random() / 100, step=None)
    theirs = detectron2_averages(name, dicts, outputs, monkeypatch)
    del theirs["cow"]
    exact = our_entry(name, dicts, outputs)
    for output in outputs:
        found = output["instances"]
        found.pred_boxes.tensor.copy_((found.pred_boxes.tensor * 10).round() / 10)
        found.scores.copy_((found.scores * 1000).round() / 1000)
    rounded = our_entry(name, dicts, outputs)
    for key, value in theirs.items():
        assert rounded["per_category"][key][metric] == pytest.approx(value, abs=1e-6)
    assert exact["all"][metric] != pytest.approx(rounded["all"][metric], abs=1e-3)


# In a run's results


def test_every_group_has_the_mean_of_its_classes(voc):
    name = voc.format(2007)
    dicts = DatasetCatalog.get(name)
    outputs = predict(dicts, 3, lambda rng: rng.random(), step=None)
    data = read_dataset(name, trim=False)
    scenario = make_scenario([["cat", "cow"], ["bird"], ["boat"]], data)
    truth = GroundTruth.from_coco(data, np.arange(4))
    texts = [f"{image:06d}" for image in truth.image_ids]
    entries = []
    for phase in (1, 2, 3):
        evaluator = IncrementalEvaluator(truth, scenario, phase, voc_metrics=True, image_ids=texts)
        evaluator.process(dicts, outputs)
        entries.append(evaluator.evaluate())
    entry = entries[-1]
    assert list(entry["all"]) == [*METRICS, *VOC_METRICS]
    for metric in VOC_METRICS:
        cat, cow, bird, boat = (
            entry["per_category"][key][metric] for key in ("cat", "cow", "bird", "boat")
        )
        assert cow is None
        assert entry["new"][metric] == pytest.approx(boat)
        assert entry["old"][metric] == pytest.approx((cat + bird) / 2)
        assert entry["all"][metric] == pytest.approx((cat + bird + boat) / 3)
        assert [group[metric] for group in entry["groups"]] == pytest.approx([cat, bird, boat])
    # What was not asked for is not there, and the rest is the same.
    plain = IncrementalEvaluator(truth, scenario, 3, image_ids=texts)
    plain.process(dicts, outputs)
    kept = {key: value for key, value in entry["all"].items() if key not in VOC_METRICS}
    assert plain.evaluate()["all"] == kept


def test_domains_have_the_metrics_of_their_own_images_and_their_means():
    """Cats and a dog in fair weather, a cat in fog; one cat of two is found, and the one in fog.

    A false cat in fog outscores both hits. It halves the precision there and costs nothing in
    fair weather, where the dog is missed.
    """
    classes = (Category(1, "cat"), Category(2, "dog"))
    phases = (Phase(1, (0, 1), (), "fair"), Phase(2, (), (), "fog", refreshed=(0, 1)))
    scenario = Scenario("2 domains", "domains", classes, phases, "list", None, None, ())
    truth = GroundTruth(
        sources=(Source("fair", frozenset([0, 1])), Source("fog", frozenset([0, 1]))),
        image_sources=np.array([0, 1]),
        image_ids=np.array([1, 1]),
        images=np.array([0, 0, 0, 1]),
        labels=np.array([0, 0, 1, 0]),
        boxes=np.array([A, B, C, A], dtype=np.float64),
        areas=np.ones(4),
        crowd=np.zeros(4, dtype=bool),
    )
    found = {"fair": [(A, 0.8)], "fog": [(B, 0.9), (A, 0.7)]}
    inputs = [{"image_id": 1, "source": source} for source in found]
    outputs = [{"instances": cats(each)} for each in found.values()]
    entries = []
    for phase in (1, 2):
        evaluator = IncrementalEvaluator(truth, scenario, phase, voc_metrics=True)
        evaluator.process(inputs, outputs)
        entries.append(evaluator.evaluate())
    # Fair weather: half of the cats at a precision of 1, which is 6 of 11 recalls, and no dog.
    fair = {"VOC07": 100 * 6 / 11 / 2, "VOC12": 25.0}
    fog = {"VOC07": 50.0, "VOC12": 50.0}
    for entry, new in zip(entries, (fair, fog), strict=True):
        assert list(entry["all"]) == [*METRICS, *VOC_METRICS]
        assert voc_of(entry["new"]) == pytest.approx(new)
        assert voc_of(entry["domains"]["fair"]) == pytest.approx(fair)
        assert voc_of(entry["domains"]["fog"]) == pytest.approx(fog)  # the one to come, too
    first, last = entries
    assert first["old"] is None
    assert voc_of(first["all"]) == voc_of(last["old"]) == pytest.approx(fair)
    both = {"VOC07": (100 * 6 / 11 / 2 + 50) / 2, "VOC12": (25 + 50) / 2}
    assert voc_of(last["all"]) == pytest.approx(both)
    assert [voc_of(group)["VOC12"] for group in last["groups"]] == pytest.approx([25, 50])
    assert last["per_category"]["cat"]["VOC12"] == pytest.approx((50 + 50) / 2)
    assert last["per_category"]["cat"]["VOC07"] == pytest.approx((100 * 6 / 11 + 50) / 2)
    assert last["per_category"]["dog"]["VOC12"] == 0  # no dog in fog: that mean is of one domain
    assert to_scalars(last)["all/VOC12"] == pytest.approx(37.5)


def cats(found):
    """Detections of cats from (x y w h, score)."""
    boxes, scores = zip(*found, strict=True)
    corners = torch.tensor(boxes, dtype=torch.float32)
    corners[:, 2:] += corners[:, :2]
    labels = torch.zeros(len(scores), dtype=torch.int64)
    return Instances(
        (SIZE, SIZE), pred_boxes=Boxes(corners), scores=torch.tensor(scores), pred_classes=labels
    )


def voc_of(scores):
    return {metric: scores[metric] for metric in VOC_METRICS}


def test_results_tables_and_files_show_the_metrics(tmp_path):
    def scores(value):
        return {**dict.fromkeys(METRICS, value), "VOC07": value + 1, "VOC12": value + 2}

    phases = [
        {
            "phase": phase,
            "all": scores(50.0 - phase),
            "old": scores(40.0) if phase > 1 else None,
            "new": scores(30.0),
            "groups": [scores(60.0 - 10 * phase)] * phase,
            "per_category": {"cat": scores(20.0)},
        }
        for phase in (1, 2)
    ]
    results = summarise(phases, scenario="voc/19+1", method="cldetr")
    assert results["fpp"]["VOC07"] == 10.0
    header, *lines = format_table(results).splitlines()[1:]
    assert header.split()[-2:] == ["VOC07", "VOC12"]
    assert lines[0].split()[-2:] == ["50.0", "51.0"]
    assert max(map(len, lines)) <= 100
    write_results(results, tmp_path)
    assert json.loads((tmp_path / "results.json").read_text())["phases"][1]["new"]["VOC12"] == 32.0
    with open(tmp_path / "results.csv", newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert [row["VOC07"] for row in rows if row["name"] == "all"] == ["50.0", "49.0"]
