"""Attention as plain differentiable torch operations. SPDX-License-Identifier: Apache-2.0

For second derivatives, forward-mode derivatives and fp64, and as a peer in tests. Follows ffpa.h to the letter
(visibility by select, rows without keys exactly zero, the same dropout mask) in fp32, or fp64 for fp64, with
O(N_q * N_kv) memory. Packed and paged sequences are gathered into a dense batch first, so that one formula serves all.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ._ops import GRADIENTS, Call, dense_like

__all__ = ["backward", "dropout_keep", "forward", "vjp"]


def forward(call: Call) -> tuple[Tensor, Tensor]:
    """(o, lse), shapes and order of memory as torch.ops.ffpa.forward gives them."""
    q = call.q
    with torch.autocast(q.device.type, enabled=False):
        dense, n_q, n_kv = _gathered(call)
        o, lse = _dense(dense, n_q, n_kv)
        if call.cu_seqlens_q is not None:
            o, lse = _scattered(o, lse, call.cu_seqlens_q, q.shape[2])
        laid_out = dense_like(q, o.shape).stride()
        o = o.to(q.dtype)
        if o.stride() != laid_out:  # a permuted copy, not a write: it has derivatives of every kind
            order = sorted(range(4), key=lambda axis: -laid_out[axis])
            o = o.permute(order).contiguous().permute([order.index(axis) for axis in range(4)])
        return o, lse


def backward(dout: Tensor, dlse: Tensor | None, needs: int, call: Call) -> tuple[Tensor | None, ...]:
    """(dq, dk, dv, dbias, dsinks), differentiable themselves; None where the bit of ``needs`` is not set."""
    places = [place for bit, place in enumerate(GRADIENTS) if needs >> bit & 1]

    def of(*inputs: Tensor) -> tuple[Tensor, Tensor]:
        arguments: list[Any] = list(call)
        for place, x in zip(places, inputs, strict=True):
            arguments[place] = x
        return forward(Call(*arguments))

    inputs: list[Any] = [call[place] for place in places]
    (_, lse), pull_back = vjp(of, *inputs)
    found = iter(pull_back((dout, torch.zeros_like(lse) if dlse is None else dlse)))
    return tuple(next(found) if needs >> bit & 1 else None for bit in range(len(GRADIENTS)))


def vjp(function: Callable[..., Any], *inputs: Tensor) -> tuple[Any, Callable[..., tuple[Tensor, ...]]]:
    """torch.func.vjp, whose annotation leaves open whether there is a third result."""
    value, pull_back = torch.func.vjp(function, *inputs)[:2]
    return value, pull_back


def _dense(call: Call, n_q: Tensor | int, n_kv: Tensor | int) -> tuple[Tensor, Tensor]:
    """q [B, H_q, N_q, D_qk], k [B, H_kv, N_kv, D_qk]; n_q, n_kv: rows that a sequence has, int or [B, 1, 1, 1]."""
    q, k, v = call.q, call.k, call.v
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    (b, h, rows, d), keys = q.shape, k.shape[2]
    if k.shape[1] != h:
        k, v = (x.repeat_interleave(h // max(x.shape[1], 1), dim=1) for x in (k, v))
    scale = call.scale if call.scale is not None else d**-0.5 if d else 1.0
    scores = (q.to(wide) @ k.to(wide).mT) * scale if d else q.new_zeros(b, h, rows, keys, dtype=wide)
    if call.softcap > 0:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    i = torch.arange(rows, device=q.device)[:, None]
    j = torch.arange(keys, device=q.device)
    if call.alibi_slopes is not None:
        scores = scores - call.alibi_slopes.to(wide).reshape(-1, h, 1, 1) * (i + n_kv - n_q - j).abs()
    diagonal = i + (n_kv - n_q) if call.bottom_right else i
    visible = (j < n_kv) & (i < n_q)
    if call.causal:
        visible = visible & (j <= diagonal)
    if call.window_left >= 0:
        visible = visible & (j >= diagonal - call.window_left)
    if call.window_right >= 0:
        visible = visible & (j <= diagonal + call.window_right)
    if call.mask is not None:
        visible = visible & call.mask[..., :rows, :keys]
    if call.bias is not None:
        bias = call.bias[..., :rows, :keys].to(wide)
        visible = visible & (bias != -math.inf)
        scores = scores + bias
    scores = torch.where(visible, scores, -math.inf)
    if call.sinks is None:
        sink = q.new_full((1, 1, 1, 1), -math.inf, dtype=wide)
    else:
        sink = call.sinks.to(wide).view(1, h, 1, 1)
    top = sink.detach().expand(b, h, rows, 1)
    if keys:
        top = torch.maximum(scores.detach().amax(-1, keepdim=True), top)
    top = torch.where(top == -math.inf, 0.0, top)
    e = torch.where(visible, torch.exp(scores - top), 0.0)
    total = e.sum(-1, keepdim=True) + torch.exp(sink - top)
    empty = total == 0
    total = torch.where(empty, 1.0, total)
    lse = torch.where(empty, -math.inf, top + torch.log(total)).squeeze(-1)
    p = e / total
    if call.dropout_p > 0:
        assert call.dropout_state is not None
        keep = dropout_keep(call.dropout_state, call.dropout_p, (b, h, rows, keys))
        p = torch.where(keep, p / (1 - call.dropout_p), 0.0) if call.dropout_p < 1 else p * 0.0
    some = visible.expand(b, h, rows, keys).any(2).unsqueeze(-1)  # what no row sees is not read: 0 * NaN is NaN
    return p @ torch.where(some, v.to(wide), 0.0), lse


# ---------------------------------------------------------------------------------------- sequences to a batch and back


def _gathered(call: Call) -> tuple[Call, Tensor | int, Tensor | int]:
    """The call with dense q, k and v; the rows and keys of each sequence, int or [B, 1, 1, 1]."""
    q, k, v = call.q, call.k, call.v
    n_q: Tensor | int = q.shape[2]
    n_kv: Tensor | int = k.shape[2]
    if call.cu_seqlens_q is not None:
        q, n_q = _from_packed(q, call.cu_seqlens_q)
    if call.cu_seqlens_kv is not None:
        k, n_kv = _from_packed(k, call.cu_seqlens_kv)
        v, _ = _from_packed(v, call.cu_seqlens_kv)
    elif call.block_table is not None:
        k, v = _from_pages(k, call.block_table, call.seqlens_kv), _from_pages(v, call.block_table, call.seqlens_kv)
        n_kv = k.shape[2]
    elif call.kv_batch_idx is not None:
        k, v = k[call.kv_batch_idx], v[call.kv_batch_idx]
    if call.seqlens_kv is not None:
        n_kv = call.seqlens_kv.view(-1, 1, 1, 1)
    return call._replace(q=q, k=k, v=v), n_q, n_kv


def _from_packed(x: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """[1, H, T, D] to [B, H, longest, D], and the lengths [B, 1, 1, 1]."""
    lengths = cu_seqlens.diff()
    longest = int(lengths.max()) if lengths.numel() else 0
    rows = cu_seqlens[:-1, None] + torch.arange(longest, device=x.device)
    if x.shape[2] == 0:
        return x.new_zeros(lengths.numel(), x.shape[1], longest, x.shape[3]), lengths.view(-1, 1, 1, 1)
    dense = x[0][:, rows.clamp(max=x.shape[2] - 1)].movedim(0, 1)
    return dense, lengths.view(-1, 1, 1, 1)


def _from_pages(x: Tensor, table: Tensor, lengths: Tensor | None) -> Tensor:
    """[P, H, page rows, D] to [B, H, pages per sequence * page rows, D]; entries past a length are not looked up."""
    page_rows = x.shape[2]
    if lengths is not None:
        first_row = torch.arange(table.shape[1], device=x.device) * page_rows
        table = torch.where(first_row < lengths[:, None], table, 0)
    return x[table].movedim(2, 1).flatten(2, 3)


def _scattered(o: Tensor, lse: Tensor, cu_seqlens: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """[B, H, longest, D] back to [1, H, T, D]; rows of no sequence are 0, -inf in lse."""
    h = o.shape[1]
    rows = torch.arange(total, device=o.device, dtype=cu_seqlens.dtype)
    sequence = torch.bucketize(rows, cu_seqlens, right=True) - 1
    owned = sequence < cu_seqlens.numel() - 1
    if o.numel() == 0 or lse.numel() == 0:
        return o.new_zeros(1, h, total, o.shape[3]), lse.new_full((1, h, total), -math.inf)
    sequence = sequence.clamp(max=cu_seqlens.numel() - 2)
    local = torch.where(owned, rows - cu_seqlens[sequence], 0)
    packed_o = torch.where(owned[:, None, None], o[sequence, :, local], 0.0)  # [T, H, D]
    packed_lse = torch.where(owned[:, None], lse[sequence, :, local], -math.inf)
    return packed_o.movedim(0, 1).unsqueeze(0), packed_lse.movedim(0, 1).unsqueeze(0)


# ---------------------------------------------------------------------------------------- dropout: src/core/philox.h


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
    bits = pieces.reshape(b, h, n_q, 8 * groups.numel())[..., :n_kv]
    return bits >= round(dropout_p * 65536)


def _product(constant: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of constant * x, both below 2^32, without leaving int64."""
    low, high = constant * (x & 0xFFFF), constant * (x >> 16)  # each below 2^48
    middle = high + (low >> 16)
    return middle >> 16, (middle & 0xFFFF) << 16 | low & 0xFFFF
