"""Sweeps: what runs, what is skipped, and the interval worked by hand."""

import json
from pathlib import Path

import pytest

from cldetr.engine.sweep import collect, markdown, mean_interval, plan
from cldetr.errors import InputError


def test_the_interval_is_students():
    mean, half = mean_interval([1.0, 2.0, 3.0])
    assert mean == 2.0
    assert half == pytest.approx(4.302653 * 1.0 / 3**0.5, rel=1e-6)
    assert mean_interval([5.0]) == (5.0, None)


def test_jobs_carry_their_seed_and_share_the_first_phase(tmp_path):
    (first, second), _ = plan([Path("a.yaml"), Path("b.yaml")], [4, 5], tmp_path, share_first=True)
    words = second.command([])
    assert words[words.index("SCENARIO.CLASS_SEED") + 1] == "4"
    assert words[words.index("MODEL.DETECTOR") + 1] == str(first.folder / "phase1/train/model.pth")
    assert "--resume" not in words
    second.folder.mkdir(parents=True)
    (second.folder / "recipe.json").write_text("{}")
    assert "--resume" in second.command([])
    assert "MODEL.DETECTOR" not in first.command([])


def test_equal_names_are_refused(tmp_path):
    with pytest.raises(InputError, match="different names"):
        plan([Path("x/a.yaml"), Path("y/a.yaml")], [0], tmp_path, share_first=False)


def test_the_table_has_means_over_the_finished_runs(tmp_path):
    chains = plan([Path("a.yaml")], [0, 1, 2], tmp_path, share_first=False)
    for job, value in zip((chains[0][0], chains[2][0]), (40.0, 44.0), strict=True):
        scores = {"AP": value, "AP50": value, "AP75": None}
        phase = {"phase": 1, "all": scores, "old": scores, "new": scores}
        job.folder.mkdir(parents=True)
        content = {"format": 1, "phases": [phase], "fpp": {"AP": 1.0}}
        (job.folder / "results.json").write_text(json.dumps(content))
    table = markdown(collect(chains))
    assert "| a | 2 | 42.0 ± 25.4 | 42.0 ± 25.4 | n/a |" in table
