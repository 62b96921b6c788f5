"""`cldetr doctor --gpu`, on a fake GPU and on machines that lack something."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from fake_cuda import available, fake_cuda

from cldetr import gpu_check
from cldetr.cli import main
from cldetr.gpu_check import (
    check_architectures,
    check_driver,
    check_gpu,
    check_processes,
    runs_on,
)
from cldetr.layers.build import BuildError
from cldetr.layers.libraries import Backend

needs_fake = pytest.mark.skipif(bool(available()), reason=available() or "available")


@pytest.fixture
def built(monkeypatch):
    """The operator as if it were built and loaded."""

    def load():
        return {"cuda": Backend(Path("cldetr_cuda.so"), loaded=True)}

    load.cache_clear = lambda: None
    monkeypatch.setattr(gpu_check, "build_libraries", lambda cuda: ["cpu: …", "cuda: up to date"])
    monkeypatch.setattr(gpu_check, "load_libraries", load)


@needs_fake
@pytest.mark.own_process
def test_a_fake_gpu_passes_every_check(built, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_80"])
    monkeypatch.setattr(gpu_check, "STEPS", 3)
    with fake_cuda(monkeypatch):
        findings = {found.name: found for found in check_gpu(full_size=False)}
    assert [(name, found.text) for name, found in findings.items() if found.status != "ok"] == []
    assert list(findings) == [
        *("GPU", "architecture", "operator", "operator, float64", "operator, float32"),
        *("operator, float16", "operator, bfloat16", "3 steps, float32", "3 steps, TF32"),
        *("3 steps, bfloat16", "3 steps, float16", "two processes, NCCL"),
    ]
    assert torch.get_float32_matmul_precision() == "highest"  # as before


@needs_fake
@pytest.mark.slow
@pytest.mark.own_process
def test_wrong_kernels_and_wrong_training_are_found(built, monkeypatch):
    right, train = gpu_check.ms_deform_attn, gpu_check.train_small
    monkeypatch.setattr(gpu_check, "ms_deform_attn", lambda *inputs: right(*inputs) * 1.02)

    def off(device, *precision):
        first, last, seconds = train(device, *precision)
        return first, last * (1.2 if device == "cuda" else 1.0), seconds

    monkeypatch.setattr(gpu_check, "train_small", off)
    monkeypatch.setattr(gpu_check, "STEPS", 2)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_80"])
    with fake_cuda(monkeypatch):
        failed = {found.name for found in check_gpu(full_size=False) if found.status == "fail"}
    assert failed == {
        *("operator, float64", "operator, float32", "operator, float16"),
        *("2 steps, float32", "2 steps, TF32", "2 steps, bfloat16", "2 steps, float16"),
    }


@pytest.mark.parametrize(
    ("driver", "text", "fix"),
    [
        (None, "there is no NVIDIA driver", "--gpus all"),
        ("470.82.01", "driver 470.82.01 is too old", "update it to"),
        ("999.10", "torch sees no device", "CUDA_VISIBLE_DEVICES"),
    ],
)
def test_why_there_is_no_gpu_is_told(driver, text, fix, monkeypatch, tmp_path):
    monkeypatch.setattr(gpu_check, "DRIVER", tmp_path / "version")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.2")
    if driver:
        line = f"NVRM version: NVIDIA UNIX x86_64 Kernel Module  {driver}  Wed Oct 27 2021\n"
        (tmp_path / "version").write_text(line)
    found = check_driver()
    assert found.status == "fail"
    assert text in found.text
    assert fix in found.fix


def test_a_torch_without_cuda_is_told(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    found = check_driver()
    assert (found.status, "CUDA build of torch" in found.fix) == ("fail", True)


@pytest.mark.parametrize(
    ("codes", "capability", "runs"),
    [
        (["sm_75", "sm_80"], (7, 0), False),
        (["sm_75", "sm_80"], (7, 5), True),
        (["sm_80"], (8, 6), True),
        (["sm_86"], (8, 0), False),
        (["sm_80"], (9, 0), False),
        (["sm_80", "compute_80"], (9, 0), True),
        (["compute_90"], (8, 9), False),
        (["sm_90a"], (9, 0), True),
        (["sm_100", "sm_120"], (12, 0), True),
        (["sm_120a"], (12, 1), False),
    ],
)
def test_which_code_runs_on_which_gpu(codes, capability, runs):
    assert runs_on(codes, capability) is runs


def test_a_gpu_that_torch_has_no_code_for_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_75", "sm_80"])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (7, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "Tesla V100")
    found = check_architectures()
    assert found.status == "fail"
    assert "Tesla V100 (sm_70)" in found.text
    assert "CUDA 12.6" in found.fix


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        ("the CUDA library cannot be built: nvcc was not found", "(nvcc), or set CUDA_HOME"),
        ("the cuda library did not compile; all output is in log", "set CXX to another"),
    ],
)
def test_a_failed_build_names_its_fix(words, fix, monkeypatch):
    def fail(cuda):
        raise BuildError(words)

    monkeypatch.setattr(gpu_check, "build_libraries", fail)
    found = gpu_check.build_operator()
    assert found.status == "fail"
    assert words in found.text
    assert fix in found.fix


def test_kernels_of_another_architecture_name_the_build(monkeypatch):
    def launch(*inputs):
        raise RuntimeError("CUDA error: no kernel image is available for execution on the device")

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (8, 6 + 3 * index))
    found = gpu_check._guard(launch, "operator")
    assert found.fix == "TORCH_CUDA_ARCH_LIST='8.6;8.9' cldetr build --cuda on --force"


@pytest.mark.slow
def test_two_processes_agree_and_a_broken_one_is_told(monkeypatch):
    found = check_processes("gloo", count=2)
    assert (found.status, found.text) == ("ok", "a step gives both the same gradients")

    def fail(*_, **__):
        raise RuntimeError("-- Process 1 terminated\nncclSystemError: no route")

    monkeypatch.setattr(gpu_check.mp, "spawn", fail)
    found = check_processes("nccl", count=2)
    assert (found.status, found.text) == ("fail", "ncclSystemError: no route")
    assert "NCCL_DEBUG" in found.fix


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_command_ends_with_a_clear_message(capsys):
    assert main(["doctor", "--gpu"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "Training on a GPU cannot start: GPU."
    assert any("→" in line for line in lines)
