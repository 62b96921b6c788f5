"""What works on this machine and what does not, each finding with its fix.

Only the standard library is imported at the top: the doctor has to speak where everything else is
missing.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Literal

OLDEST_PYTHON, NEWEST_PYTHON = (3, 10), (3, 12)
_GIB = 2**30
_SETUP = "run `make setup` in the repository"


@dataclass(frozen=True)
class Finding:
    """One line of the examination."""

    name: str
    status: Literal["ok", "warn", "fail"]  # fail: training could not start
    text: str
    fix: str = ""


def examine(data_root: Path, output: Path) -> Iterator[Finding]:
    """Examines Python, libraries, operators, data sets and the machine, in this order.

    Args:
        data_root: Detectron2's folder of data sets, where COCO is looked for.
        output: Where runs would be written; it need not exist yet.

    Yields:
        Findings as they are made: importing torch and Detectron2 takes seconds.
    """
    yield _python()
    yield _packages()
    torch, finding = _imported("torch", "torch")
    yield finding
    if torch:
        yield _cuda(torch)
        yield _torchvision(torch)
    yield _detectron2()
    if torch:
        yield from _operators(torch)
    yield from _data_sets(data_root)
    yield _disk(output)
    yield from _memory()
    yield _processor(torch)


def default_data_root() -> Path:
    """Returns Detectron2's folder of data sets: $DETECTRON2_DATASETS, else ./datasets."""
    return Path(os.environ.get("DETECTRON2_DATASETS", "datasets")).expanduser()


def _python() -> Finding:
    version = platform.python_version()
    if OLDEST_PYTHON <= sys.version_info[:2] <= NEWEST_PYTHON:
        return Finding("Python", "ok", f"{version} at {sys.executable}")
    return Finding(
        "Python",
        "fail",
        f"{version}; 3.10, 3.11 or 3.12 is needed",
        "install one of them, remove .venv and run `make setup`",
    )


def _packages() -> Finding:
    """Compares the installed packages with the ranges of pyproject.toml."""
    try:
        requirements = importlib.metadata.requires("cldetr") or []
    except importlib.metadata.PackageNotFoundError:
        return Finding("packages", "fail", "cldetr is not installed", _SETUP)
    problems, count = [], 0
    for requirement in requirements:
        if "extra ==" in requirement:  # for tests and development only
            continue
        count += 1
        name = re.split(r"[^\w.-]", requirement, maxsplit=1)[0]
        least = re.search(r">=\s*([\w.]+)", requirement)
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            problems.append(f"{name} is missing")
            continue
        if least and release(version) < release(least[1]):
            problems.append(f"{name} {version} is older than {least[1]}")
    if problems:
        return Finding("packages", "fail", ", ".join(problems), f"{_SETUP}, or `pip install -e .`")
    return Finding("packages", "ok", f"the {count} required ones are there, none too old")


def _imported(name: str, module: str) -> tuple[ModuleType | None, Finding]:
    try:
        found = importlib.import_module(module)
    except Exception as error:  # a broken binary raises anything: OSError, RuntimeError, …
        absent = isinstance(error, ModuleNotFoundError) and error.name == module
        reason = "not installed" if absent else f"does not import: {error}"
        return None, Finding(name, "fail", reason.splitlines()[0], _SETUP)
    return found, Finding(name, "ok", str(found.__version__))


def _cuda(torch: ModuleType) -> Finding:
    built = torch.version.cuda
    if torch.cuda.is_available():
        devices = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
        names = ", ".join(f"{d.name} ({d.total_memory / _GIB:.0f} GiB)" for d in devices)
        return Finding("CUDA", "ok", f"{built}; {len(devices)} device(s): {names}")
    if built:
        text = f"torch is built for {built}, but no device is visible"
        fix = "check `nvidia-smi` and CUDA_VISIBLE_DEVICES"
    else:
        text, fix = "this torch is built without CUDA", "install a CUDA build of torch"
    text += ": training runs on the CPU"
    return Finding("CUDA", "warn", text, f"fine for the embedded data set; for COCO {fix}")


def _torchvision(torch: ModuleType) -> Finding:
    module, finding = _imported("torchvision", "torchvision")
    if module is None:
        return finding
    try:  # its operators are compiled against one torch and may not fit the one that is here
        module.ops.nms(torch.tensor([[0.0, 0.0, 1.0, 1.0]]), torch.ones(1), 0.5)
    except Exception as error:
        text = f"{module.__version__} does not fit torch {torch.__version__}: {error}"
        return Finding("torchvision", "fail", text.splitlines()[0], _SETUP)
    return finding


def _detectron2() -> Finding:
    module, finding = _imported("Detectron2", "detectron2")
    if module is None:
        return finding
    packages = importlib.metadata.packages_distributions().get("detectron2", ["own checkout"])
    source = f"{module.__version__} ({packages[0]}) at {Path(str(module.__file__)).parent}"
    try:
        importlib.import_module("detectron2._C")
        compiled = "its compiled part loads"
    except Exception:  # ImportError, or anything else that loading a foreign binary raises
        compiled = "its compiled part does not load, and nothing here needs it"
    try:
        importlib.import_module("detectron2.engine")
        importlib.import_module("detectron2.evaluation")
    except Exception as error:
        text = f"{source} does not import: {error}".splitlines()[0]
        return Finding("Detectron2", "fail", text, _SETUP)
    return Finding("Detectron2", "ok", f"{source}; {compiled}")


def _operators(torch: ModuleType) -> Iterator[Finding]:
    """Reports the compiled operators; plain PyTorch ones stand in for those that are not there."""
    from cldetr.layers.build import find_cuda_toolkit
    from cldetr.layers.libraries import load_libraries

    cpu, cuda = (load_libraries()[name] for name in ("cpu", "cuda"))
    if cpu.loaded:
        yield Finding("operators, CPU", "ok", "compiled")
    else:
        text = f"plain PyTorch, much slower: the compiled library is {cpu.reason}"
        yield Finding("operators, CPU", "warn", text, "`cldetr build` (needs g++ or clang++)")
    if not torch.version.cuda:
        return
    toolkit = find_cuda_toolkit()
    nvcc = toolkit if isinstance(toolkit, str) else f"nvcc {toolkit.version} of {toolkit.home}"
    if cuda.loaded:
        yield Finding("operators, CUDA", "ok", f"compiled; {nvcc}")
    elif torch.cuda.is_available():
        text = f"plain PyTorch, much slower: the compiled library is {cuda.reason}; {nvcc}"
        fix = f"with nvcc {torch.version.cuda.split('.')[0]}.x: `cldetr build --cuda on`"
        yield Finding("operators, CUDA", "warn", text, fix)
    else:
        yield Finding("operators, CUDA", "ok", f"not there, nor needed without a device; {nvcc}")


def _data_sets(root: Path) -> Iterator[Finding]:
    fix = "datasets/README.md shows the layout; or set DETECTRON2_DATASETS"
    yield _data_set(
        "COCO 2017", root / "coco", ["annotations/instances_{}2017.json", "{}2017"], fix
    )
    # The folder that `cldetr shapes` writes to and configs read from, whatever Detectron2's is.
    forms = ["annotations/instances_{}.json", "images/{}"]
    yield _data_set("shapes", Path("datasets/shapes"), forms, "`cldetr shapes`, in seconds")


def _data_set(name: str, folder: Path, forms: list[str], fix: str) -> Finding:
    paths = [form.format(split) for form in forms for split in ("train", "val")]
    absent = [path for path in paths if not (folder / path).exists()]
    if not absent:
        return Finding(name, "ok", f"at {folder}")
    if len(absent) == len(paths):
        return Finding(name, "warn", f"not at {folder}", fix)
    return Finding(name, "warn", f"{folder} lacks {', '.join(absent)}", fix)


def _disk(output: Path) -> Finding:
    folder = output.absolute()
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    text = f"{free / _GIB:.1f} GiB free at {folder}"
    if not os.access(folder, os.W_OK):
        fix = "give another folder: OUTPUT_DIR /path"
        return Finding("disk", "fail", f"{folder} cannot be written to", fix)
    if free < 0.5 * _GIB:
        return Finding("disk", "fail", text, "free some: a checkpoint takes up to 0.5 GiB")
    if free < 10 * _GIB:
        return Finding("disk", "warn", text, "enough for the embedded data set, tight for COCO")
    return Finding("disk", "ok", text)


def _memory() -> Iterator[Finding]:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")  # a container's share may be smaller
    if limit.is_file() and (text := limit.read_text().strip()).isdigit():
        total = min(total, int(text))
    if total < 4 * _GIB:
        fix = "enough for the embedded data set, too little for COCO"
        yield Finding("memory", "warn", f"{total / _GIB:.1f} GiB", fix)
    else:
        yield Finding("memory", "ok", f"{total / _GIB:.1f} GiB")
    shared = Path("/dev/shm")  # loader workers hand images over through it
    if shared.is_dir():
        size = shutil.disk_usage(shared).total
        if size < 0.5 * _GIB:
            yield Finding(
                "shared memory",
                "warn",
                f"{size / 2**20:.0f} MiB in {shared}: loader workers may die",
                "start the container with --shm-size=8g, or set DATALOADER.NUM_WORKERS 0",
            )


def _processor(torch: ModuleType | None) -> Finding:
    affinity = getattr(os, "sched_getaffinity", None)
    usable = len(affinity(0)) if affinity else os.cpu_count() or 1
    text = f"{usable} core(s) usable, {platform.machine()}"
    if torch is None:
        return Finding("CPU", "ok", text)
    threads = torch.get_num_threads()
    if threads > usable:
        fix = f"set OMP_NUM_THREADS={usable}: more threads than cores slow each other down"
        return Finding("CPU", "warn", f"{text}; torch uses {threads} threads", fix)
    return Finding("CPU", "ok", f"{text}; torch uses {threads} thread(s)")


def release(version: str) -> tuple[int, ...]:
    """Reads the numbers a version begins with: (2, 1) of "2.1rc1"."""
    return tuple(map(int, re.findall(r"\d+", re.split(r"[^\d.]", version)[0])))
