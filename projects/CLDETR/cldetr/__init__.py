"""CL-DETR: incremental object detection with transformers, as a Detectron2 project."""

import warnings

__version__ = "0.1.0"

# Detectron2 calls torch.jit.script when it is imported, and torch then warns on every start.
warnings.filterwarnings("ignore", "`torch.jit.script` is deprecated", FutureWarning)
