"""A run directory is read as far as it goes; what is missing is absent, what is broken is named."""

import json
import shutil

import pytest

from cldetr.errors import InputError
from cldetr.report.pages import write_run_page
from cldetr.report.rundir import find_runs, read_run
from cldetr.report.tables import training_spans


@pytest.fixture
def copy(tiny_run, tmp_path):
    """A copy of the tiny run, without its weights, to be spoilt."""
    folder = tmp_path / "run"
    shutil.copytree(tiny_run, folder, ignore=shutil.ignore_patterns("*.pth", "tensorboard"))
    return folder


def test_a_finished_run_is_read_whole(tiny_run):
    run = read_run(tiny_run)
    assert run.problems == []
    assert run.finished
    assert run.under_way is None
    assert run.results == json.loads((tiny_run / "results.json").read_text())
    assert [(stage.phase, stage.name) for stage in run.stages] == [
        *((1, name) for name in ("train", "select", "evaluate")),
        *((2, name) for name in ("train", "select", "calibrate", "evaluate")),
    ]
    assert run.scenario_name == "3+1"
    assert len(run.memory.phases) == 2
    assert run.audit["phases"][0]["classes"] == 3
    assert set(run.starts[0]["versions"]) >= {"cldetr", "torch", "detectron2"}
    assert run.confusion == json.loads((tiny_run / "phase2/evaluate/confusion.json").read_text())
    assert run.confusion["phases"] == [1, 1, 1, 2]
    assert list(run.curves) == [1, 2]
    steps = sum(stage.steps for stage in run.stages)
    assert run.curve[-1]["iteration"] == steps - 1
    assert [span.last for span in training_spans(run)][-1] == steps


def test_a_run_that_goes_on_shows_the_phases_that_are_evaluated(copy):
    whole = json.loads((copy / "results.json").read_text())
    for name in ("results.json", "results.csv"):
        (copy / name).unlink()
    for name in ("evaluate", "calibrate"):
        (copy / "phase2" / name / "stage.json").unlink()
    shutil.rmtree(copy / "phase2/evaluate")
    run = read_run(copy)
    assert not run.finished
    assert run.under_way == (2, "calibrate")
    assert run.results["phases"] == whole["phases"][:1]
    assert run.results["fpp"] is None
    assert training_spans(run)[-1].stage == "calibrate"
    assert run.problems == []


def test_a_run_that_has_just_begun_has_nothing_but_its_config(copy):
    for path in list(copy.iterdir()):
        if path.name != "identity.json":
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    run = read_run(copy)
    assert run.method == "cldetr"
    assert (run.results, run.scenario, run.memory, run.audit) == (None, None, None, None)
    assert (run.stages, run.curve, run.problems, run.finished) == ([], [], [], False)


@pytest.mark.parametrize(
    "name",
    [
        "identity.json",
        "manifest.json",
        "audit.json",
        "starts.json",
        "results.json",
        "phase1/train/stage.json",
        "phase2/select/memory.json",
        "phase2/evaluate/metrics.json",
        "phase2/evaluate/confusion.json",
        "phase2/evaluate/precision_recall.json",
    ],
)
@pytest.mark.parametrize("damage", ["cut off", "another shape", "no text"])
def test_a_broken_file_is_named_and_the_rest_is_read(copy, name, damage):
    path = copy / name
    content = path.read_bytes()
    spoilt = {
        "cut off": content[: len(content) // 2],
        "another shape": b'{"format": 1, "phase": 1}',
    }
    path.write_bytes(spoilt.get(damage, b"\xff\xfe\x00"))
    run = read_run(copy)
    assert any(name.rsplit("/", 1)[-1] in problem for problem in run.problems)
    assert len(run.problems) == 1
    assert str(copy) not in run.problems[0]
    assert run.results is not None or name == "identity.json"
    assert run.finished or name == "phase2/evaluate/metrics.json" or name == "manifest.json"


def test_a_matrix_or_curves_of_another_size_are_named_and_not_drawn(copy, tmp_path):
    for name, key in (("confusion", "counts"), ("precision_recall", "AP50")):
        path = copy / f"phase2/evaluate/{name}.json"
        content = json.loads(path.read_text())
        content[key][1] = [0]
        path.write_text(json.dumps(content))
    run = read_run(copy)
    assert len(run.problems) == 2
    assert run.confusion["phase"] == 1
    assert list(run.curves) == [1]
    write_run_page(run, tmp_path / "page")


def test_a_run_from_before_a_metric_is_read_and_drawn_without_it(copy, tmp_path):
    for path in (copy / "results.json", *copy.glob("phase*/evaluate/metrics.json")):
        content = json.loads(path.read_text())
        for entry in content.get("phases", [content]):
            for scores in (entry["all"], entry["new"], *entry["per_category"].values()):
                del scores["AP75"]
        path.write_text(json.dumps(content))
    run = read_run(copy)
    assert run.problems == []
    assert "<td>n/a</td>" in write_run_page(run, tmp_path / "page").read_text()


def test_curves_take_the_later_of_repeated_steps_and_count_broken_lines(copy):
    lines = ['{"iteration": 0, "lr": 1}', "nonsense", '{"iteration": 1, "lr": 2}']
    lines += ['{"iteration": 0, "lr": 3}', "[]", '{"iteration": 2, "l']  # the last is being written
    (copy / "metrics.json").write_text("\n".join(lines))
    run = read_run(copy)
    assert [(point["iteration"], point["lr"]) for point in run.curve] == [(0, 3), (1, 2)]
    assert run.problems == ["metrics.json: 2 of 6 lines cannot be read"]


def test_runs_are_found_in_the_folder_of_a_sweep(copy, tmp_path):
    for seed in (10, 9):
        shutil.copytree(copy, tmp_path / "sweep" / "cldetr" / f"seed{seed}")
    assert [run.name for run in find_runs([tmp_path / "sweep"])] == ["seed9", "seed10"]
    assert find_runs([copy]) == [copy]


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(InputError, match="contains no run"):
        find_runs([tmp_path])
    with pytest.raises(InputError, match="not a folder"):
        find_runs([tmp_path / "absent"])
    with pytest.raises(InputError, match="is not a run directory"):
        read_run(tmp_path)


def test_pictures_come_with_their_captions(copy):
    (copy / "pictures").mkdir()
    for name in ("b_2.png", "b_10.png", "a.png", "phase1_x.png", "phase2_x.png", "notes.txt"):
        (copy / "pictures" / name).write_bytes(b"")
    (copy / "pictures/captions.json").write_text('{"a.png": "What the teacher sees"}')
    found = [(path.name, caption) for path, caption in read_run(copy).pictures]
    assert found == [
        ("phase2_x.png", "phase2 x"),
        ("phase1_x.png", "phase1 x"),
        ("a.png", "What the teacher sees"),
        ("b_2.png", "b 2"),
        ("b_10.png", "b 10"),
    ]
