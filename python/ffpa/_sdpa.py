"""``ffpa.scaled_dot_product_attention``: torch's signature and semantics. SPDX-License-Identifier: Apache-2.0

The reference is torch's MATH backend; where torch's backends disagree, docs/migration.md says what we do. A usual call
(rank 4, nothing to broadcast) goes straight to the op; its arguments are looked at more closely only if that refuses,
for torch's kind of error. Any other call is checked first (K and V of different lengths have crashed torch itself),
then brought to rank 4, or handed to torch if it is not ours (`_not_ours`).
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import _math, _native, _ops
from ._attention import attention, autocast, rank_4
from ._autograd import attend, wants_derivatives

__all__ = ["TORCH_SDPA", "as_attention", "fallback_reason", "scaled_dot_product_attention"]

TORCH_SDPA = F.scaled_dot_product_attention  # patch_sdpa puts ours in its place
_PLAIN = frozenset((Tensor, torch.nn.Parameter))
_DTYPES = frozenset((torch.float32, torch.bfloat16, torch.float16))


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """``torch.nn.functional.scaled_dot_product_attention``, for any head dim, without N_q x N_kv memory.

    Args:
        query: [..., H_q, N_q, D_qk], rank 2 and up; fp32, bf16 or fp16 (fp64 is computed by plain torch operations).
        key, value: [..., H_kv, N_kv, D_qk] and [..., H_kv, N_kv, D_v]; leading axes broadcast as in matmul.
        attn_mask: bool (True = attend), or fp32 or query's dtype to be added; broadcastable to [..., H_q, N_q, N_kv].
            It may require gradients.
        dropout_p: in [0, 1]; applied whenever it is > 0, from torch's generator.
        is_causal: top-left aligned; together with attn_mask both hold.
        scale: 1 / sqrt(D_qk) if None; 0 and negative values are honoured.
        enable_gqa: H_kv (of key and of value, each) divides H_q; else heads broadcast.

    Returns:
        [..., H_q, N_q, D_v], laid out as query is. Rows that see no key are 0.

    Raises:
        RuntimeError, TypeError, NotImplementedError: as torch does for the same.
    """
    if _is_usual(query, key, value, attn_mask, is_causal, enable_gqa) and dropout_p == 0.0:
        mask, bias = (attn_mask, None) if attn_mask is None or attn_mask.dtype == torch.bool else (None, attn_mask)
        try:
            return attend(query, key, value, mask, bias, scale, is_causal)[0]
        except (RuntimeError, TypeError):
            if not torch.compiler.is_compiling():
                _check(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
            raise
    _check_types(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    options: dict[str, Any] = dict(scale=scale, enable_gqa=enable_gqa)
    if _not_ours(query, key, value, attn_mask) is not None:
        return TORCH_SDPA(query, key, value, attn_mask, dropout_p, is_causal, **options)
    q, k, v, call = as_attention(query, key, value, attn_mask, dropout_p, is_causal, **options)
    out = _float64(q, k, v, call) if q.dtype == torch.float64 else attention(q, k, v, **call)
    assert isinstance(out, Tensor)
    rank = max(x.dim() for x in (query, key, value))
    if rank < 4:
        return out[(0,) * (4 - rank)]
    return out if rank == 4 else out.unflatten(0, _batch_axes(query, key, value, attn_mask))


def _is_usual(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, is_causal: bool, enable_gqa: bool
) -> bool:
    """Whether the op can take the arguments as they are, if they are valid. Cheap: it runs on every call."""
    if (
        type(query) not in _PLAIN
        or type(key) not in _PLAIN
        or type(value) not in _PLAIN
        or query.is_nested
        or key.is_nested
        or value.is_nested
        or not (query.is_cpu or (query.is_cuda and _may_run_on_cuda(query, key, value, attn_mask)))
        or query.dtype not in _DTYPES
        or type(is_causal) is not bool
        or type(enable_gqa) is not bool
        or torch._C._is_any_autocast_enabled()
    ):
        return False
    q, k, v = query.shape, key.shape, value.shape
    if len(q) != 4 or len(k) != 4 or len(v) != 4 or not q[0] == k[0] == v[0] or k[1] != v[1]:
        return False
    if q[1] != k[1] and not (enable_gqa and k[1]):
        return False
    if attn_mask is None:
        return True
    if type(attn_mask) not in _PLAIN or attn_mask.dim() != 4:
        return False
    b, h, _, _ = attn_mask.shape
    return b in (1, q[0]) and h in (1, q[1])


def fallback_reason(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> str | None:
    """Why no kernel of ours computes a call, as "kind: sentence"; None if one does. Raises what torch raises."""
    _check_types(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    reason = _not_ours(query, key, value, attn_mask)
    if reason is not None:
        return reason
    _check(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if query.dtype == torch.float64:
        return "fp64: the kernels take fp32, bf16 and fp16"
    return None


def _not_ours(*tensors: Tensor | None) -> str | None:
    """Why tensors of a kind, whatever else they are, are torch's to handle. RuntimeError if torch must not see them."""
    given = [x for x in tensors if x is not None]
    if any(x.is_nested for x in given):
        return "nested: nested tensors have a way of their own in torch"
    for x in given:
        kind = type(x)
        if kind in _PLAIN:
            continue
        if kind.__torch_function__ not in (Tensor.__torch_function__, torch._C._disabled_torch_function_impl):
            with torch._C.DisableTorchFunctionSubclass():
                _check_lengths(*tensors[1:3])
            return f"subclass: {kind.__name__} overrides torch's functions"
    query = given[0]
    if not (query.is_cpu or query.is_cuda) or query.layout != torch.strided:
        _check_lengths(*tensors[1:3])
        if query.layout != torch.strided:
            return f"layout: no kernel takes {query.layout}"
        return f"device: no kernel for tensors on {query.device.type}"
    if query.is_cuda and not any(device.type == "cuda" for device in _native.devices()):
        _check_lengths(*tensors[1:3])
        return "device: this build has no CUDA kernels, or the driver shows no GPU"
    if query.is_cuda and not _may_run_on_cuda(*tensors):
        _check_lengths(*tensors[1:3])
        return "backward: this build has no CUDA kernel for gradients"
    return None


def _may_run_on_cuda(*tensors: Tensor | None) -> bool:
    return not wants_derivatives(*tensors) or _cuda_backward()


@cache
def _cuda_backward() -> bool:
    return any(k.engine == "cuda" and k.pass_ == "backward" and k.usable for k in _native.kernels())


# -------------------------------------------------------------------------------------------------------------- checks


def _check_types(
    query: Any, key: Any, value: Any, attn_mask: Any, dropout_p: Any, is_causal: Any, scale: Any, enable_gqa: Any
) -> None:
    for name, x in (("query", query), ("key", key), ("value", value), ("attn_mask", attn_mask)):
        if not isinstance(x, Tensor) and not (x is None and name == "attn_mask"):
            raise TypeError(f"{name}: must be a Tensor, but is {type(x).__name__}")
    for name, x in (("is_causal", is_causal), ("enable_gqa", enable_gqa)):
        if not isinstance(x, bool):
            raise TypeError(f"{name}: must be a bool, but is {type(x).__name__}")
    if torch.compiler.is_compiling():  # where numbers may be symbols
        return
    for name, x in (("dropout_p", dropout_p), ("scale", scale)):
        if isinstance(x, (str, bytes)) or not (hasattr(x, "__float__") or (x is None and name == "scale")):
            raise TypeError(f"{name}: must be a number, but is {type(x).__name__}")


def _check_lengths(key: Tensor | None, value: Tensor | None) -> None:
    """Before anything reaches torch: with K and V of different lengths its kernels read out of bounds."""
    assert key is not None and value is not None
    if min(key.dim(), value.dim()) >= 2 and key.shape[-2] != value.shape[-2]:
        raise RuntimeError(f"value: extent -2 (N_kv) must equal key's, {key.shape[-2]}, but is {value.shape[-2]}")


def _check(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> None:
    """Every rule of the function; errors of torch's types, in torch's words where it has some."""
    _check_types(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.dim() < 2:
            raise RuntimeError(f"{name}: rank must be at least 2, but is {x.dim()}")
        if x.is_complex() or (x.is_floating_point() and x.dtype.itemsize < 2):
            raise NotImplementedError(f"{name}: dtype must be fp64, fp32, fp16 or bf16, but is {x.dtype}")
        if not x.is_floating_point():
            raise RuntimeError(f"{name}: dtype must be fp64, fp32, fp16 or bf16, but is {x.dtype}")
    if query.device != key.device or query.device != value.device:
        raise RuntimeError(
            "Expected query, key, and value to have the same device type, but got "
            f"query.device: {query.device}, key.device: {key.device}, and value.device: {value.device}"
        )
    autocasting = torch.is_autocast_enabled(query.device.type)
    if not autocasting and (query.dtype != key.dtype or query.dtype != value.dtype):
        raise RuntimeError(
            "Expected query, key, and value to have the same dtype, but got "
            f"query.dtype: {query.dtype}, key.dtype: {key.dtype}, and value.dtype: {value.dtype}"
        )
    if key.shape[-1] != query.shape[-1]:
        raise RuntimeError(f"key: extent -1 (D_qk) must equal query's, {query.shape[-1]}, but is {key.shape[-1]}")
    _check_lengths(key, value)
    if not 0.0 <= dropout_p <= 1.0:
        raise RuntimeError(f"dropout_p: must be in [0, 1], but is {dropout_p}")
    if scale is not None and not math.isfinite(scale):
        raise RuntimeError(f"scale: must be finite, but is {scale}")
    if enable_gqa:
        if min(query.dim(), key.dim(), value.dim()) < 3:
            raise RuntimeError("enable_gqa: query, key and value must have at least 3 axes")
        h_q = query.shape[-3]
        for name, x in (("key", key), ("value", value)):
            if (h_q % x.shape[-3] if x.shape[-3] else h_q) != 0:
                raise RuntimeError(
                    "Number of heads in key and value must divide the number of heads in query, but got "
                    f"{x.shape[-3]} in {name} and {h_q} in query"
                )
    if attn_mask is not None:
        if attn_mask.device != query.device:
            raise RuntimeError(f"attn_mask: must lie on query's device, {query.device}, but lies on {attn_mask.device}")
        if attn_mask.dtype not in (torch.bool, torch.float32, query.dtype) and not (
            autocasting and attn_mask.is_floating_point()
        ):
            raise RuntimeError(
                "Expected attn_mask dtype to be bool or float or to match query dtype, but got "
                f"attn_mask.dtype: {attn_mask.dtype} and query.dtype: {query.dtype}"
            )
        rank = max(query.dim(), key.dim(), value.dim())
        if attn_mask.dim() > rank:
            raise RuntimeError(f"attn_mask: rank must be at most the query's, {rank}, but is {attn_mask.dim()}")
        for axis, symbol, rows in ((-1, "N_kv", key.shape[-2]), (-2, "N_q", query.shape[-2])):
            if attn_mask.dim() >= -axis and attn_mask.shape[axis] not in (1, rows):
                raise RuntimeError(
                    f"attn_mask: extent {axis} ({symbol}) must be 1 or {rows}, but is {attn_mask.shape[axis]}"
                )
    _batch_axes(query, key, value, attn_mask)
    _heads(query, key, value, attn_mask, enable_gqa)


# ------------------------------------------------------------------------------------------------------ bring to rank 4


def as_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:
    """q, k, v as [B, H, N, D] and keywords for :func:`ffpa.attention`, without copies up to rank 4.

    RuntimeError, TypeError or NotImplementedError for arguments that torch refuses.
    """
    _check(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    query, key, value = autocast(query, key, value)
    batch = _batch_axes(query, key, value, attn_mask)
    heads, k_heads, v_heads = _heads(query, key, value, attn_mask, enable_gqa)
    kv_heads = k_heads
    if k_heads != v_heads and k_heads and v_heads:  # grouped, each in its own way: both as fine as need be
        kv_heads = math.lcm(k_heads, v_heads)
        key, value = (x.repeat_interleave(kv_heads // x.shape[-3], dim=-3) for x in (key, value))
    q = _rank_4(query, batch, heads)
    k, v = (_rank_4(x, batch, kv_heads) for x in (key, value))
    call: dict[str, Any] = dict(dropout_p=dropout_p, causal=is_causal, scale=scale)
    if attn_mask is not None:
        if attn_mask.dtype not in (torch.bool, torch.float32, query.dtype):  # under autocast
            attn_mask = attn_mask.float()
        mask_batch = attn_mask.shape[:-3]
        if len(batch) > 1 and any(extent != 1 for extent in mask_batch):
            attn_mask = attn_mask.expand(*batch, *attn_mask.shape[-3:]).flatten(0, -4)
        elif len(mask_batch) > 1:
            attn_mask = attn_mask.flatten(0, -4)
        attn_mask = rank_4(attn_mask)
        call["mask" if attn_mask.dtype == torch.bool else "bias"] = attn_mask
    return q, k, v, call


def _rank_4(x: Tensor, batch: tuple[int, ...], heads: int) -> Tensor:
    if x.dim() < 3:
        x = x.unsqueeze(0)
    shape = (*batch, heads, *x.shape[-2:])
    if x.shape != shape:
        x = x.expand(shape)
    return x if len(batch) == 1 else x.unsqueeze(0) if not batch else x.flatten(0, -4)


def _batch_axes(*tensors: Tensor | None) -> tuple[int, ...]:
    """Extents before [H, N, D] that all broadcast to; RuntimeError if they do not."""
    return _broadcast("batch axes", *(x.shape[:-3] for x in tensors if x is not None))


def _heads(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, enable_gqa: bool
) -> tuple[int, int, int]:
    """(H_q, heads of key, heads of value) after broadcasting, unless grouped; RuntimeError if they do not fit."""
    q, k, v = (x.shape[-3] if x.dim() > 2 else 1 for x in (query, key, value))
    mask = attn_mask.shape[-3] if attn_mask is not None and attn_mask.dim() > 2 else 1
    if enable_gqa:
        (heads,) = _broadcast("heads", (q,), (mask,))
        return heads, k, v
    (heads,) = _broadcast("heads", (q,), (k,), (v,), (mask,))
    if k == v == 1:
        return heads, 1, 1
    return heads, heads, heads


def _broadcast(what: str, *shapes: tuple[int, ...]) -> tuple[int, ...]:
    if all(shape == shapes[0] for shape in shapes):
        return tuple(shapes[0])
    try:
        return tuple(torch.broadcast_shapes(*shapes))
    except RuntimeError:
        told = ", ".join(f"{list(shape)}" for shape in shapes)
        raise RuntimeError(f"query, key, value, attn_mask: {what} must broadcast, but are {told}") from None


def _float64(q: Tensor, k: Tensor, v: Tensor, call: dict[str, Any]) -> Tensor:
    """No fast kernel computes it, torch's fused ones have defects, and the formula is exact for derivatives of any
    order."""
    state = _ops.draw_dropout_state(q.device) if call["dropout_p"] > 0 else None
    o, _ = _math.forward(_ops.Call(q, k, v, dropout_state=state, **call))
    return o
