"""Attention on numpy arrays, for programs without torch. SPDX-License-Identifier: Apache-2.0

    from ffpa.numpy import attention, attention_backward
    o, lse = attention(q, k, v, causal=True, return_lse=True)
    grads = attention_backward(dout, q, k, v, o, lse, causal=True)      # grads.dq, grads.dk, grads.dv

Arrays are [B, H, N, D] of float32, float16, float64 (reference engine) or bfloat16: the last either with the dtype of
ml_dtypes, or as uint16 that hold its bits. Any strides are fine; results have the form and the order of memory of their
inputs. The options mean what they mean in :func:`ffpa.attention`.

Errors: RuntimeError for shapes, dtypes and values, naming argument, rule and value; NotImplementedError for what no
kernel of this build and machine computes; TypeError for arguments that are no arrays or numbers.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from . import _native

__all__ = ["Gradients", "attention", "attention_backward"]

Array = npt.NDArray[Any]

_DTYPES = {
    "float64": "fp64",
    "float32": "fp32",
    "float16": "fp16",
    "bfloat16": "bf16",
    "uint16": "bf16",  # its bits
    "bool": "bool",
    "int32": "int32",
    "int64": "int64",
    "int8": "int8",
}
_INPUTS = tuple(name for name in _native.OPTIONAL_TENSORS if name != "dropout_state")


class Gradients(NamedTuple):
    """Gradients of :func:`attention`, each with its input's shape and dtype; None where not asked for."""

    dq: Array | None
    dk: Array | None
    dv: Array | None
    dbias: Array | None
    dsinks: Array | None


_GRADIENT_OF = {"dq": "q", "dk": "k", "dv": "v", "dbias": "bias", "dsinks": "sinks"}


def attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    mask: Array | None = None,
    bias: Array | None = None,
    alibi_slopes: Array | None = None,
    sinks: Array | None = None,
    causal: bool = False,
    anchor: Literal["top_left", "bottom_right"] = "top_left",
    window: tuple[int, int] = (-1, -1),
    scale: float | None = None,
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    dropout_seed: int = 0,
    dropout_offset: int = 0,
    cu_seqlens_q: Array | None = None,
    cu_seqlens_kv: Array | None = None,
    max_seqlen_q: int = 0,
    max_seqlen_kv: int = 0,
    seqlens_kv: Array | None = None,
    block_table: Array | None = None,
    kv_batch_idx: Array | None = None,
    deterministic: bool = False,
    batch_invariant: bool = False,
    num_splits: int = 0,
    num_threads: int = 0,
    return_lse: bool = False,
    engine: str | None = None,
    kernel: str | None = None,
) -> Array | tuple[Array, Array]:
    """o [B, H_q, N_q, D_v], or (o, lse) with ``return_lse``.

    ``q`` [B, H_q, N_q, D_qk], ``k`` [B, H_kv, N_kv, D_qk], ``v`` [B, H_kv, N_kv, D_v]; packed and paged shapes as in
    :func:`ffpa.attention`. ``mask`` and ``bias`` broadcast to [B, H_q, N_q, N_kv]. ``dropout_seed`` and
    ``dropout_offset`` decide the dropout mask. ``num_threads``: 0 = as many as the machine allows. lse is float32
    [B, H_q, N_q], natural log (float64 if q is).
    """
    options = dict(locals())
    arrays = _take_arrays(options)
    del options["return_lse"]
    q = arrays["q"]
    width = arrays["v"].shape[-1:]
    arrays["o"] = np.empty_like(q, shape=q.shape[:3] + width) if q.ndim == 4 else np.empty(width, q.dtype)
    arrays["lse"] = np.empty(q.shape[:3], np.float64 if q.dtype == np.float64 else np.float32)
    _native.run(_native.forward_problem(_specs(arrays), **options))
    return (arrays["o"], arrays["lse"]) if return_lse else arrays["o"]


def attention_backward(
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    o: Array,
    lse: Array,
    *,
    dlse: Array | None = None,
    needed: Iterable[str] = ("dq", "dk", "dv", "dbias", "dsinks"),
    **options: Any,
) -> Gradients:
    """Gradients of the call ``o, lse = attention(q, k, v, return_lse=True, **options)``, given ``dout`` like o.

    ``dlse`` [B, H_q, N_q]: gradient of lse, 0 if None. ``needed``: names of the gradients to compute; those of absent
    inputs are None all the same. ``options`` are :func:`attention`'s, with the values that the forward had;
    ``deterministic`` makes the bits repeat from call to call.
    """
    defaults: dict[str, Any] = attention.__kwdefaults__ or {}
    for name in options:
        if name not in defaults or name == "return_lse":
            raise TypeError(f"attention_backward() has no option {name!r}")
    options = {**defaults, **options, "q": q, "k": k, "v": v}
    del options["return_lse"]
    bias = options["bias"]
    arrays = _take_arrays(options)
    arrays |= {"o": _array("o", o), "lse": _array("lse", lse)}
    needed = set(needed)
    if unknown := needed - _GRADIENT_OF.keys():
        raise RuntimeError(f"needed: must be among {', '.join(_GRADIENT_OF)}, but has {', '.join(sorted(unknown))}")
    gradients = {
        name: np.empty_like(arrays[of]) for name, of in _GRADIENT_OF.items() if name in needed and of in arrays
    }
    others = {"dout": _array("dout", dout)}
    if dlse is not None:
        others["dlse"] = _array("dlse", dlse)
    forward = _native.forward_problem(_specs(arrays), **options)
    _native.run(_native.backward_problem(forward, _specs(others | gradients)))
    if "dbias" in gradients:
        gradients["dbias"] = gradients["dbias"].reshape(np.shape(bias))
    return Gradients(*(gradients.get(name) for name in Gradients._fields))


def _take_arrays(options: dict[str, Any]) -> dict[str, Array]:
    """Move the arrays that are given out of the arguments of a call."""
    arrays = {name: _array(name, options.pop(name)) for name in ("q", "k", "v")}
    for name in _INPUTS:
        x = options.pop(name)
        if x is not None:
            x = _array(name, x)
            arrays[name] = x[(None,) * (4 - x.ndim)] if name in ("mask", "bias") and x.ndim < 4 else x
    return arrays


def _array(name: str, x: object) -> Array:
    """The array itself, or a copy where its strides have no form in the C interface."""
    if not isinstance(x, np.ndarray):
        raise TypeError(f"{name}: must be a numpy array, but is {type(x).__name__}")
    if x.dtype.name not in _DTYPES or not x.dtype.isnative:
        raise RuntimeError(f"{name}: dtype must be one of {', '.join(_DTYPES)}, but is {x.dtype}")
    if not x.flags.aligned or any(stride < 0 or stride % x.itemsize for stride in x.strides):
        return x.copy()
    return x


def _specs(arrays: dict[str, Array]) -> dict[str, _native.TensorSpec]:
    return {
        name: _native.TensorSpec(
            x.ctypes.data, _DTYPES[x.dtype.name], x.shape, [stride // x.itemsize for stride in x.strides]
        )
        for name, x in arrays.items()
    }
