"""Whole runs of detectors of Hugging Face: two phases, stopped and resumed, and classes added."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image

from cldetr.analysis.predict import Predictor
from cldetr.cli import main
from cldetr.config import load_config
from cldetr.engine.checkpoint import load_state
from cldetr.engine.step import StageTrainer

from ..modeling.tiny_huggingface import CONFIGS, make_model, save
from .conftest import train
from .test_run import assert_same

CONFIG = Path(__file__).parents[2] / "configs" / "detector" / "huggingface.yaml"
SHORT = {
    "SCENARIO.NAME": "3+1",
    "SCENARIO.ORDER": "id",
    "METHOD.PSEUDO.FOREGROUND": "0.0",
    "METHOD.MEMORY.BUDGET": "0.25",
    "SOLVER.IMS_PER_BATCH": "2",
    "SOLVER.CHECKPOINT_PERIOD": "1",
    "SOLVER.BASE_LR": "1e-3",
    **{f"SCHEDULE.{stage}.MAX_STEPS": "2" for stage in ("FIRST", "TRAIN", "CALIBRATE")},
    "DATALOADER.NUM_WORKERS": "0",
    "MODEL.DEVICE": "cpu",
    "REPORT": "False",
    "VIS_PERIOD": "0",
}
NATIVE = {
    "MODEL.HUGGINGFACE.LOSS": "native",
    "METHOD.PSEUDO.SOFT": "False",
    "METHOD.UNSEEN": "negative",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Saves tiny detectors, each once."""
    saved = {}

    def make(name, labels=("circle", "square", "triangle")):
        if (name, labels) not in saved:
            saved[name, labels] = tmp_path_factory.mktemp(name)
            save(name, saved[name, labels], labels)
        return str(saved[name, labels])

    return make


@pytest.fixture
def config(tiny_shapes, tmp_path):
    def make(run, name, **more):
        words = {**SHORT, "MODEL.HUGGINGFACE.NAME": name, "OUTPUT_DIR": str(tmp_path / run)}
        words |= {key.replace("__", "."): str(value) for key, value in more.items()}
        flat = [word for pair in words.items() for word in pair]
        return load_config(str(CONFIG), [*tiny_shapes, *flat])

    return make


class CrashError(Exception):
    pass


RUNS = [(name, "ours") for name in CONFIGS] + [
    (name, "native") for name in ("rt_detr", "d_fine", "deimv2", "rf_detr")
]
FAST = {("deformable_detr", "ours"), ("rt_detr", "native")}


@pytest.mark.parametrize(
    ("name", "loss"),
    [pytest.param(*run, marks=() if run in FAST else pytest.mark.slow) for run in RUNS],
)
def test_two_phases_that_are_stopped_and_resumed_end_as_those_that_are_not(
    name, loss, folder, config, tmp_path, monkeypatch
):
    keys = NATIVE if loss == "native" else {}
    results = train(config("whole", folder(name), **keys))
    assert [phase["phase"] for phase in results["phases"]] == [1, 2]
    step, crashes = StageTrainer.run_step, []

    def crash(self):
        if self.step == 1 and self.offset not in crashes:  # once in the middle of each stage
            crashes.append(self.offset)
            raise CrashError
        step(self)

    monkeypatch.setattr(StageTrainer, "run_step", crash)
    for attempt in range(4):
        try:
            train(config("stopped", folder(name), **keys), resume=attempt > 0)
        except CrashError:
            continue
        break
    assert crashes == [0, 2, 4]
    assert_same(tmp_path / "whole", tmp_path / "stopped")
    final = load_state(tmp_path / "whole" / "phase2" / "calibrate" / "model.pth")["model"]
    start = make_model(name).named_parameters()
    moved = [not value.equal(final[f"model.{key}"]) for key, value in start]
    assert sum(moved) > len(moved) / 2
    # The weights know their model: the folder is not needed any more.
    monkeypatch.setattr("cldetr.modeling.huggingface.describe_source", None)
    weights = tmp_path / "whole" / "phase2" / "calibrate" / "model.pth"
    predictor = Predictor.from_checkpoint(weights, device="cpu")
    assert len(predictor.categories) == 4


ADD = [
    *("SCHEDULE.TRAIN.MAX_STEPS", "2", "SCHEDULE.TRAIN.MIN_STEPS", "0"),
    *("SCHEDULE.CALIBRATE.MAX_STEPS", "2", "SCHEDULE.CALIBRATE.MIN_STEPS", "0"),
    *("METHOD.PSEUDO.FOREGROUND", "0.0", "METHOD.MEMORY.BUDGET", "4", "MODEL.DEVICE", "cpu"),
    *("REPORT", "False", "DATALOADER.NUM_WORKERS", "0", "VIS_PERIOD", "0"),
]


def write_stars(tiny_shapes, path):
    """Writes the tiny data set with the category star alone; returns the folder of its images."""
    annotations, images = tiny_shapes[1].strip("[]'").split(".json:")
    content = json.loads(Path(f"{annotations}.json").read_text())
    star = next(x["id"] for x in content["categories"] if x["name"] == "star")
    content["categories"] = [x for x in content["categories"] if x["id"] == star]
    content["annotations"] = [x for x in content["annotations"] if x["category_id"] == star]
    path.write_text(json.dumps(content))
    return images


@pytest.mark.parametrize(
    "name",
    [pytest.param(x, marks=() if x == "deformable_detr" else pytest.mark.slow) for x in CONFIGS],
)
def test_a_category_is_added_to_those_of_a_folder(name, folder, tiny_shapes, tmp_path):
    known = ("N/A", "cat", "dog")  # as COCO's ids begin: the first row has no category
    given = folder(name, known)
    images = write_stars(tiny_shapes, tmp_path / "new.json")
    words = ["add", "--detector", given, "--data", f"{tmp_path / 'new.json'}:{images}"]
    words += [
        "--test",
        f"{tmp_path / 'new.json'}:{images}",
        "--out",
        str(tmp_path / "run"),
        "--set",
        *ADD,
    ]
    assert main(words) == 0
    first = load_state(tmp_path / "run" / "phase1" / "train" / "model.pth")
    names = [category["name"] for category in first["cldetr"]["categories"]]
    assert sorted(names) == ["cat", "dog", "star"]
    assert sorted(first["cldetr"]["seen"]) == ["cat", "dog"]
    source = make_model(name, known).state_dict()
    predictor = Predictor.from_checkpoint(tmp_path / "run" / "phase2" / "calibrate" / "model.pth")
    assert int(predictor.detector.visible_classes.sum()) == 3
    rows = [key for key in source if f"model.{key}" in predictor.detector.class_parameters()]
    for key, value in source.items():
        if key not in rows:
            assert torch.equal(first["model"][f"model.{key}"], value), key
    head = next(key for key in rows if re.search(r"class_(embed|labels).*weight$", key))
    for label in ("cat", "dog"):
        row, before = names.index(label), known.index(label)
        if not name.endswith("two_stage"):  # whose last head has a row for any object
            assert torch.equal(first["model"][f"model.{head}"][row], source[head][before])


def test_the_documented_way_to_one_more_class(tiny_shapes, tmp_path, monkeypatch, capsys):
    page = (Path(__file__).parents[2] / "docs" / "huggingface.md").read_text(encoding="utf-8")
    section = page.partition("## One more class")[2].partition("\n## ")[0]
    before, after = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    add, export = re.findall(r"^    cldetr (.*)$", section, re.MULTILINE)
    save("deformable_detr", tmp_path / "my_detector")
    images = Path(write_stars(tiny_shapes, tmp_path / "new.json"))
    (tmp_path / "images").symlink_to(images)
    shutil.copy(tmp_path / "new.json", tmp_path / "test.json")
    Image.open(next(images.glob("*"))).convert("RGB").save(tmp_path / "photo.jpg")
    monkeypatch.chdir(tmp_path)
    exec(before, {})
    assert main([*add.split(), "--set", *ADD]) == 0
    assert main(export.split()) == 0
    config = json.loads(Path("my_new_folder/config.json").read_text())
    assert sorted(config["id2label"].values()) == ["circle", "square", "star", "triangle"]
    capsys.readouterr()
    exec(after.replace('model="my_new_folder"', 'model="my_new_folder", threshold=0.0'), {})
    assert "star" in capsys.readouterr().out
