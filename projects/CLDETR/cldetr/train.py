"""The entry point of training: `train_net.py`, and what is drawn of a run that has ended."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from cldetr.engine.main import main as run_engine

logger = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `train_net.py`; returns its exit status (2 for what the user can mend)."""
    return run_engine(argv, after_run=show_run)


def show_run(folder: Path) -> None:
    """Draws pictures, diagnostics and the page of a run that has ended.

    Whatever goes wrong here, the run is finished: it is told, with the command that tries again.
    """
    steps: dict[str, Callable[[Path], None]] = {
        "pictures": _draw_pictures,
        "diagnose": _diagnose,
        "report": _write_report,  # last: it shows the others
    }
    for command, step in steps.items():
        try:
            step(folder)
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
    from cldetr.report.pictures import draw_run_pictures

    draw_run_pictures(folder, sample=4)


def _diagnose(folder: Path) -> None:
    from cldetr.engine.from_run import recipe_of_run
    from cldetr.report.diagnostics import diagnose_run

    if recipe_of_run(folder).method.pseudo is not None:
        diagnose_run(folder, limit=200)


def _write_report(folder: Path) -> None:
    from cldetr.report.run_page import write_run_page
    from cldetr.report.rundir import read_run

    logger.info("report: %s", write_run_page(read_run(folder), folder / "report"))


if __name__ == "__main__":
    sys.exit(main())
