"""Set-up: the lock file agrees with pyproject.toml, and the right environment is chosen."""

import importlib.util
import os
import re
import subprocess
import sys
import venv
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
PYTHONS = ("3.10", "3.11", "3.12")


def load_install():
    spec = importlib.util.spec_from_file_location("install", ROOT / "tools" / "install.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


install = load_install()


def pins(python: str) -> dict[str, str]:
    """The lock file's versions for one Python, read with packaging rather than our own reader."""
    found = {}
    for line in install.lock_requirements():
        requirement = Requirement(line)
        if requirement.marker and not requirement.marker.evaluate({"python_version": python}):
            continue
        (exact,) = requirement.specifier
        assert exact.operator == "==", line
        name = canonicalize_name(requirement.name)
        assert name not in found, f"{name} is pinned twice for Python {python}"
        found[name] = exact.version
    return found


def project_requirements() -> list[Requirement]:
    # tomllib comes with Python 3.11 only; these lists hold nothing but strings.
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    project = text.partition("[project.scripts]")[0]
    lists = re.findall(r"^(?:requires|dependencies|test|dev) = (\[.*?\])$", project, re.M | re.S)
    assert len(lists) == 4
    return [Requirement(text) for block in lists for text in re.findall(r'"([^"]+)"', block)]


@pytest.mark.parametrize("python", PYTHONS)
def test_every_dependency_is_locked_within_its_range(python):
    locked = pins(python)
    for requirement in project_requirements():
        version = locked[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version), f"{requirement} but {version} is locked"


@pytest.mark.parametrize("python", PYTHONS)
def test_the_lock_reader_agrees_with_packaging(python, monkeypatch):
    version = tuple(int(part) for part in python.split("."))
    monkeypatch.setattr(install.sys, "version_info", (*version, 0, "final", 0))
    lines = [line.partition(";") for line in install.lock_requirements()]
    read = {
        requirement.split("==")[0]
        for requirement, _, condition in lines
        if install.holds(condition)
    }
    assert {install.plain_name(name) for name in read} == set(pins(python))


def test_a_condition_that_cannot_be_read_is_refused():
    with pytest.raises(ValueError, match="sys_platform"):
        install.holds('sys_platform == "win32"')


def test_the_groups_of_the_lock_file_are_sorted_and_explained():
    text = install.LOCK.read_text(encoding="utf-8")
    _, *groups = text.strip().split("\n\n")
    assert len(groups) >= 5
    for group in groups:
        lines = group.splitlines()
        assert lines[0].startswith("# ")
        names = [line.split("==")[0] for line in lines if not line.startswith("#")]
        if names[0] != "torch":
            assert names == sorted(names)


def test_the_detectron2_wheel_is_held_to_its_hash():
    lines = install.DETECTRON2.read_text(encoding="utf-8").splitlines()
    (line,) = [line for line in lines if not line.startswith("#")]
    assert re.fullmatch(r"sal-detectron2==[\d.]+ --hash=sha256:[0-9a-f]{64}", line)


def chosen_environment(**active: str) -> Path:
    kept = {k: v for k, v in os.environ.items() if k not in ("VIRTUAL_ENV", "CONDA_PREFIX")}
    done = subprocess.run(
        ["sh", str(ROOT / "tools" / "environment.sh")],
        env={**kept, **active},
        capture_output=True,
        text=True,
        check=True,
    )
    return Path(done.stdout.strip())


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder, with_pip=False)
    return folder


@pytest.mark.parametrize("variable", ["VIRTUAL_ENV", "CONDA_PREFIX"])
def test_an_active_environment_with_torch_and_detectron2_is_used(variable):
    assert chosen_environment(**{variable: sys.prefix}) == Path(sys.prefix)


def test_an_active_environment_without_torch_is_left_alone(bare):
    assert chosen_environment(VIRTUAL_ENV=str(bare)) == ROOT / ".venv"
    both = chosen_environment(VIRTUAL_ENV=str(bare), CONDA_PREFIX=sys.prefix)
    assert both == Path(sys.prefix)


def test_without_an_active_environment_the_repository_has_its_own():
    assert chosen_environment() == ROOT / ".venv"
    assert chosen_environment(VIRTUAL_ENV="/gone") == ROOT / ".venv"


def test_all_that_is_not_installed_counts_as_missing_and_nothing_else(bare):
    code = f"import sys; sys.path.insert(0, {str(ROOT / 'tools')!r})\nimport install\n" + (
        "print('\\n'.join(install.missing_requirements()))"
    )
    done = subprocess.run(
        [str(bare / "bin" / "python"), "-c", code], capture_output=True, text=True, check=True
    )
    missing = {canonicalize_name(Requirement(line).name) for line in done.stdout.splitlines()}
    assert missing == set(pins("{}.{}".format(*sys.version_info)))
    present = {canonicalize_name(Requirement(line).name) for line in install.missing_requirements()}
    assert not present & {"torch", "numpy", "pytest"}


def test_the_digest_changes_with_the_operators(tmp_path, monkeypatch):
    before = install.inputs_digest()
    assert install.inputs_digest() == before
    monkeypatch.setattr(install, "ROOT", tmp_path)
    monkeypatch.setattr(install, "OPERATORS", tmp_path / "csrc")
    for name in ("LOCK", "DETECTRON2", "__file__"):
        monkeypatch.setattr(install, name, tmp_path / name)
        (tmp_path / name).write_text(name)
    (tmp_path / "pyproject.toml").write_text("")
    (tmp_path / "csrc").mkdir()
    kernel = tmp_path / "csrc" / "kernel.cpp"
    kernel.write_text("int one;")
    first = install.inputs_digest()
    kernel.write_text("int two;")
    assert install.inputs_digest() != first
