"""Installs the project into the environment that runs this file; `make setup` calls it.

Uses the standard library only: nothing else is there yet. In the repository's own `.venv`, packages
get the versions of requirements/lock.txt. In any other environment, which the user made, packages
that are missing are added and none that is there is replaced.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LOCK = ROOT / "requirements" / "lock.txt"
DETECTRON2 = ROOT / "requirements" / "detectron2.txt"
OPERATORS = ROOT / "projects" / "CLDETR" / "cldetr" / "layers" / "csrc"

# setuptools before this version does not read the licence in pyproject.toml.
OLDEST_SETUPTOOLS = 77


def main() -> int:
    """Brings the environment up to date, in a second when there is nothing to do."""
    own = Path(sys.prefix).resolve() == (ROOT / ".venv").resolve()
    stamp = Path(sys.prefix) / ".cldetr-setup"
    digest = inputs_digest()
    where = ".venv" if own else f"{sys.prefix} (active: nothing in it is replaced)"
    say(f"environment {where}, Python {sys.version.split()[0]}")
    if stamp.is_file() and stamp.read_text() == digest and not missing_requirements():
        say("nothing to do")
        return 0
    install_requirements(own)
    install_detectron2()
    install_package()
    if build_operators():
        stamp.write_text(digest)  # otherwise the next set-up tries again
    say("done. `cldetr doctor` tells what works here" + activation_hint(own))
    return 0


def inputs_digest() -> str:
    """Computes the SHA-256 of everything that set-up depends on, and of where the project lies."""
    digest = hashlib.sha256(str(ROOT).encode())
    files = [LOCK, DETECTRON2, ROOT / "pyproject.toml", Path(__file__)]
    files += sorted(path for path in OPERATORS.rglob("*") if path.is_file())
    for path in files:
        content = path.read_bytes()
        digest.update(f"\0{path.relative_to(ROOT)}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


def lock_requirements() -> list[str]:
    """Reads the lines of the lock file that name a package, in its order."""
    lines = (line.strip() for line in LOCK.read_text(encoding="utf-8").splitlines())
    return [line for line in lines if line and not line.startswith("#")]


def missing_requirements() -> list[str]:
    """Lists the lock file's lines, in its order, whose package is not installed in any version.

    Lines for other Python versions are skipped: those conditions are all that the lock file uses.
    """
    installed = {
        plain_name(distribution.metadata["Name"] or "")
        for distribution in importlib.metadata.distributions()
    }
    missing = []
    for line in lock_requirements():
        requirement, _, condition = line.partition(";")
        name = plain_name(requirement.split("==")[0])
        if name not in installed and holds(condition):
            missing.append(line)
    return missing


def holds(condition: str) -> bool:
    """Evaluates a lock file's condition, `python_version >= "3.11"` or `python_version < "3.11"`.

    Raises:
        ValueError: It is of another form.
    """
    if not condition.strip():
        return True
    match = re.fullmatch(r'python_version (>=|<) "(\d+)\.(\d+)"', condition.strip())
    if match is None:
        raise ValueError(f"{LOCK}: cannot read the condition {condition.strip()!r}")
    version = int(match[2]), int(match[3])
    return (sys.version_info[:2] >= version) == (match[1] == ">=")


def plain_name(name: str) -> str:
    """Spells a package's name in the one way that compares (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name.strip()).lower()


def install_requirements(own: bool) -> None:
    """Installs the locked versions: all of them in our own environment, else the missing ones."""
    # The constraint reaches the isolated builds of the few packages that come as sources, too.
    constraint = {"PIP_CONSTRAINT": str(LOCK), "PIP_BUILD_CONSTRAINT": str(LOCK)}
    if own:
        say("installing the versions of requirements/lock.txt")
        pip("install", "--use-pep517", "-r", str(LOCK), environment=constraint)
        return
    missing = missing_requirements()
    if missing:
        say("adding what is missing: " + ", ".join(line.partition(";")[0] for line in missing))
        # The lock file is complete, so no dependency is missing, and none is pulled in that would
        # replace something.
        pip("install", "--use-pep517", "--no-deps", *missing)


def install_detectron2() -> None:
    """Installs the Detectron2 wheel, checked by its hash, where no Detectron2 is found."""
    if importlib.util.find_spec("detectron2"):
        return
    say("installing Detectron2")
    # The wheel is Python code that its name ties to Python 3.10; pip unpacks it for other versions
    # only into a folder that it is told.
    pip(
        *("install", "--no-deps", "--require-hashes", "--only-binary=:all:"),
        *("--python-version", "3.10", "--implementation", "cp", "--abi", "none"),
        *("--target", sysconfig.get_paths()["purelib"], "-r", str(DETECTRON2)),
    )


def install_package() -> None:
    """Makes `import cldetr` and the `cldetr` command work from this checkout."""
    say("installing cldetr from this checkout")
    setuptools = importlib.metadata.version("setuptools")
    recent = int(setuptools.split(".")[0]) >= OLDEST_SETUPTOOLS
    # Where a user's setuptools is older, pip fetches a recent one for the build alone.
    pip("install", "--no-deps", *(["--no-build-isolation"] if recent else []), "-e", str(ROOT))


def build_operators() -> bool:
    """Compiles the fast operators, where that is possible; the plain PyTorch ones always serve.

    Returns:
        Whether all is done: True also without a compiler, where nothing can be tried.
    """
    compilers = [os.environ.get("CXX"), "c++", "g++", "clang++"]
    if not any(name and shutil.which(name) for name in compilers):
        say(
            "WARNING: no C++ compiler found. Everything works with the plain PyTorch operators, "
            "only slower. Install g++ or clang++, then: cldetr build"
        )
        return True
    say("compiling the operators (a minute or two)")
    if subprocess.run([sys.executable, "-m", "cldetr.cli", "build"], cwd=ROOT).returncode:
        say("WARNING: the operators did not compile (see above); going on without them, slower")
        return False
    return True


def pip(*arguments: str, environment: dict[str, str] | None = None) -> None:
    """Runs this environment's pip, quietly, and ends the set-up with one line where it fails."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q", *arguments]
    status = subprocess.run(command, cwd=ROOT, env={**os.environ, **(environment or {})}).returncode
    if status:
        sys.exit(f"setup: pip failed (see above); the command was:\n  {shlex.join(command)}")


def activation_hint(own: bool) -> str:
    """Says how to get at the command when the environment is not the active one."""
    return "; first: source .venv/bin/activate" if own and not os.environ.get("VIRTUAL_ENV") else ""


def say(text: str) -> None:
    """Prints one line of progress at once, before what a child process prints."""
    print(f"setup: {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
