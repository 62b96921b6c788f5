"""Building and loading the libraries, with a library of one line where the real one is too slow."""

import ctypes
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from cldetr.errors import InputError
from cldetr.layers import build, cuda_toolkit, libraries
from cldetr.layers.build import BuildError, build_libraries
from cldetr.layers.cuda_toolkit import find_cuda_toolkit
from cldetr.layers.libraries import library_path, reason_not_to_load, stamp_path

CHECK_LOADS = build._check_loads
needs_compiler = pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")


@pytest.fixture
def sources(tmp_path, monkeypatch):
    """A source folder of the test's own; what is built there needs no torch to be loaded."""
    folder = tmp_path / "csrc"
    (folder / "cpu").mkdir(parents=True)
    (folder / "cpu" / "one.cpp").write_text('extern "C" int one() { return 1; }\n')
    monkeypatch.setattr(libraries, "SOURCE_DIR", folder)
    monkeypatch.delenv(libraries.SWITCH, raising=False)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(build, "_check_loads", lambda library, log: ctypes.CDLL(str(library)))
    return folder


def build_cpu(tmp_path, **options):
    return build_libraries(cuda="off", directory=tmp_path / "_lib", **options)


@needs_compiler
def test_nothing_is_compiled_again_when_nothing_changed(sources, tmp_path):
    assert build_cpu(tmp_path)[0].startswith("cpu: built ")
    library = library_path("cpu", tmp_path / "_lib")
    before = library.stat().st_mtime_ns
    assert build_cpu(tmp_path)[0] == "cpu: up to date"
    assert library.stat().st_mtime_ns == before
    assert build_cpu(tmp_path, force=True)[0].startswith("cpu: built ")
    assert library.stat().st_mtime_ns > before


@needs_compiler
def test_new_and_changed_sources_are_compiled_and_the_others_kept(sources, tmp_path):
    build_cpu(tmp_path)
    (kept,) = (tmp_path / "_lib" / "objects").iterdir()
    before = kept.stat().st_mtime_ns
    (sources / "two.cpp").write_text('extern "C" int two() { return 2; }\n')
    assert build_cpu(tmp_path)[0].startswith("cpu: built ")
    assert kept.stat().st_mtime_ns == before
    assert len(list((tmp_path / "_lib" / "objects").iterdir())) == 2
    (sources / "any.h").write_text("")  # every file may include it
    assert build_cpu(tmp_path)[0].startswith("cpu: built ")
    assert not kept.exists()


@needs_compiler
def test_failed_build_tells_the_compilers_words_and_keeps_the_old_library(sources, tmp_path):
    build_cpu(tmp_path)
    (sources / "cpu" / "one.cpp").write_text("int one() { return nonsense; }\n")
    with pytest.raises(BuildError, match="nonsense") as failure:
        build_cpu(tmp_path)
    log = tmp_path / "_lib" / "build_cpu.log"
    assert str(log) in str(failure.value)
    assert "nonsense" in log.read_text()
    assert library_path("cpu", tmp_path / "_lib").is_file()
    # Not loaded all the same: it was built from other sources.
    assert "sources have changed" in reason_not_to_load("cpu", tmp_path / "_lib")


@needs_compiler
def test_library_that_cannot_be_loaded_is_a_failed_build(sources, tmp_path, monkeypatch):
    monkeypatch.setattr(build, "_check_loads", CHECK_LOADS)
    (sources / "cpu" / "one.cpp").write_text("int missing(); int one() { return missing(); }\n")
    with pytest.raises(BuildError, match="undefined symbol"):
        build_cpu(tmp_path)
    assert not library_path("cpu", tmp_path / "_lib").exists()


def test_missing_compiler_is_told(sources, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BuildError, match=r"no C\+\+ compiler"):
        build_cpu(tmp_path)


def write_stamp(tmp_path, **changes):
    folder = tmp_path / "_lib"
    folder.mkdir()
    library_path("cpu", folder).write_bytes(b"")
    stamp = {**libraries.build_inputs("cpu"), **changes}
    stamp_path("cpu", folder).write_text(json.dumps(stamp))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, ""),
        ({"torch": "1.0.0"}, f"built for torch 1.0.0, here is torch {torch.__version__}"),
        ({"machine": "pdp11"}, "built for pdp11"),
        ({"sources": "0"}, "the sources have changed"),
    ],
    ids=["current", "torch", "machine", "sources"],
)
def test_library_that_does_not_fit_is_reported_with_the_fix(sources, tmp_path, changes, reason):
    write_stamp(tmp_path, **changes)
    found = reason_not_to_load("cpu", tmp_path / "_lib")
    assert found.startswith(reason)
    assert ("cldetr build" in found) == bool(reason)


@pytest.mark.parametrize("stamp", [None, "", "[]", "{"], ids=["none", "empty", "list", "cut"])
def test_library_without_a_whole_stamp_counts_as_not_built(sources, tmp_path, stamp):
    write_stamp(tmp_path)
    path = stamp_path("cpu", tmp_path / "_lib")
    path.unlink() if stamp is None else path.write_text(stamp)
    assert reason_not_to_load("cpu", tmp_path / "_lib").startswith("not built")


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
        return nvcc

    for variable in ("CUDA_HOME", "CUDA_PATH", "TORCH_CUDA_ARCH_LIST"):
        monkeypatch.delenv(variable, raising=False)
    release = {**libraries.torch_release(), "cuda": "13.2"}
    monkeypatch.setattr(cuda_toolkit, "torch_release", lambda: release)
    return make


def test_nvcc_of_cuda_home_comes_before_the_one_on_path(fake_nvcc, monkeypatch):
    home, on_path = fake_nvcc("home"), fake_nvcc("path")
    monkeypatch.setenv("PATH", f"{on_path.parent}{os.pathsep}{os.environ['PATH']}")
    assert find_cuda_toolkit().nvcc == on_path
    monkeypatch.setenv("CUDA_HOME", str(home.parents[1]))
    assert find_cuda_toolkit().nvcc == home


def test_usual_architectures_are_those_that_nvcc_knows_and_ptx_of_the_last(fake_nvcc, monkeypatch):
    monkeypatch.setenv("CUDA_HOME", str(fake_nvcc("home").parents[1]))
    assert find_cuda_toolkit().architecture_flags == (
        "-gencode=arch=compute_75,code=sm_75",
        "-gencode=arch=compute_80,code=sm_80",
        "-gencode=arch=compute_90,code=sm_90",
        "-gencode=arch=compute_90,code=compute_90",
    )


def test_unknown_architecture_is_refused_with_the_known_ones(fake_nvcc, monkeypatch):
    monkeypatch.setenv("CUDA_HOME", str(fake_nvcc("home").parents[1]))
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0 3.5")
    with pytest.raises(InputError, match=r"'3\.5'.* 7\.5, 8\.0, 9\.0"):
        find_cuda_toolkit()


def test_toolkit_of_another_major_version_does_not_fit(fake_nvcc, monkeypatch):
    monkeypatch.setenv("CUDA_HOME", str(fake_nvcc("home", version="12.8").parents[1]))
    assert "12.8" in find_cuda_toolkit()
    assert "13.2" in find_cuda_toolkit()


@needs_compiler
@pytest.mark.parametrize("cuda", ["auto", "on"])
def test_missing_toolkit_fails_only_when_cuda_is_insisted_on(sources, tmp_path, monkeypatch, cuda):
    monkeypatch.setattr(build, "find_cuda_toolkit", lambda: "nvcc was not found")
    if cuda == "auto":
        lines = build_libraries(cuda, directory=tmp_path / "_lib")
        assert lines[1] == "cuda: left out, nvcc was not found"
    else:
        with pytest.raises(BuildError, match="nvcc was not found"):
            build_libraries(cuda, directory=tmp_path / "_lib")
    assert library_path("cpu", tmp_path / "_lib").is_file()


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
    assert "false failed with status 1" in result.stderr
    assert "build_cpu.log" in result.stderr
