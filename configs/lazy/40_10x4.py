"""The twin of configs/40_10x4.yaml."""

from .coco import method, model, start

__all__ = ["method", "model", "runtime", "scenario", "start"]

scenario = dict(name="40+10x4", protocol="traditional", order="id")
runtime = dict(output_dir="output/40_10x4")
