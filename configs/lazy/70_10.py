"""The twin of configs/70_10.yaml; the other scenarios by `scenario.name=40+40` and the like."""

from .coco import dataloader, method, model, train

__all__ = ["dataloader", "method", "model", "scenario", "train"]

scenario = dict(name="70+10", protocol="strict", order="seed", class_seed=0, data_seed=0)
train.output_dir = "output/70_10"
