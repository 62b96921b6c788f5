"""Compiles the C++ and CUDA sources under `csrc` into the libraries that PyTorch loads.

The compilers are called directly: a handful of files needs no build system, and the messages that
reach the user are then the compiler's own. Object files are kept under the digest of all that went
into them, so that only what has changed is compiled again.
"""

from __future__ import annotations

import logging
import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from cldetr.errors import InputError
from cldetr.files import atomic_path, sha256_json, write_json
from cldetr.layers.cuda_toolkit import CudaToolkit, find_cuda_toolkit
from cldetr.layers.libraries import (
    HEADERS,
    LIBRARY_DIR,
    SOURCES,
    build_inputs,
    digest_files,
    library_path,
    matching_files,
    read_stamp,
    stamp_path,
    torch_release,
)

logger = logging.getLogger(__name__)

COMPILE_JOBS = 2  # a job takes about a gigabyte
LAST_LINES = 15  # of the compiler's output, shown when it fails
CPU_FLAGS = (
    "-std=c++20",
    "-O3",
    "-fPIC",
    "-Wall",
    # Without these, loops with a conversion or a comparison of floats are not vectorised.
    "-fno-math-errno",
    "-fno-trapping-math",
)
CUDA_FLAGS = ("-std=c++20", "-O3", "-Xcompiler=-fPIC", "-Xcompiler=-Wall")


class BuildError(InputError):
    """A library could not be built; the message ends with the compiler's last lines."""


@dataclass(frozen=True)
class Recipe:
    """How to build one library: the compiler, and the flags of each source file."""

    name: str
    compiler: tuple[str, ...]
    flags: dict[Path, tuple[str, ...]]
    link_flags: tuple[str, ...]

    def stamp(self) -> dict[str, str]:
        """Returns what the library depends on; it is rebuilt when this changes."""
        flags = {str(path.name): flags for path, flags in self.flags.items()}
        return {
            **build_inputs(self.name),
            "compiler": shlex.join(self.compiler),
            "flags": repr((sorted(flags.items()), self.link_flags)),
        }


def build_libraries(
    cuda: str = "auto", force: bool = False, directory: Path = LIBRARY_DIR
) -> list[str]:
    """Builds what is missing or out of date; a library that fails leaves the others in place.

    Args:
        cuda: "auto" builds the CUDA library where torch and a fitting toolkit allow it, "on"
            insists, "off" leaves it out.
        force: Compile everything again.
        directory: Where libraries, stamps and logs go.

    Returns:
        One line per library: built, up to date, or left out and why.

    Raises:
        BuildError: A library could not be built.
    """
    lines = [_bring_up_to_date(_cpu_recipe(), force, directory)]
    if cuda == "off":
        return [*lines, "cuda: left out as asked"]
    toolkit = find_cuda_toolkit()
    if isinstance(toolkit, str):
        if cuda == "on":
            raise BuildError(f"the CUDA library cannot be built: {toolkit}")
        return [*lines, f"cuda: left out, {toolkit}"]
    return [*lines, _bring_up_to_date(cuda_recipe(toolkit), force, directory)]


def _cpu_recipe() -> Recipe:
    compiler = os.environ.get("CXX")
    if compiler is None:
        compiler = next((name for name in ("c++", "g++", "clang++") if shutil.which(name)), None)
    if compiler is None:
        raise BuildError(
            "no C++ compiler found: install g++ (10 or newer) or clang++ (12 or newer), or set CXX"
        )
    flags = (*CPU_FLAGS, *_torch_includes())
    if sys.platform == "linux":
        flags += ("-fopenmp",)  # at::parallel_for is a header
    by_source = {}
    for source in matching_files(SOURCES["cpu"]):
        avx2 = source.stem.endswith("_avx2") and platform.machine() in ("x86_64", "AMD64")
        by_source[source] = (*flags, "-mavx2", "-mfma") if avx2 else flags
    link_flags = ("-shared", f"-L{_torch_folder() / 'lib'}", "-lc10", "-ltorch_cpu")
    if sys.platform == "darwin":
        link_flags += ("-undefined", "dynamic_lookup")
    return Recipe("cpu", tuple(shlex.split(compiler)), by_source, link_flags)


def cuda_recipe(toolkit: CudaToolkit, extra_flags: Sequence[str] = ()) -> Recipe:
    """Returns how to build the CUDA library, for the toolkit's architectures."""
    flags = (*CUDA_FLAGS, *toolkit.architecture_flags, *_torch_includes(), *extra_flags)
    flags += (f"--threads={COMPILE_JOBS}",)
    folder = _torch_folder() / "lib"
    link_flags = ("-shared", "-cudart=shared", f"-L{folder}", "-lc10", "-lc10_cuda", "-ltorch_cpu")
    sources = dict.fromkeys(matching_files(SOURCES["cuda"]), flags)
    return Recipe("cuda", (str(toolkit.nvcc),), sources, link_flags)


def _torch_folder() -> Path:
    return Path(torch_release()["folder"])


def _torch_includes() -> tuple[str, ...]:
    include = _torch_folder() / "include"
    # As system headers: their warnings are not ours.
    return ("-isystem", str(include), "-isystem", str(include / "torch/csrc/api/include"))


def _bring_up_to_date(recipe: Recipe, force: bool, directory: Path) -> str:
    stamp = recipe.stamp()
    current = read_stamp(recipe.name, directory) == stamp
    if current and library_path(recipe.name, directory).is_file() and not force:
        return f"{recipe.name}: up to date"
    directory.mkdir(parents=True, exist_ok=True)
    log = directory / f"build_{recipe.name}.log"
    log.write_text("", encoding="utf-8")
    logger.info("compiling the %s library (about a minute)", recipe.name)
    with ThreadPoolExecutor(COMPILE_JOBS) as pool:
        objects = list(
            pool.map(lambda source: _compile(recipe, source, force, directory, log), recipe.flags)
        )
    path = library_path(recipe.name, directory)
    # The stamp goes first and comes last: no library is ever beside a stamp that is not its own.
    stamp_path(recipe.name, directory).unlink(missing_ok=True)
    with atomic_path(path) as partial:
        linked = [str(file) for file in objects]
        _run([*recipe.compiler, "-o", str(partial), *linked, *recipe.link_flags], log)
        _check_loads(partial, log)
    write_json(stamp_path(recipe.name, directory), stamp)
    return f"{recipe.name}: built {path}"


def _compile(recipe: Recipe, source: Path, force: bool, directory: Path, log: Path) -> Path:
    """Compiles one file, unless its object is there already."""
    command = [*recipe.compiler, *recipe.flags[source]]
    files = digest_files([source, *matching_files(HEADERS[recipe.name])])
    key = sha256_json([command, torch_release(), files])[:16]
    objects = directory / "objects"
    target = objects / f"{recipe.name}_{source.stem}_{key}.o"
    if target.is_file() and not force:
        return target
    objects.mkdir(exist_ok=True)
    for outdated in objects.glob(f"{recipe.name}_{source.stem}_????????????????.o"):
        outdated.unlink()
    with atomic_path(target) as partial:
        _run([*command, "-c", str(source), "-o", str(partial)], log)
    return target


def _check_loads(library: Path, log: Path) -> None:
    """Loads the library in a process of its own: this one may hold an older version already."""
    code = "import sys, torch; torch.ops.load_library(sys.argv[1])"
    _run([sys.executable, "-W", "ignore", "-c", code, str(library)], log)


def _run(command: Sequence[str], log: Path) -> None:
    logger.debug("%s", shlex.join(command))
    result = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    with open(log, "a", encoding="utf-8") as stream:
        stream.write(f"$ {shlex.join(command)}\n{result.stdout}")
    if result.returncode != 0:
        last = "\n".join(f"  {line}" for line in result.stdout.splitlines()[-LAST_LINES:])
        raise BuildError(
            f"{Path(command[0]).name} failed with status {result.returncode}; all its output is in "
            f"{log}. The package works without this library, only slower.\n{last}"
        )
