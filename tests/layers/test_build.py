"""Building and loading the libraries, with a library of one line where the real one is too slow."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from cldetr.layers import build, libraries
from cldetr.layers.build import BuildError, build_libraries, find_cuda_toolkit
from cldetr.layers.libraries import built_libraries, reason_not_to_load

needs_compiler = pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")


@pytest.fixture
def sources(tmp_path, monkeypatch):
    """A source folder of the test's own."""
    folder = tmp_path / "csrc"
    (folder / "cpu").mkdir(parents=True)
    (folder / "cpu" / "one.cpp").write_text('extern "C" int one() { return 1; }\n')
    monkeypatch.setattr(libraries, "SOURCE_DIR", folder)
    monkeypatch.delenv(libraries.SWITCH, raising=False)
    monkeypatch.delenv("CXX", raising=False)
    return folder


def build_cpu(tmp_path, **options):
    line, _ = build_libraries(cuda="off", directory=tmp_path / "_lib", **options)
    return line


@needs_compiler
def test_a_library_is_built_once_for_its_sources_compiler_and_torch(sources, tmp_path, monkeypatch):
    assert reason_not_to_load("cpu", tmp_path / "_lib") == "not built; run `cldetr build`"
    assert build_cpu(tmp_path).startswith("cpu: built ")
    assert reason_not_to_load("cpu", tmp_path / "_lib") == ""
    (library,) = built_libraries("cpu", tmp_path / "_lib")
    before = library.stat().st_mtime_ns
    assert build_cpu(tmp_path) == "cpu: up to date"
    assert library.stat().st_mtime_ns == before
    assert build_cpu(tmp_path, force=True).startswith("cpu: built ")
    assert library.stat().st_mtime_ns > before
    monkeypatch.setenv("CXX", shutil.which("c++"))
    assert build_cpu(tmp_path).startswith("cpu: built ")
    (sources / "any.h").write_text("")  # every file may include it
    reason = reason_not_to_load("cpu", tmp_path / "_lib")
    assert reason.startswith(f"built as {built_libraries('cpu', tmp_path / '_lib')[0].name}")
    assert reason.endswith("run `cldetr build`")
    assert build_cpu(tmp_path).startswith("cpu: built ")
    assert len(built_libraries("cpu", tmp_path / "_lib")) == 1  # the outdated ones are gone
    assert reason_not_to_load("cpu", tmp_path / "_lib") == ""
    other = {**libraries.torch_release(), "version": "1.0.0"}
    monkeypatch.setattr(libraries, "torch_release", lambda: other)
    assert "does not fit torch1.0.0" in reason_not_to_load("cpu", tmp_path / "_lib")


@needs_compiler
@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("int one() { return nonsense; }\n", "nonsense"),
        ("int missing(); int one() { return missing(); }\n", "undefined symbol"),
    ],
    ids=["does not compile", "does not load"],
)
def test_failed_build_tells_the_compilers_words_and_keeps_the_old_library(
    sources, tmp_path, source, words
):
    old = tmp_path / "_lib" / f"cldetr_cpu-{libraries.build_tag('cpu')}-01234567.so"
    old.parent.mkdir()
    old.write_bytes(b"")
    (sources / "cpu" / "one.cpp").write_text(source)
    with pytest.raises(BuildError, match=words) as failure:
        build_cpu(tmp_path)
    log = tmp_path / "_lib" / "build_cpu.log"
    assert str(log) in str(failure.value)
    assert words in log.read_text()
    assert sorted(old.parent.iterdir()) == [log, old]  # and nothing half-built
    # Not loaded all the same: it was built from other sources.
    assert "does not fit" in reason_not_to_load("cpu", tmp_path / "_lib")


def test_missing_compiler_is_told(sources, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BuildError, match=r"no C\+\+ compiler found .*install g\+\+"):
        build_cpu(tmp_path)


def test_the_switch_disables_a_library_that_fits(sources, tmp_path, monkeypatch):
    monkeypatch.setenv(libraries.SWITCH, "0")
    assert libraries.SWITCH in reason_not_to_load("cpu", tmp_path / "_lib")


def test_torch_is_known_without_importing_it():
    assert libraries.torch_release()["version"] == torch.__version__
    code = "import sys, cldetr.layers.build; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.fixture
def fake_nvcc(tmp_path, monkeypatch):
    """A toolkit whose nvcc answers the two questions that are asked."""

    def make(name, version="13.0", codes=("sm_75", "sm_80", "sm_90")):
        nvcc = tmp_path / name / "bin" / "nvcc"
        nvcc.parent.mkdir(parents=True)
        listing = "\\n".join(codes)
        nvcc.write_text(
            f'#!/bin/sh\n[ "$1" = --version ] && echo "release {version}, V{version}.0"\n'
            f'[ "$1" = --list-gpu-code ] && printf "{listing}\\n"\nexit 0\n'
        )
        nvcc.chmod(0o755)
        (tmp_path / name / "lib").mkdir()
        (tmp_path / name / "lib" / "libcudart.so").touch()
        return tmp_path / name

    for variable in ("CUDA_HOME", "CUDA_PATH", "TORCH_CUDA_ARCH_LIST"):
        monkeypatch.delenv(variable, raising=False)
    release = {**libraries.torch_release(), "cuda": "13.2"}
    monkeypatch.setattr(build, "torch_release", lambda: release)
    return make


def test_toolkit_of_cuda_home_comes_before_the_one_on_path(fake_nvcc, monkeypatch):
    home, on_path = fake_nvcc("home"), fake_nvcc("path")
    monkeypatch.setenv("PATH", f"{on_path}/bin{os.pathsep}{os.environ['PATH']}")
    assert find_cuda_toolkit().home == on_path
    monkeypatch.setenv("CUDA_HOME", str(home))
    assert find_cuda_toolkit().home == home
    (home / "lib" / "libcudart.so").unlink()  # a script that calls an nvcc elsewhere
    assert find_cuda_toolkit().home == on_path


def test_usual_architectures_are_those_that_nvcc_knows_and_ptx_of_the_last(fake_nvcc, monkeypatch):
    monkeypatch.setenv("CUDA_HOME", str(fake_nvcc("home")))
    assert find_cuda_toolkit().architectures == "7.5;8.0;9.0+PTX"
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0a")
    assert find_cuda_toolkit().architectures == "9.0a"


def test_toolkit_of_another_major_version_does_not_fit(fake_nvcc, monkeypatch):
    monkeypatch.setenv("CUDA_HOME", str(fake_nvcc("home", version="12.8")))
    assert "12.8" in find_cuda_toolkit()
    assert "13.2" in find_cuda_toolkit()


@needs_compiler
def test_missing_toolkit_fails_only_when_cuda_is_insisted_on(sources, tmp_path, monkeypatch):
    monkeypatch.setattr(build, "find_cuda_toolkit", lambda: "nvcc was not found")
    lines = build_libraries("auto", directory=tmp_path / "_lib")
    assert lines[1] == "cuda: skipped, nvcc was not found"
    (library,) = built_libraries("cpu", tmp_path / "_lib")
    with pytest.raises(BuildError, match="nvcc was not found"):
        build_libraries("on", directory=tmp_path / "_lib")
    assert built_libraries("cpu", tmp_path / "_lib") == [library]


def test_command_fails_with_status_2_and_the_compilers_words():
    environment = {**os.environ, "CXX": "false"}
    with tempfile.TemporaryDirectory() as folder:
        # A copy of the package: the failed build must not touch the one that other tests use.
        package = Path(libraries.__file__).parents[1]
        ignored = shutil.ignore_patterns("_lib", "__pycache__")
        shutil.copytree(package, Path(folder) / "cldetr", ignore=ignored)
        result = subprocess.run(
            [sys.executable, "-m", "cldetr.cli", "build", "--cuda", "off"],
            env={**environment, "PYTHONPATH": folder},
            cwd=folder,
            capture_output=True,
            text=True,
        )
    assert result.returncode == 2
    assert "the cpu library did not compile" in result.stderr
    assert "build_cpu.log" in result.stderr
