"""What a run ends with: pictures, diagnostics and the page of it."""

from __future__ import annotations

import logging
from pathlib import Path

from detectron2.utils import comm

logger = logging.getLogger(__name__)


def show_run(folder: str | Path, enabled: bool = True) -> None:
    """Draws pictures, diagnostics and the page of a run that has ended, on rank 0.

    Whatever goes wrong here, the run is finished: it is told, with the command that tries again.
    """
    steps = {"pictures": _draw_pictures, "diagnose": _diagnose, "report": _write_report}
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
    from cldetr.data.manifest import load_manifest
    from cldetr.engine.restore import config_of_run
    from cldetr.report.diagnosis_plots import write_diagnosis_plots

    scenario = load_manifest(folder / "manifest.json")
    labels = method_of(config_of_run(folder)).pseudo is not None
    if labels and scenario.hides_seen(len(scenario.phases)):
        write_diagnosis_plots(diagnose_run(folder, limit=200), folder)


def _write_report(folder: Path) -> None:
    from cldetr.report.pages import write_run_page
    from cldetr.report.rundir import read_run

    logger.info("report: %s", write_run_page(read_run(folder), folder / "report"))
