"""Detectors as folders of Hugging Face transformers and as ONNX files: their results are equal."""

import json
import sys

import numpy as np
import pytest
import torch
from detectron2.modeling import build_model
from PIL import Image

from cldetr.analysis.export_huggingface import export_folder, export_onnx
from cldetr.analysis.predict import Predictor
from cldetr.cli import main
from cldetr.data.mapper import Augmentation
from cldetr.errors import InputError
from cldetr.grouping import Category

from .tiny_huggingface import CONFIGS, hf, save

RARE = {"deformable_detr_refine", "dab_detr", "lw_detr", "yolos", "conditional_detr", "deimv2"}
ALL = [pytest.param(x, marks=pytest.mark.slow if x in RARE else ()) for x in CONFIGS]


@pytest.fixture(scope="module")
def photo(tmp_path_factory):
    path = tmp_path_factory.mktemp("photo") / "photo.png"
    pixels = np.random.default_rng(0).integers(0, 256, (15, 20, 3), dtype=np.uint8)
    Image.fromarray(pixels).resize((96, 64), Image.Resampling.BICUBIC).save(path)
    return path


def detections(folder, photo):
    """What transformers alone finds on an image, by its own code: (label, score, box)."""
    model = hf.AutoModelForObjectDetection.from_pretrained(folder).eval()
    processor = hf.AutoImageProcessor.from_pretrained(folder)
    image = Image.open(photo).convert("RGB")
    with torch.no_grad():
        output = model(**processor(images=image, return_tensors="pt"))
    (found,) = processor.post_process_object_detection(
        output, threshold=0.0, target_sizes=[(image.height, image.width)]
    )
    order = found["scores"].argsort(descending=True)
    names = [model.config.id2label[label] for label in found["labels"][order].tolist()]
    return names, found["scores"][order].tolist(), found["boxes"][order]


def assert_found(predictor, folder, photo, score=2e-5, pixels=0.02):
    names, scores, boxes = detections(folder, photo)
    ours = predictor(photo, score=0.0)
    assert len(ours) >= 10
    assert set(names) <= {found.name for found in ours}
    limit = torch.tensor([96.0, 64.0, 96.0, 64.0])
    boxes = boxes.clamp(min=0).minimum(limit)
    for rank, found in enumerate(ours[:8]):
        assert found.score == pytest.approx(scores[rank], abs=score)
        near = [
            index
            for index, other in enumerate(scores)
            if abs(other - found.score) < score and names[index] == found.name
        ]
        apart = (boxes[near] - torch.tensor(found.box)).abs().amax(1)
        assert apart.min() < pixels, found


@pytest.mark.parametrize("name", ALL)
def test_a_detector_of_theirs_comes_back_without_the_classes_that_it_has_not_seen(
    name, tmp_path, photo
):
    save(name, tmp_path / "given")
    predictor = Predictor.from_checkpoint(tmp_path / "given")
    predictor.detector.visible_classes[1] = False
    assert export_folder(predictor, tmp_path / "written") < 1e-4
    config = json.loads((tmp_path / "written" / "config.json").read_text())
    assert config["id2label"] == {"0": "circle", "1": "triangle"}
    assert not list((tmp_path / "written").glob("*.bin"))
    assert_found(predictor, tmp_path / "written", photo)
    again = Predictor.from_checkpoint(tmp_path / "written")
    assert [category.name for category in again.categories] == ["circle", "triangle"]
    with pytest.raises(InputError, match="not empty"):
        export_folder(predictor, tmp_path / "written")


def own_predictor(config, size=(0, 0), seen=("class 1", "class 4", "class 6")):
    torch.manual_seed(0)
    detector = build_model(config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for tensor in detector.parameters():
            tensor += (torch.rand(tensor.shape, generator=generator) - 0.5) * 0.1
    categories = [Category(label + 1, f"class {label}") for label in range(7)]
    sizes = Augmentation(test_short_side=size[0], test_max_side=size[1], format=config.INPUT.FORMAT)
    return Predictor(detector, categories, sizes, seen=seen)


OURS = {
    "plain": {},
    "refine": {"WITH_BOX_REFINE": True},
    "two-stage": {"WITH_BOX_REFINE": True, "TWO_STAGE": True},
    "detr": {"arch": "DETR", "IN_FEATURES": ["res5"], "ONE_CLASS_PER_QUERY": True},
}


@pytest.mark.parametrize("structure", OURS)
def test_a_detector_of_ours_is_written_under_their_names(structure, tiny_config, tmp_path, photo):
    predictor = own_predictor(tiny_config(**OURS[structure]))
    assert export_folder(predictor, tmp_path / "out") < 1e-4
    assert_found(predictor, tmp_path / "out", photo, score=1e-4, pixels=0.05)
    again = Predictor.from_checkpoint(tmp_path / "out")  # and back through the adapter
    for found, other in zip(predictor(photo, 0.0)[:5], again(photo, 0.0)[:5], strict=True):
        assert found.score == pytest.approx(other.score, abs=1e-4)


def test_channel_order_and_size_go_into_the_folder(tiny_config, tmp_path, photo):
    cfg = tiny_config()
    cfg.INPUT.FORMAT = "BGR"
    cfg.MODEL.PIXEL_MEAN = [100.0, 110.0, 120.0]
    predictor = own_predictor(cfg, size=(96, 128))
    assert predictor.detector.input_format == "BGR"
    export_folder(predictor, tmp_path / "out")
    processor = hf.AutoImageProcessor.from_pretrained(tmp_path / "out")
    assert dict(processor.size) == {"shortest_edge": 96, "longest_edge": 128}
    assert processor.image_mean == pytest.approx([120 / 255, 110 / 255, 100 / 255])
    # Their resize rounds otherwise than ours.
    assert_found(predictor, tmp_path / "out", photo, score=0.01, pixels=2)


def test_what_transformers_has_no_model_for_is_refused(tiny_run, tiny_config, tmp_path, capsys):
    weights = str(tiny_run / "phase2/calibrate/model.pth")
    words = [
        "export",
        "--weights",
        weights,
        "--format",
        "huggingface",
        "--out",
        str(tmp_path / "x"),
    ]
    assert main(words) == 2
    assert "no model for this backbone" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()
    up_detr = own_predictor(tiny_config(arch="DETR", IN_FEATURES=["res5"], PRE_NORM=True))
    with pytest.raises(InputError, match="before each sub-layer"):
        export_folder(up_detr, tmp_path / "x")
    with pytest.raises(InputError, match="not seen any class"):
        export_folder(own_predictor(tiny_config(), seen=()), tmp_path / "x")


def test_the_command_writes_a_folder(tmp_path, capsys):
    save("deformable_detr", tmp_path / "given")
    words = ["export", "--weights", str(tmp_path / "given"), "--out", str(tmp_path / "out")]
    assert main([*words, "--format", "huggingface"]) == 0
    assert "equal to the detector within" in capsys.readouterr().out
    assert (tmp_path / "out" / "model.safetensors").exists()
    assert main([*words, "--format", "huggingface", "--size", "64", "64"]) == 2
    assert main([*words, "--format", "onnx"]) == 2
    assert "must end in .onnx" in capsys.readouterr().err


# ONNX. The packages are optional, and the tests say so where they are missing.

DYNAMIC = ["detr", "conditional_detr"]
FIXED = ["deformable_detr", "rf_detr"]


@pytest.mark.slow
@pytest.mark.parametrize("name", [*DYNAMIC, *FIXED])
def test_an_onnx_file_gives_what_the_detector_gives(name, tmp_path):
    runtime = pytest.importorskip("onnxruntime", reason="pip install 'cldetr[onnx]'")
    pytest.importorskip("onnxscript", reason="pip install 'cldetr[onnx]'")
    save(name, tmp_path / "given")
    predictor = Predictor.from_checkpoint(tmp_path / "given")
    size = (64, 96) if name == "deformable_detr" else None
    assert export_onnx(predictor, tmp_path / "model.onnx", size) < 1e-4
    session = runtime.InferenceSession(tmp_path / "model.onnx")
    about = json.loads(session.get_modelmeta().custom_metadata_map["cldetr"])
    assert list(about["id2label"].values()) == ["circle", "square", "triangle"]
    model = hf.AutoModelForObjectDetection.from_pretrained(tmp_path / "given").eval()
    for shape in [(64, 96), (96, 128)] if name in DYNAMIC else [size or (64, 64)]:
        pixels = torch.randn(1, 3, *shape)
        logits, boxes = session.run(["logits", "pred_boxes"], {"pixel_values": pixels.numpy()})
        with torch.no_grad():
            expected = model(pixel_values=pixels)
        np.testing.assert_allclose(logits, expected.logits, atol=1e-4)
        np.testing.assert_allclose(boxes, expected.pred_boxes, atol=1e-4)


@pytest.mark.slow
def test_what_onnx_cannot_do_is_refused(tmp_path):
    pytest.importorskip("onnxruntime", reason="pip install 'cldetr[onnx]'")
    pytest.importorskip("onnxscript", reason="pip install 'cldetr[onnx]'")
    save("deformable_detr", tmp_path / "given")
    predictor = Predictor.from_checkpoint(tmp_path / "given")
    with pytest.raises(InputError, match="give it, --size HEIGHT WIDTH"):
        export_onnx(predictor, tmp_path / "model.onnx")  # sizes are constants in its graph
    save("d_fine", tmp_path / "d_fine")
    with pytest.raises(InputError, match="differs from the original"):  # of onnxruntime's
        export_onnx(Predictor.from_checkpoint(tmp_path / "d_fine"), tmp_path / "model.onnx")
    assert not (tmp_path / "model.onnx").exists()


def test_without_the_packages_onnx_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    save("detr", tmp_path / "given")
    with pytest.raises(InputError, match=r"pip install 'cldetr\[onnx\]'"):
        export_onnx(Predictor.from_checkpoint(tmp_path / "given"), tmp_path / "model.onnx")
