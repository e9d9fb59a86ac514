"""ffpa_attn_func and ffpa_attn_varlen_func: ffpa-attn's arguments and its bottom-right causal, against the formula."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

import ffpa
from ffpa import ffpa_attn_func, ffpa_attn_varlen_func
from formula import attend, tolerance


def randn(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_signatures() -> None:
    dense, packed = (inspect.signature(f).parameters for f in (ffpa_attn_func, ffpa_attn_varlen_func))
    assert [*dense] == ["query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa", "kwargs"]
    assert [p.default for p in dense.values()][3:8] == [None, 0.0, False, None, False]
    assert [*packed][:7] == ["q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"]
    options = {n: p.default for n, p in packed.items() if p.kind is p.KEYWORD_ONLY}
    assert options == dict(dropout_p=0.0, softmax_scale=None, causal=False, enable_gqa=False, return_lse=False)


@pytest.mark.parametrize("d", [64, 320, 512])
@pytest.mark.parametrize("lengths", [(2, 5), (5, 2), (1, 5), (64, 200), (200, 64), (33, 33)])
def test_causal_is_bottom_right_forward_and_backward(lengths: tuple[int, int], d: int) -> None:
    n_q, n_kv = lengths
    q, k, v = randn(1, 8, n_q, d, seed=1), randn(1, 2, n_kv, d, seed=2), randn(1, 2, n_kv, d, seed=3)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = ffpa_attn_func(*leaves, is_causal=True, enable_gqa=True)
    wanted = attend(*(x[0] for x in leaves), causal=True)[0][None]
    torch.testing.assert_close(out.double(), wanted, **tolerance(torch.float32))
    weight = randn(*out.shape, seed=4)
    got = torch.autograd.grad((out * weight).sum(), leaves)
    for g, e in zip(got, torch.autograd.grad((wanted * weight).sum(), leaves), strict=True):
        torch.testing.assert_close(g, e, **tolerance(torch.float32))


def test_differs_from_sdpa_exactly_where_it_should() -> None:
    q, k, v = (randn(1, 2, n, 64, seed=n) for n in (3, 5, 6))
    v = v[:, :, :5]
    torch.testing.assert_close(ffpa_attn_func(q, k, v), ffpa.scaled_dot_product_attention(q, k, v))
    square = (k[:, :, :3], v[:, :, :3])
    torch.testing.assert_close(
        ffpa_attn_func(q, *square, is_causal=True), ffpa.scaled_dot_product_attention(q, *square, is_causal=True)
    )
    top_left = ffpa.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert not torch.allclose(ffpa_attn_func(q, k, v, is_causal=True), top_left, atol=1e-2)


@pytest.mark.parametrize("shape", [(5,), (4, 5), (3, 4, 5), (2, 1, 4, 5), (1, 1, 1, 1), (2, 1, 1, 5)])
@pytest.mark.parametrize("causal", [False, True])
def test_masks_and_their_gradients(shape: tuple[int, ...], causal: bool) -> None:
    q, k, v = (randn(2, 3, n, 32, seed=s) for n, s in ((4, 1), (5, 2), (5, 3)))
    visible = randn(*shape, seed=5) > -0.5
    additive = randn(*shape, seed=6).requires_grad_()
    for mask in (visible, additive):
        full = mask.expand(2, 3, 4, 5)
        kind = "mask" if mask is visible else "bias"
        wanted = torch.stack([attend(q[b], k[b], v[b], causal=causal, **{kind: full[b]})[0] for b in range(2)])
        out = ffpa_attn_func(q, k, v, mask, is_causal=causal)
        torch.testing.assert_close(out.double(), wanted, **tolerance(torch.float32))
        if mask is additive:
            (got,) = torch.autograd.grad(out.square().sum(), mask)
            (expected,) = torch.autograd.grad(wanted.square().sum(), mask)
            torch.testing.assert_close(got, expected, **tolerance(torch.float32))


@pytest.mark.parametrize("d", [64, 512])
def test_varlen(d: int) -> None:
    cu_q, cu_k = (torch.tensor(c, dtype=torch.int32) for c in ([0, 3, 3, 20], [0, 7, 9, 19]))
    q, k, v = (randn(n, h, d, seed=n + h).requires_grad_() for n, h in ((20, 4), (19, 2), (19, 2)))
    out, lse = ffpa_attn_varlen_func(q, k, v, cu_q, cu_k, 17, 10, causal=True, enable_gqa=True, return_lse=True)
    assert out.shape == q.shape and lse.shape == (4, 20)
    parts = [
        attend(*(x[c[b] : c[b + 1]].transpose(0, 1) for x, c in ((q, cu_q), (k, cu_k), (v, cu_k))), causal=True)
        for b in range(3)
    ]
    wanted = torch.cat([p[0] for p in parts], 1).transpose(0, 1)
    torch.testing.assert_close(out.double(), wanted, **tolerance(torch.float32))
    torch.testing.assert_close(lse.double(), torch.cat([p[1] for p in parts], 1), rtol=1e-5, atol=1e-5)
    for g, e in zip(
        torch.autograd.grad(out.sum(), (q, k, v)), torch.autograd.grad(wanted.sum(), (q, k, v)), strict=True
    ):
        torch.testing.assert_close(g, e, **tolerance(torch.float32))
    alone = ffpa_attn_varlen_func(q, q, q, cu_q, None, 17, 17)
    assert torch.equal(alone, ffpa_attn_varlen_func(q, q, q, cu_q, cu_q, 17, 17))


X, FEWER, CU = torch.zeros(1, 4, 3, 8), torch.zeros(1, 2, 3, 8), torch.tensor([0, 3], dtype=torch.int32)
PACKED = (*[torch.zeros(3, 3, 8)] * 3, CU, CU, 3, 3)
REFUSED: list[tuple[type[Exception], str, Any]] = [
    (RuntimeError, "key: must have as many heads as query, 4, .*but has 2", lambda: ffpa_attn_func(X, FEWER, FEWER)),
    (RuntimeError, "query: must have 4 dimensions", lambda: ffpa_attn_func(X[0], X, X)),
    (TypeError, "value: must be a tensor", lambda: ffpa_attn_func(X, X, 3)),  # type: ignore[arg-type]
    (TypeError, "backend: must be None, .*but is 'cutedsl'", lambda: ffpa_attn_func(X, X, X, backend="cutedsl")),
    (TypeError, "unexpected keyword argument 'sparse'", lambda: ffpa_attn_func(X, X, X, sparse=True)),
    (RuntimeError, "attn_mask: must have at most 4", lambda: ffpa_attn_func(X, X, X, torch.zeros(1, 1, 1, 1, 1))),
    (TypeError, "attn_mask: must be a tensor", lambda: ffpa_attn_func(X, X, X, 1.0)),  # type: ignore[arg-type]
    (RuntimeError, "mask", lambda: ffpa_attn_func(X, X, X, torch.ones(2, 3, 3, dtype=torch.bool))),
    (NotImplementedError, "softcap: .*flash_attn_varlen_func", lambda: ffpa_attn_varlen_func(*PACKED, softcap=2.0)),
    (RuntimeError, "k: must have as many heads", lambda: ffpa_attn_varlen_func(PACKED[0][:, :2], *PACKED[1:])),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_refusals(number: int) -> None:
    kind, words, call = REFUSED[number]
    with pytest.raises(kind, match=words):
        call()


def test_backend_none_is_fine() -> None:
    assert torch.equal(ffpa_attn_func(X, X, X, backend=None, forward_backend=None), X)
