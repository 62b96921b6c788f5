"""A user's trainer with faults of the user's making, one of which `Trainer.fault` chooses."""

from __future__ import annotations

from typing import Any

from detectron2.config import CfgNode
from detectron2.engine import HookBase
from detectron2.evaluation import DatasetEvaluator, DatasetEvaluators
from detectron2.utils.events import EventWriter

from cldetr.engine import IncrementalTrainer


class Hook(HookBase):
    """Fails at a moment of a stage; counts steps, which a checkpoint keeps."""

    def __init__(self, fault: str) -> None:
        self.fault = fault
        self.steps = 0

    def state_dict(self) -> dict[str, Any]:
        """What a resumed stage begins with."""
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes it up again."""
        self.steps = state["steps"]

    def before_train(self) -> None:
        """Fails in the second phase."""
        self._fail("before_train", self.trainer.phase == 2)

    def after_step(self) -> None:
        """Fails in the middle of a stage."""
        self.steps += 1
        assert self.steps == self.trainer.step + 1
        self._fail("after_step", (self.trainer.stage, self.trainer.step) == ("calibrate", 3))

    def after_train(self) -> None:
        """Fails where the stage has done its steps and its weights are not yet written."""
        self._fail("after_train", self.trainer.phase == 2)

    def _fail(self, moment: str, now: bool) -> None:
        if self.fault == f"Hook.{moment}" and now:
            raise KeyError("no such thing")


class Evaluator(DatasetEvaluator):
    """Fails while it sees images, or at the end."""

    def __init__(self, fault: str) -> None:
        self.fault = fault

    def process(self, inputs: Any, outputs: Any) -> None:
        """Called for every batch."""
        if self.fault == "Evaluator.process":
            raise TypeError("not what I thought")

    def evaluate(self) -> dict[str, Any]:
        """Called at the end."""
        if self.fault == "Evaluator.evaluate":
            raise ZeroDivisionError("no images of mine")
        return {}


class Writer(EventWriter):
    """Fails when it writes."""

    def __init__(self, fault: str) -> None:
        self.fault = fault

    def write(self) -> None:
        """Called every LOG_PERIOD steps."""
        if self.fault == "Writer.write":
            raise RuntimeError("the server is away")


class Trainer(IncrementalTrainer):
    """Brings a hook, an evaluator and a writer, and builds all else with or without a fault."""

    fault = ""

    def build_hooks(self) -> list[HookBase]:
        """Adds the hook before the writers."""
        chain = super().build_hooks()
        chain.insert(-1, Hook(self.fault))
        return chain

    def build_writers(self) -> list[EventWriter]:
        """Adds the writer."""
        return [*super().build_writers(), Writer(self.fault)]

    @classmethod
    def build_evaluator(cls, cfg: CfgNode, dataset_name: str) -> DatasetEvaluator:
        """Adds the evaluator."""
        own = Evaluator(cls.fault if cfg.STAGE.PHASE == 2 else "")
        return DatasetEvaluators([super().build_evaluator(cfg, dataset_name), own])

    @classmethod
    def build_optimizer(cls, cfg: CfgNode, model: Any) -> Any:
        """Fails before the first step."""
        if cls.fault == "Trainer.build_optimizer":
            raise AttributeError("no such parameter")
        return super().build_optimizer(cfg, model)

    @classmethod
    def build_train_loader(cls, cfg: CfgNode) -> Any:
        """Fails in the calibration step."""
        if cls.fault == "Trainer.build_train_loader" and cfg.STAGE.NAME == "calibrate":
            raise ValueError("no such sampler")
        return super().build_train_loader(cfg)


FAULTS = (
    *("Hook.before_train", "Hook.after_step", "Hook.after_train", "Writer.write"),
    *("Evaluator.process", "Evaluator.evaluate"),
    *("Trainer.build_optimizer", "Trainer.build_train_loader"),
)
