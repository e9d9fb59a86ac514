"""libffpa.so through ctypes: a mirror of ffpa.h. SPDX-License-Identifier: Apache-2.0

The torch ops have a binding of their own (python/binding); this one serves what needs no torch: ``ffpa.numpy``, lists
of kernels and devices, ``explain``. The library is looked for in the folder that FFPA_LIBRARY_PATH names, else beside
this file.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Mapping, Sequence
from ctypes import POINTER, c_char, c_char_p, c_double, c_int, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

__all__ = [
    "BackwardProblem",
    "DeviceInfo",
    "ForwardProblem",
    "KernelInfo",
    "Plan",
    "Tensor",
    "TensorSpec",
    "devices",
    "kernels",
    "library_path",
    "version",
]

DTYPES = ("none", "fp64", "fp32", "fp16", "bf16", "bool", "int32", "int64", "fp8_e4m3", "fp4_e2m1", "int8")
ENGINES = ("auto", "ref", "cpu", "cuda")
DEVICES = ("cpu", "cuda")
ANCHORS = ("top_left", "bottom_right")
_OK, _INVALID_ARGUMENT, _NOT_SUPPORTED = 0, 1, 2
_MAX_RANK = 4
OPTIONAL_TENSORS = (
    *("mask", "bias", "alibi_slopes", "sinks", "cu_seqlens_q", "cu_seqlens_kv"),
    *("seqlens_kv", "block_table", "kv_batch_idx", "dropout_state"),
)


class Tensor(ctypes.Structure):
    """``ffpa_tensor``."""

    _fields_ = (
        ("data", c_void_p),
        ("dtype", c_int32),
        ("device_type", c_int32),
        ("device_index", c_int32),
        ("rank", c_int32),
        ("extent", c_int64 * _MAX_RANK),
        ("stride", c_int64 * _MAX_RANK),
    )


class ForwardProblem(ctypes.Structure):
    """``ffpa_forward_problem``."""

    _fields_ = (
        ("struct_size", c_uint64),
        *((name, Tensor) for name in ("q", "k", "v", "o", "lse", "mask", "bias", "alibi_slopes", "sinks")),
        *((name, Tensor) for name in ("cu_seqlens_q", "cu_seqlens_kv", "seqlens_kv", "block_table", "kv_batch_idx")),
        *((name, Tensor) for name in ("q_scale", "k_scale", "v_scale", "dropout_state")),
        ("scale", c_double),
        ("softcap", c_double),
        ("dropout_p", c_double),
        ("dropout_seed", c_uint64),
        ("dropout_offset", c_uint64),
        ("window_left", c_int64),
        ("window_right", c_int64),
        ("max_seqlen_q", c_int64),
        ("max_seqlen_kv", c_int64),
        *((name, c_int32) for name in ("has_scale", "causal", "anchor", "deterministic", "batch_invariant")),
        *((name, c_int32) for name in ("num_splits", "num_threads", "engine")),
        ("kernel", c_char_p),
    )


class BackwardProblem(ctypes.Structure):
    """``ffpa_backward_problem``."""

    _fields_ = (
        ("struct_size", c_uint64),
        ("forward", ForwardProblem),
        *((name, Tensor) for name in ("dout", "dlse", "dq", "dk", "dv", "dbias", "dsinks")),
    )


class Plan(ctypes.Structure):
    """``ffpa_plan``."""

    _fields_ = (
        ("struct_size", c_uint64),
        ("workspace_bytes", c_uint64),
        ("fingerprint", c_uint64),
        ("kernel", c_int32),
        ("num_splits", c_int32),
        ("num_threads", c_int32),
        ("reserved", c_int32 * 9),
    )


class _KernelInfo(ctypes.Structure):
    _fields_ = (
        ("struct_size", c_uint64),
        ("name", c_char_p),
        ("summary", c_char_p),
        ("pass_", c_int32),
        ("engine", c_int32),
        ("usable", c_int32),
        ("dtypes", c_uint32),
        ("min_d", c_int64),
        ("max_d", c_int64),
    )


class _DeviceInfo(ctypes.Structure):
    _fields_ = (
        ("struct_size", c_uint64),
        ("name", c_char * 128),
        ("features", c_char * 128),
        ("processors", c_int32),
        ("shared_memory_bytes", c_int32),
        ("memory_bytes", c_int64),
    )


class KernelInfo(NamedTuple):
    """A kernel of this build."""

    name: str
    """<arch>_<pass>_<idea>"""
    summary: str
    pass_: str
    """"forward" or "backward"."""
    engine: str
    """"ref", "cpu" or "cuda"."""
    usable: bool
    """Whether this machine can run it."""
    dtypes: tuple[str, ...]
    """Dtypes of q that it takes: "fp64", "fp32", "fp16", "bf16"."""
    min_d: int
    max_d: int
    """Head dims it takes; max_d 0 = no limit."""


class DeviceInfo(NamedTuple):
    """A device that the library sees."""

    type: str
    """"cpu" or "cuda"."""
    index: int  # type: ignore[assignment]  # hides tuple's
    name: str
    features: str
    processors: int
    """Threads this process may use, or multiprocessors."""
    shared_memory_bytes: int
    memory_bytes: int


class TensorSpec(NamedTuple):
    """What :func:`tensor` needs to know of an array, whichever library it is from."""

    data: int
    dtype: str
    shape: Sequence[int]
    strides: Sequence[int]
    """In elements."""
    device_type: str = "cpu"
    device_index: int = 0


def library_folder() -> Path:
    """The folder of libffpa.so and libffpa_torch.so."""
    return Path(os.environ.get("FFPA_LIBRARY_PATH") or Path(__file__).parent)


def library_path() -> Path:
    """The file that is loaded."""
    return library_folder() / "libffpa.so"


@cache
def lib() -> ctypes.CDLL:
    """The library, loaded once. OSError if it is not there, RuntimeError if it is of another version."""
    loaded = ctypes.CDLL(str(library_path()))
    loaded.ffpa_last_error.restype = c_char_p
    for pass_, problem in (("forward", ForwardProblem), ("backward", BackwardProblem)):
        getattr(loaded, f"ffpa_{pass_}_problem_init").argtypes = (POINTER(problem),)
        getattr(loaded, f"ffpa_{pass_}_plan").argtypes = (POINTER(problem), POINTER(Plan))
        run = getattr(loaded, f"ffpa_{pass_}_run")
        run.argtypes = (POINTER(problem), POINTER(Plan), c_void_p, c_size_t, c_void_p)
        explain = getattr(loaded, f"ffpa_{pass_}_explain")
        explain.argtypes, explain.restype = (POINTER(problem), c_char_p, c_size_t), c_size_t
    loaded.ffpa_kernel_at.argtypes = (c_int, POINTER(_KernelInfo))
    loaded.ffpa_device_at.argtypes = (c_int, c_int, POINTER(_DeviceInfo))
    for problem in (ForwardProblem, BackwardProblem):
        probe = problem()
        _initialise(loaded, probe)
        if probe.struct_size != ctypes.sizeof(problem):
            raise RuntimeError(
                f"{library_path()}: {problem.__name__} has {probe.struct_size} bytes there and "
                f"{ctypes.sizeof(problem)} here; library and package are of different versions"
            )
    return loaded


def _initialise(library: ctypes.CDLL, problem: ForwardProblem | BackwardProblem) -> None:
    pass_ = "forward" if isinstance(problem, ForwardProblem) else "backward"
    getattr(library, f"ffpa_{pass_}_problem_init")(ctypes.byref(problem))


def last_error() -> str:
    """The text of this thread's last refusal."""
    return bytes(lib().ffpa_last_error()).decode()


def check(status: int) -> None:
    """RuntimeError or NotImplementedError with the library's words, unless status is FFPA_OK."""
    if status != _OK:
        raise (NotImplementedError if status == _NOT_SUPPORTED else RuntimeError)(last_error())


def version() -> str:
    """Version of the library that is loaded, "0.1.0"."""
    number = int(lib().ffpa_version())
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


@cache
def kernels() -> tuple[KernelInfo, ...]:
    """Every kernel of this build, those of one pass best first."""
    found = []
    for index in range(lib().ffpa_kernel_count()):
        info = _KernelInfo(struct_size=ctypes.sizeof(_KernelInfo))
        check(lib().ffpa_kernel_at(index, ctypes.byref(info)))
        dtypes = tuple(name for bit, name in enumerate(DTYPES) if info.dtypes >> bit & 1)
        pass_ = ("forward", "backward")[info.pass_]
        found.append(
            KernelInfo(
                info.name.decode(),
                info.summary.decode(),
                pass_,
                ENGINES[info.engine],
                bool(info.usable),
                dtypes,
                info.min_d,
                info.max_d,
            )
        )
    return tuple(found)


def engine_index(name: str) -> int:
    """Value of an engine's name ("auto", "ref", "cpu", "cuda"). RuntimeError for any other."""
    if not isinstance(name, str):
        raise TypeError(f"engine: must be a string, but is {type(name).__name__}")
    if name not in ENGINES:
        raise RuntimeError(f'engine: must be one of {", ".join(ENGINES)}, but is "{name}"')
    return ENGINES.index(name)


def anchor_index(name: str) -> int:
    """Value of an anchor's name ("top_left", "bottom_right"). RuntimeError for any other."""
    if not isinstance(name, str):
        raise TypeError(f"anchor: must be a string, but is {type(name).__name__}")
    if name not in ANCHORS:
        raise RuntimeError(f'anchor: must be "top_left" or "bottom_right", but is "{name}"')
    return ANCHORS.index(name)


def devices() -> list[DeviceInfo]:
    """The CPU, then the GPUs that this build and the driver can use."""
    return list(_devices())


def _devices() -> Iterator[DeviceInfo]:
    for type_index, type_name in enumerate(DEVICES):
        for index in range(lib().ffpa_device_count(type_index)):
            info = _DeviceInfo(struct_size=ctypes.sizeof(_DeviceInfo))
            check(lib().ffpa_device_at(type_index, index, ctypes.byref(info)))
            yield DeviceInfo(
                type_name,
                index,
                info.name.decode(errors="replace"),
                info.features.decode(),
                info.processors,
                info.shared_memory_bytes,
                info.memory_bytes,
            )


def tensor(name: str, spec: TensorSpec | None) -> Tensor:
    """An ``ffpa_tensor``; all zero for None. RuntimeError for more than 4 axes or an unknown dtype."""
    if spec is None:
        return Tensor()
    rank = len(spec.shape)
    if not 1 <= rank <= _MAX_RANK:
        raise RuntimeError(f"{name}: rank must be from 1 to {_MAX_RANK}, but is {rank}")
    if spec.dtype not in DTYPES[1:]:
        raise RuntimeError(f"{name}: dtype must be one of {', '.join(DTYPES[1:])}, but is {spec.dtype}")
    return Tensor(
        data=spec.data or None,
        dtype=DTYPES.index(spec.dtype),
        device_type=DEVICES.index(spec.device_type),
        device_index=spec.device_index,
        rank=rank,
        extent=(c_int64 * _MAX_RANK)(*spec.shape),
        stride=(c_int64 * _MAX_RANK)(*spec.strides),
    )


def forward_problem(
    tensors: Mapping[str, TensorSpec | None],
    *,
    window: tuple[int, int] = (-1, -1),
    scale: float | None = None,
    anchor: str = "top_left",
    engine: str | None = None,
    kernel: str | None = None,
    **numbers: Any,
) -> ForwardProblem:
    """``ffpa_forward_problem`` from named tensors and the options of :func:`ffpa.attention`.

    ``numbers``: further fields by their names. TypeError or RuntimeError for values that do not fit them.
    """
    problem = ForwardProblem()
    _initialise(lib(), problem)
    for name, spec in tensors.items():
        setattr(problem, name, tensor(name, spec))
    numbers["window_left"], numbers["window_right"] = window
    numbers["anchor"] = anchor_index(anchor)
    numbers["engine"] = 0 if engine is None else engine_index(engine)
    if scale is not None:
        numbers["has_scale"], numbers["scale"] = 1, scale
    if kernel is not None:
        problem.kernel = kernel.encode()
    for name, value in numbers.items():
        try:
            setattr(problem, name, value)
        except TypeError:
            raise TypeError(f"{name}: must be a number, but is {type(value).__name__}") from None
        stored = getattr(problem, name)
        if stored != value and value == value:  # an int that does not fit; NaN never equals itself
            raise RuntimeError(f"{name}: must fit its field of the C interface, but is {value}")
    return problem


def backward_problem(forward: ForwardProblem, tensors: Mapping[str, TensorSpec | None]) -> BackwardProblem:
    """``ffpa_backward_problem`` from the forward's and the gradients' tensors."""
    problem = BackwardProblem()
    _initialise(lib(), problem)
    problem.forward = forward
    for name, spec in tensors.items():
        setattr(problem, name, tensor(name, spec))
    return problem


def plan_of(problem: ForwardProblem | BackwardProblem) -> Plan:
    """Validate a problem and choose its kernel; RuntimeError or NotImplementedError if there is none."""
    pass_ = "forward" if isinstance(problem, ForwardProblem) else "backward"
    plan = Plan()
    check(getattr(lib(), f"ffpa_{pass_}_plan")(ctypes.byref(problem), ctypes.byref(plan)))
    return plan


def run(problem: ForwardProblem | BackwardProblem) -> Plan:
    """Plan and run a problem in host memory; returns the plan."""
    pass_ = "forward" if isinstance(problem, ForwardProblem) else "backward"
    plan = plan_of(problem)
    memory = (c_char * (plan.workspace_bytes + 255))() if plan.workspace_bytes else None
    address = (ctypes.addressof(memory) + 255) // 256 * 256 if memory is not None else None
    check(
        getattr(lib(), f"ffpa_{pass_}_run")(
            ctypes.byref(problem), ctypes.byref(plan), address, plan.workspace_bytes, None
        )
    )
    return plan


def explain(problem: ForwardProblem | BackwardProblem) -> str:
    """The text of ``ffpa_forward_explain`` or ``ffpa_backward_explain``."""
    pass_ = "forward" if isinstance(problem, ForwardProblem) else "backward"
    function = getattr(lib(), f"ffpa_{pass_}_explain")
    bytes_needed = function(ctypes.byref(problem), None, 0)
    text = ctypes.create_string_buffer(bytes_needed)
    function(ctypes.byref(problem), text, bytes_needed)
    return text.value.decode()
