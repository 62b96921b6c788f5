"""Runs as small data, worked out by hand, for what reads and draws them."""

from pathlib import Path

from cldetr.evaluation.average_precision import METRICS
from cldetr.evaluation.results import summarise
from cldetr.report.rundir import Run, Stage


def scores(ap):
    return dict.fromkeys(METRICS, ap)


def entry(phase, per_category, old=()):
    """An evaluation whose sets have the plain means of their categories."""

    def mean(names):
        known = [per_category[name] for name in names if per_category[name] is not None]
        return scores(sum(known) / len(known) if known else None)

    new = [name for name in per_category if name not in old]
    groups = [mean(old)] * (phase - 1) if old else []
    return {
        "phase": phase,
        "all": mean(list(per_category)),
        "old": mean(old) if old else None,
        "new": mean(new),
        "groups": [*groups, mean(new)],
        "per_category": {name: scores(ap) for name, ap in per_category.items()},
    }


def two_phases(first=40.0, kept=30.0, new=50.0, names=("cat", "dog", "bird")):
    """Two categories, then one; both old ones go from `first` to `kept`."""
    old = names[:2]
    return summarise(
        [
            entry(1, dict.fromkeys(old, first)),
            entry(2, {**dict.fromkeys(old, kept), names[2]: new}, old),
        ],
        scenario="2+1",
        method="cldetr",
    )


def confusion(names=("cat", "dog", "bird")):
    """The confusion.json of two old categories and a new one; the summary is added up by hand."""
    return {
        "phase": 2,
        "categories": list(names),
        "phases": [1, 1, 2],
        "min_score": 0.3,
        "counts": [  # as the first, as the second, as the new one, missed
            [10, 2, 3, 4],
            [1, 20, 5, 6],
            [7, 0, 30, 8],
            [9, 1, 2, 0],  # background
        ],
        "summary": {
            "old": {"objects": 51, "correct": 30, "as_old": 3, "as_new": 8, "missed": 10},
            "new": {"objects": 45, "correct": 30, "as_old": 7, "as_new": 0, "missed": 8},
            "background": {"as_old": 10, "as_new": 2},
        },
    }


def curves(names=("cat", "dog", "bird")):
    """The precision_recall.json of both phases: flat curves; the new category has no object."""

    def phase(number, count, levels):
        flat = [None if level is None else [level] * 101 for level in levels]
        classes = {"categories": list(names[:count]), "phases": [1, 1, 2][:count]}
        return {"phase": number, **classes, "AP50": flat, "AP": flat}

    return {1: phase(1, 2, [0.8, 0.6]), 2: phase(2, 3, [0.5, 0.25, None])}


def domain_confusion():
    """The confusion.json of two domains of three categories, as `confusion` counts them.

    Before domains counted as new alone, their objects were those of old categories.
    """
    old = {"objects": 96, "correct": 60, "as_old": 18, "as_new": 0, "missed": 18}
    background = {"as_old": 12, "as_new": 0}
    summary = {"old": old, "new": dict.fromkeys(old, 0), "background": background}
    return {**confusion(), "phases": [1, 1, 1], "summary": summary}


def domain_curves():
    """The precision_recall.json of both phases of two domains: categories all of phase 1."""
    return {
        phase: {**each, "phases": [1] * len(each["phases"])} for phase, each in curves().items()
    }


def run_of(results, folder="run", **parts):
    return Run(folder=Path(folder), results=results, **parts)


def trained(phase, name, **facts):
    return Stage(phase, name, facts)


def two_domains(after=(30.0, 50.0), names=("clear", "fog")):
    """40 on the first domain and 10 on the one to come; then `after`."""
    phases = []
    for phase, aps in enumerate(((40.0, 10.0), after), start=1):
        seen = aps[:phase]
        phases.append(
            {
                "phase": phase,
                "all": scores(sum(seen) / phase),
                "old": scores(aps[0]) if phase > 1 else None,
                "new": scores(seen[-1]),
                "groups": [scores(ap) for ap in seen],
                "per_category": {"cat": scores(sum(seen) / phase)},
                "domains": dict(zip(names, map(scores, aps), strict=True)),
            }
        )
    return summarise(phases, scenario="2 domains", method="cldetr")
