"""flash-attn's functions against the formula of their documented semantics, forward and backward."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

import ffpa
from ffpa import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from formula import attend, tolerance

SHARED = (
    "dropout_p=0.0 softmax_scale=None causal=False window_size=(-1, -1) softcap=0.0 alibi_slopes=None "
    "deterministic=False return_attn_probs=False"
)
LENGTHS = "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k"
SIGNATURES = {
    "flash_attn_func": f"q k v {SHARED}",
    "flash_attn_qkvpacked_func": f"qkv {SHARED}",
    "flash_attn_kvpacked_func": f"q kv {SHARED}",
    "flash_attn_varlen_func": f"q k v {LENGTHS} {SHARED} block_table=None",
    "flash_attn_varlen_qkvpacked_func": f"qkv cu_seqlens max_seqlen {SHARED}",
    "flash_attn_varlen_kvpacked_func": f"q kv {LENGTHS} {SHARED}",
    "flash_attn_with_kvcache": (
        "q k_cache v_cache k=None v=None rotary_cos=None rotary_sin=None cache_seqlens=None cache_batch_idx=None "
        "cache_leftpad=None block_table=None softmax_scale=None causal=False window_size=(-1, -1) softcap=0.0 "
        "rotary_interleaved=True alibi_slopes=None num_splits=0 return_softmax_lse=False"
    ),
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature_is_that_of_flash_attn_2_8(name: str) -> None:
    parameters = inspect.signature(getattr(ffpa, name)).parameters.values()
    assert all(p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD for p in parameters)
    found = [p.name if p.default is p.empty else f"{p.name}={p.default}" for p in parameters]
    assert " ".join(found) == SIGNATURES[name]


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def reference(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor | None = None, **options: Any) -> tuple[Tensor, Tensor]:
    """(B, N, H, D) in, out (B, N, H, D) and lse (B, H, N), in float64."""
    outs, lses = [], []
    for b in range(q.shape[0]):
        slope = slopes[b] if slopes is not None and slopes.dim() == 2 else slopes
        o, lse, _ = attend(*(x[b].transpose(0, 1) for x in (q, k, v)), slopes=slope, **options)
        outs.append(o.transpose(0, 1))
        lses.append(lse)
    return torch.stack(outs), torch.stack(lses)


def check(got: Tensor, wanted: Tensor, dtype: torch.dtype, what: str) -> None:
    assert got.dtype == dtype, what
    torch.testing.assert_close(got.double(), wanted.double(), **tolerance(dtype), msg=lambda m: f"{what}: {m}")


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": dict(causal=True),
    "window": dict(window_size=(3, 1)),
    "causal-window": dict(causal=True, window_size=(4, 0)),
    "left-only": dict(window_size=(2, -1)),
    "right-only": dict(window_size=(-1, 2)),
    "scale": dict(softmax_scale=-0.3, causal=True),
    "scale-0": dict(softmax_scale=0.0, causal=True),
    "softcap": dict(softcap=1.5, causal=True),
    "alibi": dict(alibi_slopes=torch.tensor([0.1, 0.5, 0.0, 1.0]), causal=True),
    "alibi-by-batch": dict(alibi_slopes=torch.tensor([[0.1, 0.5, 0.0, 1.0], [0.3, 0.2, 2.0, 0.05]])),
    "deterministic": dict(causal=True, deterministic=True),
}


def formula_options(options: dict[str, Any]) -> dict[str, Any]:
    names = dict(causal="causal", window_size="window", softmax_scale="scale", softcap="softcap", alibi_slopes="slopes")
    return {names[n]: v for n, v in options.items() if n in names}


@pytest.mark.parametrize("lengths", [(5, 5), (3, 9), (9, 3), (1, 7), (7, 1), (66, 130)])
@pytest.mark.parametrize("case", OPTIONS)
def test_dense_forward_and_backward(case: str, lengths: tuple[int, int]) -> None:
    (n_q, n_kv), options = lengths, OPTIONS[case]
    q, k, v = randn(2, n_q, 4, 40, seed=1), randn(2, n_kv, 2, 40, seed=2), randn(2, n_kv, 2, 24, seed=3)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    wanted, wanted_lse = reference(*leaves, **formula_options(options))
    out, lse, probs = flash_attn_func(*leaves, **options, return_attn_probs=True)
    assert (
        out.shape == (2, n_q, 4, 24) and out.is_contiguous() and lse.shape == (2, 4, n_q) and lse.dtype == torch.float32
    )
    assert probs.shape == (0,)  # no dropout, no probabilities, as in flash-attn
    check(out, wanted, torch.float32, "out")
    torch.testing.assert_close(lse.double(), wanted_lse, rtol=1e-5, atol=1e-5)
    assert torch.equal(flash_attn_func(*leaves, **options), out)
    weight = randn(*out.shape, seed=4)
    got = torch.autograd.grad((out * weight).sum(), leaves)
    expected = torch.autograd.grad((wanted * weight).sum(), leaves)
    for name, g, e in zip("qkv", got, expected, strict=True):
        check(g, e, torch.float32, f"d{name}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("d", [64, 256, 320, 512, 1024])
def test_dtypes_and_widths(d: int, dtype: torch.dtype) -> None:
    q, k, v = (randn(1, n, h, d, dtype=dtype, seed=n).requires_grad_() for n, h in ((33, 4), (65, 2), (65, 2)))
    out = flash_attn_func(q, k, v, causal=True)
    wanted, _ = reference(q, k, v, causal=True)
    check(out, wanted, dtype, "out")
    got = torch.autograd.grad(out.sum(), (q, k, v))
    for name, g, e in zip("qkv", got, torch.autograd.grad(wanted.sum(), (q, k, v)), strict=True):
        check(g, e, dtype, f"d{name}")


def test_window_of_the_whole_length_is_causal() -> None:
    """With V = identity the output is P: the support of a window is read off exactly."""
    n = 65
    q, k = randn(1, n, 1, 16, seed=1), randn(1, n, 1, 16, seed=2)
    v = torch.eye(n)[None, :, None, :]

    def seen(**options: Any) -> Tensor:
        return flash_attn_func(q, k, v, **options)[0, :, 0] > 0

    i, j = torch.arange(n)[:, None], torch.arange(n)[None]
    assert torch.equal(seen(causal=True), j <= i)
    for left, right in ((0, 0), (6, 0), (n - 1, 0), (n, 0), (-1, 0), (3, 5), (0, -1), (-1, -1), (2**40, 0), (-7, 0)):
        wanted = (j >= i - left if left >= 0 else j + i >= 0) & (j <= i + right if right >= 0 else j + i >= 0)
        assert torch.equal(seen(window_size=(left, right)), wanted), (left, right)


def test_rows_that_see_no_key_are_zero() -> None:
    q, k, v = (randn(1, n, 2, 8, seed=n).requires_grad_() for n in (5, 2, 3))
    v = v[:, :2]
    out, lse, _ = flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    assert torch.all(out[:, :3] == 0) and torch.all(lse[:, :, :3] == -torch.inf)
    dq, dk = torch.autograd.grad(out.sum(), (q, k))
    assert torch.all(dq[:, :3] == 0) and dk.isfinite().all()
    nothing = flash_attn_func(q, k[:, :0], v[:, :0])
    assert nothing.shape == (1, 5, 2, 8) and torch.all(nothing == 0)


def test_gradient_of_the_lse() -> None:
    q, k, v = (randn(1, 4, 2, 8, seed=s).requires_grad_() for s in range(3))
    _, lse, _ = flash_attn_func(q, k, v, return_attn_probs=True)
    _, wanted = reference(q, k, v)
    for g, e in zip(
        torch.autograd.grad(lse.square().sum(), (q, k)), torch.autograd.grad(wanted.square().sum(), (q, k)), strict=True
    ):
        check(g, e, torch.float32, "gradient of lse")


# ------------------------------------------------------------------------------------------------------------- packed


def test_packed_tensors_and_their_gradients() -> None:
    qkv = randn(2, 7, 3, 4, 16).requires_grad_()
    kv = randn(2, 9, 2, 2, 16, seed=1).requires_grad_()
    q = randn(2, 5, 4, 16, seed=2).requires_grad_()
    for got, wanted, leaves in (
        (flash_attn_qkvpacked_func(qkv, causal=True), flash_attn_func(*qkv.unbind(2), causal=True), (qkv,)),
        (flash_attn_kvpacked_func(q, kv, causal=True), flash_attn_func(q, *kv.unbind(2), causal=True), (q, kv)),
    ):
        assert torch.equal(got, wanted)
        for g, e in zip(torch.autograd.grad(got.sum(), leaves), torch.autograd.grad(wanted.sum(), leaves), strict=True):
            assert g.shape == e.shape and torch.equal(g, e)
    cu = torch.tensor([0, 3, 3, 14], dtype=torch.int32)
    cu_k = torch.tensor([0, 10, 12, 18], dtype=torch.int32)
    flat, flat_kv, flat_q = qkv.flatten(0, 1), kv.flatten(0, 1), randn(14, 4, 16, seed=3)
    assert torch.equal(
        flash_attn_varlen_qkvpacked_func(flat, cu, 11, causal=True),
        flash_attn_varlen_func(*flat.unbind(1), cu, cu, 11, 11, causal=True),
    )
    assert torch.equal(
        flash_attn_varlen_kvpacked_func(flat_q, flat_kv, cu, cu_k, 11, 10, causal=True),
        flash_attn_varlen_func(flat_q, *flat_kv.unbind(1), cu, cu_k, 11, 10, causal=True),
    )


VARLEN = {  # lengths of q and of k and v
    "mixed": ([5, 1, 9], [5, 7, 3]),
    "empty": ([0, 5, 0, 4, 0], [0, 7, 13, 0, 5]),
    "ones": ([1, 0, 1], [33, 4, 2]),
    "tiles": ([70, 129], [200, 64]),
}


def cumulate(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


@pytest.mark.parametrize(
    ("case", "d"), [(case, 40) for case in OPTIONS] + [(case, d) for case in ("causal", "window") for d in (256, 512)]
)
@pytest.mark.parametrize("lengths", VARLEN)
def test_varlen_equals_each_sequence_alone(lengths: str, case: str, d: int) -> None:
    of_q, of_k = VARLEN[lengths]
    options = dict(OPTIONS[case])
    if case == "alibi-by-batch":
        options["alibi_slopes"] = torch.rand(len(of_q), 4)
    q = randn(sum(of_q), 4, d, seed=1).requires_grad_()
    k, v = (randn(sum(of_k), 2, d, seed=s).requires_grad_() for s in (2, 3))
    cu_q, cu_k = cumulate(of_q), cumulate(of_k)
    out, lse, _ = flash_attn_varlen_func(q, k, v, cu_q, cu_k, max(of_q), max(of_k), **options, return_attn_probs=True)
    assert out.shape == q.shape and lse.shape == (4, sum(of_q))
    parts = []
    for b in range(len(of_q)):
        piece = [x[c[b] : c[b + 1]].transpose(0, 1) for x, c in ((q, cu_q), (k, cu_k), (v, cu_k))]
        how = formula_options(options)
        if case == "alibi-by-batch":
            how["slopes"] = how["slopes"][b]
        parts.append(attend(*piece, **how))
    wanted = torch.cat([p[0] for p in parts], 1).transpose(0, 1)
    check(out, wanted, torch.float32, "out")
    torch.testing.assert_close(lse.double(), torch.cat([p[1] for p in parts], 1), rtol=1e-5, atol=1e-5)
    weight = randn(*out.shape, seed=5)
    got = torch.autograd.grad((out * weight).sum(), (q, k, v))
    for name, g, e in zip("qkv", got, torch.autograd.grad((wanted * weight).sum(), (q, k, v)), strict=True):
        check(g, e, torch.float32, f"d{name}")


@pytest.mark.parametrize("rows", [1, 3, 16, 19, 64])
def test_varlen_over_pages(rows: int) -> None:
    of_q, of_k = [5, 0, 2], [40, 7, 33]
    pages = -(-max(of_k) // rows)
    table = torch.randperm(3 * pages, generator=torch.Generator().manual_seed(0)).view(3, pages).to(torch.int32)
    cache_k, cache_v = (torch.full((3 * pages, rows, 2, 24), torch.nan) for _ in range(2))
    k, v = (randn(sum(of_k), 2, 24, seed=s) for s in (2, 3))
    cu_q, cu_k = cumulate(of_q), cumulate(of_k)
    for b, n in enumerate(of_k):
        for j in range(n):
            cache_k[table[b, j // rows], j % rows] = k[cu_k[b] + j]
            cache_v[table[b, j // rows], j % rows] = v[cu_k[b] + j]
    q = randn(sum(of_q), 4, 24, seed=1)
    options: dict[str, Any] = dict(causal=True, window_size=(20, -1))
    got = flash_attn_varlen_func(q, cache_k, cache_v, cu_q, cu_k, 5, 40, **options, block_table=table)
    wanted = flash_attn_varlen_func(q, k, v, cu_q, cu_k, 5, 40, **options)
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


# ------------------------------------------------------------------------------------------------------------ dropout


def test_dropout_and_its_signed_probabilities() -> None:
    torch.manual_seed(7)
    q, k, v = (randn(2, n, h, 16, seed=n).requires_grad_() for n, h in ((6, 4), (9, 2), (10, 2)))
    v = v[:, :9]
    out, _, signed = flash_attn_func(q, k, v, 0.4, causal=True, return_attn_probs=True)
    assert signed.shape == (2, 4, 6, 9)
    rows = [x.transpose(1, 2) for x in (q, k, v)]
    probs = torch.stack([attend(*(x[b] for x in rows), causal=True)[2] for b in range(2)])
    torch.testing.assert_close(signed.abs().double(), probs, rtol=1e-5, atol=1e-6)
    kept = (signed > 0).double() / 0.6
    assert 0.4 < (signed > 0).sum() / (probs > 0).sum() < 0.8
    wanted = ((probs * kept) @ rows[2].double().repeat_interleave(2, 1)).transpose(1, 2)
    check(out, wanted, torch.float32, "out")
    for g, e in zip(
        torch.autograd.grad(out.square().sum(), (q, k)), torch.autograd.grad(wanted.square().sum(), (q, k)), strict=True
    ):
        check(g, e, torch.float32, "gradient under dropout")


def test_dropout_repeats_with_torch_manual_seed() -> None:
    q = randn(1, 64, 2, 16)
    torch.manual_seed(3)
    first, second = flash_attn_func(q, q, q, 0.5), flash_attn_func(q, q, q, 0.5)
    torch.manual_seed(3)
    assert torch.equal(flash_attn_func(q, q, q, 0.5), first) and not torch.equal(first, second)
    assert torch.all(flash_attn_func(q, q, q, 1.0) == 0)


def test_varlen_dropout_and_its_signed_probabilities() -> None:
    torch.manual_seed(7)
    of_q, of_k = [5, 0, 3], [6, 2, 3]
    cu_q, cu_k = cumulate(of_q), cumulate(of_k)
    q, k, v = randn(8, 4, 16, seed=1), randn(11, 2, 16, seed=2), randn(11, 2, 16, seed=3)
    out, _, signed = flash_attn_varlen_func(q, k, v, cu_q, cu_k, 5, 6, 0.4, return_attn_probs=True)
    assert signed.shape == (3, 4, 5, 6) and torch.all(signed[1] == 0) and torch.all(signed[2, :, 3:] == 0)
    for b in (0, 2):
        piece = [x[c[b] : c[b + 1]].transpose(0, 1) for x, c in ((q, cu_q), (k, cu_k), (v, cu_k))]
        probs = attend(*piece)[2]
        mine = signed[b, :, : of_q[b], : of_k[b]].double()
        torch.testing.assert_close(mine.abs(), probs, rtol=1e-5, atol=1e-6)
        wanted = (probs * (mine > 0) / 0.6) @ piece[2].double().repeat_interleave(2, 0)
        check(out[cu_q[b] : cu_q[b + 1]].transpose(0, 1), wanted, torch.float32, f"sequence {b}")


# ----------------------------------------------------------------------------------------------------- layout, errors


def test_strides_of_any_kind() -> None:
    q = randn(2, 4, 6, 16).transpose(1, 2)
    k = randn(2, 7, 2, 32, seed=1)[..., ::2]
    v = randn(2, 1, 2, 16, seed=2).expand(2, 7, 2, 16)
    wanted = flash_attn_func(q.contiguous(), k.contiguous(), v.contiguous(), causal=True)
    torch.testing.assert_close(flash_attn_func(q, k, v, causal=True), wanted, rtol=1e-6, atol=1e-6)


def test_compile_fullgraph() -> None:
    torch._dynamo.reset()
    cu = torch.tensor([0, 3, 8], dtype=torch.int32)
    q, k, v = (randn(2, 8, 2, 16, seed=s).requires_grad_() for s in range(3))

    def both(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        dense = flash_attn_func(q, k, v, causal=True, window_size=(3, -1), softcap=5.0)
        return dense.sum() + flash_attn_varlen_func(q[0], k[0], v[0], cu, cu, 5, 5, causal=True).sum()

    eager = both(q, k, v)
    compiled = torch.compile(both, fullgraph=True, backend="aot_eager")(q, k, v)
    torch.testing.assert_close(compiled, eager)
    for c, e in zip(torch.autograd.grad(compiled, (q, k, v)), torch.autograd.grad(eager, (q, k, v)), strict=True):
        torch.testing.assert_close(c, e)


Q, K = torch.zeros(2, 3, 4, 8), torch.zeros(2, 5, 2, 8)
T, CU = torch.zeros(6, 2, 8), torch.tensor([0, 2, 6], dtype=torch.int32)
REFUSED: list[tuple[type[Exception], str, Any]] = [
    (TypeError, "k: must be a tensor", lambda: flash_attn_func(Q, None, K)),  # type: ignore[arg-type]
    (RuntimeError, "q: must have 4 dimensions .*but has 3", lambda: flash_attn_func(Q[0], K, K)),
    (RuntimeError, "D_qk", lambda: flash_attn_func(Q, K[..., :4], K)),
    (RuntimeError, "k: ", lambda: flash_attn_func(Q, K[:1], K[:1])),
    (RuntimeError, "v: ", lambda: flash_attn_func(Q, K, K[:, :4])),
    (RuntimeError, "H_", lambda: flash_attn_func(Q[:, :, :3], K, K)),
    (RuntimeError, "dtype", lambda: flash_attn_func(Q, K.half(), K)),
    (RuntimeError, "window_size", lambda: flash_attn_func(Q, K, K, window_size=(1, 2, 3))),  # type: ignore[arg-type]
    (RuntimeError, "dropout_p", lambda: flash_attn_func(Q, K, K, 1.5)),
    (RuntimeError, "softcap", lambda: flash_attn_func(Q, K, K, softcap=-1.0)),
    (RuntimeError, "alibi_slopes", lambda: flash_attn_func(Q, K, K, alibi_slopes=torch.zeros(3))),
    (RuntimeError, "kv: extent 2 must be 2 .*is 5", lambda: flash_attn_kvpacked_func(Q, torch.zeros(2, 4, 5, 2, 8))),
    (RuntimeError, "qkv: must have 5 dimensions", lambda: flash_attn_qkvpacked_func(Q)),
    (RuntimeError, "cu_seqlens_q: dtype must be", lambda: flash_attn_varlen_func(T, T, T, CU.long(), CU, 4, 4)),
    (RuntimeError, "cu_seqlens_k: must have as many", lambda: flash_attn_varlen_func(T, T, T, CU, CU[:2], 4, 4)),
    (RuntimeError, "cu_seqlens_q", lambda: flash_attn_varlen_func(T, T, T, CU + 1, CU, 4, 4)),
    (RuntimeError, "max_seqlen_q", lambda: flash_attn_varlen_func(T, T, T, CU, CU, 3, 4)),
    (RuntimeError, "k: must have 4 dim", lambda: flash_attn_varlen_func(T, T, T, CU, CU, 4, 4, block_table=CU[None])),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_refusals_name_argument_rule_and_value(number: int) -> None:
    kind, words, call = REFUSED[number]
    with pytest.raises(kind, match=words):
        call()
