"""The op against its definition, on whichever CPU kernels the process has.

The last tests run parts of this file again, in processes of their own: without the compiled
library, and with its kernels for processors without AVX2.
"""

import itertools
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import gradcheck

from cldetr.layers.libraries import SWITCH, load_libraries
from cldetr.layers.ms_deform_attn import ms_deform_attn, ms_deform_attn_reference

from .attention_inputs import gradients, make_inputs, with_grad

OP = torch.ops.cldetr.ms_deform_attn.default
BACKWARD_OP = torch.ops.cldetr.ms_deform_attn_backward.default

# Many queries for the cells, so that the CPU kernel packs them; few, so that it reads in place.
MANY = {"shapes": [(5, 7), (3, 2), (1, 1)], "queries": 9}
FEW = {"shapes": [(12, 15), (6, 8)], "queries": 2}


def by_the_definition(value, spatial_shapes, locations, weights):
    """Cell (y, x) weighs max(0, 1 - |distance|) on each axis; cell 0's centre is at half a cell."""
    images, _, heads, channels = value.shape
    queries, points = locations.shape[1], locations.shape[4]
    output = torch.zeros(images, queries, heads, channels, dtype=torch.float64)
    for n, q, m in itertools.product(range(images), range(queries), range(heads)):
        first = 0
        for level, (height, width) in enumerate(spatial_shapes.tolist()):
            for p in range(points):
                x = float(locations[n, q, m, level, p, 0]) * width - 0.5
                y = float(locations[n, q, m, level, p, 1]) * height - 0.5
                for row, column in itertools.product(range(height), range(width)):
                    weight = max(0.0, 1 - abs(x - column)) * max(0.0, 1 - abs(y - row))
                    cell = value[n, first + row * width + column, m].double()
                    output[n, q, m] += float(weights[n, q, m, level, p]) * weight * cell
            first += height * width
    return output.flatten(2)


@pytest.mark.parametrize("function", [ms_deform_attn, ms_deform_attn_reference])
@pytest.mark.parametrize("case", [MANY, FEW], ids=["many queries", "few queries"])
@pytest.mark.parametrize("channels", [1, 8, 12])
def test_output_is_what_the_definition_says(function, case, channels):
    inputs = make_inputs(channels=channels, points=2, heads=2, images=1, **case)
    torch.testing.assert_close(function(*inputs), by_the_definition(*inputs), rtol=0, atol=1e-13)


@pytest.mark.parametrize("case", [MANY, FEW], ids=["many queries", "few queries"])
@pytest.mark.parametrize("channels", [1, 4, 5])
def test_gradients_are_those_of_finite_differences(case, channels):
    inputs = make_inputs(images=1, heads=2, channels=channels, points=2, **case)
    assert gradcheck(ms_deform_attn, with_grad(*inputs))


@settings(max_examples=40, deadline=None)
@given(
    images=st.integers(1, 3),
    shapes=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=4),
    heads=st.integers(1, 4),
    channels=st.integers(1, 40),
    queries=st.integers(1, 80),
    points=st.integers(1, 5),
    seed=st.integers(0, 1000),
)
def test_output_and_gradients_equal_the_reference_for_any_sizes(seed, **sizes):
    inputs = make_inputs(seed=seed, **sizes)
    torch.testing.assert_close(
        ms_deform_attn(*inputs), ms_deform_attn_reference(*inputs), rtol=0, atol=1e-12
    )
    for ours, theirs in zip(
        gradients(ms_deform_attn, inputs), gradients(ms_deform_attn_reference, inputs), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("channels", [8, 16, 32, 40, 64, 7])
@pytest.mark.parametrize("case", [MANY, FEW], ids=["many queries", "few queries"])
def test_float32_equals_float64_to_rounding(case, channels):
    inputs = make_inputs(channels=channels, **case)
    single = [tensor.float() if tensor.is_floating_point() else tensor for tensor in inputs]
    # The same locations on both sides, whatever float32 made of them.
    double = [tensor.double() if tensor.is_floating_point() else tensor for tensor in single]
    output = ms_deform_attn(*single)
    torch.testing.assert_close(output.double(), ms_deform_attn(*double), rtol=0, atol=3e-6)
    # Not the locations' gradient: at a cell's edge it jumps, and rounding decides on which side.
    for index in (0, 2):
        ours, exact = gradients(ms_deform_attn, single)[index], gradients(ms_deform_attn, double)
        torch.testing.assert_close(ours.double(), exact[index], rtol=1e-5, atol=1e-5)


def test_location_gradient_in_float32_is_right_inside_the_cells():
    value, shapes, locations, weights = make_inputs(dtype=torch.float32)
    size = shapes.flip(-1).float()[:, None]  # (L, 1, 2)
    cell = (locations * size).floor()
    locations = (cell + 0.1 + 0.3 * torch.rand_like(cell)) / size  # never near an edge, at 0.5
    single = (value, shapes, locations, weights)
    double = (value.double(), shapes, locations.double(), weights.double())
    ours, exact = gradients(ms_deform_attn, single)[1], gradients(ms_deform_attn, double)[1]
    torch.testing.assert_close(ours.double(), exact, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_summed_in_float32(dtype):
    inputs = make_inputs(dtype=dtype)
    exact = (inputs[0].double(), inputs[1], inputs[2].double(), inputs[3].double())
    output = ms_deform_attn(*inputs)
    assert output.dtype == dtype
    # One rounding of the result is all that half precision costs.
    torch.testing.assert_close(output, ms_deform_attn(*exact).to(dtype), rtol=1e-2, atol=2e-3)
    grad_value, grad_locations, grad_weights = gradients(ms_deform_attn, inputs)
    assert (grad_value.dtype, grad_locations.dtype, grad_weights.dtype) == (
        dtype,
        torch.float32,
        torch.float32,
    )
    torch.testing.assert_close(
        grad_weights.double(), gradients(ms_deform_attn, exact)[2], rtol=2e-2, atol=2e-2
    )


def test_half_precision_locations_are_taken_in_float32():
    value, shapes, locations, weights = make_inputs(dtype=torch.float16)
    halves = locations.half(), weights.half()
    expected = ms_deform_attn(value, shapes, halves[0].float(), halves[1].float())
    torch.testing.assert_close(ms_deform_attn(value, shapes, *halves), expected, rtol=0, atol=0)


def test_inputs_need_not_be_contiguous():
    value, shapes, locations, weights = make_inputs()
    strided = (
        value.transpose(1, 2).contiguous().transpose(1, 2),
        shapes.t().contiguous().t(),
        locations.movedim(-1, 0).contiguous().movedim(0, -1),
        weights[..., :1].expand_as(weights),
    )
    plain = tuple(tensor.contiguous() for tensor in strided)
    assert not any(tensor.is_contiguous() for tensor in strided)
    torch.testing.assert_close(ms_deform_attn(*strided), ms_deform_attn(*plain), rtol=0, atol=0)
    grad = torch.rand(9, 2, 24, dtype=torch.float64).transpose(0, 1)  # not contiguous either
    ours, theirs = (
        torch.ops.cldetr.ms_deform_attn_backward(g, *i)
        for g, i in ((grad, strided), (grad.contiguous(), plain))
    )
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@pytest.mark.parametrize(
    "sizes",
    [
        {"images": 0},
        {"queries": 0},
        {"points": 0},
        {"heads": 0},
        {"channels": 0},
        {"shapes": []},
        {"shapes": [], "images": 0},
    ],
    ids=str,
)
def test_empty_inputs_give_zeros(sizes):
    inputs = with_grad(*make_inputs(**sizes))
    output = ms_deform_attn(*inputs)
    value, _, locations, _ = inputs
    assert output.shape == (value.shape[0], locations.shape[1], value.shape[2] * value.shape[3])
    assert not output.any()
    output.sum().backward()
    assert not inputs[0].grad.any()


def test_points_outside_count_nothing():
    value, shapes, locations, weights = make_inputs()
    far = torch.full_like(locations, 7.0)
    far[..., 1::2, :] = -1e12
    inputs = with_grad(value, shapes, far, weights)
    output = ms_deform_attn(*inputs)
    assert not output.any()
    output.sum().backward()
    assert not any(inputs[index].grad.any() for index in (0, 2, 3))


def test_nan_location_gives_nan_in_its_own_query_and_head():
    if not load_libraries()["cpu"].loaded:
        pytest.skip("grid_sample takes NaN for a corner")
    value, shapes, locations, weights = make_inputs()
    locations[1, 4, 2, 0, 1, 0] = math.nan
    output = ms_deform_attn(value, shapes, locations, weights).unflatten(-1, (3, 8))
    expected = torch.zeros(2, 9, 3, dtype=torch.bool)
    expected[1, 4, 2] = True
    torch.testing.assert_close(output.isnan().any(-1), expected)


@settings(max_examples=25, deadline=None)
@given(
    shapes=st.lists(st.tuples(st.integers(1, 15), st.integers(1, 15)), min_size=1, max_size=4),
    heads=st.integers(1, 3),
    channels=st.sampled_from([1, 8, 12, 32, 40]),
    queries=st.integers(1, 60),
    points=st.integers(1, 5),
)
def test_bits_are_the_same_in_every_run_and_for_any_number_of_threads(**sizes):
    inputs = make_inputs(dtype=torch.float32, images=1, **sizes)
    first = (ms_deform_attn(*inputs), *gradients(ms_deform_attn, inputs))
    try:
        for threads in (1, 2, 9):  # with 9, levels are tasks of their own, and queries divided
            torch.set_num_threads(threads)
            again = (ms_deform_attn(*inputs), *gradients(ms_deform_attn, inputs))
            torch.testing.assert_close(again, first, rtol=0, atol=0)
    finally:
        torch.set_num_threads(1)


def test_more_samples_per_query_than_a_batch_holds():
    inputs = make_inputs(images=1, heads=1, queries=2, points=150, shapes=[(4, 5), (3, 3)])
    torch.testing.assert_close(
        ms_deform_attn(*inputs), ms_deform_attn_reference(*inputs), rtol=0, atol=1e-11
    )
    try:
        torch.set_num_threads(4)  # levels become tasks of their own
        ours = gradients(ms_deform_attn, inputs)
    finally:
        torch.set_num_threads(1)
    for found, expected in zip(ours, gradients(ms_deform_attn_reference, inputs), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-11)


def test_opcheck_passes():
    inputs = make_inputs(images=1, heads=2)
    torch.library.opcheck(OP, with_grad(*inputs))
    torch.library.opcheck(BACKWARD_OP, (OP(*inputs), *inputs))


def _compile_and_compare(backend, dynamic):
    def attend(value, shapes, locations, weights):
        return ms_deform_attn(value, shapes, locations.sigmoid(), weights.softmax(-1)).relu()

    compiled = torch.compile(attend, backend=backend, fullgraph=True, dynamic=dynamic)
    for queries in (9, 5):
        inputs = make_inputs(queries=queries, dtype=torch.float32)
        torch.testing.assert_close(compiled(*inputs), attend(*inputs))
        torch.testing.assert_close(gradients(compiled, inputs), gradients(attend, inputs))
    torch.compiler.reset()


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_without_graph_breaks(dynamic):
    _compile_and_compare("aot_eager", dynamic)


@pytest.mark.slow
def test_compiles_with_inductor():
    _compile_and_compare("inductor", None)


def test_autocast_on_cpu_computes_in_float32():
    value, shapes, locations, weights = make_inputs(dtype=torch.float32)
    leaves = with_grad(value.bfloat16(), shapes, locations.bfloat16(), weights)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = ms_deform_attn(*leaves)
        again = torch.ops.cldetr.ms_deform_attn(*leaves)
    expected = ms_deform_attn(
        value.bfloat16().float(), shapes, locations.bfloat16().float(), weights
    )
    torch.testing.assert_close(output, expected, rtol=0, atol=0)
    torch.testing.assert_close(again, expected, rtol=0, atol=0)
    output.sum().backward()
    assert leaves[0].grad.dtype == leaves[2].grad.dtype == torch.bfloat16


def test_autocast_leaves_float64_alone():
    inputs = make_inputs()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert ms_deform_attn(*inputs).dtype == torch.float64


def test_double_backward_is_refused():
    inputs = with_grad(*make_inputs())
    (grad,) = torch.autograd.grad(ms_deform_attn(*inputs).sum(), inputs[0], create_graph=True)
    with pytest.raises(NotImplementedError, match="second derivatives"):
        grad.sum().backward()


def _wrong(**changes):
    names = ("value", "spatial_shapes", "sampling_locations", "attention_weights")
    return tuple(
        changes.get(name, tensor) for name, tensor in zip(names, make_inputs(), strict=True)
    )


@pytest.mark.parametrize("function", [ms_deform_attn, ms_deform_attn_reference])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"value": torch.zeros(2, 42, 24).double()}, r"value must be \(N, S, M, D\)"),
        ({"value": torch.zeros(2, 43, 3, 8).double()}, "43 cells, spatial_shapes make 42"),
        ({"value": torch.zeros(2, 42, 3, 8)}, r"value of \S*[Ff]loat.* must be .*[Ff]loat"),
        ({"value": torch.zeros(2, 42, 3, 8).long()}, "value must be float32"),
        ({"spatial_shapes": torch.tensor([5, 7])}, r"spatial_shapes must be \(L, 2\)"),
        ({"spatial_shapes": torch.ones(3, 2)}, "spatial_shapes must be int64"),
        ({"spatial_shapes": torch.ones(2, 2).long()}, "do not fit .* 2 levels"),
        ({"spatial_shapes": torch.tensor([[7, 6], [0, 1], [0, 1]])}, "level 1 .* 0 x 1"),
        ({"spatial_shapes": torch.tensor([[7, 6], [-1, -1], [1, 1]])}, "level 1 .* -1 x -1"),
        ({"sampling_locations": torch.zeros(2, 9, 3, 3, 3).double()}, "sampling_locations must be"),
        ({"sampling_locations": torch.zeros(2, 9, 4, 3, 3, 2).double()}, "do not fit value"),
        ({"sampling_locations": torch.zeros(1, 9, 3, 3, 3, 2).double()}, "do not fit value"),
        ({"attention_weights": torch.zeros(2, 9, 3, 3, 2).double()}, "attention_weights .* do not"),
        ({"attention_weights": torch.zeros(2, 9, 3, 3, 3)}, "must be .*64|must be double|Double"),
    ],
    ids=lambda item: next(iter(item)) if isinstance(item, dict) else "",
)
def test_arguments_that_do_not_fit_are_refused(function, changes, message):
    with pytest.raises(ValueError, match=message):
        function(*_wrong(**changes))


def test_tensors_on_several_devices_are_refused():
    elsewhere = torch.zeros(2, 9, 3, 3, 3, dtype=torch.float64, device="meta")
    with pytest.raises(ValueError, match="one device"):
        ms_deform_attn_reference(*_wrong(attention_weights=elsewhere))


def test_fake_tensors_are_checked_too():
    from torch._subclasses.fake_tensor import FakeTensorMode

    inputs = _wrong(attention_weights=torch.zeros(2, 9, 3, 3, 2).double())
    with FakeTensorMode() as mode, pytest.raises(ValueError, match="attention_weights"):
        ms_deform_attn(*(mode.from_tensor(tensor) for tensor in inputs))


def _rerun(variable, setting, tests):
    environment = {**os.environ, variable: setting}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-k", tests, __file__]
    result = subprocess.run(
        command, env=environment, capture_output=True, text=True, cwd=Path(__file__).parents[2]
    )
    assert result.returncode == 0, result.stdout[-3000:]
    assert " passed" in result.stdout


NUMERICS = "finite_differences or any_sizes or empty"


@pytest.mark.slow
def test_the_op_is_whole_without_the_compiled_library():
    _rerun(SWITCH, "0", f"{NUMERICS} or opcheck or compiles or autocast")


@pytest.mark.slow
def test_kernels_for_processors_without_avx2_are_right():
    if not load_libraries()["cpu"].loaded:
        pytest.skip(f"the CPU library: {load_libraries()['cpu'].reason}")
    _rerun("ATEN_CPU_CAPABILITY", "default", f"{NUMERICS} or threads or rounding or batch_holds")


def test_plain_pytorch_is_told_once():
    code = (
        "import torch, logging; logging.basicConfig(format='%(message)s')\n"
        "from cldetr.layers.ms_deform_attn import ms_deform_attn\n"
        "for _ in range(2): ms_deform_attn(torch.rand(1, 4, 1, 1), torch.tensor([[2, 2]]), "
        "torch.rand(1, 1, 1, 1, 1, 2), torch.rand(1, 1, 1, 1, 1))\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, SWITCH: "0"},
        capture_output=True,
        text=True,
        check=True,
    )
    lines = [line for line in result.stderr.splitlines() if "ms_deform_attn" in line]
    assert len(lines) == 1
    assert SWITCH in lines[0]
