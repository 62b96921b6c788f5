"""The numbers behind tables and plots, against cases worked by hand."""

import pytest

from cldetr.report.tables import (
    Group,
    category_changes,
    curve_of,
    group_runs,
    mean_of,
    pseudo_per_pass,
    settings_set,
    settings_that_differ,
    training_spans,
)

from .synthetic import run_of, trained, two_phases


def settings(**changes):
    keys = {
        "SEED": 0,
        "SCENARIO.NAME": "2+1",
        "SCENARIO.CLASS_SEED": 0,
        "SCENARIO.PHASES": [],
        "DATASETS.TRAIN": ["coco_2017_train"],
        "METHOD.NAME": "cldetr",
        "METHOD.MEMORY.ENABLED": True,
        "METHOD.MEMORY.BUDGET": 0.1,
        "METHOD.CALIBRATE.ENABLED": True,
        "METHOD.CALIBRATE.COMPLETE.ENABLED": False,
        "SCHEDULE.FIRST.EPOCHS": 50.0,
        "SCHEDULE.CALIBRATE.EPOCHS": 10.0,
        "MODEL.DETECTOR": "",
        "MODEL.DETR.NUM_QUERIES": 300,
        "MODEL.DETR.NUM_CLASSES": 3,
    }
    return keys | {key.replace("__", "."): value for key, value in changes.items()}


def test_changes_run_from_the_phase_that_taught_a_category_to_the_end():
    changes = {change.name: change for change in category_changes(two_phases(40, 28, 50))}
    assert (changes["cat"].phase, changes["cat"].first, changes["cat"].last) == (1, 40, 28)
    assert changes["cat"].difference == -12
    assert (changes["bird"].phase, changes["bird"].difference) == (2, 0)


def test_a_category_without_objects_has_no_change():
    results = two_phases()
    results["phases"][1]["per_category"]["cat"]["AP"] = None
    assert category_changes(results)[0].difference is None


def test_pseudo_labels_are_scaled_to_one_pass_over_the_images():
    stages = [
        trained(1, "train", images=100, steps=10),
        # 30 labels on 60 images seen, of a stage of 20 images: 10 in one pass
        trained(2, "train", images=20, pseudo={"images": 60, "per_category": {"cat": 30}}),
        trained(2, "calibrate", images=20, pseudo={"images": 60, "per_category": {"cat": 999}}),
        trained(3, "train", images=10, pseudo={"images": 10, "per_category": {"cat": 4, "dog": 1}}),
    ]
    assert pseudo_per_pass(stages) == {"cat": 14.0, "dog": 1.0}
    assert pseudo_per_pass(stages[:1]) is None


def test_spans_follow_the_steps_of_stages_and_end_where_the_curve_does():
    stages = [trained(1, "train", steps=5), trained(1, "evaluate"), trained(2, "train", steps=3)]
    curve = [{"iteration": 4, "loss": 1.0}, {"iteration": 9, "loss": float("nan")}]
    run = run_of(None, stages=stages, curve=curve, under_way=(2, "calibrate"))
    spans = [(span.phase, span.stage, span.first, span.last) for span in training_spans(run)]
    assert spans == [(1, "train", 0, 5), (2, "train", 5, 8), (2, "calibrate", 8, 10)]
    steps, values = curve_of(run, "loss")
    assert (steps.tolist(), values.tolist()) == ([5], [1.0])  # what is not finite is dropped


def test_runs_that_differ_in_seeds_alone_are_one_group_with_its_interval():
    runs = [
        run_of(two_phases(kept=kept), f"sweep/cldetr/seed{seed}", settings=settings(SEED=seed))
        for seed, kept in enumerate((28.0, 30.0, 32.0))
    ]
    other = run_of(two_phases(), "sweep/k5", settings=settings(METHOD__MEMORY__BUDGET=0.5))
    groups = group_runs([*runs, other])
    assert [len(group.runs) for group in groups] == [3, 1]
    assert [group.label for group in groups] == ["cldetr (cldetr)", "cldetr (k5)"]
    mean, half = mean_of(groups[0].finals("old.AP"))
    assert mean == 30
    assert half == pytest.approx(4.303 * 2 / 3**0.5, rel=1e-3)  # Student's t with 2 degrees
    assert mean_of(groups[0].finals("fpp.AP")) == (10, pytest.approx(half))
    assert mean_of([1.0, 3.0]) == (2.0, None)
    assert mean_of([]) is None


def test_points_of_a_curve_are_means_over_the_same_runs():
    behind = two_phases(first=90)
    behind["phases"] = behind["phases"][:1]
    group = Group("x", (run_of(two_phases(40, 28, 50)), run_of(behind)))
    assert group.curve("old") == [(1, 40.0), (2, 28.0)]


def test_the_same_run_twice_is_no_repetition_over_seeds():
    runs = [run_of(two_phases(), f"{name}/run", settings=settings()) for name in "ab"]
    assert [group.label for group in group_runs(runs)] == ["cldetr (a/run)", "cldetr (b/run)"]


def test_unfinished_runs_show_their_phases_but_no_end(tiny_run):
    results = two_phases()
    results["phases"] = results["phases"][:1]
    from cldetr.report.rundir import read_run

    group = Group("x", (run_of(results, scenario=read_run(tiny_run).scenario),))
    assert group.curve("all") == [(1, 40.0)]
    assert group.finals("all.AP") == []
    assert group.finals("fpp.AP") == []


def test_the_curve_of_old_categories_begins_with_what_there_is_to_forget():
    group = Group("x", (run_of(two_phases(40, 28, 50)),))
    assert group.curve("old") == [(1, 40.0), (2, 28.0)]
    assert group.curve("new") == [(1, 40.0), (2, 50.0)]


def test_what_is_set_comes_with_its_default():
    ours = settings(SEED=3, MODEL__DETR__NUM_QUERIES=20, SCENARIO__NAME="70+10")
    assert settings_set(ours) == [("SEED", 0, 3), ("MODEL.DETR.NUM_QUERIES", 300, 20)]


def test_listed_categories_overrule_the_class_counts():
    ours = settings(SCENARIO__PHASES=[["cat"], ["dog"]])
    assert settings_set(ours) == [("SCENARIO.PHASES", [], [["cat"], ["dog"]])]
    several = settings(DATASETS__TRAIN=["a.json:x", "b.json:x"])
    assert [key for key, *_ in settings_set(several)] == ["DATASETS.TRAIN"]


def test_a_lazy_model_is_shown_in_place_of_the_keys_that_it_does_not_read():
    ours = settings(LAZY__model___target_="cldetr.X", MODEL__DETR__NUM_QUERIES=20)
    shown = {key: value for key, _, value in settings_set(ours)}
    assert shown["LAZY.model._target_"] == "cldetr.X"
    assert "MODEL.DETR.NUM_QUERIES" not in shown


def test_the_schedule_of_a_first_phase_that_was_taken_over_is_no_difference():
    given = settings(MODEL__DETECTOR="model.pth", SCHEDULE__FIRST__EPOCHS=3.0)
    assert settings_that_differ([settings(), given]) == {}
    trained = settings(SCHEDULE__FIRST__EPOCHS=3.0)
    assert settings_that_differ([settings(), trained]) == {"SCHEDULE.FIRST.EPOCHS": [50.0, 3.0]}


def test_settings_of_a_part_that_a_run_does_not_use_are_no_difference():
    plain = settings(
        METHOD__NAME="finetune",
        METHOD__MEMORY__ENABLED=False,
        METHOD__MEMORY__BUDGET=0.3,
        METHOD__CALIBRATE__ENABLED=False,
        SCHEDULE__CALIBRATE__EPOCHS=7.0,
    )
    found = settings_that_differ([settings(), plain, settings(SEED=7)])
    assert found == {
        "METHOD.MEMORY.ENABLED": [True, False, True],
        "METHOD.CALIBRATE.ENABLED": [True, False, True],
    }
    more = settings(METHOD__MEMORY__BUDGET=0.2)
    found = settings_that_differ([settings(), plain, more])
    assert found["METHOD.MEMORY.BUDGET"] == [0.1, None, 0.2]
