"""The compiled libraries: where they lie, whether they fit this installation, and loading them.

`cldetr build` writes a library and, last, a stamp beside it that says what it was built from. A
library is loaded only when its stamp fits: it calls into PyTorch's C++ interface, which changes
with every version, and implements ops whose declarations are in Python.

CLDETR_COMPILED_OPS=0 in the environment leaves the libraries aside, to compare with plain PyTorch.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
import os
import platform
import runpy
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cldetr.errors import InputError

SOURCE_DIR = Path(__file__).parent / "csrc"
LIBRARY_DIR = Path(__file__).parent / "_lib"
SWITCH = "CLDETR_COMPILED_OPS"

# Library → its source files. CUDA is a library of its own, so that the CPU's works where CUDA's
# cannot be built or loaded.
SOURCES = {"cpu": ("*.cpp", "cpu/*.cpp"), "cuda": ("cuda/*.cu", "cuda/*.cpp")}
HEADERS = {"cpu": ("*.h", "cpu/*.h"), "cuda": ("*.h", "cuda/*.h", "cuda/*.cuh")}


@dataclass(frozen=True)
class Backend:
    """One library's state: loaded, or the reason why not and how to mend it."""

    name: str
    path: Path
    loaded: bool
    reason: str = ""
    built_with: str = ""


def library_path(name: str, directory: Path = LIBRARY_DIR) -> Path:
    """Returns where the library `name` ("cpu", "cuda") lies when it is built."""
    return directory / f"cldetr_{name}.so"


def stamp_path(name: str, directory: Path = LIBRARY_DIR) -> Path:
    """Returns the path of the file that tells what the library was built from."""
    return library_path(name, directory).with_suffix(".json")


def matching_files(patterns: tuple[str, ...]) -> list[Path]:
    """Lists the files under `csrc` that match, in a fixed order."""
    return sorted({path for pattern in patterns for path in SOURCE_DIR.glob(pattern)})


def digest_files(paths: Iterable[Path]) -> str:
    """Computes one SHA-256 of the names (under `csrc`) and contents of some files."""
    digest = hashlib.sha256()
    for path in paths:
        digest.update(f"{path.relative_to(SOURCE_DIR)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()


@functools.cache
def torch_release() -> dict[str, str]:
    """Reads version, CUDA version and folder of the installed torch, without importing it."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise InputError("PyTorch is not installed here: see the set-up section of README.md")
    folder = Path(spec.origin).parent
    facts = runpy.run_path(str(folder / "version.py"))
    return {
        "version": facts["__version__"],
        "cuda": facts.get("cuda") or "",
        "folder": str(folder),
    }


def build_inputs(name: str) -> dict[str, str]:
    """Names what a library must be built from to fit: this torch, this machine, these sources."""
    return {
        "torch": torch_release()["version"],
        "machine": platform.machine(),
        "sources": digest_files(matching_files(SOURCES[name] + HEADERS[name])),
    }


def read_stamp(name: str, directory: Path = LIBRARY_DIR) -> dict[str, Any]:
    """Reads a library's stamp; empty when there is none or it is damaged."""
    try:
        stamp = json.loads(stamp_path(name, directory).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return stamp if isinstance(stamp, dict) else {}


def reason_not_to_load(name: str, directory: Path = LIBRARY_DIR) -> str:
    """Says why the library must not be loaded, with the way to mend it; empty when it fits."""
    if os.environ.get(SWITCH) == "0":
        return f"switched off by {SWITCH}=0"
    fix = "run `cldetr build`"
    stamp = read_stamp(name, directory)
    if not stamp or not library_path(name, directory).is_file():
        if name == "cuda" and not torch_release()["cuda"]:
            return "the installed torch has no CUDA"
        return f"not built; {fix}"
    expected = build_inputs(name)
    if stamp.get("torch") != expected["torch"]:
        return f"built for torch {stamp.get('torch')}, here is torch {expected['torch']}; {fix}"
    if stamp.get("machine") != expected["machine"]:
        return f"built for {stamp.get('machine')}, here is {expected['machine']}; {fix}"
    if stamp.get("sources") != expected["sources"]:
        return f"the sources have changed since it was built; {fix}"
    return ""


@functools.cache
def load_libraries() -> dict[str, Backend]:
    """Loads every library that fits, once per process, and returns the state of all."""
    import torch

    backends = {}
    for name in SOURCES:
        path = library_path(name)
        reason = reason_not_to_load(name)
        if not reason:
            try:
                torch.ops.load_library(str(path))
            except OSError as error:
                reason = f"cannot be loaded: {error}; run `cldetr build --force`"
        built_with = str(read_stamp(name).get("compiler", ""))
        backends[name] = Backend(name, path, not reason, reason, built_with)
    return backends


def op_backends() -> dict[str, Backend]:
    """Tells for "cpu" and "cuda" whether the compiled ops are loaded, and if not, why."""
    return dict(load_libraries())
