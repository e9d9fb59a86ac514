"""ffpa.attention: every option against the formula in float64, alone and together; accuracy against plain torch math of
the same dtype; types, errors and what it is explained by."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import ffpa
from ffpa import _attention, _math, _ops
from formula import attend

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
RMSE = {torch.float32: 2e-6, torch.bfloat16: 4e-3, torch.float16: 6e-4}  # relative, of the contract


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def int32(*values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def problem(n_q: int, n_kv: int, d: int, dtype: torch.dtype, d_v: int | None = None) -> list[Tensor]:
    return [
        randn(2, 6, n_q, d, dtype=dtype),
        randn(2, 2, n_kv, d, dtype=dtype, seed=1),
        randn(2, 2, n_kv, d_v or d, dtype=dtype, seed=2),
    ]


def expected(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """(o, lse) of the formula, sequence by sequence; mask, bias and slopes have a first axis for these."""
    results = []
    for b in range(q.shape[0]):
        own = {
            name: x[b if x.shape[0] > 1 else 0] if name in ("mask", "bias", "slopes") else x
            for name, x in options.items()
        }
        results.append(attend(q[b], k[b], v[b], **({"bottom_right": False} | own))[:2])
    return torch.stack([o for o, _ in results]), torch.stack([lse for _, lse in results])


OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # of ffpa.attention, of the formula
    "plain": ({}, {}),
    "causal": ({"causal": True}, {"causal": True}),
    "bottom right": ({"causal": True, "anchor": "bottom_right"}, {"causal": True, "bottom_right": True}),
    "window": ({"window": (5, 3)}, {"window": (5, 3)}),
    "window, one side": ({"window": (-1, 0), "anchor": "bottom_right"}, {"window": (-1, 0), "bottom_right": True}),
    "scale": ({"scale": -0.2}, {"scale": -0.2}),
    "scale 0": ({"scale": 0.0, "causal": True}, {"scale": 0.0, "causal": True}),
    "softcap": ({"softcap": 1.5}, {"softcap": 1.5}),
    "sinks": ({"sinks": randn(6)}, {"sinks": randn(6)}),
    "alibi": ({"alibi_slopes": randn(6).abs()}, {"slopes": randn(6).abs()[None]}),
    "alibi per sequence": ({"alibi_slopes": randn(2, 6).abs()}, {"slopes": randn(2, 6).abs()}),
    "mask": ({"mask": randn(2, 1, 23, 41) > 0}, {"mask": randn(2, 1, 23, 41) > 0}),
    "bias": ({"bias": randn(6, 23, 41)}, {"bias": randn(6, 23, 41)[None]}),
    "all": (
        {
            **{"causal": True, "anchor": "bottom_right", "window": (15, 0), "scale": 0.3, "softcap": 4.0},
            **{"sinks": randn(6), "alibi_slopes": randn(6).abs(), "mask": randn(23, 41) > -1, "bias": randn(6, 1, 41)},
        },
        {
            **{"causal": True, "bottom_right": True, "window": (15, 0), "scale": 0.3, "softcap": 4.0},
            **{"sinks": randn(6), "slopes": randn(6).abs()[None], "mask": (randn(23, 41) > -1)[None]},
            **{"bias": randn(6, 1, 41)[None]},
        },
    ),
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("d", [24, 320])
def test_options(name: str, dtype: torch.dtype, d: int) -> None:
    """Output, lse and all gradients: the largest error against the formula in float64 is at most twice that of plain
    torch math in q's dtype, plus 1e-5; and the rmse is in the contract's bounds."""
    options, of_formula = OPTIONS[name]
    tensors = problem(23, 41, d, dtype, d_v=d - 7)
    leaves = [x.requires_grad_() for x in tensors]
    o, lse = ffpa.attention(*leaves, **options, return_lse=True)
    exact = [x.detach().double().requires_grad_() for x in leaves]
    exact_o, exact_lse = expected(*exact, **of_formula)
    weights = randn(*o.shape, dtype=dtype, seed=5)
    found = [o, *torch.autograd.grad(o, leaves, weights)]
    wanted = [exact_o, *torch.autograd.grad(exact_o, exact, weights.double())]
    plain = [x.detach().clone().requires_grad_() for x in leaves]
    plain_o = plain_math(*plain, **options)
    peers = [plain_o, *torch.autograd.grad(plain_o, plain, weights)]
    for a, b, c in zip(found, peers, wanted, strict=True):
        assert a.dtype == dtype
        limit = 2 * (b.double() - c).abs().max().item() + 1e-5 * max(1.0, c.abs().max().item())
        assert (a.double() - c).abs().max().item() <= limit
    assert (o.double() - exact_o).square().mean().sqrt() <= RMSE[dtype] * exact_o.square().mean().sqrt()
    torch.testing.assert_close(lse.double(), exact_lse, rtol=0, atol=1e-3 if dtype != torch.float32 else 1e-5)
    assert lse.dtype == torch.float32 and lse.shape == (2, 6, 23)


def plain_math(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """As a program without a fused kernel computes it: every intermediate in q's dtype."""
    h, n_q, n_kv = q.shape[1], q.shape[2], k.shape[2]
    k, v = (x.repeat_interleave(h // x.shape[1], 1) for x in (k, v))
    scores = (q @ k.mT) * options.get("scale", q.shape[-1] ** -0.5)
    if (cap := options.get("softcap", 0.0)) > 0:
        scores = cap * torch.tanh(scores / cap)
    i, j = torch.arange(n_q)[:, None], torch.arange(n_kv)
    if (slopes := options.get("alibi_slopes")) is not None:
        scores = scores - (slopes.reshape(-1, h, 1, 1) * (i + n_kv - n_q - j).abs()).to(q.dtype)
    if (bias := options.get("bias")) is not None:
        scores = scores + bias.to(q.dtype)
    diagonal = i + n_kv - n_q if options.get("anchor") == "bottom_right" else i
    left, right = options.get("window", (-1, -1))
    visible = options.get("mask", torch.ones((), dtype=torch.bool)) & torch.ones(n_q, n_kv, dtype=torch.bool)
    visible = visible & (j <= diagonal) if options.get("causal") else visible
    visible = visible & (j >= diagonal - left) if left >= 0 else visible
    visible = visible & (j <= diagonal + right) if right >= 0 else visible
    scores = torch.where(visible, scores, torch.finfo(q.dtype).min)
    if (sinks := options.get("sinks")) is not None:
        scores = torch.cat([scores, sinks.to(q.dtype).view(1, h, 1, 1).expand(*scores.shape[:-1], 1)], -1)
    p = torch.softmax(scores, -1)[..., :n_kv]
    return torch.where(visible, p, 0.0) @ v


def test_sinks_and_empty_rows() -> None:
    sinks = torch.tensor([0.5, 100.0, -100.0, -math.inf])
    q, k, v = torch.zeros(1, 4, 2, 8), torch.zeros(1, 4, 3, 8), randn(1, 4, 3, 8)
    mask = torch.tensor([[False] * 3, [True] * 3])
    o, lse = ffpa.attention(q, k, v, mask=mask, sinks=sinks, return_lse=True)
    assert (o[0, :, 0] == 0).all() and torch.equal(lse[0, :, 0], sinks)
    assert o[0, 1].abs().max() < 1e-30 and lse[0, 1, 1] == 100
    plain, plain_lse = ffpa.attention(q, k, v, mask=mask, return_lse=True)
    assert torch.equal(o[0, 3], plain[0, 3]) and torch.equal(lse[0, 3], plain_lse[0, 3])


@pytest.mark.parametrize("cu_kv", [(0, 7, 7, 20, 33), (0, 0, 0, 0, 33)])
@pytest.mark.parametrize("d", [64, 512])
def test_packed_sequences_are_those_sequences(cu_kv: tuple[int, ...], d: int) -> None:
    cu_q = (0, 0, 5, 9, 9)
    q, k, v = (randn(1, h, n, d).requires_grad_() for h, n in ((4, 11), (1, 33), (1, 33)))  # two rows of nobody
    bias = randn(4, 1, 5, 33)
    o, lse = ffpa.attention(
        q, k, v, bias=bias, cu_seqlens_q=int32(*cu_q), cu_seqlens_kv=int32(*cu_kv), causal=True, return_lse=True
    )
    loss = (o * randn(*o.shape, seed=1)).sum()
    gradients = torch.autograd.grad(loss, (q, k, v))
    copies = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    total = torch.zeros(())
    for b in range(4):
        rows, keys = slice(*cu_q[b : b + 2]), slice(*cu_kv[b : b + 2])
        n_q, n_kv = cu_q[b + 1] - cu_q[b], cu_kv[b + 1] - cu_kv[b]
        alone, alone_lse = ffpa.attention(
            copies[0][:, :, rows], copies[1][:, :, keys], copies[2][:, :, keys],
            bias=bias[b : b + 1, :, :n_q, :n_kv], causal=True, return_lse=True,
        )  # fmt: skip
        torch.testing.assert_close(o[:, :, rows], alone)
        torch.testing.assert_close(lse[:, :, rows], alone_lse)
        total = total + (alone * randn(*o.shape, seed=1)[:, :, rows]).sum()
    for found, wanted in zip(gradients, torch.autograd.grad(total, copies), strict=True):
        torch.testing.assert_close(found, wanted)
    assert (o[:, :, 9:] == 0).all() and (lse[:, :, 9:] == -math.inf).all() and (gradients[0][:, :, 9:] == 0).all()


@pytest.mark.parametrize("page_rows", [1, 3, 16, 64])
def test_pages_are_the_cache_gathered(page_rows: int) -> None:
    lengths, capacity = int32(50, 7), -(-50 // page_rows)
    pages = 2 * capacity + 1
    table = torch.randperm(pages, generator=torch.Generator().manual_seed(0))[: 2 * capacity].view(2, capacity).int()
    k, v = randn(pages, 2, page_rows, 64), randn(pages, 2, page_rows, 64, seed=1)
    q = randn(2, 4, 3, 64)
    o = ffpa.attention(q, k, v, block_table=table, seqlens_kv=lengths, causal=True, anchor="bottom_right")
    for b in range(2):
        dense = [x[table[b].long()].transpose(0, 1).flatten(1, 2)[None, :, : lengths[b]] for x in (k, v)]
        alone = ffpa.attention(q[b : b + 1], *dense, causal=True, anchor="bottom_right")
        torch.testing.assert_close(o[b : b + 1], alone)


def test_rows_of_the_cache() -> None:
    q, k, v = randn(3, 4, 2, 16), randn(5, 2, 9, 16), randn(5, 2, 9, 16)
    rows, lengths = int32(4, 0, 4), int32(9, 3, 0)
    o, lse = ffpa.attention(q, k, v, kv_batch_idx=rows, seqlens_kv=lengths, return_lse=True)
    for b, (row, n) in enumerate(zip(rows.tolist(), lengths.tolist(), strict=True)):
        alone = ffpa.attention(q[b : b + 1], k[row : row + 1, :, :n], v[row : row + 1, :, :n])
        torch.testing.assert_close(o[b : b + 1], alone)
    assert (o[2] == 0).all() and (lse[2] == -math.inf).all()


@pytest.mark.parametrize("num_splits", [1, 2, 8, 100])
def test_splits_change_rounding_only(num_splits: int) -> None:
    q, k, v = problem(1, 100, 64, torch.float32)
    lengths = int32(100, 5)
    o, lse = ffpa.attention(q, k, v, num_splits=num_splits, seqlens_kv=lengths, return_lse=True)
    expected_o, expected_lse = _math.forward(_ops.Call(q, k, v, seqlens_kv=lengths))
    torch.testing.assert_close(o, expected_o)
    torch.testing.assert_close(lse, expected_lse)


def test_batch_invariant() -> None:
    q, k, v = problem(3, 200, 64, torch.bfloat16)
    both = ffpa.attention(q, k, v, batch_invariant=True)
    assert torch.equal(both[1:], ffpa.attention(q[1:], k[1:], v[1:], batch_invariant=True))


# --------------------------------------------------------------------------------------------- dropout, autocast, types


def test_dropout_state() -> None:
    q, v = randn(1, 2, 64, 16), torch.eye(64).expand(1, 2, 64, 64)
    state = torch.tensor([7, 9])
    o = ffpa.attention(q, q, v, dropout_p=0.3, dropout_state=state)
    keep = _math.dropout_keep(state, 0.3, (1, 2, 64, 64))
    torch.testing.assert_close(o, torch.where(keep, ffpa.attention(q, q, v) / 0.7, 0.0))
    torch.manual_seed(1)
    drawn = ffpa.attention(q, q, v, dropout_p=0.3)
    assert not torch.equal(drawn, ffpa.attention(q, q, v, dropout_p=0.3))
    torch.manual_seed(1)
    assert torch.equal(drawn, ffpa.attention(q, q, v, dropout_p=0.3))


def test_autocast() -> None:
    q, k, v = problem(3, 5, 16, torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        o = ffpa.attention(q, k, v, bias=randn(3, 5), sinks=randn(6))
    assert o.dtype == torch.bfloat16
    low = [x.bfloat16() for x in (q, k, v)]
    assert torch.equal(o, ffpa.attention(*low, bias=randn(3, 5), sinks=randn(6)))


def test_deterministic_follows_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    monkeypatch.setattr(_attention, "attend", lambda *call: seen.append(_ops.Call(*call).deterministic) or call[:2])
    q = randn(1, 1, 2, 4)
    for mode in (False, True):
        torch.use_deterministic_algorithms(mode)
        try:
            ffpa.attention(q, q, q)
            ffpa.attention(q, q, q, deterministic=not mode)
        finally:
            torch.use_deterministic_algorithms(False)
    assert seen == [False, True, True, False]


class Loud(Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is ffpa.attention:
            return "intercepted", kwargs["softcap"]
        return super().__torch_function__(func, types, args, kwargs or {})


def test_subclasses_intercept() -> None:
    q = randn(1, 1, 2, 4)
    assert ffpa.attention(q, q.as_subclass(Loud), q, softcap=2.0) == ("intercepted", 2.0)
    with torch.device("cpu"):  # a function mode that does not mind
        assert torch.equal(ffpa.attention(q, q, q), ffpa.attention(q, q, q))


def test_fp64_is_the_reference_engine() -> None:
    q, k, v = (x.double() for x in problem(3, 5, 16, torch.float32))
    o, lse = ffpa.attention(q, k, v, return_lse=True)
    assert o.dtype == lse.dtype == torch.float64
    torch.testing.assert_close(o, expected(q, k, v)[0], rtol=1e-12, atol=1e-12)


Q, K, V = problem(3, 5, 16, torch.float32)
ERRORS: dict[str, tuple[type[Exception], str, dict[str, Any]]] = {
    "no tensor": (TypeError, "k: must be a Tensor", {"k": [1.0]}),
    "mask no tensor": (TypeError, "mask", {"mask": True}),
    "causal": (TypeError, "causal", {"causal": "yes"}),
    "scale": (TypeError, "scale", {"scale": "1"}),
    "engine": (TypeError, "engine", {"engine": 1}),
    "anchor": (TypeError, "anchor", {"anchor": 0}),
    "kernel": (TypeError, "kernel", {"kernel": 3}),
    "window of one": (RuntimeError, "window: must be a pair", {"window": (1,)}),
    "window no pair": (TypeError, "window: must be a pair", {"window": 3}),
    "window of text": (TypeError, "window", {"window": ("a", "b")}),
    "unknown option": (TypeError, "is_causal", {"is_causal": True}),
    "rank": (RuntimeError, "q: rank must be 4, but is 3", {"q": Q[0]}),
    "rank 5": (RuntimeError, "q: must have from 1 to 4 dimensions, but has 5", {"q": Q[None]}),
    "D_qk": (RuntimeError, "k: extent 3", {"k": K[..., :7]}),
    "N_kv": (RuntimeError, "v: extent 2", {"v": V[:, :, :4]}),
    "H_q": (RuntimeError, "q: extent 1", {"q": Q[:, :5]}),
    "dtypes": (RuntimeError, "k: dtype", {"k": K.bfloat16()}),
    "scale NaN": (RuntimeError, "scale: must be finite", {"scale": math.nan}),
    "softcap": (RuntimeError, "softcap", {"softcap": -1.0}),
    "dropout": (RuntimeError, "dropout_p", {"dropout_p": 1.1}),
    "dropout state": (RuntimeError, "dropout_state", {"dropout_p": 0.1, "dropout_state": torch.zeros(3).long()}),
    "anchor's name": (RuntimeError, "anchor", {"anchor": "middle"}),
    "engine's name": (RuntimeError, "engine", {"engine": "gpu"}),
    "kernel's name": (RuntimeError, "kernel", {"kernel": "no_such_kernel"}),
    "window": (RuntimeError, "window_left", {"window": (-2, 0)}),
    "mask shape": (RuntimeError, "mask: extent 3", {"mask": torch.ones(3, 4, dtype=torch.bool)}),
    "mask dtype": (RuntimeError, "mask: dtype", {"mask": torch.ones(3, 5)}),
    "bias dtype": (RuntimeError, "bias: dtype", {"bias": torch.ones(3, 5).half()}),
    "sinks shape": (RuntimeError, "sinks: extent 0", {"sinks": torch.ones(5)}),
    "slopes dtype": (RuntimeError, "alibi_slopes: dtype", {"alibi_slopes": torch.ones(6).double()}),
    "lengths": (RuntimeError, "seqlens_kv: entry 1", {"seqlens_kv": int32(5, 6)}),
    "lengths dtype": (RuntimeError, "seqlens_kv: dtype", {"seqlens_kv": torch.tensor([1, 2])}),
    "cu_seqlens": (RuntimeError, "cu_seqlens_kv", {"cu_seqlens_kv": int32(0, 5)}),
    "splits": (RuntimeError, "num_splits", {"num_splits": -1}),
    "engine without GPU": (NotImplementedError, "cuda", {"engine": "cuda"}),
    "float8": (NotImplementedError, "fp8", {name: Q.to(torch.float8_e4m3fn) for name in "qkv"}),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name: str) -> None:
    kind, text, options = ERRORS[name]
    for wants_gradient in (False, True):
        arguments = {"q": Q, "k": K, "v": V} | options
        if wants_gradient and isinstance(arguments["v"], Tensor) and arguments["v"].dtype == torch.float32:
            arguments["v"] = arguments["v"].detach().requires_grad_()
        with pytest.raises(kind, match=text) as raised:
            ffpa.attention(**arguments)
        assert raised.type is kind


# -------------------------------------------------------------------------------------------------------------- explain


def test_explain_text() -> None:
    text = _attention.explain_text(Q, K, V, backward=False, causal=True, bias=randn(3, 5))
    assert text.startswith("kernel: ") and "\nengine: " in text and "\nworkspace: " in text
    assert "_bwd_" in _attention.explain_text(Q, K, V, backward=True, kernel="ref_fwd_loops")
    assert _attention.explain_text(Q, K[..., :7], V, backward=False).startswith("error: k: extent 3")
    with pytest.raises(TypeError, match="no option 'is_causal'"):
        _attention.explain_text(Q, K, V, backward=False, is_causal=True)
