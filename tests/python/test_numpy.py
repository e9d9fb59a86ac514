"""ffpa.numpy against ffpa.attention of the same bits."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

import ffpa
from ffpa.numpy import Gradients, attention, attention_backward


def normal(*shape: int, dtype: Any = np.float32, seed: int = 0) -> Any:
    return np.random.default_rng(seed + sum(shape)).standard_normal(shape).astype(dtype)


def tensor(x: Any) -> torch.Tensor:
    if x.dtype == np.uint16:
        return torch.from_numpy(x.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(np.array(x))


def as_bits(x: Any) -> Any:
    """float32 to bfloat16, in a uint16."""
    return torch.from_numpy(x).bfloat16().view(torch.int16).numpy().view(np.uint16)


def int32(*values: int) -> Any:
    return np.array(values, np.int32)


Q, K, V = normal(2, 4, 5, 8), normal(2, 2, 7, 8), normal(2, 2, 7, 6)
CASES: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "plain": ((Q, K, V), {}),
    "fp16": (tuple(x.astype(np.float16) for x in (Q, K, V)), {}),
    "fp64": (tuple(x.astype(np.float64) for x in (Q, K, V)), {}),
    "bf16": (tuple(as_bits(x) for x in (Q, K, V)), {"causal": True}),
    "mask": ((Q, K, V), {"mask": normal(5, 7) > 0}),
    "bias, sinks": ((Q, K, V), {"bias": normal(4, 1, 7), "sinks": normal(4)}),
    "alibi, softcap": ((Q, K, V), {"alibi_slopes": np.abs(normal(4)), "softcap": 2.0, "scale": -0.5}),
    "window": ((Q, K, V), {"causal": True, "anchor": "bottom_right", "window": (2, 0)}),
    "lengths": ((Q, K, V), {"seqlens_kv": int32(3, 0), "kv_batch_idx": int32(1, 1)}),
    "splits": ((Q, K, V), {"num_splits": 2, "batch_invariant": True, "deterministic": True}),
    "kernel": ((Q, K, V), {"kernel": "ref_fwd_loops", "engine": None}),
    "engine": ((Q, K, V), {"engine": "ref"}),
    "packed": (
        (normal(1, 4, 6, 8), normal(1, 2, 7, 8), normal(1, 2, 7, 6)),
        {"cu_seqlens_q": int32(0, 2, 6), "cu_seqlens_kv": int32(0, 4, 7), "max_seqlen_q": 4, "max_seqlen_kv": 4},
    ),
    "empty": ((Q, K[:, :, :0], V[:, :, :0]), {}),
}


@pytest.mark.parametrize("name", CASES)
def test_same_bits_as_torchs_side(name: str) -> None:
    arrays, options = CASES[name]
    leaves = [tensor(x).requires_grad_() for x in arrays]
    in_torch = {name: tensor(x) if isinstance(x, np.ndarray) else x for name, x in options.items()}
    for option in ("bias", "sinks"):
        if option in in_torch:
            leaves.append(in_torch[option].requires_grad_())
    options = options | {"num_threads": torch.get_num_threads()}
    expected_o, expected_lse = ffpa.attention(*leaves[:3], **in_torch, return_lse=True)
    o, lse = attention(*arrays, **options, return_lse=True)
    assert o.dtype == arrays[0].dtype and torch.equal(tensor(o), expected_o) and torch.equal(tensor(lse), expected_lse)
    assert np.array_equal(o, attention(*arrays, **options))
    dout, dlse = torch.ones_like(expected_o), torch.ones_like(expected_lse)
    expected = torch.autograd.grad((expected_o, expected_lse), leaves, (dout, dlse))
    ones = as_bits(np.ones(o.shape, np.float32)) if o.dtype == np.uint16 else np.ones_like(o)
    found = attention_backward(ones, *arrays, o, lse, dlse=np.ones_like(lse), **options)
    assert isinstance(found, Gradients)
    given = [g for g in found if g is not None]
    for gradient, leaf, wanted in zip(given, leaves, expected, strict=True):
        assert gradient.shape == tuple(leaf.shape) and torch.equal(tensor(gradient), wanted)


def test_ml_dtypes() -> None:
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    o = attention(*(x.astype(bfloat16) for x in (Q, K, V)))
    assert o.dtype == bfloat16
    assert np.array_equal(o.view(np.uint16), attention(*(as_bits(x) for x in (Q, K, V))))


def test_paged() -> None:
    pages, table = normal(5, 2, 3, 8), np.array([[4, 0, 99], [2, 1, 3]], np.int32)
    lengths = int32(5, 9)
    o = attention(Q, pages, pages, block_table=table, seqlens_kv=lengths)
    for b in range(2):
        rows = [pages[table[b, j // 3], :, j % 3] for j in range(lengths[b])]
        k = np.stack(rows, 1)[None]
        np.testing.assert_allclose(o[b : b + 1], attention(Q[b : b + 1], k, k), rtol=1e-5, atol=1e-6)


def test_only_what_is_needed() -> None:
    o, lse = attention(Q, K, V, return_lse=True)
    every = attention_backward(np.ones_like(o), Q, K, V, o, lse)
    some = attention_backward(np.ones_like(o), Q, K, V, o, lse, needed=["dv"])
    assert some.dq is some.dk is some.dbias is some.dsinks is None and np.array_equal(some.dv, every.dv)


def test_any_strides() -> None:
    expected = attention(Q, K, V)
    turned = np.ascontiguousarray(Q.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3)
    o = attention(turned, K[::-1].copy()[::-1], V[..., ::-1].copy()[..., ::-1])
    np.testing.assert_array_equal(o, expected)
    assert o.transpose(0, 2, 1, 3).flags.c_contiguous
    raw = np.zeros(Q.nbytes + 1, np.uint8)[1:]
    unaligned = raw.view(np.float32).reshape(Q.shape)
    unaligned[...] = Q
    record = np.zeros(Q.shape, [("x", np.float32), ("y", np.int16)])  # strides of no whole element
    record["x"] = Q
    for q in (unaligned, record["x"], np.broadcast_to(Q[:1], Q.shape)):
        np.testing.assert_array_equal(attention(q, K, V), attention(q.copy(), K, V))


def test_dropout_depends_on_seed_and_offset_alone() -> None:
    v = np.broadcast_to(np.eye(64, dtype=np.float32), (1, 1, 64, 64))
    q = normal(1, 1, 64, 8)
    masks = [
        attention(q, q, v, dropout_p=0.5, dropout_seed=s, dropout_offset=o) == 0 for s, o in ((1, 2), (1, 2), (2, 1))
    ]
    assert np.array_equal(masks[0], masks[1]) and not np.array_equal(masks[0], masks[2])
    state = torch.tensor([1, 2])
    in_torch = ffpa.attention(*(tensor(x) for x in (q, q, v)), dropout_p=0.5, dropout_state=state) == 0
    assert np.array_equal(masks[0], in_torch.numpy())


@pytest.mark.parametrize(
    ("kind", "text", "options"),
    [
        (RuntimeError, "k: extent 3", {"k": K[..., :7]}),
        (RuntimeError, "q: rank must be 4", {"q": Q[0]}),
        (RuntimeError, "rank must be from 1 to 4", {"q": Q[None]}),
        (RuntimeError, "q: dtype must be one of", {"q": Q.astype(np.complex64)}),
        (RuntimeError, "q: dtype must be one of", {"q": Q.astype(">f4")}),
        (RuntimeError, "q: dtype must be", {"q": Q.astype(np.int32)}),
        (RuntimeError, "scale: must be finite", {"scale": math.nan}),
        (RuntimeError, "anchor: must be", {"anchor": "middle"}),
        (RuntimeError, "engine: must be", {"engine": "gpu"}),
        (RuntimeError, "kernel", {"kernel": "no_such_kernel"}),
        (RuntimeError, "num_splits", {"num_splits": 2**40}),
        (RuntimeError, "dropout_p", {"dropout_p": 2.0}),
        (NotImplementedError, "reserved", {"k": K.astype(np.int8)}),
        (TypeError, "v: must be a numpy array", {"v": V.tolist()}),
        (TypeError, "mask: must be a numpy array", {"mask": True}),
        (TypeError, "causal: must be a number", {"causal": "yes"}),
        (TypeError, "unexpected keyword", {"is_causal": True}),
    ],
)
def test_errors(kind: type[Exception], text: str, options: dict[str, Any]) -> None:
    with pytest.raises(kind, match=text) as raised:
        attention(**({"q": Q, "k": K, "v": V} | options))
    assert raised.type is kind


def test_errors_of_backward() -> None:
    o, lse = attention(Q, K, V, return_lse=True)
    for kind, text, options in (
        (RuntimeError, "needed: must be among", {"needed": ["q"]}),
        (TypeError, "no option 'is_causal'", {"is_causal": True}),
        (TypeError, "no option 'return_lse'", {"return_lse": True}),
    ):
        with pytest.raises(kind, match=text):
            attention_backward(o, Q, K, V, o, lse, **options)
    with pytest.raises(RuntimeError, match="dout: extent"):
        attention_backward(o[:, :, :3], Q, K, V, o, lse)
