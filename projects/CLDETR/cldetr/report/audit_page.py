"""The page of a split: what each phase has, what phases share, what to look out for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from cldetr.data.manifest import scenario_hash
from cldetr.report.page import thousands, write_page
from cldetr.report.plotting import Panel, Plot, bar_panels, save_plot
from cldetr.scenario import Scenario

_PROTOCOLS = {
    "strict": "strict protocol: no image is in two phases",
    "traditional": "traditional protocol: a phase has all images with an object of its categories",
}


def write_audit_page(scenario: Scenario, audit: Mapping[str, Any], path: Path) -> None:
    """Writes the page of `cldetr split`, and its plot as files beside it."""
    plot = _distribution(audit)
    save_plot(plot, path.parent / "figures")
    provenance = [["Manifest", scenario_hash(scenario)]]
    provenance += [[f"Annotations ({name})", digest] for name, digest in scenario.fingerprints]
    write_page(
        path,
        "split.html",
        title=f"Split {scenario.name}",
        description=_description(scenario),
        warnings=list(_warnings(scenario, audit)),
        audit=audit,
        plot=plot,
        provenance=provenance,
    )


def _description(scenario: Scenario) -> str:
    seeds = [
        f"{what} seed {seed}"
        for what, seed in (("class", scenario.class_seed), ("data", scenario.data_seed))
        if seed is not None
    ]
    protocol = _PROTOCOLS.get(scenario.protocol, "a data set for each phase")
    return f"{'; '.join([protocol, f'categories ordered by {scenario.order}', *seeds])}."


def _warnings(scenario: Scenario, audit: Mapping[str, Any]) -> Iterator[str]:
    """What a user should know before training on the split."""
    if audit["overlap"] and scenario.protocol == "strict":
        yield "Phases share images, which the strict protocol does not allow."
    elif audit["overlap"]:
        images = sum(pair["images"] for pair in audit["overlap"])
        yield (
            f"Phases share images ({images:,} over all pairs of phases): a later phase trains on "
            "images that an earlier one has shown, so forgetting comes out milder than under the "
            "strict protocol."
        )
    for entry in audit["classes_without_instances"]:
        yield f"Category {entry['class']} of phase {entry['phase']} has no object in its phase."
    if audit["classes_never_learnt"]:
        yield f"Never learnt: {', '.join(audit['classes_never_learnt'])}."
    for phase in audit["phases"]:
        if phase["dropped"]:
            yield f"Phase {phase['index']}: {phase['dropped']:,} boxes were dropped at loading."
    if audit["unused_images"]:
        yield f"Images in no phase: {audit['unused_images']:,}."
    if audit["repeated_files"]:
        yield f"Images that share their file with another: {audit['repeated_files']:,}."


def _distribution(audit: Mapping[str, Any]) -> Plot:
    """Objects of each category of each phase."""
    panels: list[Panel] = []
    for phase in audit["phases"]:
        ranked = sorted(phase["instances_per_class"].items(), key=lambda item: (-item[1], item[0]))
        panels += bar_panels(f"Phase {phase['index']}", ranked, thousands)
    text = "Labelled objects of each phase's categories in its images, crowd regions included."
    return Plot("categories_per_phase", "Categories of each phase", text, panels)
