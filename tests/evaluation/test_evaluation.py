"""Evaluation of a phase: groups, images, processes, and Detectron2's protocol."""

import json
import logging
import multiprocessing
from dataclasses import replace

import numpy as np
import pytest
import torch
from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.evaluation import COCOEvaluator, inference_on_dataset
from detectron2.evaluation.testing import flatten_results_dict
from detectron2.structures import Boxes, BoxMode, Instances
from PIL import Image

from cldetr.errors import InputError
from cldetr.evaluation.average_precision import METRICS, Detections, GroundTruth, Source
from cldetr.evaluation.evaluator import IncrementalEvaluator, to_scalars
from cldetr.scenario import Category, Phase, Scenario

from .coco_oracle import make_data, make_detections, run_pycocotools, to_coco_dict


def make_scenario(categories, *groups):
    return Scenario(
        name="test",
        protocol="strict",
        categories=tuple(categories),
        phases=tuple(Phase(i, group, ()) for i, group in enumerate(groups, start=1)),
        order="list",
        class_seed=None,
        data_seed=None,
        fingerprints=(),
    )


def to_instances(boxes, labels, scores):
    """Builds Instances from x y w h boxes."""
    instances = Instances((200, 200))
    corners = torch.as_tensor(np.asarray(boxes), dtype=torch.float32).reshape(-1, 4).clone()
    corners[:, 2:] += corners[:, :2]
    instances.pred_boxes = Boxes(corners)
    instances.scores = torch.as_tensor(np.asarray(scores), dtype=torch.float32)
    instances.pred_classes = torch.as_tensor(np.asarray(labels), dtype=torch.int64)
    return instances


def split_by_image(data, detections):
    """Returns [(input, output)] for every image, as Detectron2's loop passes them, shuffled."""
    batch = []
    for place, image_id in enumerate(np.sort(data.image_ids)):
        rows = detections.images == place
        instances = to_instances(
            detections.boxes[rows], detections.labels[rows], detections.scores[rows]
        )
        batch.append(({"image_id": int(image_id)}, {"instances": instances}))
    return [batch[i] for i in np.random.default_rng(0).permutation(len(batch))]


def evaluate(evaluator, batch):
    evaluator.reset()
    evaluator.process(*zip(*batch, strict=True))
    return evaluator.evaluate()


@pytest.fixture
def problem():
    """Six classes, the last without any object; arrival order differs from label order."""
    rng = np.random.default_rng(21)
    data = make_data(rng, images=25, classes=6, without=[5])
    scenario = make_scenario(data.categories, (4, 1), (5, 0), (3, 2))
    return data, make_detections(rng, data), scenario


@pytest.mark.parametrize("phase", [1, 2, 3])
def test_every_group_equals_pycocotools_with_cat_ids_restricted(problem, phase):
    data, detections, scenario = problem
    evaluator = IncrementalEvaluator(GroundTruth.from_coco(data, range(6)), scenario, phase)

    entry = evaluate(evaluator, split_by_image(data, detections))

    def expected(labels):
        return run_pycocotools(data, detections, labels=labels)[1]

    assert entry["phase"] == phase
    assert entry["all"] == expected(scenario.seen(phase))
    assert entry["old"] == (expected(scenario.old(phase)) if phase > 1 else None)
    assert entry["new"] == expected(scenario.phases[phase - 1].classes)
    assert entry["groups"] == [expected(p.classes) for p in scenario.phases[:phase]]
    assert entry["per_category"] == {
        f"class {label}": expected([label]) for label in scenario.seen(phase)
    }
    json.dumps(entry, allow_nan=False)


@pytest.fixture
def domains():
    """Two test sets of the same six classes with the same image ids, and detections on each."""
    rng = np.random.default_rng(8)
    sets = [make_data(rng, images=20, classes=6, without=[5]) for _ in range(2)]
    sets[1] = replace(sets[1], image_ids=sets[0].image_ids, name="fog")
    found = [make_detections(rng, data) for data in sets]
    scenario = make_scenario(sets[0].categories, range(6))
    later = Phase(2, (), (), "fog", refreshed=tuple(range(6)))
    phases = (*scenario.phases, later)
    return sets, found, replace(scenario, protocol="domains", phases=phases)


@pytest.mark.parametrize("phase", [1, 2])
def test_each_domain_equals_pycocotools_on_its_own_test_set(domains, phase):
    sets, found, scenario = domains
    truth = GroundTruth.join([GroundTruth.from_coco(data, range(6)) for data in sets])
    batch = []
    for data, detections in zip(sets, found, strict=True):
        for entry, output in split_by_image(data, detections):
            batch.append(({**entry, "source": data.name}, output))

    entry = evaluate(IncrementalEvaluator(truth, scenario, phase), batch)

    clear, fog = (run_pycocotools(*each)[1] for each in zip(sets, found, strict=True))
    assert clear["AP"] != fog["AP"]
    assert entry["domains"] == {"random": clear, "fog": fog}  # the one to come, too
    assert entry["groups"] == [clear, fog][:phase]
    assert entry["old"] == (None if phase == 1 else clear)
    assert entry["new"] == [clear, fog][phase - 1]
    for metric in METRICS:
        seen = [scores[metric] for scores in (clear, fog)[:phase]]
        assert entry["all"][metric] == pytest.approx(sum(seen) / phase)
    one = [run_pycocotools(*each, labels=[3])[1]["AP"] for each in zip(sets, found, strict=True)]
    assert entry["per_category"]["class 3"]["AP"] == pytest.approx(sum(one[:phase]) / phase)
    assert entry["per_category"]["class 5"]["AP"] is None
    assert to_scalars(entry)["group1/AP"] == clear["AP"]


def test_class_without_object_is_none_and_does_not_lower_its_group(problem):
    data, detections, scenario = problem
    evaluator = IncrementalEvaluator(GroundTruth.from_coco(data, range(6)), scenario, 2)

    entry = evaluate(evaluator, split_by_image(data, detections))

    assert entry["per_category"]["class 5"] == dict.fromkeys(METRICS)
    assert entry["new"] == entry["per_category"]["class 0"]


def test_detectron2_loop_gives_the_numbers_of_its_own_coco_evaluator(problem, tmp_path):
    data, detections, _ = problem
    rng = np.random.default_rng(3)
    # Off the grid and in single precision, as a detector's boxes are.
    boxes = detections.boxes + rng.normal(0, 3, detections.boxes.shape)
    boxes[:, 2:] = np.maximum(boxes[:, 2:], 1)
    scores = rng.random(len(boxes))
    detections = Detections(detections.images, detections.labels, boxes, scores)
    batch = split_by_image(data, detections)
    outputs = {source["image_id"]: output for source, output in batch}
    loader = [[source] for source, _ in batch]
    model = torch.nn.Module()
    model.forward = lambda inputs: [outputs[source["image_id"]] for source in inputs]

    (tmp_path / "truth.json").write_text(json.dumps(to_coco_dict(data)))
    metadata = MetadataCatalog.get("test_evaluation_random")
    metadata.json_file = str(tmp_path / "truth.json")
    metadata.thing_classes = [category.name for category in data.categories]
    metadata.thing_dataset_id_to_contiguous_id = {c.id: k for k, c in enumerate(data.categories)}
    try:
        peer = COCOEvaluator(
            "test_evaluation_random", tasks=("bbox",), distributed=False, use_fast_impl=False
        )
        expected = inference_on_dataset(model, loader, peer)["bbox"]
    finally:
        MetadataCatalog.remove("test_evaluation_random")

    scenario = make_scenario(data.categories, tuple(range(6)))
    ours = IncrementalEvaluator(GroundTruth.from_coco(data, range(6)), scenario, 1)
    entry = inference_on_dataset(model, loader, ours)

    assert entry["all"] == {metric: expected[metric] for metric in METRICS}
    assert 0 < entry["all"]["AP"] < 100
    for k in range(5):
        assert entry["per_category"][f"class {k}"]["AP"] == expected[f"AP-class {k}"]


def test_detections_of_classes_not_yet_seen_change_nothing(problem):
    data, detections, scenario = problem
    truth = GroundTruth.from_coco(data, range(6))
    seen = np.flatnonzero(np.isin(detections.labels, scenario.seen(1)))

    whole = evaluate(IncrementalEvaluator(truth, scenario, 1), split_by_image(data, detections))
    only = evaluate(
        IncrementalEvaluator(truth, scenario, 1), split_by_image(data, detections.take(seen))
    )

    assert whole == only


BOX = [20.0, 20.0, 100.0, 100.0]


@pytest.fixture
def two_images():
    """Class 0 on image 10, class 1 on image 20, and a detection of both classes on both."""
    truth = GroundTruth(
        sources=(Source("pets", frozenset({0, 1})),),
        image_sources=np.zeros(2, np.int64),
        image_ids=np.array([10, 20]),
        images=np.array([0, 1]),
        labels=np.array([0, 1]),
        boxes=np.array([BOX, BOX]),
        areas=np.array([1e4, 1e4]),
        crowd=np.zeros(2, bool),
    )
    scenario = make_scenario([Category(1, "cat"), Category(2, "dog")], (0,), (1,))
    batch = [
        ({"image_id": 10}, {"instances": to_instances([BOX, BOX], [0, 1], [0.8, 0.9])}),
        ({"image_id": 20}, {"instances": to_instances([BOX, BOX], [0, 1], [0.9, 0.8])}),
    ]
    return truth, scenario, batch


def test_restricted_images_spare_false_positives_on_images_without_the_group(two_images):
    truth, scenario, batch = two_images

    plain = evaluate(IncrementalEvaluator(truth, scenario, 2), batch)
    restricted = evaluate(IncrementalEvaluator(truth, scenario, 2, restrict_images=True), batch)

    # Each class has one hit below one better scored miss, on an image without that class.
    assert plain["old"]["AP"] == plain["new"]["AP"] == plain["all"]["AP"] == pytest.approx(50.0)
    assert restricted["old"]["AP"] == restricted["new"]["AP"] == pytest.approx(100.0)
    assert [group["AP"] for group in restricted["groups"]] == pytest.approx([100.0, 100.0])
    # Both images hold an object of a seen class.
    assert restricted["all"]["AP"] == pytest.approx(50.0)
    assert restricted["per_category"]["cat"]["AP"] == pytest.approx(50.0)


def test_restricted_groups_equal_pycocotools_with_cat_and_image_ids(problem):
    data, detections, scenario = problem
    truth = GroundTruth.from_coco(data, range(6))
    evaluator = IncrementalEvaluator(truth, scenario, 3, restrict_images=True)

    entry = evaluate(evaluator, split_by_image(data, detections))

    for labels, scores in (
        (scenario.seen(3), entry["all"]),
        (scenario.old(3), entry["old"]),
        ((3, 2), entry["new"]),
        ((4, 1), entry["groups"][0]),
    ):
        chosen = truth.image_ids[truth.images_with(labels)]
        assert scores == run_pycocotools(data, detections, labels, chosen)[1]


def test_image_passed_twice_counts_once(two_images):
    truth, scenario, batch = two_images
    once = evaluate(IncrementalEvaluator(truth, scenario, 2), batch)
    assert evaluate(IncrementalEvaluator(truth, scenario, 2), [*batch, batch[0]]) == once


def test_image_without_inference_is_warned_of_and_its_objects_are_missed(two_images, caplog):
    truth, scenario, batch = two_images
    with caplog.at_level(logging.WARNING, logger="cldetr"):
        entry = evaluate(IncrementalEvaluator(truth, scenario, 2), batch[:1])
    assert "1 of 2 images" in caplog.text
    assert entry["per_category"]["cat"]["AP"] == pytest.approx(100.0)
    assert entry["per_category"]["dog"]["AP"] == 0.0


def test_image_with_no_detection_at_all_is_evaluated(two_images):
    truth, scenario, batch = two_images
    empty = [(source, {"instances": to_instances([], [], [])}) for source, _ in batch]
    entry = evaluate(IncrementalEvaluator(truth, scenario, 2), empty)
    assert entry["all"]["AP"] == 0.0


def test_reset_forgets_earlier_predictions(two_images):
    truth, scenario, batch = two_images
    evaluator = IncrementalEvaluator(truth, scenario, 2)
    evaluator.process(*zip(*batch, strict=True))
    evaluator.reset()
    with pytest.raises(RuntimeError, match="no image"):
        evaluator.evaluate()


def test_image_unknown_to_the_ground_truth_is_refused(two_images):
    truth, scenario, batch = two_images
    with pytest.raises(InputError, match="image 30 of pets"):
        evaluate(IncrementalEvaluator(truth, scenario, 2), [({"image_id": 30}, batch[0][1])])


@pytest.mark.parametrize(("box", "score"), [([20, 20, float("nan"), 5], 0.5), (BOX, float("inf"))])
def test_detection_that_is_not_finite_stops_naming_the_image(two_images, box, score):
    truth, scenario, batch = two_images
    bad = [(batch[0][0], {"instances": to_instances([box], [0], [score])})]
    with pytest.raises(FloatingPointError, match="image 10 of pets"):
        evaluate(IncrementalEvaluator(truth, scenario, 2), bad)


def test_images_of_several_data_sets_are_told_apart_by_their_source(two_images):
    truth, scenario, batch = two_images
    street = GroundTruth(
        sources=(Source("street", frozenset({1})),),
        image_sources=truth.image_sources,
        image_ids=truth.image_ids,
        images=np.array([1]),
        labels=np.array([1]),
        boxes=truth.boxes[1:],
        areas=truth.areas[1:],
        crowd=truth.crowd[1:],
    )
    both = GroundTruth.join([truth, street])
    named = [
        ({**entry, "source": name}, out) for name in ("pets", "street") for entry, out in batch
    ]

    entry = evaluate(IncrementalEvaluator(both, scenario, 2), named)

    # Detections of a cat on the street's images are not judged: the numbers of "pets" alone.
    alone = evaluate(IncrementalEvaluator(truth, scenario, 2), batch)
    assert entry["per_category"]["cat"] == alone["per_category"]["cat"]
    with pytest.raises(InputError, match="image 10 of town"):
        evaluate(
            IncrementalEvaluator(both, scenario, 2),
            [({"image_id": 10, "source": "town"}, batch[0][1])],
        )


def test_categories_of_the_same_name_are_refused(two_images):
    truth, _, _ = two_images
    scenario = make_scenario([Category(1, "cat"), Category(2, "cat")], (0, 1))
    with pytest.raises(InputError, match="cat"):
        IncrementalEvaluator(truth, scenario, 1)


@pytest.mark.parametrize("phase", [0, 3])
def test_phase_outside_the_scenario_is_refused(two_images, phase):
    truth, scenario, _ = two_images
    with pytest.raises(ValueError, match=f"phase {phase}"):
        IncrementalEvaluator(truth, scenario, phase)


def test_scalars_are_numbers_that_detectron2s_eval_hook_accepts(problem):
    data, detections, scenario = problem
    evaluator = IncrementalEvaluator(GroundTruth.from_coco(data, range(6)), scenario, 2)
    entry = evaluate(evaluator, split_by_image(data, detections))
    entry["new"] = {**entry["new"], "APs": None}

    scalars = to_scalars(entry)

    assert flatten_results_dict(scalars) == scalars
    assert all(isinstance(value, float) for value in scalars.values())
    assert scalars["old/AP50"] == entry["old"]["AP50"]
    assert scalars["group2/AP"] == entry["groups"][1]["AP"]
    assert "new/APs" not in scalars


def evaluate_share(folder, rank, truth, scenario, batch):
    """What one of two processes does that evaluate half of the images each."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2
    )
    # One image goes to both, as samplers do that pad to equal lengths.
    half = len(batch) // 2
    share = batch[: half + 1] if rank == 0 else batch[half:]
    found = evaluate(IncrementalEvaluator(truth, scenario, 3), share)
    (folder / f"rank{rank}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


def test_two_processes_gather_to_the_result_of_one(problem, tmp_path):
    data, detections, scenario = problem
    truth = GroundTruth.from_coco(data, range(6))
    batch = split_by_image(data, detections)
    expected = evaluate(IncrementalEvaluator(truth, scenario, 3), batch)

    fork = multiprocessing.get_context("fork")
    processes = [
        fork.Process(target=evaluate_share, args=(tmp_path, rank, truth, scenario, batch))
        for rank in (0, 1)
    ]
    for process in processes:
        process.start()
    try:
        for process in processes:
            process.join(timeout=120)
        assert [process.exitcode for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()

    assert json.loads((tmp_path / "rank0.json").read_text()) == expected
    assert json.loads((tmp_path / "rank1.json").read_text()) == {}


@pytest.mark.parametrize("names", [("img_a", "img_b"), ("0007", "0005"), (7, 5)])
def test_a_registered_data_set_names_its_images_and_orders_them_as_it_likes(tmp_path, names):
    boxes = {names[0]: [5, 5, 20, 20], names[1]: [10, 12, 39, 30]}
    dicts = [
        {
            "file_name": str(tmp_path / f"{name}.png"),
            "image_id": name,
            "height": 40,
            "width": 40,
            "annotations": [{"bbox": box, "bbox_mode": BoxMode.XYXY_ABS, "category_id": 0}],
        }
        for name, box in boxes.items()
    ]
    for entry in dicts:
        Image.new("RGB", (40, 40)).save(entry["file_name"])
    registered = f"own_ids_{names[0]}_{type(names[0]).__name__}"
    DatasetCatalog.register(registered, lambda: dicts)
    MetadataCatalog.get(registered).thing_classes = ["thing"]
    evaluator = IncrementalEvaluator.from_dataset(registered)
    for name in reversed(names):
        found = Instances((40, 40))
        found.pred_boxes = Boxes(torch.tensor([boxes[name]]).float())
        found.scores, found.pred_classes = torch.tensor([0.9]), torch.tensor([0])
        evaluator.process([{"image_id": name}], [{"instances": found}])
    assert evaluator.evaluate()["all"]["AP"] == pytest.approx(100.0)
