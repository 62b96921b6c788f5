"""The CUDA kernels: run on the CPU from their own source, compiled with nvcc, and run on a GPU.

Without a GPU, the source of the kernels (`ms_deform_attn_kernels.cuh`) is compiled as C++ with
`cuda_shim.h` and executed, for every type and width that the library holds. That covers indices,
edges, masks of the shuffles, the loop over a grid that is too small, and the arithmetic. It does
not cover races, real atomics, the launch itself, or speed. The tests marked `gpu` do.
"""

import ctypes
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.cpp_extension import _get_cuda_arch_flags

from cldetr.layers import build
from cldetr.layers.build import BuildError, build_libraries, cuda_options, find_cuda_toolkit
from cldetr.layers.libraries import SOURCE_DIR, built_libraries, load_libraries
from cldetr.layers.ms_deform_attn import ms_deform_attn, ms_deform_attn_reference

from .attention_inputs import gradients, make_inputs

WIDTHS = {torch.float64: 2, torch.float32: 4, torch.float16: 8, torch.bfloat16: 8}
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 1e-2}


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    """The kernels as a library of C functions."""
    compiler = next((name for name in ("c++", "g++", "clang++") if shutil.which(name)), None)
    if compiler is None:
        pytest.skip("no C++ compiler")
    target = tmp_path_factory.mktemp("shim") / "kernels.so"
    command = [compiler, "-std=c++20", "-O1", "-fPIC", "-shared", "-fno-strict-aliasing"]
    command += ["-Wall", "-Werror", "-Wno-unknown-pragmas", f"-I{SOURCE_DIR}"]
    command += ["-isystem", str(Path(torch.__file__).parent / "include")]
    command += [str(Path(__file__).with_name("cuda_kernels_on_cpu.cpp")), "-o", str(target)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return ctypes.CDLL(str(target))


def call(kernels, name, inputs, most_blocks, before, after):
    """Calls forward_… or backward_… with the pointers `before` and `after` the op's own inputs."""
    value, shapes, locations, weights = inputs
    images, cells, heads, channels = value.shape
    queries, points = locations.shape[1], locations.shape[4]
    sizes = (images, cells, heads, channels, queries, len(shapes), points)
    function = getattr(kernels, name)
    function.restype = ctypes.c_char_p
    tensors = (*before, value, locations, weights, *after)
    assert all(tensor.is_contiguous() for tensor in tensors)
    error = function(
        (ctypes.c_int64 * 7)(*sizes),
        ctypes.c_void_p(shapes.data_ptr()),
        ctypes.c_uint(most_blocks),
        *(ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors),
    )
    assert error is None, error.decode()


def run_forward(kernels, name, inputs, most_blocks=1 << 20):
    value, _, locations, _ = inputs
    images, _, heads, channels = value.shape
    output = value.new_full((images, locations.shape[1], heads * channels), torch.nan)
    call(kernels, f"forward_{name}", inputs, most_blocks, (), (output,))
    return output


def run_backward(kernels, name, grad, inputs, most_blocks=1 << 20):
    value, _, locations, weights = inputs
    found = (
        torch.zeros(value.shape, dtype=locations.dtype),
        torch.full_like(locations, torch.nan),
        torch.full_like(weights, torch.nan),
    )
    call(kernels, f"backward_{name}", inputs, most_blocks, (grad,), found)
    return found


def in_double(inputs):
    return tuple(tensor.double() if tensor.is_floating_point() else tensor for tensor in inputs)


def names(dtype, channels):
    """The kernels that the launch may choose for this head size."""
    plain = str(dtype).removeprefix("torch.")
    return [f"{plain}_narrow"] + ([f"{plain}_wide"] if channels % WIDTHS[dtype] == 0 else [])


@pytest.mark.parametrize("dtype", WIDTHS, ids=str)
@pytest.mark.parametrize("channels", [1, 5, 12, 16, 32, 40, 64])
def test_kernels_own_source_equals_the_reference(kernels, dtype, channels):
    inputs = make_inputs(images=2, heads=2, queries=3, points=2, channels=channels, dtype=dtype)
    exact = in_double(inputs)
    expected = ms_deform_attn_reference(*exact)
    grad = (torch.rand_like(expected) - 0.5).to(dtype)
    tolerance = TOLERANCES[dtype]
    for name in names(dtype, channels):
        output = run_forward(kernels, name, inputs)
        torch.testing.assert_close(output.double(), expected, rtol=tolerance, atol=tolerance)
        found = run_backward(kernels, name, grad, inputs)
        wanted = torch.ops.cldetr.ms_deform_attn_backward(grad.double(), *exact)
        for ours, theirs in zip(found, wanted, strict=True):
            # Types below double round the locations of both sides alike: the inputs are the same.
            torch.testing.assert_close(
                ours.double(), theirs, rtol=max(tolerance, 1e-10), atol=10 * max(tolerance, 1e-12)
            )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_sums_are_in_float32(kernels, dtype):
    # 8192 times 2^-12 is 2; a sum in half precision stops growing at a half or before.
    count, shapes = 8192, torch.tensor([[1, 1]])
    assert torch.ones((), dtype=dtype) + 2.0**-12 == 1
    for queries, points in ((1, count), (count, 1)):
        inputs = (
            torch.ones(1, 1, 1, 8, dtype=dtype),
            shapes,
            torch.full((1, queries, 1, 1, points, 2), 0.5),
            torch.full((1, queries, 1, 1, points), 2.0**-12),
        )
        for name in names(dtype, 8):
            output = run_forward(kernels, name, inputs)
            assert torch.equal(output, torch.full_like(output, points * 2.0**-12))
            found, _, _ = run_backward(kernels, name, torch.ones_like(output), inputs)
            assert found.dtype == torch.float32
            assert torch.equal(found, torch.full_like(found, 2.0))


@pytest.mark.parametrize("channels", [3, 140])
@pytest.mark.parametrize("most_blocks", [1, 3])
def test_threads_take_several_pieces_where_the_grid_is_too_small(kernels, channels, most_blocks):
    # 140 channels are more than the lanes of a warp; 3 leave a lane of each group idle.
    inputs = make_inputs(images=2, heads=3, queries=40, points=1, channels=channels)
    exact = ms_deform_attn_reference(*inputs)
    grad = torch.rand_like(exact)
    wanted = torch.ops.cldetr.ms_deform_attn_backward(grad, *inputs)
    for name in names(torch.float64, channels):
        torch.testing.assert_close(run_forward(kernels, name, inputs, most_blocks), exact)
        torch.testing.assert_close(run_backward(kernels, name, grad, inputs, most_blocks), wanted)


@pytest.mark.parametrize("sizes", [{"images": 0}, {"queries": 0}, {"points": 0}], ids=str)
def test_kernels_take_empty_inputs(kernels, sizes):
    inputs = make_inputs(**sizes)
    output = run_forward(kernels, "float64_wide", inputs)
    assert not output.any()
    found = run_backward(kernels, "float64_wide", torch.ones_like(output), inputs)
    assert not any(tensor.any() for tensor in found)


def test_nan_location_stays_within_its_query_and_head(kernels):
    value, shapes, locations, weights = make_inputs()
    locations[1, 4, 2, 0, 1, 0] = torch.nan
    output = run_forward(kernels, "float64_wide", (value, shapes, locations, weights))
    expected = torch.zeros(2, 9, 3, dtype=torch.bool)
    expected[1, 4, 2] = True
    torch.testing.assert_close(output.unflatten(-1, (3, 8)).isnan().any(-1), expected)


@pytest.fixture
def toolkit():
    """The CUDA toolkit that the library is built with."""
    found = find_cuda_toolkit()
    if isinstance(found, str):
        pytest.skip(f"the CUDA library cannot be built here: {found}")
    return found


def test_cuda_library_compiles_links_and_loads(toolkit, tmp_path, monkeypatch):
    """Takes the library that is installed if it is current, else builds one for a single GPU."""
    library = load_libraries()["cuda"].path
    if library is None:
        monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0")
        build_libraries(cuda="on", directory=tmp_path)
        (library,) = built_libraries("cuda", tmp_path)
    code = (
        "import sys, torch\n"
        "torch.ops.load_library(sys.argv[1])\n"
        "for name in ('cldetr::ms_deform_attn', 'cldetr::ms_deform_attn_backward'):\n"
        "    assert torch._C._dispatch_has_kernel_for_dispatch_key(name, 'CUDA'), name\n"
    )
    # Declared in Python, so the op must exist before its kernels can be asked for.
    code = "import cldetr.layers.ms_deform_attn\n" + code
    command = [sys.executable, "-W", "ignore", "-c", code, str(library)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_architecture_that_does_not_exist_is_named(toolkit, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.5")
    options = cuda_options(find_cuda_toolkit())
    with pytest.raises(BuildError, match=r"Unknown CUDA arch \(8\.5\)"):
        build._build("cuda", *options, force=False, directory=tmp_path)


@pytest.mark.parametrize(
    ("chosen", "code"), [("9.0a", "code=sm_90a"), ("8.6+PTX", "code=compute_86")]
)
def test_architectures_are_those_that_pytorch_takes(toolkit, monkeypatch, chosen, code):
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", chosen)
    _, environment = cuda_options(find_cuda_toolkit())
    assert environment["TORCH_CUDA_ARCH_LIST"] == chosen
    assert any(code in flag for flag in _get_cuda_arch_flags())


@pytest.fixture
def gpu():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    if not load_libraries()["cuda"].loaded:
        pytest.skip(f"the CUDA library: {load_libraries()['cuda'].reason}")
    return torch.device("cuda")


def to_device(inputs, device):
    """All but the levels' sizes, which stay on the CPU."""
    return (inputs[0].to(device), inputs[1], inputs[2].to(device), inputs[3].to(device))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", WIDTHS, ids=str)
@pytest.mark.parametrize("channels", [5, 16, 32, 64])
def test_gpu_equals_the_cpu(gpu, dtype, channels):
    inputs = make_inputs(channels=channels, queries=300, dtype=dtype)
    exact = in_double(inputs)
    tolerance = TOLERANCES[dtype]
    output = ms_deform_attn(*to_device(inputs, gpu)).cpu().double()
    torch.testing.assert_close(output, ms_deform_attn(*exact), rtol=tolerance, atol=tolerance)
    ours = gradients(ms_deform_attn, to_device(inputs, gpu))
    for found, wanted in zip(ours, gradients(ms_deform_attn, exact), strict=True):
        scale = float(wanted.abs().max())
        torch.testing.assert_close(
            found.cpu().double(), wanted, rtol=10 * tolerance, atol=10 * tolerance * scale
        )


@pytest.mark.gpu
def test_gpu_takes_value_in_autocasts_type(gpu):
    inputs = to_device(make_inputs(dtype=torch.float32), gpu)
    with torch.autocast("cuda", dtype=torch.float16):
        assert ms_deform_attn(*inputs).dtype == torch.float16


@pytest.mark.gpu
def test_gpu_needs_no_synchronisation_with_sizes_on_the_cpu(gpu):
    inputs = to_device(make_inputs(dtype=torch.float32), gpu)
    ms_deform_attn(*inputs)
    torch.cuda.set_sync_debug_mode("error")
    try:
        ms_deform_attn(*inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")
