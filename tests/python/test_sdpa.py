"""ffpa.scaled_dot_product_attention against torch's: one test for each rule of the function, the MATH backend as
reference, and where torch's own backends disagree, what we promise."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import ffpa
from ffpa import _sdpa

sdpa = ffpa.scaled_dot_product_attention
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def torch_math(*args: Any, **options: Any) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(*args, **options)


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def double(x: Any) -> Any:
    return x.detach().double() if isinstance(x, Tensor) and x.is_floating_point() else x


def check(*args: Any, reference: Callable[..., Tensor] = torch_math, gradients: bool = True, **options: Any) -> None:
    """Output and gradients of every float argument: the largest error against float64 is at most twice that of plain
    torch math in the same dtype, plus 1e-5 (of a gradient's largest element, if that is above 1)."""

    def run(function: Callable[..., Tensor], cast: Callable[[Any], Any]) -> list[Tensor]:
        inputs = [cast(x) for x in args]
        leaves = [x.requires_grad_() for x in inputs if gradients and isinstance(x, Tensor) and x.is_floating_point()]
        out = function(*inputs, **options)
        if not leaves:
            return [out]
        weights = randn(*out.shape, seed=7).to(out.dtype)
        return [out, *torch.autograd.grad(out, leaves, weights)]

    exact = run(reference, double)
    plain = run(reference, lambda x: x.detach().clone() if isinstance(x, Tensor) else x)
    ours = run(sdpa, lambda x: x.detach().as_strided(x.shape, x.stride()) if isinstance(x, Tensor) else x)
    for number, (a, b, c) in enumerate(zip(ours, plain, exact, strict=True)):
        assert a.shape == b.shape and a.dtype == b.dtype
        assert a.isfinite().all() == c.isfinite().all()
        if a.numel() and c.isfinite().all():
            limit = 2 * (b.double() - c).abs().max().item() + 1e-5 * max(1.0, c.abs().max().item())
            assert (a.double() - c).abs().max().item() <= limit, f"result {number}"


Q, K, V = randn(2, 3, 4, 8), randn(2, 3, 5, 8, seed=1), randn(2, 3, 5, 6, seed=2)
SQUARE = randn(2, 3, 5, 8, seed=3)
BOOL = torch.tensor([[1, 0, 1, 1, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1], [0, 0, 0, 0, 1]], dtype=torch.bool)


# ------------------------------------------------------------------------------------------------- values and gradients


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("d", [1, 7, 64, 129, 320, 512, 1024])
@pytest.mark.parametrize("causal", [False, True])
def test_widths_and_dtypes(dtype: torch.dtype, d: int, causal: bool) -> None:
    q, k, v = (randn(1, 2, n, d, dtype=dtype, seed=n) for n in (19, 35, 35))
    check(q, k, v, None, 0.0, causal)


@pytest.mark.parametrize("lengths", [(2, 5), (5, 2), (1, 5), (5, 1), (64, 200), (200, 64)])
def test_causal_is_top_left(lengths: tuple[int, int]) -> None:
    n_q, n_kv = lengths
    check(randn(1, 4, n_q, 16), randn(1, 4, n_kv, 16), randn(1, 4, n_kv, 16), None, 0.0, True)
    first = sdpa(randn(1, 1, n_q, 16), randn(1, 1, n_kv, 16), v := randn(1, 1, n_kv, 16), is_causal=True)[0, 0, 0]
    torch.testing.assert_close(first, v[0, 0, 0])


@pytest.mark.parametrize("d", [8, 512])
@pytest.mark.parametrize("additive", [False, True])
def test_row_without_keys_is_zero_with_zero_gradients(d: int, additive: bool) -> None:
    q, k, v = (randn(1, 1, n, d).requires_grad_() for n in (4, 5, 5))
    mask = torch.where(BOOL, 0.0, -math.inf).requires_grad_() if additive else BOOL
    o = sdpa(q, k, v, mask)
    assert (o[0, 0, 1] == 0).all() and (o[0, 0, 0] != 0).any()
    leaves = [q, k, v, mask] if additive else [q, k, v]
    gradients = torch.autograd.grad(o.sum(), leaves)
    assert all(g.isfinite().all() for g in gradients)
    assert (gradients[0][0, 0, 1] == 0).all()
    if additive:
        assert (gradients[3][~BOOL] == 0).all() and (gradients[3][1] == 0).all()
    check(q, k, v, mask)


@pytest.mark.parametrize("dtype", DTYPES)
def test_finite_sentinels_are_not_masks(dtype: torch.dtype) -> None:
    """finfo.min in fp32 is added in fp32: a row of nothing else is the mean of V, not zero, and not NaN."""
    q, k, v = (randn(1, 2, n, 16, dtype=dtype) for n in (4, 5, 5))
    o = sdpa(q, k, v, torch.full((4, 5), torch.finfo(torch.float32).min))
    expected = v.double().mean(-2, keepdim=True).expand(o.shape)
    torch.testing.assert_close(o.double(), expected, rtol=2e-2, atol=2e-2)
    low = torch.finfo(dtype).min
    assert (sdpa(q, k, v, torch.full((4, 5), low, dtype=dtype) + low) == 0).all()  # is -inf


def test_mask_is_added_in_fp32() -> None:
    """257 and 256 differ, though bf16 cannot say so."""
    q, k, v = torch.zeros(1, 1, 1, 8), torch.zeros(1, 1, 2, 8), torch.tensor([[[[0.0], [1.0]]]])
    o = sdpa(*(x.bfloat16() for x in (q, k, v)), torch.tensor([[256.0, 257.0]]))
    assert o.item() == pytest.approx(1 / (1 + math.exp(-1)), abs=4e-3)


@pytest.mark.parametrize("additive", [False, True])
@pytest.mark.parametrize("n_kv", [4, 5, 65])
def test_mask_and_causal_both_hold(additive: bool, n_kv: int) -> None:
    q, k, v = randn(1, 2, 4, 8), randn(1, 2, n_kv, 8), randn(1, 2, n_kv, 8)
    visible = torch.ones(4, n_kv, dtype=torch.bool)
    visible[:, 0] = False
    mask = torch.where(visible, randn(4, n_kv), -math.inf) if additive else visible
    causal = torch.ones_like(visible).tril()
    both = torch.where(causal, mask, -math.inf) if additive else mask & causal
    torch.testing.assert_close(sdpa(q, k, v, mask, is_causal=True), torch_math(q, k, v, both))
    assert (sdpa(q, k, v, mask, is_causal=True)[:, :, 0] == 0).all()


@pytest.mark.parametrize("scale", [None, 0.0, -1.0, 0.3, 2])
@pytest.mark.parametrize("n_kv", [5, 65])
def test_scale(scale: float | None, n_kv: int) -> None:
    q, k, v = (randn(2, 3, n, 8) for n in (5, n_kv, n_kv))
    for mask, causal in ((None, False), (None, True), (randn(5, n_kv) > 0, False), (randn(5, n_kv), False)):
        check(q, k, v, mask, 0.0, causal, scale=scale)


def test_scale_0_causal_is_a_running_mean() -> None:
    o = sdpa(SQUARE, SQUARE, SQUARE, is_causal=True, scale=0.0)
    torch.testing.assert_close(o, SQUARE.cumsum(-2) / torch.arange(1, 6)[:, None])


def test_nan_query_row_is_nan_and_no_other() -> None:
    q = Q.clone()
    q[0, 1, 2, 3] = math.nan
    o = sdpa(q, K, V)
    assert o[0, 1, 2].isnan().all()
    assert o.isnan().sum() == 6
    assert sdpa(Q, K, V, torch.where(BOOL, math.nan, -math.inf))[:, :, 0].isnan().all()


def test_infinite_mask_row_is_nan() -> None:
    mask = torch.zeros(4, 5)
    mask[2, 3] = math.inf
    o = sdpa(Q, K, V, mask)
    assert o[:, :, 2].isnan().all() and not o[:, :, [0, 1, 3]].isnan().any()


MASKS = [(5,), (1, 5), (4, 1), (4, 5), (3, 4, 5), (1, 4, 5), (2, 1, 1, 5), (2, 1, 4, 5), (2, 3, 4, 1), (1, 1, 1, 1)]
MASKS += [(2, 1, 1, 1), (1, 3, 1, 5), (), (2, 3, 4, 5)]


@pytest.mark.parametrize("shape", MASKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_masks_broadcast_and_their_gradients_sum(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    q, k, v = (x.to(dtype) for x in (Q, K, V))
    for mask in (randn(*shape), randn(*shape, dtype=dtype), randn(*shape) > 0):
        check(q, k, v, mask)


@pytest.mark.parametrize("needs", list(itertools.product([False, True], repeat=4))[1:])
def test_gradients_of_exactly_what_wants_them(needs: tuple[bool, ...]) -> None:
    tensors = [x.clone().requires_grad_(need) for x, need in zip((Q, K, V, randn(4, 5)), needs, strict=True)]
    reference = [x.detach().clone().requires_grad_(need) for x, need in zip(tensors, needs, strict=True)]
    o, expected = sdpa(*tensors), torch_math(*reference)
    assert o.requires_grad
    weights = randn(*o.shape)
    o.backward(weights)
    expected.backward(weights)
    for a, b in zip(tensors, reference, strict=True):
        assert (a.grad is None) == (b.grad is None)
        if a.grad is not None:
            torch.testing.assert_close(a.grad, b.grad)


# --------------------------------------------------------------------------------------------------- shapes and strides


@pytest.mark.parametrize("heads", [(8, 2, 2), (6, 3, 3), (8, 1, 1), (8, 4, 2), (8, 2, 4), (12, 4, 6), (4, 4, 4)])
@pytest.mark.parametrize("rank", [3, 4, 5])
def test_grouped_heads(heads: tuple[int, int, int], rank: int) -> None:
    lead = (2, 2)[: rank - 3]
    q, k, v = (randn(*lead, h, n, 8, seed=n) for h, n in zip(heads, (4, 5, 5), strict=True))
    mask = randn(heads[0], 4, 5)
    check(q, k, v, enable_gqa=True)
    check(q, k, v, mask, enable_gqa=True)


def test_query_head_reads_its_own_group() -> None:
    v = torch.arange(2.0).view(1, 2, 1, 1)
    o = sdpa(torch.zeros(1, 6, 1, 4), torch.zeros(1, 2, 1, 4), v, enable_gqa=True)
    assert o.flatten().tolist() == [0, 0, 0, 1, 1, 1]


SHAPES = [
    ((4, 8), (5, 8), (5, 6)),
    ((3, 4, 8), (3, 5, 8), (3, 5, 6)),
    ((2, 1, 4, 8), (2, 3, 5, 8), (2, 3, 5, 6)),
    ((2, 3, 4, 8), (2, 1, 5, 8), (2, 1, 5, 6)),
    ((2, 3, 4, 8), (2, 1, 5, 8), (2, 3, 5, 6)),
    ((2, 3, 4, 8), (2, 3, 5, 8), (1, 1, 5, 6)),
    ((1, 3, 4, 8), (2, 3, 5, 8), (2, 1, 5, 6)),
    ((2, 3, 4, 8), (3, 5, 8), (5, 6)),
    ((4, 8), (2, 3, 5, 8), (3, 5, 6)),
    ((2, 2, 3, 4, 8), (2, 2, 3, 5, 8), (2, 2, 3, 5, 6)),
    ((2, 2, 3, 4, 8), (2, 1, 1, 5, 8), (1, 2, 3, 5, 6)),
    ((2, 1, 2, 3, 4, 8), (2, 3, 5, 8), (2, 2, 1, 3, 5, 6)),
]


@pytest.mark.parametrize("shapes", SHAPES)
def test_ranks_and_broadcasting(shapes: tuple[tuple[int, ...], ...]) -> None:
    q, k, v = (randn(*shape, seed=i) for i, shape in enumerate(shapes))
    check(q, k, v)
    check(q, k, v, None, 0.0, True)
    check(q, k, v, randn(4, 5))
    if max(x.dim() for x in (q, k, v)) == 5:
        check(q, k, v, randn(2, 1, 1, 4, 5))
        check(q, k, v, randn(2, 1, 1, 5) > -1)


def test_broadcast_heads_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Tensor] = []
    real = _sdpa.attend
    monkeypatch.setattr(_sdpa, "attend", lambda *call: seen.extend(call[:3]) or real(*call))
    monkeypatch.setattr(_sdpa, "attention", lambda q, k, v, **o: seen.extend((q, k, v)) or ffpa.attention(q, k, v, **o))
    k, v = randn(1, 1, 5, 8), randn(1, 1, 5, 8)
    sdpa(Q, k.expand(2, 3, 5, 8), v.expand(2, 3, 5, 8))
    sdpa(Q, k, v)
    assert [x.data_ptr() for x in seen] == 2 * [Q.data_ptr(), k.data_ptr(), v.data_ptr()]


EMPTY = [
    ((0, 3, 4, 8), (0, 3, 5, 8), (0, 3, 5, 6)),
    ((2, 0, 4, 8), (2, 0, 5, 8), (2, 0, 5, 6)),
    ((2, 3, 0, 8), (2, 3, 5, 8), (2, 3, 5, 6)),
    ((2, 3, 4, 8), (2, 3, 0, 8), (2, 3, 0, 6)),
    ((2, 3, 0, 8), (2, 3, 0, 8), (2, 3, 0, 6)),
    ((2, 3, 4, 8), (2, 3, 5, 8), (2, 3, 5, 0)),
    ((2, 3, 4, 0), (2, 3, 5, 0), (2, 3, 5, 6)),
]


@pytest.mark.parametrize("shapes", EMPTY)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("causal", [False, True])
def test_empty_extents(shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype, causal: bool) -> None:
    q, k, v = (randn(*shape, dtype=dtype).requires_grad_() for shape in shapes)
    for mask in (None, torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool)):
        o = sdpa(q, k, v, mask, is_causal=causal)
        assert o.shape == (*q.shape[:-1], v.shape[-1]) and o.dtype == dtype
        gradients = torch.autograd.grad(o.sum(), (q, k, v))
        assert all(g.shape == x.shape and g.isfinite().all() for g, x in zip(gradients, (q, k, v), strict=True))
        if k.shape[-2] == 0:
            assert (o == 0).all() and (gradients[0] == 0).all()
    if q.shape[-1] == 0 and not causal:
        torch.testing.assert_close(o, v.mean(-2, keepdim=True).expand(o.shape))


def test_output_is_laid_out_as_the_query() -> None:
    q = randn(2, 3, 6, 8).transpose(1, 2)
    o = sdpa(q, SQUARE[:, :1], SQUARE[:, :1])
    assert o.shape == (2, 6, 3, 8) and o.stride() == q.stride() == (144, 8, 48, 1)
    assert o.transpose(1, 2).is_contiguous()
    assert sdpa(Q, K, V).is_contiguous()
    assert sdpa(Q[0], K[0], V[0]).is_contiguous()
    decode = randn(2, 1, 6, 8).transpose(1, 2)
    assert sdpa(decode, SQUARE[:, :1], SQUARE[:, :1]).stride() == decode.stride()
    double = Q.double().transpose(1, 2).contiguous().transpose(1, 2)
    assert sdpa(double, K.double(), K.double()).stride() == double.stride()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("d", [46, 100, 257])
def test_any_strides_and_offsets(dtype: torch.dtype, d: int) -> None:
    n = 2 * 3 * 7 * d
    buffer = randn(n + 3, dtype=dtype)
    q, k, v = (buffer[i : n + i].view(2, 3, 7, d) for i in (1, 2, 3))  # off by one, two, three elements
    check(q, k, v)
    wide = randn(2, 3, 7, 2 * d, dtype=dtype)
    check(wide[..., ::2], k.mT.contiguous().mT, v[:, :, :, :1].expand(2, 3, 7, d))
    check(q, k, v, randn(7, 7, dtype=dtype).T)
    check(q, k, v, (randn(7, 15) > 0)[:, 1::2])


@pytest.mark.parametrize("kind", ["expanded", "transposed", "slice", "offset"])
def test_any_gradient_strides(kind: str) -> None:
    q, k, v = (x.clone().requires_grad_() for x in (Q, K, V))
    o = sdpa(q, k, v)
    dout = {
        "expanded": torch.ones(()).expand(o.shape),
        "transposed": randn(2, 4, 3, 6).transpose(1, 2),
        "slice": randn(2, 3, 4, 13)[..., 3:9],
        "offset": randn(o.numel() + 1)[1:].view(o.shape),
    }[kind]
    gradients = torch.autograd.grad(o, (q, k, v), dout, retain_graph=True)
    expected = torch.autograd.grad(o, (q, k, v), dout.contiguous())
    assert all(torch.equal(a, b) for a, b in zip(gradients, expected, strict=True))


def test_large_batch_of_heads() -> None:
    q = randn(1, 1, 2, 4).expand(65537, 1, 2, 4)
    assert torch.equal(sdpa(q, q, q), sdpa(q[:1], q[:1], q[:1]).expand(65537, 1, 2, 4))


# -------------------------------------------------------------------------------------------------------------- dropout


def test_dropout_is_repeated_by_the_seed() -> None:
    v = torch.eye(64).expand(1, 2, 64, 64)  # the output is P itself
    q = randn(1, 2, 64, 16)
    torch.manual_seed(3)
    first, second = sdpa(q, q, v, dropout_p=0.5), sdpa(q, q, v, dropout_p=0.5)
    torch.manual_seed(3)
    assert torch.equal(first, sdpa(q, q, v, dropout_p=0.5)) and not torch.equal(first, second)
    plain = sdpa(q, q, v)
    kept = first != 0
    torch.testing.assert_close(first[kept], 2 * plain[kept])
    assert 0.4 < kept.float().mean() < 0.6


def test_dropout_gradients_have_the_mask_of_the_forward() -> None:
    q, v = randn(1, 2, 64, 16).requires_grad_(), torch.eye(64).expand(1, 2, 64, 64).clone().requires_grad_()
    torch.manual_seed(3)
    o = sdpa(q, q, v, dropout_p=0.25)
    dout = randn(1, 2, 64, 64)
    (dv,) = torch.autograd.grad(o, v, dout)
    torch.testing.assert_close(dv, o.detach().mT @ dout)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_dropout_1_gives_zeros(dtype: torch.dtype) -> None:
    q = Q.to(dtype).requires_grad_()
    o = sdpa(q, K.to(dtype), V.to(dtype), dropout_p=1.0)
    assert (o == 0).all() and (torch.autograd.grad(o.sum(), q)[0] == 0).all()


def test_dropout_0_draws_nothing() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    sdpa(Q, K, V, dropout_p=0.0)
    sdpa(Q, K, V, dropout_p=0)
    assert torch.equal(before, torch.get_rng_state())


# ----------------------------------------------------------------------------------------------------- dtypes, autocast


def test_float64_is_exact_and_differentiable() -> None:
    q, k, v, mask = (x.double().requires_grad_() for x in (Q[0], K[0], V[0], randn(4, 5)))
    torch.testing.assert_close(sdpa(q, k, v, mask), torch_math(q, k, v, mask), rtol=1e-12, atol=1e-12)
    assert torch.autograd.gradcheck(lambda *x: sdpa(*x, is_causal=True), (q, k, v, mask))
    assert not sdpa(q, k, v, is_causal=True, scale=0.0).isnan().any()  # torch's default is NaN here


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("inputs", [(torch.float32,) * 3, (torch.float32, torch.bfloat16, torch.float16)])
def test_autocast(dtype: torch.dtype, inputs: tuple[torch.dtype, ...]) -> None:
    q, k, v = (x.to(t).requires_grad_() for x, t in zip((Q, K, V), inputs, strict=True))
    with torch.autocast("cpu", dtype=dtype):
        o, with_mask = sdpa(q, k, v), sdpa(q, k, v, randn(4, 5))
        in_double = sdpa(Q.double(), K.double(), V.double())
    assert o.dtype == with_mask.dtype == dtype and in_double.dtype == torch.float64
    torch.testing.assert_close(o, sdpa(q.to(dtype), k.to(dtype), v.to(dtype)))
    gradients = torch.autograd.grad(o.sum(), (q, k, v))
    assert [g.dtype for g in gradients] == list(inputs)


# --------------------------------------------------------------------------------------------------------------- errors

ERRORS: dict[str, tuple[type[Exception], str, Callable[[], Any]]] = {
    "D of q and k": (RuntimeError, "D_qk", lambda: sdpa(Q, K[..., :7], V)),
    "lengths of k and v": (RuntimeError, "N_kv", lambda: sdpa(Q, K, V[:, :, :4])),
    "lengths, rank 3": (RuntimeError, "N_kv", lambda: sdpa(Q[0], K[0], V[0, :, :4])),
    "lengths, fp64": (RuntimeError, "N_kv", lambda: sdpa(Q.double(), K.double(), V[:, :, :4].double())),
    "lengths, meta": (RuntimeError, "N_kv", lambda: sdpa(Q.to("meta"), K.to("meta"), V[:, :, :4].to("meta"))),
    "lengths, subclass": (RuntimeError, "N_kv", lambda: sdpa(Q.as_subclass(Loud), K, V[:, :, :4])),
    "batches": (RuntimeError, "batch", lambda: sdpa(Q, K[[0, 1, 0]], V[[0, 1, 0]])),
    "heads": (RuntimeError, "heads", lambda: sdpa(randn(1, 8, 4, 8), randn(1, 2, 5, 8), randn(1, 2, 5, 8))),
    "heads of k and v": (RuntimeError, "heads", lambda: sdpa(Q, K, V[:, :2])),
    "groups 6, 4": (RuntimeError, "must divide", lambda: sdpa(*grouped(6, 4, 4), enable_gqa=True)),
    "groups 3, 2": (RuntimeError, "must divide", lambda: sdpa(*grouped(3, 2, 2), enable_gqa=True)),
    "groups 2, 8": (RuntimeError, "must divide", lambda: sdpa(*grouped(2, 8, 8), enable_gqa=True)),
    "groups 4, 0": (RuntimeError, "must divide", lambda: sdpa(*grouped(4, 0, 0), enable_gqa=True)),
    "groups of v": (RuntimeError, "must divide", lambda: sdpa(*grouped(6, 3, 4), enable_gqa=True)),
    "rank 1": (RuntimeError, "rank", lambda: sdpa(Q[0, 0, 0], K[0, 0, 0], V[0, 0, 0])),
    "mask of (B, Nq, Nk)": (RuntimeError, "heads", lambda: sdpa(Q, K, V, torch.ones(2, 4, 5, dtype=torch.bool))),
    "mask rows": (RuntimeError, "N_q", lambda: sdpa(Q, K, V, torch.ones(3, 5))),
    "mask columns": (RuntimeError, "N_kv", lambda: sdpa(Q, K, V, torch.ones(4, 4))),
    "mask columns, rank 4": (RuntimeError, "N_kv", lambda: sdpa(Q, K, V, torch.ones(1, 1, 4, 4))),
    "mask rank": (RuntimeError, "rank", lambda: sdpa(Q, K, V, torch.ones(1, 1, 1, 4, 5))),
    "mask int": (RuntimeError, "attn_mask dtype to be bool or float", lambda: sdpa(Q, K, V, torch.ones(4, 5).int())),
    "mask fp64": (RuntimeError, "attn_mask dtype", lambda: sdpa(Q, K, V, torch.ones(4, 5).double())),
    "mask fp16, q fp32": (RuntimeError, "attn_mask dtype", lambda: sdpa(Q, K, V, torch.ones(1, 1, 4, 5).half())),
    "mask device": (RuntimeError, "device", lambda: sdpa(Q, K, V, torch.ones(4, 5, device="meta"))),
    "dtypes": (RuntimeError, "to have the same dtype", lambda: sdpa(Q, K.half(), V)),
    "devices": (RuntimeError, "to have the same device", lambda: sdpa(Q, K.to("meta"), V)),
    "int": (RuntimeError, "dtype", lambda: sdpa(Q.int(), K.int(), V.int())),
    "bool": (RuntimeError, "dtype", lambda: sdpa(Q.bool(), K.bool(), V.bool())),
    "complex": (NotImplementedError, "dtype", lambda: sdpa(*(x.to(torch.complex64) for x in (Q, K, V)))),
    "float8": (NotImplementedError, "dtype", lambda: sdpa(*(x.to(torch.float8_e4m3fn) for x in (Q, K, V)))),
    "dropout 1.5": (RuntimeError, "dropout_p", lambda: sdpa(Q, K, V, dropout_p=1.5)),
    "dropout -0.1": (RuntimeError, "dropout_p", lambda: sdpa(Q, K, V, dropout_p=-0.1)),
    "dropout NaN": (RuntimeError, "dropout_p", lambda: sdpa(Q, K, V, dropout_p=math.nan)),
    "dropout text": (TypeError, "dropout_p", lambda: sdpa(Q, K, V, dropout_p="0.1")),
    "scale text": (TypeError, "scale", lambda: sdpa(Q, K, V, scale="1")),
    "scale infinite": (RuntimeError, "scale", lambda: sdpa(Q, K, V, scale=math.inf)),
    "no tensor": (TypeError, "value", lambda: sdpa(Q, K, [1.0])),
    "mask no tensor": (TypeError, "attn_mask", lambda: sdpa(Q, K, V, [[True]])),
    "is_causal=1": (TypeError, "is_causal", lambda: sdpa(Q, K, V, is_causal=1)),
    "enable_gqa=1": (TypeError, "enable_gqa", lambda: sdpa(Q, K, V, enable_gqa=1)),
    "seventh by position": (TypeError, "positional", lambda: sdpa(Q, K, V, None, 0.0, False, 1.0)),
}


def grouped(h_q: int, h_k: int, h_v: int) -> tuple[Tensor, ...]:
    return randn(1, h_q, 4, 8), randn(1, h_k, 5, 8), randn(1, h_v, 5, 8)


class Loud(Tensor):
    """A subclass that intercepts functions."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            return "intercepted"
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name: str) -> None:
    kind, text, call = ERRORS[name]
    with pytest.raises(kind, match=text) as raised:
        call()
    assert raised.type is kind  # NotImplementedError is a RuntimeError, too


MATH_ACCEPTS = {"groups 4, 0", "scale infinite", "dropout -0.1", "dropout NaN", "lengths, subclass"}
AGREE = sorted(ERRORS.keys() - MATH_ACCEPTS)


@pytest.mark.parametrize("name", AGREE)
def test_torch_raises_the_same_kind(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, _, call = ERRORS[name]
    monkeypatch.setitem(globals(), "sdpa", torch_math)
    with pytest.raises(Exception) as raised:
        call()
    assert issubclass(raised.type, kind) or issubclass(kind, raised.type) or "lengths" in name


# -------------------------------------------------------------------------------------------- what is torch's to handle


def test_subclasses_and_nested_tensors_are_torchs() -> None:
    assert sdpa(Q.as_subclass(Loud), K, V) == "intercepted"
    assert sdpa(Q, K, V, BOOL.as_subclass(Loud)) == "intercepted"
    parts = [randn(n, 3, 8) for n in (2, 4)]
    nested = torch.nested.nested_tensor(parts, layout=torch.jagged).transpose(1, 2)
    for o, part in zip(sdpa(nested, nested, nested).transpose(1, 2).unbind(), parts, strict=True):
        heads = part.transpose(0, 1)
        torch.testing.assert_close(o, sdpa(heads, heads, heads).transpose(0, 1))


def test_parameters_are_ours() -> None:
    q = torch.nn.Parameter(Q)
    assert _sdpa._is_usual(q, K, V, None, False, False)
    torch.testing.assert_close(sdpa(q, K, V), torch_math(Q, K, V))


@pytest.mark.parametrize(
    ("kind", "tensors"),
    [
        ("fp64", [x.double() for x in (Q, K, V)]),
        ("device", [x.to("meta") for x in (Q, K, V)]),
        ("subclass", [Q.as_subclass(Loud), K, V]),
        (None, [Q, K, V]),
        (None, [Q[0], K[0, 0], V]),
    ],
)
def test_fallback_reason(kind: str | None, tensors: list[Tensor]) -> None:
    reason = _sdpa.fallback_reason(*tensors)
    assert reason is None if kind is None else reason is not None and reason.startswith(f"{kind}:")


def test_meta_tensors_give_shapes() -> None:
    o = sdpa(*(x.to("meta") for x in (Q, K, V)))
    assert o.shape == (2, 3, 4, 6) and o.device.type == "meta"


def test_signature_is_torchs() -> None:
    import inspect

    parameters = list(inspect.signature(sdpa).parameters.values())
    assert [p.name for p in parameters] == [
        *("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
    ]
    assert [p.name for p in parameters if p.kind is p.KEYWORD_ONLY] == ["scale", "enable_gqa"]
    assert [p.default for p in parameters[3:]] == [None, 0.0, False, None, False]
