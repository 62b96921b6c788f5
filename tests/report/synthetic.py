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
