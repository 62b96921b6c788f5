"""Whole runs on data as people have them: YOLO and Pascal VOC, with a stray category."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from cldetr.config import check_keys, load_config
from cldetr.data.audit import setting_warnings
from cldetr.data.coco import load_coco
from cldetr.engine.rundata import RunData
from cldetr.errors import InputError

from ..coco_files import write
from .conftest import train

PHASES = ["SCENARIO.PHASES", "[[circle, square], [triangle]]"]


@pytest.fixture(scope="module")
def formats(tiny_shapes, tmp_path_factory):
    """The tiny data set's files, and its training data as YOLO, its test data as Pascal VOC."""
    root = tmp_path_factory.mktemp("formats")
    train_file, test_file = (eval(text)[0].partition(".json:") for text in tiny_shapes[1::2])
    content = json.loads(Path(f"{train_file[0]}.json").read_text())
    names = [category["name"] for category in content["categories"]]
    write(root / "data.yaml", json.dumps({"train": "images", "names": names}))
    shutil.copytree(train_file[2], root / "images")
    for image in content["images"]:
        lines = []
        for row in content["annotations"]:
            if row["image_id"] == image["id"]:
                x, y, w, h = (side / 64 for side in row["bbox"])
                lines.append(f"{row['category_id'] - 1} {x + w / 2} {y + h / 2} {w} {h}")
        write(root / "labels" / image["file_name"].replace("png", "txt"), "\n".join(lines))
    content = json.loads(Path(f"{test_file[0]}.json").read_text())
    shutil.copytree(test_file[2], root / "voc")
    for image in content["images"]:
        xml = "<annotation><size><width>64</width><height>64</height></size>"
        for row in content["annotations"]:
            if row["image_id"] == image["id"]:
                x, y, w, h = row["bbox"]
                sides = {"xmin": x + 1, "ymin": y + 1, "xmax": x + w, "ymax": y + h}
                box = "".join(f"<{tag}>{side}</{tag}>" for tag, side in sides.items())
                name = names[row["category_id"] - 1]
                xml += f"<object><name>{name}</name><bndbox>{box}</bndbox></object>"
        write(root / "voc" / image["file_name"].replace("png", "xml"), xml + "</annotation>")
    words = ["DATASETS.TRAIN", f"['yolo:{root}/data.yaml/train']"]
    words += ["DATASETS.TEST", f"['voc:{root}/voc']"]
    return [load_coco(f"{file}.json", folder) for file, _, folder in (train_file, test_file)], words


def test_the_same_data_in_another_format_are_the_same_data(formats, tiny_config, tmp_path):
    (train_data, test_data), words = formats
    data = RunData(tiny_config(tmp_path, *words))
    for found, expected in ((data.train["base"], train_data), (data.test["base"], test_data)):
        names = [category.name for category in found.categories]
        assert sorted(names) == sorted(category.name for category in expected.categories)
        np.testing.assert_allclose(found.boxes, expected.boxes, atol=1e-9)
        labels = [expected.categories[label].name for label in expected.labels]
        assert [names[label] for label in found.labels] == labels


def test_a_run_on_yolo_and_voc_data_skips_a_stray_category(formats, tiny_config, tmp_path):
    _, words = formats
    results = train(tiny_config(tmp_path / "run", *words, *PHASES, "SCENARIO.PARTIAL", "True"))
    assert results["scenario"] == "2+1"
    audit = json.loads((tmp_path / "run/audit.json").read_text())
    assert audit["classes_never_learnt"] == ["star"]
    assert sum(phase["hidden"]["never"] for phase in audit["phases"]) > 0
    assert sorted(results["phases"][-1]["per_category"]) == ["circle", "square", "triangle"]


def test_a_stray_category_is_reported_with_the_key(tiny_config, tmp_path):
    with pytest.raises(InputError, match=r"(?s)in no phase.*SCENARIO.PARTIAL True.*star"):
        RunData(tiny_config(tmp_path, *PHASES))


def test_a_flat_list_of_phases_is_told_how_to_write_it(tiny_config, tmp_path):
    with pytest.raises(InputError, match=r"SCENARIO.PHASES is .*list of categories for each phase"):
        check_keys(tiny_config(tmp_path, "SCENARIO.PHASES", "[circle, square]"))


def test_settings_that_cannot_work_are_told_before_training(tiny_config, tmp_path, caplog):
    cfg = tiny_config(tmp_path, "MODEL.DETR.NUM_QUERIES", "3", "INPUT.MIN_SIZE_TEST", "16")
    data = RunData(cfg)
    source = data.train["base"]
    objects = {}  # by brute force, from the views
    for phase in data.scenario.phases:
        seen = data.scenario.seen(phase.index)
        rows = [np.arange(*source.starts[i : i + 2]) for i in source.indices_of(phase.image_ids)]
        counts = [int(np.isin(source.labels[image], seen).sum()) for image in rows]
        labels = source.labels[np.concatenate(rows)]
        sides = (
            source.boxes[np.concatenate(rows)][np.isin(labels, phase.classes), 2:] / 4
        )  # 64 → 16
        small = (sides.prod(axis=1) < 8**2).mean()
        few = [source.categories[k].name for k in phase.classes if 0 < (labels == k).sum() < 10]
        objects[phase.index] = sum(n > 3 for n in counts), max(counts), small, few
    data.record(tmp_path / "run")
    for phase, (images, most, small, few) in objects.items():
        told = "\n".join(line for line in caplog.messages if line.startswith(f"phase {phase}: "))
        assert f"{images} images have more objects" in told
        assert f"queries (3), up to {most}: set MODEL.DETR.NUM_QUERIES" in told
        assert f"{small:.0%} of the objects are smaller than a cell" in told
        assert ("fewer than 10 objects" in told) == bool(few)
        assert all(f"{name} (" in told for name in few)
    caplog.clear()
    data.record(tmp_path / "run")
    assert not caplog.messages  # once


def test_settings_that_work_are_not_warned_of(tiny_config, tmp_path):
    data = RunData(tiny_config(tmp_path))
    told = list(setting_warnings(data.scenario, data.train, load_config("configs/70_10.yaml")))
    assert not [line for line in told if "fewer than" not in line]
