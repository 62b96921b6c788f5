"""The engine: one recipe, one run directory, every phase and stage."""
