"""flash-attn's functions, over :func:`ffpa.attention`. SPDX-License-Identifier: Apache-2.0

Names, argument order, defaults and results are those of flash-attn 2.8, so that one import line moves a program over::

    from ffpa import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache

What they share (symbols: B batch, N_q and N_kv rows, T_q and T_kv rows of all packed sequences, H_q and H_kv heads, D
width):

- tensors are ``(B, N, H, D)``, packed ones ``(T, H, D)``; H_q is a multiple of H_kv, and query head h reads head
  ``h // (H_q / H_kv)``;
- ``causal`` and ``window_size`` are anchored at the bottom right: row i's diagonal key is ``i + N_kv - N_q``, and a
  window (left, right) shows the keys from diagonal - left to diagonal + right, both included, a negative side being
  unbounded;
- a row that sees no key is 0, with an lse of -inf;
- ``alibi_slopes``, fp32 ``(H_q,)`` or ``(B, H_q)``, adds ``-slope * |i + N_kv - N_q - j|``;
- ``softcap`` > 0 replaces a score s by ``softcap * tanh(s / softcap)``.

Where we go further: fp32 as well as fp16 and bf16, the CPU, any D up to 1024 (V may be narrower or wider than K), any
strides, any page size, softcap together with dropout, gradients of the lse, bits that repeat in the forward.
``deterministic=False`` follows ``torch.use_deterministic_algorithms``.

Errors: RuntimeError for shapes, dtypes, devices and values, naming argument, rule and value; TypeError for non-tensors;
NotImplementedError for what no engine of this build and machine computes.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from . import _ops
from ._attention import attention, refuse_if_invalid

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]

WithProbs = tuple[Tensor, Tensor, Tensor]  # out, softmax_lse, S_dmask


# --------------------------------------------------------------------------------------------------------------- dense


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Tensor | WithProbs:
    """Attention of ``q`` over ``k`` and ``v``.

    ``q`` (B, N_q, H_q, D), ``k`` (B, N_kv, H_kv, D), ``v`` (B, N_kv, H_kv, D_v) give out (B, N_q, H_q, D_v).

    With ``return_attn_probs``: (out, softmax_lse, S_dmask). softmax_lse is fp32 (B, H_q, N_q), natural log. S_dmask is,
    as in flash-attn, empty unless dropout_p > 0; else (B, H_q, N_q, N_kv) in q's dtype: the probabilities before
    dropout, negative where dropped. It takes N_q x N_kv memory and is meant for tests.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        _rank(name, x, 4, "(B, N, H, D)")
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]
    options = _options(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, q.device)
    if not return_attn_probs:
        return _tensor(attention(*heads_first, **options)).transpose(1, 2)
    out, lse = _pair(attention(*heads_first, return_lse=True, **options))
    probs = _signed_probs(heads_first, options, k.shape[1]) if dropout_p > 0 else q.new_empty(0)
    return out.transpose(1, 2), lse, probs


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Tensor | WithProbs:
    """:func:`flash_attn_func` with K and V in one tensor ``kv`` (B, N_kv, 2, H_kv, D). Results are the same."""
    k, v = _unpack("kv", kv, 5, 2, "(B, N, 2, H, D)")
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Tensor | WithProbs:
    """:func:`flash_attn_func` with Q, K and V in one tensor ``qkv`` (B, N, 3, H, D). Results are the same."""
    q, k, v = _unpack("qkv", qkv, 5, 3, "(B, N, 3, H, D)")
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )


# -------------------------------------------------------------------------------------------------------------- packed


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Tensor | WithProbs:
    """Attention of sequences laid end to end.

    ``q`` (T_q, H_q, D), ``k`` (T_kv, H_kv, D), ``v`` (T_kv, H_kv, D_v) give out (T_q, H_q, D_v).

    ``cu_seqlens_q``, ``cu_seqlens_k``: int32 (B + 1,), sequence b is rows cu[b] to cu[b + 1] - 1; lengths of 0 are
    fine.
    ``max_seqlen_q``, ``max_seqlen_k``: upper bounds of the lengths.
    ``block_table``: int32 (B, pages per sequence); then k and v are pages (P, page rows, H_kv, D), and row j of
    sequence b, j below cu_seqlens_k[b + 1] - cu_seqlens_k[b], is row j % page rows of page block_table[b, j // page
    rows]. No gradients of k and v then.

    With ``return_attn_probs``: (out, softmax_lse (H_q, T_q), S_dmask), the last as in :func:`flash_attn_func`, of shape
    (B, H_q, max_seqlen_q, max_seqlen_k), 0 beyond a sequence's lengths.
    """
    tensors, options = varlen_problem(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal, window_size,
        softcap, alibi_slopes, deterministic, block_table,
    )  # fmt: skip
    if not return_attn_probs:
        return _tensor(attention(*tensors, **options)).squeeze(0).transpose(0, 1)
    probs = q.new_empty(0)
    if dropout_p > 0:
        if block_table is not None:
            raise NotImplementedError(
                "return_attn_probs: S_dmask is not computed for a paged cache; leave out block_table"
            )
        probs = _signed_probs_varlen(tensors, options, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    out, lse = _pair(attention(*tensors, return_lse=True, **options))
    return out.squeeze(0).transpose(0, 1), lse.squeeze(0), probs


def varlen_problem(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    block_table: Tensor | None,
) -> tuple[list[Tensor], dict[str, Any]]:
    """The arguments of :func:`flash_attn_varlen_func` as q, k, v and options of :func:`ffpa.attention`."""
    kv_rank, kv_layout = (3, "(T, H, D)") if block_table is None else (4, "(P, page rows, H, D)")
    _rank("q", q, 3, "(T, H, D)")
    for name, x in (("k", k), ("v", v)):
        _rank(name, x, kv_rank, kv_layout)
    for name, x in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        _int32(name, x, 1, "(B + 1,)")
        if x.numel() == 0:
            raise RuntimeError(f"{name}: must have B + 1 elements, at least 1, but has 0")
    wanted, found = cu_seqlens_q.numel(), cu_seqlens_k.numel()
    if wanted != found:
        raise RuntimeError(f"cu_seqlens_k: must have as many elements as cu_seqlens_q, {wanted}, but has {found}")
    options = _options(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, q.device)
    options |= dict(cu_seqlens_q=cu_seqlens_q, max_seqlen_q=max_seqlen_q, max_seqlen_kv=max_seqlen_k)
    query = q.transpose(0, 1).unsqueeze(0)
    if block_table is None:
        options |= dict(cu_seqlens_kv=cu_seqlens_k)
        return [query, k.transpose(0, 1).unsqueeze(0), v.transpose(0, 1).unsqueeze(0)], options
    _int32("block_table", block_table, 2, "(B, pages per sequence)")
    options |= dict(block_table=block_table, seqlens_kv=cu_seqlens_k.diff())
    return [query, k.transpose(1, 2), v.transpose(1, 2)], options


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Tensor | WithProbs:
    """:func:`flash_attn_varlen_func` with K and V in one tensor ``kv`` (T_kv, 2, H_kv, D). Results are the same."""
    k, v = _unpack("kv", kv, 4, 2, "(T, 2, H, D)")
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal, window_size,
        softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Tensor | WithProbs:
    """:func:`flash_attn_varlen_func` with Q, K and V in one tensor ``qkv`` (T, 3, H, D). Results are the same."""
    q, k, v = _unpack("qkv", qkv, 4, 3, "(T, 3, H, D)")
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout_p, softmax_scale, causal, window_size,
        softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


# --------------------------------------------------------------------------------------------------------------- cache


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of ``q`` (B, N_q, H_q, D) over a cache, which first takes the rows ``k`` and ``v``, if given, in place.

    ``k_cache``, ``v_cache``: (B_cache, capacity, H_kv, D), or pages (P, page rows, H_kv, D) of any size with
    ``block_table``, int32 (B, pages per sequence). Only the rows of the new keys are written.
    ``k``, ``v``: (B, N_new, H_kv, D), both or neither; they go to positions cache_seqlens[b] onwards, which must lie in
    the cache.
    ``cache_seqlens``: keys in the cache before this call, an int for all sequences or int32 (B,); None: the cache is
    full. Needed with k. After the call the caller adds N_new itself.
    ``rotary_cos``, ``rotary_sin``: (positions, R / 2), fp32 or q's dtype, only with k: the first R of D are rotated, of
    key row i by position cache_seqlens[b] + i, of query row i likewise if causal or with a window, else by position
    cache_seqlens[b].
    ``rotary_interleaved``: pairs (2i, 2i + 1) if True, (i, i + R / 2) if False.
    ``cache_batch_idx``: int32 (B,), the row of the cache that sequence b uses, distinct where k is given; not with
    block_table.
    ``cache_leftpad``: int32 (B,), the cache's first valid row of sequence b; lengths and positions still count from row
    0. Not with block_table.
    ``num_splits``: parts of the cache worked on in parallel, 0 = planned.

    Returns out (B, N_q, H_q, D_v), with ``return_softmax_lse`` also the fp32 lse (B, H_q, N_q). There is no backward
    pass, as in flash-attn: a backward through the result raises. A refused call writes nothing (in compiled graphs the
    new rows may be in place by then: they lie past cache_seqlens, and the same call put right writes them again).
    """
    for name, x in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)):
        _rank(name, x, 4, "(B, N, H, D)" if block_table is None or name == "q" else "(P, page rows, H, D)")
    _check_cache_arguments(k, v, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx, cache_leftpad, block_table)
    batch = q.shape[0]
    seqlens = _cache_lengths(cache_seqlens, batch, k_cache.device)
    for name, index in (("cache_batch_idx", cache_batch_idx), ("cache_leftpad", cache_leftpad)):
        if index is not None:
            _int32(name, index, 1, "(B,)")
            if index.shape[0] != batch:
                raise RuntimeError(f"{name}: must have B elements, {batch}, but has {index.shape[0]}")
    if block_table is not None:
        _int32("block_table", block_table, 2, "(B, pages per sequence)")

    with torch.no_grad():
        query, keys, values = (x.transpose(1, 2) for x in (q, k_cache, v_cache))
        options = _options(0.0, softmax_scale, causal, window_size, softcap, alibi_slopes, False, q.device)
        options["num_splits"] = num_splits
        if k is not None and v is not None and seqlens is not None:
            if not torch.compiler.is_compiling():  # before anything is written
                room = slice(None) if block_table is not None or cache_batch_idx is not None else slice(batch)
                places: dict[str, Any] = dict(block_table=block_table, kv_batch_idx=cache_batch_idx)
                refuse_if_invalid(query, keys[room], values[room], seqlens_kv=seqlens, **places, **options)
            rotated = _ops.append(
                k.transpose(1, 2),
                v.transpose(1, 2),
                keys,
                values,
                seqlens_kv=seqlens,
                block_table=block_table,
                kv_batch_idx=cache_batch_idx,
                rotary_cos=rotary_cos,
                rotary_sin=rotary_sin,
                q=query if rotary_cos is not None else None,
                rotary_interleaved=rotary_interleaved,
                rotary_q_fixed=not causal and _window(window_size) == (-1, -1),
            )
            query = rotated if rotary_cos is not None else query
            seqlens = seqlens + k.shape[1]
        if cache_leftpad is not None:
            block_table, seqlens = _without_leftpad(k_cache, cache_leftpad, seqlens, cache_batch_idx)
            keys, values = (x.flatten(0, 1).unsqueeze(2) for x in (k_cache, v_cache))
            cache_batch_idx = None
        if block_table is None and cache_batch_idx is None:
            keys, values = keys[:batch], values[:batch]  # a cache may have room for more sequences
        out, lse = _pair(
            attention(
                query,
                keys,
                values,
                seqlens_kv=seqlens,
                block_table=block_table,
                kv_batch_idx=cache_batch_idx,
                return_lse=True,
                **options,
            )
        )
    out = out.transpose(1, 2)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k_cache, v_cache, k, v)):
        out, lse = _NoBackward.apply(q, out, lse)  # type: ignore[no-untyped-call]
    return (out, lse) if return_softmax_lse else out


class _NoBackward(torch.autograd.Function):
    """Marks a result as reached from q, so that a backward raises instead of finding nothing to do."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        return out.view_as(out), lse.view_as(lse)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        raise RuntimeError(
            "flash_attn_with_kvcache: has no backward pass, because the cache is written in place; use flash_attn_func"
        )


def _check_cache_arguments(
    k: Tensor | None,
    v: Tensor | None,
    rotary_cos: Tensor | None,
    rotary_sin: Tensor | None,
    cache_seqlens: int | Tensor | None,
    cache_batch_idx: Tensor | None,
    cache_leftpad: Tensor | None,
    block_table: Tensor | None,
) -> None:
    if (k is None) != (v is None):
        raise RuntimeError(f"{'k' if k is None else 'v'}: k and v must be given together, but it is None")
    if (rotary_cos is None) != (rotary_sin is None):
        name = "rotary_cos" if rotary_cos is None else "rotary_sin"
        raise RuntimeError(f"{name}: rotary_cos and rotary_sin must be given together, but it is None")
    if rotary_cos is not None and k is None:
        raise RuntimeError("rotary_cos: needs new keys and values to rotate, but k is None")
    if k is not None and cache_seqlens is None:
        raise RuntimeError("cache_seqlens: must say where k and v are appended, but is None")
    if block_table is not None and cache_batch_idx is not None:
        raise RuntimeError(
            "cache_batch_idx: must be None with block_table, which itself says which pages a sequence uses"
        )
    if block_table is not None and cache_leftpad is not None:
        raise RuntimeError(
            "cache_leftpad: must be None with block_table, whose pages begin with a sequence's first key"
        )
    for name, x in (("k", k), ("v", v)):
        if x is not None:
            _rank(name, x, 4, "(B, N_new, H, D)")
    for name, x in (("rotary_cos", rotary_cos), ("rotary_sin", rotary_sin)):
        if x is not None:
            _rank(name, x, 2, "(positions, R / 2)")


def _cache_lengths(lengths: int | Tensor | None, batch: int, device: torch.device) -> Tensor | None:
    if lengths is None:
        return None
    if isinstance(lengths, Tensor):
        _int32("cache_seqlens", lengths, 1, "(B,)")
        if lengths.shape[0] != batch:
            raise RuntimeError(f"cache_seqlens: must have B elements, {batch}, but has {lengths.shape[0]}")
        return lengths
    if isinstance(lengths, bool) or not isinstance(lengths, (int, torch.SymInt)):
        raise TypeError(f"cache_seqlens: must be an int or an int32 tensor, but is {type(lengths).__name__}")
    if not 0 <= lengths < 2**31:
        raise RuntimeError(f"cache_seqlens: must be in [0, 2^31), but is {lengths}")
    return torch.full((batch,), lengths, dtype=torch.int32, device=device)


def _without_leftpad(
    cache: Tensor, leftpad: Tensor, seqlens: Tensor | None, batch_idx: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The sequences from their first valid row on: a table of pages of one row each (B, capacity), and their lengths.

    Padding is then never read. Diagonals, windows and ALiBi count from the end of a sequence, so they stay what they
    are.
    """
    places, capacity = cache.shape[0], cache.shape[1]
    if leftpad.device.type == "cpu" and not torch.compiler.is_compiling() and bool((leftpad < 0).any()):
        raise RuntimeError(f"cache_leftpad: must not be negative, but is {leftpad.tolist()}")
    first = torch.arange(leftpad.shape[0], device=leftpad.device) if batch_idx is None else batch_idx
    rows = first[:, None] * capacity + leftpad[:, None] + torch.arange(capacity, device=leftpad.device)
    table = rows.clamp(max=max(places * capacity - 1, 0)).to(torch.int32)  # entries past a length are not read
    lengths = torch.full_like(leftpad, capacity) if seqlens is None else seqlens
    return table, (lengths - leftpad).clamp(min=0)


# ----------------------------------------------------------------------------------------------------------- S_dmask


def _signed_probs(tensors: list[Tensor], options: dict[str, Any], n_kv: int) -> Tensor:
    """(B, H_q, N_q, N_kv): the probabilities, negative where dropped. With V = identity the output of attention is P
    itself."""
    q, k, _ = tensors
    columns = []
    with torch.no_grad():
        for begin in range(0, n_kv, 512):  # V's width is limited, N_kv is not
            identity = torch.eye(n_kv, dtype=q.dtype, device=q.device)[:, begin : begin + 512]
            v = identity.expand(k.shape[0], k.shape[1], *identity.shape)
            columns.append(_with_sign(q, k, v, options))
    return torch.cat(columns, -1) if columns else q.new_zeros(*q.shape[:3], n_kv)


def _signed_probs_varlen(
    tensors: list[Tensor],
    options: dict[str, Any],
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
) -> Tensor:
    """(B, H_q, max_seqlen_q, max_seqlen_k), as above; row j of a sequence's V is the unit vector of j."""
    q, k, _ = tensors
    bounds_q, bounds_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    probs = q.new_zeros(len(bounds_q) - 1, q.shape[1], max_seqlen_q, max_seqlen_k)
    local = torch.cat([torch.arange(end - begin) for begin, end in itertools.pairwise([0, *bounds_k])]).to(q.device)
    with torch.no_grad():
        for begin in range(0, max_seqlen_k, 512):
            wanted = torch.arange(begin, min(begin + 512, max_seqlen_k), device=q.device)
            identity = (local[:, None] == wanted).to(q.dtype)
            signed = _with_sign(q, k, identity.expand(1, k.shape[1], *identity.shape), options)
            for b, (first, last) in enumerate(itertools.pairwise(bounds_q)):
                probs[b, :, : last - first, begin : begin + len(wanted)] = signed[0, :, first:last]
    return probs


def _with_sign(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Tensor:
    dropped = _tensor(attention(q, k, v, **options)) == 0
    probs = _tensor(attention(q, k, v, **{**options, "dropout_p": 0.0, "dropout_state": None}))
    return torch.where(dropped, -probs, probs)


# ------------------------------------------------------------------------------------------------------------- shared


def _options(
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    device: torch.device,
) -> dict[str, Any]:
    options: dict[str, Any] = dict(
        dropout_p=dropout_p,
        scale=softmax_scale,
        causal=causal,
        anchor="bottom_right",
        window=_window(window_size),
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        deterministic=True if deterministic else None,
    )
    if dropout_p > 0:  # drawn here, so that S_dmask shows the very mask of the output
        options["dropout_state"] = _ops.draw_dropout_state(device)
    return options


def _window(window_size: tuple[int, int]) -> tuple[int, int]:
    if len(window_size) != 2:
        raise RuntimeError(f"window_size: must be (left, right), but has {len(window_size)} elements")
    left, right = window_size
    return max(left, -1), max(right, -1)


def _rank(name: str, x: object, rank: int, layout: str) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: must be a tensor {layout}, but is {type(x).__name__}")
    if x.dim() != rank:
        raise RuntimeError(f"{name}: must have {rank} dimensions {layout}, but has {x.dim()}")


def _int32(name: str, x: object, rank: int, layout: str) -> None:
    _rank(name, x, rank, layout)
    if isinstance(x, Tensor) and x.dtype != torch.int32:
        raise RuntimeError(f"{name}: dtype must be torch.int32, but is {x.dtype}")


def _unpack(name: str, packed: Tensor, rank: int, parts: int, layout: str) -> tuple[Tensor, ...]:
    _rank(name, packed, rank, layout)
    if packed.shape[-3] != parts:
        raise RuntimeError(f"{name}: extent {rank - 3} must be {parts} in {layout}, but is {packed.shape[-3]}")
    return packed.unbind(-3)  # whose backward writes the packed gradient once


def _tensor(result: Tensor | tuple[Tensor, Tensor]) -> Tensor:
    assert isinstance(result, Tensor)
    return result


def _pair(result: Tensor | tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    assert isinstance(result, tuple)
    return result
