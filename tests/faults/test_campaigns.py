"""The short form of the fault campaigns: a few faults of every kind, in one process."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CAMPAIGNS = (
    *("kill", "save", "term", "damage", "disk", "coco", "images"),
    *("malice", "nan", "keys", "order", "ranks"),
)


@pytest.fixture(scope="module")
def said():
    """What the campaigns print; importing the framework once is most of what they cost."""
    command = [sys.executable, "-W", "ignore", "-m", "faults", *CAMPAIGNS, "--size", "short"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    return done.stdout + done.stderr


@pytest.mark.parametrize("campaign", CAMPAIGNS)
def test_short_campaign_finds_nothing(said, campaign):
    lines = said.splitlines()
    ends = [place for place, line in enumerate(lines) if line.startswith(f"{campaign}: ")]
    assert ends, said[-3000:]
    assert not [line for line in lines if " MISS " in line], said[-5000:]
