"""ffpa-attn's functions, over :func:`ffpa.attention`. SPDX-License-Identifier: Apache-2.0

For programs written for xlite-dev/ffpa-attn: names, argument order, defaults, layouts and its causal alignment, which
is the bottom right one at every head dim: query row r sees the keys up to r + N_kv - N_q. torch's SDPA, and
:func:`ffpa.scaled_dot_product_attention`, align top left; the two agree when N_q = N_kv. See docs/migration.md.

What that package refuses and we take: any D from 1 to 1024 without falling back to torch, fp32, the CPU, N_kv < N_q
with causal (rows that see no key are 0), a mask together with causal, dropout and GQA in packed sequences.

Errors: RuntimeError for shapes, dtypes, devices and values, naming argument, rule and value; TypeError for non-tensors
and unknown arguments; NotImplementedError for what no engine of this build and machine computes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._attention import attention
from .flash import varlen_problem

__all__ = ["ffpa_attn_func", "ffpa_attn_varlen_func"]

_BACKEND_ARGUMENTS = ("backend", "forward_backend", "backward_backend", "acc", "stages")
# Options of flash-attn that ffpa-attn names only to refuse them, and where they work here.
_ELSEWHERE = {
    "window_size": "ffpa.flash_attn_varlen_func(window_size=...)",
    "softcap": "ffpa.flash_attn_varlen_func(softcap=...)",
    "alibi_slopes": "ffpa.flash_attn_varlen_func(alibi_slopes=...)",
    "block_table": "ffpa.flash_attn_varlen_func(block_table=...)",
    "sink": "ffpa.attention(sinks=...)",
    "attn_mask": "ffpa.attention(mask=..., bias=...)",
    "attention_mask": "ffpa.attention(mask=..., bias=...)",
    "seqused_k": "ffpa.attention(seqlens_kv=...)",
    "num_splits": "ffpa.attention(num_splits=...)",
}


def ffpa_attn_func(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    **kwargs: object,
) -> Tensor:
    """Attention of ``query`` over ``key`` and ``value``.

    ``query`` (B, H_q, N_q, D), ``key`` (B, H_kv, N_kv, D), ``value`` (B, H_kv, N_kv, D_v) give out (B, H_q, N_q, D_v).

    ``attn_mask``: broadcasts to (B, H_q, N_q, N_kv); bool (True = visible), or fp32 or query's dtype, added to the
    scores and given a gradient. With ``is_causal`` both hold. ``is_causal``: bottom right (above). ``scale``: default 1
    / sqrt(D).
    ``enable_gqa``: H_kv may divide H_q; without it they must be equal.

    ``backend``, ``forward_backend`` and ``backward_backend`` are refused unless None: ffpa picks the kernel
    (:func:`ffpa.explain` shows which); to force one use ``kernel=`` of :func:`ffpa.attention`.
    """
    _refuse("ffpa_attn_func", kwargs)
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name}: must be a tensor (B, H, N, D), but is {type(x).__name__}")
        if x.dim() != 4:
            raise RuntimeError(f"{name}: must have 4 dimensions (B, H, N, D), but has {x.dim()}")
    _check_heads("query", query.shape[1], "key", key.shape[1], enable_gqa)
    mask, bias = _split_mask(attn_mask)
    out = attention(
        query,
        key,
        value,
        mask=mask,
        bias=bias,
        causal=is_causal,
        anchor="bottom_right",
        scale=scale,
        dropout_p=dropout_p,
    )
    assert isinstance(out, Tensor)
    return out


def ffpa_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    enable_gqa: bool = False,
    return_lse: bool = False,
    **kwargs: object,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of sequences laid end to end.

    ``q`` (T_q, H_q, D), ``k`` (T_kv, H_kv, D), ``v`` (T_kv, H_kv, D_v) give out (T_q, H_q, D_v).

    ``cu_seqlens_q``, ``cu_seqlens_k``: int32 (B + 1,), the latter None for self-attention. ``return_lse``: also the
    fp32 lse (H_q, T_q), natural log. ``enable_gqa``: H_kv may divide H_q; without it they must be equal.
    """
    _refuse("ffpa_attn_varlen_func", kwargs)
    tensors, options = varlen_problem(
        q, k, v, cu_seqlens_q, cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k, max_seqlen_q, max_seqlen_k,
        dropout_p, softmax_scale, causal, (-1, -1), 0.0, None, False, None,
    )  # fmt: skip
    _check_heads("q", q.shape[1], "k", k.shape[1], enable_gqa)
    result = attention(*tensors, return_lse=return_lse, **options)
    if isinstance(result, tuple):
        return result[0].squeeze(0).transpose(0, 1), result[1].squeeze(0)
    return result.squeeze(0).transpose(0, 1)


def _refuse(function: str, kwargs: dict[str, object]) -> None:
    for name, value in kwargs.items():
        if name in _BACKEND_ARGUMENTS:
            if value is not None:
                raise TypeError(
                    f"{name}: must be None, because ffpa picks its kernel itself (see ffpa.explain; ffpa.attention can "
                    f"force one), but is {value!r}"
                )
        elif name in _ELSEWHERE:
            if value is not None:
                raise NotImplementedError(f"{name}: is not an option of {function}; use {_ELSEWHERE[name]}")
        else:
            raise TypeError(f"{function}() got an unexpected keyword argument '{name}'")


def _check_heads(q_name: str, h_q: int, k_name: str, h_kv: int, enable_gqa: bool) -> None:
    if not enable_gqa and h_q != h_kv:
        raise RuntimeError(
            f"{k_name}: must have as many heads as {q_name}, {h_q}, unless enable_gqa is True, but has {h_kv}"
        )


def _split_mask(attn_mask: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """The one mask argument as (bool mask, additive bias), both of rank 4."""
    if attn_mask is None:
        return None, None
    if not isinstance(attn_mask, Tensor):
        raise TypeError(f"attn_mask: must be a tensor or None, but is {type(attn_mask).__name__}")
    if attn_mask.dim() > 4:
        raise RuntimeError(f"attn_mask: must have at most 4 dimensions, but has {attn_mask.dim()}")
    full = attn_mask.reshape((1,) * (4 - attn_mask.dim()) + tuple(attn_mask.shape))
    return (full, None) if attn_mask.dtype == torch.bool else (None, full)
