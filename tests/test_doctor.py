import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import cldetr
from cldetr import commands
from cldetr.cli import main
from cldetr.data.shapes import ShapesOptions, ensure_shapes
from cldetr.doctor import examine

PROJECT = Path(cldetr.__file__).parents[1]


@pytest.fixture(scope="module")
def findings(tmp_path_factory):
    folder = tmp_path_factory.mktemp("doctor")
    return {found.name: found for found in examine(folder / "datasets", folder / "output")}


def test_every_subject_is_examined_and_nothing_fails_here(findings):
    assert list(findings) == [
        *("Python", "packages", "torch", "CUDA", "torchvision", "Detectron2"),
        *(name for name in findings if name.startswith("operator")),
        *("COCO 2017", "shapes", "disk", "memory"),
        *(["shared memory"] if "shared memory" in findings else []),
        "CPU",
    ]
    assert [found for found in findings.values() if found.status == "fail"] == []


def test_versions_are_those_that_run(findings):
    import detectron2
    import torch

    assert findings["torch"].text == torch.__version__
    assert findings["Detectron2"].text.startswith(detectron2.__version__)
    assert str(Path(detectron2.__file__).parent) in findings["Detectron2"].text
    assert sys.executable in findings["Python"].text


def test_whatever_is_not_in_order_comes_with_a_fix(findings):
    assert all(found.fix for found in findings.values() if found.status != "ok")


def test_data_sets_are_found_where_they_are_and_missing_parts_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ensure_shapes("datasets/shapes", ShapesOptions(train_images=10, val_images=10))
    (tmp_path / "data" / "coco" / "val2017").mkdir(parents=True)
    found = {finding.name: finding for finding in examine(tmp_path / "data", tmp_path)}
    assert found["shapes"].status == "ok"
    assert found["COCO 2017"].status == "warn"
    files = "annotations/instances_train2017.json, annotations/instances_val2017.json"
    assert found["COCO 2017"].text.endswith(f"coco lacks {files}, train2017")


def test_json_says_the_same_and_the_status_is_zero(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("DETECTRON2_DATASETS", str(tmp_path / "elsewhere"))
    assert main(["doctor", "--json", "--output", str(tmp_path)]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["can_train"] is True
    coco = next(found for found in content["findings"] if found["name"] == "COCO 2017")
    assert coco["status"] == "warn"
    assert str(tmp_path / "elsewhere") in coco["text"]


def run_without_packages(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs the doctor in an interpreter that has the standard library and this package only."""
    code = f"import sys; sys.path.insert(0, {str(PROJECT)!r})\nfrom cldetr.cli import main\n"
    code += f"sys.exit(main(['doctor', *{list(arguments)!r}]))"
    command = [sys.executable, "-S", "-I", "-c", code]
    return subprocess.run(command, capture_output=True, text=True)


def test_without_torch_and_detectron2_it_says_so_and_fails(tmp_path):
    done = run_without_packages("--output", str(tmp_path))
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    for name in ("torch", "Detectron2"):
        line = next(text for text in done.stdout.splitlines() if f"] {name} " in text)
        assert line.startswith("[FAIL]")
        assert "not installed" in line
    assert "→ run `make setup` in the repository" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("Training cannot start: packages, torch,")


def test_one_screen_is_enough(tmp_path, capsys, monkeypatch):
    main(["doctor", "--output", str(tmp_path)])
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "Training can start."
    assert len(lines) <= 40
    # A path is not broken; everything else is wrapped, so that a long line holds one word only.
    long = [line for line in lines if len(line) > 100]
    assert [line for line in long if len(line[24:].split()) > 1] == []
    monkeypatch.setattr(commands.doctor, "_WIDTH", 10_000)
    main(["doctor", "--output", str(tmp_path)])
    wide = capsys.readouterr().out.splitlines()
    assert any(len(line[24:].split()) > 1 for line in wide if len(line) > 100)  # there is need


def test_a_folder_that_cannot_be_written_to_fails(tmp_path, monkeypatch):
    # As the system answers for a read-only folder; root would be allowed to write in one.
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)
    disk = next(found for found in examine(tmp_path, tmp_path / "runs") if found.name == "disk")
    assert disk.status == "fail"
    assert str(tmp_path) in disk.text
    assert "OUTPUT_DIR" in disk.fix
