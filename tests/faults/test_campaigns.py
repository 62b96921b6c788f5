"""The short form of the fault campaigns: a few faults of every kind."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
INPUTS = ("coco", "voc", "yolo", "images", "malice", "keys")
RUNS = (
    *("kill", "save", "term", "damage", "disk", "nan", "order"),
    *("starts", "seams", "ranks"),
)


def check(*campaigns, seconds):
    command = [sys.executable, "-W", "ignore", "-m", "faults", *campaigns, "--size", "short"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=seconds)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said[-5000:]
    assert all(f"\n{campaign}: " in said for campaign in campaigns), said[-5000:]


def test_bad_and_malicious_inputs_are_refused():
    check(*INPUTS, seconds=280)


@pytest.mark.slow
@pytest.mark.parametrize("campaign", RUNS)
def test_broken_runs_go_on(campaign):
    check(campaign, seconds=1200)
