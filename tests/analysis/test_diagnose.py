"""Diagnostics of runs: files, the run's own rule, and errors."""

import csv
import json
import shutil
from pathlib import Path

import pytest
from PIL import Image

from cldetr.analysis.diagnose import diagnose, diagnose_run
from cldetr.cli import main
from cldetr.engine.restore import config_of_run
from cldetr.errors import InputError


@pytest.fixture
def run(tiny_run, tmp_path):
    return shutil.copytree(tiny_run, tmp_path / "run")


def test_command_writes_table_json_csv_and_plots(run, capsys):
    assert main(["diagnose", str(run)]) == 0
    said = capsys.readouterr().out
    found = json.loads((run / "diagnostics.json").read_text())["phases"]["2"]
    assert found["recommended"]["overrides"] in said
    assert f"{found['images']} training images" in said
    assert set(found["per_category"]) == {
        name for name in found["per_category"] if f"  {name} (" in said
    }
    with open(run / "diagnostics/phase2.csv", newline="") as stream:
        rows = list(csv.DictReader(stream))
    best = found["recommended"]
    (row,) = [
        row
        for row in rows
        if row["class"] == "all"
        and (int(row["k"]), float(row["iou"]), float(row["score"]))
        == (best["k"], best["iou"], best["score"])
    ]
    assert float(row["f1"]) == pytest.approx(best["f1"], abs=1e-4)
    highest = max(float(x["f1"]) for x in rows if x["class"] == "all")
    assert best["f1"] == pytest.approx(highest, abs=1e-4)
    captions = json.loads((run / "diagnostics/captions.json").read_text())
    for name in captions:
        with Image.open(run / "diagnostics" / name) as picture:
            assert min(picture.size) > 150


def test_the_grid_has_the_runs_own_rule_with_its_own_counts(run):
    cfg = config_of_run(run)
    weights = run / "phase1/train/model.pth"
    diagnosis = diagnose(cfg, 2, weights)
    grid, rule, own = diagnosis.grid, diagnosis.rule, diagnosis.own
    setting = grid.k.index(rule.k), grid.iou.index(rule.iou), grid.score.index(rule.foreground)
    assert diagnosis.counts.given[setting].tolist() == own.given.tolist()
    assert diagnosis.counts.right[setting].tolist() == own.right.tolist()
    assert own.given.sum() > 0
    assert own.given[3] == 0  # the new class is never pseudo-labelled


def test_each_selection_is_shown_with_its_rates(run, capsys):
    assert main(["diagnose", str(run)]) == 0
    said = capsys.readouterr().out
    found = json.loads((run / "diagnostics.json").read_text())["phases"]["2"]["selections"]
    assert list(found)[:4] == ["top 10", "score ≥ 0.3", "score ≥ 0.4", "a threshold per class"]
    assert all(f"\n{name} " in said for name in found)
    for name in list(found)[:4]:  # suppression drops labels and adds none
        assert found[f"{name}, NMS 0.7"]["per_image"] <= found[name]["per_image"]


def test_the_test_images_serve_too(run):
    (diagnosis,) = diagnose_run(run, where="test", limit=5)
    assert diagnosis.counts.images == 5


def test_weights_and_a_config_suffice_before_any_training(run, tmp_path, capsys):
    cfg = config_of_run(run)
    config = tmp_path / "config.yaml"
    shutil.copy(Path(__file__).parents[1] / "engine/tiny.yaml", config)
    words = ["DATASETS.TRAIN", f"['{cfg.DATASETS.TRAIN[0]}']"]
    words += ["DATASETS.TEST", f"['{cfg.DATASETS.TEST[0]}']"]
    command = ["diagnose", "--weights", str(run / "phase1/train/model.pth"), "--config-file"]
    command += [str(config), "--out", str(tmp_path / "out"), "--limit", "4", "--set", *words]
    assert main(command) == 0
    assert (tmp_path / "out/diagnostics.json").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "give a run directory"),
        (["--weights", "x.pth"], "needs --config-file"),
        (["nowhere"], "no run directory"),
    ],
)
def test_what_is_missing_is_told(words, message, capsys):
    assert main(["diagnose", *words]) == 2
    assert message in capsys.readouterr().err


def test_a_phase_without_an_old_model_is_refused(run):
    with pytest.raises(InputError, match="phase 2 to 2"):
        diagnose(config_of_run(run), 1, run / "phase1/train/model.pth")
    shutil.rmtree(run / "phase1")
    with pytest.raises(InputError, match="not finished"):
        diagnose_run(run, phases=[2])
