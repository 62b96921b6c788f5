"""Exported detectors: equal to the original, and running without this package."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from detectron2.modeling import build_model

from cldetr.analysis import Predictor
from cldetr.analysis.export import export_detector
from cldetr.cli import main
from cldetr.config import load_config
from cldetr.data.mapper import Augmentation
from cldetr.errors import InputError
from cldetr.grouping import Category

TINY = str(Path(__file__).parents[1] / "engine" / "tiny.yaml")
DETR = [
    *("MODEL.META_ARCHITECTURE", "DETR"),
    *("MODEL.RESNETS.OUT_FEATURES", "['res5']"),
    *("MODEL.DETR.IN_FEATURES", "['res5']"),
    *("MODEL.DETR.WITH_BOX_REFINE", "False"),
]


def build(overrides=()):
    return build_model(load_config(TINY, [*overrides, "MODEL.DETR.NUM_CLASSES", "4"]))


ALONE = """
import json, sys, torch
for folder in sys.argv[1:]:
    image = torch.load(f"{folder}/image.pt")
    files = {"cldetr.json": ""}
    model = torch.export.load(f"{folder}/model.pt2", extra_files=files).module()
    assert json.loads(files["cldetr.json"])["classes"][2] == "class 2"
    torch.save(model(image), f"{folder}/found.pt")
assert "cldetr" not in sys.modules
"""


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Two detectors with an image and what their files alone found in it, by name."""
    categories = [Category(label + 1, f"class {label}") for label in range(4)]
    made = {}
    for name, overrides in (("DeformableDETR", []), ("DETR", DETR)):
        torch.manual_seed(0)
        folder = tmp_path_factory.mktemp(name)
        as_it_is = Augmentation(test_short_side=0)
        predictor = Predictor(build(overrides), categories, as_it_is, seen=["class 0", "class 2"])
        assert export_detector(predictor, 64, 80, folder / "model.pt2") < 1e-5
        image = torch.randint(0, 256, (3, 64, 80), dtype=torch.uint8)
        torch.save(image, folder / "image.pt")
        made[name] = predictor, image, folder
    folders = [str(folder) for *_, folder in made.values()]
    subprocess.run([sys.executable, "-c", ALONE, *folders], check=True)
    return {
        name: (predictor, image, torch.load(folder / "found.pt"))
        for name, (predictor, image, folder) in made.items()
    }


@pytest.mark.parametrize("name", ["DeformableDETR", "DETR"])
def test_the_file_alone_detects_what_the_predictor_does(name, exported):
    predictor, image, (boxes, scores, labels) = exported[name]
    expected = predictor(image.permute(1, 2, 0).numpy(), score=0.0)
    assert {0, 2} >= set(labels.tolist())
    torch.testing.assert_close(scores.tolist(), [x.score for x in expected], atol=1e-5, rtol=0)
    # The predictor clips to the image, as Detectron2 does.
    limit = torch.tensor([80.0, 64.0, 80.0, 64.0])
    clipped = boxes.clamp(min=0).minimum(limit)
    wanted = {(x.label, *(round(value) for value in x.box)) for x in expected}
    found = {(y, *map(round, x)) for x, y in zip(clipped.tolist(), labels.tolist(), strict=True)}
    assert len(wanted & found) >= 0.9 * len(wanted)  # rounding may differ at halves


def test_what_differs_is_not_written(tmp_path, monkeypatch):
    detector = build()
    categories = [Category(label, str(label)) for label in range(4)]
    predictor = Predictor(detector, categories, Augmentation(test_short_side=0))
    monkeypatch.setattr(
        "cldetr.layers.deform_attn.sample_levels",
        lambda value, sizes, locations, weights: 0.5 * value[:, : locations.shape[1]].flatten(2),
    )
    with torch.no_grad():
        for parameter in detector.parameters():  # the attention must matter
            parameter.add_(torch.randn_like(parameter) * 0.05)
    with pytest.raises(InputError, match="nothing was written"):
        export_detector(predictor, 64, 64, tmp_path / "model.pt2")
    assert not list(tmp_path.iterdir())


def test_bad_wishes_are_told(tmp_path, capsys):
    words = [
        "export",
        "--weights",
        "x.pth",
        "--out",
        str(tmp_path / "x.onnx"),
        "--size",
        "64",
        "64",
    ]
    assert main(words) == 2
    assert ".pt2" in capsys.readouterr().err
