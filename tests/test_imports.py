"""Holds the direction of imports that CONTRIBUTING.md states, and the size of what is imported."""

import ast
import functools
import shutil
from pathlib import Path

import pytest

import cldetr

ROOT = Path(cldetr.__file__).parent
MAX_IMPORTS = 20  # modules of this project that one module imports
MAX_LINES = 80  # of a function

# Each part of the package, with the parts that it may import besides itself and those that these
# may import. A new module at the top of the package takes its place here.
MAY_IMPORT = {
    "errors": (),
    "files": ("errors",),
    "published": ("errors",),
    "settings": ("published",),
    "grouping": ("published",),
    "scenario": ("grouping", "files"),
    "data": ("scenario", "settings"),
    "layers": ("files",),
    "modeling": ("layers",),
    "methods": ("modeling",),
    "lazy": ("settings", "methods"),
    "config": ("lazy", "data"),
    "config_files": ("config",),
    "evaluation": ("data",),
    "drawing": ("methods",),
    "engine": ("config_files", "evaluation", "drawing"),
    "analysis": ("engine",),
    "report": ("analysis",),
    "doctor": ("engine",),
    "gpu_check": ("doctor",),
    "train": ("report",),
    "commands": ("train", "gpu_check"),
    "cli": ("commands",),
}


def allowed(part):
    """The parts that a part may import."""
    return {part}.union(*map(allowed, MAY_IMPORT.get(part, ())))


def module_names(root):
    """The modules of the package by their names, without `cldetr.`; a package has its folder's."""
    paths = {path.relative_to(root).with_suffix(""): path for path in root.rglob("*.py")}
    names = {".".join(name.parts).removesuffix("__init__").rstrip("."): name for name in paths}
    return {name: paths[path] for name, path in names.items() if name}


def imported(tree, modules):
    """Modules of the package that a module imports, anywhere in it, also inside functions.

    An operator of the compiled library counts: `cldetr.layers` loads it.
    """
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            whole = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= {
                name if name.removeprefix("cldetr.") in modules else node.module for name in whole
            }
        elif (
            isinstance(node, ast.Attribute)
            and node.attr == "cldetr"
            and ast.unparse(node.value) == "torch.ops"
        ):
            names.add("cldetr.layers")
    names = {name.removeprefix("cldetr.") for name in names if name.startswith("cldetr.")}
    return {name for name in names if name in modules}


@functools.cache
def read(text, modules):
    """What a module imports, and the lines of its functions."""
    tree = ast.parse(text)
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    functions = [node for node in ast.walk(tree) if isinstance(node, kinds)]
    lines = [(node.name, node.end_lineno - node.lineno + 1) for node in functions]
    return imported(tree, modules), lines


def find_problems(root):
    """Everything that is wrong with the imports and sizes of a copy of the package."""
    paths = module_names(root)
    found = {name: read(path.read_text("utf-8"), frozenset(paths)) for name, path in paths.items()}
    edges = {name: imports - {name} for name, (imports, _) in found.items()}
    problems = []
    for name, imports in edges.items():
        part = name.partition(".")[0]
        if part not in MAY_IMPORT:
            problems.append(f"{part} has no place in MAY_IMPORT")
        wrong = sorted(each for each in imports if each.partition(".")[0] not in allowed(part))
        problems += [f"{name} imports {each}" for each in wrong]
        if len(imports) > MAX_IMPORTS:
            problems.append(f"{name} imports {len(imports)} modules")
    for name, (_, functions) in found.items():
        for function, lines in functions:
            if lines > MAX_LINES:
                problems.append(f"{name}.{function} has {lines} lines")
    return problems + [f"cycle: {' → '.join(cycle)}" for cycle in find_cycles(edges)]


def find_cycles(edges):
    """One cycle of modules for each edge that closes one, found by a walk in depth."""
    cycles, done = [], set()

    def walk(name, path):
        if name in path:
            cycles.append([*path[path.index(name) :], name])
        elif name not in done:
            for other in sorted(edges[name]):
                walk(other, [*path, name])
            done.add(name)

    for name in edges:
        walk(name, [])
    return cycles


def test_the_package_keeps_the_rules():
    assert find_problems(ROOT) == []


def test_the_table_names_what_is_there():
    assert MAY_IMPORT.keys() == {name.partition(".")[0] for name in module_names(ROOT)}


MANY = "\n".join(f"import cldetr.{name}" for name in sorted(module_names(ROOT))[:30])
LONG = "def long():\n" + "    pass\n" * 80
PLANTED = [
    ("modeling/detr.py", "import cldetr.methods.learner", "modeling.detr imports methods.learner"),
    ("modeling/detr.py", "from cldetr import data", "modeling.detr imports data"),
    ("data/coco.py", "from cldetr.methods import pseudo", "data.coco imports methods.pseudo"),
    ("data/coco.py", "from cldetr.config import load_config", "data.coco imports config"),
    ("data/coco.py", "import torch\ntorch.ops.cldetr.f()", "data.coco imports layers"),
    (
        "engine/ledger.py",
        "def f():\n    from cldetr.analysis.predict import Predictor",
        "engine.ledger imports analysis.predict",
    ),
    ("analysis/predict.py", "import cldetr.report.pages", "analysis.predict imports report.pages"),
    ("report/pages.py", "from cldetr.commands import demo", "report.pages imports commands.demo"),
    ("engine/ranks.py", "from cldetr.engine import trainer", "cycle: "),
    ("layers/boxes.py", LONG, "layers.boxes.long has 81 lines"),
    ("cli.py", MANY, "cli imports "),
    ("extra.py", "", "extra has no place in MAY_IMPORT"),
]


@pytest.mark.parametrize(("file", "source", "problem"), PLANTED, ids=[row[2] for row in PLANTED])
def test_what_breaks_a_rule_is_found(tmp_path, file, source, problem):
    copy = tmp_path / "cldetr"
    shutil.copytree(
        ROOT, copy, ignore=lambda folder, names: {"csrc", "_lib", "configs", "templates"}
    )
    path = copy / file
    path.write_text(f"{path.read_text('utf-8') if path.exists() else ''}\n{source}\n", "utf-8")
    found = find_problems(copy)
    assert any(each.startswith(problem) for each in found), found
