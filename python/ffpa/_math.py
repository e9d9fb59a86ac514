"""Attention as plain differentiable torch operations. SPDX-License-Identifier: Apache-2.0

Where derivatives of derivatives or forward-mode ones are asked for, and as a peer in tests. Follows ffpa.h to the letter
(visibility by select, rows without keys exactly zero, the same dropout mask) in fp32, fp64 for fp64; memory is
O(N_q * N_kv). Dense problems, with seqlens_kv; packed and paged ones are refused.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._native import Options

__all__ = ["backward", "dropout_keep", "forward"]


class _Softmax(NamedTuple):
    p: Tensor  # [B, H_q, N_q, N_kv], 0 where hidden
    p_sink: Tensor  # [B, H_q, N_q, 1]
    lse: Tensor  # [B, H_q, N_q]
    slope: Tensor | float  # d score / d (scale * q.k)
    drop: Tensor | float  # 0 or 1 / (1 - dropout_p)
    k: Tensor  # [B, H_q, N_kv, D_qk]: heads repeated
    v: Tensor


def forward(tensors: Sequence[Tensor | None], options: Sequence[Any]) -> tuple[Tensor, Tensor]:
    """(o, lse) of dense q [B, H_q, N_q, D_qk]; arguments as for :func:`ffpa._ops.forward`."""
    q = _present(tensors[0])
    s = _softmax(tensors, Options(*options))
    o = (s.p * s.drop) @ s.v
    return o.to(q.dtype), s.lse


def backward(
    dout: Tensor, dlse: Tensor | None, tensors: Sequence[Tensor | None], options: Sequence[Any], needed: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """(dq, dk, dv, dbias, dsinks), differentiable themselves; None where not needed. The formulas are those of
    src/cpu/ref/ref.cc."""
    q, k, v, bias, sinks = tensors[0], tensors[1], tensors[2], tensors[4], tensors[6]
    q, k, v = _present(q), _present(k), _present(v)
    call = Options(*options)
    s = _softmax(tensors, call)
    dout = dout.to(s.p.dtype)
    dp = (dout @ s.v.mT) * s.drop
    delta = (s.p * dp).sum(-1, keepdim=True)
    inner = -delta if dlse is None else dlse.to(s.p.dtype).unsqueeze(-1) - delta
    ds = s.p * (dp + inner)
    dr = ds * s.slope * call.scale
    dq = dr @ s.k if needed[0] else None
    dk = _sum_group(dr.mT @ q.to(s.p.dtype), k) if needed[1] else None
    dv = _sum_group((s.p * s.drop).mT @ dout, v) if needed[2] else None
    dbias = ds.sum_to_size(bias.shape) if needed[3] and bias is not None else None
    dsinks = (s.p_sink * inner).sum((0, 2, 3)) if needed[4] and sinks is not None else None
    results = ((dq, q), (dk, k), (dv, v), (dbias, bias), (dsinks, sinks))
    return tuple(None if d is None or x is None else d.to(x.dtype) for d, x in results)


def _present(x: Tensor | None) -> Tensor:
    assert x is not None
    return x


def _sum_group(gradient: Tensor, of: Tensor) -> Tensor:
    heads, group = of.shape[1], gradient.shape[1] // max(of.shape[1], 1)
    return gradient if group == 1 else gradient.unflatten(1, (heads, group)).sum(2)


def _softmax(tensors: Sequence[Tensor | None], call: Options) -> _Softmax:
    q, k, v, mask, bias, alibi, sinks, cu_q, cu_kv, lengths, table, batch_idx, state = tensors
    for name, x in (
        ("cu_seqlens_q", cu_q),
        ("cu_seqlens_kv", cu_kv),
        ("block_table", table),
        ("kv_batch_idx", batch_idx),
    ):
        if x is not None:
            raise NotImplementedError(f"{name}: must be absent where forward-mode or second derivatives are asked for")
    q, k, v = _present(q), _present(k), _present(v)
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    (b, h, n_q, d), n_kv = q.shape, k.shape[2]
    if k.shape[1] != h:
        k, v = (x.repeat_interleave(h // max(x.shape[1], 1), dim=1) for x in (k, v))
    q, k, v = q.to(wide), k.to(wide), v.to(wide)
    scores = (q @ k.mT) * call.scale if d else q.new_zeros(b, h, n_q, n_kv)
    slope: Tensor | float = 1.0
    if call.softcap > 0:
        t = torch.tanh(scores / call.softcap)
        scores, slope = call.softcap * t, 1 - t * t
    i = torch.arange(n_q, device=q.device)[:, None]
    j = torch.arange(n_kv, device=q.device)
    length = n_kv if lengths is None else lengths.view(-1, 1, 1, 1)
    if alibi is not None:
        slopes = alibi.to(wide).reshape(-1, h, 1, 1)
        scores = scores - slopes * (i + length - n_q - j).abs()
    diagonal = i + (length - n_q) if call.bottom_right else i
    visible = (j < length) & torch.ones(b, h, n_q, n_kv, dtype=torch.bool, device=q.device)
    if call.causal:
        visible = visible & (j <= diagonal)
    if call.window_left >= 0:
        visible = visible & (j >= diagonal - call.window_left)
    if call.window_right >= 0:
        visible = visible & (j <= diagonal + call.window_right)
    if mask is not None:
        visible = visible & mask
    if bias is not None:
        visible = visible & (bias != -math.inf)
        scores = scores + bias.to(wide)
    scores = torch.where(visible, scores, -math.inf)
    sink = (q.new_full((h,), -math.inf) if sinks is None else sinks.to(wide)).view(1, h, 1, 1)
    top = sink.detach().expand(b, h, n_q, 1)
    if n_kv:
        top = torch.maximum(scores.detach().amax(-1, keepdim=True), top)
    top = torch.where(top == -math.inf, 0.0, top)
    e = torch.where(visible, torch.exp(scores - top), 0.0)
    e_sink = torch.exp(sink - top)
    total = e.sum(-1, keepdim=True) + e_sink
    empty = total == 0
    safe = torch.where(empty, 1.0, total)
    lse = torch.where(empty, -math.inf, top + torch.log(safe)).squeeze(-1)
    drop: Tensor | float = 1.0
    if call.dropout_p > 0:
        keep = dropout_keep(_present(state), call.dropout_p, (b, h, n_q, n_kv))
        drop = keep.to(wide) * (1 / (1 - call.dropout_p) if call.dropout_p < 1 else 0.0)
    return _Softmax(e / safe, e_sink / safe, lse, slope, drop, k, v)


# --------------------------------------------------------------------------------------------- dropout: core/philox.h


def dropout_keep(state: Tensor, dropout_p: float, shape: tuple[int, int, int, int]) -> Tensor:
    """The bool mask [B, H_q, N_q, N_kv] of kept probabilities for {seed, offset}."""
    b, h, n_q, n_kv = shape
    low = 0xFFFFFFFF
    seed, offset = state[0], state[1]
    groups = torch.arange((n_kv + 7) // 8, device=state.device)
    rows = torch.arange(n_q, device=state.device)[:, None]
    heads = torch.arange(b * h, device=state.device)[:, None, None]
    zero = torch.zeros(b * h, n_q, groups.numel(), dtype=torch.int64, device=state.device)
    counter = [groups + zero, rows + zero, heads + zero, (offset & low) + zero]
    key0, key1 = seed & low, (seed >> 32 ^ offset >> 32) & low
    for _ in range(10):
        (a_high, a_low), (b_high, b_low) = _product(0xD2511F53, counter[0]), _product(0xCD9E8D57, counter[2])
        counter = [b_high ^ counter[1] ^ key0, b_low, a_high ^ counter[3] ^ key1, a_low]
        key0, key1 = (key0 + 0x9E3779B9) & low, (key1 + 0xBB67AE85) & low
    pieces = torch.stack([part for word in counter for part in (word & 0xFFFF, word >> 16)], dim=-1)
    bits = pieces.reshape(b, h, n_q, -1)[..., :n_kv]
    return bits >= round(dropout_p * 65536)


def _product(constant: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of constant * x, both below 2^32, without leaving int64."""
    low, high = constant * (x & 0xFFFF), constant * (x >> 16)  # each below 2^48
    middle = high + (low >> 16)
    return middle >> 16, (middle & 0xFFFF) << 16 | low & 0xFFFF
