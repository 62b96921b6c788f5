"""The twin of configs/40_20x2.yaml."""

from .coco import method, model, start

__all__ = ["method", "model", "runtime", "scenario", "start"]

scenario = dict(name="40+20x2", protocol="traditional", order="id")
runtime = dict(output_dir="output/40_20x2")
