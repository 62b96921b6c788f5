"""Finds a CUDA toolkit that fits the installed torch, and the architectures to compile for."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from cldetr.errors import InputError
from cldetr.layers.libraries import torch_release

# The data centre and desktop GPUs in use; each toolkit knows a part of them. The newest is also
# stored as PTX, which later GPUs compile when the library is loaded.
USUAL_ARCHITECTURES = ("7.0", "7.5", "8.0", "8.6", "8.9", "9.0", "10.0", "12.0")


@dataclass(frozen=True)
class CudaToolkit:
    """An nvcc, its version, and the flags for the architectures to compile for."""

    nvcc: Path
    version: str
    architecture_flags: tuple[str, ...]


def find_cuda_toolkit() -> CudaToolkit | str:
    """Finds nvcc; returns the reason where there is none that fits."""
    torch_cuda = torch_release()["cuda"]
    if not torch_cuda:
        return "the installed torch has no CUDA"
    nvcc = _find_nvcc()
    if nvcc is None:
        return "nvcc was not found (set CUDA_HOME to the toolkit's folder, or put nvcc on PATH)"
    match = re.search(r"release (\d+\.\d+)", _output(nvcc, "--version"))
    if match is None:
        return f"{nvcc} does not tell its version"
    version = match.group(1)
    # Within one major version the runtime library stays compatible.
    if version.split(".")[0] != torch_cuda.split(".")[0]:
        return f"{nvcc} is version {version}, torch was built for CUDA {torch_cuda}"
    return CudaToolkit(nvcc, version, architecture_flags(nvcc))


def _find_nvcc() -> Path | None:
    # nvcc knows its own headers and libraries, also where it is called through a link or a wrapper:
    # the toolkit's folder need not be guessed from its place.
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(variable):
            candidate = Path(os.environ[variable]) / "bin" / "nvcc"
            if candidate.is_file():
                return candidate
    on_path = shutil.which("nvcc")
    if on_path:
        return Path(on_path)
    usual = Path("/usr/local/cuda/bin/nvcc")
    return usual if usual.is_file() else None


def architecture_flags(nvcc: Path) -> tuple[str, ...]:
    """Returns nvcc's flags for TORCH_CUDA_ARCH_LIST or, if that is not set, the usual GPUs."""
    known = set(re.findall(r"sm_(\d+)", _output(nvcc, "--list-gpu-code")))
    wanted = os.environ.get("TORCH_CUDA_ARCH_LIST", "").replace(";", " ").split()
    if not wanted:
        wanted = [name for name in USUAL_ARCHITECTURES if name.replace(".", "") in known]
        wanted[-1] += "+PTX"
    flags = []
    for name in wanted:
        number = name.removesuffix("+PTX").replace(".", "")
        if number not in known:
            raise InputError(
                f"TORCH_CUDA_ARCH_LIST names {name!r}, which {nvcc} cannot compile for; it knows "
                + ", ".join(f"{code[:-1]}.{code[-1]}" for code in sorted(known, key=int))
            )
        flags.append(f"-gencode=arch=compute_{number},code=sm_{number}")
        if name.endswith("+PTX"):
            flags.append(f"-gencode=arch=compute_{number},code=compute_{number}")
    return tuple(flags)


def _output(*command: Path | str) -> str:
    return subprocess.run(
        [str(word) for word in command], stdout=subprocess.PIPE, text=True, check=False
    ).stdout
