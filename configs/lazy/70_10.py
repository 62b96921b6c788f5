"""The twin of configs/70_10.yaml."""

from .coco import method, model, start

__all__ = ["method", "model", "runtime", "scenario", "start"]

scenario = dict(name="70+10", protocol="strict", order="seed", class_seed=0, data_seed=0)
runtime = dict(output_dir="output/70_10")
