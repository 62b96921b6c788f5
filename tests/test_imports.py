"""Holds the direction of imports that CONTRIBUTING.md states."""

import ast
from pathlib import Path

import pytest

import cldetr

ROOT = Path(cldetr.__file__).parent

# Each part of the package, with the parts that it may import besides itself and those that these
# may import. A new module at the top of the package takes its place here.
MAY_IMPORT = {
    "errors": (),
    "files": ("errors",),
    "grouping": ("errors",),
    "scenario": ("grouping", "errors", "files"),
    "data": ("scenario",),
    "layers": ("errors", "files"),
    "modeling": ("layers",),
    "methods": ("modeling",),
    "config": ("data", "methods"),
    "config_files": ("config",),
    "drawing": ("methods",),
    "engine": ("config_files", "config", "data", "methods", "drawing"),
    "analysis": ("engine",),
    "report": ("analysis",),
    "doctor": ("engine",),
    "train": ("report",),
    "commands": ("report", "doctor"),
    "cli": ("commands",),
}


def part_of(path: Path) -> str:
    first = path.relative_to(ROOT).parts[0]
    return first.removesuffix(".py")


def allowed(part: str) -> set[str]:
    found = {part}
    for other in MAY_IMPORT[part]:
        found |= allowed(other)
    return found


def imported_parts(source: str) -> set[str]:
    """Parts of the package that a module's text imports, anywhere in it, also inside functions."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    pieces = (name.split(".") for name in names)
    parts = {piece[1] for piece in pieces if piece[0] == "cldetr" and len(piece) > 1}
    return {part for part in parts if (ROOT / part).is_dir() or (ROOT / f"{part}.py").is_file()}


MODULES = sorted(path for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py")


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_module_imports_only_what_lies_below_it(path):
    part = part_of(path)
    assert part in MAY_IMPORT, f"give {part} its place in MAY_IMPORT"
    assert imported_parts(path.read_text(encoding="utf-8")) <= allowed(part)


def test_the_table_has_no_cycle_and_no_part_that_is_gone():
    for part in MAY_IMPORT:
        assert (ROOT / part).is_dir() or (ROOT / f"{part}.py").is_file(), part
        assert all(part not in allowed(other) for other in MAY_IMPORT[part])


def test_detectors_know_nothing_of_data_methods_or_phases():
    assert not allowed("modeling") & {"data", "methods", "scenario", "engine", "config"}


@pytest.mark.parametrize(
    "source",
    [
        "import cldetr.engine.trainer",
        "from cldetr.engine import trainer",
        "from cldetr import engine",
        "def f():\n    from cldetr.engine.trainer import Trainer",
    ],
)
def test_every_form_of_import_is_seen(source):
    assert imported_parts(source) == {"engine"}
