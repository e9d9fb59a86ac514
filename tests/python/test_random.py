"""Random problems on every kernel against the oracle: all options combined, dense, packed, paged and by batch index,
any layout, NaN wherever a call may not read.

A failure prints its ``Case``, made of plain values only: ``hold(Case(...))`` repeats it. Put it into ``KNOWN``.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from torch import Tensor

import ffpa
from ffpa import _math, _native
from oracle import check, int32, randn

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
KERNELS = [k for k in _native.kernels() if k.usable and k.pass_ == "forward" and k.engine in ("ref", "cpu")]
LAYOUTS = ("bhnd", "bnhd", "every other", "offset", "expanded")


@dataclass(frozen=True)
class Case:
    kernel: str
    dtype: str
    mode: str  # dense, packed, paged or indexed
    b: int
    h_kv: int
    group: int
    n_q: int
    n_kv: int
    d: int
    d_v: int
    layouts: tuple[str, str, str] = ("bhnd", "bhnd", "bhnd")  # of q, k and v
    rows: tuple[int, ...] | None = None  # packed: of each sequence
    keys: tuple[int, ...] | None = None  # of each sequence
    page: int = 16
    index: tuple[int, ...] | None = None  # batch rows of k and v
    causal: bool = False
    anchor: str = "top_left"
    window: tuple[int, int] = (-1, -1)
    scale: float | None = None
    softcap: float = 0.0
    mask: tuple[bool, bool, bool, bool] | None = None  # which extents are not 1
    hidden: float = 0.0  # the larger, the less the mask leaves
    bias: tuple[bool, bool, bool, bool] | None = None
    holes: bool = False  # -inf in the bias
    alibi: int = 0  # rank of the slopes
    sinks: bool = False
    dropout: float = 0.0
    num_splits: int = 0
    deterministic: bool = False
    batch_invariant: bool = False


def tensor(case: Case, layout: str, heads: int, rows: int, width: int, seed: int) -> Tensor:
    def make(*shape: int) -> Tensor:
        return randn(*shape, dtype=DTYPES[case.dtype], seed=seed)

    if layout == "bnhd":
        return make(case.b, rows, heads, width).transpose(1, 2)
    if layout == "every other":
        return make(case.b, heads, rows, 2 * width)[..., ::2]
    if layout == "offset":
        return make(case.b * heads * rows * width + 1)[1:].view(case.b, heads, rows, width)
    if layout == "expanded":
        return make(1, heads, rows, width).expand(case.b, heads, rows, width)
    return make(case.b, heads, rows, width)


def attention(case: Case, q: Tensor, k: Tensor, v: Tensor, factors: Tensor | None = None, **options: Any) -> Any:
    """``ffpa.attention`` on the dense tensors of the oracle, brought into the case's mode and back."""
    if factors is not None:
        options |= {"dropout_p": case.dropout, "dropout_state": torch.tensor([3, 2**33 + 4])}
    if case.mode == "packed":
        assert case.rows is not None and case.keys is not None
        del options["seqlens_q"], options["seqlens_kv"]
        cu_q, cu_kv = ([0, *itertools.accumulate(n)] for n in (case.rows, case.keys))
        flat = [
            torch.cat([x[b : b + 1, :, :n] for b, n in enumerate(lengths)], 2)
            for x, lengths in ((q, case.rows), (k, case.keys), (v, case.keys))
        ]
        o, lse = ffpa.attention(*flat, cu_seqlens_q=int32(cu_q), cu_seqlens_kv=int32(cu_kv), **options)
        o = [F.pad(o[0, :, a:b], (0, 0, 0, case.n_q - (b - a))) for a, b in itertools.pairwise(cu_q)]
        lse = [F.pad(lse[0, :, a:b], (0, case.n_q - (b - a)), value=-math.inf) for a, b in itertools.pairwise(cu_q)]
        return torch.stack(o), torch.stack(lse)
    if case.mode == "paged":
        each = -(-case.n_kv // case.page)
        table = torch.randperm(case.b * each + 1, generator=torch.Generator().manual_seed(1))[: case.b * each]
        table = table.view(case.b, each).int()
        for name, x in (("k", k), ("v", v)):
            pages = x.new_full((case.b * each + 1, case.h_kv, case.page, x.shape[3]), math.nan)
            for b, n in enumerate(case.keys or (case.n_kv,) * case.b):
                for j in range(0, n, case.page):
                    piece = x[b, :, j : min(j + case.page, n)]
                    pages[table[b, j // case.page], :, : piece.shape[1]] = piece
            k, v = (pages, v) if name == "k" else (k, pages)
        options.setdefault("seqlens_kv", int32((case.n_kv,) * case.b))
        return ffpa.attention(q, k, v, block_table=table, **options)
    return ffpa.attention(q, k, v, **options)


def hold(case: Case) -> None:
    h_q = case.h_kv * case.group
    q = tensor(case, case.layouts[0], h_q, case.n_q, case.d, 1)
    k = tensor(case, case.layouts[1], case.h_kv, case.n_kv, case.d, 2)
    v = tensor(case, case.layouts[2], case.h_kv, case.n_kv, case.d_v, 3)

    def extents(full: tuple[bool, bool, bool, bool]) -> list[int]:
        return [n if whole else 1 for n, whole in zip((case.b, h_q, case.n_q, case.n_kv), full, strict=True)]

    options: dict[str, Any] = {name: getattr(case, name) for name in ("causal", "anchor", "window", "scale", "softcap")}
    if case.mask:
        options["mask"] = randn(*extents(case.mask), seed=5) > case.hidden
    if case.bias:
        bias = randn(*extents(case.bias), seed=6)
        options["bias"] = torch.where(bias > 1.2, -torch.inf, bias) if case.holes else bias
    if case.alibi:
        options["alibi_slopes"] = randn(*(case.b, h_q)[2 - case.alibi :], seed=7).abs() / 16
    if case.sinks:
        options["sinks"] = randn(h_q, seed=8)
    if case.rows:
        options["seqlens_q"] = int32(case.rows)
    if case.index:
        options["kv_batch_idx"] = int32(case.index)
    if case.keys:
        options["seqlens_kv"] = int32(case.keys)
        for x, layout in ((k, case.layouts[1]), (v, case.layouts[2])):
            for b, n in enumerate(case.keys):
                if layout != "expanded" and not case.index:
                    x[b, :, n:] = math.nan
    if case.dropout:
        keep = _math.dropout_keep(torch.tensor([3, 2**33 + 4]), case.dropout, (case.b, h_q, case.n_q, case.n_kv))
        options["factors"] = keep / (1 - case.dropout)
    forced = {name: getattr(case, name) for name in ("kernel", "num_splits", "deterministic", "batch_invariant")}
    check(
        q,
        k,
        v,
        call=lambda *args, **rest: attention(case, *args, **rest),
        forced=forced,
        slack=1.0,
        backward=case.mode != "paged",
        **options,
    )


@st.composite
def cases(draw: st.DrawFn, kernel: str, dtype: str) -> Case:
    slow = kernel.startswith("ref")
    few = st.booleans, st.integers, st.sampled_from
    flag, number, one_of = few
    sometimes = lambda strategy: draw(strategy) if draw(number(0, 3)) == 3 else None  # noqa: E731
    mode = draw(one_of(["dense", "dense", "packed", "paged", "indexed"]))
    b, h_kv, group = draw(number(1, 3)), draw(number(1, 3)), draw(number(1, 4))
    d = draw(number(1, 40) if slow else st.one_of(number(1, 96), one_of([128, 257, 512, 1024, 1100])))
    most_q, most_kv = (24, 24) if slow else (300, 300) if d <= 200 else (70, 130)
    n_q, n_kv = draw(number(1, most_q)), draw(number(1, most_kv))
    lengths = st.tuples(*[number(0, n_kv)] * b)
    extents = st.tuples(flag(), flag(), flag(), flag())
    plain: dict[str, Any] = {}
    if mode == "packed":
        plain = {"rows": draw(st.tuples(*[number(0, n_q)] * b)), "keys": draw(lengths)}
    elif mode == "indexed":
        plain = {"index": draw(st.tuples(*[number(0, b - 1)] * b))}
    if mode != "packed":
        plain["keys"] = sometimes(lengths)
    return Case(
        kernel=kernel,
        dtype=dtype,
        mode=mode,
        b=b,
        h_kv=h_kv,
        group=group,
        n_q=n_q,
        n_kv=n_kv,
        d=d,
        d_v=draw(st.one_of(st.just(d), number(1, 64))),
        layouts=draw(st.tuples(*[one_of(LAYOUTS)] * 3)),
        page=draw(one_of([1, 3, 16, 64])),
        causal=draw(flag()),
        anchor=draw(one_of(["top_left", "bottom_right"])),
        window=sometimes(st.tuples(number(-1, 60), number(-1, 60))) or (-1, -1),
        scale=sometimes(one_of([0.0, -1.6 / max(d, 64) ** 0.5, 2.4 / max(d, 64) ** 0.5])),
        softcap=sometimes(one_of([0.7, 15.0])) or 0.0,
        mask=sometimes(extents),
        hidden=draw(one_of([-1.0, 0.0, 1.5])),
        bias=sometimes(extents),
        holes=draw(flag()),
        alibi=sometimes(number(1, 2)) or 0,
        sinks=sometimes(st.just(True)) or False,
        dropout=sometimes(one_of([0.2, 0.9])) or 0.0,
        num_splits=draw(one_of([0, 0, 1, 2, 5])),
        deterministic=draw(flag()),
        batch_invariant=draw(number(0, 5)) == 0,
        **plain,
    )


@pytest.mark.parametrize("kernel,dtype", [(k.name, x) for k in KERNELS for x in k.dtypes if x in DTYPES])
def test_random_problems(kernel: str, dtype: str) -> None:
    @settings(max_examples=60, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    @given(cases(kernel, dtype))
    def all_hold(case: Case) -> None:
        hold(case)

    all_hold()
