"""`cldetr doctor`: one screen on what works on this machine, with the fix for what does not."""

from __future__ import annotations

import argparse
import json
import platform
import textwrap
import warnings
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
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")


def run(args: argparse.Namespace) -> int:
    """Prints the findings; status 1 where training could not start."""
    findings: list[Finding] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if not args.json:
            print(f"cldetr {__version__} on {platform.system()} {platform.machine()}\n")
        for finding in examine(args.datasets or default_data_root(), args.output):
            findings.append(finding)
            if not args.json:
                print(_line(finding), flush=True)
    failures = [finding.name for finding in findings if finding.status == "fail"]
    if args.json:
        content = {"version": __version__, "can_train": not failures}
        content["findings"] = [asdict(finding) for finding in findings]
        print(json.dumps(content, indent=1, ensure_ascii=False))
    elif failures:
        print(f"\nTraining cannot start: {', '.join(failures)}.")
    else:
        print("\nTraining can start.")
    return 1 if failures else 0


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
