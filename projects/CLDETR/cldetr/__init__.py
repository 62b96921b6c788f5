"""CL-DETR: incremental object detection with transformers, as a Detectron2 project."""

__version__ = "0.1.0"
