"""Runs the benchmarks and prints their table, with the bar that each number is held to.

    python benchmarks/table.py                     # all, at the documented sizes: half an hour
    python benchmarks/table.py --quick             # small sizes: minutes, to see that all work
    python benchmarks/table.py --only teacher op   # these anew, the others as they were stored

Every benchmark is a command of its own that prints JSON lines. They are stored in
`output/benchmarks.jsonl` (`--quick`: not stored), from which the table is made.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
STORE = ROOT / "output" / "benchmarks.jsonl"

Lines = Sequence[dict[str, Any]]  # the JSON lines of a benchmark


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    what: str
    value: Callable[[Lines], float]
    unit: str
    bar: float
    at_most: bool = False

    def cells(self, lines: Lines) -> list[str]:
        """What, value, bar, whether it is reached."""
        value = self.value(lines)
        good = value <= self.bar if self.at_most else value >= self.bar
        sign = "≤" if self.at_most else "≥"
        number = f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"
        return [
            self.what,
            f"{number} {self.unit}".strip(),
            f"{sign} {self.bar:g} {self.unit}".strip(),
            "yes" if good else "no",
        ]


@dataclass(frozen=True)
class Benchmark:
    """A command, small enough for `--quick` with other words, and what to read from its lines."""

    name: str
    file: str
    words: tuple[str, ...]
    quick: tuple[str, ...]
    rows: tuple[Row, ...]


def last(*keys: str) -> Callable[[Lines], float]:
    """Reads a nested number of the last line."""

    def read(lines: Lines) -> float:
        found: Any = lines[-1]
        for key in keys:
            found = found[key]
        return float(found)

    return read


def shape(name: str, key: str) -> Callable[[Lines], float]:
    """Reads a number of the line of one shape."""
    return lambda lines: float(next(line[key] for line in lines if line["shape"] == name))


def model_ratio(name: str, what: str) -> Callable[[Lines], float]:
    """Reads a ratio of the line of one model."""
    return lambda lines: float(next(x["ratio"][what] for x in lines if x["model"] == name))


def small(key: str) -> Callable[[Lines], float]:
    """Reads the least of a number over the small shapes."""
    return lambda lines: min(
        float(line[key]) for line in lines if line["shape"].startswith("small")
    )


def teacher_rows(of: str) -> tuple[Row, ...]:
    """What a teacher costs, for one model."""
    return (
        Row(f"{of}: live old model, time", last("time_of_plain", "live"), "×", 1.35, True),
        Row(f"{of}: live old model, memory", last("memory_of_plain", "live"), "×", 1.05, True),
        Row(f"{of}: cached labels, time", last("time_of_plain", "cached"), "×", 1.03, True),
        Row(f"{of}: cached labels, memory", last("memory_of_plain", "cached"), "×", 1.03, True),
    )


def process_rows(of: str) -> tuple[Row, ...]:
    """What a second process gains, for one model."""
    return (
        Row(f"{of}: two processes against one, CPU time", last("times_faster", "cpu"), "×", 1.6),
        Row(f"{of}: the same, time passed", last("times_faster", "wall"), "×", 1.6),
    )


BENCHMARKS = (
    Benchmark(
        "gpu",
        "gpu.py",
        (),
        ("--only", "launches"),
        (
            Row(
                "GPU: launches in the forward passes of four sizes",
                last("launches", "four sizes", "forward"),
                "",
                3210,
                True,
            ),
            Row(
                "GPU: host waits of a step",
                last("launches", "four sizes", "host_waits"),
                "",
                10,
                True,
            ),
        ),
    ),
    Benchmark(
        "op",
        "op.py",
        ("--repeat", "3"),
        ("--repeat", "1", "--shapes", "decoder", "encoder", "small, width 64"),
        (
            Row("op, encoder, forward", shape("encoder", "forward_ratio"), "×", 18),
            Row("op, encoder, with backward", shape("encoder", "train_ratio"), "×", 13),
            Row("op, decoder, forward", shape("decoder", "forward_ratio"), "×", 12),
            Row("op, decoder, with backward", shape("decoder", "train_ratio"), "×", 5),
            Row("op, least of small shapes, forward", small("forward_ratio"), "×", 8),
            Row("op, least of small shapes, with backward", small("train_ratio"), "×", 6),
        ),
    ),
    Benchmark(
        "model",
        "model.py",
        ("--repeat", "3"),
        ("--repeat", "1", "--height", "192", "--width", "256"),
        (
            Row("training step against Hugging Face", last("train_cpu_s", "ratio"), "×", 2.1),
            Row("its peak memory", last("memory_mb", "ratio"), "×", 0.6, True),
            Row("inference against Hugging Face", last("inference_cpu_s", "ratio"), "×", 2.0),
        ),
    ),
    Benchmark(
        "huggingface_operator",
        "huggingface_operator.py",
        (),
        ("--repeat", "1", "--height", "128", "--width", "128"),
        (
            Row(
                "Hugging Face's Deformable DETR with our operator, step",
                model_ratio("deformable_detr", "step"),
                "×",
                2,
            ),
            Row("the same, inference", model_ratio("deformable_detr", "forward"), "×", 1.8),
            Row(
                "Hugging Face's RT-DETR with our operator, step",
                model_ratio("rt_detr", "step"),
                "×",
                1,
            ),
        ),
    ),
    Benchmark(
        "matching",
        "matching.py",
        (),
        ("--repeat", "5"),
        (Row("matching all layers against layer by layer", last("times_faster"), "×", 2.5),),
    ),
    Benchmark(
        "teacher",
        "teacher.py",
        (),
        ("--repeat", "1", "--height", "192", "--width", "256"),
        teacher_rows("R-50"),
    ),
    Benchmark(
        "teacher_small",
        "teacher.py",
        ("--model", "small", "--repeat", "101"),
        ("--model", "small", "--repeat", "3"),
        teacher_rows("small"),
    ),
    Benchmark(
        "exemplars",
        "exemplars.py",
        (),
        ("--images", "5000", "--dense-steps", "6", "--rounds", "1"),
        (Row("exemplars at COCO's size", last("seconds", "ours"), "s", 8, True),),
    ),
    Benchmark(
        "annotations",
        "annotations.py",
        (),
        ("--scale", "0.05", "--repeats", "1"),
        (
            Row("reading annotations against Detectron2", last("ratios", "faster"), "×", 8),
            Row("its peak memory, times lower", last("ratios", "less_memory"), "×", 3),
            Row("a later start", last("medians", "cached", "seconds"), "s", 1, True),
        ),
    ),
    Benchmark(
        "formats",
        "formats.py",
        (),
        ("--images", "500", "--repeats", "1"),
        (
            Row("reading 20,000 images of Pascal VOC", last("seconds", "voc"), "s", 5, True),
            Row("reading 20,000 images of YOLO", last("seconds", "yolo"), "s", 5, True),
        ),
    ),
    Benchmark(
        "evaluation",
        "evaluation.py",
        (),
        ("--scale", "0.05", "--repeats", "1"),
        (
            Row("evaluation against pycocotools", last("times_faster_than_pycocotools"), "×", 5),
            Row("all groups over one", last("all_groups_over_one"), "×", 1.2, True),
        ),
    ),
    Benchmark(
        "loader",
        "loader.py",
        (),
        ("--images", "8", "--repeat", "1"),
        (
            Row("loading against Detectron2's mapper", last("speed_of_detectron2"), "×", 0.97),
            Row(
                "loader processes that an A100 needs",
                last("workers_per_gpu", "at_training_size"),
                "",
                2,
                True,
            ),
        ),
    ),
    Benchmark(
        "start",
        "start.py",
        (),
        ("--repeat", "1"),
        (Row("start to the first step, CPU time", last("cpu_s"), "s", 10, True),),
    ),
    Benchmark(
        "processes",
        "processes.py",
        (),
        ("--repeat", "1", "--steps", "3"),
        process_rows("small"),
    ),
    Benchmark(
        "processes_r50",
        "processes.py",
        ("--model", "r50"),
        ("--model", "r50", "--repeat", "1", "--steps", "1"),
        process_rows("R-50"),
    ),
)


def run(benchmark: Benchmark, quick: bool) -> Lines:
    """Runs one benchmark; its JSON lines."""
    words = benchmark.quick if quick else benchmark.words
    command = [sys.executable, str(Path(__file__).with_name(benchmark.file)), *words]
    print(f"running {benchmark.file} {' '.join(words)}", file=sys.stderr, flush=True)
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    if done.returncode:
        raise SystemExit(f"{benchmark.file} ended with {done.returncode}")
    lines = done.stdout.splitlines()
    print(*(line for line in lines if not line.startswith("{")), sep="\n", file=sys.stderr)
    return [json.loads(line) for line in lines if line.startswith("{")]


def read_store() -> dict[str, Lines]:
    """What was stored, by benchmark."""
    if not STORE.exists():
        return {}
    records = (json.loads(line) for line in STORE.read_text().splitlines())
    return {record["name"]: record["lines"] for record in records}


def markdown(results: dict[str, Lines]) -> str:
    """The table of all benchmarks that have results."""
    lines = ["| what | measured | target | reached | command |", "|---|---|---|---|---|"]
    for benchmark in BENCHMARKS:
        if benchmark.name not in results:
            continue
        command = " ".join([f"`benchmarks/{benchmark.file}", *benchmark.words]) + "`"
        for row in benchmark.rows:
            cells = [*row.cells(results[benchmark.name]), command]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Runs what is asked for and prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    names = [benchmark.name for benchmark in BENCHMARKS]
    parser.add_argument("--quick", action="store_true", help="small sizes")
    parser.add_argument("--only", nargs="*", choices=names, help="without names: run nothing")
    args = parser.parse_args()
    keep = args.only is not None and not args.quick
    results = read_store() if keep else {}
    for benchmark in BENCHMARKS:
        if args.only is not None and benchmark.name not in args.only:
            continue
        results[benchmark.name] = run(benchmark, args.quick)
        if not args.quick:
            STORE.parent.mkdir(exist_ok=True)
            records = ({"name": name, "lines": lines} for name, lines in results.items())
            STORE.write_text("".join(json.dumps(record) + "\n" for record in records))
    print(markdown(results))


if __name__ == "__main__":
    main()
