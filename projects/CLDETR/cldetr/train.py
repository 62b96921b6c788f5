"""Training from an installed package: `python -m cldetr.train`, the same as `train_net.py`."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from detectron2.evaluation import verify_results
from detectron2.utils import comm

from cldetr.config import load_config
from cldetr.engine import IncrementalTrainer, default_argument_parser, default_setup, launch
from cldetr.evaluation.results import format_entry

logger = logging.getLogger(__name__)


def run(argv: Sequence[str] | None = None) -> int:
    """Runs a training command line; returns its exit status (2 for what the user can fix)."""
    args = default_argument_parser().parse_args(argv)
    return launch(
        main,
        args.num_gpus,
        num_machines=args.num_machines,
        machine_rank=args.machine_rank,
        dist_url=args.dist_url,
        args=(args,),
        timeout=timedelta(minutes=args.timeout),
    )


def main(args: argparse.Namespace) -> dict[str, Any]:
    """Trains, or evaluates with --eval-only; what each process does."""
    cfg = load_config(args.config_file, args.opts)
    default_setup(cfg, args)
    trainer = IncrementalTrainer(cfg)
    if args.eval_only:
        results = trainer.evaluate_weights()
        if comm.is_main_process():
            logger.info("\n%s", format_entry(results))
            verify_results(cfg, results)
        return results
    trainer.resume_or_load(resume=args.resume)
    results = trainer.train()
    show_run(cfg.OUTPUT_DIR, enabled=cfg.REPORT)
    return results


def show_run(folder: str | Path, enabled: bool = True) -> None:
    """Draws pictures, diagnostics and the page of a run that has ended, on rank 0.

    Whatever goes wrong here, the run is finished: it is told, with the command that tries again.
    """
    steps: dict[str, Callable[[Path], None]] = {
        "pictures": _draw_pictures,
        "diagnose": _diagnose,
        "report": _write_report,  # last: it shows the others
    }
    for command, step in steps.items() if enabled and comm.is_main_process() else ():
        try:
            step(Path(folder))
        except Exception as error:
            logger.warning(
                "the run is finished, but `cldetr %s %s` did not work (%s: %s)",
                command,
                folder,
                type(error).__name__,
                error,
            )


# Imported where it is used: what drawing needs must not keep a run from training.


def _draw_pictures(folder: Path) -> None:
    from cldetr.analysis.pictures import draw_run_pictures

    draw_run_pictures(folder, sample=4)


def _diagnose(folder: Path) -> None:
    from cldetr.analysis.diagnose import diagnose_run
    from cldetr.config import method_of
    from cldetr.engine.restore import config_of_run
    from cldetr.report.diagnosis_plots import write_diagnosis_plots

    if method_of(config_of_run(folder)).pseudo is not None:
        write_diagnosis_plots(diagnose_run(folder, limit=200), folder)


def _write_report(folder: Path) -> None:
    from cldetr.report.run_page import write_run_page
    from cldetr.report.rundir import read_run

    logger.info("report: %s", write_run_page(read_run(folder), folder / "report"))


if __name__ == "__main__":
    sys.exit(run())
