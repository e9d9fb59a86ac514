"""``ffpa.scaled_dot_product_attention``: torch's signature and semantics. SPDX-License-Identifier: Apache-2.0

The reference is torch's MATH backend; where torch's backends disagree, docs/migration.md says what we do. First every
argument is checked (a wrong K and V length has crashed torch itself), then the call is ours or, for what we do not take
(`fallback_reason`), torch's own function's.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from . import _native
from ._attention import attention, autocast

__all__ = ["scaled_dot_product_attention"]

TORCH_SDPA = F.scaled_dot_product_attention  # patch_sdpa puts ours in its place
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_Call = dict[str, Any]


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
        query: [..., H_q, N_q, D_qk], rank 2 and up; fp32, bf16, fp16 (fp64 is handed to torch).
        key, value: [..., H_kv, N_kv, D_qk] and [..., H_kv, N_kv, D_v]; leading axes broadcast as in matmul.
        attn_mask: bool (True = attend), or fp32 or query's dtype to be added; broadcastable to [..., H_q, N_q, N_kv].
        dropout_p: in [0, 1]; applied whenever it is > 0, from torch's generator.
        is_causal: top-left aligned; together with attn_mask both hold.
        scale: 1 / sqrt(D_qk) if None; 0 and negative values are honoured.
        enable_gqa: H_kv (of key and of value, each) divides H_q; else heads broadcast.

    Returns:
        [..., H_q, N_q, D_v], laid out as query is. Rows that see no key are 0.

    Raises:
        RuntimeError, TypeError, NotImplementedError: as torch does for the same.
    """
    reason = fallback_reason(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if reason is not None:
        return TORCH_SDPA(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    q, k, v, call = as_attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    out = attention(q, k, v, **call)
    assert isinstance(out, Tensor)
    rank = max(query.dim(), key.dim(), value.dim())
    if rank == 4:
        return out
    if rank < 4:
        return out[(0,) * (4 - rank)]
    return out.reshape(*_leading(query, key, value, attn_mask, enable_gqa), *out.shape[-2:])


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
    """Why a call is handed to torch, as "kind: sentence"; None if it is ours. Raises for what torch refuses as well."""
    for name, x in (("query", query), ("key", key), ("value", value), ("attn_mask", attn_mask)):
        if not isinstance(x, Tensor) and not (x is None and name == "attn_mask"):
            raise TypeError(f"{name}: must be a Tensor, but is {type(x).__name__}")
    if not isinstance(is_causal, bool):
        raise TypeError(f"is_causal: must be a bool, but is {type(is_causal).__name__}")
    if not isinstance(enable_gqa, bool):
        raise TypeError(f"enable_gqa: must be a bool, but is {type(enable_gqa).__name__}")
    tensors = (query, key, value) if attn_mask is None else (query, key, value, attn_mask)
    for x in tensors:
        if type(x) is not Tensor and type(x) is not torch.nn.Parameter:
            if x.is_nested:
                return "nested: nested tensors have a way of their own in torch"
            if type(x).__torch_function__ is not torch._C._disabled_torch_function_impl:
                if type(x).__torch_function__ is not Tensor.__torch_function__:
                    return f"subclass: {type(x).__name__} overrides torch's functions"
        if x.is_nested:
            return "nested: nested tensors have a way of their own in torch"
    _check(query, key, value, attn_mask, dropout_p, enable_gqa)
    if query.dtype == torch.float64:
        return "fp64: the fast kernels take fp32, bf16 and fp16"
    if query.device.type not in _devices():
        return f"device: no kernel of this build for tensors on {query.device.type}"
    if forward_ad._current_level >= 0 and not torch.compiler.is_compiling():
        return "forward-mode AD: torch's math computes it"
    return None


_known_devices: frozenset[str] | None = None


def _devices() -> frozenset[str]:
    global _known_devices
    if _known_devices is None:
        _known_devices = frozenset({"cpu", *(d.type for d in _native.devices())})
    return _known_devices


def _check(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, dropout_p: float, enable_gqa: bool
) -> None:
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
    if value.shape[-2] != key.shape[-2]:
        raise RuntimeError(f"value: extent -2 (N_kv) must equal key's, {key.shape[-2]}, but is {value.shape[-2]}")
    if not 0.0 <= dropout_p <= 1.0:
        raise RuntimeError(f"dropout_p: must be in [0, 1], but is {dropout_p}")
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
        rows = (query.shape[-2], key.shape[-2])
        for axis in range(1, min(attn_mask.dim(), 2) + 1):
            if attn_mask.shape[-axis] not in (1, rows[-axis]):
                raise RuntimeError(
                    f"attn_mask: extent {-axis} ({'N_kv' if axis == 1 else 'N_q'}) must be 1 or {rows[-axis]}, "
                    f"but is {attn_mask.shape[-axis]}"
                )
    _leading(query, key, value, attn_mask, enable_gqa)


def _leading(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, enable_gqa: bool) -> tuple[int, ...]:
    """Extents before [N, D] that everything broadcasts to; RuntimeError if it does not."""
    shapes = [x.shape[:-2] for x in (query, key, value)]
    if enable_gqa:
        shapes[1:] = [torch.Size((*s[:-1], 1)) for s in shapes[1:]]
    if attn_mask is not None:
        shapes.append(attn_mask.shape[:-2])
    if len(set(shapes)) == 1:
        return tuple(shapes[0])
    try:
        return tuple(torch.broadcast_shapes(*shapes))
    except RuntimeError:
        names = ["query", "key", "value", "attn_mask"]
        told = ", ".join(f"{name} {list(shape)}" for name, shape in zip(names, shapes, strict=False))
        raise RuntimeError(f"query, key, value, attn_mask: leading axes must broadcast, but are {told}") from None


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
) -> tuple[Tensor, Tensor, Tensor, _Call]:
    """q, k, v as [B, H, N, D] and keywords for :func:`ffpa.attention`. RuntimeError for shapes that do not fit."""
    _check(query, key, value, attn_mask, dropout_p, enable_gqa)
    call: _Call = dict(dropout_p=dropout_p, causal=is_causal, scale=scale)
    query, key, value = autocast(query, key, value)
    if attn_mask is not None:
        if attn_mask.dtype != torch.bool and attn_mask.dtype != query.dtype:
            attn_mask = attn_mask.float()
        while attn_mask.dim() < 2:
            attn_mask = attn_mask.unsqueeze(0)
    if enable_gqa and key.shape[-3] != value.shape[-3]:
        heads = max(key.shape[-3], value.shape[-3])
        if heads % min(key.shape[-3], value.shape[-3]) != 0:
            heads = query.shape[-3]
        key, value = (x.repeat_interleave(heads // x.shape[-3], dim=-3) for x in (key, value))
    if query.dim() == key.dim() == value.dim() == 4 and (
        enable_gqa
        or (query.shape[0] == key.shape[0] == value.shape[0] and query.shape[1] == key.shape[1] == value.shape[1])
    ):
        if not enable_gqa or query.shape[0] == key.shape[0] == value.shape[0]:
            if attn_mask is None or all(
                a in (1, b) for a, b in zip(attn_mask.shape[:-2][::-1], query.shape[1::-1], strict=False)
            ):
                call["mask" if attn_mask is not None and attn_mask.dtype == torch.bool else "bias"] = attn_mask
                return query, key, value, call
    rank = max(query.dim(), key.dim(), value.dim())
    leading = _leading(query, key, value, attn_mask, enable_gqa)

    def spread(x: Tensor, heads: int) -> Tensor:
        x = x.expand(*leading[:-1], heads, *x.shape[-2:]) if leading else x
        if rank < 4:
            return x[(None,) * (4 - rank)]
        return x if rank == 4 else x.reshape(-1, *x.shape[-3:])

    heads = leading[-1] if leading else 1
    q = spread(query, heads)
    k = spread(key, key.shape[-3] if enable_gqa else heads)
    v = spread(value, value.shape[-3] if enable_gqa else heads)
    if attn_mask is not None:
        if rank > 4:
            attn_mask = attn_mask.expand(*leading, *attn_mask.shape[-2:]).reshape(-1, heads, *attn_mask.shape[-2:])
        call["mask" if attn_mask.dtype == torch.bool else "bias"] = attn_mask
    return q, k, v, call
