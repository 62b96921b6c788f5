"""The documentation runs: its Python is executed, its commands parse, its files and keys exist.

Commands are the lines of indented and fenced blocks and the code in backticks; what is written for
the reader to fill in is in capitals (RUN, DIR, FILE) or an ellipsis.
"""

import argparse
import contextlib
import functools
import importlib
import io
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from detectron2.config import CfgNode
from detectron2.modeling import META_ARCH_REGISTRY
from PIL import Image

from cldetr import cli, train
from cldetr.config import check_keys, default_config, leaves, load_config, merge_overrides
from cldetr.config_files import compose
from cldetr.data.datasets import READERS
from cldetr.data.exemplars import STRATEGIES
from cldetr.engine import IncrementalTrainer, default_argument_parser
from cldetr.errors import InputError
from cldetr.evaluation.average_precision import METRICS
from cldetr.evaluation.results import load_results
from cldetr.methods.distill import LOSSES
from cldetr.methods.pseudo import SELECTIONS

ROOT = Path(__file__).parents[1]
PAGES = [
    *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")),
    *(ROOT / name for name in ("configs/README.md", "datasets/README.md")),
    ROOT / "projects/CLDETR/README.md",
    *sorted((ROOT / "docs").glob("*.md")),
]
TABLES = (SELECTIONS, LOSSES, STRATEGIES, READERS, METRICS)
FOLDERS = (ROOT, ROOT / "projects/CLDETR", ROOT / "projects/CLDETR/cldetr")
MADE = ("RUN/", "DIR/", "output/", "weights/", "phase", "report/", "figures/", "pictures/")
MADE += ("diagnostics/", "~/", "my_", "/path/", "tensorboard/")
BLOCK = re.compile(r"^( *)```(\w*)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
ids = functools.partial(
    pytest.mark.parametrize, "page", ids=lambda page: str(page.relative_to(ROOT))
)


# What a page says


def blocks(text, language):
    """Contents of the fenced blocks in a language."""
    return [
        re.sub(rf"^{indent}", "", content, flags=re.MULTILINE)
        for indent, kind, content in BLOCK.findall(text)
        if kind == language
    ]


def named_blocks(text):
    """File name → content of the blocks whose first line is a comment with a file name."""
    found = [*blocks(text, "python"), *blocks(text, "yaml")]
    names = [re.match(r"# (\w+\.(?:py|yaml))\n", block) for block in found]
    return {name[1]: block for name, block in zip(names, found, strict=True) if name}


def command_lines(text):
    """Yields (command, whether it is complete): lines of blocks are, code in a sentence is not."""
    shell = "\n".join([*blocks(text, "bash"), *blocks(text, "sh")])
    text = BLOCK.sub("", text)
    indented = "\n".join(re.findall(r"(?:(?<=\n\n)|(?<=\n))    (.*)", text))
    for line in f"{shell}\n{indented}".replace("\\\n", " ").splitlines():
        yield re.split(r"\s+# ", line)[0].removesuffix(" &").strip(), True
    prose = re.sub(r"^    .*", "", text, flags=re.MULTILINE)
    for code in re.findall(r"`([^`]+)`", prose):
        yield " ".join(code.split()), False


def inline_code(text):
    return re.findall(r"`([^`\n]+)`", BLOCK.sub("", text))


# What may be wrong with it


def command_problem(command, complete=True):
    """What is wrong with a command line, None where nothing is or it is not one of ours."""
    try:
        words = shlex.split(re.sub(r"\$\([^)]*\)", "", command))
    except ValueError:
        return None
    while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
        words = words[1:]
    if words[:1] == ["train_net.py"] and len(words) > 1:
        return "train_net.py is not on the PATH: write python train_net.py"
    if "train_net.py" in words[1:]:
        return training_problem(words[words.index("train_net.py") + 1 :], complete)
    if words[:1] == ["cldetr"] and len(words) > 1:
        return tool_problem(words[1:], complete)
    if words[:1] == ["make"] and len(words) > 1:
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        unknown = {word for word in words[1:] if re.fullmatch("[a-z-]+", word)} - {*targets}
        return f"no target {', '.join(unknown)} in the Makefile" if unknown else None
    if words[:3] == ["python", "-m", "faults"]:
        campaigns = [word for word in words[3:] if re.fullmatch("[a-z]+", word)]
        unknown = [word for word in campaigns if not (ROOT / f"faults/{word}.py").exists()]
        return f"no campaign {', '.join(unknown)}" if unknown else None
    if words[:2] == ["python", "-m"]:
        found = importlib.util.find_spec(words[2])
        return None if found else f"no module {words[2]}"
    if words[:1] == ["python"]:
        return script_problem(words[1:])
    if words and words[0].startswith("benchmarks/"):
        return script_problem(words)
    if words[:1] == ["pytest"]:
        paths = [word for word in words[1:] if "/" in word and not (ROOT / word).exists()]
        return f"no file {', '.join(paths)}" if paths else None
    return None


def script_problem(words):
    if not words or words[0].startswith(MADE) or not words[0].endswith(".py"):
        return None
    path = ROOT / words[0]
    if not path.exists():
        return f"no file {words[0]}"
    source = path.read_text()
    unknown = [word for word in words[1:] if word.startswith("--") and f'"{word}"' not in source]
    return f"{words[0]} has no option {', '.join(unknown)}" if unknown else None


def training_problem(words, complete):
    problem, args = parse(default_argument_parser(), [word for word in words if word != "…"])
    if problem or (args.config_file == "" and complete):
        return problem or "no --config-file"
    path = args.config_file
    try:
        if not path or path.isupper() or path.startswith(("output/", "my_project")):
            merge_overrides(default_config(), args.opts)
        elif path == "my_config.py":  # changes a LazyConfig of ours
            load_config(str(ROOT / "configs/lazy/shapes.py"), args.opts)
        elif not (ROOT / path).exists():
            return f"no config {path}"
        else:
            check_keys(load_config(str(ROOT / path), args.opts))
    except InputError as error:
        return str(error)
    return None


def tool_problem(words, complete):
    words = [word for word in words[2 * (words[0] == "--import") :] if word != "…"]
    name, words = words[0], words[1:]
    if name not in cli.COMMANDS:
        return None if name.startswith("-") or name.isupper() else f"no command cldetr {name}"
    parser = argparse.ArgumentParser(prog=f"cldetr {name}")
    module = name.replace("-", "_")
    importlib.import_module(f"cldetr.commands.{module}").add_arguments(parser)
    if not complete:
        for action in parser._actions:
            action.required = False
            action.nargs = "*" if not action.option_strings else action.nargs
    problem, args = parse(parser, words)
    if problem:
        return problem
    try:
        if name == "configs":
            compose([config for config in args.names if not config.isupper()], args.set)
        elif name == "sweep":
            for config in args.configs:
                compose([config], args.set) if not config.endswith(".yaml") else None
            merge_overrides(default_config(), args.set)
    except InputError as error:
        return str(error)
    return None


def parse(parser, words):
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            return None, parser.parse_args(words)
    except SystemExit as end:
        return (said.getvalue() if end.code else None), argparse.Namespace()


def link_problems(page, text):
    for target in re.findall(r"\]\(([^)\s]+)\)", BLOCK.sub("", text)):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists():
            yield f"the link {target} leads nowhere"
        elif anchor and anchor not in anchors(file.read_text(encoding="utf-8")):
            yield f"{path or page.name} has no heading #{anchor}"


def anchors(text):
    headings = re.findall(r"^#+ (.*)", BLOCK.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title).lower().replace(" ", "-") for title in headings}


def file_problems(page, text):
    for code in inline_code(text):
        is_path = re.fullmatch(r"[\w.~/*-]+/[\w./*{},-]*\w", code) and "." in code
        if not is_path or code.startswith(MADE) or any(mark in code for mark in "*{"):
            continue
        if re.fullmatch(r".*\.(py|yaml|json|md|toml|sh|h|cpp|html)", code) and not any(
            (folder / code).exists() for folder in (*FOLDERS, page.parent)
        ):
            yield f"no file {code}"


def key_problems(text, known=None):
    """Configuration keys in backticks that do not exist."""
    known = known or {key for key, _ in leaves(default_config())}
    sections = {key.rpartition(".")[0] for key in known}
    sections |= {section.rpartition(".")[0] for section in sections}
    for code in inline_code(text):
        for key in re.findall(r"(?<![\w./])([A-Z]+(?:\.[A-Z_0-9]+)+)(?![\w.*])", code):
            if key.endswith((".", "README", ".MD")) or key.split(".")[0] not in default_config():
                continue
            if key not in known and key not in sections:
                yield f"unknown key {key}"


def page_problems(page, text):
    found = []
    for command, complete in command_lines(text):
        problem = command_problem(command, complete)
        if problem:
            found.append(f"{command}: {problem}")
    found += link_problems(page, text)
    if page.name != "CHANGELOG.md":  # it names what is gone
        found += file_problems(page, text)
    if page.name not in ("CHANGELOG.md", "configuration.md"):
        found += key_problems(text)
    return found


# Tests


@ids(PAGES)
def test_commands_links_files_and_keys_of_a_page_exist(page):
    assert not page_problems(page, page.read_text(encoding="utf-8"))


def test_commands_in_comments_of_configs_and_scripts_parse():
    files = [*(ROOT / "configs").rglob("*.yaml"), *(ROOT / "configs/lazy").glob("*.py")]
    files += [ROOT / "train_net.py", *(ROOT / "benchmarks").glob("*.py")]
    for file in files:
        head = re.match(r'(?:#.*\n|"""(?:.|\n)*?""")*', file.read_text(encoding="utf-8"))[0]
        text = re.sub("^#", " ", head, flags=re.MULTILINE)
        lines = [line for line, complete in command_lines(text) if complete]
        problems = [f"{line}: {problem}" for line in lines if (problem := command_problem(line))]
        assert not problems, file


def test_commands_of_the_makefile_parse():
    targets = ["demo", "ablation", "real", "bench", "doctor"]
    printed = subprocess.run(
        ["make", "-n", "-C", str(ROOT), "ENVIRONMENT=.", f"DATA={ROOT}", "AT_ONCE=2", *targets],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    lines = [
        line.strip() for line in printed.replace("\\\n", " ").replace("./bin/", "").splitlines()
    ]
    assert sum(line.startswith("cldetr sweep") for line in lines) >= 6
    problems = [f"{line}: {problem}" for line in lines if (problem := command_problem(line))]
    assert not problems


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        ("train_net.py --config-file configs/70_10.yaml", "not on the PATH"),
        ("python train_net.py --config-file configs/70_11.yaml", "no config"),
        ("python train_net.py --config-file configs/70_10.yaml --gpus 8", "unrecognized"),
        ("python train_net.py --config-file configs/70_10.yaml SOLVER.CLIP 0.1", "CLIP_GRADIENTS"),
        ("python train_net.py --config-file configs/70_10.yaml SOLVER.MAX_ITER 9", "not used"),
        ("python train_net.py --config-file configs/lazy/70_10.py method.pseudo.kk=5", "kk"),
        ("torchrun --nnodes 2 train_net.py --config-file configs/none.yaml", "no config"),
        ("OMP_NUM_THREADS=1 python train_net.py --config-file configs/a.yaml", "no config"),
        ("cldetr predikt --out DIR", "no command"),
        ("cldetr --import my_rule reprot RUN", "no command"),
        ("cldetr predict --weights model.pth --outt DIR IMAGES", "--out"),
        ("cldetr predict IMAGES", "required"),
        ("cldetr sweep --table 9 --out DIR", "invalid choice"),
        ("cldetr sweep 70_10_lwff --out DIR", "70_10_lwf"),
        ("cldetr configs shapes --set METHOD.K 5", "METHOD"),
        ("make tests", "no target"),
        ("python -m faults kil", "no campaign"),
        ("python -m cldetr.trian", "no module"),
        ("python benchmarks/none.py", "no file"),
        ("python benchmarks/op.py --repeats 3", "no option"),
        ("pytest tests/none", "no file"),
    ],
)
def test_a_wrong_command_is_found(wrong, expected):
    page = ROOT / "README.md"
    (problem,) = page_problems(page, f"Run\n\n    {wrong}  # as here\n\nor not.\n")
    assert expected in problem


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        ("Use `cldetr predict --wieghts model.pth`.", "unrecognized"),
        ("Or `make tests`.", "no target"),
        ("See [there](docs/none.md).", "leads nowhere"),
        ("See [there](docs/methods.md#none).", "no heading"),
        ("It is in `cldetr/engine/none.py`.", "no file"),
        ("Set `SOLVER.CLIP` to 0.1.", "unknown key"),
        ("Add `METHOD.PSEUDO.KK 5`.", "unknown key"),
    ],
)
def test_a_wrong_word_in_a_sentence_is_found(wrong, expected):
    (problem,) = page_problems(ROOT / "README.md", wrong)
    assert expected in problem


def test_wrong_yaml_is_found():
    with pytest.raises(InputError, match=r"unknown key METHOD\.PSEUDO\.KK"):
        check_yaml({"METHOD": {"PSEUDO": {"KK": 5}}})


def check_yaml(content):
    overrides = [
        word
        for key, value in leaves(content)
        if key != "_BASE_"
        for word in (key, yaml.safe_dump(value, default_flow_style=True).replace("...\n", ""))
    ]
    merge_overrides(default_config(), overrides)


@ids([page for page in PAGES if blocks(page.read_text(encoding="utf-8"), "yaml")])
def test_keys_of_yaml_blocks_exist(page):
    for block in blocks(page.read_text(encoding="utf-8"), "yaml"):
        check_yaml(yaml.safe_load(block))


def test_the_reference_of_keys_is_what_its_command_prints():
    printed = runpy.run_path(str(ROOT / "tools/config_reference.py"))["page"]()
    stored = (ROOT / "docs/configuration.md").read_text(encoding="utf-8")
    assert stored == printed, "run: python tools/config_reference.py > docs/configuration.md"
    missing = [
        key
        for key, _ in leaves(default_config())
        if key.startswith(("SCENARIO.", "METHOD.PSEUDO", "MODEL.DETR.")) and key not in stored
    ]
    assert not missing


def test_the_tables_of_the_ablation_are_what_their_commands_print(tmp_path, monkeypatch, capsys):
    """From the runs beside the page, which are refused where a setting has changed since."""
    monkeypatch.chdir(ROOT)
    page = (ROOT / "docs/ablation.md").read_text()
    commands = [line for line, complete in command_lines(page) if complete and "--runs" in line]
    assert len(commands) == 2
    for command in commands:
        words = shlex.split(command)
        assert "--table-only" in words
        words[words.index("--out") + 1] = str(tmp_path)
        assert cli.main(words[1:]) == 0
        printed = capsys.readouterr().out
        assert "Not in the table" not in printed
        table = "".join(line + "\n" for line in printed.splitlines() if line.startswith("|"))
        assert table.count("\n") > 20
        assert table in page


def test_the_readme_gives_a_reason_for_every_dependency():
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    listed = project.partition("\ndependencies = [")[2].partition("[project.scripts]")[0]
    names = {*re.findall(r'"([a-z][a-z0-9-]*)>=', listed)}
    assert len(names) > 15
    table = (ROOT / "README.md").read_text(encoding="utf-8").partition("## Dependencies")[2]
    rows = re.findall(r"^\| ([^|]+) \| [^|]{5,} \|", table, re.MULTILINE)
    assert names - {name for row in rows for name in row.split(", ")} == set()


@pytest.fixture
def tables():
    """Puts back what guides enter in tables and registries."""
    before = [dict(table) for table in TABLES]
    detector = META_ARCH_REGISTRY._obj_map.pop("DenoisingDETR", None)
    yield
    for table, content in zip(TABLES, before, strict=True):
        table.clear()
        table.update(content)
    META_ARCH_REGISTRY._obj_map.pop("DenoisingDETR", None)
    if detector is not None:
        META_ARCH_REGISTRY.register(detector)


GUIDES = {  # the files of a guide → keys that the tiny run takes from its config
    "my_rule": ["METHOD.PSEUDO.SELECT"],
    "my_loss": ["METHOD.DISTILL.ENABLED", "METHOD.DISTILL.LOSS"],
    "my_strategy": ["METHOD.MEMORY.STRATEGY"],
    "my_detector": ["MODEL.META_ARCHITECTURE"],
    "my_format": [],
    "my_metric": [],
}


@pytest.mark.parametrize("name", GUIDES)
def test_a_guide_works_as_written(name, tables, tiny_run, tmp_path, monkeypatch):
    """Its test passes, its config is read, and a small run with it goes through all stages."""
    pages = "".join((ROOT / f"docs/{page}.md").read_text() for page in ("methods", "extending"))
    files = {file: text for file, text in named_blocks(pages).items() if name in file}
    assert sorted(files) == [f"{name}.py", f"{name}.yaml", f"test_{name}.py"]
    for file, text in files.items():
        (tmp_path / file).write_text(text)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    module = importlib.import_module(f"test_{name}")
    monkeypatch.delitem(sys.modules, f"test_{name}")
    monkeypatch.delitem(sys.modules, name)
    tests = [test for key, test in vars(module).items() if key.startswith("test_")]
    assert len(tests) == 1
    tests[0](*[tmp_path] * tests[0].__code__.co_argcount)

    cfg = load_config(f"{name}.yaml")
    check_keys(cfg)
    small = load_config(str(tiny_run / "config.yaml"), ["OUTPUT_DIR", str(tmp_path / "run")])
    small.SCHEDULE.FIRST.MAX_STEPS = small.SCHEDULE.TRAIN.MAX_STEPS = 2
    chosen = dict(leaves(cfg))
    for key in GUIDES[name]:
        *parents, leaf = key.split(".")
        node = functools.reduce(CfgNode.__getitem__, parents, small)
        node[leaf] = chosen[key]
    if not GUIDES[name] and name != "my_metric":
        return
    results = IncrementalTrainer(small).train()
    assert results["phases"][1]["all"].keys() == METRICS.keys()


def test_every_python_block_is_run_by_a_test():
    runner = (ROOT / "tests/engine/test_project.py").read_text(encoding="utf-8")
    told = re.findall(r'code_block\("python", "([^"]+)"\)', runner)
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        named = [*named_blocks(text).values()]
        for block in blocks(text, "python"):
            is_run = block in named or any(word in block for word in told)
            is_run |= page.stem in ("training", "predict")  # below
            is_run |= page.stem == "huggingface"  # tests/engine/test_huggingface_run.py
            assert is_run, f"no test runs this block of {page.name}:\n{block}"


@pytest.fixture
def folder(tiny_run, tmp_path, monkeypatch):
    """A folder with what the examples take: RUN, model.pth, photo.png and so on."""
    shapes = tiny_run.parent / "shapes"
    shutil.copytree(tiny_run, tmp_path / "RUN")
    (tmp_path / "model.pth").symlink_to(tiny_run / "phase2/calibrate/model.pth")
    (tmp_path / "IMAGES").symlink_to(shapes / "images/val")
    (tmp_path / "instances.json").symlink_to(shapes / "annotations/instances_val.json")
    Image.new("RGB", (64, 64), "gray").save(tmp_path / "photo.png")
    (tmp_path / "data.yaml").write_text("train: .\nnames: [cat]\n")
    (tmp_path / "photo.txt").write_text("0 0.5 0.5 0.25 0.25\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_python_of_the_training_page_runs(folder, capsys):
    (block,) = blocks((ROOT / "docs/training.md").read_text(encoding="utf-8"), "python")
    exec(block, {})
    assert (folder / "RUN2/results.json").exists()
    assert 0 <= float(capsys.readouterr().out.split()[-1]) <= 100


def test_the_python_of_the_prediction_page_runs(folder):
    text = (ROOT / "docs/predict.md").read_text(encoding="utf-8")
    first, second, third = blocks(text, "python")
    space = {}
    exec(first.replace("score=0.5", "score=0.0"), space)
    assert len(space["found"].box) == 4
    exec(second, space)
    (command,) = re.findall("^    cldetr (export.*)", text, re.MULTILINE)
    assert cli.main(shlex.split(command.replace("480 640", "64 64"))) == 0
    exec(third.replace("480, 640", "64, 64"), space)
    assert len(space["boxes"]) == len(space["scores"]) == len(space["labels"])
    assert len(space["classes"]) == 4


@pytest.mark.parametrize(
    "command", ["configs", "exemplars", "convert-data", "predict", "report", "pictures"]
)
def test_a_command_of_the_readme_runs(command, folder, capsys):
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (line,) = re.findall(rf"\| `(cldetr {command}[^`]*)` \|", text)
    assert cli.main(shlex.split(line)[1:]) == 0, capsys.readouterr().err


# What makes the commands of the tutorial end in seconds.
SHORTER = {
    "cldetr shapes": "--images 60 --val 10 --size 64",
    "python train_net.py": "SCHEDULE.FIRST.MAX_STEPS 2 REPORT False LOG_IMAGES 0",
    "cldetr add": "--set SCHEDULE.TRAIN.MAX_STEPS 2 SCHEDULE.CALIBRATE.MAX_STEPS 2 REPORT False "
    "LOG_IMAGES 0",
}


def test_the_tutorial_runs_as_printed(tmp_path, monkeypatch, capsys):
    """All its commands one after the other, on fewer images and with fewer steps."""
    text = (ROOT / "docs/add_a_class.md").read_text(encoding="utf-8")
    lines = "\n".join(blocks(text, "bash")).replace("\\\n", " ").splitlines()
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    monkeypatch.chdir(tmp_path)
    for line in filter(str.strip, lines):
        more = [words for start, words in SHORTER.items() if line.startswith(start)]
        words = shlex.split(" ".join([line, *more]))
        if words[0] == "cd":
            monkeypatch.chdir(words[1])
        elif words[0] == "cldetr":
            assert cli.main(words[1:]) == 0, (line, capsys.readouterr().err)
        elif words[:2] == ["python", "train_net.py"]:
            assert train.run(words[2:]) == 0, (line, capsys.readouterr().err)
        else:
            assert words[0] in ("cp", "rm")
            subprocess.run(words, check=True)
    results = load_results("output/tutorial/arrow/results.json")
    assert results["scenario"] == "8+1"
    assert [*results["phases"][1]["per_category"]][-2:] == ["crescent", "arrow"]
