"""Views and their registration: one meaning per label, every image kept, one copy in memory."""

import json
import os
import pickle
import subprocess
import sys
from collections import Counter
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import numpy as np
import pytest
import torch
from detectron2.data import (
    DatasetCatalog,
    DatasetMapper,
    MetadataCatalog,
    build_detection_test_loader,
    get_detection_dataset_dicts,
)
from detectron2.data.datasets import register_coco_instances
from detectron2.data.datasets.coco import convert_to_coco_dict, load_coco_json
from detectron2.evaluation import COCOEvaluator
from detectron2.structures import Boxes, BoxMode, Instances
from PIL import Image
from torch.utils.data import DataLoader

from cldetr.data.catalog import (
    DataFile,
    base_data,
    register_exemplars,
    register_from_manifest,
    register_views,
    view_name,
)
from cldetr.data.coco import load_coco
from cldetr.data.manifest import save_manifest
from cldetr.data.sharing import share
from cldetr.data.views import View, evaluation_part
from cldetr.errors import InputError
from cldetr.scenario import BASE, make_scenario, make_separate_scenario

from ..coco_files import coco, random_coco, write

SHARED = Path(
    os.environ.get("CLDETR_SHARED_DATA", Path(__file__).resolve().parents[3] / "shared" / "data")
)
MINI = SHARED / "coco_mini" / "coco"


@pytest.fixture(autouse=True)
def _restore_catalogs():
    before = set(DatasetCatalog.keys()), set(MetadataCatalog.keys())
    yield
    for name in set(DatasetCatalog.keys()) - before[0]:
        DatasetCatalog.remove(name)
    for name in set(MetadataCatalog.keys()) - before[1]:
        MetadataCatalog.remove(name)


@pytest.fixture
def toy(tmp_path):
    content = random_coco(0, images=60)
    data = load_coco(write(tmp_path / "a.json", content), tmp_path / "images")
    return content, data, make_scenario("5+2+1", data, order="seed", class_seed=3)


def truth(content, image):
    """Category names and boxes of an image, as the file has them."""
    names = {category["id"]: category["name"] for category in content["categories"]}
    return [
        (names[ann["category_id"]], ann["bbox"], ann["iscrowd"])
        for ann in content["annotations"]
        if ann["image_id"] == image
    ]


def shown(view, entry):
    return [
        (view.categories[obj["category_id"]].name, obj["bbox"], obj["iscrowd"])
        for obj in entry["annotations"]
    ]


def parts_of(scenario):
    """Every kind of training view, by name, with the classes each image has annotated."""
    chosen = {phase.index: phase.image_ids[::3] for phase in scenario.phases[:2]}
    views = {f"phase{phase.index}": (phase.part(),) for phase in scenario.phases}
    views |= {f"joint{phase.index}": scenario.joint(phase.index) for phase in scenario.phases}
    return {**views, "exemplars": scenario.exemplars(chosen)}


def test_views_show_exactly_the_objects_of_their_classes_under_the_same_labels(toy):
    content, data, scenario = toy
    for parts in parts_of(scenario).values():
        view = View(scenario.categories, parts, {BASE: data})
        assert len(view) == sum(len(part.image_ids) for part in parts)
        ids = [image for part in parts for image in part.image_ids]
        assert view.image_ids.tolist() == ids
        entries = iter(view)
        for part in parts:
            names = {scenario.categories[label].name for label in part.classes}
            for image in part.image_ids:
                entry = next(entries)
                assert entry["image_id"] == image
                assert entry["phase"] == part.phase
                assert shown(view, entry) == [
                    row for row in truth(content, image) if row[0] in names
                ]
        assert next(entries, None) is None


def test_views_without_annotations_in_an_image_keep_the_image(toy):
    _, data, scenario = toy
    register_views(scenario, data, "kept")
    for phase in scenario.phases:
        name = view_name("kept", "phase", phase.index)
        for filter_empty in (True, False):
            view = get_detection_dataset_dicts(name, filter_empty=filter_empty)
            assert view.image_ids.tolist() == list(phase.image_ids)
    empty = [entry for entry in view if not entry["annotations"]]
    assert len(empty) > len(view) / 2  # one class of eight


def test_entries_are_detectron2s_own(toy):
    _, data, _ = toy
    every = evaluation_part(data, BASE, data.categories)
    view = View(data.categories, [every], {BASE: data})
    expected = load_coco_json(str(data.json_file), str(data.image_root), "views_own")
    by_id = {entry["image_id"]: entry for entry in expected}
    for index, entry in enumerate(view):
        assert {**entry, "source": 0, "phase": 0} == {
            **by_id[entry["image_id"]],
            "source": 0,
            "phase": 0,
        }
        assert view[index] == entry
    assert view[-1] == entry
    with pytest.raises(IndexError):
        view[len(view)]


def test_class_counts_are_the_counts(toy):
    _, data, scenario = toy
    for parts in parts_of(scenario).values():
        view = View(scenario.categories, parts, {BASE: data})
        indptr, labels, counts = view.class_counts()
        assert len(indptr) == len(view) + 1
        for index, entry in enumerate(view):
            row = slice(indptr[index], indptr[index + 1])
            expected = Counter(
                obj["category_id"] for obj in entry["annotations"] if not obj["iscrowd"]
            )
            assert dict(zip(labels[row].tolist(), counts[row].tolist(), strict=True)) == expected
            assert (np.diff(labels[row]) > 0).all()


def test_an_empty_view_has_nothing_in_it(toy):
    _, data, scenario = toy
    view = View(scenario.categories, [], {BASE: data})
    assert len(view) == 0
    assert view.image_ids.shape == (0,)
    assert view.sizes.shape == (0, 2)
    assert [array.tolist() for array in view.class_counts()] == [[0], [], []]


def test_separate_data_sets_meet_under_common_labels(tmp_path):
    first = coco(2, ("cat", "dog"), [(1, 1), (2, 2)])
    second = coco(2, ("bird", "cat"), [(1, 1), (2, 2), (2, 1)])  # ids collide, cat is known
    sets = [
        load_coco(write(tmp_path / f"{name}.json", content), tmp_path / name, name=name)
        for name, content in (("one", first), ("two", second))
    ]
    scenario = make_separate_scenario(sets)
    data = {one.name: one for one in sets}
    assert [category.name for category in scenario.categories] == ["cat", "dog", "bird"]
    phase2 = View(scenario.categories, [scenario.phase(2).part()], data)
    assert [[obj["category_id"] for obj in entry["annotations"]] for entry in phase2] == [[2], [2]]
    joint = View(scenario.categories, scenario.joint(), data)
    assert [[obj["category_id"] for obj in entry["annotations"]] for entry in joint] == [
        [0],
        [1],
        [2],
        [0, 2],
    ]
    assert [entry["file_name"] for entry in joint] == [
        str(tmp_path / "one" / "0001.jpg"),
        str(tmp_path / "one" / "0002.jpg"),
        str(tmp_path / "two" / "0001.jpg"),
        str(tmp_path / "two" / "0002.jpg"),
    ]


def test_evaluation_matches_categories_by_name(tmp_path):
    base = load_coco(write(tmp_path / "a.json", coco()), tmp_path)
    content = coco(2, ("bird", "cat", "dog"), [(1, 1), (2, 2)])  # the same names, other ids
    test = load_coco(write(tmp_path / "test.json", content), tmp_path)
    scenario = make_scenario("2+1", base)
    register_views(scenario, base, "names", evaluation=test)
    metadata = MetadataCatalog.get("cldetr/names/eval")
    assert metadata.thing_classes == ["cat", "dog", "bird"]
    assert metadata.thing_dataset_id_to_contiguous_id == {1: 2, 2: 0, 3: 1}
    view = DatasetCatalog.get("cldetr/names/eval")
    assert [shown(view, entry)[0][0] for entry in view] == ["bird", "cat"]
    strange = load_coco(write(tmp_path / "b.json", coco(categories=("cat", "dog", "emu"))), "x")
    with pytest.raises(InputError, match="emu"):
        register_views(scenario, base, "strange", evaluation={"b": strange})


def test_every_view_lists_all_categories_in_the_same_order(toy):
    _, data, scenario = toy
    names = register_views(scenario, data, "all", evaluation={"val": data})
    names.append(register_exemplars(scenario, data, "all", {1: scenario.phases[0].image_ids[:2]}))
    assert names == [
        *(f"cldetr/all/{kind}{i}" for i in (1, 2, 3) for kind in ("phase", "joint")),
        "cldetr/all/eval/val",
        "cldetr/all/exemplars1",
    ]
    for name in names:
        metadata = MetadataCatalog.get(name)
        assert metadata.thing_classes == [category.name for category in data.categories]
        assert metadata.thing_dataset_id_to_contiguous_id == {
            category.id: label for label, category in enumerate(data.categories)
        }


def test_registering_again_is_fine_unless_it_is_something_else(toy, tmp_path):
    _, data, scenario = toy
    first = register_views(scenario, data, "again", evaluation=data)
    view = DatasetCatalog.get(first[0])
    assert register_views(scenario, data, "again", evaluation=data) == first
    assert DatasetCatalog.get(first[0]) is view
    other = make_scenario("5+2+1", data, order="seed", class_seed=4)
    with pytest.raises(InputError, match="already stands for something else"):
        register_views(other, data, "again")
    ids = scenario.phases[0].image_ids
    register_exemplars(scenario, data, "again", {1: ids[:3]})
    register_exemplars(scenario, data, "again", {1: ids[:3]})
    with pytest.raises(InputError, match="already stands for something else"):
        register_exemplars(scenario, data, "again", {1: ids[:4]})


def test_the_file_is_read_when_a_view_is_asked_for_and_only_once(toy, tmp_path, monkeypatch):
    _, data, scenario = toy
    save_manifest(scenario, tmp_path / "manifest.json")
    reads = []

    def counted(*args, **options):
        reads.append(args)
        return load_coco(*args, **options)

    monkeypatch.setattr("cldetr.data.catalog.load_coco", counted)
    file = DataFile(str(data.json_file), str(data.image_root))
    assert register_from_manifest(tmp_path / "manifest.json", file, "lazy") == scenario
    assert reads == []
    views = [DatasetCatalog.get(f"cldetr/lazy/phase{i}") for i in (1, 2, 3)]
    again = DatasetCatalog.get("cldetr/lazy/joint3")
    assert len(reads) == 1
    assert [view.image_ids.tolist() for view in views] == [
        list(phase.image_ids) for phase in scenario.phases
    ]
    assert len(again) == 60


def test_a_file_other_than_the_manifests_is_refused(toy, tmp_path):
    content, data, scenario = toy
    save_manifest(scenario, tmp_path / "manifest.json")
    content["annotations"][0]["bbox"][0] += 1
    other = DataFile(str(write(tmp_path / "other.json", content)), str(data.image_root))
    register_from_manifest(tmp_path / "manifest.json", other, "other")
    with pytest.raises(InputError, match="was made from other data"):
        DatasetCatalog.get("cldetr/other/phase1")
    with pytest.raises(InputError, match="were not given"):
        register_views(scenario, {"elsewhere": data}, "missing")


def test_any_registered_coco_data_set_is_a_base(tmp_path):
    path = write(tmp_path / "a.json", coco())
    register_coco_instances("views_base", {}, str(path), str(tmp_path))
    data = base_data("views_base")
    assert (data.name, data.image_root) == ("views_base", tmp_path)
    assert base_data("views_base") is data  # read once
    write(path, coco(images=4))
    assert len(base_data("views_base").image_ids) == 4  # unless it changed
    with pytest.raises(InputError, match="do you mean coco_2017_train"):
        base_data("coco_2017_trian")
    DatasetCatalog.register("views_list", list)
    with pytest.raises(InputError, match="no COCO annotation file"):
        base_data("views_list")


@pytest.fixture
def pictures(tmp_path):
    """A data set with image files."""
    path = write(tmp_path / "a.json", coco(4, objects=[(1, 1), (1, 2), (2, 3), (4, 1)]))
    for i in range(1, 5):
        Image.new("RGB", (100, 80), (40 * i, 0, 0)).save(tmp_path / f"{i:04d}.jpg")
    return load_coco(path, tmp_path)


def test_detectron2s_test_loader_takes_a_registered_view(pictures):
    scenario = make_scenario("2+1", pictures)
    register_views(scenario, pictures, "loader", evaluation=pictures)
    mapper = DatasetMapper(is_train=False, augmentations=[], image_format="RGB")
    loader = build_detection_test_loader(DatasetCatalog.get("cldetr/loader/eval"), mapper=mapper)
    batches = list(loader)
    assert [batch[0]["image_id"] for batch in batches] == [1, 2, 3, 4]
    assert batches[3][0]["image"].shape == (3, 80, 100)


def test_detectron2s_evaluator_gives_perfect_detections_full_marks(pictures, tmp_path):
    scenario = make_scenario("2+1", pictures)
    register_views(scenario, pictures, "coco", evaluation=pictures)
    # A training view has no file of its own: the evaluator converts the view.
    for name in ("cldetr/coco/eval", "cldetr/coco/phase1"):
        view = DatasetCatalog.get(name)
        (tmp_path / os.path.dirname(name)).mkdir(parents=True, exist_ok=True)
        evaluator = COCOEvaluator(name, tasks=("bbox",), distributed=False, output_dir=tmp_path)
        evaluator.reset()
        for entry in view:
            found = Instances((80, 100))
            boxes = [
                BoxMode.convert(obj["bbox"], BoxMode.XYWH_ABS, BoxMode.XYXY_ABS)
                for obj in entry["annotations"]
            ]
            found.pred_boxes = Boxes(torch.tensor(boxes).reshape(-1, 4))
            found.pred_classes = torch.tensor(
                [obj["category_id"] for obj in entry["annotations"]], dtype=torch.long
            )
            found.scores = torch.ones(len(boxes))
            evaluator.process([entry], [{"instances": found}])
        assert evaluator.evaluate()["bbox"]["AP"] == pytest.approx(100.0)
        converted = convert_to_coco_dict(name)
        assert len(converted["annotations"]) == sum(len(entry["annotations"]) for entry in view)


def test_pickles_between_processes_carry_no_arrays(toy):
    _, data, scenario = toy
    view = View(scenario.categories, scenario.joint(), {BASE: data})
    before = list(view)
    buffer = bytes(ForkingPickler.dumps(view))
    assert data.boxes.tobytes() not in buffer
    restored = pickle.loads(buffer)
    assert list(restored) == before == list(view)
    boxes = restored._parts[0].data.boxes
    boxes[0, 0] = 33.0  # the very same memory
    assert data.boxes[0, 0] == 33.0
    assert share(data) is share(data)
    assert list(pickle.loads(pickle.dumps(view))) == list(view)


def _first(batch):
    return batch[0]


def test_spawned_workers_read_the_same_entries(toy):
    _, data, scenario = toy
    view = View(scenario.categories, [scenario.phase(1).part()], {BASE: data})
    loader = DataLoader(
        view, collate_fn=_first, num_workers=1, multiprocessing_context="spawn", shuffle=False
    )
    assert list(loader) == list(view)


def test_a_fresh_process_registers_from_the_manifest(toy, tmp_path):
    _, data, scenario = toy
    manifest = tmp_path / "manifest.json"
    save_manifest(scenario, manifest)
    code = (
        "import json, sys\n"
        "from detectron2.data import DatasetCatalog\n"
        "from cldetr.data.catalog import DataFile, register_from_manifest\n"
        "manifest, file, root, cache = sys.argv[1:]\n"
        "register_from_manifest(manifest, DataFile(file, root, cache_dir=cache), 'fresh')\n"
        "print(json.dumps(DatasetCatalog.get('cldetr/fresh/phase2').image_ids.tolist()))\n"
    )
    arguments = [str(manifest), str(data.json_file), str(data.image_root), str(tmp_path / "cache")]
    answer = subprocess.run(
        [sys.executable, "-c", code, *arguments], check=True, capture_output=True, text=True
    )
    assert json.loads(answer.stdout) == list(scenario.phases[1].image_ids)


@pytest.mark.data
@pytest.mark.skipif(not MINI.exists(), reason="needs a slice of COCO")
def test_a_slice_of_coco_goes_through_the_whole_chain():
    data = load_coco(MINI / "annotations" / "instances_train2017.json", MINI / "train2017")
    assert len(data.categories) == 80
    scenario = make_scenario("70+10", data, order="released")
    register_views(scenario, data, "mini")
    mapper = DatasetMapper(is_train=True, augmentations=[], image_format="RGB")
    view = DatasetCatalog.get("cldetr/mini/phase1")
    assert len(view) == 70
    mapped = mapper(next(entry for entry in view if entry["annotations"]))
    assert set(mapped["instances"].gt_classes.tolist()) <= set(scenario.phases[0].classes)
