"""`ffpa check`: every kernel that this machine can run, against plain attention in float64 on a spread of problems.

Two criteria, those of the contract: the relative rmse over a whole tensor, and the largest error, which may be twice
that of plain attention computed in the same dtype. Gradients come from torch's own differentiation of the plain form. A
kernel may refuse a problem in words; that is shown and is no failure. SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

import ffpa
from ffpa._math import dropout_keep
from ffpa.cli.peers import TORCH_DTYPES

# Relative rmse allowed in o; gradients pass through two more roundings and get twice that.
RMSE_LIMITS = {"fp64": 1e-12, "fp32": 2e-6, "fp16": 6e-4, "bf16": 4e-3}
LSE_LIMITS = {"fp64": 1e-9, "fp32": 2e-5, "fp16": 1e-3, "bf16": 1e-3}
LARGEST_ERROR_FLOOR = 1e-5


def plain_attention(
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
    dropout_p: float = 0.0,
    dropout_state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """o and lse of the contract, step by step, in the dtype of q; K and V are repeated for groups."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    n_q, n_kv = q.shape[2], k.shape[2]
    i = torch.arange(n_q, device=q.device)[:, None]
    j = torch.arange(n_kv, device=q.device)[None, :]

    s = (q @ k.transpose(2, 3)) * (1 / math.sqrt(q.shape[3]) if scale is None else scale)
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    if bias is not None:
        s = s + bias.to(s.dtype)
    if alibi_slopes is not None:
        s = s - alibi_slopes.to(s.dtype).reshape(-1, q.shape[1], 1, 1) * (i + n_kv - n_q - j).abs()

    diagonal = i + (n_kv - n_q if anchor == "bottom_right" else 0)
    visible = torch.ones(n_q, n_kv, dtype=torch.bool, device=q.device)
    if causal:
        visible = visible & (j <= diagonal)
    if window[0] >= 0:
        visible = visible & (j >= diagonal - window[0])
    if window[1] >= 0:
        visible = visible & (j <= diagonal + window[1])
    visible = visible if mask is None else visible & mask

    hidden = s.new_full((*s.shape[:3], 1), -math.inf)
    logits = torch.where(visible, s, hidden)
    if sinks is not None:
        logits = torch.cat([logits, sinks.to(s.dtype).reshape(1, -1, 1, 1).expand_as(hidden)], -1)
    seen = (logits > -math.inf).any(-1, keepdim=True)
    lse = torch.logsumexp(torch.where(seen, logits, torch.zeros_like(logits)), -1, keepdim=True)
    p = torch.where(visible & seen, torch.exp(torch.where(visible, s, torch.zeros_like(s)) - lse), torch.zeros_like(s))
    if dropout_state is not None:
        p = p * dropout_keep(dropout_state, dropout_p, (p.shape[0], p.shape[1], n_q, n_kv)) / (1 - dropout_p)
    return p @ v, torch.where(seen, lse, hidden).squeeze(-1)


# ------------------------------------------------------------------------------------------------------------- problems


@dataclass(frozen=True)
class Problem:
    """A shape and options; `options` draws the tensors among them. `packed` and `paged`: lengths of sequences."""

    name: str
    batch: int = 2
    h_q: int = 2
    h_kv: int = 2
    n_q: int = 37
    n_kv: int = 67
    d_qk: int = 80
    d_v: int = 80
    options: Callable[[Problem, Draw], dict[str, Any]] = lambda problem, draw: {}
    strided: bool = False
    packed: tuple[int, ...] = ()
    paged: tuple[int, ...] = ()


class Draw:
    """Random tensors from one seed, values as drawn in the dtype, so that float64 sees the same numbers."""

    def __init__(self, dtype: torch.dtype, device: str) -> None:
        self.dtype, self.device = dtype, device
        self.generator = torch.Generator("cpu").manual_seed(7)

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(dtype or self.dtype).to(self.device)

    def state(self) -> Tensor:
        return torch.randint(2**62, (2,), generator=self.generator).to(self.device)

    def coin(self, *shape: int) -> Tensor:
        return (torch.rand(shape, generator=self.generator) < 0.6).to(self.device)


def _mask(problem: Problem, draw: Draw) -> dict[str, Any]:
    mask = draw.coin(1, problem.h_q, problem.n_q, problem.n_kv)
    mask[:, 0, 3] = False  # a row that sees no key
    return {"mask": mask}


PROBLEMS = [
    Problem("plain"),
    Problem("one row", n_q=1, n_kv=300),
    Problem("D 1", d_qk=1, d_v=1),
    Problem("D 512", d_qk=512, d_v=512, n_q=70, n_kv=130),
    Problem("D 1024", batch=1, d_qk=1024, d_v=1024),
    Problem("D_qk 192, D_v 128", d_qk=192, d_v=128),
    Problem("D_qk 576, D_v 512", d_qk=576, d_v=512, h_q=4, h_kv=1),
    Problem("groups of 3", h_q=6),
    Problem("scale -0.3", options=lambda p, d: {"scale": -0.3}),
    Problem("strided views", strided=True),
    Problem("causal", options=lambda p, d: {"causal": True}),
    Problem("causal, N_q > N_kv", n_q=90, options=lambda p, d: {"causal": True, "anchor": "bottom_right"}),
    Problem("window", options=lambda p, d: {"window": (9, 4), "anchor": "bottom_right"}),
    Problem("softcap", options=lambda p, d: {"softcap": 2.0}),
    Problem("bool mask", options=_mask),
    Problem("bias", options=lambda p, d: {"bias": d.normal(1, 1, p.n_q, p.n_kv, dtype=torch.float32)}),
    Problem("ALiBi", options=lambda p, d: {"alibi_slopes": d.normal(p.h_q, dtype=torch.float32).abs()}),
    Problem("sinks", options=lambda p, d: {"sinks": d.normal(p.h_q, dtype=torch.float32), "causal": True}),
    Problem("dropout", options=lambda p, d: {"dropout_p": 0.3, "dropout_state": d.state()}),
    Problem("packed", packed=(5, 0, 33, 20), options=lambda p, d: {"causal": True}),
    Problem("paged", n_q=3, paged=(50, 7, 64), options=lambda p, d: {"causal": True, "anchor": "bottom_right"}),
]


@dataclass
class Built:
    """A problem's tensors: what ffpa.attention gets, and the dense problems (one a sequence) that it must equal."""

    q: Tensor
    k: Tensor
    v: Tensor
    options: dict[str, Any]
    dense: list[tuple[Tensor, Tensor, Tensor, dict[str, Any]]] = field(default_factory=list)

    def join(self, pieces: list[Tensor]) -> Tensor:
        """Dense outputs, one a sequence, as ffpa.attention lays them out: packed along rows, else along the batch."""
        return torch.cat(pieces, 2 if "cu_seqlens_q" in self.options else 0)


def build(problem: Problem, dtype: torch.dtype, device: str) -> Built:
    draw = Draw(dtype, device)
    options = problem.options(problem, draw)

    def lengths(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    def rows(batch: int, n_q: int, n_kv: int) -> tuple[Tensor, Tensor, Tensor]:
        step = 2 if problem.strided else 1
        q = draw.normal(batch, n_q, problem.h_q, problem.d_qk * step).transpose(1, 2)[..., ::step]
        k = draw.normal(batch, problem.h_kv, n_kv * step, problem.d_qk)[:, :, ::step]
        return q, k, draw.normal(batch, problem.h_kv, n_kv, problem.d_v)

    if problem.packed:
        total = sum(problem.packed)
        q, k, v = rows(1, total, total)
        ends = [sum(problem.packed[:n]) for n in range(len(problem.packed) + 1)]
        cuts = [slice(begin, end) for begin, end in itertools.pairwise(ends)]
        cu_seqlens = lengths(ends)
        packed = {"cu_seqlens_q": cu_seqlens, "cu_seqlens_kv": cu_seqlens.clone()}
        return Built(q, k, v, options | packed, [(q[:, :, c], k[:, :, c], v[:, :, c], options) for c in cuts])

    if problem.paged:
        page_rows, pages_each, count = 16, 4, len(problem.paged)
        q, k, v = rows(count, problem.n_q, pages_each * page_rows)
        table = torch.randperm(count * pages_each, generator=draw.generator).to(torch.int32).reshape(count, pages_each)

        def to_pages(t: Tensor) -> Tensor:
            pages = torch.full(
                (count * pages_each, t.shape[1], page_rows, t.shape[3]), math.nan, dtype=dtype, device=device
            )
            cut = t.reshape(*t.shape[:2], pages_each, page_rows, t.shape[3]).transpose(1, 2).flatten(0, 1)
            pages[table.flatten().long().to(device)] = cut
            return pages

        dense = [(q[b : b + 1], k[b : b + 1, :, :n], v[b : b + 1, :, :n], options) for b, n in enumerate(problem.paged)]
        paged = {"seqlens_kv": lengths(list(problem.paged)), "block_table": table.to(device)}
        return Built(q, to_pages(k), to_pages(v), options | paged, dense)

    q, k, v = rows(problem.batch, problem.n_q, problem.n_kv)
    return Built(q, k, v, options, [(q, k, v, options)])


# ------------------------------------------------------------------------------------------------------------- checking


@dataclass
class Outcome:
    """What came of one kernel, dtype and problem. `worst` is the largest share of a limit that any tensor used."""

    kernel: str
    dtype: str
    problem: str
    worst: float = 0.0
    refused: str | None = None
    failed: str | None = None


@contextlib.contextmanager
def forced(kernel: str) -> Iterator[None]:
    """Bind the kernel's own pass to it; the other pass stays free."""
    before = os.environ.get("FFPA_KERNEL")
    os.environ["FFPA_KERNEL"] = kernel
    try:
        yield
    finally:
        if before is None:
            del os.environ["FFPA_KERNEL"]
        else:
            os.environ["FFPA_KERNEL"] = before


def _plain(built: Built, dtype: torch.dtype, backward: bool) -> dict[str, Tensor]:
    """o and lse, or the gradients of `_objective`, by plain attention in a dtype."""
    leaves = [[t.detach().to(dtype).requires_grad_(backward) for t in piece[:3]] for piece in built.dense]
    options, learned = _with_leaves(built.dense[0][3], backward, dtype)
    outputs = [plain_attention(*leaf, **options) for leaf in leaves]
    if not backward:
        return {"o": built.join([o for o, _ in outputs]), "lse": built.join([lse for _, lse in outputs])}
    objective = torch.stack([_objective(o, lse) for o, lse in outputs]).sum()
    gradients = list(torch.autograd.grad(objective, [t for leaf in leaves for t in leaf] + list(learned.values())))
    rows = len(leaves) * 3
    named = {name: built.join(gradients[at:rows:3]) for at, name in enumerate(("dq", "dk", "dv"))}
    return named | dict(zip(learned, gradients[rows:], strict=True))


def _ours(built: Built, backward: bool) -> dict[str, Tensor]:
    leaves = [t.detach().requires_grad_(backward) for t in (built.q, built.k, built.v)]
    options, learned = _with_leaves(built.options, backward)
    o, lse = ffpa.attention(*leaves, **options, return_lse=True)
    if not backward:
        return {"o": o, "lse": lse}
    gradients = torch.autograd.grad(_objective(o, lse), leaves + list(learned.values()))
    return dict(zip(["dq", "dk", "dv", *learned], gradients, strict=True))


def _with_leaves(
    options: dict[str, Any], backward: bool, dtype: torch.dtype | None = None
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The options with bias and sinks as leaves of the graph, and these by the names of their gradients."""
    leaves = {
        name: options[name].detach().to(dtype or options[name].dtype).requires_grad_()
        for name in ("bias", "sinks")
        if backward and name in options
    }
    return options | leaves, {"d" + name: leaf for name, leaf in leaves.items()}


def _objective(o: Tensor, lse: Tensor) -> Tensor:
    """A scalar whose gradients with respect to o and lse are not constant, in float32 or wider."""
    weights = torch.arange(o.shape[3], device=o.device) % 7 - 3
    wide = torch.promote_types(o.dtype, torch.float32)
    return (o.to(wide) * weights).sum() + torch.where(lse.isfinite(), lse, torch.zeros_like(lse)).to(wide).sum() / 4


def _compare(name: str, got: Tensor, exact: Tensor, plain: Tensor, dtype: str) -> tuple[float, str | None]:
    """The largest share of a limit in use, and the broken limit in words."""
    if got.shape != exact.shape:
        return math.inf, f"{name} has shape {tuple(got.shape)}, must be {tuple(exact.shape)}"
    stored = max(limit for of, limit in RMSE_LIMITS.items() if TORCH_DTYPES[of] == got.dtype)  # dbias may be fp32
    got = got.to(torch.float64)
    same_infinity = (got == exact) & exact.isinf()
    error = torch.where(same_infinity, torch.zeros_like(exact), got - exact).abs()
    if error.numel() == 0:
        return 0.0, None
    if not bool(error.isfinite().all()):
        return math.inf, f"{name} is not finite where it must be"
    if name == "lse":
        checks = [("largest error", float(error.max()), LSE_LIMITS[dtype])]
    else:
        plain_error = (plain.to(torch.float64) - exact).abs().max()
        rmse = float(error.square().mean().sqrt() / exact.square().mean().sqrt().clamp_min(1e-30))
        checks = [
            ("relative rmse", rmse, max(RMSE_LIMITS[dtype], stored) * (1 if name == "o" else 2)),
            ("largest error", float(error.max()), 2 * float(plain_error) + LARGEST_ERROR_FLOOR),
        ]
    broken = [f"{name}: {what} {value:.2e} is above {limit:.2e}" for what, value, limit in checks if not value <= limit]
    return max(value / limit for _, value, limit in checks), broken[0] if broken else None


def check_kernel(kernel: str, backward: bool, dtype: str, device: str) -> Iterator[Outcome]:
    """Run every problem through one kernel in one dtype."""
    for problem in PROBLEMS:
        if backward and problem.paged:
            continue  # gradients through a paged cache are outside the contract
        outcome = Outcome(kernel, dtype, problem.name)
        built = build(problem, TORCH_DTYPES[dtype], device)
        try:
            with forced(kernel):
                got = _ours(built, backward)
        except NotImplementedError as error:
            yield replace(outcome, refused=str(error))
            continue
        exact, plain = _plain(built, torch.float64, backward), _plain(built, TORCH_DTYPES[dtype], backward)
        for name, tensor in got.items():
            share, broken = _compare(name, tensor, exact[name], plain[name], dtype)
            outcome.worst = max(outcome.worst, share)
            outcome.failed = outcome.failed or broken
        yield outcome
