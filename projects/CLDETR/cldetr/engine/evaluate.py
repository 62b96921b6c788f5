"""The results of a run, and evaluation without training."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from pathlib import Path, PurePath
from typing import Any

from detectron2.config import CfgNode
from detectron2.evaluation import DatasetEvaluator, inference_on_dataset, verify_results
from detectron2.utils import comm
from torch import nn

from cldetr.config import method_of
from cldetr.engine.checkpoint import load_into, load_state
from cldetr.engine.ledger import read_identity, read_json
from cldetr.engine.ranks import beside_rank0, from_rank0
from cldetr.engine.restore import final_weights
from cldetr.engine.rundata import RunData
from cldetr.engine.stages import evaluation_config, see_classes
from cldetr.errors import InputError
from cldetr.evaluation.evaluator import split_details
from cldetr.evaluation.results import (
    format_entry,
    format_matrix,
    format_table,
    load_results,
    summarise,
    write_results,
)
from cldetr.files import write_json
from cldetr.modeling.detector import Detector
from cldetr.scenario import Scenario

logger = logging.getLogger(__name__)

Test = Callable[[CfgNode, Detector], dict[str, Any]]


def evaluate(cfg: CfgNode, data: RunData, detector: Detector, test: Test) -> dict[str, Any]:
    """Evaluates without training and prints the results.

    A finished run whose DATASETS.TEST is another one now is evaluated after each phase; anything
    else is one set of weights.

    Args:
        cfg: of the run.
        data: its data.
        detector: receives the weights.
        test: the trainer's `test`.
    """
    stored = from_rank0(lambda: _own_identity(cfg))
    whole_run = bool(stored) and stored["DATASETS.TEST"] != list(cfg.DATASETS.TEST)
    if whole_run:
        results = _evaluate_run(cfg, data, detector, test)
    else:
        results = _evaluate_weights(cfg, data, detector, test, own=bool(stored))
    if comm.is_main_process():
        logger.info("\n%s", format_table(results) if whole_run else format_entry(results))
        if not whole_run:
            verify_results(cfg, results)
    return results


def run_evaluator(model: nn.Module, loader: Any, evaluator: DatasetEvaluator) -> dict[str, Any]:
    """Evaluates a model on a loader's images; an empty dictionary on all ranks but the first."""
    return inference_on_dataset(model, loader, _PatientEvaluator(evaluator)) or {}


class _PatientEvaluator(DatasetEvaluator):
    """An evaluator whose rank 0 may take longer than the timeout for its results."""

    def __init__(self, evaluator: DatasetEvaluator) -> None:
        self.reset, self.process = evaluator.reset, evaluator.process
        self.evaluate = lambda: beside_rank0(evaluator.evaluate)


def write_summary(cfg: CfgNode, scenario: Scenario) -> dict[str, Any]:
    """Writes and logs the table of all phases of a finished run; returns it."""
    root = Path(cfg.OUTPUT_DIR)
    phases = from_rank0(
        lambda: [
            read_json(root / f"phase{phase.index}" / "evaluate" / "metrics.json")
            for phase in scenario.phases
        ]
    )
    joint = cfg.TEST.JOINT_RESULTS
    results = summarise(
        phases,
        scenario=scenario.name,
        method=method_of(cfg).name,
        joint=load_results(joint) if joint else None,
    )
    if comm.is_main_process():
        write_results(results, root)
        logger.info("results of %s:\n%s", root, format_table(results))
        if len(phases) > 2 and "domains" not in results:
            logger.info("AP of each phase's classes:\n%s", format_matrix(results))
    return results


def _evaluate_weights(
    cfg: CfgNode, data: RunData, detector: Detector, test: Test, own: bool
) -> dict[str, Any]:
    """Evaluates MODEL.WEIGHTS, or else the newest weights of the run directory.

    MODEL.WEIGHTS that the run in the directory started from are not meant. The classes are those
    that the file says it has seen, all of them where it does not say.
    """
    phases = len(data.scenario.phases)

    def choose() -> str:
        given = "" if own else cfg.MODEL.WEIGHTS
        newest = (final_weights(cfg.OUTPUT_DIR, phase) for phase in range(phases, 0, -1))
        path = given or next((str(path) for path in newest if path), "")
        if not path:
            raise InputError(
                f"{cfg.OUTPUT_DIR} holds no finished model: set MODEL.WEIGHTS to the one to "
                "evaluate"
            )
        return path

    path = from_rank0(choose)
    state = load_state(path)
    phase = int(state.get("cldetr", {}).get("phase", phases))
    if not 1 <= phase <= phases:
        raise InputError(f"{path} is of phase {phase}, the scenario has {phases}")
    load_into(detector, state["model"], path)
    logger.info("evaluating %s after phase %d", path, phase)
    see_classes(detector, data.scenario, phase)
    return test(evaluation_config(cfg, phase, data.name("test", phase)), detector)


def _evaluate_run(cfg: CfgNode, data: RunData, detector: Detector, test: Test) -> dict[str, Any]:
    """Evaluates the weights after each phase of a finished run on DATASETS.TEST.

    The run's own results stay; these are in results_<data set>.json and .csv beside them
    (`_results_name`), what is confused after the last phase and its curves in
    results_<data set>_confusion.json and so on.
    """
    root, scenario = Path(cfg.OUTPUT_DIR), data.scenario
    from_rank0(lambda: data.check(root))
    entries: list[dict[str, Any]] = []
    details: dict[str, Any] = {}
    for phase in scenario.phases:
        path = from_rank0(lambda index=phase.index: final_weights(root, index))  # type: ignore[misc]
        if path is None:
            raise InputError(f"{root} is not finished: no weights of phase {phase.index}")
        load_into(detector, load_state(path)["model"], str(path))
        see_classes(detector, scenario, phase.index)
        entry = test(evaluation_config(cfg, phase.index, data.name("test", phase.index)), detector)
        metrics, details = split_details(entry)
        entries.append({**metrics, "stage": path.parent.name})
    if not comm.is_main_process():
        return {}
    results = summarise(entries, scenario=scenario.name, method=method_of(cfg).name)
    name = _results_name(root, list(cfg.DATASETS.TEST))
    write_results({**results, "test_sets": list(cfg.DATASETS.TEST)}, root, name)
    for kind, content in details.items():
        write_json(root / f"{name}_{kind}.json", content)
    logger.info("written: %s", root / f"{name}.json")
    return results


def _results_name(root: Path, references: list[str]) -> str:
    """What the results on other test sets are called: `results_<data set>`.

    A data set goes by the last part of its path. Where test sets agree in it, or those of other
    results in the run directory, the folders above tell them apart: `results_night_test`.
    Annotations whose images alone differ are numbered.
    """
    known = {path.stem: _test_sets(path) for path in sorted(root.glob("results_*.json"))}
    for name, test_sets in known.items():
        if test_sets == references:
            return name  # evaluated again
    others = [test_sets for test_sets in known.values() if test_sets]
    names = []
    for length in range(1, max(len(_parts(each)) for each in references) + 1):
        ends = [_parts(each)[-length:] for each in references]
        levels = [[end[-n] for end in ends if len(end) >= n] for n in range(length, 0, -1)]
        words = [word for level in levels for word in dict.fromkeys(level)]
        names.append("_".join(["results", *words]))
        alike = any([_parts(x)[-length:] for x in other] == ends for other in others)
        if len(set(ends)) == len(ends) and not alike and names[-1] not in known:
            return names[-1]
    numbered = (f"{names[0]}_{number}" for number in itertools.count(2))
    return next(name for name in itertools.chain(names[:1], numbered) if name not in known)


def _parts(reference: str) -> tuple[str, ...]:
    """The folders and the name of a data set, in words for a file name."""
    path = PurePath(reference.split(".json:")[0].replace(":", "_"))
    return tuple(part for part in path.parts if part != path.anchor)


def _test_sets(path: Path) -> list[str] | None:
    """The test sets of results; None where these do not say or are not readable."""
    try:
        return load_results(path).get("test_sets")
    except InputError:
        return None


def _own_identity(cfg: CfgNode) -> dict[str, Any]:
    """The identity of the run in OUTPUT_DIR; empty where MODEL.WEIGHTS name other weights."""
    path = Path(cfg.OUTPUT_DIR) / "identity.json"
    stored = read_identity(path) if path.exists() else {}
    return stored if cfg.MODEL.WEIGHTS in ("", stored.get("MODEL.WEIGHTS")) else {}
