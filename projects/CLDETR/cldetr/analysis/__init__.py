"""What runs a model after training: prediction, export, pictures, diagnosis."""

from cldetr.analysis.predict import Detection, Predictor

__all__ = ["Detection", "Predictor"]
