"""torch.compile without graph breaks, dynamic shapes, torch.export: the same values, strides and gradients as eager."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import ffpa

sdpa = ffpa.scaled_dot_product_attention


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


CU = torch.tensor([0, 2, 5], dtype=torch.int32)
BIAS, SINKS = randn(4, 5, 7), randn(4)
CALLS: dict[str, Callable[..., Any]] = {
    "plain": lambda q, k, v: sdpa(q, k, v, is_causal=True, enable_gqa=True),
    "mask": lambda q, k, v: sdpa(q, k, v, BIAS, scale=0.3, enable_gqa=True),
    "bool mask": lambda q, k, v: sdpa(q, k, v, BIAS > 0, enable_gqa=True),
    "rank 3": lambda q, k, v: sdpa(q[:, 0], k[:, 0], v[:, 0]),
    "broadcast": lambda q, k, v: sdpa(q, k[:, :1], v[:1, :1]),
    "rank 5": lambda q, k, v: sdpa(q[None], k[None, :, :1], v[None, :, :1]),
    "computed inputs": lambda q, k, v: sdpa(q.transpose(1, 2).sin().transpose(1, 2), k * 2, v + 1, enable_gqa=True) + 1,
    "options": lambda q, k, v: ffpa.attention(
        q, k, v, sinks=SINKS, softcap=5.0, causal=True, anchor="bottom_right", window=(3, 0), return_lse=True
    ),
    "kernel": lambda q, k, v: ffpa.attention(q, k, v, bias=BIAS, kernel="ref_fwd_loops"),
    "packed": lambda q, k, v: ffpa.attention(
        q[:1], k[:1, :, :5], v[:1, :, :5], cu_seqlens_q=CU, cu_seqlens_kv=CU, max_seqlen_q=3, max_seqlen_kv=3
    ),
    "lengths": lambda q, k, v: ffpa.attention(q, k, v, seqlens_kv=torch.tensor([3, 7], dtype=torch.int32)),
    "meets itself": lambda q, k, v: sdpa(q, q, q),
}


def inputs(order: tuple[int, ...] = (0, 1, 2, 3), n_q: int = 5) -> list[Tensor]:
    shapes = (2, 4, n_q, 8), (2, 2, 7, 8), (2, 2, 7, 6)
    tensors = [randn(*shape, seed=i) for i, shape in enumerate(shapes)]
    inverse = [order.index(axis) for axis in range(4)]
    return [x.permute(order).contiguous().permute(inverse).requires_grad_() for x in tensors]


def run(call: Callable[..., Any], tensors: list[Tensor]) -> list[Tensor]:
    results = call(*tensors)
    results = list(results) if isinstance(results, tuple) else [results]
    weights = [randn(*r.shape, seed=3) for r in results]
    gradients = torch.autograd.grad(results, tensors, weights, allow_unused=True)
    return results + [g for g in gradients if g is not None]


def same(found: list[Tensor], expected: list[Tensor]) -> None:
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, check_stride=True)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("dynamic", [False, True])
def test_fullgraph(name: str, dynamic: bool) -> None:
    call = CALLS[name]
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    same(run(compiled, inputs()), run(call, inputs()))
    with torch.no_grad():
        found, expected = compiled(*inputs()), call(*inputs())
    torch.testing.assert_close(found, expected, check_stride=True)


@pytest.mark.parametrize("name", ["plain", "mask", "computed inputs", "options"])
def test_inductor(name: str) -> None:
    call = CALLS[name]
    compiled = torch.compile(call, fullgraph=True)
    try:
        found = run(compiled, inputs())
    except torch._inductor.exc.InductorError as error:
        if "compiler" in str(error).lower() and "found" in str(error).lower():
            pytest.skip("inductor finds no C++ compiler")
        raise
    same(found, run(call, inputs()))


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3), (0, 1, 3, 2)])
def test_layouts(order: tuple[int, ...]) -> None:
    """Strides of outputs and gradients, which code downstream is compiled for."""
    compiled = torch.compile(CALLS["plain"], fullgraph=True, backend="aot_eager")
    same(run(compiled, inputs(order)), run(CALLS["plain"], inputs(order)))


def test_dynamic_lengths_compile_once() -> None:
    graphs: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(CALLS["plain"], fullgraph=True, backend=backend, dynamic=True)
    for n in (5, 6, 17, 64, 33):
        tensors = [x.detach() for x in inputs(n_q=n)]
        torch.testing.assert_close(compiled(*tensors), CALLS["plain"](*tensors))
    assert len(graphs) == 1


def test_dropout_is_drawn_inside_the_graph() -> None:
    def call(q: Tensor) -> Tensor:
        return sdpa(q, q, torch.eye(64).expand(1, 2, 64, 64), dropout_p=0.5)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    q = randn(1, 2, 64, 16)
    first, second = compiled(q), compiled(q)
    assert not torch.equal(first, second)
    assert 0.4 < (first != 0).float().mean() < 0.6


def test_autocast_inside() -> None:
    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return sdpa(q, k, v, enable_gqa=True)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    found, expected = run(compiled, inputs()), run(call, inputs())
    assert found[0].dtype == torch.bfloat16
    same(found, expected)


class Attend(torch.nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sdpa(q, k, v, is_causal=True, enable_gqa=True)


def test_export_with_dynamic_length() -> None:
    n = torch.export.Dim("n", min=2, max=4096)
    tensors = tuple(x.detach() for x in inputs())
    program = torch.export.export(Attend(), tensors, dynamic_shapes=({2: n}, None, None))
    assert "ffpa.forward" in str(program.graph)
    for n_q in (5, 41):
        tensors = tuple(x.detach() for x in inputs(n_q=n_q))
        torch.testing.assert_close(program.module()(*tensors), Attend()(*tensors))


def test_append_in_a_graph() -> None:
    """A mutating op keeps its place between reads of the cache."""

    def step(cache: Tensor, new: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        before = cache.sum()
        ffpa._ops.append(new, new, cache, cache.new_zeros(cache.shape), seqlens_kv=lengths)
        return before, cache.sum()

    arguments = randn(1, 2, 3, 8), torch.tensor([1], dtype=torch.int32)
    eager_cache, compiled_cache = torch.zeros(1, 2, 8, 8), torch.zeros(1, 2, 8, 8)
    expected = step(eager_cache, *arguments)
    found = torch.compile(step, fullgraph=True, backend="aot_eager")(compiled_cache, *arguments)
    torch.testing.assert_close(found, expected)
    assert torch.equal(compiled_cache, eager_cache) and expected[0] == 0 != expected[1]


def test_transforms_inside_a_graph() -> None:
    q = randn(3, 2, 4, 5, 8)
    call = lambda q: torch.vmap(lambda x: sdpa(x, x, x, is_causal=True))(q)  # noqa: E731
    torch.testing.assert_close(torch.compile(call, backend="aot_eager")(q), call(q))
