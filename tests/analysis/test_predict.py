"""Prediction: weights alone suffice, results are COCO's, bad input is told and nothing is lost."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from detectron2.engine import DefaultPredictor
from PIL import Image
from pycocotools.coco import COCO

from cldetr.analysis import Predictor
from cldetr.cli import main
from cldetr.config import load_config
from cldetr.engine.checkpoint import load_state, save_state
from cldetr.errors import InputError

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def weights(tiny_run):
    return tiny_run / "phase2/calibrate/model.pth"


@pytest.fixture(scope="module")
def photos(tiny_run):
    """A folder of eight images."""
    return tiny_run.parent / "shapes/images/val"


def predict(weights, *words):
    return main(["predict", "--weights", str(weights), *map(str, words)])


def detectron2_finds(run, weights, path):
    """What Detectron2's own predictor finds, with nothing but the run's config and its weights."""
    cfg = load_config(str(run / "config.yaml"))
    cfg.MODEL.WEIGHTS = str(weights)
    bgr = np.array(Image.open(path).convert("RGB"))[:, :, ::-1]
    return DefaultPredictor(cfg)(bgr)["instances"]


@pytest.mark.parametrize("phase", ["phase1/train", "phase2/calibrate"])
def test_detectron2s_predictor_finds_exactly_the_same(tiny_run, photos, tmp_path, phase):
    weights = tiny_run / phase / "model.pth"
    alone = shutil.copy(weights, tmp_path / "moved.pth")
    predictor = Predictor.from_checkpoint(alone)
    for path in sorted(photos.iterdir())[:3]:
        found = predictor(path, score=0.0)
        expected = detectron2_finds(tiny_run, weights, path)
        assert [x.label for x in found] == expected.pred_classes.tolist()
        assert [x.score for x in found] == expected.scores.tolist()
        assert [list(x.box) for x in found] == expected.pred_boxes.tensor.tolist()
        assert len(found) > 5
    names = [category.name for category in predictor.categories]
    assert [x.name for x in found] == [names[x.label] for x in found]


def test_detectron2s_predictor_has_the_weights_that_it_is_given(tiny_run, weights, photos):
    path = sorted(photos.iterdir())[0]
    first = tiny_run / "phase1/train/model.pth"
    scores = [detectron2_finds(tiny_run, x, path).scores[:5].tolist() for x in (weights, first, "")]
    assert scores[0] != scores[1]
    assert scores[0] != scores[2]
    found = Predictor.from_checkpoint(weights)(path, score=0.0)
    assert [x.score for x in found[:5]] == scores[0]


def test_classes_not_yet_learnt_are_never_predicted(tiny_run, photos):
    predictor = Predictor.from_checkpoint(tiny_run / "phase1/train/model.pth")
    image = sorted(photos.iterdir())[0]
    found = {detection.label for detection in predictor(image, score=0.0)}
    assert found <= {0, 1, 2}
    assert found


def test_weights_that_do_not_say_their_model_need_a_config(weights, photos, tmp_path):
    state = load_state(weights)
    meta = {key: state["cldetr"][key] for key in ("categories", "seen", "phase")}
    save_state(tmp_path / "model.pth", {"model": state["model"], "cldetr": meta})
    with pytest.raises(InputError, match="--config-file"):
        Predictor.from_checkpoint(tmp_path / "model.pth")
    image = sorted(photos.iterdir())[1]
    config = str(weights.parents[2] / "config.yaml")
    found = Predictor.from_checkpoint(tmp_path / "model.pth", config_file=config)(image, score=0.1)
    assert found == Predictor.from_checkpoint(weights)(image, score=0.1)


def test_a_run_in_place_of_weights_stands_for_its_newest_model(tiny_run, photos, tmp_path, caplog):
    image = sorted(photos.iterdir())[0]
    with caplog.at_level("INFO"):
        found = Predictor.from_checkpoint(tiny_run)(image, score=0.0)
    assert "phase2/calibrate/model.pth" in caplog.text
    assert found == Predictor.from_checkpoint(tiny_run / "phase2/calibrate/model.pth")(image, 0.0)
    unfinished = shutil.copytree(tiny_run, tmp_path / "run")
    for stage in unfinished.glob("phase*/*/stage.json"):
        stage.unlink()
    with pytest.raises(InputError, match=r"no phase of .* is finished yet"):
        Predictor.from_checkpoint(unfinished)


def test_images_are_resized_to_what_the_detector_was_trained_on(tiny_run, photos, tmp_path, caplog):
    weights = tiny_run / "phase2/calibrate/model.pth"
    with Image.open(sorted(photos.iterdir())[0]) as image:
        small = np.array(image.convert("RGB"))
    assert small.shape == (64, 64, 3)
    large = small.repeat(8, axis=0).repeat(8, axis=1)
    predictor = Predictor.from_checkpoint(weights)
    expected, found = predictor(small, 0.0), predictor(large, 0.0)
    resized = [x for x in caplog.records if "short side of 512 to 64 pixels" in x.getMessage()]
    assert len(resized) == 1
    as_it_is = Predictor.from_checkpoint(weights, short_side=0)(large, 0.0)
    scores = [np.array([x.score for x in each]) for each in (expected, found, as_it_is)]
    assert abs(scores[1] - scores[0]).max() < 3e-3
    assert abs(scores[2] - scores[0]).max() > 1e-2
    np.testing.assert_allclose(np.array(found[0].box) / 8, expected[0].box, atol=0.5)
    Image.fromarray(large).save(tmp_path / "large.png")
    words = [tmp_path / "large.png", "--out", tmp_path / "out", "--short-side", "64"]
    assert predict(weights, *words, "--score", "0") == 0
    stored = json.loads((tmp_path / "out/detections.json").read_text())
    assert [x["score"] for x in stored] == [x.score for x in found]


def test_a_detector_of_images_as_they_are_knows_the_sizes_of_its_training_images(weights, photos):
    state = load_state(weights)
    assert state["cldetr"]["short_sides"] == [64, 64]
    config = yaml.safe_load(state["cldetr"]["config"])
    config["INPUT"]["MIN_SIZE_TRAIN"] = [0]  # trained without any resizing
    state["cldetr"] |= {"config": yaml.safe_dump(config), "short_sides": [48, 96]}
    save_state(weights.with_name("own_sizes.pth"), state)
    predictor = Predictor.from_checkpoint(weights.with_name("own_sizes.pth"))
    for side, expected in ((30, 48), (64, 64), (96, 96), (200, 96)):
        pixels = np.zeros((side, 2 * side, 3), dtype=np.uint8)
        assert predictor.prepare(pixels).shape == (3, expected, 2 * expected)


def test_weights_of_a_lazy_config_may_not_name_anything_but_parts_of_models(weights, tmp_path):
    state = load_state(weights)
    lazy = {"_target_": "detectron2.modeling.backbone.resnet.np.save", "num_classes": 4}
    config = yaml.safe_load(state["cldetr"]["config"])
    config["MODEL"]["META_ARCHITECTURE"], config["LAZY"] = "LazyModel", {"model": lazy}
    state["cldetr"]["config"] = yaml.safe_dump(config)
    save_state(tmp_path / "bad.pth", state)
    with pytest.raises(InputError, match=r"np\.save"):
        Predictor.from_checkpoint(tmp_path / "bad.pth")


def test_the_three_kinds_of_image_are_the_same_image(weights, photos):
    predictor = Predictor.from_checkpoint(weights)
    path = sorted(photos.iterdir())[2]
    with Image.open(path) as image:
        pixels = np.array(image.convert("RGB"))
        assert predictor(path, 0.0) == predictor(image, 0.0) == predictor(pixels, 0.0)


def test_a_list_of_images_gives_the_results_of_each(weights, photos):
    predictor = Predictor.from_checkpoint(weights)
    paths = sorted(photos.iterdir())[:3]
    assert predictor(paths, 0.0) == [predictor(path, 0.0) for path in paths]
    assert predictor([]) == []


def test_command_writes_pictures_and_what_pycocotools_reads(weights, photos, tmp_path, capsys):
    out = tmp_path / "out"
    assert predict(weights, photos, "--out", out, "--score", "0.02") == 0
    truth = COCO(str(out / "images.json"))
    results = truth.loadRes(str(out / "detections.json"))
    assert len(truth.imgs) == 8
    assert len(results.anns) > 0
    assert all(x["score"] >= 0.02 for x in results.anns.values())
    for image in truth.imgs.values():
        assert Path(image["file_name"]).is_file()
        with Image.open(out / image["picture"]) as picture:
            assert min(picture.size) == 480
    assert "8 images" in capsys.readouterr().out


def test_no_detection_is_a_result(weights, photos, tmp_path):
    image = sorted(photos.iterdir())[0]
    assert predict(weights, image, "--out", tmp_path / "out", "--score", "1.0") == 0
    assert json.loads((tmp_path / "out/detections.json").read_text()) == []
    assert (tmp_path / "out" / f"{image.stem}.png").is_file()


def test_images_turned_by_their_exif_tag_are_turned_upright(weights, photos, tmp_path):
    with Image.open(sorted(photos.iterdir())[3]) as image:
        upright = image.convert("RGB").crop((0, 0, 64, 40))
        exif = Image.Exif()
        exif[0x0112] = 6  # the camera was held on its side
        upright.rotate(90, expand=True).save(tmp_path / "turned.png", exif=exif)
        upright.save(tmp_path / "upright.png")
    predictor = Predictor.from_checkpoint(weights)
    turned = predictor(tmp_path / "turned.png", 0.0)
    assert turned == predictor(tmp_path / "upright.png", 0.0)
    assert predict(weights, tmp_path / "turned.png", "--out", tmp_path / "out") == 0
    entry = json.loads((tmp_path / "out/images.json").read_text())["images"][0]
    assert (entry["width"], entry["height"]) == (64, 40)


def test_all_missing_and_damaged_images_are_told_at_once(weights, photos, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    words = [tmp_path / "a.png", tmp_path / "empty", "--out", tmp_path / "out"]
    assert predict(weights, *words) == 2
    said = capsys.readouterr().err
    assert "a.png: there is no such file" in said
    assert "empty: no image in this folder" in said
    whole = sorted(photos.iterdir())[0].read_bytes()
    (tmp_path / "b.png").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "c.png").write_bytes(b"")
    (tmp_path / "d.jpg").write_text("no image")
    words = [*(tmp_path / x for x in ("b.png", "c.png", "d.jpg")), "--out", tmp_path / "out"]
    assert predict(weights, *words) == 2
    said = capsys.readouterr().err
    assert re.search(r"b\.png: .*truncated", said)
    assert "c.png: the file is empty" in said
    assert "d.jpg: not a readable image" in said
    assert not (tmp_path / "out").exists()


def test_images_whose_pixels_are_damaged_do_not_cost_the_others(weights, photos, tmp_path, capsys):
    good, other = sorted(photos.iterdir())[:2]
    with Image.open(other) as image:
        image.save(tmp_path / "broken.png")
    pixels = bytearray((tmp_path / "broken.png").read_bytes())
    start = pixels.index(b"IDAT") + 4
    pixels[start : start + 100] = bytes(100)
    (tmp_path / "broken.png").write_bytes(pixels)  # its header and its end are as they were
    assert predict(weights, tmp_path / "broken.png", good, "--out", tmp_path / "out") == 2
    assert "broken.png" in capsys.readouterr().err
    images = json.loads((tmp_path / "out/images.json").read_text())["images"]
    assert [Path(image["file_name"]).name for image in images] == [good.name]


def test_inputs_are_never_overwritten(weights, photos, tmp_path, capsys):
    image = Path(shutil.copy(sorted(photos.iterdir())[0], tmp_path / "x.png"))
    before = image.read_bytes()
    assert predict(weights, image, "--out", tmp_path) == 2
    assert "choose another --out" in capsys.readouterr().err
    assert image.read_bytes() == before


def test_images_of_one_name_get_pictures_of_their_own(weights, photos, tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        shutil.copy(sorted(photos.iterdir())[0], tmp_path / folder / "x.png")
    words = [tmp_path / "a", tmp_path / "b", "--out", tmp_path / "out"]
    assert predict(weights, *words) == 0
    assert {path.name for path in (tmp_path / "out").glob("*.png")} == {"x.png", "x_2.png"}


def test_weights_without_categories_are_refused(tmp_path, capsys):
    save_state(tmp_path / "x.pth", {"model": {"weight": torch.zeros(1)}})
    assert predict(tmp_path / "x.pth", __file__, "--out", tmp_path / "out") == 2
    save_state(tmp_path / "x.pth", {"model": {"weight": torch.zeros(1)}})
    with pytest.raises(InputError, match="which categories"):
        Predictor.from_checkpoint(tmp_path / "x.pth")


def test_the_snippets_of_the_documentation_work(tiny_run, photos, tmp_path, monkeypatch, capsys):
    text = (DOCS / "predict.md").read_text(encoding="utf-8")
    ours, detectron2s, *_ = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    monkeypatch.chdir(tmp_path)
    weights = tiny_run / "phase2/calibrate/model.pth"
    shutil.copy(weights, "model.pth")
    shutil.copytree(tiny_run, "RUN")
    shutil.copy(sorted(photos.iterdir())[0], "photo.png")
    exec(compile(ours.replace("score=0.5", "score=0.0"), "docs/predict.md", "exec"), {})
    names = {x["name"] for x in load_state(weights)["cldetr"]["categories"]}
    found = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert set(found) <= names
    exec(compile(detectron2s, "docs/predict.md", "exec"), {})
    assert f"num_instances={len(found)}" in capsys.readouterr().out
