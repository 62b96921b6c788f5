"""Annotation files, registered views, exemplars and the embedded data set."""
