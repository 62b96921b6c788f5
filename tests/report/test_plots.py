"""Plots show the numbers they are given, with 80 categories and with one, and write whole files."""

import re
import xml.etree.ElementTree as ET

import pytest
from matplotlib.figure import Figure
from PIL import Image

from cldetr.report.ap_plots import ap_over_phases, category_change_plot, final_ap
from cldetr.report.detection_plots import confusion_plot, precision_recall_plot
from cldetr.report.plotting import MAX_ROWS, panel_svg, row_panels, save_plot, tidy
from cldetr.report.tables import Group
from cldetr.report.training_plots import distribution_plot, stages_plot, training_plot

from .synthetic import (
    confusion,
    curves,
    domain_confusion,
    domain_curves,
    run_of,
    trained,
    two_domains,
    two_phases,
)


def drawn(panel):
    ax = Figure().add_subplot()
    panel.draw(ax)
    return ax


def bars(ax):
    return [bar.get_width() for container in ax.containers for bar in container]


def test_curves_go_through_the_ap_of_each_phase_of_each_run():
    groups = [
        Group("a", (run_of(two_phases(40, 28, 52)),)),
        Group("b", (run_of(two_phases(40, 4, 55)),)),
    ]
    plot = ap_over_phases(groups)
    assert [panel.title.split()[2] for panel in plot.panels] == ["all", "old", "new"]
    ours, theirs = drawn(plot.panels[1]).lines
    assert ours.get_ydata().tolist() == [40, 28]
    assert theirs.get_ydata().tolist() == [40, 4]
    assert [key.label for key in plot.legend] == ["a", "b"]
    assert ours.get_color() != theirs.get_color()
    assert {line.get_linestyle() for line in drawn(plot.panels[1]).lines} == {"-"}
    # The new categories of two phases are not the same ones: no line joins them.
    assert {line.get_linestyle() for line in drawn(plot.panels[2]).lines} == {"None"}


def test_bars_have_the_final_ap_and_an_absent_value_is_no_bar():
    unfinished = run_of(None)
    plot = final_ap([Group("a", (run_of(two_phases(40, 28, 52)),)), Group("b", (unfinished,))])
    assert bars(drawn(plot.panels[0])) == [pytest.approx(36)]  # (28 + 28 + 52) / 3
    assert bars(drawn(plot.panels[3])) == [12]  # FPP
    assert "n/a" in [text.get_text() for text in drawn(plot.panels[0]).texts]


def test_what_was_forgotten_comes_first_and_new_categories_apart():
    results = two_phases(40, 28, 52)
    results["phases"][1]["per_category"]["dog"]["AP"] = 47.0
    plot = category_change_plot(run_of(results))
    change, learnt = (drawn(panel) for panel in plot.panels)
    assert bars(change) == [-12, 7]
    assert [label.get_text() for label in change.get_yticklabels()] == ["cat", "dog"]
    assert bars(learnt) == [52]


def test_the_share_of_matched_labels_is_a_curve_for_each_layer():
    names = ["matched/new_0", "matched/new", "matched/pseudo_0", "matched/pseudo"]
    curve = [{"iteration": i, **dict.fromkeys(names, 0.1 * i)} for i in range(5)]
    plot = training_plot(run_of(None, curve=curve, stages=[trained(2, "train", steps=5)]))
    assert [panel.title for panel in plot.panels] == [
        "Share of new labels that each decoder layer matches",
        "Share of pseudo-labels that each decoder layer matches",
    ]
    for panel in plot.panels:
        legend = drawn(panel).get_legend().get_texts()
        assert [text.get_text() for text in legend] == ["1", "last"]


def test_evaluations_within_a_stage_are_a_curve_of_their_own_steps():
    curve = [{"iteration": i, "lr": 1e-3} for i in range(20)]
    curve[9] |= {"all/AP": 40.0, "old/AP": 30.0, "new/AP": 50.0}
    curve[19] |= {"all/AP": 45.0, "old/AP": 32.0, "new/AP": 58.0}
    plot = training_plot(run_of(None, curve=curve, stages=[trained(2, "train", steps=20)]))
    assert plot.panels[0].title == "AP in the course of training (in %)"
    ax = drawn(plot.panels[0])
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["all", "old", "new"]
    assert [line.get_xdata().tolist() for line in ax.lines if len(line.get_xdata())] == [
        *([10, 20],) * 3
    ]
    assert ax.lines[0].get_ydata().tolist() == [40.0, 45.0]


def test_loss_curves_stop_at_the_end_of_a_stage():
    curve = [{"iteration": i, "total_loss": float(i), "lr": 1e-3} for i in range(20)]
    stages = [trained(1, "train", steps=15), trained(2, "train", steps=5)]
    plot = training_plot(run_of(None, curve=curve, stages=stages))
    assert [panel.title for panel in plot.panels] == ["Loss (sum over all layers)", "Learning rate"]
    first, second = drawn(plot.panels[0]).lines[:2]
    assert first.get_xdata().tolist() == list(range(1, 16))
    assert second.get_xdata().tolist() == list(range(16, 21))


def test_runs_without_anything_to_show_have_no_empty_charts():
    run = run_of(None)
    for make in (
        *(category_change_plot, distribution_plot, training_plot, stages_plot),
        *(confusion_plot, precision_recall_plot),
    ):
        assert make(run).panels == []
    for draw in (ap_over_phases, final_ap):
        assert draw([Group("a", (run,))]).panels == []


def test_a_confusion_matrix_has_the_share_of_each_row_and_a_border_between_old_and_new():
    [panel] = confusion_plot(run_of(None, confusion=confusion())).panels
    ax = drawn(panel)
    shares = {(t.get_position()[1], t.get_position()[0]): t.get_text() for t in ax.texts}
    assert [shares.get((0.5, x)) for x in (0.5, 1.5, 2.5, 3.9)] == ["53", "11", "16", "21"]  # of 19
    assert (2.5, 1.5) not in shares  # no new object is taken for a dog
    assert [label.get_text() for label in ax.get_yticklabels()] == [
        *("cat", "dog", "bird", "background")
    ]
    assert [label.get_text() for label in ax.get_xticklabels()][-1] == "missed"
    strong = [line for line in ax.lines if line.get_linewidth() > 1.5]
    assert [(set(line.get_xdata()), set(line.get_ydata())) for line in strong] == [
        ({2}, {0, 4.4}),
        ({0, 4.4}, {2}),
    ]


def test_a_matrix_of_80_categories_fits_on_a_page_and_has_no_numbers():
    names = [f"category {k}" for k in range(80)]
    counts = [[int(i == j) for j in range(81)] for i in range(81)]
    large = {**confusion(), "categories": names, "phases": [1] * 70 + [2] * 10, "counts": counts}
    [panel] = confusion_plot(run_of(None, confusion=large)).panels
    assert panel.width < 1120
    ax = drawn(panel)
    assert {text.get_text() for text in ax.texts} == {"old", "new"}
    assert len(ax.get_yticklabels()) == 81
    assert ax.get_yticklabels()[0].get_fontsize() >= 9


def test_curves_of_old_categories_have_their_mean_and_that_of_when_they_were_learnt():
    [old] = precision_recall_plot(run_of(None, curves=curves())).panels  # the new one has no object
    assert old.title == "Old categories, IoU 0.5"
    lines = {line.get_label(): line.get_ydata()[50] for line in drawn(old).lines}
    assert lines == {
        "dog 25.0": 0.25,  # the lowest first
        "cat 50.0": 0.5,
        "mean 37.5": 0.375,
        "mean when learnt 70.0": pytest.approx(0.7),
        "mean of all IoU 37.5": 0.375,
    }


def test_curves_of_domains_are_one_group_without_what_was_learnt_on_fewer_domains():
    [panel] = precision_recall_plot(run_of(two_domains(), curves=domain_curves())).panels
    assert panel.title == "All categories, IoU 0.5"
    lines = {line.get_label(): line.get_ydata()[50] for line in drawn(panel).lines}
    assert lines == {
        "dog 25.0": 0.25,
        "cat 50.0": 0.5,
        "mean 37.5": 0.375,
        "mean of all IoU 37.5": 0.375,
    }
    assert precision_recall_plot(run_of(two_domains())).panels == []


def test_a_confusion_matrix_of_domains_has_no_border():
    [panel] = confusion_plot(run_of(two_domains(), confusion=domain_confusion())).panels
    ax = drawn(panel)
    assert not {"old", "new"} & {text.get_text() for text in ax.texts}
    assert len(ax.lines) == 3  # the frames of the three parts


def test_many_curves_are_grey_but_for_the_lowest():
    count = 20
    last = curves()[2] | {"categories": [f"c{k}" for k in range(count)], "phases": [2] * count}
    last |= {key: [[(k + 1) / 40] * 101 for k in range(count)] for key in ("AP50", "AP")}
    [panel] = precision_recall_plot(run_of(None, curves={2: last})).panels
    assert panel.title == "All categories, IoU 0.5"
    named = [text.get_text() for text in drawn(panel).get_legend().get_texts()]
    assert named[:2] == ["mean 26.2", "mean of all IoU 26.2"]
    assert named[2:] == [f"c{k} {2.5 * (k + 1):.1f}" for k in range(8)]
    assert len(drawn(panel).lines) == count + 2


def test_many_categories_are_divided_among_panels_of_readable_height():
    rows = list(range(2 * MAX_ROWS - 1))
    seen = []
    panels = row_panels("x", rows, lambda some, ax: seen.extend(some))
    assert len(panels) == 2
    for panel in panels:
        panel.draw(None)
    assert seen == rows
    assert row_panels("x", [], lambda some, ax: None) == []


HOSTILE = ("<script>alert(1)</script>", "a & b $x_1$ \x00\x1b", "\u4eba" * 60)


def test_names_are_drawn_as_they_are_and_svg_stays_xml(tmp_path):
    run = run_of(two_phases(names=HOSTILE))
    plot = category_change_plot(run)
    png, svg = save_plot(plot, tmp_path)
    texts = [element.text for element in ET.parse(svg).iter() if element.tag.endswith("text")]
    assert "<script>aler…1)</script>" in texts
    assert "a & b $x_1$" in texts
    assert Image.open(png).size[0] > 1000
    inline = panel_svg(plot.panels[0], "salt")
    assert "<script" not in inline
    ET.fromstring(inline.replace("xlink:href", "href"))


def test_panels_of_a_page_share_no_ids():
    plot = ap_over_phases([Group("a", (run_of(two_phases()),))])
    found = [
        set(re.findall(r'id="([^"]+)"', panel_svg(plot.panels[0], salt))) for salt in ("a", "b")
    ]
    assert found[0]
    assert not found[0] & found[1]


def test_long_labels_are_shortened_in_the_middle():
    assert tidy("x" * 30 + "y" * 30, 11) == "xxxxx…yyyyy"
    assert tidy("short") == "short"
