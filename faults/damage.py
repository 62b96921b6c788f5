"""Every kind of artefact, missing, empty, cut off and with single bits flipped.

A run directory in the middle of its last training stage holds every kind. Each is damaged in a
copy and read the way `--resume` reads it. Damage must be told (`InputError`), or an older
checkpoint must be used and be exactly what was saved; what is read in spite of a change must be the
same data.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from cldetr.config import identity, load_config
from cldetr.data.cache import cache_file, read_cache
from cldetr.data.coco import load_coco
from cldetr.data.manifest import check_same, load_manifest
from cldetr.data.memory import ExemplarMemory
from cldetr.engine.checkpoint import latest_checkpoint, load_state
from cldetr.engine.ledger import Ledger, check_identity, read_identity
from cldetr.engine.restore import config_of_run
from cldetr.errors import InputError
from faults import tiny
from faults.tally import Options, Tally

STAGE = "phase2/calibrate"  # where the run is stopped
Reader = Callable[[], Any]


def run(options: Options) -> Tally:
    """Damages each artefact in every way; resumes whole runs after the coarse ones."""
    tally = Tally("damage")
    rng = random.Random(options.seed)
    base = tiny.Baseline.of(options)
    data, work = base.data, base.work
    origin = work / "origin"
    stop_in_the_middle(data, origin)
    flips, cuts = options.number(10, 200, 1000), options.number(3, 20, 100)
    folder = work / "copy"
    shutil.copytree(origin, folder)
    for name, (path, read) in _artefacts(folder, data, work).items():
        whole = path.read_bytes()
        intact = read()
        harmless = 0
        for kind, content in _damages(whole, rng, flips, cuts):
            if content is None:
                path.unlink()
            else:
                path.write_bytes(content)
            try:
                found = read()
                good, same = _same(found, intact), True
            except InputError as error:
                good, same, found = True, False, error
            except Exception as error:
                good, same, found = False, False, f"{type(error).__name__}: {error}"
            harmless += good and same and "checkpoint" not in name
            tally.check(f"{name}: damages found", good, f"{kind}: read as {str(found)[:200]}")
            path.write_bytes(whole)
        if harmless:
            tally.note(f"{name}: {harmless} of these changed bytes and not what they say")
        if options.out_of_time:
            return tally
    _whole_runs(options, tally, base, origin)
    return tally


def stop_in_the_middle(data: tiny.TinyData, folder: Path) -> None:
    """Leaves a run with two checkpoints in its last training stage."""
    child = tiny.start(data.command(folder), folder.with_suffix(".txt"))
    last = folder / STAGE / "checkpoints" / f"step_{2 * tiny.PERIOD:08d}"
    tiny.kill_at([child], last)
    if not last.exists():
        raise RuntimeError(f"the run ended before it could be stopped: {child.said()[-500:]}")


def _artefacts(folder: Path, data: tiny.TinyData, work: Path) -> dict[str, tuple[Path, Reader]]:
    """Each kind of artefact: its file and the way it is read on resume."""
    ledger = Ledger(folder)
    checkpoints = folder / STAGE / "checkpoints"
    older, newest = sorted(checkpoints.glob("step_*"))
    alone = work / "alone"
    shutil.copytree(newest, alone / newest.name)
    annotations = data.paths.annotations("train")
    scenario = load_manifest(folder / "manifest.json")
    shutil.copy(annotations, work / "annotations.json")
    cache = work / "cache"
    loaded = load_coco(annotations, data.paths.images("train"), cache_dir=cache)
    cached = cache_file(cache, loaded.fingerprint, "stop", True)

    def checkpoint(place: Path) -> Reader:
        """The newest whole one; where the newest is damaged that must be the older, as saved."""
        states = {path.name: load_state(path / "state.pth") for path in place.glob("step_*")}

        def read() -> bool:
            found = latest_checkpoint(place)
            return found is not None and _same(found.state, states[found.path.name])

        return read

    def finished(phase: int, stage: str) -> Reader:
        def read() -> Any:
            record = ledger.finished(phase, stage)
            if record is None:
                raise InputError("the stage is done again")
            return record

        return read

    def content_of_annotations() -> Any:
        again = load_coco(work / "annotations.json", data.paths.images("train"))
        if dict(scenario.fingerprints).get("base") != again.fingerprint:
            raise InputError("the manifest is of another file")
        return again.fingerprint

    def manifest() -> Any:
        found = load_manifest(folder / "manifest.json")
        check_same(found, scenario, "it")
        return found

    def cached_arrays() -> Any:
        found = read_cache(cached)
        if found is None:
            raise InputError("the annotation file is read again")
        return {key: value for key, value in found.items() if key not in ("file_names", "report")}

    cfg = load_config(str(tiny.CONFIG), [*data.overrides(), "MODEL.DETR.NUM_CLASSES", "4"])

    def same_run() -> Any:
        found = read_identity(folder / "identity.json")
        check_identity(found, identity(cfg))
        return found

    return {
        "identity": (folder / "identity.json", same_run),
        "config": (folder / "config.yaml", lambda: identity(config_of_run(folder))),
        "manifest": (folder / "manifest.json", manifest),
        "weights of a stage": (folder / "phase1/train/model.pth", finished(1, "train")),
        "record of a stage": (folder / "phase1/train/stage.json", finished(1, "train")),
        "memory": (folder / "phase2/select/memory.json", finished(2, "select")),
        "memory alone": (
            folder / "phase2/select/memory.json",
            lambda: ExemplarMemory.load(folder / "phase2/select"),
        ),
        "exemplars": (folder / "phase2/select/exemplars_phase1.json", finished(2, "select")),
        "metrics": (folder / "phase1/evaluate/metrics.json", finished(1, "evaluate")),
        "newest checkpoint": (newest / "state.pth", checkpoint(checkpoints)),
        "newest checkpoint's digest": (newest / "digest.json", checkpoint(checkpoints)),
        "older checkpoint": (older / "state.pth", checkpoint(checkpoints)),
        "only checkpoint": (alone / newest.name / "state.pth", checkpoint(alone)),
        "only checkpoint's digest": (alone / newest.name / "digest.json", checkpoint(alone)),
        "annotation file": (work / "annotations.json", content_of_annotations),
        "annotation cache": (cached, cached_arrays),
    }


def _damages(
    whole: bytes, rng: random.Random, flips: int, cuts: int
) -> Iterator[tuple[str, bytes | None]]:
    yield "missing", None
    yield "empty", b""
    for _ in range(cuts):
        size = rng.randrange(1, len(whole))
        yield f"cut to {size} of {len(whole)} bytes", whole[:size]
    for _ in range(flips):
        place, bit = rng.randrange(len(whole)), rng.randrange(8)
        content = bytearray(whole)
        content[place] ^= 1 << bit
        yield f"bit {bit} of byte {place} flipped", bytes(content)


def _same(found: Any, intact: Any) -> bool:
    if isinstance(intact, dict):
        return (
            isinstance(found, dict)
            and found.keys() == intact.keys()
            and all(_same(found[key], intact[key]) for key in intact)
        )
    if isinstance(intact, list):
        return len(found) == len(intact) and all(map(_same, found, intact))
    if hasattr(intact, "shape"):
        return torch.equal(torch.as_tensor(found), torch.as_tensor(intact))
    return bool(found == intact)


def _whole_runs(options: Options, tally: Tally, base: tiny.Baseline, origin: Path) -> None:
    """Resumes after the coarse damages: refused with a message, or ended in the same bits."""
    damaged = {
        "identity.json": 2,
        "config.yaml": 0,
        "manifest.json": 2,
        "starts.json": None,
        "phase1/train/model.pth": 2,
        "phase1/train/stage.json": None,
        "phase2/select/memory.json": 2,
        "phase1/select/exemplars_phase1.json": 2,
        "phase1/evaluate/metrics.json": 2,
        f"{STAGE}/checkpoints/step_00000004/state.pth": 0,
        f"{STAGE}/checkpoints/step_00000004/digest.json": 0,
    }
    names = list(damaged)
    if options.size == "short":
        names = names[-2:]
    for name in names:
        for kind in ("missing", "empty", "cut"):
            folder = origin.with_name(f"{name.replace('/', '_')}_{kind}")
            shutil.copytree(origin, folder)
            path = folder / name
            if kind == "missing":
                path.unlink()
            else:
                content = path.read_bytes()
                path.write_bytes(content[: len(content) // 2 if kind == "cut" else 0])
            child = tiny.start(base.data.command(folder, resume=True), folder.with_suffix(".txt"))
            status = child.wait()
            said = child.said()
            wrong = tiny.difference(folder, base.expected) if status == 0 else ""
            told = status == 0 or (status == 2 and "Traceback" not in said)
            allowed = damaged[name] in (None, status)
            tally.check(
                "whole runs: refused by name, or ended bit-identical",
                told and allowed and not wrong,
                f"{name} {kind}: status {status} {wrong} {said[-500:]}",
            )
            shutil.rmtree(folder)
