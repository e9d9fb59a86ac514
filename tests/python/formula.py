"""The contract as a formula, in float64 and one sequence at a time: what the tests of the Python functions compare
with."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    bottom_right: bool = True,
    softcap: float = 0.0,
    slopes: Tensor | None = None,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """q [H_q, N_q, D], k [H_kv, N_kv, D], v [H_kv, N_kv, D_v] -> out [H_q, N_q, D_v], lse [H_q, N_q], probabilities, in
    float64.

    slopes and sinks [H_q]; mask and bias broadcast to [H_q, N_q, N_kv]. Differentiable.
    """
    q, k, v = q.double(), k.double(), v.double()
    (h_q, n_q, d), (h_kv, n_kv, _) = q.shape, k.shape
    k, v = (x.repeat_interleave(h_q // h_kv, 0) for x in (k, v))
    scores = (1 / math.sqrt(d) if scale is None else scale) * (q @ k.mT)
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    rows, columns = torch.arange(n_q)[:, None], torch.arange(n_kv)[None, :]
    from_end = rows + n_kv - n_q
    if slopes is not None:
        scores = scores - slopes.double()[:, None, None] * (from_end - columns).abs()
    if bias is not None:
        scores = scores + bias.double()
    diagonal = from_end if bottom_right else rows
    visible = torch.ones(h_q, n_q, n_kv, dtype=torch.bool)
    if causal:
        visible = visible & (columns <= diagonal)
    if window[0] >= 0:
        visible = visible & (columns >= diagonal - window[0])
    if window[1] >= 0:
        visible = visible & (columns <= diagonal + window[1])
    if mask is not None:
        visible = visible & mask
    scores = scores.masked_fill(~visible, -math.inf)
    logits = scores
    if sinks is not None:
        logits = torch.cat([scores, sinks.double()[:, None, None].expand(h_q, n_q, 1)], -1)
    sees = (
        torch.isfinite(logits).any(-1, keepdim=True) if logits.shape[-1] else torch.zeros(h_q, n_q, 1, dtype=torch.bool)
    )
    lse = torch.where(sees, torch.logsumexp(logits.masked_fill(~sees, 0.0), -1, keepdim=True), -math.inf)
    probs = torch.where(sees, torch.exp(scores - lse.masked_fill(~sees, 0.0)), 0.0)
    return probs @ v, lse.squeeze(-1), probs


def rotate(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
    """x [N, H, D] with its first R columns rotated by positions [N]; cos and sin [positions, R / 2]."""
    cos, sin = cos.double()[positions][:, None], sin.double()[positions][:, None]
    half = cos.shape[-1]
    out = x.double().clone()
    part = x.double()[..., : 2 * half]
    a, b = (part[..., 0::2], part[..., 1::2]) if interleaved else (part[..., :half], part[..., half:])
    turned = a * cos - b * sin, b * cos + a * sin
    out[..., : 2 * half] = torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)
    return out


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    return {torch.float32: dict(rtol=2e-5, atol=2e-5), torch.float16: dict(rtol=2e-3, atol=2e-3)}.get(
        dtype, dict(rtol=1.6e-2, atol=1.6e-2)
    )
