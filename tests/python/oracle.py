"""The contract as plain torch operations, and what "right" means.

``attend`` computes in the dtype of its inputs: in float64 it is the truth, in the tensors' own dtype the peer whose
error a kernel may at most double. ``judge`` holds both criteria. Shapes are those of ``ffpa.attention``, dense.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import ffpa

RMSE = {torch.float32: 2e-6, torch.bfloat16: 4e-3, torch.float16: 6e-4}
HALVES = (torch.bfloat16, torch.float16)
WIDTHS = (64, 128, 256, 320, 512, 1024)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    causal: bool = False,
    anchor: str = "top_left",
    window: tuple[int, int] = (-1, -1),
    scale: float | None = None,
    softcap: float = 0.0,
    seqlens_q: Tensor | None = None,
    seqlens_kv: Tensor | None = None,
    kv_batch_idx: Tensor | None = None,
    factors: Tensor | float = 1.0,
) -> tuple[Tensor, Tensor]:
    """(o, lse); ``factors`` are dropout's, 0 or 1 / (1 - p), [B, H_q, N_q, N_kv]; rows from ``seqlens_q`` on belong to
    nobody. Keys past ``seqlens_kv`` may be NaN."""
    (b, h, n_q, d), n_kv = q.shape, k.shape[2]
    if kv_batch_idx is not None:
        k, v = k[kv_batch_idx.long()], v[kv_batch_idx.long()]
    if seqlens_kv is not None:
        live = torch.arange(n_kv)[:, None] < seqlens_kv.view(-1, 1, 1, 1)
        k, v = torch.where(live, k, 0.0), torch.where(live, v, 0.0)
    k, v = (x.repeat_interleave(h // x.shape[1], 1) for x in (k, v))
    s = (q @ k.mT) * (d**-0.5 if scale is None else scale)
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    i, j = torch.arange(n_q)[:, None], torch.arange(n_kv)
    length = n_kv if seqlens_kv is None else seqlens_kv.view(-1, 1, 1, 1)
    rows = n_q if seqlens_q is None else seqlens_q.view(-1, 1, 1, 1)
    if alibi_slopes is not None:
        s = s - alibi_slopes.to(s.dtype).reshape(-1, h, 1, 1) * (i + length - rows - j).abs()
    visible = (j < length).expand(b, h, n_q, n_kv).clone()
    diagonal = i + length - rows if anchor == "bottom_right" else i
    if causal:
        visible &= j <= diagonal
    if window[0] >= 0:
        visible &= j >= diagonal - window[0]
    if window[1] >= 0:
        visible &= j <= diagonal + window[1]
    if mask is not None:
        visible &= mask
    if bias is not None:
        visible &= bias != -math.inf
        s = s + torch.where(bias == -math.inf, 0.0, bias).to(s.dtype)
    s = torch.where(visible, s, -math.inf)
    logits = s if sinks is None else torch.cat([s, sinks.to(s.dtype).view(1, h, 1, 1).expand(b, h, n_q, 1)], -1)
    logits = torch.where(i < rows, logits, -math.inf)
    some = (logits != -math.inf).any(-1, keepdim=True)
    safe = torch.where(some, logits, 0.0)
    p = torch.where(some, torch.softmax(safe, -1), 0.0)[..., :n_kv]
    lse = torch.where(some.squeeze(-1), torch.logsumexp(safe, -1), -math.inf)
    return (p * (factors.to(p.dtype) if isinstance(factors, Tensor) else factors)) @ v, lse


def judge(what: str, found: Tensor, true: Tensor, plain: Tensor, dtype: torch.dtype, slack: float = 0.0) -> None:
    """Largest error at most twice the plain one's plus 1e-5; relative rmse within the dtype's bound, or, where little
    is left of large terms that cancel, within twice the plain one's.

    ``slack``: units in the last place of the largest value to allow besides. A search for the worst problem finds small
    ones whose plain result happens to be exact, or of a few values that cancel.
    """
    assert found.shape == true.shape, f"{what}: {tuple(found.shape)} instead of {tuple(true.shape)}"
    found, plain = found.detach().double(), plain.detach().double()
    true = true.detach()
    assert torch.equal(torch.isfinite(found), torch.isfinite(true)), f"{what}: finite where it must not be, or not"
    finite = torch.isfinite(true)
    assert torch.equal(found[~finite].nan_to_num(7.0), true[~finite].nan_to_num(7.0)), f"{what}: other infinities"
    if not finite.any():
        return
    error, allowed = (found - true)[finite], (plain - true)[finite]
    worst, bound = error.abs().max().item(), 2 * allowed.nan_to_num(0.0).abs().max().item() + 1e-5
    bound += slack * torch.finfo(dtype).eps * true[finite].abs().max().item()
    assert worst <= bound, f"{what}: error {worst:.2e}, allowed {bound:.2e}"
    if slack and error.numel() < 64:
        return  # a mean over so few says nothing that the largest does not
    size = true[finite].square().mean().sqrt().item()
    rmse = error.square().mean().sqrt().item()
    plain_rmse = allowed.nan_to_num(0.0).square().mean().sqrt().item()
    assert rmse <= max(RMSE[dtype] * size, 2 * plain_rmse) + 1e-6, (
        f"{what}: relative rmse {rmse / max(size, 1e-30):.2e}"
    )


def check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    backward: bool = True,
    call: Callable[..., Any] = ffpa.attention,
    forced: dict[str, Any] | None = None,
    slack: float = 0.0,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Compare ``ffpa.attention`` with the oracle: o, lse and all gradients (of lse, too). Returns ours."""
    learned = ["q", "k", "v", *(name for name in ("bias", "sinks") if name in options)]
    given = {"q": q, "k": k, "v": v, **options}
    generator = torch.Generator().manual_seed(5)
    results = []
    dout = torch.randn(*q.shape[:3], v.shape[3], generator=generator).to(q.dtype)
    dlse = torch.randn(q.shape[:3], generator=generator)
    for which in ("ours", "true", "plain"):
        wide = {torch.float64: torch.float64}.get(q.dtype, q.dtype) if which != "true" else torch.float64
        leaves = {
            name: (x.detach() if which == "ours" else x.detach().to(wide)).requires_grad_(backward)
            for name, x in given.items()
            if name in learned
        }
        rest = {name: x for name, x in given.items() if name not in learned}
        if which == "ours":
            o, lse = call(**leaves, **rest, **(forced or {}), return_lse=True)
        else:
            o, lse = attend(**leaves, **rest)
        found = {"o": o, "lse": lse}
        if backward:
            loss = (o * dout.to(o.dtype)).sum() + (torch.where(torch.isfinite(lse), lse, 0.0) * dlse).sum()
            gradients = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
            found |= {f"d{name}": g for name, g in zip(learned, gradients, strict=True) if g is not None}
        results.append(found)
    ours, true, plain = results
    for name, x in true.items():
        if name == "lse":
            lse, finite = ours["lse"].double(), torch.isfinite(x)
            assert torch.equal(torch.isfinite(lse), finite), "lse: finite where it must not be, or not"
            tolerance = 1e-3 if q.dtype in HALVES else 1e-4 * (1 + x[finite].abs().max().item() if finite.any() else 0)
            assert not finite.any() or (lse - x)[finite].abs().max() <= tolerance, "lse"
        else:
            judge(name, ours[name], x, plain[name], q.dtype, slack)
    return ours["o"], ours["lse"]


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Repeatable, whatever was drawn before."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def qkv(
    b: int, h_q: int, h_kv: int, n_q: int, n_kv: int, d: int, dtype: torch.dtype, d_v: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Random q [B, H_q, N_q, D], k [B, H_kv, N_kv, D], v [B, H_kv, N_kv, D_v]."""
    return (
        randn(b, h_q, n_q, d, dtype=dtype, seed=1),
        randn(b, h_kv, n_kv, d, dtype=dtype, seed=2),
        randn(b, h_kv, n_kv, d if d_v is None else d_v, dtype=dtype, seed=3),
    )


def int32(values: Sequence[int]) -> Tensor:
    return torch.tensor(list(values), dtype=torch.int32)
