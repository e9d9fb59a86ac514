"""torch.ops.ffpa: loading, fakes, thin calls. SPDX-License-Identifier: Apache-2.0

The ops are defined in python/binding/ffpa_torch.cc and work on [B, H, N, D]. Everything above them is Python:
``_autograd`` (gradients), ``_attention`` and ``_sdpa`` (what people call).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import _native

__all__ = ["append", "backward", "draw_dropout_state", "forward"]

_binding = _native.library_folder() / "libffpa_torch.so"
_native.lib()  # libffpa.so first: the binding finds it by name
torch.ops.load_library(str(_binding))
if not hasattr(torch.ops.ffpa, "append"):
    raise ImportError(f"{_binding}: its operators were not registered; it needs torch 2.10 or later")

_forward = torch.ops.ffpa.forward.default
_backward = torch.ops.ffpa.backward.default
_append = torch.ops.ffpa.append.default

NOT_SUPPORTED = "not supported: "  # how the binding marks FFPA_NOT_SUPPORTED


def _call(op: Any, arguments: Sequence[Any]) -> Any:
    if torch.compiler.is_compiling():
        return op(*arguments)
    try:
        return op(*arguments)
    except RuntimeError as error:
        text = str(error)
        if text.startswith(NOT_SUPPORTED):
            raise NotImplementedError(text.removeprefix(NOT_SUPPORTED)) from None
        raise


def forward(tensors: Sequence[Tensor | None], options: Sequence[Any]) -> tuple[Tensor, Tensor]:
    """(o, lse). ``tensors``: q, k, v, mask, bias, alibi_slopes, sinks, cu_seqlens_q, cu_seqlens_kv, seqlens_kv,
    block_table, kv_batch_idx, dropout_state; ``options``: :class:`ffpa._native.Options`. Shapes as in ffpa.h."""
    o, lse = _call(_forward, (*tensors, *options))
    return o, lse


def backward(
    dout: Tensor,
    dlse: Tensor | None,
    tensors: Sequence[Tensor | None],
    o: Tensor,
    lse: Tensor,
    options: Sequence[Any],
    needed: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(dq, dk, dv, dbias, dsinks); what ``needed`` leaves out is an empty tensor."""
    dq, dk, dv, dbias, dsinks = _call(_backward, (dout, dlse, *tensors, o, lse, *options, *needed))
    return dq, dk, dv, dbias, dsinks


def append(
    k_new: Tensor,
    v_new: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    seqlens_kv: Tensor | None = None,
    block_table: Tensor | None = None,
    kv_batch_idx: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    q: Tensor | None = None,
    rotary_interleaved: bool = False,
    rotary_q_fixed: bool = False,
) -> Tensor:
    """Write k_new and v_new [B, H_kv, N_new, D] into a cache, in place; returns rotated q ([0] without q).

    ``ffpa_append`` of ffpa.h, whose rules and errors hold.
    """
    tensors = (k_new, v_new, k_cache, v_cache, seqlens_kv, block_table, kv_batch_idx, rotary_cos, rotary_sin, q)
    rotated: Tensor = _call(_append, (*tensors, rotary_interleaved, rotary_q_fixed))
    return rotated


def draw_dropout_state(device: torch.device) -> Tensor:
    """{seed, offset} int64 [2] from torch's generator of ``device``: repeated by torch.manual_seed, new at each call."""
    return torch.randint(0, 2**62, (2,), dtype=torch.int64, device=device)


# --------------------------------------------------------------------------------------------------------------- fakes


def dense_like(like: Tensor, shape: Sequence[int | torch.SymInt]) -> Tensor:
    """Uninitialised, dense, in the order of memory that ``like`` has: `dense_like` of the binding, for fakes."""
    strides, order = like.stride(), list(range(like.dim()))
    for i in range(1, like.dim()):
        at = i
        for j in range(i - 1, -1, -1):
            a, b = order[j], order[at]
            if strides[a] == 0 or strides[b] == 0 or shape[a] == 1 or shape[b] == 1:
                continue
            if strides[a] >= strides[b]:
                break
            order[j], order[at] = order[at], order[j]
            at = j
    dense: list[int | torch.SymInt] = [0] * like.dim()
    step: int | torch.SymInt = 1
    for axis in reversed(order):
        dense[axis] = step
        step = step * (1 if shape[axis] == 0 else shape[axis])
    return torch.empty_strided(tuple(shape), tuple(dense), dtype=like.dtype, device=like.device)


@torch.library.register_fake("ffpa::forward")
def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    lse = torch.empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32), device=q.device)
    return dense_like(q, (*q.shape[:3], v.shape[3])), lse


@torch.library.register_fake("ffpa::backward")
def _(dout: Tensor, dlse: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    q, k, v, bias, sinks = rest[0], rest[1], rest[2], rest[4], rest[6]
    dq, dk, dv, dbias, dsinks = (
        dense_like(x, x.shape) if need else q.new_empty(0)
        for x, need in zip((q, k, v, bias, sinks), rest[-5:], strict=True)
    )
    return dq, dk, dv, dbias, dsinks


@torch.library.register_fake("ffpa::append")
def _(k_new: Tensor, v_new: Tensor, k_cache: Tensor, v_cache: Tensor, *rest: Any) -> Tensor:
    q = rest[5]
    return k_new.new_empty(0) if q is None else dense_like(q, q.shape)
