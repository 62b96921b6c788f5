#!/bin/sh
# Prints the folder of the environment that make uses: an active one that already has torch and
# Detectron2 (VIRTUAL_ENV, else CONDA_PREFIX), else .venv in the repository.
root=$(cd "$(dirname "$0")/.." && pwd)
for active in "${VIRTUAL_ENV:-}" "${CONDA_PREFIX:-}"; do
    [ -x "$active/bin/python" ] || continue
    if "$active/bin/python" - 2>/dev/null <<'PYTHON'
import importlib.util
import sys

found = all(importlib.util.find_spec(name) for name in ("torch", "detectron2"))
sys.exit(0 if found and (3, 10) <= sys.version_info[:2] <= (3, 12) else 1)
PYTHON
    then
        echo "$active"
        exit
    fi
done
echo "$root/.venv"
