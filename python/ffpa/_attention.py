"""``ffpa.attention``: every option of the contract. SPDX-License-Identifier: Apache-2.0"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from . import _native, _ops
from ._autograd import attend

__all__ = ["attention"]

Anchor = Literal["top_left", "bottom_right"]


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    causal: bool = False,
    anchor: Anchor = "top_left",
    window: tuple[int, int] = (-1, -1),
    scale: float | None = None,
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    dropout_state: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_kv: Tensor | None = None,
    max_seqlen_q: int = 0,
    max_seqlen_kv: int = 0,
    seqlens_kv: Tensor | None = None,
    block_table: Tensor | None = None,
    kv_batch_idx: Tensor | None = None,
    deterministic: bool | None = None,
    batch_invariant: bool = False,
    num_splits: int = 0,
    return_lse: bool = False,
    engine: str | None = None,
    kernel: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention; differentiable in q, k, v, bias and sinks, and through lse.

    Computes, for query row i and key j (query head h reads key head h // (H_q / H_kv))::

        s    = scale * q[i] . k[j]
        s    = softcap * tanh(s / softcap)                         if softcap > 0
        s   += bias[i, j] - alibi_slopes[h] * |i + N_kv - N_q - j|
        o[i] = sum_j dropout(softmax_j(s over visible keys and the sink)) * v[j]

    A row that sees no key gives o = 0 and lse = -inf (the sink's value if there is one), and zero gradients.

    Args:
        q: [B, H_q, N_q, D_qk], fp32, fp16, bf16 or fp64 (reference engine), any strides. Packed: [1, H_q, T_q, D_qk].
        k: [B, H_kv, N_kv, D_qk], q's dtype; H_kv divides H_q. Packed: [1, H_kv, T_kv, D_qk]; paged: [P, H_kv, page
            rows, D_qk].
        v: [B, H_kv, N_kv, D_v], or packed or paged like k. D_v may differ from D_qk.
        mask: bool, broadcastable to [B, H_q, N_q, N_kv]; True = visible.
        bias: fp32 or q's dtype, broadcastable likewise; added to the score, -inf hides a key.
        alibi_slopes: fp32 [H_q] or [B, H_q].
        sinks: fp32 or q's dtype [H_q]; a logit that joins the softmax and has no value row.
        causal: hide keys after the diagonal.
        anchor: "top_left": row i's diagonal key is i, as in SDPA; "bottom_right": it is i + N_kv - N_q, as in flash-attn.
        window: (left, right) keys around the diagonal that stay visible, inclusive; -1 = unbounded.
        scale: factor on q.k; 1 / sqrt(D_qk) if None.
        softcap: > 0, or 0 for none.
        dropout_p: in [0, 1]. The mask comes from dropout_state, int64 [2] {seed, offset}; from torch's generator if None.
        cu_seqlens_q, cu_seqlens_kv: int32 [B + 1], rows of the packed sequences; max_seqlen_q, max_seqlen_kv: bounds for
            them, if known (0 = not).
        seqlens_kv: int32 [B], keys that count; the rest of k and v is not read.
        block_table: int32 [B, pages per sequence], pages of each sequence. No gradients then.
        kv_batch_idx: int32 [B], the batch row of k and v that each sequence reads.
        deterministic: repeat the gradients' bits from call to call; None follows
            torch.are_deterministic_algorithms_enabled().
        batch_invariant: the bits of a sequence do not depend on the others in the call.
        num_splits: parts of N_kv worked on in parallel; 0 = planned.
        return_lse: return (o, lse), lse fp32 [B, H_q, N_q], natural log.
        engine, kernel: force "ref", "cpu" or "cuda", or a kernel by name (``ffpa info`` lists them).

    Returns:
        o [B, H_q, N_q, D_v] in q's dtype and order of memory, or (o, lse).

    Raises:
        RuntimeError: an argument breaks a rule; the text names argument, rule and value.
        NotImplementedError: no kernel of this build and machine computes it.
        TypeError: an argument of the wrong type.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name}: must be a Tensor, but is {type(x).__name__}")
    q, k, v = autocast(q, k, v)
    if dropout_p == 0.0:
        dropout_state = None
    elif dropout_state is None:
        dropout_state = _ops.draw_dropout_state(q.device)
    tensors = (
        *(q, k, v, _rank_4(mask), _rank_4(bias), alibi_slopes, sinks),
        *(cu_seqlens_q, cu_seqlens_kv, seqlens_kv, block_table, kv_batch_idx, dropout_state),
    )
    options = _native.Options(
        scale=default_scale(q) if scale is None else float(scale),
        softcap=float(softcap),
        dropout_p=float(dropout_p),
        causal=causal,
        bottom_right=anchor != "top_left" and bool(_native.anchor_index(anchor)),
        window_left=window[0],
        window_right=window[1],
        max_seqlen_q=max_seqlen_q,
        max_seqlen_kv=max_seqlen_kv,
        deterministic=torch.are_deterministic_algorithms_enabled() if deterministic is None else deterministic,
        batch_invariant=batch_invariant,
        num_splits=num_splits,
        engine=0 if engine is None else _native.engine_index(engine),
        kernel=-1 if kernel is None else _native.kernel_index(kernel, "forward"),
    )
    o, lse = attend(tensors, options)
    return (o, lse) if return_lse else o


def default_scale(q: Tensor) -> float:
    """1 / sqrt(D_qk); 1 when D_qk is 0."""
    return float(q.shape[-1]) ** -0.5 if q.shape[-1] else 1.0


def autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v in the autocast dtype where autocast is on; fp64 stays as it is."""
    device = q.device.type
    if not torch.is_autocast_enabled(device):
        return q, k, v
    dtype = torch.get_autocast_dtype(device)
    q, k, v = (x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in (q, k, v))
    return q, k, v


def _rank_4(x: Tensor | None) -> Tensor | None:
    while x is not None and x.dim() < 4:
        x = x.unsqueeze(0)
    return x


def explain_text(q: Tensor, k: Tensor, v: Tensor, *, backward: bool = False, **options: Any) -> str:
    """The lines of ffpa_forward_explain (ffpa.h) for a call of :func:`attention` with these arguments."""
    q, k, v = autocast(q, k, v)
    options = {"dropout_p": 0.0, "anchor": "top_left", "window": (-1, -1), **options}
    scale, window = options.pop("scale", None), options.pop("window")
    deterministic, engine, kernel = (options.pop(name, None) for name in ("deterministic", "engine", "kernel"))
    bottom_right = bool(_native.anchor_index(options.pop("anchor")))
    options.pop("return_lse", None)
    tensors: dict[str, Tensor | None] = dict(q=q, k=k, v=v)
    for name in ("mask", "bias"):
        tensors[name] = _rank_4(options.pop(name, None))
    for name in ("alibi_slopes", "sinks", "cu_seqlens_q", "cu_seqlens_kv", "seqlens_kv", "block_table", "kv_batch_idx"):
        tensors[name] = options.pop(name, None)
    tensors["dropout_state"] = options.pop("dropout_state", None)
    tensors["o"] = _ops.dense_like(q, (*q.shape[:3], v.shape[3])) if q.dim() == v.dim() == 4 else None
    wide = torch.promote_types(q.dtype, torch.float32)
    tensors["lse"] = torch.empty(q.shape[:3], dtype=wide, device=q.device) if q.dim() == 4 else None
    call = _native.Options(
        scale=default_scale(q) if scale is None else float(scale),
        bottom_right=bottom_right,
        window_left=window[0],
        window_right=window[1],
        deterministic=torch.are_deterministic_algorithms_enabled() if deterministic is None else deterministic,
        engine=0 if engine is None else _native.engine_index(engine),
        kernel=-1 if kernel is None else _native.kernel_index(kernel, "backward" if backward else "forward"),
        **options,
    )
    threads = torch.get_num_threads() if q.device.type == "cpu" else 0
    problem = _native.forward_problem({name: _spec(name, x) for name, x in tensors.items()}, call, threads)
    if not backward:
        return _native.explain(problem)
    gradients = {"dout": tensors["o"], "dq": q, "dk": k, "dv": v, "dbias": tensors["bias"], "dsinks": tensors["sinks"]}
    made = {name: x if x is None or name == "dout" else _ops.dense_like(x, x.shape) for name, x in gradients.items()}
    return _native.explain(_native.backward_problem(problem, {name: _spec(name, x) for name, x in made.items()}))


_DTYPES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.bool: "bool",
    torch.int32: "int32",
    torch.int64: "int64",
}


def _spec(name: str, x: Tensor | None) -> _native.TensorSpec | None:
    if x is None:
        return None
    if x.device.type not in _native.DEVICES:
        raise RuntimeError(f"{name}: must lie on the CPU or on a CUDA device, but lies on {x.device}")
    return _native.TensorSpec(
        x.data_ptr(), _DTYPES.get(x.dtype, str(x.dtype)), x.shape, x.stride(), x.device.type, x.device.index or 0
    )
