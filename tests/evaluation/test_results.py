"""Results of a run, worked by hand: FPP, forgetting, backward transfer, tables and files."""

import csv
import json

import pytest

from cldetr.errors import InputError
from cldetr.evaluation.average_precision import METRICS
from cldetr.evaluation.results import (
    format_entry,
    format_matrix,
    format_table,
    load_results,
    summarise,
    write_results,
)


def scores(ap, **others):
    """All six metrics, told apart by an offset of 1 each, unless given."""
    values = {metric: None if ap is None else ap + i for i, metric in enumerate(METRICS)}
    return {**values, **others}


def make_entry(phase, overall, groups, **further):
    return {
        "phase": phase,
        "all": scores(overall),
        "old": scores(overall - 1) if phase > 1 else None,
        "new": scores(groups[-1]),
        "groups": [scores(ap) for ap in groups],
        "per_category": {f"class {k}": scores(ap) for k, ap in enumerate(groups)},
        **further,
    }


@pytest.fixture
def phases():
    return [
        make_entry(1, 60.0, [60.0], stage="train"),
        make_entry(2, 50.0, [65.0, 40.0], stage="calibrate"),
        make_entry(3, 31.0, [55.0, 30.0, 20.0], stage="calibrate"),
    ]


@pytest.fixture
def results(phases):
    return summarise(phases, scenario="40+20×2", method="cldetr")


def test_matrix_holds_the_ap_of_each_phase_group_after_each_phase(results):
    assert results["matrix"] == [[60.0, None, None], [65.0, 40.0, None], [55.0, 30.0, 20.0]]


def test_fpp_is_first_minus_last_model_on_the_first_phases_classes(results):
    assert results["fpp"] == dict.fromkeys(METRICS, 60.0 - 55.0)


def test_fpp_agrees_with_the_papers_table_2():
    # Row 6: old categories 41.8 / 24.5 / 44.7 / 54.6, FPP 1.5 / 1.3 / 1.2 / 2.9.
    first = make_entry(1, 43.3, [0.0])
    first["groups"] = [scores(43.3, APs=25.8, APm=45.9, APl=57.5)]
    last = make_entry(2, 40.1, [0.0, 0.0])
    last["groups"][0] = scores(41.8, APs=24.5, APm=44.7, APl=54.6)
    fpp = summarise([first, last], scenario="70+10", method="cldetr")["fpp"]
    assert [round(fpp[m], 1) for m in ("AP", "APs", "APm", "APl")] == [1.5, 1.3, 1.2, 2.9]


def test_forgetting_counts_from_the_best_past_ap(results):
    # ((max(60, 65) − 55) + (40 − 30)) / 2
    assert results["forgetting"] == pytest.approx(10.0)


def test_backward_transfer_counts_from_the_ap_when_learnt(results):
    # ((55 − 60) + (30 − 40)) / 2
    assert results["backward_transfer"] == pytest.approx(-7.5)


def test_average_ap_is_the_mean_over_phases_of_all_seen(results):
    assert results["average_AP"] == pytest.approx((60 + 50 + 31) / 3)


def test_single_phase_has_nothing_to_forget(phases):
    results = summarise(phases[:1], scenario="70+10", method="cldetr")
    assert results["fpp"] is results["forgetting"] is results["backward_transfer"] is None
    assert results["average_AP"] == 60.0
    assert results["matrix"] == [[60.0]]


def test_what_is_not_defined_is_none_and_left_out_of_means(phases):
    for entry in phases[1:]:
        entry["groups"][1] = scores(None)
    phases[2]["groups"][0]["APs"] = None
    results = summarise(phases, scenario="s", method="m")
    assert results["fpp"]["APs"] is None
    assert results["fpp"]["APm"] == 5.0
    assert results["forgetting"] == pytest.approx(65 - 55)
    assert results["backward_transfer"] == pytest.approx(55 - 60)


def test_gap_to_joint_is_what_the_joint_model_has_more(phases):
    joint = summarise([make_entry(1, 44.0, [44.0, 44.0, 44.0])], scenario="joint", method="joint")
    results = summarise(phases, scenario="s", method="m", joint=joint)
    assert results["gap_to_joint"] == dict.fromkeys(METRICS, 44.0 - 31.0)
    assert summarise(phases, scenario="s", method="m")["gap_to_joint"] is None


def test_joint_run_with_other_classes_is_refused(phases):
    joint = summarise([make_entry(1, 44.0, [44.0, 44.0])], scenario="joint", method="joint")
    with pytest.raises(InputError, match="class 2"):
        summarise(phases, scenario="s", method="m", joint=joint)


@pytest.mark.parametrize("kept", [[], [1, 2], [0, 2], [1, 0]])
def test_phases_missing_or_out_of_order_are_refused(phases, kept):
    with pytest.raises(ValueError, match="numbered"):
        summarise([phases[i] for i in kept], scenario="s", method="m")


def test_results_are_read_back_as_written(results, tmp_path):
    write_results(results, tmp_path)
    assert load_results(tmp_path / "results.json") == results
    assert results["format"] == 1
    assert [entry["stage"] for entry in results["phases"]] == ["train", "calibrate", "calibrate"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["results.csv", "results.json"]


@pytest.mark.parametrize("text", ["{", "[]", json.dumps({"format": 2})])
def test_file_that_is_not_results_of_this_format_is_refused(tmp_path, text):
    (tmp_path / "results.json").write_text(text)
    with pytest.raises(InputError, match=r"results\.json"):
        load_results(tmp_path / "results.json")


def test_csv_has_a_row_for_each_phase_and_group_with_empty_cells_for_na(results, tmp_path):
    results["phases"][0]["per_category"]["class 0"]["APs"] = None
    write_results(results, tmp_path)
    with open(tmp_path / "results.csv", newline="") as stream:
        rows = list(csv.DictReader(stream))
    # Phase 1 has no old classes: 2 + 1 + 1 rows; then 3 + 2 + 2 and 3 + 3 + 3.
    assert len(rows) == 4 + 7 + 9
    by_place = {(row["phase"], row["kind"], row["name"]): row for row in rows}
    assert float(by_place["3", "group", "2"]["AP"]) == 30.0
    assert float(by_place["2", "set", "old"]["AP50"]) == 50.0
    assert by_place["2", "set", "old"]["stage"] == "calibrate"
    assert by_place["1", "category", "class 0"]["APs"] == ""
    assert ("1", "set", "old") not in by_place


TABLE = """\
40+20×2, cldetr (AP in %)
                                AP    AP50    AP75     APs     APm     APl
after phase 1     all         60.0    61.0    62.0    63.0    64.0    65.0
after phase 2     all         50.0    51.0    52.0    53.0    54.0    55.0
                  old         49.0    50.0    51.0    52.0    53.0    54.0
                  new         40.0    41.0    42.0     n/a    44.0    45.0
after phase 3     all         31.0    32.0    33.0    34.0    35.0    36.0
                  old         30.0    31.0    32.0    33.0    34.0    35.0
                  new         20.0    21.0    22.0    23.0    24.0    25.0
FPP               phase 1      5.0     5.0     5.0     5.0     5.0     5.0
average AP                    47.0
forgetting                    10.0
backward transfer              0.0"""


def test_table_shows_one_decimal_and_na(results):
    results["phases"][1]["new"]["APs"] = None
    results["backward_transfer"] = -0.04
    assert format_table(results) == TABLE


MATRIX = """\
AP on classes of      1      2      3
after phase 1      60.0
after phase 2      65.0    n/a
after phase 3      55.0   30.0   20.0"""


def test_matrix_as_text_leaves_the_future_blank(results):
    results["matrix"][1][1] = None
    assert format_matrix(results) == MATRIX


def test_matrix_of_many_phases_stays_within_a_hundred_columns():
    count = 20
    matrix = [[100.0 if j <= i else None for j in range(count)] for i in range(count)]
    text = format_matrix({"matrix": matrix})
    assert max(map(len, text.splitlines())) <= 100
    assert text.count("100.0") == count * (count + 1) // 2


def domain_entry(phase, aps):
    """An evaluation on domains called clear, fog and night, those to come too."""
    seen = aps[:phase]
    return {
        **make_entry(phase, sum(seen) / phase, seen, stage="train"),
        "domains": dict(zip(("clear", "fog", "night"), map(scores, aps), strict=True)),
    }


@pytest.fixture
def domain_results():
    phases = [
        domain_entry(1, [60.0, 20.0, 10.0]),
        domain_entry(2, [45.0, 50.0, 15.0]),
        domain_entry(3, [48.0, 30.0, 42.0]),
    ]
    return summarise(phases, scenario="3 domains", method="finetune")


def test_domains_have_their_ap_after_each_phase_and_what_was_lost(domain_results):
    domains = domain_results["domains"]
    assert domains["names"] == ["clear", "fog", "night"]
    assert domains["matrix"] == [[60.0, 20.0, 10.0], [45.0, 50.0, 15.0], [48.0, 30.0, 42.0]]
    assert domains["mean"] == [60.0, 47.5, 40.0]  # (45 + 50) / 2, (48 + 30 + 42) / 3
    assert domains["forgetting"] == [12.0, 20.0, None]  # 60 − 48, 50 − 30
    assert domains["mean_forgetting"] == 16.0
    assert domain_results["fpp"]["AP"] == 12.0
    assert domain_results["backward_transfer"] == -16.0
    assert domain_results["matrix"][1] == [45.0, 50.0, None]


def test_an_unfinished_run_counts_what_was_lost_so_far(domain_results):
    half = summarise(domain_results["phases"][:2], scenario="3 domains", method="m")["domains"]
    assert half["forgetting"] == [15.0, None, None]
    assert half["mean"] == [60.0, 47.5]


def test_a_domain_without_objects_has_lost_nothing(domain_results):
    for entry in domain_results["phases"]:
        entry["domains"]["clear"] = scores(None)
    domains = summarise(domain_results["phases"], scenario="s", method="m")["domains"]
    assert domains["forgetting"] == [None, 20.0, None]
    assert domains["mean_forgetting"] == 20.0


DOMAINS = """\
AP on            clear     fog    night    mean
after phase 1     60.0  (20.0)   (10.0)    60.0
after phase 2     45.0    50.0   (15.0)    47.5
after phase 3     48.0    30.0     42.0    40.0
forgetting        12.0    20.0             16.0"""


def test_the_table_of_domains_ends_the_table(domain_results, results):
    assert format_table(domain_results).endswith("\n\n" + DOMAINS)
    assert "AP on" not in format_table(results)
    assert "domains" not in results


def test_one_evaluation_shows_each_domain(domain_results):
    *_, fog, night = format_entry(domain_results["phases"][1]).splitlines()
    assert fog.split() == ["fog", "50.0", "51.0", "52.0", "53.0", "54.0", "55.0"]
    assert night.split()[:2] == ["night", "15.0"]


def test_csv_has_the_domains_to_come_too(domain_results, tmp_path):
    write_results(domain_results, tmp_path)
    with open(tmp_path / "results.csv", newline="") as stream:
        rows = [row for row in csv.DictReader(stream) if row["kind"] == "domain"]
    found = [(row["phase"], row["name"], float(row["AP"])) for row in rows]
    assert found[:4] == [
        ("1", "clear", 60.0),
        ("1", "fog", 20.0),
        ("1", "night", 10.0),
        ("2", "clear", 45.0),
    ]
    assert len(found) == 9
