"""Data sets by name: what may be read, and what a run registers for Detectron2's own tools."""

import importlib.util
import json
import os
import sys
import types
from dataclasses import replace
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
from detectron2.data.datasets.builtin import register_all_pascal_voc
from detectron2.data.datasets.pascal_voc import CLASS_NAMES
from detectron2.evaluation import COCOEvaluator
from detectron2.structures import Boxes, BoxMode, Instances
from PIL import Image

from cldetr.config import load_config
from cldetr.data.coco import load_coco
from cldetr.data.datasets import (
    READERS,
    read_dataset,
    register_exemplars,
    register_replay,
    register_views,
    unregister_views,
    view_name,
)
from cldetr.data.registered import data_from_dicts
from cldetr.data.scan import scan_images
from cldetr.engine import IncrementalTrainer
from cldetr.engine.rundata import RunData
from cldetr.errors import InputError
from cldetr.evaluation.evaluator import IncrementalEvaluator
from cldetr.report.pages import write_run_page
from cldetr.report.rundir import read_run
from cldetr.scenario import BASE, make_scenario, make_separate_scenario

from ..coco_files import coco, random_coco, write


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
    data = load_coco(write(tmp_path / "a.json", random_coco(0, images=60)), tmp_path / "images")
    return data, make_scenario("5+2+1", data, order="seed", class_seed=3)


def draw_images(folder, number, size=(100, 80)):
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(1, number + 1):
        Image.new("RGB", size, (20 * i, 0, 0)).save(folder / f"{i:04d}.jpg")


@pytest.fixture
def pictures(tmp_path):
    """A data set with image files."""
    objects = [(image, category) for image in range(1, 6) for category in (1, 2, 3)]
    path = write(tmp_path / "a.json", coco(6, objects=objects))
    draw_images(tmp_path, 6)
    return load_coco(path, tmp_path)


def entry(folder, index, **changes):
    """An entry as a registered function returns it."""
    annotation = {"bbox": [5, 6, 25, 36], "bbox_mode": BoxMode.XYXY_ABS, "category_id": index % 2}
    values = {
        "file_name": str(folder / f"{index + 1:04d}.jpg"),
        "image_id": index + 1,
        "height": 80,
        "width": 100,
        "annotations": [annotation],
    }
    return values | changes


def register(name, entries, classes=("cat", "dog")):
    DatasetCatalog.register(name, lambda: entries)
    MetadataCatalog.get(name).set(thing_classes=list(classes))


# What may be read


def test_a_file_with_its_image_folder_is_read(tmp_path):
    path = write(tmp_path / "a.json", coco())
    data = read_dataset(f"{path}:{tmp_path / 'images'}")
    assert (data.name, data.json_file, data.image_root) == ("a", path, tmp_path / "images")


def test_a_registered_coco_file_is_read_by_its_name(tmp_path):
    path = write(tmp_path / "a.json", coco())
    register_coco_instances("datasets_coco", {}, str(path), str(tmp_path))
    data = read_dataset("datasets_coco")
    assert (data.name, data.json_file, data.image_root) == ("datasets_coco", path, tmp_path)
    assert data.fingerprint == load_coco(path, tmp_path).fingerprint
    path.unlink()
    with pytest.raises(InputError, match=r"no annotation file .*a\.json.*DETECTRON2_DATASETS"):
        read_dataset("datasets_coco")


def test_a_name_that_is_not_registered_gets_suggestions():
    with pytest.raises(InputError, match=r"'coco_2017_trian'.*do you mean coco_2017_train"):
        read_dataset("coco_2017_trian")
    with pytest.raises(InputError, match=r"'xyzzy'.*register it first.*ANNOTATIONS.json:IMAGE"):
        read_dataset("xyzzy")


def test_a_file_without_an_image_folder_is_told_how_to_name_it():
    with pytest.raises(InputError, match=r"write some/a\.json:IMAGE_FOLDER"):
        read_dataset("some/a.json")


def test_a_wrong_image_folder_is_one_line(pictures, tmp_path):
    data = replace(pictures, image_root=tmp_path / "elsewhere")
    with pytest.raises(InputError, match=r"none of its 6 image files is in .*elsewhere.*0001\.jpg"):
        scan_images(data)
    (tmp_path / "0002.jpg").unlink()
    with pytest.raises(InputError, match=r"1 of 6 image files cannot be used:\n.*0002\.jpg"):
        scan_images(pictures)


def test_another_format_takes_a_reader_in_the_table(tmp_path, monkeypatch):
    def read_csv(path, **options):
        dicts = []
        for index, line in enumerate(Path(path).read_text().splitlines()):
            file_name, category, *box = line.split(",")
            annotation = {"bbox": [*map(float, box)], "bbox_mode": BoxMode.XYXY_ABS}
            annotation["category_id"] = ["cat", "dog"].index(category)
            changes = {"file_name": tmp_path / file_name, "annotations": [annotation]}
            dicts.append(entry(tmp_path, index, **changes))
        return data_from_dicts(path, dicts, ["cat", "dog"], **options)

    monkeypatch.setitem(READERS, "csv", read_csv)
    path = write(tmp_path / "a.csv", "x.jpg,dog,1,2,30,40\ny.jpg,cat,-5,2,30,40\n")
    data = read_dataset(f"csv:{path}")
    assert data.boxes.tolist() == [[1, 2, 29, 38], [0, 2, 30, 38]]
    assert data.image_path(0) == tmp_path / "x.jpg"
    with pytest.raises(InputError, match=r"other formats as voc:…, yolo:…, csv:…"):
        read_dataset("cvs:a.csv")


def test_a_registered_function_is_called(tmp_path):
    entries = [entry(tmp_path, i) for i in range(3)]
    entries[1]["annotations"] = []
    entries[2]["annotations"][0] |= {"bbox": np.array([1, 2, 3, 4]), "bbox_mode": BoxMode.XYWH_ABS}
    entries[2]["annotations"][0] |= {"iscrowd": 1, "area": 5.5}
    register("datasets_list", entries)
    data = read_dataset("datasets_list")
    assert [category.name for category in data.categories] == ["cat", "dog"]
    assert data.image_ids.tolist() == [1, 2, 3]
    assert data.boxes.tolist() == [[5, 6, 20, 30], [1, 2, 3, 4]]
    assert (data.labels.tolist(), data.starts.tolist()) == ([0, 0], [0, 1, 1, 2])
    assert (data.areas.tolist(), data.crowd.tolist()) == ([600, 5.5], [False, True])
    assert data.image_path(2) == tmp_path / "0003.jpg"
    assert data.fingerprint == read_dataset("datasets_list").fingerprint
    entries[0]["annotations"][0]["bbox"][0] = 4
    assert data.fingerprint != read_dataset("datasets_list").fingerprint


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda e: "text", r"entry 1 is a string\. Fix: write each entry as"),
        (
            lambda e: {k: v for k, v in e.items() if k != "height"},
            r"entry 1: height\. Fix: add",
        ),
        (lambda e: e | {"width": "wide"}, r"integers \(1\): entry 1: width is 'wide'\. Fix: write"),
        (lambda e: e | {"file_name": None}, r"entry 1: file_name is None\. Fix: write"),
        (lambda e: e | {"annotations": None}, r"entry 1: None\. Fix: return a list"),
        (
            lambda e: e | {"annotations": [3]},
            r"entry 1, annotation 0 is a number",
        ),
        (lambda e: e | {"image_id": 1}, r"image ids are used more than once \(1\): entry 1\. Fix"),
    ],
)
def test_a_malformed_entry_is_named_with_its_key_and_the_fix(tmp_path, change, expected):
    entries = [entry(tmp_path, i) for i in range(3)]
    entries[1] = change(entries[1])
    register("datasets_bad", entries)
    with pytest.raises(InputError, match=expected):
        read_dataset("datasets_bad")


@pytest.mark.parametrize(
    ("key", "value", "fix"),
    [
        ("bbox", [1, 2, 3], "correct them, or drop"),
        ("bbox", ["a", 2, 3, 4], "correct them, or drop"),
        ("bbox_mode", None, "convert them with BoxMode"),
        ("bbox_mode", BoxMode.XYWHA_ABS, "convert them with BoxMode"),
        ("category_id", 2, "give an index, from 0"),
        ("category_id", "cat", "give an index, from 0"),
        ("iscrowd", 2, "write 0 or 1"),
        ("area", -1, "correct or omit it"),
    ],
)
def test_a_malformed_annotation_is_named_with_its_key_and_the_fix(tmp_path, key, value, fix):
    entries = [entry(tmp_path, i) for i in range(3)]
    entries[2]["annotations"][0][key] = value
    register("datasets_bad", entries)
    with pytest.raises(InputError, match=rf"\(1\): entry 2, annotation 0: .*Fix: {fix}"):
        read_dataset("datasets_bad")


def test_boxes_that_make_no_sense_stop_or_are_dropped(tmp_path):
    entries = [entry(tmp_path, i) for i in range(3)]
    entries[0]["annotations"][0]["bbox"] = [5, 6, float("nan"), 9]
    register("datasets_nan", entries)
    with pytest.raises(InputError, match="finite numbers"):
        read_dataset("datasets_nan")
    assert read_dataset("datasets_nan", bad_boxes="drop").report.dropped_bad == 1


def test_a_function_that_fails_returns_nothing_or_names_no_categories_is_reported(tmp_path):
    def fail():
        raise KeyError("surprise")

    DatasetCatalog.register("datasets_fail", fail)
    with pytest.raises(InputError, match=r"'datasets_fail' failed: KeyError: 'surprise'; fix it"):
        read_dataset("datasets_fail")
    register("datasets_empty", [])
    with pytest.raises(InputError, match="returns no image"):
        read_dataset("datasets_empty")
    DatasetCatalog.register("datasets_nameless", lambda: [entry(tmp_path, 0)])
    with pytest.raises(InputError, match=r"set MetadataCatalog.*thing_classes"):
        read_dataset("datasets_nameless")


def register_voc(root):
    """What Detectron2 does with DETECTRON2_DATASETS when it is imported."""
    for name in [name for name in DatasetCatalog.list() if name.startswith("voc_")]:
        DatasetCatalog.remove(name)
        MetadataCatalog.remove(name)
    register_all_pascal_voc(str(root))


@pytest.fixture
def voc(tmp_path):
    """Detectron2's built-in data sets of Pascal VOC 2007, of a few images."""
    root = tmp_path / "VOC2007"
    for folder in ("Annotations", "ImageSets/Main", "JPEGImages"):
        (root / folder).mkdir(parents=True)
    names = [f"{index:06d}" for index in range(5, 45)]
    for index, name in enumerate(names):
        Image.new("RGB", (100, 80)).save(root / "JPEGImages" / f"{name}.jpg")
        (root / "Annotations" / f"{name}.xml").write_text(
            "<annotation><size><width>100</width><height>80</height></size>"
            f"<object><name>{CLASS_NAMES[index % 20]}</name><bndbox><xmin>11</xmin><ymin>6</ymin>"
            "<xmax>40</xmax><ymax>80</ymax></bndbox></object></annotation>"
        )
    for split, chosen in (("trainval", names), ("test", names[:4])):
        (root / "ImageSets" / "Main" / f"{split}.txt").write_text("\n".join(chosen))
    register_voc(tmp_path)
    yield root
    register_voc(Path(os.environ.get("DETECTRON2_DATASETS", "datasets")))


def test_detectron2s_built_in_pascal_voc_is_read(voc):
    data = read_dataset("voc_2007_trainval")
    assert [category.name for category in data.categories] == list(CLASS_NAMES)
    assert data.image_ids.tolist() == list(range(5, 45))
    assert data.labels.tolist() == [*range(20), *range(20)]
    assert data.boxes[0].tolist() == [10, 5, 30, 75]
    assert data.image_path(0) == voc / "JPEGImages" / "000005.jpg"
    with pytest.raises(InputError, match=r"voc_2012_trainval.*DETECTRON2_DATASETS.*trainval.txt"):
        read_dataset("voc_2012_trainval")


def test_detectron2s_pascal_voc_keeps_difficult_objects_apart(voc):
    """Its own loader trains on them and drops the flag; VOC's metrics need it."""
    file = voc / "Annotations" / "000006.xml"
    text = file.read_text().replace("<bndbox>", "<difficult>1</difficult><bndbox>")
    file.write_text(text)
    assert np.flatnonzero(read_dataset("voc_2007_trainval").crowd).tolist() == [1]
    test = read_dataset("voc_2007_test")  # shows four categories, has twenty
    assert [category.name for category in test.categories] == list(CLASS_NAMES)
    file.write_text(text.replace("bicycle", "tricycle"))
    with pytest.raises(InputError, match=r"category names are not among .*'tricycle'"):
        read_dataset("voc_2007_test")


def test_a_run_trains_and_tests_on_pascal_voc(voc, tmp_path):
    options = {"DATASETS.TRAIN": "[voc_2007_trainval]", "DATASETS.TEST": "[voc_2007_test]"}
    options |= {"SCENARIO.NAME": "voc/15+5", "SCENARIO.PROTOCOL": "traditional"}
    options |= {"TEST.VOC_METRICS": "True", "OUTPUT_DIR": str(tmp_path / "run")}
    config = Path(__file__).parents[1] / "engine" / "tiny.yaml"
    overrides = [word for pair in options.items() for word in pair]
    IncrementalTrainer(load_config(str(config), overrides)).train()
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert [len(phase["per_category"]) for phase in results["phases"]] == [15, 20]
    assert results["scenario"] == "voc/15+5"
    assert {"VOC07", "VOC12"} <= results["phases"][1]["all"].keys() & results["fpp"].keys()
    page = write_run_page(read_run(tmp_path / "run"), tmp_path / "page").read_text()
    assert ">VOC07</th>" in page
    assert "as Pascal VOC does" in page


def test_a_published_scenario_divides_one_data_set(voc, tmp_path):
    options = {"DATASETS.TRAIN": "[voc_2007_trainval, voc_2007_test]"}
    options |= {"DATASETS.TEST": "[voc_2007_test]", "OUTPUT_DIR": str(tmp_path / "run")}
    options |= {"SCENARIO.NAME": "voc/15+5", "SCENARIO.PROTOCOL": "traditional"}
    config = Path(__file__).parents[1] / "engine" / "tiny.yaml"
    overrides = [word for pair in options.items() for word in pair]
    with pytest.raises(InputError, match=r"voc/15\+5 divides one data set, but .* has 2"):
        RunData(load_config(str(config), overrides))


# What a run registers


def test_every_view_lists_all_categories_in_the_same_order(toy):
    data, scenario = toy
    names = register_views(scenario, {BASE: data}, {BASE: data}, "all")
    chosen = {1: scenario.phases[0].image_ids[:2]}
    names += register_exemplars(scenario, {BASE: data}, "all", chosen)
    kinds = ("phase", "joint", "revealed")
    assert names == [
        *(f"cldetr/all/{kind}{i}" for i in (1, 2, 3) for kind in kinds),
        *(f"cldetr/all/test{i}" for i in (1, 2, 3)),
        "cldetr/all/exemplars1",
        "cldetr/all/exemplars1_revealed",
    ]
    for name in names:
        metadata = MetadataCatalog.get(name)
        assert metadata.thing_classes == [category.name for category in data.categories]
        assert metadata.thing_dataset_id_to_contiguous_id == {
            category.id: label for label, category in enumerate(data.categories)
        }


def test_test_views_show_the_classes_seen_so_far_on_all_images(toy):
    data, scenario = toy
    register_views(scenario, {BASE: data}, {"val": data}, "seen")
    for phase in scenario.phases:
        view = DatasetCatalog.get(view_name("seen", "test", phase.index))
        assert view.image_ids.tolist() == data.image_ids.tolist()
        labels = {obj["category_id"] for entry in view for obj in entry["annotations"]}
        assert labels == set(scenario.seen(phase.index))


def test_images_without_annotations_are_kept(toy):
    data, scenario = toy
    register_views(scenario, {BASE: data}, {BASE: data}, "kept")
    for phase in scenario.phases:
        name = view_name("kept", "phase", phase.index)
        for filter_empty in (True, False):
            view = get_detection_dataset_dicts(name, filter_empty=filter_empty)
            assert view.image_ids.tolist() == list(phase.image_ids)
    empty = [entry for entry in view if not entry["annotations"]]
    assert len(empty) > len(view) / 2  # one class of eight


def test_evaluation_matches_categories_by_name(tmp_path, caplog):
    base = load_coco(write(tmp_path / "a.json", coco()), tmp_path)
    content = coco(2, ("bird", "cat", "dog"), [(1, 1), (2, 2)])  # the same names, other ids
    test = load_coco(write(tmp_path / "test.json", content), tmp_path)
    scenario = make_scenario("2+1", base)
    register_views(scenario, {BASE: base}, {BASE: test}, "names")
    metadata = MetadataCatalog.get("cldetr/names/test2")
    assert metadata.thing_classes == ["cat", "dog", "bird"]
    assert metadata.thing_dataset_id_to_contiguous_id == {1: 2, 2: 0, 3: 1}
    view = DatasetCatalog.get("cldetr/names/test2")
    assert [entry["annotations"][0]["category_id"] for entry in view] == [2, 0]
    emu = load_coco(write(tmp_path / "b.json", coco(categories=("cat", "dog", "emu"))), "x")
    with pytest.raises(InputError, match="emu"):
        register_views(scenario, {BASE: base}, {"b": emu}, "strange")


def test_registering_again_is_fine_unless_it_is_something_else(toy):
    data, scenario = toy
    sets = {BASE: data}
    first = register_views(scenario, sets, sets, "again")
    view = DatasetCatalog.get(first[0])
    assert register_views(scenario, sets, sets, "again") == first
    assert DatasetCatalog.get(first[0]) is view
    other = make_scenario("5+2+1", data, order="seed", class_seed=4)
    with pytest.raises(InputError, match="already registered with other content"):
        register_views(other, sets, sets, "again")
    ids = scenario.phases[0].image_ids
    register_exemplars(scenario, sets, "again", {1: ids[:3]})
    register_exemplars(scenario, sets, "again", {1: ids[:3]})
    with pytest.raises(InputError, match="already registered with other content"):
        register_exemplars(scenario, sets, "again", {1: ids[:4]})
    with pytest.raises(InputError, match="no exemplars"):
        register_exemplars(scenario, sets, "again", {})
    register_views(scenario, sets, sets, "again2")
    unregister_views("again")
    left = [name for name in DatasetCatalog.list() if name.startswith("cldetr/again")]
    assert all(name.startswith("cldetr/again2/") for name in left)
    register_views(other, sets, sets, "again")


# Detectron2's own tools on what was registered


def register_everything(scenario, train, test, prefix):
    names = register_views(scenario, train, test, prefix)
    chosen = {phase.index: phase.image_ids[:2] for phase in scenario.phases}
    return [*names, *register_exemplars(scenario, train, prefix, chosen)]


def detections(entry, drop=None, extra=None):
    """Instances that repeat an entry's annotations, but for a label to drop and one to add."""
    kept = [obj for obj in entry["annotations"] if obj["category_id"] != drop]
    boxes = [BoxMode.convert(obj["bbox"], obj["bbox_mode"], BoxMode.XYXY_ABS) for obj in kept]
    labels = [obj["category_id"] for obj in kept]
    if extra is not None:
        boxes, labels = [*boxes, [1.0, 2.0, 30.0, 40.0]], [*labels, extra]
    found = Instances((entry["height"], entry["width"]))
    found.pred_boxes = Boxes(torch.tensor(boxes).reshape(-1, 4))
    found.pred_classes = torch.tensor(labels, dtype=torch.long)
    found.scores = torch.linspace(1, 0.5, len(boxes))
    return [{"instances": found}]


def run_evaluator(evaluator, view, **changes):
    evaluator.reset()
    for entry in view:
        evaluator.process([entry], detections(entry, **changes))
    return evaluator.evaluate()


def coco_evaluator(name, folder):
    return COCOEvaluator(name, tasks=("bbox",), distributed=False, output_dir=str(folder))


def test_detectron2s_visualizer_draws_every_view(pictures, monkeypatch):
    if importlib.util.find_spec("cv2") is None:  # imported for masks, which are not drawn here
        monkeypatch.setitem(sys.modules, "cv2", types.ModuleType("cv2"))
    from detectron2.utils.visualizer import Visualizer

    scenario = make_scenario("2+1", pictures)
    sets = {BASE: pictures}
    for name in register_everything(scenario, sets, sets, "draw"):
        entry = next(entry for entry in DatasetCatalog.get(name) if entry["annotations"])
        image = np.asarray(Image.open(entry["file_name"]))
        visualizer = Visualizer(image, MetadataCatalog.get(name))
        drawn = visualizer.draw_dataset_dict(entry).get_image()
        assert drawn.shape == image.shape
        assert (drawn != image).any()
        names = {text.get_text() for text in visualizer.output.ax.texts}
        assert names == {
            scenario.categories[obj["category_id"]].name for obj in entry["annotations"]
        }


def test_detectron2s_evaluator_gives_perfect_detections_full_marks_on_every_view(
    pictures, tmp_path
):
    scenario = make_scenario("2+1", pictures)
    sets = {BASE: pictures}
    for name in register_everything(scenario, sets, sets, "marks"):
        view = DatasetCatalog.get(name)
        result = run_evaluator(coco_evaluator(name, tmp_path), view)
        assert result["bbox"]["AP"] == pytest.approx(100.0), name


def test_detectron2s_evaluator_agrees_with_ours_in_every_phase(pictures, tmp_path):
    scenario = make_scenario("1+1+1", pictures)
    register_views(scenario, {BASE: pictures}, {BASE: pictures}, "agree")
    read_file = []
    for phase in scenario.phases:
        name = view_name("agree", "test", phase.index)
        read_file.append(hasattr(MetadataCatalog.get(name), "json_file"))
        view = DatasetCatalog.get(name)
        # False positives, misses, and detections of a class that is not to be judged yet.
        for changes in ({"extra": 2}, {"extra": 0}, {"drop": 0, "extra": 1}):
            theirs = run_evaluator(coco_evaluator(name, tmp_path), view, **changes)["bbox"]
            ours = run_evaluator(IncrementalEvaluator.from_dataset(name), view, **changes)
            assert ours["all"]["AP"] == pytest.approx(theirs["AP"])
    assert read_file == [False, False, True]  # once all classes are seen, the file itself


def test_detectron2s_evaluator_takes_test_data_that_lack_a_category(pictures, tmp_path, caplog):
    content = coco(4, ("dog", "bird"), [(1, 1), (2, 2), (4, 1)])
    test = load_coco(write(tmp_path / "test.json", content), tmp_path)
    scenario = make_scenario("2+1", pictures)
    register_views(scenario, {BASE: pictures}, {BASE: test}, "lack")
    assert "lacks categories, their AP cannot be measured: ['cat']" in caplog.text
    name = view_name("lack", "test", 2)
    result = run_evaluator(coco_evaluator(name, tmp_path), DatasetCatalog.get(name), extra=0)
    assert result["bbox"]["AP"] == pytest.approx(100.0)


def test_functions_and_pascal_voc_go_all_the_way_to_detectron2s_evaluator(voc, tmp_path):
    draw_images(tmp_path, 4)
    register("datasets_own", [entry(tmp_path, i) for i in range(4)])
    for name in ("datasets_own", "voc_2007_trainval"):
        data = read_dataset(name)
        scenario = make_separate_scenario([data])
        sets = {data.name: data}
        for view in register_everything(scenario, sets, sets, name):
            result = run_evaluator(coco_evaluator(view, tmp_path), DatasetCatalog.get(view))
            assert result["bbox"]["AP"] == pytest.approx(100.0)
        # On the data set itself, too; after that it is read as before.
        evaluator = coco_evaluator(name, tmp_path)
        result = run_evaluator(evaluator, DatasetCatalog.get(name))
        assert result["bbox"]["AP"] == pytest.approx(100.0)
        assert read_dataset(name).fingerprint == data.fingerprint
        ours = run_evaluator(IncrementalEvaluator.from_dataset(name), DatasetCatalog.get(name))
        assert ours["all"]["AP"] == pytest.approx(100.0)


def test_detectron2s_test_loader_takes_a_registered_view(pictures):
    scenario = make_scenario("2+1", pictures)
    register_views(scenario, {BASE: pictures}, {BASE: pictures}, "loader")
    mapper = DatasetMapper(is_train=False, augmentations=[], image_format="RGB")
    loader = build_detection_test_loader(DatasetCatalog.get("cldetr/loader/test1"), mapper=mapper)
    batches = list(loader)
    assert [batch[0]["image_id"] for batch in batches] == [1, 2, 3, 4, 5, 6]
    assert batches[3][0]["image"].shape == (3, 80, 100)


def test_images_without_any_annotation_can_be_skipped_in_training(tmp_path):
    content = random_coco(0, images=60)
    bare = {image["id"] for image in content["images"][::5]}
    content["annotations"] = [x for x in content["annotations"] if x["image_id"] not in bare]
    data = load_coco(write(tmp_path / "a.json", content), tmp_path / "images")
    annotated = {x["image_id"] for x in content["annotations"]}
    scenario = make_scenario("5+3", data, order="released")
    register_views(scenario, {BASE: data}, {BASE: data}, "all")
    register_views(scenario, {BASE: data}, {BASE: data}, "some", skip_empty=True)
    memory = {1: scenario.phases[0].image_ids[:3]}
    register_replay(scenario, {BASE: data}, "some", 2, memory, skip_empty=True)

    def images(name):
        return {x["image_id"] for x in DatasetCatalog.get(f"cldetr/{name}")}

    for phase in scenario.phases:
        assert images(f"all/phase{phase.index}") == set(phase.image_ids)
        # An image with objects of the other phase alone stays.
        assert images(f"some/phase{phase.index}") == set(phase.image_ids) & annotated
        assert images(f"some/test{phase.index}") == set(data.image_ids.tolist())
    assert images("some/replay2") == set(scenario.phases[1].image_ids) & annotated | set(memory[1])
