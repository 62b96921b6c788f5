"""Builds the libraries from the sources under `csrc` with `torch.utils.cpp_extension.load`.

It runs in a process of its own: `load` also loads what it builds, and this process may hold an
older version already. PyTorch's compiled extensions and ninja give the commands; here is which
compiler, which GPU architectures, and where the result goes.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cldetr.errors import InputError
from cldetr.files import atomic_path
from cldetr.layers.libraries import (
    LIBRARY_DIR,
    build_tag,
    built_libraries,
    source_files,
    torch_release,
)

logger = logging.getLogger(__name__)

COMPILE_JOBS = "2"  # a job takes about a gigabyte
LAST_LINES = 15  # of the compiler's output, shown when it fails
_STANDARD = "-std=c++20"  # older versions of torch have C++17 as their default
# Without the last two, loops with a conversion or a comparison of floats are not vectorised.
CPU_FLAGS = (_STANDARD, "-O3", "-Wall", "-fno-math-errno", "-fno-trapping-math")
CUDA_FLAGS = (_STANDARD, "-O3", "-Xcompiler=-Wall", f"--threads={COMPILE_JOBS}")
# Data center and desktop GPUs; each toolkit knows some of them. The newest is also stored as PTX,
# which later GPUs compile when the library is loaded.
USUAL_ARCHITECTURES = ("7.0", "7.5", "8.0", "8.6", "8.9", "9.0", "10.0", "12.0")

_LOAD = """
import json, sys
from torch.utils.cpp_extension import load
try:
    load(**json.loads(sys.argv[1]), is_python_module=False, verbose=True)
except (RuntimeError, OSError, ValueError) as error:
    sys.exit(f"{error} {error.__cause__ or ''}")
"""


class BuildError(InputError):
    """A library could not be built; the message ends with the compiler's last lines."""


@dataclass(frozen=True)
class CudaToolkit:
    """A CUDA toolkit and the architectures to compile for, as TORCH_CUDA_ARCH_LIST has them."""

    home: Path
    version: str
    architectures: str


def build_libraries(
    cuda: str = "auto", force: bool = False, directory: Path = LIBRARY_DIR
) -> list[str]:
    """Builds what is missing or out of date; a library that fails leaves the others intact.

    Args:
        cuda: "auto" builds the CUDA library where torch and a matching toolkit allow it, "on"
            insists, "off" skips it.
        force: compile even if there is a library that fits.
        directory: where libraries and logs go.

    Returns:
        one line per library: built, up to date, or skipped and why.

    Raises:
        BuildError: a library could not be built.
    """
    openmp = ["-fopenmp"] if sys.platform == "linux" else []  # at::parallel_for is a header
    options: dict[str, Any] = {"extra_cflags": [*CPU_FLAGS, *openmp]}
    lines = [_build("cpu", options, {"CXX": find_compiler()}, force, directory)]
    if cuda == "off":
        return [*lines, "cuda: skipped as asked"]
    toolkit = find_cuda_toolkit()
    if isinstance(toolkit, str):
        if cuda == "on":
            raise BuildError(f"the CUDA library cannot be built: {toolkit}")
        return [*lines, f"cuda: skipped, {toolkit}"]
    options, environment = cuda_options(toolkit)
    return [*lines, _build("cuda", options, environment, force, directory)]


def find_compiler() -> str:
    """Returns the C++ compiler: CXX of the environment or the first of the usual names."""
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["c++", "g++", "clang++"]
    for name in names:
        if shutil.which(name):
            return name
    raise BuildError(
        f"no C++ compiler found ({', '.join(names)}): install g++ (10 or newer) or clang++ (12 or "
        "newer), or set CXX"
    )


def find_cuda_toolkit() -> CudaToolkit | str:
    """Finds the CUDA toolkit that matches the installed torch; returns the reason if none does."""
    torch_cuda = torch_release()["cuda"]
    if not torch_cuda:
        return "the installed torch has no CUDA"
    nvcc = shutil.which("nvcc")
    homes = [Path(os.environ[name]) for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    homes += [Path(nvcc).resolve().parents[1]] if nvcc else []
    homes += [Path("/usr/local/cuda")]
    homes = [home for home in homes if (home / "bin" / "nvcc").is_file()]
    if not homes:
        return "nvcc was not found (set CUDA_HOME to the toolkit's folder, or put nvcc on PATH)"
    # An nvcc on PATH may be a script that calls the one of a toolkit elsewhere.
    runtimes = (f"{folder}/libcudart.so" for folder in ("lib64", "lib", "lib/*", "targets/*/lib"))
    whole = [home for pattern in runtimes for home in homes if any(home.glob(pattern))]
    home = next((home for home in homes if home in whole), homes[0])
    found = re.search(r"release (\d+\.\d+)", _output(home, "--version"))
    if found is None:
        return f"{home}/bin/nvcc does not tell its version"
    # Within one major version the runtime library stays compatible.
    if found[1].split(".")[0] != torch_cuda.split(".")[0]:
        return f"{home}/bin/nvcc is version {found[1]}, torch was built for CUDA {torch_cuda}"
    known = set(re.findall(r"sm_(\d+)", _output(home, "--list-gpu-code")))
    usual = [name for name in USUAL_ARCHITECTURES if name.replace(".", "") in known]
    chosen = os.environ.get("TORCH_CUDA_ARCH_LIST") or ";".join(usual) + "+PTX"
    return CudaToolkit(home, found[1], chosen)


def cuda_options(
    toolkit: CudaToolkit, extra_flags: Sequence[str] = ()
) -> tuple[dict[str, Any], dict[str, str]]:
    """Returns the arguments of `load` for the CUDA library, and what its environment must hold."""
    targets = sorted(toolkit.home.glob("targets/*"))  # where Conda has headers and libraries
    options = {
        "extra_cflags": list(CPU_FLAGS),
        "extra_cuda_cflags": [*CUDA_FLAGS, *extra_flags],
        "extra_include_paths": [str(target / "include") for target in targets],
        "extra_ldflags": [f"-L{target / 'lib'}" for target in targets],
    }
    environment = {
        "CXX": find_compiler(),
        "CUDA_HOME": str(toolkit.home),
        "TORCH_CUDA_ARCH_LIST": toolkit.architectures,
    }
    return options, environment


def _build(
    name: str, options: dict[str, Any], environment: dict[str, str], force: bool, directory: Path
) -> str:
    variant = hashlib.sha256(json.dumps([options, environment]).encode()).hexdigest()[:8]
    target = directory / f"cldetr_{name}-{build_tag(name)}-{variant}.so"
    if target.is_file() and not force:
        return f"{name}: up to date"
    logger.info("compiling the %s library (about a minute)", name)
    directory.mkdir(parents=True, exist_ok=True)
    log = directory / f"build_{name}.log"
    with tempfile.TemporaryDirectory(dir=directory, prefix=f".{name}-") as folder:
        status, output = run_load(name, options, environment, Path(folder))
        log.write_text(output, encoding="utf-8")
        logger.debug("%s", output)
        if status:
            last = "\n".join(f"  {line}" for line in output.splitlines()[-LAST_LINES:])
            raise BuildError(
                f"the {name} library did not compile; all output is in {log}. The package works "
                f"without this library, only slower.\n{last}"
            )
        with atomic_path(target) as partial:
            shutil.copy(Path(folder) / f"cldetr_{name}.so", partial)
    for outdated in set(built_libraries(name, directory)) - {target}:
        outdated.unlink(missing_ok=True)
    return f"{name}: built {target}"


def run_load(
    name: str, options: dict[str, Any], environment: dict[str, str], folder: Path
) -> tuple[int, str]:
    """Builds a library in `folder`; returns the exit status and all that was printed."""
    sources = [str(path) for path in source_files(name) if path.suffix in (".cpp", ".cu")]
    options = {**options, "name": f"cldetr_{name}", "build_directory": str(folder)}
    options["sources"] = sources
    path = f"{sysconfig.get_path('scripts')}{os.pathsep}{os.environ.get('PATH', '')}"  # ninja
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _LOAD, json.dumps(options)],
        env={"MAX_JOBS": COMPILE_JOBS, **os.environ, "PATH": path, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    return done.returncode, done.stdout


def _output(home: Path, question: str) -> str:
    command = [str(home / "bin" / "nvcc"), question]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False).stdout
