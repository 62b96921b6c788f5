"""Pages say what a run says, load nothing, and take names from data as text."""

import base64
import csv
import io
import json
import logging
import re
import shutil

import numpy as np
import pytest
from PIL import Image

from cldetr.analysis.diagnose import diagnose_run
from cldetr.analysis.pictures import draw_run_pictures
from cldetr.cli import main
from cldetr.evaluation.average_precision import METRICS, summarise_precision
from cldetr.evaluation.results import format_table, summarise, write_results
from cldetr.report.diagnosis_plots import write_diagnosis_plots
from cldetr.report.pages import write_comparison, write_run_page
from cldetr.report.rundir import read_run
from cldetr.train import show_run

from .synthetic import (
    confusion,
    curves,
    domain_confusion,
    domain_curves,
    entry,
    run_of,
    two_domains,
    two_phases,
)

SCRIPT = "<script>alert(1)</script>"


def loads(text):
    """Addresses that a browser would go to by itself."""
    found = re.findall(r"""(?:src|href|url)\s*[=(]\s*["']?([^"')\s>]+)""", text)
    return [address for address in found if not address.startswith(("#", "data:"))]


def test_the_page_of_a_run_has_its_numbers_and_loads_nothing(drawn_run):
    page = (drawn_run / "report/index.html").read_text()
    results = json.loads((drawn_run / "results.json").read_text())
    assert "cldetr, 3+1" in page
    for name in results["phases"][-1]["per_category"]:
        assert name in page
    assert f"{results['phases'][-1]['all']['AP']:.1f}" in page
    assert "FPP" in page
    assert "build_small_resnet_backbone" in page  # what is set
    assert loads(page) == []
    assert page.count("<svg") >= 10
    names = {"ap_over_phases", "category_change", "category_distribution"}
    names |= {"training", "time_and_memory", "confusion", "precision_recall"}
    assert {path.stem for path in (drawn_run / "report/figures").iterdir()} == names


def test_names_from_data_are_text_everywhere_on_the_page(tmp_path):
    names = (SCRIPT, '"><img src=x onerror=alert(1)>', "bird")
    run = run_of(
        two_phases(names=names),
        confusion=confusion(names=names),
        curves=curves(names=names),
        settings={"METHOD.NAME": SCRIPT, "DATASETS.TRAIN": [SCRIPT]},
        problems=[SCRIPT],
        starts=[{"time": SCRIPT, "device": SCRIPT, "processes": 1, "versions": {"torch": SCRIPT}}],
    )
    for page in (
        write_run_page(run, tmp_path / SCRIPT.replace("/", "")),
        write_comparison([run, run_of(two_phases(), "other")], tmp_path),
    ):
        text = page.read_text()
        assert "<script" not in text
        assert "<img" not in text
        assert "&lt;script&gt;" in text


def test_a_metric_is_one_entry_that_files_tables_and_pages_read(tmp_path, monkeypatch):
    monkeypatch.setitem(METRICS, "AP90", lambda precision: precision[8, ..., 0])
    table = np.full((10, 101, 1, 4), 0.5)
    table[8] = 0.123
    assert summarise_precision(table)["AP90"] == pytest.approx(12.3)
    results = two_phases()
    results["phases"][1]["all"]["AP90"] = 12.3
    write_results(results, tmp_path)
    with open(tmp_path / "results.csv", newline="") as stream:
        rows = list(csv.DictReader(stream))
    [row] = [row for row in rows if (row["phase"], row["kind"], row["name"]) == ("2", "set", "all")]
    assert row["AP90"] == "12.3"
    assert "AP90" in format_table(results)
    page = write_run_page(run_of(results), tmp_path / "page").read_text()
    assert ">AP90</th>" in page
    assert "<td>12.3</td>" in page


def test_pictures_are_embedded_and_a_broken_one_is_named(tmp_path):
    Image.effect_noise((1800, 40), 90).save(tmp_path / "wide.png")
    (tmp_path / "broken.png").write_bytes(b"no picture")
    pictures = [(tmp_path / "wide.png", "A wide one"), (tmp_path / "broken.png", "")]
    page = write_run_page(run_of(None, pictures=pictures), tmp_path / "out").read_text()
    [content] = re.findall(r"data:image/webp;base64,([^\"]+)", page)
    assert Image.open(io.BytesIO(base64.b64decode(content))).size == (1600, 36)
    assert "A wide one" in page
    assert "broken.png: cannot identify image file" in page


def test_a_run_of_one_phase_and_a_run_without_results_have_pages(tmp_path):
    results = two_phases()
    one = {**results, "phases": results["phases"][:1], "fpp": None}
    assert "AP of categories of phase 1" in write_run_page(run_of(one), tmp_path).read_text()
    assert "No phase is evaluated yet" in write_run_page(run_of(None), tmp_path).read_text()


def test_the_page_says_how_many_objects_are_confused(tmp_path):
    page = write_run_page(run_of(two_phases(), confusion=confusion()), tmp_path).read_text()
    text = re.sub(r"\s+", " ", page[page.index("What is confused</h2>") :])
    for cells in (
        ("old categories", "51", "58.8% (30)", "5.9% (3)", "15.7% (8)", "19.6% (10)"),
        ("new categories", "45", "66.7% (30)", "15.6% (7)", "0.0% (0)", "17.8% (8)"),
        ("bird", "cat", "new as old", "7", "15.6%"),  # the largest confusion comes first
    ):
        head, *rest = (f"<td>{cell}</td>" for cell in cells)
        text = text[text.index(head.replace("<td>", '<td class="text">')) :]
        for cell in rest:
            assert cell in text.replace('<td class="text">', "<td>")[:400], cell
    assert text.index("cat") < text.index("dog")


def test_runs_are_compared_by_what_they_confuse(tmp_path):
    runs = [run_of(two_phases(), "a", confusion=confusion()), run_of(two_phases(), "b")]
    page = write_comparison(runs, tmp_path).read_text()
    part = page[page.index("What is confused</h2>") :]
    cells = re.findall(r"<td>([^<]*)</td>", part[: part.index("</table>")])
    assert cells == ["58.8", "15.7", "19.6", "66.7", "15.6", "17.8"]  # of 51 old and 45 new objects
    page = write_comparison(runs[1:] * 2, tmp_path).read_text()
    assert "What is confused" not in page


def with_voc(results, seen, old, new):
    """Results with VOC's metrics after the last phase; VOC12 is 1 above VOC07."""
    last = results["phases"][-1]
    for name, value in (("all", seen), ("old", old), ("new", new)):
        last[name] = {**last[name], "VOC07": value, "VOC12": value + 1}
    return results


def test_runs_are_compared_by_vocs_metrics_where_they_have_them(tmp_path):
    runs = [run_of(with_voc(two_phases(), 71.0, 61.0, 51.0), "a"), run_of(two_phases(), "b")]
    heads, first, second = cells_after(write_comparison(runs, tmp_path).read_text(), "Results")
    names = ["VOC07", "VOC12", "old VOC07", "old VOC12", "new VOC07", "new VOC12"]
    assert heads[-8:] == ["average AP", *names, "time"]
    assert first[-7:-1] == ["71.0", "72.0", "61.0", "62.0", "51.0", "52.0"]
    assert second[-7:-1] == ["n/a"] * 6
    assert "VOC" not in write_comparison(runs[1:] * 2, tmp_path).read_text()


def test_several_phases_have_a_table_of_each_phases_categories(tmp_path):
    old = {"cat": 30.0, "dog": 20.0}
    phases = [entry(1, {"cat": 40.0}), entry(2, old, ("cat",))]
    phases.append(entry(3, {**old, "bird": None}, ("cat", "dog")))
    results = summarise(phases, scenario="1+1+1", method="x")
    page = write_run_page(run_of(results), tmp_path).read_text()
    text = page[page.index("Each phase") : page.index("Backward transfer")]
    cells = re.findall(r"<td style=[^>]*rgba\(var\(--heat\),([^)]*)\)\">([^<]*)</td>", text)
    assert "|".join(cell for _, cell in cells) == "40.0|||30.0|20.0||25.0|25.0|n/a"
    assert cells[0][0] == "0.42"  # the highest is the darkest
    assert cells[-1][0] == "0.00"


def cells_after(page, heading):
    """The cells of the table below a heading, row by row."""
    text = page[page.index(f">{heading}<") :]
    rows = re.findall(r"<tr.*?</tr>", text[: text.index("</table>")], flags=re.DOTALL)
    return [re.findall(r"<t[hd][^>]*>([^<]*)</t[hd]>", row) for row in rows]


def test_domains_have_a_table_and_a_plot_of_each_one(tmp_path):
    page = write_run_page(run_of(two_domains()), tmp_path).read_text()
    assert cells_after(page, "AP per domain after each phase") == [
        ["AP on", "clear", "fog", "mean"],
        ["after phase 1", "40.0", "(10.0)", "40.0"],
        ["after phase 2", "30.0", "50.0", "40.0"],
        ["forgetting", "10.0", "", "10.0"],
    ]
    assert (tmp_path / "figures/ap_per_domain.svg").exists()
    assert not (tmp_path / "figures/category_change.svg").exists()  # no category is new
    assert "AP on old domains" in page
    assert "AP, mean of domains" in page


def test_categories_of_domains_are_confused_as_one_group(tmp_path):
    run = run_of(two_domains(), confusion=domain_confusion(), curves=domain_curves())
    page = write_run_page(run, tmp_path).read_text()
    text = page[page.index("What is confused</h2>") : page.index("Precision and recall</h2>")]
    words = re.sub(r"<svg.*?</svg>", "", text, flags=re.DOTALL)  # glyphs may spell anything
    assert not re.search(r"\b(old|new)\b", words)
    tables = re.findall(r"<table.*?</table>", text, flags=re.DOTALL)
    total, largest = (re.findall(r"<t[hd][^>]*>([^<]*)</t[hd]>", table) for table in tables)
    assert total == [
        *("objects", "right", "confused", "missed"),
        *("96", "62.5% (60)", "18.8% (18)", "18.8% (18)"),  # 19 + 32 + 45 objects
    ]
    assert largest[:8] == [
        *("true category", "detected as", "objects", "of its objects"),
        *("bird", "cat", "7", "15.6%"),
    ]
    assert "All categories, IoU 0.5" in page
    assert "Old categories" not in page


def test_runs_over_domains_are_not_compared_by_old_and_new_categories(tmp_path):
    domains = run_of(two_domains(), "domains", confusion=domain_confusion())
    assert "What is confused" not in write_comparison([domains, domains], tmp_path).read_text()
    classes = run_of(two_phases(), "classes", confusion=confusion())
    page = write_comparison([domains, classes], tmp_path).read_text()
    part = page[page.index("What is confused</h2>") :]
    cells = re.findall(r"<td>([^<]*)</td>", part[: part.index("</table>")])
    assert cells == ["58.8", "15.7", "19.6", "66.7", "15.6", "17.8"]  # of the run over classes


def test_runs_over_domains_are_compared_domain_by_domain(tmp_path):
    runs = [run_of(two_domains(), "one"), run_of(two_domains((36.0, 45.0)), "other")]
    page = write_comparison(runs, tmp_path).read_text()
    assert cells_after(page, "AP per domain after the last phase") == [
        ["AP on", "clear", "fog", "mean", "forgetting"],
        ["cldetr (one)", "30.0", "50.0", "40.0", "10.0"],
        ["cldetr (other)", "36.0", "45.0", "40.5", "4.0"],
    ]
    plain = write_comparison([run_of(two_phases(), x) for x in ("a", "b")], tmp_path).read_text()
    assert "AP per domain" not in plain


def test_names_of_domains_are_text(tmp_path):
    run = run_of(two_domains(names=(SCRIPT, "fog")))
    assert "<script" not in write_run_page(run, tmp_path).read_text()
    assert "<script" not in write_comparison([run, run], tmp_path).read_text()


def test_the_command_draws_several_runs_side_by_side_where_asked(drawn_run, tmp_path, capsys):
    both = [str(drawn_run), str(shutil.copytree(drawn_run, tmp_path / "again"))]
    assert main(["report", *both]) == 2
    assert "--out DIR" in capsys.readouterr().err
    assert main(["report", *both, "--out", str(tmp_path / "both")]) == 0
    page = (tmp_path / "both/index.html").read_text()
    assert "Final AP" in page
    assert "cldetr (again)" in page
    assert loads(page) == []
    assert (tmp_path / "both/figures/final_ap.svg").exists()
    assert main(["report", str(tmp_path / "absent")]) == 2


def test_what_cannot_be_drawn_does_not_fail_the_run(drawn_run, tmp_path, caplog):
    folder = tmp_path / "run"
    shutil.copytree(drawn_run, folder, ignore=shutil.ignore_patterns("report", "pictures"))
    (folder / "report").write_text("a file stands where the folder should be")
    with caplog.at_level(logging.WARNING):
        show_run(folder)
    for command in ("pictures", "diagnose", "report"):
        assert f"the run is finished, but `cldetr {command} {folder}` did not work" in caplog.text


def test_pictures_and_diagnostics_of_a_run_reach_its_page(tiny_run, tmp_path):
    folder = shutil.copytree(tiny_run, tmp_path / "run")
    draw_run_pictures(folder, sample=1)
    write_diagnosis_plots(diagnose_run(folder, limit=4), folder)
    run = read_run(folder)
    for shown, kind in ((run.pictures, "pictures"), (run.diagnostics, "diagnostics")):
        captions = json.loads((folder / kind / "captions.json").read_text())
        assert {path.name: caption for path, caption in shown} == captions
        assert captions


@pytest.mark.parametrize("protocol", ["strict", "traditional"])
def test_the_page_of_a_split_tells_of_shared_images(tiny_run, tmp_path, protocol):
    data = tiny_run.parent / "shapes/annotations/instances_train.json"
    options = ["--annotations", str(data), "--scenario", "2+2", "--protocol", protocol]
    assert main(["split", *options, "--out", str(tmp_path)]) == 0
    page = (tmp_path / "audit.html").read_text()
    audit = json.loads((tmp_path / "audit.json").read_text())
    assert f"{protocol} protocol" in page
    assert ("No image is in two phases." in page) == (protocol == "strict")
    if protocol == "traditional":
        assert "Phases share images" in page
        assert f"<td>{audit['overlap'][0]['images']}</td>" in page
    for phase in audit["phases"]:
        assert f"<td>{phase['instances']}</td>" in page
    assert loads(page) == []
