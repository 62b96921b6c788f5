"""`cldetr doctor`: one screen on what works on this machine, with the fix for what does not."""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import textwrap
import warnings
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from cldetr import __version__
from cldetr.doctor import Finding, default_data_root, examine

_MARKS = {"ok": " ok ", "warn": "warn", "fail": "FAIL"}
_WIDTH, _INDENT = 100, 24


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's options."""
    parser.add_argument(
        "--datasets",
        type=Path,
        metavar="DIR",
        help="where COCO is looked for (default: $DETECTRON2_DATASETS, else ./datasets)",
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("output"),
        metavar="DIR",
        help="where runs will be written (default: %(default)s)",
    )
    parser.add_argument(
        "--gpu",
        action="store_true",
        help="check the GPUs instead, in minutes: build the operator, compare it and training "
        "steps with the CPU, time full-size steps",
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")


def run(args: argparse.Namespace) -> int:
    """Prints the findings; status 1 where training could not start."""
    findings: list[Finding] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if not args.json:
            print(f"cldetr {__version__} on {platform.system()} {platform.machine()}\n")
        for finding in _findings(args):
            findings.append(finding)
            if not args.json:
                print(_line(finding), flush=True)
    failures = [finding.name for finding in findings if finding.status == "fail"]
    if args.json:
        content = {"version": __version__, "can_train": not failures}
        content["findings"] = [asdict(finding) for finding in findings]
        print(json.dumps(content, indent=1, ensure_ascii=False))
    else:
        subject = "Training on a GPU" if args.gpu else "Training"
        end = f"cannot start: {', '.join(failures)}." if failures else "can start."
        print(f"\n{subject} {end}")
        if args.gpu and not failures:
            print("Please report these lines: no GPU has confirmed docs/performance.md yet.")
    return 1 if failures else 0


def _findings(args: argparse.Namespace) -> Iterator[Finding]:
    if not args.gpu:
        return examine(args.datasets or default_data_root(), args.output)
    try:
        from cldetr.gpu_check import check_gpu, check_versions
    except ImportError as error:  # torch or Detectron2
        fix = "run `make setup` in the repository; `cldetr doctor` tells more"
        return iter([Finding("packages", "fail", str(error), fix)])
    return itertools.chain(check_versions(), check_gpu())


def _line(finding: Finding) -> str:
    text = _wrap(finding.text, f"[{_MARKS[finding.status]}] {finding.name:<{_INDENT - 7}}")
    return f"{text}\n{_wrap(finding.fix, ' ' * _INDENT + '→ ')}" if finding.fix else text


def _wrap(text: str, head: str) -> str:
    return textwrap.fill(
        text,
        width=_WIDTH,
        initial_indent=head,
        subsequent_indent=" " * len(head),
        break_on_hyphens=False,
        break_long_words=False,
    )
