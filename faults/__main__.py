"""Runs campaigns and says what they found."""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import get_args

os.environ.setdefault("OMP_NUM_THREADS", "1")

from faults.tally import Options, Size

# name → what it does, in the order in which they run
CAMPAIGNS = {
    "kill": "kill −9 at random moments of a run",
    "save": "kill −9 at every single step of a save",
    "term": "SIGTERM and SIGINT at random moments",
    "damage": "artefacts missing, empty, cut off, with flipped bits",
    "disk": "a full disk at each write",
    "coco": "mutated annotation files, judged by an independent checker",
    "voc": "mutated files of Pascal VOC, judged by an independent checker",
    "yolo": "mutated files of YOLO, judged by an independent checker",
    "images": "bad image files",
    "malice": "malicious weights, configs, overrides and paths",
    "nan": "NaN in loss, gradient, teacher and weights, on any process",
    "keys": "every key of the configuration changed on resume",
    "order": "killed and resumed with 0 and 2 workers, on one and two processes",
    "seams": "hooks, evaluators, builders and registered functions that fail",
    "starts": "starts that fail, are refused, or come at the same time",
    "ranks": "processes that die, hang, are slow, disagree or see older files",
    "price": "what safe checkpoints cost",
}


def main() -> int:
    """Returns 1 where a fault was not handled."""
    parser = argparse.ArgumentParser(
        prog="python -m faults",
        description=__doc__,
        epilog="campaigns: " + "; ".join(f"{name}: {what}" for name, what in CAMPAIGNS.items()),
    )
    parser.add_argument("campaigns", nargs="*", metavar="campaign", help="all by default")
    parser.add_argument("--size", choices=get_args(Size), default="nightly")
    parser.add_argument("--count", type=int, help="faults to try, instead of what the size says")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=60.0, help="time limit of each campaign")
    parser.add_argument("--stock", action="store_true", help="break stock Detectron2 instead")
    parser.add_argument("--work", type=Path, help="folder for the runs; kept where it is given")
    args = parser.parse_args()
    unknown = set(args.campaigns) - set(CAMPAIGNS)
    if unknown:
        parser.error(
            f"no campaign {', '.join(sorted(unknown))}: choose from {', '.join(CAMPAIGNS)}"
        )
    logging.disable(logging.WARNING)
    work = args.work or Path(tempfile.mkdtemp(prefix="cldetr-faults-", dir=_quick_folder()))
    missed = 0
    try:
        for name in args.campaigns or CAMPAIGNS:
            module = importlib.import_module(f"faults.{name}")
            run = getattr(module, "stock" if args.stock else "run", None)
            if run is None:
                continue
            begun = time.monotonic()
            folder = work / name
            shutil.rmtree(folder, ignore_errors=True)
            tally = run(Options(folder, args.size, args.count, args.seed, args.minutes))
            print(tally.text())
            print(f"{name}: {time.monotonic() - begun:.0f} s", flush=True)
            missed += len(tally.misses)
            if not args.work:
                shutil.rmtree(folder, ignore_errors=True)
    finally:
        if not args.work:
            shutil.rmtree(work, ignore_errors=True)
    return 1 if missed and not args.stock else 0


def _quick_folder() -> str | None:
    """Memory, where there is enough: the campaigns kill processes, not the machine."""
    shared = Path("/dev/shm")
    roomy = shared.is_dir() and os.access(shared, os.W_OK)
    return str(shared) if roomy and shutil.disk_usage(shared).free > 1 << 30 else None


if __name__ == "__main__":
    sys.exit(main())
