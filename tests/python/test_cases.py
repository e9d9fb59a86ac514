"""Inputs that broke other attention libraries, kind by kind, on the kernel that this machine chooses.

test_matrix.py goes through all kernels. The letters are those of the collection the cases come from."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import ffpa
from oracle import HALVES, WIDTHS, attend, check, int32, judge, qkv, randn

ALL = (torch.float32, *HALVES)
sdpa = ffpa.scaled_dot_product_attention


def means(visible: Tensor, v: Tensor) -> Tensor:
    """What every row must be when all logits are equal (T1)."""
    weights = visible.double()
    return weights @ v.double() / weights.sum(-1, keepdim=True).clamp(min=1)


def level(logit: float, n_q: int, n_kv: int, d: int, dtype: torch.dtype, h_q: int = 1, h_kv: int = 1) -> Any:
    """q, k, v whose logits all equal `logit` at scale 1; v[j] = j / N_kv."""
    q, k = torch.zeros(1, h_q, n_q, d, dtype=dtype), torch.zeros(1, h_kv, n_kv, d, dtype=dtype)
    q[..., 0], k[..., 0] = logit, 1
    v = (torch.arange(n_kv) / max(n_kv, 1)).to(dtype).view(1, 1, -1, 1).expand(1, h_kv, n_kv, d).contiguous()
    return q, k, v


# ------------------------------------------------------------------------------------------------------ no visible key


@pytest.mark.parametrize("dtype", ALL)
@pytest.mark.parametrize("d", WIDTHS)
@pytest.mark.parametrize("kind", ["bool", "additive"])
def test_s1_fully_masked_row(d: int, dtype: torch.dtype, kind: str) -> None:
    q, k, v = (x.requires_grad_() for x in qkv(1, 1, 1, 3, 4, d, dtype))
    mask = torch.ones(3, 4, dtype=torch.bool)
    mask[1] = False
    o = sdpa(q, k, v, mask if kind == "bool" else torch.where(mask, 0.0, -math.inf))
    assert (o[0, 0, 1] == 0).all()
    for gradient, name in zip(torch.autograd.grad(o.sum(), (q, k, v)), "qkv", strict=True):
        assert torch.isfinite(gradient).all(), name
        assert name != "q" or (gradient[0, 0, 1] == 0).all()
    check(*(x.detach() for x in (q, k, v)), mask=mask.view(1, 1, 3, 4))


@pytest.mark.parametrize("anchor", ["top_left", "bottom_right"])
@pytest.mark.parametrize("lengths", [(2, 5), (5, 2), (1, 5), (64, 200), (200, 64)])
@pytest.mark.parametrize("dtype", ALL)
def test_s3_causal_of_unequal_lengths(lengths: tuple[int, int], anchor: str, dtype: torch.dtype) -> None:
    o, lse = check(*qkv(1, 8, 2, *lengths, 512, dtype), causal=True, anchor=anchor)
    if anchor == "bottom_right" and lengths == (200, 64):
        assert (o[:, :, :136] == 0).all() and (lse[:, :, :136] == -math.inf).all()


def test_s5_mask_and_causal_both_hold() -> None:
    q, k, v = qkv(1, 1, 1, 4, 4, 64, torch.float32)
    mask = torch.ones(4, 4, dtype=torch.bool)
    mask[:, 0] = False
    for given in (mask, torch.where(mask, 0.0, -math.inf)):
        o = sdpa(q, k, v, given, is_causal=True)
        assert (o[0, 0, 0] == 0).all()
        torch.testing.assert_close(o, sdpa(q, k, v, mask & torch.ones(4, 4, dtype=torch.bool).tril()))


@pytest.mark.parametrize("n", [64, 129])
@pytest.mark.parametrize("window", [(0, 0), (15, 0), ("n-1", 0), ("n", 0), (-1, 0), (3, 5), (0, -1), (-1, -1)])
def test_s6_window_is_read_off_the_probabilities(n: int, window: tuple[Any, Any]) -> None:
    left, right = ({"n-1": n - 1, "n": n}.get(w, w) for w in window)
    q, k, _ = qkv(1, 2, 1, n, n + 7, 64, torch.float32)
    p = ffpa.flash_attn_func(
        *(x.transpose(1, 2) for x in (q, k, torch.eye(n + 7).view(1, 1, n + 7, n + 7))), window_size=(left, right)
    ).transpose(1, 2)
    i, j = torch.arange(n)[:, None] + 7, torch.arange(n + 7)
    seen = ((left < 0) | (j >= i - left)) & ((right < 0) | (j <= i + right))
    assert torch.equal(p != 0, seen.expand_as(p))


def test_s6_window_of_the_whole_length_is_causal() -> None:
    q, k, v = (x.transpose(1, 2) for x in qkv(1, 2, 1, 129, 129, 64, torch.float32))
    causal = ffpa.flash_attn_func(q, k, v, causal=True)
    assert torch.equal(causal, ffpa.flash_attn_func(q, k, v, window_size=(128, 0)))
    assert torch.equal(causal, ffpa.flash_attn_func(q, k, v, window_size=(-1, 0)))


@pytest.mark.parametrize("scale", [0.0, -1.0])
@pytest.mark.parametrize("n_kv", [4, 65])
@pytest.mark.parametrize("dtype", ALL)
def test_s8_scale_zero_and_negative(scale: float, n_kv: int, dtype: torch.dtype) -> None:
    for options in ({"causal": True}, {"mask": randn(1, 1, 4, n_kv, seed=4) > 0}, {}):
        check(*qkv(1, 1, 1, 4, n_kv, 8, dtype), scale=scale, **options)


@pytest.mark.parametrize("cap", [0.5, 15.0])
@pytest.mark.parametrize("d", [64, 256, 512])
@pytest.mark.parametrize("dtype", ALL)
def test_s10_softcap(cap: float, d: int, dtype: torch.dtype) -> None:
    q, k, v = qkv(1, 4, 2, 128, 217, d, dtype)
    check(q, k, v, softcap=cap, causal=True, anchor="bottom_right", scale=3 * d**-0.5)


@pytest.mark.parametrize("d", [64, 512])
def test_s11_sinks(d: int) -> None:
    sinks = torch.tensor([0.5, 100.0, -100.0, -math.inf])
    mask = torch.ones(1, 1, 2, 3, dtype=torch.bool)
    mask[0, 0, 0] = False
    q, k, v = qkv(1, 4, 1, 2, 3, d, torch.float32)
    o, lse = check(q * 0.01, k, v, sinks=sinks, mask=mask)
    assert (o[0, :, 0] == 0).all() and torch.equal(lse[0, :, 0], sinks)
    assert o[0, 1, 1].abs().max() < 1e-30 and lse[0, 1, 1] == 100
    without = ffpa.attention(q * 0.01, k, v, mask=mask)
    assert isinstance(without, Tensor) and torch.equal(o[0, 3], without[0, 3])  # a sink of -inf is none


@pytest.mark.parametrize("d", [64, 512])
def test_s12_lse_is_natural_and_empty_is_minus_infinity(d: int) -> None:
    for n_kv in (0, 4):
        check(*qkv(2, 2, 1, 3, n_kv, d, torch.float32))
    _, lse = check(*qkv(1, 1, 1, 3, 4, d, torch.bfloat16), seqlens_kv=int32([0]))
    assert (lse == -math.inf).all() and lse.dtype == torch.float32


SHAPES = [(5,), (1, 5), (4, 1), (4, 5), (3, 4, 5), (2, 1, 1, 5), (2, 1, 4, 5), (2, 3, 4, 1), (1, 1, 1, 1)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("d", [8, 512])
def test_s13_masks_broadcast(shape: tuple[int, ...], d: int) -> None:
    q, k, v = qkv(2, 3, 3, 4, 5, d, torch.float32)
    wide = (1,) * (4 - len(shape)) + shape
    check(q, k, v, mask=(randn(*shape, seed=8) > -0.5).view(wide))
    check(q, k, v, bias=randn(*shape, seed=8).view(wide))  # A4: its gradient has its shape
    torch.testing.assert_close(sdpa(q, k, v, randn(*shape, seed=8)), attend(q, k, v, bias=randn(*shape, seed=8))[0])


def test_s13_a_rank_3_mask_is_never_a_batch() -> None:
    with pytest.raises(RuntimeError):
        sdpa(*qkv(2, 3, 3, 4, 5, 8, torch.float32), torch.ones(2, 4, 5, dtype=torch.bool))


@pytest.mark.parametrize("heads", [(6, 4), (3, 2), (2, 8)])
def test_s14_heads_that_do_not_divide_raise(heads: tuple[int, int]) -> None:
    with pytest.raises(RuntimeError, match=r"[Nn]umber of heads"):
        sdpa(*qkv(1, heads[0], heads[1], 4, 5, 8, torch.float32), enable_gqa=True)
    with pytest.raises(RuntimeError, match=r"H_q.*multiple|H_kv"):
        ffpa.attention(*qkv(1, heads[0], heads[1], 4, 5, 8, torch.float32))


def test_s14_query_head_reads_its_groups_key_head() -> None:
    q, k, v = qkv(1, 6, 2, 4, 5, 64, torch.float32)
    v[:] = torch.arange(2.0).view(1, 2, 1, 1)
    assert torch.equal(sdpa(q, k, v, enable_gqa=True)[0, :, 0, 0].round(), torch.tensor([0.0, 0, 0, 1, 1, 1]))


# ----------------------------------------------------------------------------------- sentinels, order of scale and mask


@pytest.mark.parametrize("dtype,logit", [(torch.bfloat16, -1e5), (torch.float16, -6e4), (torch.float32, -1e30)])
@pytest.mark.parametrize("d", [64, 512])
@pytest.mark.parametrize("num_splits", [0, 5])
def test_n1_logits_below_every_sentinel(dtype: torch.dtype, logit: float, d: int, num_splits: int) -> None:
    q, k, v = level(logit, 88, 448, d, dtype)
    o = ffpa.attention(q, k, v, scale=1.0, causal=True, num_splits=num_splits)
    assert isinstance(o, Tensor)
    expected = means(torch.ones(88, 448).tril(), v)
    assert (o.double() - expected).abs().max() < 4e-3


def test_n1_close_to_equal_and_low() -> None:
    q = torch.full((1, 1, 1, 128), -440.0)
    k = torch.ones(1, 1, 3, 128) * torch.tensor([4.0, 4.03125, 4.0]).view(1, 1, 3, 1)
    v = torch.tensor([0.0, 10.0, 4.0]).view(1, 1, 3, 1).expand(1, 1, 3, 128)
    for num_splits in (1, 3):
        o = ffpa.attention(q, k, v, scale=1.0, num_splits=num_splits)
        assert isinstance(o, Tensor) and (o == 2).all()


@pytest.mark.parametrize("where", ["first", "middle", "last"])
@pytest.mark.parametrize("d", [64, 512])
@pytest.mark.parametrize("dtype", ALL)
def test_n2_whole_tiles_hidden(where: str, d: int, dtype: torch.dtype) -> None:
    q, k, v = level(-1000, 88, 448, d, dtype, 14, 2)
    visible = torch.ones(88, 448, dtype=torch.bool)
    begin = {"first": 0, "middle": 128, "last": 256}[where]
    visible[:, begin : begin + 192] = False
    o, lse = ffpa.attention(q, k, v, scale=1.0, mask=visible, return_lse=True)
    assert (o.double() - means(visible, v.repeat_interleave(7, 1))).abs().max() < 4e-3
    assert (lse - (-1000 + math.log(256))).abs().max() < 1e-3
    band = ffpa.attention(q, k, v, scale=1.0, window=(16, 0), anchor="bottom_right")
    i, j = torch.arange(88)[:, None] + 360, torch.arange(448)
    assert isinstance(band, Tensor)
    assert (band.double() - means((j <= i) & (j >= i - 16), v.repeat_interleave(7, 1))).abs().max() < 4e-3


@pytest.mark.parametrize("kind", ["rising", "falling", "alternating", "hidden between"])
@pytest.mark.parametrize("dtype", ALL)
def test_n2_scores_that_jump(kind: str, dtype: torch.dtype) -> None:
    n_kv = 700
    steps = torch.arange(n_kv) // 64
    logit = {"rising": steps * 13.0, "falling": -steps * 13.0, "alternating": (steps % 2) * 130.0}.get(
        kind, steps * 9.0
    )
    q, k = torch.zeros(1, 1, 5, 64), torch.zeros(1, 1, n_kv, 64)
    q[..., 0], k[..., 0] = 1, logit
    mask = ((steps % 3 != 1) if kind == "hidden between" else torch.ones(n_kv, dtype=torch.bool)).view(1, 1, 1, n_kv)
    check(q.to(dtype), k.to(dtype), randn(1, 1, n_kv, 64, dtype=dtype), scale=1.0, mask=mask)


def test_n7_finite_masks() -> None:
    q, k, v = qkv(1, 2, 2, 3, 5, 64, torch.bfloat16)
    low = torch.full((3, 5), torch.finfo(torch.bfloat16).min, dtype=torch.bfloat16)
    assert (sdpa(q, k, v, low + low) == 0).all()  # -inf
    o = sdpa(q, k, v, torch.full((3, 5), torch.finfo(torch.float32).min))
    assert (o.double() - v.double().mean(2, keepdim=True)).abs().max() < 4e-3


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("dtype", ALL)
@pytest.mark.parametrize("d", [64, 512])
@pytest.mark.parametrize("lengths", [[1, 3], [64, 96, 48, 127]])
def test_n8_nothing_past_a_length_counts(poison: float, dtype: torch.dtype, d: int, lengths: list[int]) -> None:
    b = len(lengths)
    n_kv = 3 if b == 2 else 128
    q, k, v = qkv(b, 4, 2, 2, n_kv, d, dtype)
    dout = randn(*q.shape, dtype=dtype, seed=9)
    results = []
    for fill in (0.0, poison):
        for x in (k, v):
            for row, n in enumerate(lengths):
                x[row, :, n:] = fill
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        o = ffpa.attention(*leaves, seqlens_kv=int32(lengths), causal=True, anchor="bottom_right")
        assert isinstance(o, Tensor)
        results.append((o, *torch.autograd.grad(o, leaves, dout)))
    for clean, poisoned in zip(*results, strict=True):
        assert torch.equal(clean, poisoned)
    assert torch.isfinite(results[0][0]).all()


@pytest.mark.parametrize("d", [1, 7, 46, 100, 129, 200, 257, 321, 513, 1000])
@pytest.mark.parametrize("dtype", ALL)
def test_n11_any_width(d: int, dtype: torch.dtype) -> None:
    check(*qkv(1, 2, 1, 33, 65, d, dtype), causal=True)
    check(*qkv(1, 2, 1, 5, 9, d, dtype, d_v=d % 50 + 1))


# ---------------------------------------------------------------------------------------------- empty and huge extents


@pytest.mark.parametrize("shape", [(0, 2, 3, 4), (2, 0, 3, 4), (2, 2, 0, 4), (2, 2, 3, 0), (2, 2, 0, 0)])
@pytest.mark.parametrize("causal", [False, True])
def test_b1_empty_extents(shape: tuple[int, int, int, int], causal: bool) -> None:
    b, h, n_q, n_kv = shape
    q, k, v = (x.requires_grad_() for x in qkv(b, h, h, n_q, n_kv, 64, torch.float32))
    o = sdpa(q, k, v, torch.ones(n_q, n_kv, dtype=torch.bool), is_causal=causal)
    assert o.shape == q.shape and (o == 0).all()
    assert all((g == 0).all() for g in torch.autograd.grad(o.sum(), (q, k, v)))


def test_b1_widths_of_zero_and_no_key_heads() -> None:
    q, k, v = torch.empty(1, 2, 3, 0), torch.empty(1, 2, 5, 0), randn(1, 2, 5, 6)
    torch.testing.assert_close(sdpa(q, k, v), v.mean(2, keepdim=True).expand(1, 2, 3, 6))
    assert sdpa(randn(1, 2, 3, 8), randn(1, 2, 5, 8), torch.empty(1, 2, 5, 0)).shape == (1, 2, 3, 0)
    with pytest.raises(RuntimeError):
        sdpa(randn(1, 2, 3, 8), torch.empty(1, 0, 5, 8), torch.empty(1, 0, 5, 8), enable_gqa=True)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("d", [64, 256, 512])
@pytest.mark.parametrize(
    "cu_q,cu_kv,h_q,h_kv",
    [
        ([0, 0, 5, 9, 9], [0, 7, 7, 20, 33], 4, 1),
        ([0, 1, 1, 2], [0, 3, 4, 9], 9, 3),
        ([0, 0, 0], [0, 4, 9], 4, 2),
        ([0, 4, 9], [0, 0, 0], 4, 2),
    ],
)
def test_b3_sequences_of_length_zero(d: int, cu_q: list[int], cu_kv: list[int], h_q: int, h_kv: int) -> None:
    q, k, v = (x.requires_grad_() for x in qkv(1, h_q, h_kv, cu_q[-1], cu_kv[-1], d, torch.float32))
    dout = randn(*q.shape, seed=9)
    longest = max(b - a for a, b in itertools.pairwise(cu_q))
    o, lse = ffpa.attention(
        q,
        k,
        v,
        cu_seqlens_q=int32(cu_q),
        cu_seqlens_kv=int32(cu_kv),
        max_seqlen_q=longest,
        causal=True,
        return_lse=True,
    )
    dq, dk, dv = torch.autograd.grad(o, (q, k, v), dout)
    for (a, b), (c, e) in zip(itertools.pairwise(cu_q), itertools.pairwise(cu_kv), strict=True):
        one = [x[:, :, s:t].detach().requires_grad_() for x, s, t in ((q, a, b), (k, c, e), (v, c, e))]
        alone, alone_lse = attend(*one, causal=True)
        gradients = torch.autograd.grad(alone, one, dout[:, :, a:b])
        torch.testing.assert_close(o[:, :, a:b], alone, atol=2e-5, rtol=2e-5)
        torch.testing.assert_close(lse[:, :, a:b], alone_lse, atol=2e-5, rtol=2e-5)
        for found, expected in zip((dq[:, :, a:b], dk[:, :, c:e], dv[:, :, c:e]), gradients, strict=True):
            torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("shape", [(65537, 1, 2, 64), (1, 65537, 2, 64), (70000, 1, 1, 512)])
def test_l4_more_than_65535_batches_or_heads(shape: tuple[int, ...]) -> None:
    q, k, v = (randn(*shape, seed=s).bfloat16().requires_grad_() for s in (1, 2, 3))
    o = sdpa(q, k, v, is_causal=True)
    gradients = torch.autograd.grad(o, (q, k, v), torch.ones_like(o))
    last = (slice(-1, None),) if shape[1] == 1 else (slice(None), slice(-1, None))
    few = [x[last].detach().requires_grad_() for x in (q, k, v)]
    again = sdpa(*few, is_causal=True)
    assert torch.equal(o[last], again)
    for whole, part in zip(gradients, torch.autograd.grad(again, few, torch.ones_like(again)), strict=True):
        assert torch.equal(whole[last], part)


def test_l4_70000_sequences() -> None:
    n = 70000
    q, k, v = (randn(1, 1, n, 64, seed=s).bfloat16() for s in (1, 2, 3))
    cu = torch.arange(n + 1, dtype=torch.int32)
    o = ffpa.attention(q, k, v, cu_seqlens_q=cu, cu_seqlens_kv=cu, max_seqlen_q=1, max_seqlen_kv=1)
    assert isinstance(o, Tensor) and torch.equal(o, v)  # each row sees its own key only


# ------------------------------------------------------------------------------------------ strides, alignment, offsets


@pytest.mark.parametrize("n_kv", [33, 34, 97, 98, 129, 1025])
@pytest.mark.parametrize("n_q", [1, 64])
def test_m1_expanded_heads_with_a_mask(n_kv: int, n_q: int) -> None:
    q, k, v = qkv(1, 4, 1, n_q, n_kv, 512, torch.bfloat16)
    mask = torch.ones(n_q, n_kv, dtype=torch.bool).tril(n_kv - n_q)
    wide = [x.expand(1, 4, n_kv, 512) for x in (k, v)]
    assert torch.equal(sdpa(q, *wide, mask), sdpa(q, *(x.contiguous() for x in wide), mask))
    check(q, k, v, mask=mask.view(1, 1, n_q, n_kv), backward=n_kv < 200)


@pytest.mark.parametrize("d", [46, 100, 257])
@pytest.mark.parametrize("dtype", ALL)
def test_m2_misaligned_bases(d: int, dtype: torch.dtype) -> None:
    shapes = ((1, 2, 9, d), (1, 2, 17, d), (1, 2, 17, d))
    tensors = []
    for shift, shape in enumerate(shapes, 1):
        count = math.prod(shape)
        tensors.append(randn(count + 8, dtype=dtype, seed=shift)[shift : shift + count].view(shape))
    bias = randn(9 * 17 + 3)[3:].view(1, 1, 9, 17)
    o, _ = check(*tensors, bias=bias)
    assert torch.equal(o, ffpa.attention(*(x.clone() for x in tensors), bias=bias.clone()))  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", ALL)
def test_m3_any_last_stride(dtype: torch.dtype) -> None:
    q = randn(1, 2, 9, 128, dtype=dtype)[..., ::2]
    k = randn(1, 2, 64, 17, dtype=dtype, seed=1).transpose(-1, -2)
    v = randn(1, 2, 17, 1, dtype=dtype, seed=2).expand(1, 2, 17, 32)
    mask = (randn(17, 9, seed=3) > -1).T
    o = sdpa(q, k, v, mask)
    assert torch.equal(o, sdpa(q.contiguous(), k.contiguous(), v.contiguous(), mask.contiguous()))


def test_m6_output_has_the_queries_order_of_memory() -> None:
    q = randn(2, 3, 6, 8).transpose(1, 2)
    for o in (sdpa(q, q, q), torch.compile(sdpa, backend="eager", fullgraph=True)(q, q, q)):
        assert o.stride() == q.stride()
        o.transpose(1, 2).view(2, 3, 48)
    assert sdpa(q.contiguous(), q, q).is_contiguous()


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_l1_offsets_past_2_to_the_31(axis: int) -> None:
    """Strides of 2^31 elements over memory that is only reserved: pages that nothing touches are never made."""
    step = 2**31
    try:
        storage = torch.empty(step + 8256, dtype=torch.bfloat16)
    except RuntimeError:
        pytest.skip("this machine does not overcommit 4 GiB")
    shape = [1, 1, 32, 64]
    shape[axis] = 2
    strides = [2048, 2048, 64, 1]
    strides[axis] = step
    far = storage.as_strided(shape, strides)
    near = randn(*shape, dtype=torch.bfloat16)
    far.copy_(near)
    q = randn(shape[0], shape[1], 3, 64, dtype=torch.bfloat16, seed=4)
    assert torch.equal(sdpa(q, far, far), sdpa(q, near, near))
    o, dout = sdpa(far, near, near), near
    assert torch.equal(o, sdpa(near, near, near)) and torch.isfinite(o).all()
    leaves = [x.detach().requires_grad_() for x in (near, near.clone(), near.clone())]
    expected = torch.autograd.grad(sdpa(*leaves), leaves, dout)
    out = sdpa(*leaves)
    for found, wanted in zip(torch.autograd.grad(out, leaves, far), expected, strict=True):
        assert torch.equal(found, wanted)


# ------------------------------------------------------------------------------------------------------------- backward


@pytest.mark.parametrize("kind", ["expanded", "transposed", "slice of cat", "odd offset"])
@pytest.mark.parametrize("dtype", ALL)
def test_a1_any_dout(kind: str, dtype: torch.dtype) -> None:
    q, k, v = (x.requires_grad_() for x in qkv(2, 2, 1, 9, 17, 64, dtype))
    shape = (2, 2, 9, 64)
    dout = {
        "expanded": lambda: torch.ones((), dtype=dtype).expand(shape),
        "transposed": lambda: randn(2, 9, 64, 2, dtype=dtype).permute(0, 3, 1, 2),
        "slice of cat": lambda: torch.cat([randn(*shape, dtype=dtype)] * 2, -1)[..., 3:67],
        "odd offset": lambda: randn(math.prod(shape) + 1, dtype=dtype)[1:].view(shape),
    }[kind]()
    o = sdpa(q, k, v, enable_gqa=True)
    found = torch.autograd.grad(o, (q, k, v), dout, retain_graph=True)
    for a, b in zip(found, torch.autograd.grad(o, (q, k, v), dout.contiguous().clone()), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("needs", list(itertools.product([False, True], repeat=4))[1:])
@pytest.mark.parametrize("d", [16, 512])
def test_a3_gradients_of_exactly_what_wants_them(needs: tuple[bool, ...], d: int) -> None:
    tensors = [*qkv(1, 2, 2, 64, 64, d, torch.float32), randn(64, 64, seed=7)]
    wanted = [x.detach().requires_grad_() for x in tensors]
    full = torch.autograd.grad(sdpa(*wanted).square().sum(), wanted)
    some = [x.detach().requires_grad_(need) for x, need in zip(tensors, needs, strict=True)]
    o = sdpa(*some)
    assert o.requires_grad
    o.square().sum().backward()
    for x, need, expected in zip(some, needs, full, strict=True):
        assert (x.grad is not None) == need
        if need:
            torch.testing.assert_close(x.grad, expected)


@pytest.mark.parametrize("options", [{"causal": True}, {"window": (20, 3)}, {"softcap": 15.0}, {"dropout_p": 0.3}])
@pytest.mark.parametrize("d", [64, 256, 512])
def test_a9_bits_repeat(options: dict[str, Any], d: int) -> None:
    leaves = [x.requires_grad_() for x in qkv(2, 4, 2, 100, 150, d, torch.bfloat16)]
    bias = randn(1, 1, 100, 150).requires_grad_()
    options = {"dropout_state": torch.tensor([1, 2]), **options}
    first: list[Tensor] = []
    for _ in range(20):
        o = ffpa.attention(*leaves, bias=bias, deterministic=True, **options)
        assert isinstance(o, Tensor)
        found = [o, *torch.autograd.grad(o, [*leaves, bias], torch.ones_like(o))]
        first = first or found
        assert all(torch.equal(a, b) for a, b in zip(first, found, strict=True))


def test_a10_dropout_masks() -> None:
    n = 64
    q, k, _ = qkv(2, 3, 3, n, n, 64, torch.float32)
    eye = torch.eye(n).expand(2, 3, n, n)
    torch.manual_seed(3)
    first, second = sdpa(q, k, eye, dropout_p=0.5), sdpa(q, k, eye, dropout_p=0.5)
    torch.manual_seed(3)
    assert torch.equal(first, sdpa(q, k, eye, dropout_p=0.5)) and not torch.equal(first, second)
    kept = first != 0
    assert 0.45 < kept.float().mean() < 0.55
    torch.testing.assert_close(first[kept], 2 * sdpa(q, k, eye)[kept])
    rows = kept.reshape(6 * n, n).float()
    assert (rows @ rows.T / n)[~torch.eye(6 * n, dtype=torch.bool)].max() < 0.7  # no two rows alike


@pytest.mark.parametrize("kernel", [None, "ref_fwd_loops"])
def test_a10_the_mask_does_not_depend_on_the_plan(kernel: str | None) -> None:
    q, k, v = qkv(2, 4, 2, 70, 300, 64, torch.float32)
    state = torch.tensor([7, 11])
    options: dict[str, Any] = dict(dropout_p=0.4, dropout_state=state, causal=True)
    whole = ffpa.attention(q, k, v, **options)
    for num_splits, batch in ((1, 2), (4, 2)):
        other = ffpa.attention(q[:batch], k[:batch], v[:batch], num_splits=num_splits, kernel=kernel, **options)
        torch.testing.assert_close(other, whole, atol=1e-5, rtol=1e-5)


# ------------------------------------------------------------------------------------------------- split, pages, memory


@pytest.mark.parametrize("page", [1, 3, 16, 19, 32, 64, 256, 768])
@pytest.mark.parametrize("h_kv,d", [(1, 64), (2, 512)])
def test_d1_any_page_size(page: int, h_kv: int, d: int) -> None:
    lengths = [0, 1, 37, 300]
    b, each = len(lengths), 300 // page + 1
    table = torch.randperm(b * each, generator=torch.Generator().manual_seed(page)).view(b, each).int()
    k_pages = torch.full((b * each, h_kv, page, d), math.nan)
    v_pages = k_pages.clone()
    q, k, v = qkv(b, 4, h_kv, 2, 300, d, torch.float32)
    for row, n in enumerate(lengths):
        for j in range(n):
            k_pages[table[row, j // page], :, j % page] = k[row, :, j]
            v_pages[table[row, j // page], :, j % page] = v[row, :, j]
    options: dict[str, Any] = dict(seqlens_kv=int32(lengths), causal=True, anchor="bottom_right", return_lse=True)
    paged = ffpa.attention(q, k_pages, v_pages, block_table=table, **options)
    dense = ffpa.attention(q, k, v, **options)
    for a, c in zip(paged, dense, strict=True):
        assert torch.equal(a, c)


@pytest.mark.parametrize("num_splits", [1, 2, 8, 64])
def test_d2_splits_merge(num_splits: int) -> None:
    for lengths in ([5, 0, 1], [700, 16, 129]):
        q, k, v = qkv(3, 4, 2, 1, max(lengths), 128, torch.float32)
        check(q, k, v, seqlens_kv=int32(lengths), backward=False, forced={"num_splits": num_splits})


def test_q_quantised_caches_are_refused_by_name() -> None:
    q, k, v = qkv(1, 2, 2, 3, 4, 64, torch.bfloat16)
    with pytest.raises((RuntimeError, NotImplementedError), match=r"^k: dtype"):
        ffpa.attention(q, k.to(torch.float8_e4m3fn), v.to(torch.float8_e4m3fn))


def test_e8_gqa_of_width_512_is_ours_and_never_falls_back() -> None:
    q, k, v = qkv(1, 8, 4, 64, 64, 512, torch.bfloat16)
    with ffpa.patch_sdpa(strict=True):
        for mask in (None, torch.ones(64, 64, dtype=torch.bool)):
            torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, enable_gqa=True)
    found = ffpa.explain(q, k, v, causal=True)
    assert found.kernel is not None and found.engine == "cpu" and found.fallback is None


def test_judge_can_fail() -> None:
    q, k, v = qkv(1, 2, 2, 30, 40, 64, torch.bfloat16)
    true, plain = attend(q.double(), k.double(), v.double())[0], attend(q, k, v)[0]
    judge("o", ffpa.attention(q, k, v), true, plain, q.dtype)  # type: ignore[arg-type]
    with pytest.raises(AssertionError):
        judge("o", ffpa.attention(q, k, v) * 1.02, true, plain, q.dtype)  # type: ignore[operator]
