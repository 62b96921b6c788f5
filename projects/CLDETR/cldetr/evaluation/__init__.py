"""Evaluation: COCO's metrics for old, new and all classes, and the results of a run."""

from cldetr.evaluation.evaluator import IncrementalEvaluator

__all__ = ["IncrementalEvaluator"]
