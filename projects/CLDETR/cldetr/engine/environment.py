"""What a run was computed with: versions, the code's commit, the device."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path
from typing import Any

import detectron2
import numpy as np
import torch
import torchvision

import cldetr

_REPOSITORY = Path(cldetr.__file__).parents[3]


def environment(device: str) -> dict[str, Any]:
    """Names what may change numbers, as plain data."""
    return {
        "device": _device_name(device),
        "versions": {
            "cldetr": cldetr.__version__,
            "commit": _commit(),
            "Python": platform.python_version(),
            "torch": torch.__version__,
            "torchvision": torchvision.__version__,
            "detectron2": detectron2.__version__,
            "numpy": np.__version__,
        },
    }


def _device_name(device: str) -> str:
    if device.startswith("cuda") and torch.cuda.is_available():
        return torch.cuda.get_device_name(device)
    return f"CPU ({platform.machine()}, {torch.get_num_threads()} threads)"


def _commit() -> str | None:
    """The commit of a source checkout, with "+" where files were changed; None elsewhere."""
    if not (_REPOSITORY / ".git").exists():  # a folder above may be another project's repository
        return None
    command = ["git", "-C", str(_REPOSITORY), "describe", "--always", "--exclude=*"]
    command += ["--abbrev=12", "--dirty=+"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
