"""The page of a split: what each phase has, what phases share, what to look out for."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from cldetr.data.manifest import scenario_hash
from cldetr.report.figures import save_plot
from cldetr.report.markup import Markup, tag
from cldetr.report.page import Section, show_plot, table, write_page
from cldetr.report.plotting import Panel, Plot, draw_amounts, row_panels
from cldetr.scenario import Scenario

_PROTOCOLS = {
    "strict": "strict protocol: no image is in two phases",
    "traditional": "traditional protocol: a phase has all images with an object of its categories",
}


def write_audit_page(scenario: Scenario, audit: Mapping[str, Any], path: Path) -> None:
    """Writes the page of `cldetr split`, and its plot as files beside it."""
    plot = _distribution(audit)
    save_plot(plot, path.parent / "figures")
    head = [
        tag("h1", f"Split {scenario.name}"),
        tag("p", _description(scenario), class_="muted"),
        _warnings(scenario, audit),
    ]
    sections = [
        Section("phases", "Phases", phase_table(audit)),
        Section("leakage", "Images in several phases", leakage(audit)),
        Section("categories", plot.title, show_plot(plot, "audit", heading=False)),
        Section("provenance", "Where it comes from", _provenance(scenario)),
    ]
    write_page(path, f"Split {scenario.name}", head, sections)


def phase_table(audit: Mapping[str, Any]) -> Markup:
    """Images, objects and what is hidden in each phase."""
    header = ["phase", "categories", "images", "with objects", "without", "objects", "crowd"]
    header += ["old, hidden", "later, hidden"]
    rows = [
        [
            phase["index"],
            *(
                f"{phase[key]:,}"
                for key in ("classes", "images", "annotated", "empty", "instances", "crowd")
            ),
            f"{phase['hidden']['old']:,}",
            f"{phase['hidden']['future']:,}",
        ]
        for phase in audit["phases"]
    ]
    text = (
        "Hidden objects are in the phase's images but not in its labels, as their categories are "
        "of earlier or later phases: the old ones are what pseudo-labels can bring back."
    )
    return Markup(table(header, rows, 0) + tag("p", text, class_="muted"))


def leakage(audit: Mapping[str, Any]) -> Markup:
    """Images that phases share."""
    if not audit["overlap"]:
        return tag("p", "No image is in two phases.")
    rows = [
        [
            " and ".join(str(phase) for phase in pair["phases"]),
            f"{pair['images']:,}",
            tag("td", ", ".join(str(image) for image in pair["examples"]), class_="value"),
        ]
        for pair in audit["overlap"]
    ]
    examples = tag("th", "such as image ids", class_="text", scope="col")
    return table(["phases", "shared images", examples], rows)


def _description(scenario: Scenario) -> str:
    seeds = [
        f"{what} seed {seed}"
        for what, seed in (("class", scenario.class_seed), ("data", scenario.data_seed))
        if seed is not None
    ]
    protocol = _PROTOCOLS.get(scenario.protocol, "a data set for each phase")
    return f"{'; '.join([protocol, f'categories ordered by {scenario.order}', *seeds])}."


def _warnings(scenario: Scenario, audit: Mapping[str, Any]) -> Markup:
    found = [tag("li", warning) for warning in warnings(scenario, audit)]
    if not found:
        return tag("p", "The audit found nothing to warn of.")
    return tag("div", "To look at before training:", tag("ul", found), class_="notice")


def warnings(scenario: Scenario, audit: Mapping[str, Any]) -> Iterator[str]:
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
        if phase["left_out"]:
            yield f"Phase {phase['index']}: {phase['left_out']:,} boxes were left out at loading."
    if audit["unused_images"]:
        yield f"Images in no phase: {audit['unused_images']:,}."
    if audit["repeated_files"]:
        yield f"Images that share their file with another: {audit['repeated_files']:,}."


def _distribution(audit: Mapping[str, Any]) -> Plot:
    """Objects of each category of each phase."""
    panels: list[Panel] = []
    for phase in audit["phases"]:
        ranked = sorted(phase["instances_per_class"].items(), key=lambda item: (-item[1], item[0]))
        draw = functools.partial(draw_amounts, whole=True, top=ranked[0][1])
        panels += row_panels(f"Phase {phase['index']}", ranked, draw)
    text = "Labelled objects of each phase's categories in its images, crowd regions included."
    return Plot("categories_per_phase", "Categories of each phase", text, panels)


def _provenance(scenario: Scenario) -> Markup:
    rows = [["Manifest", scenario_hash(scenario)]]
    rows += [[f"Annotations ({source})", digest] for source, digest in scenario.fingerprints]
    body = [[tag("td", name, class_="text"), tag("td", v, class_="value")] for name, v in rows]
    return table(["", "SHA-256"], body, 2)
