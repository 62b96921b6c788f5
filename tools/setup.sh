#!/bin/sh
# Sets the project up: picks the environment, creates .venv where it is needed, then hands over to
# install.py inside that environment. Safe to run again at any time.
set -eu
cd "$(dirname "$0")/.."
environment=$(sh tools/environment.sh)

# Runs, is Python 3.10 to 3.12, and can make virtual environments. A name on the PATH may be a shim
# for a Python that is not there, so each candidate is really started.
suits() {
    "$1" -c 'import sys, venv, ensurepip; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 12))' \
        2>/dev/null
}

if [ "$environment" = "$PWD/.venv" ] && [ ! -e .venv/bin/python ]; then
    for active in "${VIRTUAL_ENV:-}" "${CONDA_PREFIX:-}"; do
        [ -z "$active" ] || [ "$active" = "$PWD/.venv" ] ||
            echo "setup: $active has no torch with Detectron2 and stays as it is; using .venv"
    done
    for python in ${PYTHON:-python3.11 python3.12 python3.10 python3}; do
        if suits "$python"; then chosen=$python; break; fi
    done
    if [ -z "${chosen:-}" ]; then
        echo "setup: no Python 3.10, 3.11 or 3.12 with the venv module among:" \
            "${PYTHON:-python3.11 python3.12 python3.10 python3}" >&2
        echo "  Install one (Debian, Ubuntu: apt install python3.11 python3.11-venv) or name one:" \
            "make setup PYTHON=/path/to/python3.11" >&2
        exit 1
    fi
    echo "setup: creating .venv with $("$chosen" --version)"
    "$chosen" -m venv .venv
fi
if ! suits "$environment/bin/python"; then
    echo "setup: $environment/bin/python does not run or is not Python 3.10 to 3.12." >&2
    [ "$environment" != "$PWD/.venv" ] || echo "  Remove .venv and run make setup again." >&2
    exit 1
fi
exec "$environment/bin/python" tools/install.py
