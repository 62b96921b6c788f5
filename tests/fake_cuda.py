"""CUDA without a GPU, for tests: what is on the wrong device, and where the host would wait.

Tensors of `FakeCudaTensor` say that they are on `cuda:0` and compute on the CPU:

    with fake_cuda(monkeypatch) as waits:
        train(cfg)                # anything on device "cuda", with gradients and autocast
    waits.most_common()           # [(("_local_scalar_dense", "hooks.py:57"), 40), …]

An operator that gets tensors of both devices raises, as on a GPU, and everything that would make
the host wait for the GPU is counted with the line of this package that asked for it. Kernels,
streams and memory are not simulated. It relies on private parts of torch: `available()` says why it
does not work with another version, and the tests skip.
"""

import contextlib
import ctypes
import traceback
from collections import Counter
from pathlib import Path

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

CPU, CUDA = torch.device("cpu"), torch.device("cuda:0")
# Operators whose result, or whose size, the host must know.
SYNCHRONISING = {"_local_scalar_dense", "nonzero", "bincount", "masked_select", "_unique2", "equal"}
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}  # take indices of the host
_waits: Counter = Counter()


class FakeCudaTensor(torch.Tensor):
    """A tensor on "cuda:0" whose numbers are in a CPU tensor, `data_on_cpu`."""

    @staticmethod
    def __new__(cls, data_on_cpu):
        self = torch.Tensor._make_wrapper_subclass(
            cls,
            data_on_cpu.shape,
            strides=data_on_cpu.stride(),
            storage_offset=data_on_cpu.storage_offset(),
            dtype=data_on_cpu.dtype,
            device=CUDA,
        )
        self.data_on_cpu = data_on_cpu
        return self

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return _dispatch(func, args, kwargs or {})

    def tolist(self):
        _note_wait("tolist")
        return self.data_on_cpu.tolist()

    def numpy(self, **kwargs):
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    __array__ = numpy

    def __reduce_ex__(self, protocol):  # files hold no devices
        return self.data_on_cpu.detach().__reduce_ex__(protocol)

    def __deepcopy__(self, memo):
        copy = FakeCudaTensor(self.data_on_cpu.detach().clone())
        if getattr(self, "_is_param", False):
            copy = torch.nn.Parameter(copy, self.requires_grad)
        return memo.setdefault(id(self), copy)


class _Everything(TorchDispatchMode):
    """Sees operators that make tensors, too."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return _dispatch(func, args, kwargs or {})


@contextlib.contextmanager
def fake_cuda(monkeypatch):
    """Makes device "cuda" usable; yields a counter of (operator, line) that would wait."""
    _waits.clear()
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: None)
    answers = {
        **{"is_available": True, "device_count": 1, "current_device": 0, "synchronize": None},
        **{"is_bf16_supported": True, "get_device_name": "fake", "max_memory_allocated": 0},
        **{"reset_peak_memory_stats": None, "get_device_capability": (8, 0)},
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda *given, answer=answer, **named: answer)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self, *given: self)
    monkeypatch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
    monkeypatch.setattr(torch, "inference_mode", torch.no_grad)  # it refuses tensor subclasses
    torch._C._set_only_lift_cpu_tensors(True)
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        with (
            no_context(),
            torch.autograd.set_multithreading_enabled(False),
            sdpa_kernel(SDPBackend.MATH),
            _Everything(),
        ):
            yield _waits
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
        torch._C._set_only_lift_cpu_tensors(False)


def available():
    """Why this version of torch does not allow the trick; empty where it does."""
    if torch.cuda.is_available():
        return "there is a real GPU"
    for name in ("_ensureCUDADeviceGuardSet", "_set_only_lift_cpu_tensors"):
        if not hasattr(torch._C, name):
            return f"torch {torch.__version__} has no torch._C.{name}"
    library = Path(torch.__file__).parent / "lib/libtorch_cpu.so"
    if not library.exists() or not hasattr(ctypes.CDLL(str(library)), _HOOKS):
        return f"torch {torch.__version__} does not show its CUDA hooks"
    return ""


def _note_wait(what):
    frames = [frame for frame in traceback.extract_stack() if "/cldetr/" in frame.filename]
    where = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "elsewhere"
    _waits[what, where] += 1


def _dispatch(func, args, kwargs):
    """Runs an operator on the CPU tensors behind its arguments, if any is on the fake device."""
    name = func._schema.name.partition("::")[2]
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    on_cuda = any(isinstance(x, FakeCudaTensor) for x in tensors)
    on_host = [x for x in tensors if not isinstance(x, FakeCudaTensor) and x.dim() > 0]
    device = kwargs.get("device")
    to_cuda = device is not None and torch.device(device).type == "cuda"
    if not on_cuda and not to_cuda:
        return func(*args, **kwargs)
    if name in ("copy_", "_to_copy"):
        return _copy(func, name, args, kwargs)
    indexed = name in INDEXING and isinstance(args[0], FakeCudaTensor)
    sizes_of_levels = name.startswith("ms_deform_attn") and len(on_host) == 1
    if on_cuda and on_host and not indexed and not sizes_of_levels:
        raise RuntimeError(f"{name}: expected all tensors on one device, got cuda:0 and cpu")
    masked = name == "index" and any(x is not None and x.dtype == torch.bool for x in args[1])
    if name in SYNCHRONISING or masked or (indexed and on_host):
        _note_wait(name)
    inner, named = tree_map(
        lambda x: x.data_on_cpu if isinstance(x, FakeCudaTensor) else x, (args, kwargs)
    )
    named |= {key: value for key, value in (("device", CPU), ("pin_memory", False)) if key in named}
    return _wrap(func, _compute(func, name, inner, named), args, kwargs, device is None or to_cuda)


def _compute(func, name, args, kwargs):
    """The operator on the CPU, which cannot take softmax from half to single precision."""
    if name in ("_softmax", "_log_softmax") and args[2]:
        return func(args[0].float(), args[1], False)
    if name in ("_softmax_backward_data", "_log_softmax_backward_data") and len(args) == 4:
        return func(*args[:3], args[0].dtype).to(args[3])
    return func(*args, **kwargs)


def _wrap(func, result, args, kwargs, to_cuda):
    """Results as fake tensors; arguments that the operator wrote into as they were given."""
    written = {}
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[index] if index < len(args) else kwargs.get(argument.name)
            written |= dict.fromkeys(argument.alias_info.before_set, given)

    def wrap_one(value, info):
        if info is not None and info.is_write:
            return written[next(iter(info.before_set))]
        if not to_cuda:
            return value
        return tree_map(lambda x: FakeCudaTensor(x) if isinstance(x, torch.Tensor) else x, value)

    returns = func._schema.returns
    if not returns:
        return None
    if len(returns) == 1:
        return wrap_one(result, returns[0].alias_info)
    return tuple(
        wrap_one(value, each.alias_info) for value, each in zip(result, returns, strict=True)
    )


def _copy(func, name, args, kwargs):
    """Copies between the devices; a copy that is not `non_blocking` makes the host wait."""
    source = args[0] if name == "_to_copy" else args[1]
    from_cuda = isinstance(source, FakeCudaTensor)
    plain = source.data_on_cpu if from_cuda else source
    if name == "copy_":
        target = args[0]
        to_cuda = isinstance(target, FakeCudaTensor)
        (target.data_on_cpu if to_cuda else target).copy_(plain)
    else:
        device = kwargs.get("device")
        to_cuda = from_cuda if device is None else torch.device(device).type == "cuda"
        kept = {key: value for key, value in kwargs.items() if key != "non_blocking"}
        target = func(plain, **{**kept, "device": CPU, "pin_memory": False})
        target = FakeCudaTensor(target) if to_cuda else target
    if from_cuda != to_cuda and not (kwargs.get("non_blocking") or True in args[2:]):
        _note_wait("copy to the GPU" if to_cuda else "copy to the host")
    return target


_HOOKS = "_ZN2at6detail12getCUDAHooksEv"  # at::detail::getCUDAHooks()


@contextlib.contextmanager
def no_context():
    """Lets autograd believe that device 0 has no context, so that it works without a GPU.

    Autograd asks the CUDA hooks, which throw where there is no GPU. In a copy of their table of
    virtual functions the fifth (ATen/detail/AcceleratorHooksInterface.h), `hasPrimaryContext`,
    answers no.
    """
    torch._C._ensureCUDADeviceGuardSet()
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib/libtorch_cpu.so"))
    getattr(library, _HOOKS).restype = ctypes.c_void_p
    pointers = ctypes.POINTER(ctypes.c_void_p)
    hooks = ctypes.cast(getattr(library, _HOOKS)(), pointers)
    before = hooks[0]
    old = ctypes.cast(before, pointers)
    table = (ctypes.c_void_p * 96)(*(old[index] for index in range(-2, 94)))
    answer = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_int8)(lambda *given: False)
    table[2 + 4] = ctypes.cast(answer, ctypes.c_void_p).value
    hooks[0] = ctypes.addressof(table) + 2 * ctypes.sizeof(ctypes.c_void_p)
    try:
        yield
    finally:
        hooks[0] = before
