"""The entry point of training: `train_net.py`, and the report that ends a run."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from cldetr.engine.main import main as run_engine

logger = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `train_net.py`; returns its exit status (2 for what the user can mend)."""
    return run_engine(argv, after_run=draw_report)


def draw_report(folder: Path) -> None:
    """Draws the page of a run that has ended. Whatever goes wrong here, the run is finished."""
    try:
        # Imported here: what drawing needs must not keep a run from training either.
        from cldetr.report.run_page import write_run_page
        from cldetr.report.rundir import read_run

        logger.info("report: %s", write_run_page(read_run(folder), folder / "report"))
    except Exception as error:
        logger.warning(
            "the run is finished, but its report could not be drawn (%s: %s); "
            "`cldetr report %s` tries again",
            type(error).__name__,
            error,
            folder,
        )


if __name__ == "__main__":
    sys.exit(main())
