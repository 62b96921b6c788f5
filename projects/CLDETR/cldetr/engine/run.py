"""A whole run: every phase and stage of Algorithm 1, from wherever the run directory says it is."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from detectron2.engine import hooks
from detectron2.utils import comm
from detectron2.utils.events import JSONWriter, TensorboardXWriter
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from cldetr.data.loader import PositionDataset, SampleOrder, train_loader
from cldetr.data.mapper import Mapper
from cldetr.data.memory import ExemplarMemory
from cldetr.data.predictions import PredictedView
from cldetr.data.views import View
from cldetr.engine.checkpoint import latest_checkpoint, load_into, load_state, save_state
from cldetr.engine.console import StageWriter, memory_mb
from cldetr.engine.evaluation import to_scalars
from cldetr.engine.labelling import label_once
from cldetr.engine.learners import calibration_learner, training_learner
from cldetr.engine.ledger import Ledger, read_json
from cldetr.engine.recipe import Recipe, StageSchedule
from cldetr.engine.results import (
    format_matrix,
    format_table,
    load_results,
    summarise,
    write_results,
)
from cldetr.engine.rundata import RunData
from cldetr.engine.scoring import score_detector
from cldetr.engine.snapshots import SnapshotHook
from cldetr.engine.start import initialise, load_trained_detector
from cldetr.engine.trainer import (
    CheckpointHook,
    Interrupted,
    StageTrainer,
    StopRequest,
    build_optimizer,
    finite_weights,
)
from cldetr.files import sha256_file, write_json
from cldetr.methods.learner import Learner

logger = logging.getLogger(__name__)

_STAGE_NUMBER = {"train": 1, "calibrate": 2}  # part of the seeds: never renumber


class IncrementalRun:
    """Carries a recipe through all its phases; the run directory is the only state."""

    def __init__(self, recipe: Recipe, resume: bool = False) -> None:
        """Opens the run directory, reads and checks the data, and builds the detector.

        Args:
            recipe: what to run.
            resume: go on with the run that the directory holds.
        """
        self.recipe = recipe
        self.ledger = Ledger(recipe.runtime.output_dir)
        if comm.is_main_process():
            self.ledger.open(recipe, resume)
        comm.synchronize()
        self.data = RunData(recipe)
        self.data.check(self.ledger.root)
        self.data.register(self.ledger.root)
        self.device = torch.device(recipe.runtime.device)
        torch.manual_seed(recipe.seed)
        self.detector = recipe.model.build(len(self.data.scenario.categories)).to(self.device)
        self._offset = 0  # training steps of the stages that are done
        self._inputs: dict[str, str] = {}  # digest of the weights that the next stage starts from

    def run(self) -> dict[str, Any]:
        """Does what is left of the run and returns its results."""
        with StopRequest() as stop:
            try:
                for phase in self.data.scenario.phases:
                    with stop.waiting():
                        self._train(phase.index, stop)
                    self._select(phase.index, stop)
                    with stop.waiting():
                        self._calibrate(phase.index, stop)
                    self._evaluate(phase.index, stop)
            except RuntimeError as error:
                if stop.signum:  # it struck another process too, and this one misses it
                    raise Interrupted(stop.signum) from error
                raise
        results = self._report()
        self.ledger.close()
        return results

    # The stages. Each begins by asking the ledger whether it is done.

    def _train(self, phase: int, stop: StopRequest) -> None:
        """The training step: L_DKD on D_i ∪ E_1:i−1 (Alg. 1, lines 1-13)."""
        method, schedule = self.recipe.method, self.recipe.schedule
        if phase == 1 and self.recipe.model.detector:
            self._adopt(phase)
            return
        if phase == 1 and self.ledger.finished(phase, "train") is None:
            initialise(self.detector, self.recipe.model.weights)
        # Φ^old is the detector as it is before this phase.
        learner = training_learner(
            self.detector, method, self.data.scenario, phase, old_model=self.detector
        )
        memory = None
        if phase > 1 and method.memory is not None and method.memory.replay:
            memory = self._memory(phase - 1)
        entries = self.data.train_entries(phase, memory, method.joint, method.reveal_old)
        stage = schedule.first if phase == 1 else schedule.train
        self._fit(phase, "train", learner, entries, stage, stop)

    def _select(self, phase: int, stop: StopRequest) -> None:
        """Builds E_1:i (Alg. 1, line 14; Alg. 2)."""
        rule = self.recipe.method.memory
        if rule is None or self.ledger.finished(phase, "select", self._inputs) is not None:
            return
        self._check_stop(stop)
        if comm.is_main_process():
            begin = time.perf_counter()
            before = self._memory(phase - 1)
            memory = self.data.select_exemplars(phase, rule, before, self.detector)
            outputs = memory.save(self.ledger.folder(phase, "select"), self.data.train)
            facts = {"seconds": time.perf_counter() - begin}
            names = [path.name for path in outputs]
            self.ledger.finish(phase, "select", names, self._inputs, facts)
        comm.synchronize()

    def _calibrate(self, phase: int, stop: StopRequest) -> None:
        """The calibration step: L_DETR on E_1:i (Alg. 1, lines 15-20)."""
        rule = self.recipe.method.calibrate
        if rule is None or phase == 1:  # the paper's first phase trains on all its data throughout
            return
        learner = calibration_learner(self.detector, self.recipe.method, self.data.scenario, phase)
        entries = self.data.exemplar_entries(self._memory(phase), rule.reveal)
        self._fit(phase, "calibrate", learner, entries, self.recipe.schedule.calibrate, stop)

    def _evaluate(self, phase: int, stop: StopRequest) -> None:
        if self.ledger.finished(phase, "evaluate", self._inputs) is not None:
            return
        self._check_stop(stop)
        begin = time.perf_counter()
        entry = self._score(phase)
        if comm.is_main_process():
            calibrated = self.recipe.method.calibrate is not None and phase > 1
            entry["stage"] = "calibrate" if calibrated else "train"
            folder = self.ledger.folder(phase, "evaluate")
            folder.mkdir(parents=True, exist_ok=True)
            write_json(folder / "metrics.json", entry)
            facts = {"seconds": time.perf_counter() - begin, "memory_mb": memory_mb()}
            self.ledger.finish(phase, "evaluate", ["metrics.json"], self._inputs, facts)
        comm.synchronize()

    # What the stages are made of.

    def _fit(
        self,
        phase: int,
        stage: str,
        learner: Learner,
        entries: View,
        schedule: StageSchedule,
        stop: StopRequest,
    ) -> None:
        """Trains one stage to its end, from its newest checkpoint, or loads its result."""
        recipe, folder = self.recipe, self.ledger.folder(phase, stage)
        order = SampleOrder(
            len(entries),
            recipe.optimizer.batch,
            seed=(recipe.seed, phase, _STAGE_NUMBER[stage]),
        )
        steps = schedule.steps(order.steps_per_epoch)
        if self.ledger.finished(phase, stage, self._inputs) is None:
            self._check_stop(stop)
            begin = time.perf_counter()
            inputs = dict(self._inputs)
            samples: View | PredictedView = entries
            if learner.rule is not None and learner.rule.cache:
                stored = folder / "predictions"
                samples = self._label_once(learner, entries, stored, stop)
                inputs["predictions"] = sha256_file(stored / "manifest.json")
            optimizer = build_optimizer(self.detector, recipe.optimizer)
            first, scaler = self._restore(folder, optimizer)
            loader = train_loader(
                PositionDataset(samples, Mapper(recipe.augmentation, training=True), order),
                first=first,
                last=steps,
                workers=recipe.runtime.workers,
                rank=comm.get_rank(),
                world=comm.get_world_size(),
                pin_memory=self.device.type == "cuda",
            )
            trainer = StageTrainer(
                learner.to(self.device),
                _parallel(learner, self.device),
                loader,
                optimizer,
                settings=recipe.optimizer,
                schedule=schedule,
                steps_per_epoch=order.steps_per_epoch,
                offset=self._offset,
                steps=steps,
                seed=order.seed,
                log_period=recipe.runtime.log_period,
            )
            if scaler:
                trainer.scaler.load_state_dict(scaler)
            meta = self.data.describe(phase, stage)
            trainer.register_hooks(self._hooks(phase, stage, trainer, folder, stop, meta, samples))
            logger.info(
                "phase %d/%d %s: %d images, %d steps of %d, %s",
                phase,
                len(self.data.scenario.phases),
                stage,
                len(entries),
                steps,
                recipe.optimizer.batch,
                f"from step {first}" if first else "from the start",
            )
            trainer.train(self._offset + first, self._offset + steps)
            if learner.pseudo_images and learner.pseudo_empty > 0.9 * learner.pseudo_images:
                logger.warning(
                    "phase %d %s: %d of %d images got no pseudo-label: the old model may not know "
                    "these images, or the selection is too strict",
                    phase,
                    stage,
                    learner.pseudo_empty,
                    learner.pseudo_images,
                )
            if comm.is_main_process():
                weights = {"model": finite_weights(self.detector), "cldetr": meta}
                save_state(folder / "model.pth", weights)
                facts: dict[str, Any] = {
                    "steps": steps,
                    "images": len(entries),
                    "seconds": time.perf_counter() - begin,
                    "memory_mb": memory_mb(),
                }
                if learner.pseudo_images:
                    facts["pseudo"] = self._pseudo_facts(learner)
                self.ledger.finish(phase, stage, ["model.pth"], inputs, facts)
            comm.synchronize()
        self._load(folder / "model.pth")
        self._offset += steps

    def _pseudo_facts(self, learner: Learner) -> dict[str, Any]:
        """Pseudo-labels by category, on the images that this process saw since its start."""
        names = [category.name for category in self.data.scenario.categories]
        counts = zip(names, learner.pseudo_counts.tolist(), strict=True)
        return {
            "images": learner.pseudo_images,
            "without": learner.pseudo_empty,
            "per_category": {name: count for name, count in counts if count},
        }

    def _label_once(
        self, learner: Learner, entries: View, folder: Path, stop: StopRequest
    ) -> PredictedView:
        """The stage's images with the predictions of the teacher, which then is let go."""
        return label_once(
            learner.to(self.device),
            entries,
            folder,
            self.recipe.augmentation,
            teacher_digest=self._inputs["model"],  # of the weights that the stage starts from
            workers=self.recipe.runtime.workers,
            check_stop=lambda: self._check_stop(stop),
        )

    def _restore(self, folder: Path, optimizer: torch.optim.Optimizer) -> tuple[int, Any]:
        """Puts the newest checkpoint of a stage in place; returns its step and scaler state."""
        found = latest_checkpoint(folder / "checkpoints")
        if found is None:
            return 0, None
        load_into(self.detector, found.state["model"], str(found.path))
        optimizer.load_state_dict(found.state["optimizer"])
        return found.step, found.state["scaler"]

    def _hooks(
        self,
        phase: int,
        stage: str,
        trainer: StageTrainer,
        folder: Path,
        stop: StopRequest,
        meta: Mapping[str, Any],
        samples: View | PredictedView,
    ) -> list[Any]:
        runtime = self.recipe.runtime
        period = runtime.checkpoint_period or trainer.steps_per_epoch
        chain: list[Any] = [hooks.IterationTimer(warmup_iter=3)]
        if runtime.eval_period:
            chain.append(hooks.EvalHook(runtime.eval_period, lambda: self._progress(phase)))
        if comm.is_main_process():
            if runtime.log_images:
                chain.append(
                    SnapshotHook(
                        trainer.learner,
                        samples,
                        self.recipe.augmentation,
                        [category.name for category in self.data.scenario.categories],
                        title=f"phase{phase}_{stage}",
                        count=runtime.log_images,
                        period=period,
                    )
                )
            title = f"phase {phase}/{len(self.data.scenario.phases)} {stage}"
            total = self._offset + trainer.steps + self._steps_after(phase, stage)
            writers = [
                StageWriter(title, self._offset, trainer.steps, total),
                JSONWriter(str(self.ledger.root / "metrics.json")),
                TensorboardXWriter(str(self.ledger.root / "tensorboard")),
            ]
            chain.append(hooks.PeriodicWriter(writers, period=runtime.log_period))
        chain.append(CheckpointHook(folder / "checkpoints", period, stop, dict(meta)))
        return chain

    def _steps_after(self, phase: int, stage: str) -> int:
        """Training steps of the stages that follow, as planned."""
        plan = self.data.planned_steps()
        place = [entry[:2] for entry in plan].index((phase, stage))
        return sum(steps for _, _, steps in plan[place + 1 :])

    def _adopt(self, phase: int) -> None:
        """Takes a trained detector as the first phase's result."""
        folder = self.ledger.folder(phase, "train")
        if self.ledger.finished(phase, "train") is None:
            path = self.recipe.model.detector
            load_trained_detector(self.detector, path, self.data.scenario)
            if comm.is_main_process():
                meta = self.data.describe(phase, "train")
                folder.mkdir(parents=True, exist_ok=True)
                save_state(
                    folder / "model.pth", {"model": self.detector.state_dict(), "cldetr": meta}
                )
                facts = {"steps": 0, "given": path}
                inputs = {"detector": sha256_file(path)}
                self.ledger.finish(phase, "train", ["model.pth"], inputs, facts)
            comm.synchronize()
        self._load(folder / "model.pth")

    def _load(self, path: Path) -> None:
        load_into(self.detector, load_state(path)["model"], str(path))
        self._inputs = {"model": sha256_file(path)}

    def _memory(self, phase: int) -> ExemplarMemory:
        """E_1:phase as the run saved it."""
        if phase == 0:
            return ExemplarMemory.empty(self.data.scenario)
        memory = ExemplarMemory.load(self.ledger.folder(phase, "select"))
        memory.check(self.data.scenario, self.data.train)
        self.data.register_memory(self.ledger.root, memory)
        return memory

    def _score(self, phase: int) -> dict[str, Any]:
        return score_detector(self.detector, self.data, phase, self.recipe.runtime.restrict_eval)

    def _progress(self, phase: int) -> dict[str, float]:
        """A look at the metrics while a stage trains, for the curves."""
        entry = self._score(phase)
        return to_scalars(entry) if entry else {}

    def _report(self) -> dict[str, Any]:
        """Writes and logs the table of all phases."""
        phases = [
            read_json(self.ledger.folder(phase.index, "evaluate") / "metrics.json")
            for phase in self.data.scenario.phases
        ]
        joint = self.recipe.runtime.joint_results
        results = summarise(
            phases,
            scenario=self.data.scenario.name,
            method=self.recipe.method.name,
            joint=load_results(joint) if joint else None,
        )
        if comm.is_main_process():
            write_results(results, self.ledger.root)
            logger.info("results of %s:\n%s", self.ledger.root, format_table(results))
            if len(phases) > 2:
                logger.info("AP of each phase's classes:\n%s", format_matrix(results))
        return results

    def _check_stop(self, stop: StopRequest) -> None:
        """Stops between stages where a signal came."""
        signum = stop.agreed()
        if signum:
            raise Interrupted(signum)


def _parallel(learner: Learner, device: torch.device) -> nn.Module:
    """Wraps the learner where several processes train; the CPU has no device ids."""
    if comm.get_world_size() == 1:
        return learner
    ids = [device.index] if device.type == "cuda" else None
    # Gradients as views of what is sent: no second copy of them, in memory or in time.
    return DistributedDataParallel(
        learner, device_ids=ids, broadcast_buffers=False, gradient_as_bucket_view=True
    )
