"""kill −9 at random moments of a run: every time `--resume` ends in the same bits.

One run after another is killed again and again until it gets through. A quarter of the
kills come at a random time after the start; the others are aimed at the stage that was hit least so
far, at a random time after it began.
"""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

from faults import tiny
from faults.tally import Options, Tally

KILLS_PER_RUN = 12  # then the run may end, and is compared
LEAST = 5  # kills in every stage, whatever the count


def run(options: Options) -> Tally:
    """Kills `count` times; each is recovered when the run it hit ends as if nothing had been."""
    tally = Tally("kill -9")
    rng = random.Random(options.seed)
    base = tiny.Baseline.of(options)
    count = options.number(short=3, nightly=30, long=300)
    seconds = tiny.stage_seconds(base.data, base.work / "watched")
    hits: Counter[str] = Counter()
    number = 0
    least = {"short": 0, "nightly": LEAST, "long": LEAST}[options.size]
    while not options.out_of_time:
        missing = sum(max(least - hits[stage], 0) for stage in tiny.STAGES)
        wanted = min(KILLS_PER_RUN, max(count - sum(hits.values()), missing))
        if wanted <= 0:
            break
        number += 1
        folder = base.work / f"run{number}"
        workers = rng.choice(["0", "0", "2"])
        struck = _break_one_run(base.data, folder, wanted, rng, seconds, hits, workers, tally)
        left = tiny.difference(folder, base.expected)
        for place in struck:
            tally.check(
                "kills recovered, all results bit-identical", not left, f"in {place}: {left}"
            )
        stray = [path.name for path in folder.rglob(".*") if path.is_file()]
        tally.check("runs left no partial file", not stray, str(stray))
    tally.note("hit " + ", ".join(f"{place} {hits[place]}" for place in tiny.PLACES))
    return tally


def _break_one_run(
    data: tiny.TinyData,
    folder: Path,
    wanted: int,
    rng: random.Random,
    seconds: dict[str, float],
    hits: Counter[str],
    workers: str,
    tally: Tally,
) -> list[str]:
    """Starts and kills a run `wanted` times or until it ends; returns where it was hit."""
    struck: list[str] = []
    while True:
        log = folder.with_suffix(".txt")
        words = ("DATALOADER.NUM_WORKERS", workers, "REPORT", rng.choice(["False", "True"]))
        child = tiny.start(data.command(folder, *words), log)
        ahead = tiny.PLACES[tiny.PLACES.index(tiny.present_stage(folder)) :]
        rarely_hit = min(hits[x] for x in ahead) <= min(hits[x] for x in tiny.PLACES) + 2
        if len(struck) < wanted and rarely_hit:
            _strike(child, folder, rng, seconds, hits)
        if child.wait() != -9:
            tally.check("starts ended well", child.status == 0, child.said()[-600:])
            if child.status == 0 and (folder / "results.json").exists():
                return struck
            raise RuntimeError(f"the run does not go on: {child.said()[-2000:]}")
        struck.append(tiny.present_stage(folder))
        hits[struck[-1]] += 1
        done = tiny.finished_stages(folder)
        _nothing_lost(folder, done, tally)


_known: dict[Path, dict[str, bytes]] = {}


def _nothing_lost(folder: Path, done: dict[str, bytes], tally: Tally) -> None:
    """Finished stages stay finished, with the very record they were finished with."""
    before = _known.setdefault(folder, {})
    lost = [stage for stage, record in before.items() if done.get(stage) != record]
    tally.check("kills lost no finished stage", not lost, f"{folder.name}: {lost}")
    before.update(done)


def _strike(
    child: tiny.Child,
    folder: Path,
    rng: random.Random,
    seconds: dict[str, float],
    hits: Counter[str],
) -> None:
    """Kills at a random time, or in a stage that was rarely hit; the run may end before."""
    ahead = tiny.PLACES[tiny.PLACES.index(tiny.present_stage(folder)) :]
    if rng.random() < 0.75:
        target = min(ahead, key=lambda place: (hits[place], rng.random()))
        tiny.wait_for(child, folder, target, rng.uniform(0, seconds[target]))
    else:
        delay = rng.uniform(0, 1.2 * sum(seconds[place] for place in ahead))
        tiny.wait_for(child, folder, None, delay)
    child.kill()
