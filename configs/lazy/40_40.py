"""The twin of configs/40_40.yaml."""

from .coco import method, model, start

__all__ = ["method", "model", "runtime", "scenario", "start"]

scenario = dict(name="40+40", protocol="strict", order="seed", class_seed=0, data_seed=0)
runtime = dict(output_dir="output/40_40")
