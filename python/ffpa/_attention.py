"""``ffpa.attention``: every option of the contract. SPDX-License-Identifier: Apache-2.0"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from . import _native, _ops
from ._autograd import attend

__all__ = ["attention", "explain_text"]

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
        anchor: "top_left": row i's diagonal key is i (SDPA); "bottom_right": it is i + N_kv - N_q (flash-attn).
        window: (left, right) keys around the diagonal that stay visible, inclusive; -1 = unbounded.
        scale: factor on q.k; 1 / sqrt(D_qk) if None.
        softcap: > 0, or 0 for none.
        dropout_p: in [0, 1]. The mask depends on dropout_state alone, int64 [2] {seed, offset}; drawn from torch's
            generator if None.
        cu_seqlens_q, cu_seqlens_kv: int32 [B + 1], rows of the packed sequences; max_seqlen_q, max_seqlen_kv: bounds
            for their lengths, if known (0 = not).
        seqlens_kv: int32 [B], keys that count; the rest of k and v is not read.
        block_table: int32 [B, pages per sequence], pages of each sequence. No gradients then.
        kv_batch_idx: int32 [B], the batch row of k and v that each sequence reads.
        deterministic: repeat the gradients' bits from call to call; None follows
            torch.are_deterministic_algorithms_enabled().
        batch_invariant: the bits of a sequence do not depend on the others in the call.
        num_splits: parts of N_kv worked on in parallel; 0 = planned.
        return_lse: return (o, lse), lse fp32 [B, H_q, N_q], natural log.
        engine, kernel: force "ref", "cpu" or "cuda", or a kernel by name (``ffpa info`` lists them); gradients then
            come from the backward kernels of its kind (the part of the name before "_fwd_").

    Returns:
        o [B, H_q, N_q, D_v] in q's dtype and order of memory, or (o, lse).

    Raises:
        RuntimeError: an argument breaks a rule; the text names argument, rule and value.
        NotImplementedError: no kernel of this build and machine computes it, or could compute the gradients that
            arguments ask for.
        TypeError: an argument of the wrong type.
    """
    if torch.overrides.has_torch_function((q, k, v)):
        handed: Tensor | tuple[Tensor, Tensor] = torch.overrides.handle_torch_function(
            attention, (q, k, v), q, k, v, mask=mask, bias=bias, alibi_slopes=alibi_slopes, sinks=sinks, causal=causal,
            anchor=anchor, window=window, scale=scale, softcap=softcap, dropout_p=dropout_p,
            dropout_state=dropout_state, cu_seqlens_q=cu_seqlens_q, cu_seqlens_kv=cu_seqlens_kv,
            max_seqlen_q=max_seqlen_q, max_seqlen_kv=max_seqlen_kv, seqlens_kv=seqlens_kv, block_table=block_table,
            kv_batch_idx=kv_batch_idx, deterministic=deterministic, batch_invariant=batch_invariant,
            num_splits=num_splits, return_lse=return_lse, engine=engine, kernel=kernel,
        )  # fmt: skip
        return handed
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name}: must be a Tensor, but is {type(x).__name__}")
    if torch.is_autocast_enabled(q.device.type):
        q, k, v = autocast(q, k, v)
    if dropout_p == 0:
        dropout_state = None
    elif dropout_state is None:
        dropout_state = _ops.draw_dropout_state(q.device)
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    if mask is not None:
        mask = rank_4(mask)
    if bias is not None:
        bias = rank_4(bias)
    left, right = _window(window)
    # The order of _ops.Call.
    o, lse = attend(
        q, k, v, mask, bias, scale, causal, dropout_p, dropout_state, sinks, alibi_slopes, cu_seqlens_q,
        cu_seqlens_kv, seqlens_kv, block_table, kv_batch_idx, _native.anchor_index(anchor) == 1, left, right, softcap,
        max_seqlen_q, max_seqlen_kv, deterministic, batch_invariant, num_splits,
        0 if engine is None else _native.engine_index(engine), kernel,
    )  # fmt: skip
    return (o, lse) if return_lse else o


def autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v in the autocast dtype where autocast is on; fp64 stays as it is."""
    device = q.device.type
    if not torch.is_autocast_enabled(device):
        return q, k, v
    dtype = torch.get_autocast_dtype(device)
    q, k, v = (x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in (q, k, v))
    return q, k, v


def rank_4(x: Tensor) -> Tensor:
    """A mask or bias with leading dimensions of 1; anything else is left to be refused."""
    if not isinstance(x, Tensor) or x.dim() >= 4:
        return x
    return x[(None,) * (4 - x.dim())]


def _window(window: Sequence[int]) -> tuple[int, int]:
    try:
        left, right = window
    except TypeError:
        raise TypeError(f"window: must be a pair (left, right), but is {type(window).__name__}") from None
    except ValueError:
        raise RuntimeError(f"window: must be a pair (left, right), but has {len(window)} elements") from None
    return left, right


# ------------------------------------------------------------------------------------------------------------- explain


def explain_text(q: Tensor, k: Tensor, v: Tensor, *, backward: bool = False, **options: Any) -> str:
    """The lines of ffpa_forward_explain or ffpa_backward_explain (ffpa.h) for a call of :func:`attention` with these
    arguments. TypeError for an option that it does not have. Nothing is computed."""
    problem, tensors = _problem(q, k, v, options)
    if not backward:
        return _native.explain(problem)
    q, k, v = (x for name in "qkv" if (x := tensors[name]) is not None)
    gradients = dict(dout=tensors.get("o"), dq=q, dk=k, dv=v, dbias=tensors["bias"], dsinks=tensors["sinks"])
    made = {name: x if x is None or name == "dout" else _ops.dense_like(x, x.shape) for name, x in gradients.items()}
    return _native.explain(_native.backward_problem(problem, {name: _spec(name, x) for name, x in made.items()}))


def refuse_if_invalid(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> None:
    """Raise what :func:`attention` would raise for these arguments, without computing: for callers that write first."""
    problem, _ = _problem(q, k, v, options)
    _native.plan_of(problem)


def _problem(
    q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]
) -> tuple[_native.ForwardProblem, dict[str, Tensor | None]]:
    """The forward problem of a call, and its tensors by name, which must outlive it."""
    defaults: dict[str, Any] = attention.__kwdefaults__ or {}
    for name in options:
        if name not in defaults:
            raise TypeError(f"attention() has no option {name!r}")
    q, k, v = autocast(q, k, v)
    options = {**defaults, **options}
    tensors: dict[str, Tensor | None] = dict(q=q, k=k, v=v)
    for name in _native.OPTIONAL_TENSORS:
        tensors[name] = options.pop(name)
    for name in ("mask", "bias"):
        if (x := tensors[name]) is not None:
            tensors[name] = rank_4(x)
    if q.dim() == v.dim() == 4:
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        tensors["o"] = _ops.dense_like(q, (*q.shape[:3], v.shape[3]))
        tensors["lse"] = torch.empty(q.shape[:3], dtype=wide, device=q.device)
    if options["deterministic"] is None:
        options["deterministic"] = torch.are_deterministic_algorithms_enabled()
    options["num_threads"] = torch.get_num_threads() if q.device.type == "cpu" else 0
    del options["return_lse"]
    return _native.forward_problem({name: _spec(name, x) for name, x in tensors.items()}, **options), tensors


_DTYPES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.bool: "bool",
    torch.int32: "int32",
    torch.int64: "int64",
    torch.float8_e4m3fn: "fp8_e4m3",
    torch.int8: "int8",
}


def _spec(name: str, x: Tensor | None) -> _native.TensorSpec | None:
    if x is None:
        return None
    if x.device.type not in _native.DEVICES:
        raise RuntimeError(f"{name}: must lie on the CPU or on a CUDA device, but lies on {x.device}")
    dtype = _DTYPES.get(x.dtype, str(x.dtype))
    return _native.TensorSpec(x.data_ptr(), dtype, x.shape, x.stride(), x.device.type, x.device.index or 0)
