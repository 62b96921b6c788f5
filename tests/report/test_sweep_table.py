"""Tables of sweeps: the interval worked by hand, pairing by seed, the paper's figures beside."""

import argparse
import csv
import io
import math
import re

import pytest

from cldetr.cli import main
from cldetr.commands.sweep import _write_table, add_arguments
from cldetr.config import check_keys, method_of, schedule_of
from cldetr.config_files import compose
from cldetr.engine.sweep import Experiment, plan
from cldetr.errors import InputError
from cldetr.report.sweep_table import (
    csv_text,
    format_rows,
    latex,
    mean_interval,
    own_rows,
    paper_tables,
    read_runs_csv,
    runs_csv_text,
    table_rows,
    title,
    voc_columns,
)


def markdown(rows, columns):
    """The table without the spaces that align it."""
    return re.sub(" +", " ", format_rows(rows, columns, "github"))


def results(ap, method="m"):
    scores = {"AP": ap, "AP50": ap + 1, "AP75": None, "APs": 1.0, "APm": 2.0, "APl": 3.0}
    phase = {"phase": 2, "all": scores, "old": scores, "new": scores}
    return {"method": method, "phases": [phase], "fpp": scores}


def test_the_interval_is_students():
    mean, half = mean_interval([1.0, 2.0, 3.0])
    assert mean == 2.0
    assert half == pytest.approx(4.302653 * 1.0 / 3**0.5, rel=1e-6)
    assert mean_interval([5.0]) == (5.0, None)


def test_changes_are_paired_by_seed():
    found = {
        "a": {0: results(40.0, "A"), 1: results(50.0, "A"), 2: results(10.0, "A")},
        "b": {1: results(52.0, "B"), 0: results(41.0, "B")},
    }
    first, second = own_rows(found)
    assert first.change is None
    assert second.label == "B"
    assert second.ours["all.AP"] == pytest.approx((46.5, 12.706205 * 7.778175 / 2**0.5))
    mean, half = second.change  # of +1 and +2
    assert mean == pytest.approx(1.5)
    assert half == pytest.approx(12.706205 * 0.707107 / 2**0.5, rel=1e-5)
    table = markdown([first, second], ["all.AP", "all.AP75"])
    assert "| B | 2 | 46.5 ± 69.9 | – | +1.5 ± 6.4 |" in table


def test_equal_method_names_give_way_to_the_configs():
    found = {"a": {0: results(40.0)}, "b": {0: results(41.0)}}
    assert [row.label for row in own_rows(found)] == ["a", "b"]


def test_the_papers_figures_stand_beside_ours():
    table = paper_tables()["1"]
    rows = table_rows(table, {"70_10_lwf": {0: results(25.0)}})
    (line,) = [line for line in markdown(rows, table.columns).splitlines() if "10, LwF" in line]
    assert line.startswith("| 70+10, LwF | 1 | 25.0 (24.5 ± 0.3) | 26.0 (36.6 ± 0.2) | – (26.7")
    assert "25.0 (24.5 $\\pm$ 0.3)" in latex(rows, table.columns)
    lines = list(csv.DictReader(io.StringIO(csv_text(rows, table.columns))))
    found = [x for x in lines if x["row"] == "70+10, LwF" and x["metric"] == "all.AP"]
    cells = [found[0][name] for name in ("mean", "paper_mean", "paper_half_95")]
    assert cells == ["25.0", "24.5", "0.3"]


def test_vocs_metrics_are_columns_where_a_run_has_them():
    with_voc = results(40.0, "A")
    last = with_voc["phases"][0]
    last["all"] = {**last["all"], "VOC07": 61.0, "VOC12": 62.0}
    last["new"] = {**last["new"], "VOC07": None, "VOC12": 72.0}  # no object by one of the rules
    last["old"] = None  # a single phase
    found = {"a": {0: with_voc}, "b": {0: results(41.0, "B")}}
    voc = voc_columns(each for runs in found.values() for each in runs.values())
    assert voc == ("all.VOC07", "all.VOC12", "new.VOC12")
    table = markdown(own_rows(found, ("all.AP", *voc)), ("all.AP", *voc))
    assert "| | runs | AP | VOC07 | VOC12 | new VOC12 |" in table
    assert "| A | 1 | 40.0 | 61.0 | 62.0 | 72.0 |" in table
    assert "| B | 1 | 41.0 | – | – | – |" in table
    ours = table_rows(paper_tables()["ablation"], {"ablation": found["a"]}, voc)[0].ours
    assert ours["new.VOC12"] == (72.0, None)
    assert voc_columns(found["b"].values()) == ()


@pytest.mark.parametrize("table", [None, "ablation"])
def test_all_files_of_a_sweep_have_vocs_metrics(tmp_path, table):
    found = {**results(40.0), "scenario": "voc/19+1"}
    found["phases"][0]["all"] = {**found["phases"][0]["all"], "VOC07": 61.5}
    words = [*(["--table", table] if table else ["ablation"]), "--seeds", "0"]
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    args = parser.parse_args([*words, "--out", str(tmp_path)])
    args.modules = []
    _write_table(args, {"ablation": {0: found}}, {"ablation": "a1"}, [])
    lines = (tmp_path / "table.md").read_text().splitlines()
    heads, _, row = [line.split("|") for line in lines if line.startswith("|")][:3]
    assert (heads[-2].strip(), row[-2].strip()) == ("VOC07", "61.5")
    assert "VOC07" in (tmp_path / "table.tex").read_text()
    rows = list(csv.DictReader((tmp_path / "table.csv").open()))
    assert next(x["mean"] for x in rows if x["metric"] == "all.VOC07") == "61.5"
    [run] = csv.DictReader((tmp_path / "runs.csv").open())
    assert run["all.VOC07"] == "61.5"


def test_runs_of_elsewhere_give_the_same_table(tmp_path):
    found = {
        "a": {
            0: {**results(40.5, "A"), "scenario": "7+3"},
            3: {**results(51.0), "scenario": "7+3"},
        },
        "b": {0: {**results(41.25, "B"), "scenario": "7+3"}},
    }
    columns = ("all.AP", "all.AP75", "old.AP", "fpp.AP")
    path = tmp_path / "runs.csv"
    path.write_text(runs_csv_text(found, {"a": "a1", "b": "b1"}))
    read, refused = read_runs_csv(path, {"a": "a1", "b": "b1"})
    assert refused == []
    assert own_rows(read, columns) == own_rows(found, columns)
    assert runs_csv_text(read, {"a": "a1", "b": "b1"}) == path.read_text()
    path.write_text("\ufeff" + path.read_text())  # as Excel saves it
    read, refused = read_runs_csv(path, {"b": "b2", "c": "c1"})
    assert read == {}
    assert refused == [
        f"b, seed 0: {path}, line 4, has a run on 7+3 with other settings, of which the paths of "
        "data and weights are some (b1, here b2)"
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("config,seed,all.AP\na,0,1\n", "no column settings, scenario, method: give a runs.csv"),
        ("{head}\n{line},3\n", "line 2: it has more or fewer cells"),
        ("{head}\na,a1,7+3,m,0,1\n", "line 2: it has more or fewer cells"),
        ("{head}\na,a1,7+3\n", "line 2: it has more or fewer cells"),
        ("{head}\na\n", "line 2: it has more or fewer cells"),
        ("{head}\n{line}\n", r"line 2: phase1\.AP is nan"),
        ("{head}\n{line}\0\n", "line 2: "),
        ("", "no column config"),
    ],
)
def test_a_damaged_file_of_runs_is_refused(tmp_path, text, message):
    path = tmp_path / "runs.csv"
    whole = runs_csv_text({"a": {0: {**results(math.nan), "scenario": "7+3"}}}, {"a": "a1"})
    head, line = whole.splitlines()
    path.write_text(text.format(head=head, line=line))
    with pytest.raises(InputError, match=message):
        read_runs_csv(path, {"a": "a1"})


@pytest.mark.parametrize(
    ("seed", "message"), [("0", "line 3: a second run of a with seed 0"), ("x", "invalid literal")]
)
def test_a_seed_is_a_number_that_a_config_has_once(tmp_path, seed, message):
    path = tmp_path / "runs.csv"
    whole = runs_csv_text({"a": {0: {**results(40.5), "scenario": "7+3"}}}, {"a": "a1"})
    name, digest, scenario, method, _, rest = whole.splitlines()[1].split(",", 5)
    path.write_text(whole + ",".join([name, digest, scenario, method, seed, rest]) + "\n")
    with pytest.raises(InputError, match=message):
        read_runs_csv(path, {"a": "a1"})


def test_a_file_of_runs_is_read_before_anything_runs(tmp_path, capsys):
    words = ["sweep", "shapes", "--seeds", "0", "--out", str(tmp_path / "out")]
    assert main([*words, "--runs", str(tmp_path / "absent.csv")]) == 2
    assert "absent.csv: No such file" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_table_has_the_runs_of_files(tmp_path, capsys):
    [job] = plan([Experiment("shapes", compose(["shapes"]))], [0], tmp_path)

    def write(name, settings, **values):  # by seed
        runs = {
            int(seed[1:]): {**results(value, "A"), "scenario": "7+3"}
            for seed, value in values.items()
        }
        (tmp_path / name).write_text(runs_csv_text({"shapes": runs}, {"shapes": settings}))

    write("first.csv", job.settings, s0=40.5, s7=1.0)
    write("second.csv", job.settings, s0=30.0, s1=41.5)
    write("other.csv", "0", s0=1.0)
    files = [str(tmp_path / name) for name in ("first.csv", "second.csv", "other.csv")]
    words = ["sweep", "shapes", "--seeds", "0", "1", "--out", str(tmp_path), "--table-only"]
    assert main([*words, "--runs", *files]) == 0
    printed = re.sub(" +", " ", capsys.readouterr().out)
    assert "| A | 2 | 41.0 ± 6.4 |" in printed  # seed 7 was not asked for
    assert f"shapes, seed 0: the run of {files[1]}; that of {files[0]} counts" in printed
    assert "other.csv, line 2, has a run on 7+3 with other settings" in printed
    assert "other.csv has no run of these configs, settings and seeds" in printed
    assert f"--runs {' '.join(files)}" in (tmp_path / "table.md").read_text()
    assert main([*words, "--runs", str(tmp_path / "runs.csv")]) == 2
    assert "the sweep writes" in capsys.readouterr().err


def test_a_run_that_the_table_does_not_have_stands_below_its_rows():
    table = paper_tables()["ablation"]
    found = {
        "mine": {0: results(41.0, "my method")},
        "ablation": {0: results(40.0), 1: results(42.0)},
    }
    rows = table_rows(table, found)
    assert [row.label for row in rows] == [*(row.label for row in table.rows), "my method"]
    assert rows[-1].change == (1.0, None)  # in the order that both have


def test_latex_escapes_what_it_must():
    rows = own_rows({"a": {0: results(40.0, "R&D_1 50%")}})
    assert "R\\&D\\_1 50\\%" in latex(rows, ["all.AP"])


def test_heads_are_the_papers():
    assert [title(x) for x in ("all.AP", "old.APs", "fpp.AP", "fpp.APl")] == [
        "AP",
        "old AP_S",
        "FPP",
        "FPP_L",
    ]


def test_every_row_has_a_run_that_computes_it():
    """Rows without one are quoted: other detectors, and newer methods that are not built here."""
    quoted = ("GFLv1", "ACF", "SDDGR", "DCA", "Grounding DINO", "SIKD, both losses")
    for table in paper_tables().values():
        assert len({row.label for row in table.rows}) == len(table.rows)
        for row in table.rows:
            assert (row.run is None) == any(name in row.label for name in quoted), row.label
            if row.run is None:
                continue
            cfg = compose([row.run])
            check_keys(cfg)
            for setting in ("70+10", "40+40", "40+20×2", "40+10×4"):
                if setting in row.label:
                    assert setting.replace("×", "x") == cfg.SCENARIO.NAME
            assert ("UP-DETR" in row.label) == (cfg.MODEL.META_ARCHITECTURE == "DETR")
            if table.name in ("S-traditional", "newer-traditional") or "ERD's split" in row.label:
                assert cfg.SCENARIO.PROTOCOL == "traditional"
            elif table.name != "ablation":
                assert cfg.SCENARIO.PROTOCOL == "strict"


def test_our_ablation_compares_every_row_with_the_first():
    found = {"ablation": {0: results(40.0)}, "ablation_lwf": {0: results(38.0)}}
    rows = {row.label: row for row in table_rows(paper_tables()["ablation"], found)}
    assert rows["LwF"].change == (-2.0, None)
    assert rows["CL-DETR"].change is None
    assert rows["DKD"].change is None  # not run
    assert all(row.change is None for row in table_rows(paper_tables()["2"], found))


def test_the_papers_fpp_is_the_first_phases_ap_less_the_lasts():
    """43.3 = 41.8 + 1.5 on the 70 classes: a check of the entered figures against one another."""
    for name in ("2", "S-methods", "S-exemplars"):
        for row in paper_tables()[name].rows:
            total = row.figures["old.AP"][0] + row.figures["fpp.AP"][0]
            assert total == pytest.approx(43.3, abs=0.05), row.label


def test_our_rank_loss_stands_beside_the_figures_of_the_rank_loss_alone():
    rows = {row.label: row for row in paper_tables()["newer-traditional"].rows}
    alone, both = (rows[f"70+10, SIKD, {losses}"] for losses in ("rank loss alone", "both losses"))
    assert method_of(compose([alone.run])).distill.loss == "rank"
    assert alone.figures["all.AP"][0] < both.figures["all.AP"][0]
    assert alone.figures["new.AP"][0] > both.figures["new.AP"][0]


def test_runs_state_what_their_tables_vary():
    method = {
        name: method_of(compose([f"70_10_{name}"]))
        for name in ("k5", "k20_exact", "p03", "kd_oracle", "er_oracle", "dkd_er", "dkd_er_random")
    }
    assert (method["k5"].pseudo.k, method["k5"].pseudo.foreground) == (5, 0.3)
    assert (method["k20_exact"].pseudo.k, method["k20_exact"].pseudo.foreground) == (20, 0.0)
    assert method["p03"].pseudo.select == "threshold"
    assert method["kd_oracle"].reveal_old
    assert method["er_oracle"].memory.budget == 1.0
    assert method["dkd_er"].memory.strategy == "balanced"
    assert method["dkd_er_random"].memory.strategy == "random"
    up_detr = schedule_of(compose(["70_10_up_detr"]))
    assert (up_detr.train.epochs, up_detr.calibrate.epochs) == (120, 30)
    without = compose(["40_40_traditional_dkd"])
    assert (without.SCENARIO.PROTOCOL, method_of(without).memory) == ("traditional", None)


def test_rows_without_calibration_train_as_long_as_the_others_in_both_steps():
    for table in ("1", "2", "S-traditional", "S-oracles", "multi-phase"):
        for name in paper_tables()[table].runs():
            cfg = compose([name])
            schedule, method = schedule_of(cfg), method_of(cfg)
            epochs = schedule.train.epochs + (schedule.calibrate.epochs if method.calibrate else 0)
            assert epochs == schedule.first.epochs, name
