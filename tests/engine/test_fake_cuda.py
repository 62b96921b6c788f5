"""Whole runs on a fake GPU: nothing on a wrong device, and few places where the host waits."""

import json
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from fake_cuda import FakeCudaTensor, available, fake_cuda

from cldetr.config import load_config
from cldetr.data.shapes import ShapesOptions, ensure_shapes
from cldetr.engine.step import StageTrainer
from cldetr.errors import InputError
from cldetr.methods import learner as learner_module
from cldetr.modeling.detector import Detector

from .conftest import TINY, train

pytestmark = [
    pytest.mark.skipif(bool(available()), reason=available() or "available"),
    pytest.mark.own_process,
]

NO_PSEUDO = ["METHOD.PSEUDO.ENABLED", "False", "METHOD.CALIBRATE.ENABLED", "False"]
VARIANTS = {
    "plain": [],
    "float16": ["SOLVER.AMP.ENABLED", "True", "SOLVER.AMP.DTYPE", "float16"],
    "bfloat16, checkpointing, accumulation": [
        *("SOLVER.AMP.ENABLED", "True", "SOLVER.ACCUMULATE", "2"),
        *("MODEL.DETR.CHECKPOINTING", "True"),
    ],
    "cached": ["METHOD.PSEUDO.CACHE", "True", "METHOD.CALIBRATE.COMPLETE.ENABLED", "True"],
    "lwf": [*NO_PSEUDO, "METHOD.DISTILL.ENABLED", "True", "METHOD.DISTILL.LOSS", "lwf"],
    "erd": [*NO_PSEUDO, "METHOD.DISTILL.ENABLED", "True", "METHOD.DISTILL.LOSS", "erd"],
    "herding": ["METHOD.MEMORY.STRATEGY", "herding"],
    "detr": [
        *("MODEL.META_ARCHITECTURE", "DETR", "MODEL.DETR.ONE_CLASS_PER_QUERY", "True"),
        *("MODEL.DETR.IN_FEATURES", "['res5']", "MODEL.RESNETS.OUT_FEATURES", "['res5']"),
        *("MODEL.DETR.LEVELS", "4", "MODEL.DETR.WITH_BOX_REFINE", "False"),
    ],
    "two stages": ["MODEL.DETR.TWO_STAGE", "True"],
}
SHORT = [
    *("SCHEDULE.FIRST.MAX_STEPS", "1", "SCHEDULE.TRAIN.MAX_STEPS", "3"),
    *("SCHEDULE.CALIBRATE.MAX_STEPS", "1", "METHOD.PSEUDO.FOREGROUND", "0.01"),
]


@pytest.fixture(scope="module")
def few_images(tmp_path_factory):
    """The overrides that point a config to less data than other tests have: the fake is slow."""
    options = ShapesOptions(train_images=24, val_images=4, size=64, categories=4, seed=3)
    paths = ensure_shapes(tmp_path_factory.mktemp("few") / "shapes", options)
    train, test = (f"{paths.annotations(x)}:{paths.images(x)}" for x in ("train", "val"))
    return ["DATASETS.TRAIN", f"['{train}']", "DATASETS.TEST", f"['{test}']"]


def config(few_images, folder, *overrides):
    where = ["MODEL.DEVICE", "cuda", "OUTPUT_DIR", str(folder)]
    return load_config(TINY, [*few_images, *where, *SHORT, *overrides])


@pytest.mark.parametrize("name", VARIANTS)
def test_a_run_keeps_everything_on_the_device(name, few_images, tmp_path, monkeypatch):
    with fake_cuda(monkeypatch):
        results = train(config(few_images, tmp_path, *VARIANTS[name]))
    assert results["phases"][1]["all"]["AP"] is not None


def test_a_fake_gpu_computes_what_the_cpu_computes(few_images, tmp_path, monkeypatch):
    no_dropout = ["MODEL.DETR.DROPOUT", "0.0"]  # the CPU draws its own way
    with fake_cuda(monkeypatch):
        train(config(few_images, tmp_path / "gpu", *no_dropout))
    train(config(few_images, tmp_path / "cpu", *no_dropout, "MODEL.DEVICE", "cpu"))
    gpu, cpu = (
        json.loads((tmp_path / name / "metrics.json").read_text().splitlines()[0])
        for name in ("gpu", "cpu")
    )
    for key in ("total_loss", "grad_norm"):
        assert gpu[key] == pytest.approx(cpu[key], rel=1e-4), key


def test_a_gpu_without_bfloat16_is_told(few_images, tmp_path, monkeypatch):
    cfg = config(few_images, tmp_path, "SOLVER.AMP.ENABLED", "True")
    with fake_cuda(monkeypatch):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *given: (7, 0))
        with pytest.raises(InputError, match=r"set SOLVER\.AMP\.DTYPE float16"):
            train(cfg)


@pytest.mark.parametrize(
    ("owner", "name"), [(Detector, "targets"), (learner_module, "make_pseudo_labels")]
)
def test_planted_tensors_on_the_host_are_found(owner, name, few_images, tmp_path, monkeypatch):
    right = getattr(owner, name)

    def wrong(*given, **named):
        made = right(*given, **named)
        for each in made:
            object.__setattr__(each, "boxes", each.boxes.cpu())
        return made

    monkeypatch.setattr(owner, name, wrong)
    with fake_cuda(monkeypatch), pytest.raises(RuntimeError, match="one device"):
        train(config(few_images, tmp_path))


# Where the host needs a number of the GPU in a step with a teacher.
WAITS = {
    ("_local_scalar_dense", "detector.py"): 2,  # are the predictions finite: student, teacher
    ("nonzero", "pseudo.py"): 2,  # which predictions become pseudo-labels; which stay
    ("tolist", "pseudo.py"): 2,  # how many there are on each image
    ("copy to the host", "matcher.py"): 1,  # the costs: the assignment is solved on the CPU
    ("_local_scalar_dense", "step.py"): 2,  # is the gradient finite, and its norm for the log
}


MATCHER = ["METHOD.MATCHER.ENABLED", "True", "METHOD.MATCHER.NEW_IOU", "0.1"]


@pytest.mark.parametrize("overrides", [[], MATCHER], ids=["cldetr", "quality matcher"])
def test_a_step_with_a_live_teacher_waits_where_it_must(
    overrides, few_images, tmp_path, monkeypatch
):
    steps = []
    run_step = StageTrainer.run_step

    def counted(self):
        before = Counter(waits)
        run_step(self)
        steps.append(Counter(waits) - before)

    monkeypatch.setattr(StageTrainer, "run_step", counted)
    with fake_cuda(monkeypatch) as waits:
        train(config(few_images, tmp_path, "LOG_PERIOD", "1000", *overrides))
    found = Counter()
    # The second of three steps of phase 2's training: the last one of a stage logs its losses.
    for (what, where), count in steps[2].items():
        found[what, where.partition(":")[0]] += count
    assert found <= Counter(WAITS), found - Counter(WAITS)
    assert sum(WAITS.values()) <= 10


def test_it_is_told_that_a_tensor_is_on_the_gpu(monkeypatch):
    with fake_cuda(monkeypatch) as waits:
        there = torch.ones(3, device="cuda") * 2
        assert isinstance(there, FakeCudaTensor)
        assert there.device == torch.device("cuda:0")
        with pytest.raises(RuntimeError, match="one device"):
            there + torch.ones(3)
        with pytest.raises(TypeError, match="numpy"):
            there.numpy()
        assert not waits
        assert float(there.sum()) == 6
        assert sum(waits.values()) == 1
        there.cpu()
        assert sum(waits.values()) == 2
