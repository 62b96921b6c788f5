"""Runs over domains: the same classes in images of another kind, phase after phase."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from detectron2.data import DatasetCatalog

from cldetr.analysis.diagnose import diagnose_run
from cldetr.cli import main
from cldetr.config import load_config, method_of
from cldetr.config_files import compose, folder_names
from cldetr.data.manifest import load_manifest
from cldetr.data.shapes import ShapesOptions, ensure_shapes
from cldetr.engine import IncrementalTrainer
from cldetr.engine.evaluate import _results_name, evaluate
from cldetr.engine.rundata import RunData
from cldetr.engine.stages import calibration_learner, planned_stages, training_learner
from cldetr.engine.step import StageTrainer
from cldetr.errors import InputError
from cldetr.evaluation.average_precision import GroundTruth
from cldetr.evaluation.results import load_results
from cldetr.report.rundir import read_run
from cldetr.report.tables import settings_in_use
from cldetr.train import show_run

from .conftest import TINY, train
from .test_run import CrashError, artefacts, assert_same

FINETUNE = ["METHOD.PSEUDO.ENABLED", "False", "METHOD.MEMORY.ENABLED", "False"]
FINETUNE += ["METHOD.CALIBRATE.ENABLED", "False"]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """References to the training and test sets of two looks, painted and sketch."""
    root, found = tmp_path_factory.mktemp("looks"), {"train": [], "val": []}
    for seed, look in enumerate(("painted", "sketch")):
        options = ShapesOptions(
            train_images=16, val_images=6, size=64, categories=4, seed=seed, look=look
        )
        paths = ensure_shapes(root / look, options)
        for split, references in found.items():
            references.append(f"{paths.annotations(split)}:{paths.images(split)}")
    return found


@pytest.fixture(scope="module")
def config(files):
    """Makes a config of a tiny run over both domains with overrides."""

    def make(folder, *overrides, train=files["train"], test=files["val"]):
        words = ["DATASETS.TRAIN", str(train), "DATASETS.TEST", str(test)]
        words += ["SCENARIO.PROTOCOL", "domains", "OUTPUT_DIR", str(folder), *overrides]
        return load_config(TINY, words)

    return make


@pytest.fixture(scope="module")
def finished(config, tmp_path_factory):
    """A run of CL-DETR over both domains."""
    folder = tmp_path_factory.mktemp("domains") / "run"
    train(config(folder))
    return folder


def change(reference, folder, edit):
    """A copy of a data set whose annotation file was edited; returns its reference."""
    path, images = reference.split(".json:")
    content = json.loads(Path(f"{path}.json").read_text())
    edit(content)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "changed.json").write_text(json.dumps(content))
    return f"{folder / 'changed.json'}:{images}"


def without_stars(content):
    """Leaves stars unannotated, and unlisted."""
    stars = {x["id"] for x in content["categories"] if x["name"] == "star"}
    content["categories"] = [x for x in content["categories"] if x["id"] not in stars]
    kept = [x for x in content["annotations"] if x["category_id"] not in stars]
    content["annotations"] = kept


def test_a_run_ends_with_the_ap_of_each_domain_after_each_phase(finished):
    results = json.loads((finished / "results.json").read_text())
    assert results["scenario"] == "2 domains"
    assert results["domains"]["names"] == ["painted", "sketch"]  # the folders that differ
    matrix = results["domains"]["matrix"]
    assert [len(row) for row in matrix] == [2, 2]
    assert None not in matrix[0] + matrix[1]
    assert results["domains"]["forgetting"] == [matrix[0][0] - matrix[1][0], None]
    assert results["phases"][1]["all"]["AP"] == pytest.approx(sum(matrix[1]) / 2)
    assert len(results["phases"][1]["per_category"]) == 4
    scenario = load_manifest(finished / "manifest.json")
    assert [phase.source for phase in scenario.phases] == ["painted", "sketch"]
    audit = json.loads((finished / "audit.json").read_text())
    assert [phase["classes"] for phase in audit["phases"]] == [4, 4]
    assert [sum(phase["hidden"].values()) for phase in audit["phases"]] == [0, 0]


def test_exemplars_of_earlier_domains_are_replayed_with_all_their_labels(finished, config):
    data = RunData(config(finished))
    memory = data.load_memory(finished / "phase2/select")
    assert [phase.source for phase in memory.phases] == ["painted", "sketch"]
    assert {tuple(x.label for x in phase.classes) for phase in memory.phases} == {(0, 1, 2, 3)}
    facts = json.loads((finished / "phase2/train/stage.json").read_text())["facts"]
    assert facts["images"] == 16 + 4  # a quarter of the first domain
    assert "pseudo" not in facts
    planned = [
        (stage.phase, stage.name, stage.images) for stage in planned_stages(data.cfg, data.scenario)
    ]
    assert planned == [(1, "train", 16), (2, "train", 20), (2, "calibrate", 8)]


@pytest.mark.slow
def test_crashes_all_along_change_nothing(finished, config, tmp_path, monkeypatch):
    step, budget, crashes = StageTrainer.run_step, [0], 0

    def limited(self):
        if budget[0] == 0:
            raise CrashError
        budget[0] -= 1
        step(self)

    monkeypatch.setattr(StageTrainer, "run_step", limited)
    while not (tmp_path / "results.json").exists():
        budget[0] = 3
        try:
            train(config(tmp_path), resume=crashes > 0)
        except CrashError:
            crashes += 1
    assert crashes >= 4
    assert_same(tmp_path, finished)


def test_another_order_of_domains_is_another_run(finished, config, files):
    turned = {split: references[::-1] for split, references in files.items()}
    trainer = IncrementalTrainer(config(finished, train=turned["train"], test=turned["val"]))
    with pytest.raises(InputError, match=r"DATASETS\.TRAIN"):
        trainer.resume_or_load(resume=True)


@pytest.mark.slow
def test_the_report_shows_the_domains_and_no_diagnosis_of_pseudo_labels(finished, tmp_path, caplog):
    folder = shutil.copytree(finished, tmp_path / "run")
    show_run(folder)
    assert "did not work" not in caplog.text
    page = (folder / "report/index.html").read_text()
    heads = re.findall(r'<th[^>]*scope="col">([^<]*)</th>', page)
    assert [head for head in heads if head in ("painted", "sketch")] == ["painted", "sketch"]
    assert "4 categories" in page
    assert not (folder / "diagnostics").exists()
    captions = json.loads((folder / "pictures/captions.json").read_text())
    assert any(" of sketch:" in caption for caption in captions.values())
    assert not any("pseudo" in caption for caption in captions.values())
    with pytest.raises(InputError, match="no pseudo-labels"):
        diagnose_run(folder)
    assert main(["report", str(folder), str(finished), "--out", str(tmp_path / "both")]) == 0
    assert "AP per domain" in (tmp_path / "both/index.html").read_text()


def test_settings_of_the_page_name_the_protocol(finished):
    used = settings_in_use(read_run(finished).settings)
    assert used["SCENARIO.PROTOCOL"] == "domains"
    assert "SCENARIO.NAME" not in used


def test_without_exemplars_dkd_is_fine_tuning_and_says_so(config, tmp_path, caplog):
    """All objects are annotated: there is nothing to label."""
    train(config(tmp_path / "finetune", *FINETUNE))
    assert "nothing to label" not in caplog.text
    train(config(tmp_path / "dkd", *FINETUNE, "METHOD.PSEUDO.ENABLED", "True"))
    assert "METHOD.PSEUDO has nothing to label" in caplog.text
    assert_same(tmp_path / "dkd", tmp_path / "finetune")


@pytest.mark.parametrize("method", [["METHOD.DISTILL.ENABLED", "True"], ["METHOD.JOINT", "True"]])
def test_distillation_and_joint_training_run(config, tmp_path, method):
    results = train(config(tmp_path, *FINETUNE, *method))
    assert len(results["domains"]["matrix"]) == 2
    images = json.loads((tmp_path / "phase2/train/stage.json").read_text())["facts"]["images"]
    assert images == (32 if "METHOD.JOINT" in method else 16)
    losses = (tmp_path / "metrics.json").read_text()
    assert ("loss_kd_cls" in losses) == ("METHOD.DISTILL.ENABLED" in method)


def test_the_old_model_labels_what_a_domain_does_not_annotate(config, files, tmp_path):
    later = change(files["train"][1], tmp_path / "fewer", without_stars)
    cfg = config(
        tmp_path / "run",
        "METHOD.CALIBRATE.COMPLETE.ENABLED",
        "True",
        train=[files["train"][0], later],
    )
    trainer = IncrementalTrainer(cfg)
    scenario, detector = trainer.data.scenario, trainer.detector
    names = [category.name for category in scenario.categories]
    assert [names[label] for label in scenario.phases[1].annotated] == [
        "circle",
        "square",
        "triangle",
    ]
    method = method_of(cfg)
    learner = training_learner(detector, method, scenario, 2, detector)
    own, exemplar = ({"classes": phase.annotated} for phase in reversed(scenario.phases))
    expected = torch.tensor([[name == "star" for name in names], [False] * 4])
    assert torch.equal(learner._usable([own, exemplar]), expected)
    assert calibration_learner(detector, method, scenario, 2).rule.skip_annotated
    results = trainer.train()
    assert set(results["phases"][1]["per_category"]) == set(names)
    facts = json.loads((tmp_path / "run/phase2/train/stage.json").read_text())["facts"]
    assert set(facts["pseudo"]["per_category"]) <= {"star"}


def test_a_trained_detector_may_be_the_first_domain(finished, config, tmp_path):
    weights = finished / "phase1/train/model.pth"
    train(config(tmp_path, "MODEL.DETECTOR", str(weights)))
    ours, theirs = (
        artefacts(folder)[0]["phase2/train/model.pth"] for folder in (tmp_path, finished)
    )
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


def test_other_test_sets_are_evaluated_domain_by_domain(finished, config, files):
    """On the training images, as an example of others."""
    trainer = IncrementalTrainer(config(finished, test=files["train"]))
    results = evaluate(trainer.run_cfg, trainer.data, trainer.detector, trainer.test)
    assert results["domains"]["names"] == ["painted", "sketch"]
    found = load_results(finished / "results_painted_sketch_annotations_instances_train.json")
    assert found["test_sets"] == files["train"]


def test_evaluations_on_test_sets_of_the_same_name_keep_their_results(
    finished, config, files, tmp_path
):
    day = [change(x, tmp_path / "day" / str(i), lambda _: None) for i, x in enumerate(files["val"])]
    night = [
        change(x, tmp_path / "night" / str(i), without_stars) for i, x in enumerate(files["val"])
    ]
    found = []
    for test in (day, night, day):
        trainer = IncrementalTrainer(config(finished, test=test))
        found.append(evaluate(trainer.run_cfg, trainer.data, trainer.detector, trainer.test))
    written = [load_results(finished / f"results_{x}0_1_changed.json") for x in ("", "night_")]
    assert [each["test_sets"] for each in written] == [day, night]
    assert [each["domains"] for each in written] == [found[2]["domains"], found[1]["domains"]]
    assert not (finished / "results_day_0_1_changed.json").exists()  # it found its own
    confusions = [
        json.loads((finished / f"results_{x}0_1_changed_confusion.json").read_text())
        for x in ("", "night_")
    ]
    stars = confusions[0]["categories"].index("star")
    assert sum(confusions[0]["counts"][stars]) > sum(confusions[1]["counts"][stars]) == 0


@pytest.mark.parametrize(
    ("before", "now", "name"),
    [
        ([], ["day/test.json:day"], "test"),
        (["day/test.json:day"], ["day/test.json:day"], "test"),
        (["day/test.json:day"], ["night/test.json:night"], "night_test"),
        (["/data/day/test.json:x"], ["/data/night/test.json:x"], "night_test"),
        (["day/test.json:clear"], ["day/test.json:fog"], "test_2"),
        (["yolo:cars/data.yaml/val"], ["yolo:bikes/data.yaml/val"], "yolo_bikes_data.yaml_val"),
        ([], ["voc_2007_test", "coco_2017_val"], "voc_2007_test_coco_2017_val"),
        ([], ["day/test.json:day", "night/test.json:night"], "day_night_test"),
    ],
)
def test_results_are_called_what_tells_the_test_sets_apart(tmp_path, before, now, name):
    if before:
        content = {"format": 1, "test_sets": before}
        (tmp_path / f"{_results_name(tmp_path, before)}.json").write_text(json.dumps(content))
    assert _results_name(tmp_path, now) == f"results_{name}"


def test_each_domain_is_evaluated_on_the_test_set_at_its_place(config, files, tmp_path):
    """Names of test sets do not matter: sketches are the first domain's test set if they say so."""
    for test in (files["val"], files["val"][::-1]):
        data = RunData(config(tmp_path, test=test))
        assert list(data.test) == ["painted", "sketch"]
        paths = [reference.partition(".json:")[0] + ".json" for reference in test]
        assert [str(one.json_file) for one in data.test.values()] == paths
        truth = GroundTruth.from_view(DatasetCatalog.get(data.name("test", 2)))
        assert [source.name for source in truth.sources] == ["painted", "sketch"]
        for index, path in enumerate(paths):
            content = json.loads(Path(path).read_text())
            boxes = truth.boxes[truth.image_sources[truth.images] == index]
            assert sorted(boxes.tolist()) == sorted(x["bbox"] for x in content["annotations"])


def test_held_out_images_are_the_test_sets(config, tmp_path):
    data = RunData(config(tmp_path, "SCENARIO.HOLD_OUT", "0.25", test=["hold_out"]))
    assert [len(one.image_ids) for one in data.test.values()] == [4, 4]
    assert [len(phase.image_ids) for phase in data.scenario.phases] == [12, 12]


def test_bad_input_is_refused(config, files, tmp_path):
    first, second = files["train"]
    for words, message in (
        ({"test": files["val"][:1]}, r"2 data sets, DATASETS\.TEST 1.*in the same order"),
        ({"train": [first]}, "give a data set for each domain"),
        ({"train": [first, first]}, "a data set twice"),
    ):
        with pytest.raises(InputError, match=message):
            RunData(config(tmp_path, **words))

    def rename(content):
        content["categories"][0]["name"] = "hexagon"

    other = change(second, tmp_path / "other", rename)
    with pytest.raises(InputError, match=r"hexagon, unknown to .*SCENARIO\.PROTOCOL to strict"):
        RunData(config(tmp_path, train=[first, other]))


def test_data_sets_of_the_same_name_are_told_apart_in_every_protocol(config, files, tmp_path):
    """Both files are called instances_train."""
    fewer = change(files["train"][0], tmp_path / "a/instances", without_stars)
    more = change(files["train"][1], tmp_path / "b/instances", lambda content: None)
    cfg = config(tmp_path, "SCENARIO.PROTOCOL", "strict", train=[fewer, more])
    data = RunData(cfg)
    assert [phase.source for phase in data.scenario.phases] == ["a", "b"]
    assert data.scenario.name == "3+1"


@pytest.mark.parametrize("method", folder_names("method"))
def test_the_config_composes_with_every_method(method):
    cfg = compose(["shapes_domains", method])
    assert cfg.SCENARIO.PROTOCOL == "domains"
    assert len(cfg.DATASETS.TRAIN) == len(cfg.DATASETS.TEST) == 2
    assert method_of(cfg).name == compose([method]).METHOD.NAME
