"""Scoring a detector on the classes it has seen, in one pass over the test images."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from detectron2.evaluation import inference_on_dataset
from detectron2.utils import comm
from tqdm import tqdm

from cldetr.engine.checkpoint import load_into, load_state
from cldetr.engine.evaluation import IncrementalEvaluator
from cldetr.engine.from_run import final_weights
from cldetr.engine.recipe import Recipe
from cldetr.engine.rundata import RunData
from cldetr.errors import InputError
from cldetr.modeling.detector import Detector

logger = logging.getLogger(__name__)


def score_detector(
    detector: Detector, data: RunData, phase: int, restrict_images: bool = False
) -> dict[str, Any]:
    """Evaluates a detector as it is after a phase; an empty dict on all but the main process."""
    seen = torch.zeros(len(data.scenario.categories), dtype=torch.bool, device=detector.device)
    seen[list(data.scenario.seen(phase))] = True
    evaluator = IncrementalEvaluator(
        data.ground_truth(), data.scenario, phase, restrict_images=restrict_images
    )
    before = detector.visible_classes
    detector.visible_classes = seen
    try:
        quiet = None if comm.is_main_process() else True  # None: only on a terminal
        bar = {"desc": f"evaluating phase {phase}", "leave": False, "disable": quiet}
        return inference_on_dataset(detector, tqdm(data.test_loader(), **bar), evaluator)
    finally:
        detector.visible_classes = before


def score_weights(recipe: Recipe) -> dict[str, Any]:
    """`--eval-only`: evaluates MODEL.WEIGHTS, or else the newest model of the run directory."""
    root = Path(recipe.runtime.output_dir)
    data = RunData(recipe)
    path = recipe.model.weights or _newest_model(root, len(data.scenario.phases))
    state = load_state(path)
    phase = int(state.get("cldetr", {}).get("phase", len(data.scenario.phases)))
    if not 1 <= phase <= len(data.scenario.phases):
        raise InputError(
            f"{path} is of phase {phase}, the scenario has {len(data.scenario.phases)}"
        )
    detector = recipe.model.build(len(data.scenario.categories))
    load_into(detector, state["model"], str(path))
    logger.info("evaluating %s after phase %d", path, phase)
    detector.to(recipe.runtime.device)
    return score_detector(detector, data, phase, recipe.runtime.restrict_eval)


def _newest_model(root: Path, phases: int) -> str:
    """The last phase's weights that a run has finished."""
    for phase in range(phases, 0, -1):
        path = final_weights(root, phase)
        if path is not None:
            return str(path)
    raise InputError(f"{root} holds no finished model: set MODEL.WEIGHTS to the one to evaluate")
