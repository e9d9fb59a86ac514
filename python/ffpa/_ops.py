"""torch.ops.ffpa: loading, error types, fakes. SPDX-License-Identifier: Apache-2.0

The ops are defined in python/binding/ops.cc and work on [B, H, N, D]. What is above them is Python too: ``_vmap``
(batching rules), ``_autograd`` (gradients), ``_attention`` and ``_sdpa`` (what people call).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import _native

__all__ = ["GRADIENTS", "Call", "append", "backward", "draw_dropout_state", "forward"]


class Call(NamedTuple):
    """The arguments of torch.ops.ffpa.forward, in its order and with its defaults."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None = None
    bias: Tensor | None = None
    scale: float | None = None
    causal: bool = False
    dropout_p: float = 0.0
    dropout_state: Tensor | None = None
    sinks: Tensor | None = None
    alibi_slopes: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_kv: Tensor | None = None
    seqlens_kv: Tensor | None = None
    block_table: Tensor | None = None
    kv_batch_idx: Tensor | None = None
    bottom_right: bool = False
    window_left: int = -1
    window_right: int = -1
    softcap: float = 0.0
    max_seqlen_q: int = 0
    max_seqlen_kv: int = 0
    deterministic: bool = False
    batch_invariant: bool = False
    num_splits: int = 0
    engine: int = 0
    kernel_name: str | None = None  # not "kernel": torch.compile gives that keyword a meaning of its own


GRADIENTS = tuple(Call._fields.index(name) for name in ("q", "k", "v", "bias", "sinks"))
"""Places in :class:`Call` of the inputs that have gradients, in the order of backward's results and bits."""

_binding = _native.library_folder() / "libffpa_torch.so"
_native.lib()  # libffpa.so first: the binding finds it by name
torch.ops.load_library(str(_binding))
if not hasattr(torch.ops.ffpa, "append_kv_"):
    raise ImportError(f"{_binding}: its operators were not registered; it needs torch 2.10 or later")

forward_op = torch.ops.ffpa.forward.default
backward_op = torch.ops.ffpa.backward.default
_append_op = torch.ops.ffpa.append_kv_.default

_NOT_SUPPORTED = "FFPA_NOT_SUPPORTED: "  # so the binding begins the text of this status


def reworded(error: RuntimeError) -> Exception:
    """What an op raised, as the type that it means: torch's stable interface knows RuntimeError only."""
    text = str(error)
    if text.startswith(_NOT_SUPPORTED):
        return NotImplementedError(text.removeprefix(_NOT_SUPPORTED))
    if "Expected a value of type" in text:  # torch's parser of arguments
        return TypeError(text.split("\nPosition", 1)[0])
    return error


def _run(op: Callable[..., Any], *arguments: Any) -> Any:
    if torch.compiler.is_compiling():
        return op(*arguments)
    try:
        return op(*arguments)
    except RuntimeError as error:
        raise reworded(error) from None


def forward(*call: Any, needs: int = 0) -> tuple[Tensor, Tensor]:
    """(o, lse) of the arguments of :class:`Call`, without gradients.

    ``needs``: bits of the gradients that will be asked for, in the order of GRADIENTS. What no kernel could
    differentiate is refused.
    """
    if needs:
        call = (*Call(*call), needs)
    o, lse = _run(forward_op, *call)
    return o, lse


def backward(
    dout: Tensor, dlse: Tensor | None, o: Tensor, lse: Tensor, needs: int, *call: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(dq, dk, dv, dbias, dsinks); those whose bit is not in ``needs`` have no elements."""
    dq, dk, dv, dbias, dsinks = _run(backward_op, dout, dlse, o, lse, needs, *call)
    return dq, dk, dv, dbias, dsinks


def append(
    k_new: Tensor,
    v_new: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor | None,
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
    """Write k_new and v_new [B, H_kv, N_new, D] into a cache, in place; returns q rotated, no elements without q.

    ``ffpa_append`` of ffpa.h, whose rules and errors hold. v_new and v_cache may be None together.
    """
    tensors = (k_new, v_new, k_cache, v_cache, seqlens_kv, block_table, kv_batch_idx, rotary_cos, rotary_sin, q)
    rotated: Tensor = _run(_append_op, *tensors, rotary_interleaved, rotary_q_fixed)
    return rotated


def draw_dropout_state(device: torch.device) -> Tensor:
    """{seed, offset}, int64 [2], from torch's generator of ``device``: new at each call; manual_seed repeats it."""
    return torch.randint(0, 2**62, (2,), dtype=torch.int64, device=device)


# --------------------------------------------------------------------------------------------------------------- fakes


def dense_like(like: Tensor, shape: Sequence[int]) -> Tensor:
    """Uninitialised, without holes, the axes in memory in the order of ``like``'s; row-major if that is broadcast.
    The rule of `dense_like` in python/binding/tensors.h."""
    strides = like.stride()
    order = list(range(like.dim()))
    if not any(stride == 0 and extent > 1 for stride, extent in zip(strides, like.shape, strict=True)):
        for axis in range(1, like.dim()):  # by insertion: strides may be symbols
            place = axis
            while place > 0 and strides[order[place - 1]] < strides[axis]:
                order[place] = order[place - 1]
                place -= 1
            order[place] = axis
    dense, step = [0] * like.dim(), 1
    for axis in reversed(order):
        dense[axis] = step
        step = step * max(shape[axis], 1)
    return torch.empty_strided(tuple(shape), tuple(dense), dtype=like.dtype, device=like.device)


def _nothing(on: Tensor) -> Tensor:
    return torch.empty(0, dtype=torch.float32, device=on.device)


def _check_devices(q: Tensor, names: Sequence[str], others: Sequence[Any]) -> None:
    """A meta tensor among others draws a call here, which the library would refuse."""
    for name, x in zip(names, others, strict=False):
        if isinstance(x, Tensor) and x.device != q.device:
            raise RuntimeError(f"{name}: must lie on q's device, {q.device}, but lies on {x.device}")


@torch.library.register_fake("ffpa::forward")
def _(*arguments: Any) -> tuple[Tensor, Tensor]:
    q, _, v = arguments[:3]
    _check_devices(q, Call._fields, arguments)
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    b, h, n, _ = q.shape
    return dense_like(q, (b, h, n, v.shape[3])), torch.empty((b, h, n), dtype=wide, device=q.device)


@torch.library.register_fake("ffpa::backward")
def _(dout: Tensor, dlse: Tensor | None, o: Tensor, lse: Tensor, needs: int, *arguments: Any) -> tuple[Tensor, ...]:
    _check_devices(arguments[0], ("dout", "dlse", "o", "lse"), (dout, dlse, o, lse))
    _check_devices(arguments[0], Call._fields, arguments)
    inputs = (arguments[place] if place < len(arguments) else None for place in GRADIENTS)
    return tuple(
        dense_like(x, x.shape) if needs >> bit & 1 and x is not None else _nothing(o) for bit, x in enumerate(inputs)
    )


@torch.library.register_fake("ffpa::append_kv_")
def _(
    k_new: Tensor,
    v_new: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor | None,
    seqlens_kv: Tensor | None = None,
    block_table: Tensor | None = None,
    kv_batch_idx: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    q: Tensor | None = None,
    rotary_interleaved: bool = False,
    rotary_q_fixed: bool = False,
) -> Tensor:
    return _nothing(k_new) if q is None else dense_like(q, q.shape)
