"""Operators and small layers; `csrc` holds the compiled ones."""
