"""Detectors, matching and losses; knows nothing of data, methods or phases."""
