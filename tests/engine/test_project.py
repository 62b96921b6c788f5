"""A user's project: the script of docs/extending.md, run as it stands there."""

import csv
import json
import re
import signal
from pathlib import Path

import pytest
import torch
from detectron2.data import DatasetMapper
from detectron2.engine import hooks
from detectron2.evaluation import COCOEvaluator
from detectron2.modeling import META_ARCH_REGISTRY

from cldetr.config import identity, load_config
from cldetr.data.shapes import ShapesOptions, ensure_shapes
from cldetr.engine import IncrementalTrainer
from cldetr.engine.checkpoint import load_state

from .conftest import finish, start_script, train, wait_for

PAGE = Path(__file__).parents[2] / "docs" / "extending.md"


def code_block(language, containing):
    blocks = re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    (found,) = [block for block in blocks if containing in block]
    return found


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A folder with the script, its config and its data."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "my_project.py").write_text(code_block("python", "class MyBackbone"))
    (folder / "my_project.yaml").write_text(code_block("yaml", "MyBackbone"))
    options = ShapesOptions(train_images=24, val_images=8, size=64, categories=4, seed=3)
    paths = ensure_shapes(folder / "my_data", options)
    for split, own in (("train", "train"), ("val", "test")):
        content = json.loads(paths.annotations(split).read_text())
        images = {image["id"]: image for image in content["images"]}
        names = {category["id"]: category["name"] for category in content["categories"]}
        with open(folder / "my_data" / f"{own}.csv", "w", newline="") as stream:
            writer = csv.writer(stream)
            writer.writerow(["file", "width", "height", "x", "y", "w", "h", "class"])
            for obj in sorted(content["annotations"], key=lambda obj: obj["image_id"]):
                image = images[obj["image_id"]]
                file = paths.images(split).relative_to(folder / "my_data") / image["file_name"]
                size = image["width"], image["height"]
                writer.writerow([file, *size, *obj["bbox"], names[obj["category_id"]]])
    return folder


def start(project, folder, *more):
    words = ["--config-file", "my_project.yaml", *more, "OUTPUT_DIR", folder]
    return start_script("my_project.py", words, project)


def test_the_documented_project_runs_and_resumes_to_the_same_bits(project):
    assert "phase 2, calibrate: " in finish(start(project, "plain"))
    metrics = json.loads((project / "plain/phase2/evaluate/metrics.json").read_text())
    assert metrics["bbox"]["AP"] > 0
    assert metrics["bbox"]["AP"] == pytest.approx(metrics["all"]["AP"], abs=1e-9)
    assert metrics["bbox"]["AP50"] == pytest.approx(metrics["all"]["AP50"], abs=1e-9)
    lines = [
        json.loads(line) for line in (project / "plain/metrics.json").read_text().split("\n")[:-1]
    ]
    assert {line["my_hook/phase"] for line in lines if "my_hook/phase" in line} == {1, 2}
    assert list((project / "plain").rglob("model_best.pth"))

    broken = start(project, "broken")
    wait_for(project / "broken/phase2/train/checkpoints", broken)
    broken.send(signal.SIGTERM)
    finish(broken, 143)
    finish(start(project, "broken", "--resume"))
    one, other = (
        load_state(project / name / "phase2/calibrate/model.pth")["model"]
        for name in ("plain", "broken")
    )
    assert all(torch.equal(value, other[key]) for key, value in one.items())


def test_the_documented_overrides_are_called_for_every_stage(tiny_config, tmp_path):
    space = {}
    exec(code_block("python", "no TensorBoard"), space)
    calls = []

    class Noted(space["Trainer"]):
        @classmethod
        def build_train_loader(cls, cfg):
            calls.append((cfg.STAGE.PHASE, cfg.STAGE.NAME, cfg.DATASETS.TRAIN))
            loader = super().build_train_loader(cfg)
            assert isinstance(loader.dataset.mapper, DatasetMapper)
            return loader

    cfg = tiny_config(tmp_path, "INPUT.MIN_SIZE_TEST", "64")
    trainer = Noted(cfg)
    before = {key: value.clone() for key, value in trainer.detector.backbone.state_dict().items()}
    trainer.train()
    prefix = f"cldetr/{str(tmp_path).strip('/')}"
    assert calls == [
        (1, "train", (f"{prefix}/phase1",)),
        (2, "train", (f"{prefix}/replay2",)),
        (2, "calibrate", (f"{prefix}/exemplars2",)),
    ]
    after = trainer.detector.backbone.state_dict()
    assert all(torch.equal(value, after[key]) for key, value in before.items())
    assert not (tmp_path / "tensorboard").exists()


def test_a_detector_with_a_denoising_loss_trains_through_two_phases(tiny_config, tmp_path):
    if "DenoisingDETR" not in META_ARCH_REGISTRY:
        exec(code_block("python", "class DenoisingDETR"), {"__name__": __name__})
    cfg = tiny_config(tmp_path, "MODEL.META_ARCHITECTURE", "DenoisingDETR")
    train(cfg)
    lines = map(json.loads, (tmp_path / "metrics.json").read_text().splitlines())
    losses = [line["loss_denoise"] for line in lines if "loss_denoise" in line]
    assert len(losses) > 10
    states = [load_state(tmp_path / f"phase{i}/train/model.pth")["model"] for i in (1, 2)]
    assert not torch.equal(states[0]["denoise.weight"], states[1]["denoise.weight"])


def test_a_lazy_config_of_own_parts_runs_and_can_be_restored(tiny_run, tmp_path):
    """The parts of the documentation, on the tiny data set, through train, evaluate and predict."""
    data = load_config(str(tiny_run / "config.yaml"))
    path = tmp_path / "my_config.py"
    path.write_text(code_block("python", "lr_multiplier = "))
    overrides = [
        f"dataloader.train.dataset.names={list(data.DATASETS.TRAIN)}",
        f"dataloader.test.dataset.names={list(data.DATASETS.TEST)}",
        "dataloader.train.total_batch_size=4",
        "scenario.name=3+1",
        "method.memory.budget=0.25",
        *(f"schedule.{stage}.max_steps=3" for stage in ("first", "train", "calibrate")),
        "optimizer.lr=0.02",
        "train.device=cpu",
        f"dataloader.evaluator.output_dir={tmp_path / 'coco'}",
        f"train.output_dir={tmp_path / 'run'}",
    ]
    cfg = load_config(str(path), overrides)
    trainer = IncrementalTrainer(cfg)
    results = trainer.train()
    assert type(trainer.optimizer) is torch.optim.SGD
    calibration = 0.02 * cfg.SCHEDULE.CALIBRATE.LR_SCALE
    assert trainer.optimizer.param_groups[0]["initial_lr"] == pytest.approx(calibration)
    assert trainer.optimizer.param_groups[0]["lr"] < 0.5 * calibration  # the cosine has come down
    assert results["phases"][1]["bbox"]["AP"] == pytest.approx(results["phases"][1]["all"]["AP"])
    stored = load_config(str(tmp_path / "run/config.yaml"))
    assert identity(stored) == identity(trainer.run_cfg)
    entry = IncrementalTrainer(stored).evaluate()
    assert entry["all"]["AP"] == results["phases"][1]["all"]["AP"]


def test_hooks_and_evaluators_of_detectron2_work_as_they_are(tiny_config, tmp_path):
    class Trainer(IncrementalTrainer):
        def build_hooks(self):
            return [*super().build_hooks(), hooks.PeriodicCheckpointer(self.checkpointer, 3)]

    trainer = Trainer(tiny_config(tmp_path))
    results = trainer.train()
    saved = load_state(tmp_path / "phase1/train/model_0000002.pth")["model"]
    assert saved.keys() == trainer.detector.state_dict().keys()
    # `test` takes evaluators as Detectron2's trainers do, and any registered data set.
    cfg = trainer.cfg.clone()
    cfg.defrost()
    cfg.DATASETS.TEST = (trainer.data.name("test", 2),)
    other = COCOEvaluator(cfg.DATASETS.TEST[0], tasks=("bbox",), output_dir=str(tmp_path / "coco"))
    found = trainer.test(cfg, trainer.detector, [other])
    assert found.keys() == {"bbox"}
    assert found["bbox"]["AP"] == pytest.approx(results["phases"][1]["all"]["AP"])
    assert trainer.test(cfg, trainer.detector)["all"] == results["phases"][1]["all"]
    with pytest.raises(ValueError, match="2 evaluators for 1 data sets"):
        trainer.test(cfg, trainer.detector, [other, other])
