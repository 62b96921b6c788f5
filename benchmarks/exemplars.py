"""Greedy exemplar choice (Eq. 6) at the size of COCO's first phase in 70+10: ours against dense.

    python benchmarks/exemplars.py

The data are drawn: 103,500 images, 70 of 80 classes, with the long tail, the classes per image and
the objects per class of COCO. The dense NumPy greedy (one matrix of log shares per choice) would
take a quarter of an hour, so it is timed on steps spread evenly over the run, each from the state
that our choices have reached, and extrapolated; each of its choices is compared with ours.

Process time of one thread; medians of alternating rounds. Prints a table and a line of JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import numpy as np
from scipy.sparse import csr_array

from cldetr.data.exemplars import kl_curve, select_random
from cldetr.data.greedy_kl import Objective, choose_greedily


def draw_counts(images: int, seed: int = 0) -> csr_array:
    """Draws class counts like those of COCO, of which a phase sees 70 classes of 80."""
    rng = np.random.default_rng(seed)
    classes, visible, most = 80, 70, 15
    popularity = (np.arange(classes) + 1.5) ** -1.0
    popularity[0] *= 6  # person
    kinds = 1 + rng.negative_binomial(1.2, 0.38, images).clip(max=most - 1)  # classes per image
    keys = np.log(popularity) + rng.gumbel(size=(images, classes))  # a draw without replacement
    order = np.argsort(-keys, axis=1)[:, :most]
    present = np.arange(most) < kinds[:, None]
    labels = rng.permutation(classes)[order[present]]
    sizes = np.arange(1, 27)
    share = sizes**-1.95
    objects = rng.choice(sizes, len(labels), p=share / share.sum())  # objects per class and image
    kept = labels < visible
    rows = np.nonzero(present)[0][kept]
    return csr_array((objects[kept].astype(np.int64), (rows, labels[kept])), (images, visible))


class DenseGreedy:
    """Eq. 6 as one would write it down: every image's log shares, weighted and summed."""

    def __init__(self, counts: csr_array) -> None:
        self.dense = counts.toarray().astype(float)
        self.sizes = self.dense.sum(1)
        totals = self.dense.sum(0)
        self.shares = totals / totals.sum()

    def step(self, before: np.ndarray) -> tuple[int, float, float]:
        """The choice after `before`, its lead over the best image unlike it, and the seconds."""
        held = self.dense[before].sum(0)
        free = self.sizes > 0
        free[before] = False
        start = time.process_time()
        after = held + self.dense
        scores = np.log(after / after.sum(1, keepdims=True)) @ self.shares
        scores[~free] = -np.inf
        best = int(np.argmax(scores))
        seconds = time.process_time() - start
        unlike = (self.dense != self.dense[best]).any(1)
        return best, float(scores[best] - scores[unlike].max()), seconds


def choose(counts: csr_array, number: int) -> tuple[np.ndarray, float]:
    """Our choice and its seconds, all preparation included."""
    start = time.process_time()
    chosen = choose_greedily(Objective.classes(counts), number)
    return chosen, time.process_time() - start


def main() -> None:
    """Runs the comparison and prints it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, default=103_500)
    parser.add_argument("--budget", type=float, default=0.1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dense-steps", type=int, default=40)
    args = parser.parse_args()

    counts = draw_counts(args.images)
    number = round(args.images * args.budget)
    dense = DenseGreedy(counts)
    chosen, _ = choose(counts, number)
    covered = int(np.isfinite(kl_curve(counts, chosen)).argmax()) + 1
    steps = np.linspace(covered, number - 1, args.dense_steps).astype(int)
    seconds: dict[str, list[float]] = {"ours": [], "dense": []}
    agreed, leads = 0, []
    for part in np.array_split(steps, args.rounds):  # alternating
        again, spent = choose(counts, number)
        assert (again == chosen).all()
        seconds["ours"].append(spent)
        for step in part:
            best, lead, spent = dense.step(chosen[:step])
            seconds["dense"].append(spent)
            agreed += best == chosen[step]
            leads.append(lead)

    medians = {way: statistics.median(spent) for way, spent in seconds.items()}
    medians["dense"] *= number
    sizes = counts.sum(axis=1)
    report = {
        "images": args.images,
        "classes": counts.shape[1],
        "choices": number,
        "seconds": {way: round(value, 3) for way, value in medians.items()},
        "dense": f"extrapolated from {len(steps)} steps",
        "times_faster": round(medians["dense"] / medians["ours"]),
        "dense_choices_equal": f"{agreed} of {len(steps)}",
        "least_lead": min(leads),
        "kl": float(kl_curve(counts, chosen)[-1]),
        "kl_random": float(select_random(counts, number).kl[-1]),
        "objects_per_labelled_image": {
            "data": round(float(sizes[sizes > 0].mean()), 2),
            "exemplars": round(float(sizes[chosen].mean()), 2),
        },
    }
    print(f"{'way':10} {'seconds':>9} {'times faster':>13}")
    for way, value in medians.items():
        print(f"{way:10} {value:9.2f} {medians['dense'] / value:13,.0f}")
    print(f"dense: extrapolated from {len(steps)} steps; {agreed} of them chose what ours chose")
    print(json.dumps(report))


if __name__ == "__main__":
    main()
