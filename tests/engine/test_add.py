"""New categories for a trained detector, from their data alone."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from detectron2.data import DatasetCatalog

from cldetr import cli
from cldetr.config import load_config
from cldetr.config_files import find_config
from cldetr.engine.checkpoint import load_state, save_state
from cldetr.engine.plan import make_plan
from cldetr.engine.rundata import RunData
from cldetr.engine.trainer import IncrementalTrainer
from cldetr.errors import InputError
from cldetr.report.after_run import show_run
from cldetr.report.rundir import read_run

from .conftest import TINY, train

SHORT = [
    *("SCHEDULE.TRAIN.EPOCHS", "1", "SCHEDULE.TRAIN.MIN_STEPS", "3"),
    *("SCHEDULE.CALIBRATE.EPOCHS", "1", "SCHEDULE.CALIBRATE.MIN_STEPS", "2"),
    *("METHOD.PSEUDO.FOREGROUND", "0.0", "METHOD.MEMORY.BUDGET", "4"),
    *("REPORT", "False", "DATALOADER.NUM_WORKERS", "0", "LOG_PERIOD", "1", "LOG_IMAGES", "0"),
]
NAMES = ["circle", "square", "triangle", "star"]


class Material:
    """Parts of the tiny data set as files of their own."""

    def __init__(self, references, folder):
        self.folder = folder
        self.images, self.whole = {}, {}
        for part, reference in zip(("train", "val"), references, strict=True):
            file, self.images[part] = reference.split(".json:")
            self.whole[part] = json.loads(Path(f"{file}.json").read_text())

    def reference(self, name, part="train", shown=(1,), listed=None, images=slice(None), **renamed):
        """Writes some images with the objects of some categories; returns the data reference."""
        whole = self.whole[part]
        kept = whole["images"][images]
        ids = {image["id"] for image in kept}
        listed = shown if listed is None else listed
        content = {
            "images": kept,
            "annotations": [
                x
                for x in whole["annotations"]
                if x["image_id"] in ids and x["category_id"] in shown
            ],
            "categories": [
                {**x, "name": renamed.get(x["name"], x["name"])}
                for x in whole["categories"]
                if x["id"] in listed
            ],
        }
        path = self.folder / f"{name}.json"
        path.write_text(json.dumps(content))
        return f"{path}:{self.images[part]}"


@pytest.fixture(scope="module")
def material(tiny_config, tmp_path_factory):
    folder = tmp_path_factory.mktemp("add")
    cfg = tiny_config(folder)
    return Material([cfg.DATASETS.TRAIN[0], cfg.DATASETS.TEST[0]], folder)


@pytest.fixture(scope="module")
def two(material):
    """A run of one phase that knows two categories."""
    old = material.reference("two", shown=(1, 2), images=slice(0, 20))
    test = material.reference("test_two", "val", shown=(1, 2))
    words = ["DATASETS.TRAIN", f"['{old}']", "DATASETS.TEST", f"['{test}']", "SCENARIO.NAME", "2"]
    train(load_config(TINY, [*words, "OUTPUT_DIR", str(material.folder / "two")]))
    return material.folder / "two"


def add_config(out, detector, data, test, *more):
    words = ["MODEL.DETECTOR", str(detector), "OUTPUT_DIR", str(out)]
    words += ["DATASETS.TRAIN", str(data), "DATASETS.TEST", str([test]), *SHORT, *more]
    return load_config(str(find_config("add")), words)


@pytest.fixture(scope="module")
def test_all(material):
    return material.reference("test_all", "val", shown=(1, 2, 3, 4))


@pytest.fixture(scope="module")
def third(material, two, test_all):
    """The third category, added by the command from a weights file alone."""
    new = material.reference("third", shown=(3,), images=slice(20, 30))
    out = material.folder / "three"
    words = ["--detector", str(two / "phase1/train/model.pth"), "--data", new, "--test", test_all]
    assert cli.main(["add", *words, "--out", str(out), "--set", *SHORT]) == 0
    return out


def rows(path):
    state = load_state(path)
    names = [category["name"] for category in state["cldetr"]["categories"]]
    return names, state["model"]["class_embed.0.weight"]


def test_one_command_adds_a_category_from_its_data_alone(third, two):
    names, given = rows(two / "phase1/train/model.pth")
    grown, first = rows(third / "phase1/train/model.pth")
    assert (names, grown) == (NAMES[:2], NAMES[:3])
    assert torch.equal(first[:2], given)
    _, last = rows(third / "phase2/calibrate/model.pth")
    assert not torch.equal(last[2], first[2])
    results = json.loads((third / "results.json").read_text())
    assert results["scenario"] == "2+1"
    before, after = results["phases"]
    assert sorted(before["per_category"]) == sorted(NAMES[:2])
    assert after["old"]["AP"] is not None
    assert after["new"]["AP"] is not None
    memory = json.loads((third / "phase2/select/memory.json").read_text())
    assert [len(phase["image_ids"]) for phase in memory["phases"]] == [0, 4]


def test_the_detector_says_what_it_is(third, two):
    """Model, image sizes and optimizer need not be said again."""
    kept = [json.loads((run / "identity.json").read_text())["identity"] for run in (two, third)]
    for key in ("MODEL.DETR.HIDDEN_DIM", "MODEL.BACKBONE.NAME", "INPUT.MIN_SIZE_TRAIN"):
        assert kept[0][key] == kept[1][key]
    assert kept[1]["SOLVER.IMS_PER_BATCH"] == 4  # ten images
    assert kept[1]["SOLVER.BASE_LR"] == kept[0]["SOLVER.BASE_LR"]  # the same batch


LAZY_SHORT = [
    *("schedule.train.epochs=1", "schedule.train.min_steps=3", "schedule.calibrate.epochs=1"),
    *("schedule.calibrate.min_steps=2", "method.pseudo.foreground=0.0", "method.memory.budget=4"),
    *("train.report=false", "dataloader.train.num_workers=0", "train.log_period=1"),
    "train.log_images=0",
]


def add_lazily(out, detector, data, test):
    words = [f"train.detector={detector}", f"train.output_dir={out}", *LAZY_SHORT]
    words += [f"dataloader.train.dataset.names=['{data}']"]
    words += [f"dataloader.test.dataset.names=['{test}']"]
    train(load_config(str(find_config("lazy/add.py")), words))


def test_the_lazy_twin_adds_the_same_category(third, two, material, test_all, tmp_path):
    new = material.reference("third", shown=(3,), images=slice(20, 30))
    add_lazily(tmp_path, two / "phase1/train/model.pth", new, test_all)
    one, other = (load_state(run / "phase2/calibrate/model.pth") for run in (third, tmp_path))
    assert all(torch.equal(value, other["model"][key]) for key, value in one["model"].items())
    assert (tmp_path / "results.json").read_text() == (third / "results.json").read_text()


def test_a_lazy_detector_brings_its_model(material, test_all, tmp_path):
    old = material.reference("two", shown=(1, 2), images=slice(0, 20))
    words = ["schedule.first.min_steps=1", "schedule.first.max_steps=1", "scenario.name='2'"]
    words += [f"dataloader.train.dataset.names=['{old}']", "model.transformer.dim=32"]
    words += LAZY_SHORT[-4:]
    words += [f"train.output_dir={tmp_path / 'old'}"]
    test = material.reference("test_lazy", "val", shown=(1, 2))
    words += [f"dataloader.test.dataset.names=['{test}']"]
    train(load_config(str(find_config("lazy/custom_small.py")), words))
    new = material.reference("third", shown=(3,), images=slice(20, 30))
    add_lazily(tmp_path / "new", tmp_path / "old", new, test_all)
    names, weight = rows(tmp_path / "new/phase2/calibrate/model.pth")
    assert (names, weight.shape[1]) == (NAMES[:3], 32)


def test_categories_are_added_again_and_again(third, material, test_all, tmp_path):
    """A chain of three: the finished run brings its weights and its exemplars."""
    new = material.reference("fourth", shown=(4,), images=slice(30, 36))
    cfg = add_config(tmp_path / "four", third, [new], test_all)
    results = train(cfg)
    assert results["scenario"] == "3+1"
    names, first = rows(tmp_path / "four/phase1/train/model.pth")
    assert names == NAMES
    assert torch.equal(first[:3], rows(third / "phase2/calibrate/model.pth")[1])
    kept = json.loads((third / "phase2/select/exemplars_phase2.json").read_text())
    given = json.loads((tmp_path / "four/phase2/select/exemplars_given1.json").read_text())
    assert [x["id"] for x in given["images"]] == [x["id"] for x in kept["images"]]
    facts = json.loads((tmp_path / "four/phase2/train/stage.json").read_text())["facts"]
    assert facts["images"] == 6 + 4
    facts = json.loads((tmp_path / "four/phase2/calibrate/stage.json").read_text())["facts"]
    assert facts["images"] == 4 + 4
    again = material.reference("fifth", shown=(4,), images=slice(0, 6), star="sun")
    cfg = add_config(tmp_path / "five", tmp_path / "four", [again], test_all)
    trainer = IncrementalTrainer(cfg)
    trainer.train()
    assert trainer.data.scenario.name == "4+1"
    assert [len(each.image_ids) for each in trainer.data.scenario.given] == [4, 4]
    assert [each.classes for each in trainer.data.scenario.given] == [(2,), (3,)]
    assert rows(tmp_path / "five/phase2/calibrate/model.pth")[0] == [*NAMES, "sun"]


def test_each_added_category_gets_queries_of_its_own(two, material, test_all, tmp_path):
    """A detector without groups of queries gets a second one, one with groups another."""

    def queries(run, stage):
        return load_state(run / stage / "model.pth")["model"]["query_embed.weight"]

    runs = [two, tmp_path / "three", tmp_path / "four"]
    for old, new, category in zip(runs, runs[1:], (3, 4), strict=False):
        data = material.reference(new.name, shown=(category,), images=slice(20, 28))
        words = ["MODEL.DETR.QUERY_GROUPS", "[-1]"] if old is two else []
        train(add_config(new, old, [data], test_all, *words))
        before = queries(old, "phase1/train" if old is two else "phase2/calibrate")
        now = queries(new, "phase1/train")
        assert len(now) == len(before) + len(queries(two, "phase1/train"))
        assert torch.equal(now[: len(before)], before)
    assert load_config(str(runs[-1] / "config.yaml")).MODEL.DETR.QUERY_GROUPS == [0, 0, 1, 2]


def test_pages_and_pictures_of_a_run_whose_first_phase_has_no_images(third):
    show_run(third)
    assert not read_run(third).problems
    page = (third / "report/index.html").read_text()
    assert "2+1" in page
    drawn = {path.name.rpartition("_")[0] for path in (third / "pictures").glob("*.png")}
    assert {"phase1_predictions", "phase2_labels", "phase2_predictions"} <= drawn


def test_an_interrupted_extension_goes_on(third, two, material, test_all, tmp_path):
    new = f"{material.folder / 'third'}.json:{material.images['train']}"
    cfg = add_config(tmp_path, two / "phase1/train/model.pth", [new], test_all)
    trainer = IncrementalTrainer(cfg)
    trainer.resume_or_load(resume=False)
    trainer._train_phase(1)
    trainer.ledger.close()
    train(cfg, resume=True)
    ends = [load_state(run / "phase2/calibrate/model.pth")["model"] for run in (tmp_path, third)]
    assert all(torch.equal(ends[0][key], value) for key, value in ends[1].items())


def test_known_categories_are_kept_or_refreshed(material, two, test_all, tmp_path):
    new = material.reference("mixed", shown=(1, 3), listed=(1, 2, 3), images=slice(20, 30))
    detector = two / "phase1/train/model.pth"
    annotated = {}
    for known in ("keep", "refresh"):
        cfg = add_config(tmp_path / known, detector, [new], test_all, "SCENARIO.KNOWN", known)
        trainer = IncrementalTrainer(cfg)
        phase = trainer.data.scenario.phase(2)
        assert phase.classes == (2,)
        entries = DatasetCatalog.get(trainer.data.name("phase", 2))
        annotated[known] = {x["category_id"] for entry in entries for x in entry["annotations"]}
        assert {label for entry in entries for label in entry["classes"]} == {*phase.annotated}
    assert annotated == {"keep": {2}, "refresh": {0, 2}}
    trainer.train()
    memory = json.loads((tmp_path / "refresh/phase2/select/memory.json").read_text())
    assert [record["name"] for record in memory["phases"][1]["classes"]] == ["triangle", "circle"]


def test_unlabelled_old_images_are_labelled_by_the_teacher(material, two, test_all, tmp_path):
    copies = tmp_path / "old"
    copies.mkdir()
    for image in material.whole["train"]["images"][:5]:
        shutil.copy(Path(material.images["train"], image["file_name"]), copies)
    new = material.reference("plus", shown=(3,), images=slice(20, 30))
    cfg = add_config(tmp_path / "run", two, [new], test_all, "DATASETS.OLD_IMAGES", str(copies))
    train(cfg)
    facts = json.loads((tmp_path / "run/phase2/train/stage.json").read_text())["facts"]
    kept = len(json.loads((two / "phase1/select/exemplars_phase1.json").read_text())["images"])
    assert facts["images"] == 10 + kept + 5
    assert facts["pseudo"]["images"] > 0
    memory = json.loads((tmp_path / "run/phase2/calibrate/stage.json").read_text())["facts"]
    assert memory["images"] == kept + 4  # they have no label to calibrate on


# Bad input


def refusal(cfg):
    with pytest.raises(InputError) as caught:
        IncrementalTrainer(cfg)
    assert not Path(cfg.OUTPUT_DIR).exists()
    return str(caught.value)


def test_a_detector_whose_classes_cannot_be_told_is_refused(material, two, test_all, tmp_path):
    state = load_state(two / "phase1/train/model.pth")
    save_state(tmp_path / "bare.pth", {"model": state["model"]})
    new = material.reference("new", shown=(3,))
    said = refusal(add_config(tmp_path / "run", tmp_path / "bare.pth", [new], test_all))
    assert "does not say which categories it detects" in said
    assert "cldetr convert" in said


def test_no_detector_is_refused(material, test_all, tmp_path):
    new = material.reference("new", shown=(3,))
    assert "set MODEL.DETECTOR" in refusal(add_config(tmp_path / "run", "", [new], test_all))
    said = refusal(add_config(tmp_path / "run", tmp_path / "none.pth", [new], test_all))
    assert "there is no checkpoint at" in said
    (tmp_path / "empty").mkdir()
    said = refusal(add_config(tmp_path / "run", tmp_path / "empty", [new], test_all))
    assert "holds no finished phase" in said


@pytest.mark.parametrize("spelling", ["Circle", "circle ", "CIRCLE"])
def test_a_name_in_another_spelling_is_refused(material, two, test_all, tmp_path, spelling):
    new = material.reference("spelt", shown=(1, 3), circle=spelling)
    said = refusal(add_config(tmp_path / "run", two, [new], test_all))
    assert f"says {spelling!r} where the detector says 'circle'" in said


def test_a_name_that_is_nearly_a_known_one_is_told(material, two, test_all, tmp_path):
    new = material.reference("nearly", shown=(3,), triangle="squares")
    plan = make_plan(
        add_config(tmp_path / "run", two, [new], test_all),
        IncrementalTrainer.build_model,
        measure=False,
    )
    assert any("'squares' is named nearly as 'square'" in note for note in plan.notes)


def test_no_new_image_and_no_new_object_are_refused(material, two, test_all, tmp_path):
    none = material.reference("none", shown=(3,), images=slice(0, 0))
    assert "lists are empty (1): images" in refusal(
        add_config(tmp_path / "run", two, [none], test_all)
    )
    empty = material.reference("empty", shown=(), listed=(3,))
    said = refusal(add_config(tmp_path / "run", two, [empty], test_all))
    assert "brings no new category, it has no object at all" in said
    old = material.reference("old", shown=(1, 2))
    said = refusal(add_config(tmp_path / "run", two, [old], test_all))
    assert "objects of circle, square alone" in said


def test_a_category_without_an_object_is_not_learnt(material, two, test_all, tmp_path):
    new = material.reference("stray", shown=(3,), listed=(1, 2, 3, 4))
    data = RunData(
        add_config(tmp_path / "run", str(two / "phase1/train/model.pth"), [new], test_all)
    )
    assert [category.name for category in data.scenario.categories] == NAMES[:3]


def test_a_test_set_without_old_classes_is_a_stated_consequence(material, two, tmp_path, caplog):
    new = material.reference("only", shown=(3,), images=slice(20, 30))
    test = material.reference("test_only", "val", shown=(3,))
    cfg = add_config(tmp_path / "run", two, [new], test)
    plan = make_plan(cfg, IncrementalTrainer.build_model, measure=False)
    said = "the test set has no object of old classes: AP on old classes cannot be shown"
    assert said in plan.notes
    trainer = IncrementalTrainer(cfg)
    trainer.resume_or_load(resume=False)
    assert said in caplog.text
    results = trainer.train()
    first, last = results["phases"]
    assert first["all"]["AP"] is None
    assert last["old"]["AP"] is None
    assert last["new"]["AP"] is not None
    show_run(tmp_path / "run")
    assert not read_run(tmp_path / "run").problems
    assert "n/a" in (tmp_path / "run/report/index.html").read_text()


def test_a_test_category_in_another_spelling_is_refused(material, two, tmp_path):
    new = material.reference("new", shown=(3,))
    test = material.reference("test_spelt", "val", shown=(1, 3), triangle="Triangle")
    assert "Triangle" in refusal(add_config(tmp_path / "run", two, [new], test))


def test_methods_that_need_the_old_data_are_refused(material, two, test_all, tmp_path):
    new = material.reference("new", shown=(3,))
    method = ["METHOD.JOINT", "True", "METHOD.PSEUDO.ENABLED", "False"]
    method += ["METHOD.MEMORY.ENABLED", "False", "METHOD.CALIBRATE.ENABLED", "False"]
    said = refusal(add_config(tmp_path / "run", two, [new], test_all, *method))
    assert "trains on the old data" in said
