"""The engine: one config, one run directory, every phase and stage."""

from cldetr.engine.launch import default_argument_parser, default_setup, launch
from cldetr.engine.trainer import IncrementalTrainer

__all__ = ["IncrementalTrainer", "default_argument_parser", "default_setup", "launch"]
