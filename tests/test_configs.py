"""The configs: all load, names are unique, compositions say what they compute."""

import functools
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from detectron2.config import CfgNode

from cldetr.cli import main
from cldetr.config import check_keys, identity, leaves, load_config, method_of, schedule_of
from cldetr.config_files import (
    CONFIGS,
    compose,
    config_files,
    dump_changes,
    find_config,
    folder_names,
    named_runs,
    part_from,
    parts_of,
)
from cldetr.errors import InputError
from cldetr.published import published_orders, published_scenarios
from cldetr.report.sweep_table import paper_tables

LAZY = sorted(path.stem for path in (CONFIGS / "lazy").glob("*.py"))
TWINS = [name for name in LAZY if (CONFIGS / f"{name}.yaml").exists()]
ROOT = Path(__file__).parents[1]
# Runs that are in no table of the paper: published scenarios and class orders.
PUBLISHED = [
    name
    for name in named_runs()
    if "/" in compose([name]).SCENARIO.NAME or name.endswith(("_erd_split", "_psedet_order"))
]


@pytest.mark.parametrize("name", [*config_files(), *named_runs()])
def test_every_config_loads_and_its_file_gives_the_same_run(name, tmp_path):
    """Composed by name, read from its file, and written out as the keys that are not default."""
    cfg = compose([name])
    check_keys(cfg)
    if name in config_files():
        assert identity(load_config(str(find_config(name)))) == identity(cfg)
    written = tmp_path / "written.yaml"
    written.write_text(dump_changes(cfg), encoding="utf-8")
    assert identity(load_config(str(written))) == identity(cfg)


def test_names_are_unique_and_files_few():
    paths = [path for path in (ROOT / "configs").rglob("*") if path.suffix in (".yaml", ".py")]
    stems = [path.stem for path in paths if path.suffix == ".yaml"]
    assert len(set(stems)) == len(stems)
    assert not set(stems) & set(named_runs())
    whole = [path for path in paths if path.parent == ROOT / "configs"]  # others are parts
    assert len(whole) <= 16, "write a run into runs.yaml, or a part that others can use"


def test_runs_are_well_formed():
    content = yaml.safe_load((CONFIGS / "runs.yaml").read_text(encoding="utf-8"))
    for name, run in content["runs"].items():
        assert isinstance(name, str), f"{name} is a number to YAML: quote it"
        assert {"parts", "about"} <= run.keys() <= {"parts", "about", "set"}, name
        assert all(isinstance(part, str) for part in run["parts"]), f"{name}: quote its parts"
        assert all(dict(leaves(compose([name]))).keys() >= {key} for key in named_runs()[name].keys)


def test_every_run_says_its_detector_and_data_and_is_in_a_table():
    """Runs of published scenarios are in no table: nothing of the paper is beside them."""
    no_row = (*PUBLISHED, "40_40_joint", "photographs_pretrain", "ablation_joint_4_phases")
    shown = {row.run for table in paper_tables().values() for row in table.rows}
    for name in named_runs():
        assert part_from("detector", name), name
        assert part_from("data", name), name
        assert name in shown or name in no_row, f"{name} is in no table"
    assert len({str(identity(compose([name]))) for name in named_runs()}) == len(named_runs())


@functools.cache
def keys_of_file(name):
    return dict(leaves(CfgNode.load_yaml_with_base(str(find_config(name)))))


@pytest.mark.parametrize("name", folder_names("method"))
def test_a_method_is_the_same_over_every_other(name):
    """A method part says all that it does not do, so the order of parts does not matter."""
    own = keys_of_file(name)
    for other in folder_names("method"):
        assert {**keys_of_file(other), **own} == own, other
    assert method_of(compose(["shapes", name])).name == compose([name]).METHOD.NAME


def test_a_method_leaves_nothing_of_a_run_before_it():
    for name, run in named_runs().items():
        kept = {key for key in run.keys if key.startswith("METHOD.")}
        assert kept <= keys_of_file("finetune").keys(), name


@pytest.mark.parametrize(
    ("other", "name"),
    [
        ("response", "sikd"),  # TEMPERATURE
        ("sikd", "lwf"),  # WEIGHT
        ("psedet", "dkd"),  # CALIBRATED, which excludes SOFT
        ("released", "icarl"),  # REPLAY, UNSEEN
        ("completion", "cldetr"),  # COMPLETE
        ("dyq", "joint"),  # QUERY_GROUPS
        ("70_10_k5_exact", "dkd"),  # FOREGROUND
    ],
)
def test_a_composed_method_is_the_method_alone(other, name):
    found, alone = (identity(compose(parts)) for parts in (["70_10", other, name], ["70_10", name]))
    assert found == alone


def test_parts_compose_with_overrides():
    cfg = compose(["deformable_detr_r50", "coco", "strict_40_40", "lwf"], ["SEED", "3"])
    assert (cfg.SCENARIO.NAME, cfg.METHOD.NAME, cfg.SEED) == ("40+40", "lwf", 3)
    assert method_of(cfg).distill.loss == "lwf"
    assert method_of(cfg).pseudo is None
    assert parts_of("70_10_k20_exact") == [
        *("deformable_detr_r50", "coco", "strict_70_10"),
        *("finetune", "cldetr"),  # which is based on it
        *("70_10", "70_10_k20", "70_10_k20_exact"),
    ]


def test_released_is_the_released_command():
    """4 GPUs × 2 images, 50 epochs, then 10 at 2e-5 and 10 at 2e-6; top-10 pairs, hard labels."""
    cfg = load_config(str(find_config("70_10_released")))
    method, schedule = method_of(cfg), schedule_of(cfg)
    assert (cfg.SOLVER.IMS_PER_BATCH, cfg.SOLVER.BASE_LR, cfg.SCENARIO.ORDER) == (
        8,
        2e-4,
        "released",
    )
    assert schedule.train.steps(14785 // 8) == 92_400
    assert (schedule.train.epochs, schedule.train.drops) == (50, (40,))
    calibrate = schedule.calibrate
    assert (calibrate.epochs, calibrate.drops, calibrate.lr_scale) == (20, (10,), 0.1)
    assert (method.pseudo.select, method.pseudo.k, method.pseudo.soft) == ("pairs", 10, False)
    assert (method.pseudo.iou, method.pseudo.drop_at_iou) == (0.7, True)
    assert (method.pseudo.any_class, method.pseudo.skip_annotated) == (True, False)
    assert (method.memory.strategy, method.memory.replay) == ("released", False)
    assert (method.unseen, cfg.TEST.RESTRICT_IMAGES) == ("negative", True)
    assert cfg.DATALOADER.FILTER_EMPTY_ANNOTATIONS
    assert not cfg.MODEL.DETR.EXACT_PADDING


def test_the_released_branch_of_40_40_labels_with_five_pairs():
    cfg = compose(["40_40_released"])
    assert (cfg.SCENARIO.NAME, cfg.SCENARIO.ORDER, cfg.METHOD.PSEUDO.K) == ("40+40", "released", 5)
    assert (cfg.SOLVER.IMS_PER_BATCH, cfg.TEST.RESTRICT_IMAGES) == (8, True)


def test_several_phases_are_there_in_both_readings():
    for name in ("40_20x2", "40_10x4"):
        erd, strict = compose([name]).SCENARIO, compose([f"{name}_strict"]).SCENARIO
        assert (erd.PROTOCOL, erd.ORDER) == ("traditional", "id")
        assert (strict.PROTOCOL, strict.ORDER) == ("strict", "seed")
        assert erd.NAME == strict.NAME == name.replace("_", "+")


def test_every_published_scenario_has_a_config():
    runs = ["voc_19_1", *PUBLISHED]
    named = {compose([name]).SCENARIO.NAME for name in runs}
    assert {name for name in named if "/" in name} == published_scenarios().keys()
    orders = {compose([name]).SCENARIO.ORDER for name in runs}
    assert orders >= {"id", *published_orders()}
    for name in runs:
        cfg = compose([name])
        assert cfg.SCENARIO.NAME.startswith("voc/") == cfg.TEST.VOC_METRICS


@pytest.mark.parametrize("name", TWINS)
def test_a_lazy_twin_has_the_settings_of_its_yaml_file(name):
    """All but the model, which one describes by keys and the other by its constructor."""
    twins = [find_config(name), find_config(f"lazy/{name}.py")]
    settings = [identity(load_config(str(path))) for path in twins]
    for found in settings:
        for key in [key for key in found if key.startswith(("MODEL.", "LAZY."))]:
            if key not in ("MODEL.WEIGHTS", "MODEL.DETECTOR"):
                del found[key]
    assert settings[0] == settings[1]


def test_lazy_files_are_twins_or_what_twins_share():
    assert TWINS == ["70_10", "add", "custom", "custom_small", "shapes"]
    assert set(LAZY) - set(TWINS) == {"coco", "deformable_detr_r50"}


def test_configs_are_found_by_name():
    assert find_config("70_10") == find_config("70_10.yaml") == CONFIGS / "70_10.yaml"
    assert find_config("lwf") == CONFIGS / "method/lwf.yaml"
    with pytest.raises(InputError, match="did you mean shapes"):
        find_config("shape")
    with pytest.raises(InputError, match="cldetr configs 70_10_lwf --write"):
        find_config("70_10_lwf")


def test_the_command_lists_and_composes(tmp_path, capsys):
    assert main(["configs"]) == 0
    lines = capsys.readouterr().out.splitlines()
    (line,) = [line for line in lines if line.startswith("70_10_lwf ")]
    assert line.split()[1:6] == ["lwf", "70+10", "strict", "deformable_detr_r50", "coco"]
    assert "1, 2, S-oracles" in line
    assert {line.split()[0] for line in lines if line} >= {*config_files(), *named_runs()}
    out = tmp_path / "mine.yaml"
    assert main(["configs", "shapes", "icarl", "--set", "SEED", "3", "--write", str(out)]) == 0
    assert identity(load_config(str(out))) == identity(compose(["shapes", "icarl"], ["SEED", "3"]))
    assert main(["configs", "70_10_lfw"]) == 2
    assert "70_10_lwf" in capsys.readouterr().err


def test_a_composed_config_starts(tmp_path):
    """Up to the data, which is not there."""
    out = tmp_path / "mine.yaml"
    assert main(["configs", "ablation_lwf", "--write", str(out)]) == 0
    words = [sys.executable, "-m", "cldetr.train", "--config-file", str(out)]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2
    assert "instances_train.json" in done.stderr
