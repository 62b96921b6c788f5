"""A wheel works outside of the checkout: commands, configs and a training run from it alone."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "projects/CLDETR/cldetr"


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The folder into which the wheel was installed."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    # A copy of what the repository has: the build must not write into the checkout, nor profit
    # from what lies there.
    names = ["pyproject.toml", "setup.py", "README.md", "LICENSE"]
    names += ["train_net.py", "configs", "projects"]
    command = ["git", "-C", str(ROOT), "ls-files", "-co", "--exclude-standard", "--", *names]
    listed = subprocess.run(command, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("this is no checkout: git does not know its files")
    for name in filter(lambda name: (ROOT / name).exists(), listed.stdout.splitlines()):
        target = source / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_symlink():
            target.symlink_to(os.readlink(ROOT / name))
        else:
            target.write_bytes((ROOT / name).read_bytes())
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    offline = ["--no-deps", "--no-index"]
    build = [*pip, "wheel", *offline, "--no-build-isolation", "-w", str(folder), str(source)]
    subprocess.run(build, check=True, cwd=folder)
    (wheel,) = folder.glob("*.whl")
    target = folder / "site"
    subprocess.run([*pip, "install", *offline, "--target", str(target), str(wheel)], check=True)
    return target


def run(installed, folder, *words):
    """Runs Python where the wheel's files are all there is of the package."""
    # -S skips site-packages, and with it the link of an editable install to the checkout.
    packages = [path for path in sys.path if path.endswith("site-packages")]
    start = (
        "import runpy, sys;"
        "assert not any('CLDETR' in path for path in sys.path), sys.path;"
        "sys.argv[0] = sys.argv.pop(1);"
        "runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)"
    )
    return subprocess.run(
        [sys.executable, "-S", "-c", start, *words],
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(installed), *packages]),
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
    )


def test_the_wheel_has_every_file_of_the_package(installed):
    def files(root):
        suffixes = (".py", ".yaml", ".json", ".html", ".css", ".cpp", ".cu", ".h", ".typed")
        paths = [Path(found) / name for found, _, names in os.walk(root, followlinks=True)
                 for name in names]  # fmt: skip
        return {str(path.relative_to(root)) for path in paths if path.suffix in suffixes}

    assert files(PACKAGE) - files(installed / "cldetr") == set()
    assert not (installed / "cldetr/configs").is_symlink()


def test_configs_are_found_without_a_checkout(installed, tmp_path):
    done = run(installed, tmp_path, "cldetr.cli", "configs", "70_10_lwf")
    assert "NAME: lwf" in done.stdout, done.stderr
    listed = run(installed, tmp_path, "cldetr.cli", "configs")
    assert "shapes_recommended" in listed.stdout, listed.stderr
    done = run(installed, tmp_path, "cldetr.train", "--help")
    assert "--config-file" in done.stdout, done.stderr


@pytest.mark.slow
def test_a_run_from_the_wheel_trains_and_is_reported(installed, tmp_path):
    """Data, config, training, report: all from the installed package."""
    shapes = ["--images", "24", "--val", "10", "--size", "48", "--categories", "10"]
    done = run(installed, tmp_path, "cldetr.cli", "shapes", "--out", "datasets/shapes", *shapes)
    assert done.returncode == 0, done.stderr
    short = ["SCHEDULE.FIRST.MAX_STEPS", "1", "SCHEDULE.TRAIN.MAX_STEPS", "1"]
    short += ["SCHEDULE.CALIBRATE.MAX_STEPS", "1", "REPORT", "False"]
    config = str(installed / "cldetr/configs/shapes_recommended.yaml")
    words = ["--config-file", config, *short, "OUTPUT_DIR", "run"]
    done = run(installed, tmp_path, "cldetr.train", *words)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run/results.json").exists()
    done = run(installed, tmp_path, "cldetr.cli", "report", "run")
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "run/report/index.html").read_text()
    assert "7+3" in page
    assert "NUM_QUERIES" in page  # the section on settings
