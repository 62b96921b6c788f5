"""The trainer: every phase and stage of Algorithm 1, with the methods of Detectron2's trainers."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from detectron2.config import CfgNode
from detectron2.engine import HookBase, TrainerBase, hooks
from detectron2.evaluation import DatasetEvaluator, DatasetEvaluators
from detectron2.modeling import build_model
from detectron2.solver import LRMultiplier, build_lr_scheduler
from detectron2.utils import comm
from detectron2.utils.events import EventWriter, JSONWriter, TensorboardXWriter
from torch import nn

from cldetr.config import check_keys, check_model_keys, identity, method_of, schedule_of, watch_keys
from cldetr.data.loader import build_test_loader, build_train_loader
from cldetr.engine.checkpoint import (
    RunCheckpointer,
    latest_checkpoint,
    load_checkpoint,
    load_into,
    load_state,
    save_state,
)
from cldetr.engine.evaluate import evaluate, run_evaluator, write_summary
from cldetr.engine.hooks import (
    AverageHook,
    CheckpointHook,
    DivergenceHook,
    EarlyStopHook,
    LeaveStage,
    SnapshotHook,
    finite_weights,
)
from cldetr.engine.initial_weights import (
    digest_of,
    initialise,
    load_trained_detector,
)
from cldetr.engine.ledger import Ledger
from cldetr.engine.ranks import (
    Interrupted,
    StopRequest,
    await_file,
    from_rank0,
    same_on_all,
)
from cldetr.engine.resolve import resolve
from cldetr.engine.restore import describe
from cldetr.engine.stages import (
    Stage,
    calibration_learner,
    evaluation_config,
    make_stage,
    planned_stages,
    see_classes,
    stage_config,
    training_learner,
)
from cldetr.engine.step import StageTrainer, build_optimizer
from cldetr.engine.teacher_cache import (
    cache_teacher_predictions,
    find_pseudo_weight,
    find_thresholds,
)
from cldetr.engine.writers import StageWriter, WandbWriter, check_wandb, memory_mb
from cldetr.errors import InputError, blame
from cldetr.evaluation.evaluator import IncrementalEvaluator, split_details, to_scalars
from cldetr.files import sha256_file, write_json
from cldetr.lazy import lazy_part
from cldetr.methods.learner import Learner
from cldetr.modeling.detector import Detector

logger = logging.getLogger(__name__)


class IncrementalTrainer(TrainerBase):
    """Trains a detector through all phases of a scenario.

        trainer = IncrementalTrainer(cfg)
        trainer.resume_or_load(resume=False)
        results = trainer.train()

    Each phase has a training step, an exemplar selection, a calibration step and an evaluation.
    Each training stage is an ordinary Detectron2 training: while it lasts, `trainer.cfg` names its
    registered data sets in DATASETS.TRAIN, its steps in SOLVER.MAX_ITER and where the run is in
    STAGE, and optimizer, schedule, loader, hooks and writers come from the `build_*` methods, which
    a subclass may override as those of Detectron2's `DefaultTrainer`. Hooks are built for each
    stage; their `before_train` and `after_train` are called at its beginning and end.

    Attributes:
        cfg: the config of the present stage; between stages that of the run.
        phase, stage: where the run is: the phase from 1, and "train" or "calibrate".
        step, steps: the index of the step within the stage, and how many there are. `iter` counts
            over the whole run.
        detector: the model that is trained and saved.
        learner: detector, teacher and losses of the present stage; `model` is the same, wrapped
            for several processes. In evaluation mode both detect.
        checkpointer: for hooks that save weights; writes into the stage's folder.
    """

    def __init__(self, cfg: CfgNode) -> None:
        """Reads and checks the data, registers a data set for each stage, builds the detector.

        Nothing is written.
        """
        super().__init__()
        check_keys(cfg, overridden=_overridden(type(self), cfg))
        check_wandb(cfg.WANDB.ENABLED)
        self.method = method_of(cfg)
        self.run_cfg, self.data = resolve(cfg)
        self.cfg = self.run_cfg
        self.ledger = Ledger(cfg.OUTPUT_DIR)
        torch.manual_seed(cfg.SEED)
        watched, read = watch_keys(self.run_cfg)
        self.detector = self.build_model(watched)
        check_model_keys(self.run_cfg, read)
        self.method.check(self.detector)
        self.phase, self.stage = 1, "train"
        self.early_stop: EarlyStopHook | None = None  # of the present stage
        self._begun = False
        self._offset = 0  # training steps of the stages that are done
        self._inputs: dict[str, str] = {}  # digest of the weights that the next stage starts from
        self._stop = StopRequest()
        self._wandb: WandbWriter | None = None

    # What a subclass may override, with Detectron2's names.

    @classmethod
    def build_model(cls, cfg: CfgNode) -> Detector:
        """Builds the detector, by default from META_ARCH_REGISTRY.

        It is a `cldetr.modeling.detector.Detector` with MODEL.DETR.NUM_CLASSES classes.
        """
        return build_model(cfg)

    @classmethod
    def build_optimizer(cls, cfg: CfgNode, model: nn.Module) -> torch.optim.Optimizer:
        """Builds the optimizer of a stage, by default AdamW with Deformable DETR's groups.

        @classmethod
        def build_optimizer(cls, cfg, model):
            return torch.optim.SGD(model.parameters(), cfg.SOLVER.BASE_LR, momentum=0.9)
        """
        changes = {"params__model": model, "lr": cfg.SOLVER.BASE_LR}
        optimizer = lazy_part(cfg, "optimizer", **changes)
        return build_optimizer(cfg, model) if optimizer is None else optimizer

    @classmethod
    def build_lr_scheduler(cls, cfg: CfgNode, optimizer: torch.optim.Optimizer) -> Any:
        """Builds the learning rate schedule of a stage, by default Detectron2's own.

        SOLVER.MAX_ITER and STEPS are those of the stage, from SCHEDULE; LR_SCHEDULER_NAME, GAMMA
        and WARMUP_* are the user's.
        """
        multiplier = lazy_part(cfg, "lr_multiplier")
        if multiplier is not None:
            return LRMultiplier(optimizer, multiplier, max_iter=cfg.SOLVER.MAX_ITER)
        return build_lr_scheduler(cfg, optimizer)

    @classmethod
    def build_train_loader(cls, cfg: CfgNode) -> Any:
        """Builds the loader of a stage's batches: lists of Detectron2's inputs.

            @classmethod
            def build_train_loader(cls, cfg):
                return build_train_loader(cfg, mapper=DatasetMapper(cfg, is_train=True))

        A resumed stage calls `loader.batch_sampler.start_at(step)`; a loader without it starts its
        stream of samples again.
        """
        names = list(cfg.DATASETS.TRAIN)
        loader = lazy_part(cfg, "dataloader.train", dataset__names=names)
        return build_train_loader(cfg) if loader is None else loader

    @classmethod
    def build_test_loader(cls, cfg: CfgNode, dataset_name: str) -> Any:
        """Builds the loader of a registered test set."""
        loader = lazy_part(cfg, "dataloader.test", dataset__names=dataset_name)
        return build_test_loader(cfg, dataset_name) if loader is None else loader

    @classmethod
    def build_evaluator(cls, cfg: CfgNode, dataset_name: str) -> DatasetEvaluator:
        """Builds the evaluator of a registered test set.

        Results need `IncrementalEvaluator`; others may stand beside it:

            @classmethod
            def build_evaluator(cls, cfg, dataset_name):
                own = COCOEvaluator(dataset_name, output_dir=cfg.OUTPUT_DIR)
                return DatasetEvaluators([super().build_evaluator(cfg, dataset_name), own])
        """
        evaluator = IncrementalEvaluator.from_dataset(
            dataset_name,
            restrict_images=cfg.TEST.RESTRICT_IMAGES,
            voc_metrics=cfg.TEST.VOC_METRICS,
            confusion_score=cfg.TEST.CONFUSION_SCORE,
        )
        more = lazy_part(cfg, "dataloader.evaluator", dataset_name=dataset_name)
        if more is None:
            return evaluator
        return DatasetEvaluators([evaluator, *(more if isinstance(more, list) else [more])])

    def build_hooks(self) -> list[HookBase]:
        """Builds the hooks of a stage, the writers last.

            def build_hooks(self):
                chain = super().build_hooks()
                chain.insert(-1, hooks.BestCheckpointer(500, self.checkpointer, "all/AP"))
                return chain

        Checkpoints for resume are not among them: they are saved after all hooks, and hold what
        the `state_dict` of each hook returns.
        """
        cfg = self.cfg
        chain: list[HookBase] = [hooks.IterationTimer(warmup_iter=3), hooks.LRScheduler()]
        if cfg.TEST.EVAL_PERIOD:

            def evaluate() -> dict[str, float]:  # for the curves
                return to_scalars(self.test(self.cfg, self.detector))

            chain.append(hooks.EvalHook(cfg.TEST.EVAL_PERIOD, evaluate, eval_after_train=False))
        if self.early_stop is not None:
            chain.append(self.early_stop)
        if comm.is_main_process():
            if cfg.LOG_IMAGES and cfg.VIS_PERIOD:
                chain.append(SnapshotHook(cfg))
            chain.append(hooks.PeriodicWriter(self.build_writers(), period=cfg.LOG_PERIOD))
        return chain

    def build_writers(self) -> list[EventWriter]:
        """Builds the writers of a stage, on rank 0: console, metrics.json and TensorBoard.

        With WANDB.ENABLED also that of Weights & Biases, the same in all stages.
        """
        title = f"phase {self.phase}/{len(self.data.scenario.phases)} {self.stage}"
        plan = planned_stages(self.run_cfg, self.data.scenario)
        index = [(each.phase, each.name) for each in plan].index((self.phase, self.stage))
        total = self._offset + self.steps + sum(each.steps for each in plan[index + 1 :])
        return [
            StageWriter(title, self._offset, self.steps, total),
            JSONWriter(str(self.ledger.root / "metrics.json")),
            *([self._wandb] if self._wandb else []),  # before TensorBoard's, which clears pictures
            TensorboardXWriter(str(self.ledger.root / "tensorboard")),
        ]

    @classmethod
    def test(
        cls,
        cfg: CfgNode,
        model: nn.Module,
        evaluators: DatasetEvaluator | Sequence[DatasetEvaluator] | None = None,
    ) -> dict[str, Any]:
        """Evaluates a model on the registered data sets of DATASETS.TEST.

        Args:
            cfg: such as `trainer.cfg`, whose DATASETS.TEST is the test set after the phase.
            model: with the weights to evaluate.
            evaluators: one for each data set; those of `build_evaluator` by default.

        Returns:
            the evaluator's results, by data set where there are several; an empty dictionary on
            all ranks but the first.
        """
        if isinstance(evaluators, DatasetEvaluator):
            evaluators = [evaluators]
        if evaluators is not None and len(evaluators) != len(cfg.DATASETS.TEST):
            raise ValueError(f"{len(evaluators)} evaluators for {len(cfg.DATASETS.TEST)} data sets")
        results: OrderedDict[str, dict[str, Any]] = OrderedDict()
        for index, name in enumerate(cfg.DATASETS.TEST):
            evaluator = evaluators[index] if evaluators else cls.build_evaluator(cfg, name)
            loader = cls.build_test_loader(cfg, name)
            results[name] = run_evaluator(model, loader, evaluator)
        return next(iter(results.values())) if len(results) == 1 else results

    # Running.

    def resume_or_load(self, resume: bool = True) -> None:
        """Takes the run directory: a new run starts, or the one that it holds goes on.

        Args:
            resume: go on with the run in OUTPUT_DIR, which must hold one. Otherwise a new run
                starts from MODEL.WEIGHTS or MODEL.DETECTOR, and OUTPUT_DIR must hold none.
        """
        root = self.ledger.root

        def begin() -> None:
            try:
                self.ledger.open(self.run_cfg, resume)
                self.data.check(root)
                self.ledger.begin(self.run_cfg)
                self.data.record(root)
            except BaseException:
                self.ledger.close()
                raise

        same_on_all("settings", {**identity(self.run_cfg), "data": self.data.digest})
        from_rank0(begin)
        if comm.is_main_process():
            self.ledger.start_log()
            for line in self.data.consequences():
                logger.warning("%s", line)
            self._wandb = WandbWriter(self.run_cfg) if self.run_cfg.WANDB.ENABLED else None
        self._begun = True

    def train(self) -> dict[str, Any]:
        """Runs all that is left of the run, from wherever its directory is; returns the results.

        What the directory holds is never computed again: a finished run returns its results.
        """
        if not self._begun:
            self.resume_or_load(resume=False)
        self._offset, self._inputs = 0, {}
        failed = True
        with StopRequest() as self._stop:
            try:
                for phase in self.data.scenario.phases:
                    self._train_phase(phase.index)
                results = write_summary(self.run_cfg, self.data.scenario)
                failed = False
                return results
            except (InputError, OSError):
                raise
            except Exception as error:
                if self._stop.signum and isinstance(error, RuntimeError):
                    # The signal struck another process too, and this one misses it.
                    raise Interrupted(self._stop.signum) from error
                self._log_failure(error)
                raise
            finally:
                self.cfg = self.run_cfg
                self._begun = False
                if self._wandb is not None:
                    self._wandb.finish(failed)
                self.ledger.close()

    def evaluate(self) -> dict[str, Any]:
        """Evaluates without training and prints the results, as `--eval-only` does."""
        return evaluate(self.run_cfg, self.data, self.detector, self.test)

    def run_step(self) -> None:
        """Runs one step of the present stage."""
        self._trainer.iter = self.iter
        self._trainer.run_step()

    @property
    def step(self) -> int:
        """The index of the present step within the stage."""
        return self.iter - self._offset

    @property
    def steps(self) -> int:
        """Steps of the present stage."""
        return self.cfg.SOLVER.MAX_ITER

    # The stages. Each begins by asking the ledger whether it is done.

    def _train_phase(self, phase: int) -> None:
        """Does what is left of one phase."""
        self.phase = phase
        with self._stop.waiting():
            self._train(phase)
        self._select(phase)
        with self._stop.waiting():
            self._calibrate(phase)
        self._evaluate(phase)

    def _train(self, phase: int) -> None:
        """The training step: L_DKD on D_i ∪ E_1:i−1 (Alg. 1, lines 1-13)."""
        method = self.method
        if phase == 1 and self.run_cfg.MODEL.DETECTOR:
            self._adopt(phase)
            return
        if phase == 1 and not self._finished(phase, "train"):
            initialise(self.detector, self.run_cfg.MODEL.WEIGHTS)
        if phase > 1:
            old = self.data.scenario.old(phase)
            new = [label for label in self.data.scenario.seen(phase) if label not in old]
            self.detector.start_classes(new)
        # Φ^old is the detector as it is before this phase.
        learner = training_learner(
            self.detector, method, self.data.scenario, phase, old_model=self.detector
        )
        datasets = [self.data.name(method.view, phase)]
        replays = method.memory is not None and method.memory.replay
        if phase > 1 and (replays or self.data.scenario.unlabelled()):
            before = self.ledger.folder(phase - 1, "select") if replays else None
            datasets = [self.data.register_replay(phase, before, method)]
        self._fit(phase, "train", learner, datasets)

    def _select(self, phase: int) -> None:
        """Builds E_1:i (Alg. 1, line 14; Alg. 2)."""
        rule = self.method.memory
        if rule is None or self._finished(phase, "select"):
            return
        self._stop.check()
        begin = time.perf_counter()
        features = self.data.object_features(phase, rule, self.detector)

        def select() -> None:
            before = self.ledger.folder(phase - 1, "select") if phase > 1 else None
            memory = self.data.select_exemplars(phase, rule, before, features)
            given = [subset for subset in self.data.scenario.given if subset.classes]
            outputs = memory.save(self.ledger.folder(phase, "select"), self.data.train, given)
            facts = {"seconds": time.perf_counter() - begin}
            names = [path.name for path in outputs]
            self.ledger.finish(phase, "select", names, self._inputs, facts)

        from_rank0(select)

    def _calibrate(self, phase: int) -> None:
        """The calibration step: L_DETR on E_1:i (Alg. 1, lines 15-20)."""
        rule = self.method.calibrate
        if rule is None or phase == 1:  # the paper's first phase trains on all its data throughout
            return
        learner = calibration_learner(self.detector, self.method, self.data.scenario, phase)
        self.data.load_memory(self.ledger.folder(phase, "select"))
        dataset = self.data.name("exemplars", phase, "_revealed" if rule.reveal else "")
        self._fit(phase, "calibrate", learner, [dataset])

    def _evaluate(self, phase: int) -> None:
        if self._finished(phase, "evaluate"):
            return
        self._stop.check()
        begin = time.perf_counter()
        cfg = evaluation_config(self.run_cfg, phase, self.data.name("test", phase))
        calibrated = self.method.calibrate is not None and phase > 1
        stage = "calibrate" if calibrated else "train"
        entries = {"metrics.json": self.test(cfg, self.detector)}
        entries |= self._evaluate_beside(cfg, self.ledger.folder(phase, stage))

        def finish() -> None:
            files: dict[str, Any] = {}
            for name, entry in entries.items():
                metrics, details = split_details(entry)
                files[name] = {**metrics, "stage": stage}
                for kind, content in details.items():
                    files.setdefault(f"{kind}.json", content)  # of the phase's model, the first
            for name, content in files.items():
                write_json(self.ledger.folder(phase, "evaluate") / name, content)
            facts = {"seconds": time.perf_counter() - begin, "memory_mb": memory_mb()}
            self.ledger.finish(phase, "evaluate", [*files], self._inputs, facts)
            if self._wandb is not None:
                scalars = to_scalars(files["metrics.json"])
                self._wandb.send(scalars, max(self._offset - 1, 0))

        from_rank0(finish)

    def _evaluate_beside(self, cfg: CfgNode, folder: Path) -> dict[str, Any]:
        """Evaluates the weights that are saved beside the phase's model, where there are any."""
        rule = self.method.average
        if rule is None or cfg.STAGE.PHASE == 1:
            return {}
        name = "raw" if rule.final else "average"
        path = await_file(folder / f"model_{name}.pth")
        load_into(self.detector, load_state(path)["model"], str(path))
        logger.info("evaluating %s beside the model of the phase", path.name)
        entry = self.test(cfg, self.detector)
        self._load(folder / "model.pth")
        return {f"metrics_{name}.json": entry}

    # What the stages are made of.

    def _fit(self, phase: int, name: str, learner: Learner, datasets: Sequence[str]) -> None:
        """Trains one stage to its end, from its newest checkpoint, or loads its result."""
        see_classes(self.detector, self.data.scenario, phase)
        stage = make_stage(self.run_cfg, phase, name, datasets, self.data.size(datasets))
        folder = self.ledger.folder(phase, name)
        if not self._finished(phase, name):
            self._stop.check()
            begin = time.perf_counter()
            inputs = dict(self._inputs)
            learner.to(self.detector.device)
            if learner.rule is not None:
                stage = self._ask_teacher(stage, learner, folder, inputs)
            self._run_stage(stage, learner, folder)
            facts = {
                "steps": stage.steps,
                "images": stage.images,
                "seconds": time.perf_counter() - begin,
                "memory_mb": memory_mb(),
                **self._pseudo_facts(learner),
            }
            if self.early_stop is not None:
                facts |= self.early_stop.facts(stage.steps)
                load_into(self.detector, self.early_stop.weights, "the best evaluation")
            from_rank0(lambda: self._save(phase, name, inputs, facts))
        self._load(folder / "model.pth")
        self._offset += stage.steps

    def _run_stage(self, stage: Stage, learner: Learner, folder: Path) -> None:
        """Builds all that a stage needs and runs its steps."""
        self.stage = stage.name
        self.cfg = stage_config(self.run_cfg, stage, self.data.name("test", stage.phase))
        self.learner = learner
        self.early_stop = self._make_early_stop(stage)
        meta = self._describe(stage.phase, stage.name)
        self.optimizer = self.build_optimizer(self.cfg, self.detector)
        self.scheduler = self.build_lr_scheduler(self.cfg, self.optimizer)
        self.data_loader = self.build_train_loader(self.cfg)
        self.checkpointer = RunCheckpointer(self.detector, folder, meta)
        self._trainer = StageTrainer(
            learner,
            self.data_loader,
            self.optimizer,
            self.cfg,
            offset=self._offset,
            seed=(self.cfg.SEED, stage.phase, {"train": 1, "calibrate": 2}[stage.name]),
            after_backward=self.after_backward,
        )
        self.model, self.scaler = self._trainer.model, self._trainer.scaler
        period = self.cfg.SOLVER.CHECKPOINT_PERIOD
        self._hooks: list[HookBase] = []
        self.register_hooks([*self.build_hooks(), DivergenceHook()])
        if self.method.average is not None and stage.phase > 1:
            self.register_hooks([AverageHook(self.method.average.decay)])
        if self.early_stop is not None and self.early_stop not in self._hooks:
            self.register_hooks([self.early_stop])  # a subclass builds other hooks
        checkpoints = folder / "checkpoints"
        self.register_hooks(
            [CheckpointHook(checkpoints, period, self._stop, meta, self.early_stop)]
        )
        first = self._restore(checkpoints)
        logger.info(
            "phase %d/%d %s: %d images, %d steps of %d, %s",
            stage.phase,
            len(self.data.scenario.phases),
            stage.name,
            stage.images,
            stage.steps,
            stage.batch,
            f"from step {first}" if first else "from the start",
        )
        reached = stage.steps
        try:
            super().train(self._offset + first, self._offset + stage.steps)
        except LeaveStage as leave:
            reached = leave.step
        finally:
            self._trainer.close()
            self.cfg = self.run_cfg
        if reached < stage.steps:
            self._run_stage(stage, learner, folder)  # from the checkpoint of that step
            return
        if learner.pseudo_images and learner.pseudo_empty > 0.9 * learner.pseudo_images:
            logger.warning(
                "phase %d %s: %d of %d images got no pseudo-label: the old model may not know "
                "these images, or the selection is too strict",
                stage.phase,
                stage.name,
                learner.pseudo_empty,
                learner.pseudo_images,
            )

    def _make_early_stop(self, stage: Stage) -> EarlyStopHook | None:
        """The hook of SCHEDULE.EARLY_STOP; None where the stage does not have it.

        Calibration has none: held-out images show the new classes alone, it is for the old, too.
        """
        rule = schedule_of(self.run_cfg).early_stop
        if rule is None or stage.name != "train":
            return None
        cfg, name = self.cfg, self.data.name("held_out", stage.phase)

        def evaluate() -> float:
            loader = self.build_test_loader(cfg, name)
            results = run_evaluator(self.detector, loader, IncrementalEvaluator.from_dataset(name))
            return from_rank0(lambda: float(results["all"]["AP"]))

        return EarlyStopHook(evaluate, rule.period_steps(stage.steps_per_epoch), rule.patience)

    def _restore(self, folder: Path) -> int:
        """Loads the newest checkpoint of a stage, the same on all ranks; returns its step."""

        def newest() -> int:
            found = latest_checkpoint(folder)
            return 0 if found is None else found.step

        step = from_rank0(newest)
        if not step:
            return 0
        found = load_checkpoint(await_file(folder / f"step_{step:08d}" / "state.pth").parent)
        load_into(self.detector, found.state["model"], str(found.path))
        self.optimizer.load_state_dict(found.state["optimizer"])
        if found.state["scaler"]:
            self.scaler.load_state_dict(found.state["scaler"])
        self.load_state_dict(found.state["trainer"])
        sampler: Any = getattr(self.data_loader, "batch_sampler", None)
        if hasattr(sampler, "start_at"):
            sampler.start_at(step)
        else:
            logger.warning(
                "the loader of build_train_loader cannot start at step %d: samples repeat", step
            )
        return step

    def _ask_teacher(
        self, stage: Stage, learner: Learner, folder: Path, inputs: dict[str, str]
    ) -> Stage:
        """What the rule needs of the teacher before the stage; its files join the inputs.

        Where its predictions are cached, the stage is on images that bring them, and the teacher
        is dropped.
        """
        assert learner.rule is not None
        datasets, cached = stage.datasets, None
        common: dict[str, Any] = {
            "teacher_digest": self._inputs["model"],  # of the weights that the stage starts from
            "check_stop": self._stop.check,
        }
        if learner.rule.cache:
            predictions = folder / "predictions"
            view = cache_teacher_predictions(learner, datasets, predictions, self.run_cfg, **common)
            cached = view.store
            inputs["predictions"] = _digest(predictions / "manifest.json")
            name = self.data.register_predicted(stage.phase, stage.name, view, like=datasets[0])
            stage = dataclasses.replace(stage, datasets=(name,))
        if learner.rule.needs_thresholds:
            file = folder / "thresholds.json"
            find_thresholds(learner, datasets, file, self.run_cfg, cached=cached, **common)
            inputs["thresholds"] = _digest(file)
        if learner.rule.balance:
            file = folder / "balance.json"
            find_pseudo_weight(learner, stage.datasets, file, self.run_cfg, **common)
            inputs["balance"] = _digest(file)
        return stage

    def _save(
        self, phase: int, stage: str, inputs: Mapping[str, str], facts: Mapping[str, Any]
    ) -> None:
        """Writes the weights that a training stage ended with and declares it finished."""
        meta = self._describe(phase, stage)
        files = {"model.pth": finite_weights(self.detector)}
        if self.method.average is not None and phase > 1:
            (average,) = [hook.average for hook in self._hooks if isinstance(hook, AverageHook)]
            averaged = finite_weights(self.detector, average)
            if self.method.average.final:
                files = {"model.pth": averaged, "model_raw.pth": files["model.pth"]}
            else:
                files["model_average.pth"] = averaged
        folder = self.ledger.folder(phase, stage)
        for name, weights in files.items():
            save_state(folder / name, {"model": weights, "cldetr": meta})
        self.ledger.finish(phase, stage, [*files], inputs, facts)

    def _describe(self, phase: int, stage: str) -> dict[str, Any]:
        """What the weights of a stage say about themselves."""
        sides = self.data.short_sides(phase)
        return describe(self.run_cfg, self.data.scenario, phase, stage, sides)

    def _pseudo_facts(self, learner: Learner) -> dict[str, Any]:
        """Pseudo-labels by category, on the images that this process saw since its start."""
        if not learner.pseudo_images:
            return {}
        names = [category.name for category in self.data.scenario.categories]
        counts = zip(names, learner.pseudo_counts.tolist(), strict=True)
        return {
            "pseudo": {
                "images": learner.pseudo_images,
                "without": learner.pseudo_empty,
                "per_category": {name: count for name, count in counts if count},
            }
        }

    def _adopt(self, phase: int) -> None:
        """Takes a trained detector as the first phase's result."""
        see_classes(self.detector, self.data.scenario, phase)
        if not self._finished(phase, "train"):
            path = self.run_cfg.MODEL.DETECTOR
            load_trained_detector(self.detector, path, self.data.scenario)
            inputs, facts = {"detector": digest_of(path)}, {"steps": 0, "given": path}
            from_rank0(lambda: self._save(phase, "train", inputs, facts))
        self._load(self.ledger.folder(phase, "train") / "model.pth")

    def _finished(self, phase: int, stage: str) -> bool:
        """Whether the run directory holds the result of a stage; rank 0 decides."""
        adopted = phase == 1 and stage == "train"  # nothing precedes it
        inputs = None if adopted else self._inputs
        return from_rank0(lambda: self.ledger.finished(phase, stage, inputs) is not None)

    def _load(self, path: Path) -> None:
        self._inputs = {"model": _digest(path)}
        load_into(self.detector, load_state(path)["model"], str(path))

    def _log_failure(self, error: Exception) -> None:
        """Says where a hook, an evaluator or other code of the user's failed, and what to do."""
        where = f"phase {self.phase}"
        if self.cfg.STAGE.NAME:
            where += f", {self.stage}, step {self.step}"
        logger.error(
            "stopped in %s by %s: %s: %s. What was saved is kept: fix it and go on with --resume",
            where,
            blame(error) or "a fault of this program",
            type(error).__name__,
            str(error).partition("\n")[0],
        )


def _digest(path: Path) -> str:
    """The SHA-256 of a file of rank 0, which every rank must have read."""
    digest = sha256_file(await_file(path))
    same_on_all("files", {str(path.name): digest})
    return digest


def _overridden(cls: type[IncrementalTrainer], cfg: CfgNode) -> set[str]:
    """Names of the methods that a subclass, or a part of a LazyConfig, replaces."""
    names = {
        name for base in cls.__mro__[: cls.__mro__.index(IncrementalTrainer)] for name in vars(base)
    }
    lazy = {"optimizer": "build_optimizer", "dataloader": "build_train_loader"}
    return names | {method for part, method in lazy.items() if part in cfg.LAZY}
