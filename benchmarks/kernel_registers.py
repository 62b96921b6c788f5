"""Reports registers and spills of the CUDA kernels, as ptxas tells them; needs nvcc, no GPU.

    python benchmarks/kernel_registers.py [--json]

TORCH_CUDA_ARCH_LIST chooses the architectures. A kernel that spills is reported with exit status 1.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from cldetr.layers.build import cuda_options, find_cuda_toolkit, run_load

TYPES = {"f": "float32", "d": "float64", "N3c104HalfE": "float16", "N3c108BFloat16E": "bfloat16"}


@dataclass(frozen=True)
class Usage:
    """What one kernel needs on one architecture."""

    kernel: str
    type: str
    channels_per_thread: int
    architecture: str
    registers: int
    spill_stores: int
    spill_loads: int
    stack: int


def parse(output: str) -> list[Usage]:
    """Reads ptxas's verbose output; the kernels' names are mangled C++."""
    entry = re.compile(
        r"Compiling entry function '\w*?\d+(forward|backward)_kernelI(\w+?)Li(\d+)E\w*' "
        r"for '(\w+)'.*?(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
        r".*?Used (\d+) registers",
        re.DOTALL,
    )
    usages = []
    for kernel, kind, width, architecture, stack, stores, loads, registers in entry.findall(output):
        numbers = (int(registers), int(stores), int(loads), int(stack))
        usages.append(Usage(kernel, TYPES[kind], int(width), architecture, *numbers))
    return sorted(usages, key=lambda usage: (usage.kernel, usage.type, usage.channels_per_thread))


def main() -> int:
    """Compiles the kernels once more, verbosely, into a temporary folder."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one JSON line per kernel")
    args = parser.parse_args()
    toolkit = find_cuda_toolkit()
    if isinstance(toolkit, str):
        print(f"cannot compile the kernels: {toolkit}", file=sys.stderr)
        return 2
    options, environment = cuda_options(toolkit, extra_flags=("-Xptxas=-v",))
    with tempfile.TemporaryDirectory() as folder:
        status, output = run_load("cuda", options, environment, Path(folder))
    usages = parse(output)
    if status != 0 or not usages:
        print(output, file=sys.stderr)
        return 2
    if args.json:
        for usage in usages:
            print(json.dumps({"nvcc": toolkit.version, **asdict(usage)}))
    else:
        _print_table(usages, toolkit.version)
    return int(any(usage.spill_stores or usage.spill_loads for usage in usages))


def _print_table(usages: list[Usage], version: str) -> None:
    architectures = sorted({usage.architecture for usage in usages}, key=lambda name: int(name[3:]))
    print(f"nvcc {version}; registers per thread, +bytes spilled\n")
    print(f"{'kernel':<28}" + "".join(f"{name:>9}" for name in architectures))
    cells: dict[str, dict[str, str]] = {}
    for usage in usages:
        name = f"{usage.kernel} {usage.type} x{usage.channels_per_thread}"
        spilled = usage.spill_stores + usage.spill_loads
        text = f"{usage.registers}" + (f"+{spilled}" if spilled else "")
        cells.setdefault(name, {})[usage.architecture] = text
    for name, row in cells.items():
        print(f"{name:<28}" + "".join(f"{row[arch]:>9}" for arch in architectures))


if __name__ == "__main__":
    sys.exit(main())
