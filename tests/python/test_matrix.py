"""Every kernel and every option of the contract, alone and in pairs: the result follows the oracle, or the call is
refused by name. No option may be ignored: alone, it must change the result."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import ffpa
from ffpa import _math, _native
from oracle import check, int32, judge, qkv, randn

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
B, H_Q, H_KV, N_Q, N_KV = 2, 4, 2, 37, 70

# Options that the oracle computes on the same dense tensors.
OPTIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "causal": lambda: {"causal": True},
    "bottom right": lambda: {"causal": True, "anchor": "bottom_right"},
    "window": lambda: {"window": (9, 3)},
    "scale": lambda: {"scale": -0.3},
    "softcap": lambda: {"softcap": 0.7},
    "mask": lambda: {"mask": randn(B, 1, N_Q, N_KV, seed=21) > 0},
    "bias": lambda: {"bias": randn(1, H_Q, N_Q, N_KV, seed=22)},
    "alibi": lambda: {"alibi_slopes": randn(B, H_Q, seed=23).abs() / 8},
    "sinks": lambda: {"sinks": randn(H_Q, seed=24)},
    "lengths": lambda: {"seqlens_kv": int32([N_KV - 1, 13])},
}
# Options that change how, not what: the oracle is the call without them.
PLANS: dict[str, dict[str, Any]] = {
    "splits": {"num_splits": 3},
    "batch invariant": {"batch_invariant": True},
    "deterministic": {"deterministic": True},
}
KERNELS = [k for k in _native.kernels() if k.usable and k.pass_ == "forward" and k.engine in ("ref", "cpu")]
PAIRS = [pair for size in (1, 2) for pair in itertools.combinations(OPTIONS, size)]
REF_PAIRS = [(name,) for name in OPTIONS]  # plain loops: each option once here, all combinations in test_reference.py


def tensors(dtype: torch.dtype, d: int = 40) -> tuple[Tensor, Tensor, Tensor]:
    return qkv(B, H_Q, H_KV, N_Q, N_KV, d, dtype, d_v=24)


@pytest.mark.parametrize(
    "kernel,dtype,names",
    [
        (kernel.name, dtype, names)
        for kernel in KERNELS
        for dtype in kernel.dtypes
        if dtype in DTYPES
        for names in (REF_PAIRS if kernel.engine == "ref" else PAIRS)
    ],
)
def test_result_follows_the_oracle(kernel: str, dtype: str, names: tuple[str, ...]) -> None:
    options: dict[str, Any] = {}
    for name in names:
        options |= OPTIONS[name]()
    check(*tensors(DTYPES[dtype]), forced={"kernel": kernel}, **options)


@pytest.mark.parametrize("kernel", [k.name for k in KERNELS])
@pytest.mark.parametrize("name", OPTIONS)
def test_no_option_is_ignored(kernel: str, name: str) -> None:
    q, k, v = tensors(torch.bfloat16)
    without = ffpa.attention(q, k, v, kernel=kernel, return_lse=True)
    given = ffpa.attention(q, k, v, kernel=kernel, return_lse=True, **OPTIONS[name]())
    assert not torch.equal(without[0], given[0]) and not torch.equal(without[1], given[1])


@pytest.mark.parametrize("kernel", [k.name for k in KERNELS])
@pytest.mark.parametrize("plan", PLANS)
def test_plans_do_not_change_the_result(kernel: str, plan: str) -> None:
    check(*tensors(torch.bfloat16), causal=True, forced={"kernel": kernel, **PLANS[plan]})


@pytest.mark.parametrize("kernel", [k.name for k in KERNELS])
@pytest.mark.parametrize("others", [(), ("causal",), ("bias",), ("sinks",)])
def test_dropout(kernel: str, others: tuple[str, ...]) -> None:
    options: dict[str, Any] = {}
    for name in others:
        options |= OPTIONS[name]()
    state, p = torch.tensor([2**40 + 5, 2**35 + 7]), 0.3
    keep = _math.dropout_keep(state, p, (B, H_Q, N_Q, N_KV))

    def call(q: Tensor, k: Tensor, v: Tensor, *, factors: Tensor, **rest: Any) -> Any:
        return ffpa.attention(q, k, v, dropout_p=p, dropout_state=state, **rest)

    check(*tensors(torch.bfloat16), factors=keep / (1 - p), call=call, forced={"kernel": kernel}, **options)


def packed(dtype: torch.dtype) -> tuple[list[Tensor], list[int], list[int]]:
    rows, keys = [5, 0, 31, 1], [9, 4, 40, 0]
    return (
        [
            torch.cat([randn(1, heads, n, 40, dtype=dtype, seed=seed + i) for i, n in enumerate(lengths)], 2)
            for heads, lengths, seed in ((H_Q, rows, 1), (H_KV, keys, 11), (H_KV, keys, 21))
        ],
        rows,
        keys,
    )


@pytest.mark.parametrize("kernel", [k.name for k in KERNELS])
@pytest.mark.parametrize(
    "options", [{}, {"causal": True, "anchor": "bottom_right"}, {"window": (3, 2)}, {"softcap": 0.7}]
)
def test_packed_equals_each_sequence_alone(kernel: str, options: dict[str, Any]) -> None:
    (q, k, v), rows, keys = packed(torch.bfloat16)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    cu_q, cu_kv = (int32([0, *itertools.accumulate(n)]) for n in (rows, keys))
    dout = randn(*q.shape, dtype=q.dtype, seed=31)
    o, lse = ffpa.attention(*leaves, cu_seqlens_q=cu_q, cu_seqlens_kv=cu_kv, kernel=kernel, return_lse=True, **options)
    whole = torch.autograd.grad(o, leaves, dout)
    for b in range(4):
        at_q, at_kv = slice(int(cu_q[b]), int(cu_q[b + 1])), slice(int(cu_kv[b]), int(cu_kv[b + 1]))
        alone = [x[:, :, at].detach().requires_grad_() for x, at in zip(leaves, (at_q, at_kv, at_kv), strict=True)]
        one, one_lse = ffpa.attention(*alone, kernel=kernel, return_lse=True, **options)
        torch.testing.assert_close(o[:, :, at_q], one, atol=1e-2, rtol=1e-2)
        torch.testing.assert_close(lse[:, :, at_q], one_lse, atol=1e-4, rtol=1e-4)
        gradients = torch.autograd.grad(one, alone, dout[:, :, at_q])
        for found, expected, at in zip(whole, gradients, (at_q, at_kv, at_kv), strict=True):
            torch.testing.assert_close(found[:, :, at], expected, atol=4e-2, rtol=4e-2)


@pytest.mark.parametrize("kernel", [k.name for k in KERNELS])
def test_batch_rows_by_index(kernel: str) -> None:
    q, k, v = tensors(torch.bfloat16)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    index = int32([1, 1])
    o = ffpa.attention(*leaves, kv_batch_idx=index, kernel=kernel)
    assert isinstance(o, Tensor)
    dq, dk, dv = torch.autograd.grad(o, leaves, torch.ones_like(o))
    chosen = [q.detach().requires_grad_(), *(x.detach()[index.long()].requires_grad_() for x in (k, v))]
    expected = ffpa.attention(*chosen, kernel=kernel)
    assert isinstance(expected, Tensor) and torch.equal(o, expected)
    eq, ek, ev = torch.autograd.grad(expected, chosen, torch.ones_like(o))
    assert torch.equal(dq, eq) and (dk[0] == 0).all() and (dv[0] == 0).all()
    for found, both in ((dk, ek), (dv, ev)):
        judge("summed", found[1], both.double().sum(0), both.sum(0), torch.bfloat16)


REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "kernel": (lambda: ffpa.attention(*tensors(torch.float32), kernel="none"), RuntimeError, "kernel: "),
    "engine": (lambda: ffpa.attention(*tensors(torch.float32), engine="gpu"), RuntimeError, "engine: "),
    "cuda engine": (lambda: ffpa.attention(*tensors(torch.float32), engine="cuda"), NotImplementedError, "cuda"),
    "fp64 on a fast kernel": (
        lambda: ffpa.attention(*tensors(torch.float64), kernel="portable_fwd_tiled"), NotImplementedError, "fp64"),
    "fp32 on a bf16 kernel": (
        lambda: ffpa.attention(*tensors(torch.float32), engine="cpu", kernel="avx512bf16_fwd_tiled"),
        NotImplementedError, "avx512bf16_fwd_tiled|fp32"),
    "splits": (lambda: ffpa.attention(*tensors(torch.float32), num_splits=-1), RuntimeError, "num_splits: "),
    "window": (lambda: ffpa.attention(*tensors(torch.float32), window=(-2, 0)), RuntimeError, "window_left: "),
    "softcap": (lambda: ffpa.attention(*tensors(torch.float32), softcap=-1.0), RuntimeError, "softcap: "),
    "dropout": (lambda: ffpa.attention(*tensors(torch.float32), dropout_p=1.5), RuntimeError, "dropout_p: "),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_are_worded(name: str) -> None:
    call, kind, words = REFUSED[name]
    if "avx512bf16" in words and not any(k.name.startswith("avx512bf16") for k in _native.kernels()):
        pytest.skip("this build has no AVX-512 kernels")
    with pytest.raises(kind, match=words):
        call()


@pytest.mark.parametrize("kernel", [k.name for k in KERNELS if k.engine == "cpu"])
@pytest.mark.parametrize("layout", ["dense", "packed", "paged"])
def test_batch_invariant_bits_depend_on_the_sequence_alone(kernel: str, layout: str) -> None:
    keys = [600, 5000] if layout != "dense" else [600, 600]

    def first(count: int) -> list[Tensor]:
        q, dtype = randn(count, H_Q, 1, 64, dtype=torch.bfloat16, seed=1), torch.bfloat16
        kv = [[randn(1, H_KV, n, 64, dtype=dtype, seed=s + b) for b, n in enumerate(keys[:count])] for s in (2, 12)]
        options: dict[str, Any] = {"batch_invariant": True, "kernel": kernel, "return_lse": True}
        if layout == "packed":
            k, v = (torch.cat(x, 2) for x in kv)
            q = q.transpose(0, 2)
            options |= {
                "cu_seqlens_q": torch.arange(count + 1, dtype=torch.int32),
                "cu_seqlens_kv": int32([0, *itertools.accumulate(keys[:count])]),
            }
        elif layout == "paged":
            rows, longest = 8, max(keys[:count])
            k, v = (
                torch.cat([torch.nn.functional.pad(x, (0, 0, 0, longest - x.shape[2])) for x in part])
                .unflatten(2, (-1, rows))
                .transpose(1, 2)
                .flatten(0, 1)
                for part in kv
            )
            table = torch.arange(count * longest // rows, dtype=torch.int32).view(count, -1)
            options |= {"block_table": table, "seqlens_kv": int32(keys[:count])}
        else:
            k, v = (torch.cat(x) for x in kv)
        q, k, v = (x.detach().requires_grad_(layout == "packed") for x in (q, k, v))
        o, lse = ffpa.attention(q, k, v, **options)
        found = [o, lse]
        if layout == "packed":
            dq, dk, _ = torch.autograd.grad(o, (q, k, v), torch.ones_like(o))
            found += [dq, dk[:, :, :600]]
        return [x[:, :, :1] if layout == "packed" and x.shape[2] == count else x[:1] for x in found]

    for alone, joined in zip(first(1), first(2), strict=True):
        assert torch.equal(alone, joined)
