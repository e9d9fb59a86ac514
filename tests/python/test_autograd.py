"""Derivatives of every kind: first and second order, forward mode, torch.func's transforms, checkpoints; and for
options that SDPA does not have."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import ffpa
from ffpa import _math, _native, _ops

sdpa = ffpa.scaled_dot_product_attention


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=dtype)


def torch_math(*args: Any, **options: Any) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(*args, **options)


def doubles(**shapes: tuple[int, ...]) -> list[Tensor]:
    return [randn(*shape, dtype=torch.float64, seed=i).requires_grad_() for i, shape in enumerate(shapes.values())]


STATE = torch.tensor([123456789012345678, 987654321098765432])
SLOPES = torch.tensor([[0.1, 0.2, 0.3, 0.4], [1.0, 2.0, 3.0, 4.0]])
ROWS = torch.tensor([1, 1], dtype=torch.int32)
CU_Q = torch.tensor([0, 2, 2, 5], dtype=torch.int32)  # rows 5 and 6 belong to nobody
CU_KV = torch.tensor([0, 3, 5, 6], dtype=torch.int32)
DENSE = dict(q=(2, 4, 3, 5), k=(2, 2, 4, 5), v=(2, 2, 4, 3))
PACKED = dict(q=(1, 4, 7, 5), k=(1, 2, 6, 5), v=(1, 2, 6, 3))

OPTIONS: dict[str, tuple[dict[str, tuple[int, ...]], Callable[..., Any]]] = {
    "plain": (DENSE, lambda q, k, v: ffpa.attention(q, k, v)),
    "lse": (DENSE, lambda q, k, v: ffpa.attention(q, k, v, return_lse=True)),
    "lse alone": (DENSE, lambda q, k, v: ffpa.attention(q, k, v, return_lse=True)[1]),
    "causal": (DENSE, lambda q, k, v: ffpa.attention(q, k, v, causal=True, return_lse=True)),
    "bottom right, window": (
        DENSE,
        lambda q, k, v: ffpa.attention(q, k, v, causal=True, anchor="bottom_right", window=(1, 0)),
    ),
    "softcap, scale": (DENSE, lambda q, k, v: ffpa.attention(q, k, v, softcap=1.5, scale=-0.7, return_lse=True)),
    "bias": (DENSE | dict(bias=(1, 4, 1, 4)), lambda q, k, v, b: ffpa.attention(q, k, v, bias=b)),
    "bias, rank 2": (DENSE | dict(bias=(3, 4)), lambda q, k, v, b: ffpa.attention(q, k, v, bias=b, causal=True)),
    "sinks": (DENSE | dict(sinks=(4,)), lambda q, k, v, s: ffpa.attention(q, k, v, sinks=s, return_lse=True)),
    "alibi": (
        DENSE,
        lambda q, k, v: ffpa.attention(q, k, v, alibi_slopes=SLOPES),
    ),
    "mask": (DENSE, lambda q, k, v: ffpa.attention(q, k, v, mask=randn(2, 1, 3, 4) > 0, return_lse=False)),
    "dropout": (
        DENSE | dict(bias=(3, 4), sinks=(4,)),
        lambda q, k, v, b, s: ffpa.attention(
            q, k, v, bias=b, sinks=s, dropout_p=0.4, dropout_state=STATE, return_lse=True
        ),
    ),
    "lengths": (
        DENSE,
        lambda q, k, v: ffpa.attention(
            q, k, v, seqlens_kv=torch.tensor([2, 4], dtype=torch.int32), causal=True, anchor="bottom_right"
        ),
    ),
    "batch rows": (
        DENSE,
        lambda q, k, v: ffpa.attention(q, k, v, kv_batch_idx=torch.tensor([1, 1], dtype=torch.int32)),
    ),
    "packed": (
        PACKED | dict(sinks=(4,)),
        lambda q, k, v, s: ffpa.attention(
            q, k, v, sinks=s, cu_seqlens_q=CU_Q, cu_seqlens_kv=CU_KV, causal=True, anchor="bottom_right"
        ),
    ),
    "packed, dropout, bias": (
        PACKED | dict(bias=(3, 1, 3, 3)),
        lambda q, k, v, b: ffpa.attention(
            q, k, v, bias=b, cu_seqlens_q=CU_Q, cu_seqlens_kv=CU_KV, dropout_p=0.3, dropout_state=STATE
        ),
    ),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_first_and_second_derivatives(name: str) -> None:
    """Against finite differences, in float64."""
    shapes, call = OPTIONS[name]
    inputs = doubles(**shapes)
    assert torch.autograd.gradcheck(call, inputs)
    assert torch.autograd.gradgradcheck(call, inputs)


@pytest.mark.parametrize("name", OPTIONS)
def test_forward_mode(name: str) -> None:
    """torch.func.jvp and dual numbers agree with each other and with reverse mode."""
    shapes, call = OPTIONS[name]
    inputs = tuple(x.detach() for x in doubles(**shapes))
    tangents = tuple(randn(*x.shape, dtype=torch.float64, seed=9) for x in inputs)
    first = lambda *x: r[0] if isinstance(r := call(*x), tuple) else r  # noqa: E731
    value, tangent = torch.func.jvp(first, inputs, tangents)
    torch.testing.assert_close(value, first(*inputs))
    with torch.autograd.forward_ad.dual_level():
        duals = [torch.autograd.forward_ad.make_dual(x, t) for x, t in zip(inputs, tangents, strict=True)]
        dual = torch.autograd.forward_ad.unpack_dual(first(*duals)).tangent
    assert dual is not None
    torch.testing.assert_close(dual, tangent)
    _, pull_back = torch.func.vjp(first, *inputs)
    weights = randn(*value.shape, dtype=torch.float64)
    reverse = sum((g * t).sum() for g, t in zip(pull_back(weights), tangents, strict=True))
    forward = (tangent * weights)[torch.isfinite(value)].sum()
    torch.testing.assert_close(forward, reverse)


def test_dual_level_without_tangents_uses_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_math, "forward", None)
    with torch.autograd.forward_ad.dual_level():
        ffpa.attention(*(randn(1, 1, 3, 4) for _ in range(3)))


def test_first_derivatives_never_make_the_square(monkeypatch: pytest.MonkeyPatch) -> None:
    """create_graph=True and torch.func.grad run the backward kernel; the formula is for second derivatives alone."""
    monkeypatch.setattr(_math, "forward", None)
    q, k, v = (randn(1, 2, n, 4).requires_grad_() for n in (3, 5, 5))
    torch.autograd.grad(sdpa(q, k, v).sum(), (q, k, v), create_graph=True)
    torch.func.grad(lambda x: sdpa(x, k.detach(), v.detach()).sum())(q.detach())
    with pytest.raises(TypeError):  # it is there for these
        (g,) = torch.autograd.grad(sdpa(q, k, v).square().sum(), q, create_graph=True)
        torch.autograd.grad(g.sum(), q)


@pytest.mark.parametrize("causal", [False, True])
def test_gradient_penalty(causal: bool) -> None:
    results = []
    for function in (sdpa, torch_math):
        q, k, v = (randn(2, 3, n, 8).requires_grad_() for n in (4, 6, 6))
        (g,) = torch.autograd.grad(function(q, k, v, is_causal=causal).square().sum(), q, create_graph=True)
        results.append(torch.autograd.grad(g.norm(), (q, k, v)))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_second_derivatives_of_a_row_without_keys_are_finite() -> None:
    mask = torch.tensor([[True, False], [False, False]])
    q, k, v = (randn(1, 1, 2, 4).requires_grad_() for _ in range(3))
    (g,) = torch.autograd.grad(sdpa(q, k, v, mask).square().sum(), q, create_graph=True)
    assert all(x.isfinite().all() for x in torch.autograd.grad(g.square().sum(), (q, k, v)))


# ----------------------------------------------------------------------------------------------------------- torch.func


MASK = randn(4, 5)


def loss(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
    return sdpa(q, k, v, bias, is_causal=True).square().sum()


def expected_gradients(*inputs: Tensor) -> tuple[Tensor, ...]:
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    bias = leaves[3] if len(leaves) > 3 else None
    n_q, n_kv = leaves[0].shape[-2], leaves[1].shape[-2]
    causal = torch.ones(n_q, n_kv, dtype=torch.bool).tril()
    mask = causal if bias is None else torch.where(causal, bias, -math.inf)
    out = torch_math(*leaves[:3], mask)
    return torch.autograd.grad(out.square().sum(), leaves)


def close(a: Any, b: Any) -> None:
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y, rtol=2e-5, atol=2e-5)


def test_func_grad() -> None:
    inputs = [randn(2, 3, n, 8, seed=i) for i, n in enumerate((4, 5, 5))] + [randn(3, 4, 5)]
    close(torch.func.grad(loss, argnums=(0, 1, 2, 3))(*inputs), expected_gradients(*inputs))


@pytest.mark.parametrize("in_dims", [(0, 0, 0), (0, None, None), (1, 0, 2), (None, 3, 0)])
def test_vmap(in_dims: tuple[int | None, ...]) -> None:
    shapes = ((2, 3, 4, 8), (2, 3, 5, 8), (2, 3, 5, 6))
    inputs, samples = [], []
    for i, (shape, dim) in enumerate(zip(shapes, in_dims, strict=True)):
        x = randn(6, *shape, seed=i)
        inputs.append(x[0] if dim is None else x.movedim(0, dim))
        samples.append(x[:1].expand_as(x) if dim is None else x)
    for call in (sdpa, lambda q, k, v: sdpa(q, k, v, is_causal=True), lambda q, k, v: sdpa(q, k, v, MASK)):
        expected = torch.stack([call(*sample) for sample in zip(*samples, strict=True)])
        torch.testing.assert_close(torch.vmap(call, in_dims)(*inputs), expected)


def test_vmap_does_not_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    from ffpa import _vmap

    monkeypatch.setattr(_vmap, "_one_by_one", None)
    q = randn(6, 2, 3, 4, 8)
    torch.vmap(torch.func.grad(lambda x: loss(x, x, x)))(q)


@pytest.mark.parametrize("bias", [None, (5, 4, 5), (5, 3, 1, 5), (5, 2, 3, 4, 5), (5, 2, 1, 1, 5)])
def test_vmap_of_grad(bias: tuple[int, ...] | None) -> None:
    inputs = [randn(5, 2, 3, n, 8, seed=i) for i, n in enumerate((4, 5, 5))]
    if bias is not None:
        inputs.append(randn(*bias))
    gradients = torch.vmap(torch.func.grad(loss, argnums=tuple(range(len(inputs)))))(*inputs)
    for i in range(5):
        close([g[i] for g in gradients], expected_gradients(*(x[i] for x in inputs)))


def test_vmap_of_grad_with_shared_inputs() -> None:
    """Per-sample gradients of what all samples share: a bias, K and V."""
    q, k, v, bias = randn(5, 2, 3, 4, 8), randn(2, 3, 5, 8), randn(2, 3, 5, 6), randn(3, 4, 5)
    per_sample = torch.func.grad(loss, argnums=(0, 1, 2, 3))
    gradients = torch.vmap(per_sample, in_dims=(0, None, None, None))(q, k, v, bias)
    for i in range(5):
        close([g[i] for g in gradients], expected_gradients(q[i], k, v, bias))


def test_vmap_of_options_that_count_sequences() -> None:
    q, k, v, sinks = randn(3, 2, 4, 5, 8), randn(3, 2, 2, 6, 8), randn(3, 2, 2, 6, 8), randn(3, 4)
    lengths = torch.tensor([[2, 6], [6, 1], [3, 3]], dtype=torch.int32)

    def call(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, lengths: Tensor) -> Tensor:
        out = ffpa.attention(q, k, v, sinks=sinks, seqlens_kv=lengths)
        assert isinstance(out, Tensor)
        return out

    expected = torch.stack([call(*sample) for sample in zip(q, k, v, sinks, lengths, strict=True)])
    torch.testing.assert_close(torch.vmap(call)(q, k, v, sinks, lengths), expected)
    gradients = torch.vmap(torch.func.grad(lambda *x: call(*x).square().sum(), argnums=3))(q, k, v, sinks, lengths)
    leaf = sinks.clone().requires_grad_()
    looped = torch.stack([call(*sample) for sample in zip(q, k, v, leaf, lengths, strict=True)]).square().sum()
    torch.testing.assert_close(gradients, torch.autograd.grad(looped, leaf)[0])


def test_vmap_and_dropout() -> None:
    q, v = randn(3, 1, 2, 16, 8), torch.eye(16).expand(3, 1, 2, 16, 16)
    call = lambda q, v: sdpa(q, q, v, dropout_p=0.5)  # noqa: E731
    same = torch.vmap(call, randomness="same")(q, v) == 0
    different = torch.vmap(call, randomness="different")(q, v) == 0
    assert torch.equal(same[0], same[1]) and torch.equal(same[1], same[2])
    assert not torch.equal(different[0], different[1])
    with pytest.raises(RuntimeError, match="randomness"):
        torch.vmap(call)(q, v)


def test_jacobians_and_hessian() -> None:
    q, k, v = (randn(1, 1, 3, 4, dtype=torch.float64, seed=i) for i in range(3))
    ours = lambda x: ffpa.attention(x, k, v, causal=True).square().sum()  # noqa: E731
    exact = lambda x: torch_math(x, k, v, is_causal=True).square().sum()  # noqa: E731
    out = lambda x: ffpa.attention(x, k, v, causal=True)  # noqa: E731
    torch.testing.assert_close(torch.func.jacrev(out)(q), torch.func.jacfwd(out)(q))
    torch.testing.assert_close(torch.func.hessian(ours)(q), torch.func.hessian(exact)(q))
    torch.testing.assert_close(torch.func.jacrev(torch.func.grad(ours))(q), torch.func.hessian(exact)(q))


# --------------------------------------------------------------------------------------------------------- and the rest


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
def test_checkpoint(reentrant: bool, dropout_p: float) -> None:
    q = randn(1, 2, 16, 8).requires_grad_()
    run = lambda x: sdpa(x, x, x, dropout_p=dropout_p)  # noqa: E731
    results = []
    for call in (run, lambda x: checkpoint(run, x, use_reentrant=reentrant)):
        torch.manual_seed(3)
        o = call(q)
        results.append((o, *torch.autograd.grad(o.square().sum(), q)) if not reentrant else backward(o, q))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def backward(o: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    q.grad = None
    o.square().sum().backward()
    assert q.grad is not None
    return o, q.grad


def test_gradients_are_laid_out_as_their_inputs() -> None:
    q, k = (randn(2, n, 3, 8).transpose(1, 2).requires_grad_() for n in (4, 5))
    v = randn(3, 5, 2, 6).movedim(2, 0).requires_grad_()
    gradients = torch.autograd.grad(ffpa.attention(q, k, v).sum(), (q, k, v))
    assert [g.stride() for g in gradients] == [x.stride() for x in (q, k, v)]


def test_deterministic_repeats_bits() -> None:
    q, k, v = (randn(2, 8 if n < 100 else 2, n, 64).requires_grad_() for n in (97, 131, 131))
    bias = randn(1, 8, 97, 131).requires_grad_()
    runs = []
    for _ in range(5):
        o = ffpa.attention(q, k, v, bias=bias, deterministic=True)
        runs.append([o, *torch.autograd.grad(o.square().sum(), (q, k, v, bias))])
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(run, runs[0], strict=True))


@pytest.mark.parametrize("kernel", [k for k in _native.kernels() if k.pass_ == "forward"])
def test_a_forced_forward_kernel_brings_its_backward_or_is_refused_at_once(kernel: _native.KernelInfo) -> None:
    """Never a forward whose backward then fails."""
    q = randn(1, 1, 3, 8).to(torch.bfloat16).requires_grad_()
    arch = kernel.name.partition("_")[0]
    found = ffpa.explain(q, q, q, backward=True, kernel=kernel.name)
    if found.error is None:
        assert found.kernel is not None and found.kernel.startswith(f"{arch}_bwd_")
        ffpa.attention(q, q, q, kernel=kernel.name).sum().backward()
        assert q.grad is not None and q.grad.isfinite().all()
    else:
        with pytest.raises(NotImplementedError, match=kernel.name):
            ffpa.attention(q, q, q, kernel=kernel.name)


@pytest.mark.parametrize("name", ["q", "k", "v", "bias", "sinks"])
@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_that_cannot_follow_are_refused_before_the_forward(name: str, compiled: bool) -> None:
    x = dict(q=randn(1, 2, 3, 8), k=randn(4, 2, 2, 8), v=randn(4, 2, 2, 8), bias=randn(1, 2, 3, 4), sinks=randn(2))
    x["block_table"] = torch.tensor([[3, 1]], dtype=torch.int32)
    call = torch.compile(ffpa.attention, fullgraph=True, backend="aot_eager") if compiled else ffpa.attention
    ffpa.attention(**x)
    x[name].requires_grad_()
    with pytest.raises(RuntimeError, match=r"gradients are required.*block_table.*no_grad"):
        call(**x)
    with torch.no_grad():
        ffpa.attention(**x)


def test_paged_formula() -> None:
    """The differentiable formula takes pages, for forward mode; entries past a length are not looked up."""
    q, pages = randn(2, 2, 3, 8), randn(4, 2, 2, 8)
    table = torch.tensor([[3, 1], [0, 99]], dtype=torch.int32)
    lengths = torch.tensor([4, 1], dtype=torch.int32)
    expected = ffpa.attention(q, pages, pages, block_table=table, seqlens_kv=lengths, return_lse=True)
    found = _math.forward(_ops.Call(q, pages, pages, block_table=table, seqlens_kv=lengths))
    close(found, expected)


def test_errors_in_backward_keep_their_type() -> None:
    q = randn(1, 1, 3, 4).requires_grad_()
    o, lse = ffpa.attention(q, q, q, return_lse=True)
    with pytest.raises(RuntimeError):
        torch.autograd.grad(o, q, torch.ones(1, 1, 3, 5))
    assert lse.requires_grad
