"""The compiled operators: which library fits this installation, and loading it.

`cldetr build` writes a library under a name that tells the torch, the machine and the sources it
was built for. Another one is never loaded: it calls into PyTorch's C++ interface, which changes
with every version, and implements operators whose declarations are in Python.

CLDETR_COMPILED_OPS=0 in the environment disables the libraries, to compare with plain PyTorch.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import platform
import runpy
from dataclasses import dataclass
from pathlib import Path

from cldetr.errors import InputError

SOURCE_DIR = Path(__file__).parent / "csrc"
LIBRARY_DIR = Path(__file__).parent / "_lib"
SWITCH = "CLDETR_COMPILED_OPS"
# CUDA is a library of its own, so that the CPU's works where CUDA's cannot be built or loaded.
LIBRARIES = ("cpu", "cuda")


@dataclass(frozen=True)
class Backend:
    """The state of one library: loaded, or the reason why not with its fix."""

    path: Path | None
    loaded: bool
    reason: str = ""


def source_files(name: str) -> list[Path]:
    """Lists the sources and headers of the library `name` ("cpu", "cuda"), sorted."""
    folders = (SOURCE_DIR, SOURCE_DIR / name)
    return sorted(path for folder in folders for path in folder.glob("*") if path.is_file())


@functools.cache
def torch_release() -> dict[str, str]:
    """Reads version and CUDA version of the installed torch, without importing it."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise InputError("PyTorch is not installed here: see the set-up section of README.md")
    facts = runpy.run_path(str(Path(spec.origin).with_name("version.py")))
    return {"version": facts["__version__"], "cuda": facts.get("cuda") or ""}


def build_tag(name: str) -> str:
    """Names what a library must be built for to fit: this torch, this machine, these sources."""
    digest = hashlib.sha256()
    for path in source_files(name):
        digest.update(f"{path.relative_to(SOURCE_DIR)}\0".encode() + path.read_bytes() + b"\0")
    return f"torch{torch_release()['version']}-{platform.machine()}-{digest.hexdigest()[:12]}"


def built_libraries(name: str, directory: Path = LIBRARY_DIR, tag: str = "*") -> list[Path]:
    """Lists the files of the library `name` that were built for `tag`, by default for any."""
    return sorted(directory.glob(f"cldetr_{name}-{tag}-????????.so"))


def reason_not_to_load(name: str, directory: Path = LIBRARY_DIR) -> str:
    """Returns why no library can be loaded, with the fix; empty when one fits."""
    if os.environ.get(SWITCH) == "0":
        return f"switched off by {SWITCH}=0"
    tag = build_tag(name)
    if built_libraries(name, directory, tag):
        return ""
    others = built_libraries(name, directory)
    if others:
        return f"built as {others[0].name}, which does not fit {tag}; run `cldetr build`"
    if name == "cuda" and not torch_release()["cuda"]:
        return "the installed torch has no CUDA"
    return "not built; run `cldetr build`"


@functools.cache
def load_libraries() -> dict[str, Backend]:
    """Loads every library that fits, once per process, and returns the state of all."""
    import torch

    backends = {}
    for name in LIBRARIES:
        path, reason = None, reason_not_to_load(name)
        if not reason:
            path = built_libraries(name, tag=build_tag(name))[0]
            try:
                torch.ops.load_library(str(path))
            except OSError as error:
                reason = f"cannot be loaded: {error.__cause__ or error}; run `cldetr build --force`"
        backends[name] = Backend(path, not reason, reason)
    return backends
