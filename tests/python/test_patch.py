"""patch_sdpa: what worked before works the same while patched; reversible, nested, thread-safe, honest about what it
hands on."""

from __future__ import annotations

import gc
import re
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import ffpa
from ffpa import FallbackWarning, _sdpa, patch_sdpa, unpatch_sdpa
from ffpa import patch as patch_module

ORIGINAL = F.scaled_dot_product_attention


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    yield
    assert F.scaled_dot_product_attention is ORIGINAL


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, ...]]]:
    """Shapes of the queries that ffpa was given."""
    seen: list[tuple[int, ...]] = []
    real = _sdpa.scaled_dot_product_attention

    def spy(query: Tensor, *rest: Any, **options: Any) -> Tensor:
        seen.append(tuple(query.shape))
        return real(query, *rest, **options)

    def spy_attention(query: Tensor, *rest: Any, **options: Any) -> Any:
        seen.append(tuple(query.shape))
        return attend(query, *rest, **options)

    attend = patch_module.attention
    monkeypatch.setattr(_sdpa, "scaled_dot_product_attention", spy)
    monkeypatch.setattr(patch_module, "attention", spy_attention)
    yield seen


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


Q, K, V = randn(2, 4, 5, 32, seed=1), randn(2, 4, 7, 32, seed=2), randn(2, 4, 7, 32, seed=3)
BOOL = randn(5, 7, seed=4) > 0


class Loud(torch.Tensor):
    """A subclass that intercepts functions."""


class NoMode(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is ORIGINAL:
            return "intercepted"
        return func(*args, **(kwargs or {}))


def with_gradients(call: Callable[..., Tensor], *leaves: Tensor) -> tuple[Tensor, ...]:
    fresh = [x.detach().clone().requires_grad_() for x in leaves]
    out = call(*fresh)
    return (out, *torch.autograd.grad(out.double().square().sum(), fresh))


def gradient_penalty(q: Tensor) -> Tensor:
    q = q.clone().requires_grad_()
    (g,) = torch.autograd.grad(F.scaled_dot_product_attention(q, K[0], V[0]).square().sum(), q, create_graph=True)
    return torch.autograd.grad(g.square().sum(), q)[0]


def autocast(dtype: torch.dtype) -> Tensor:
    with torch.autocast("cpu", dtype):
        return F.scaled_dot_product_attention(Q, K, V)


def scripted() -> Tensor:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated
        result: Tensor = torch.jit.script(attend)(Q, K, V)
        return result


def traced() -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        graph = torch.jit.trace(lambda *x: F.scaled_dot_product_attention(*x), (Q, K, V), check_trace=False)
        assert "aten::scaled_dot_product_attention" in str(graph.graph)
        result: Tensor = graph(Q, K, V)
        return result


class Attend(torch.nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)


def exported() -> Tensor:
    program = torch.export.export(Attend(), (Q, K, V))
    assert "aten.scaled_dot_product_attention" in str(program.graph)
    result: Tensor = program.module()(Q, K, V)
    return result


def compiled() -> Tensor:
    torch._dynamo.reset()
    result: Tensor = torch.compile(Attend(), fullgraph=True, backend="aot_eager")(Q, K, V)
    return result


def default_device() -> Tensor:
    with torch.device("cpu"):
        return F.scaled_dot_product_attention(Q, K, V)


def nested() -> Tensor:
    jagged = [
        torch.nested.nested_tensor([x[0, :, :3].transpose(0, 1), x[1].transpose(0, 1)], layout=torch.jagged).transpose(
            1, 2
        )
        for x in (K, K, V)
    ]
    return torch.cat([x.transpose(0, 1) for x in F.scaled_dot_product_attention(*jagged).transpose(1, 2).unbind()], 1)


MHA = torch.nn.MultiheadAttention(32, 4, batch_first=True)
LAYER = torch.nn.TransformerEncoderLayer(32, 4, 48, dropout=0.0, batch_first=True)

CALLS: dict[str, tuple[bool, Callable[[], Any]]] = {  # whether ffpa takes it, and the call
    "plain": (True, lambda: F.scaled_dot_product_attention(Q, K, V)),
    "by name": (True, lambda: F.scaled_dot_product_attention(query=Q, key=K, value=V, attn_mask=BOOL, is_causal=False)),
    "by position": (True, lambda: F.scaled_dot_product_attention(Q, K, V, None, 0.0, True)),
    "causal, mask": (True, lambda: F.scaled_dot_product_attention(Q, K, V, BOOL, is_causal=True)),
    "additive": (True, lambda: F.scaled_dot_product_attention(Q, K, V, randn(4, 5, 7))),
    "scale, D_v": (True, lambda: F.scaled_dot_product_attention(Q, K, V[..., :9], scale=-0.4)),
    "gqa": (True, lambda: F.scaled_dot_product_attention(Q, K[:, :2], V[:, :2], enable_gqa=True)),
    "one head": (True, lambda: F.scaled_dot_product_attention(Q, K[:, :1], V[:1])),
    "rank 3": (True, lambda: F.scaled_dot_product_attention(Q[0], K[0], V[0], BOOL)),
    "rank 2": (True, lambda: F.scaled_dot_product_attention(Q[0, 0], K[0, 0], V[0, 0])),
    "rank 5": (True, lambda: F.scaled_dot_product_attention(Q[None], K[None], V[None])),
    "empty keys": (True, lambda: F.scaled_dot_product_attention(Q, K[:, :, :0], V[:, :, :0])),
    "empty batch": (True, lambda: F.scaled_dot_product_attention(Q[:0], K[:0], V[:0])),
    "bf16": (True, lambda: F.scaled_dot_product_attention(Q.bfloat16(), K.bfloat16(), V.bfloat16(), is_causal=True)),
    "fp16": (True, lambda: F.scaled_dot_product_attention(Q.half(), K.half(), V.half())),
    "strides": (True, lambda: F.scaled_dot_product_attention(Q.mT.contiguous().mT, K[..., ::2].repeat(1, 1, 1, 2), V)),
    "gradients": (True, lambda: with_gradients(F.scaled_dot_product_attention, Q, K, V)),
    "causal gradients": (
        True,
        lambda: with_gradients(lambda *x: F.scaled_dot_product_attention(*x, is_causal=True), Q, K, V),
    ),
    "vmap": (True, lambda: torch.vmap(F.scaled_dot_product_attention)(Q, K, V)),
    "func.grad": (True, lambda: torch.func.grad(lambda q: F.scaled_dot_product_attention(q, K, V).square().sum())(Q)),
    "autocast bf16": (True, lambda: autocast(torch.bfloat16)),
    "compile": (True, compiled),
    "default device": (True, default_device),
    "multihead": (True, lambda: MHA.train()(Q[:, 0], K[:, 0], V[:, 0], need_weights=False)[0]),
    "encoder layer": (True, lambda: LAYER.train()(Q[:, 0])),
    "fast path": (False, torch.no_grad()(lambda: LAYER.eval()(Q[:, 0]))),
    "fp64": (False, lambda: F.scaled_dot_product_attention(Q.double(), K.double(), V.double())),
    "mask gradient": (
        True,
        lambda: with_gradients(lambda m: F.scaled_dot_product_attention(Q, K, V, m), randn(4, 5, 7)),
    ),
    "double backward": (True, lambda: gradient_penalty(Q[0])),
    "lower right": (True, lambda: F.scaled_dot_product_attention(Q, K, V, causal_lower_right(5, 7))),
    "lower right, fp64": (
        False,
        lambda: F.scaled_dot_product_attention(*(x.double() for x in (Q, K, V)), causal_lower_right(5, 7)),
    ),
    "upper left": (True, lambda: F.scaled_dot_product_attention(Q, K, V, causal_upper_left(5, 7))),
    "subclass": (False, lambda: F.scaled_dot_product_attention(Q.as_subclass(Loud), K, V)),
    "nested": (False, nested),
    "script": (False, scripted),
    "trace": (False, traced),
    "export": (False, exported),
    "meta": (False, lambda: F.scaled_dot_product_attention(Q.to("meta"), K.to("meta"), V.to("meta")).shape),
}
HALF = ("bf16", "fp16", "autocast bf16")


def flat(result: Any) -> list[Any]:
    return list(result) if isinstance(result, (tuple, list)) else [result]


@pytest.mark.parametrize("name", CALLS)
def test_what_worked_gives_the_same(name: str, taken: list[tuple[int, ...]]) -> None:
    ours, call = CALLS[name]
    before = call()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        with patch_sdpa():
            during = call()
    assert bool(taken) == ours, "taken by ffpa" if taken else "handed to torch"
    for a, b in zip(flat(during), flat(before), strict=True):
        if not isinstance(b, Tensor):
            assert a == b
            continue
        assert (a.shape, a.dtype, type(a), a.requires_grad) == (b.shape, b.dtype, type(b), b.requires_grad)
        tolerance = 2e-2 if name in HALF else 2e-5
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


ERRORS: dict[str, Callable[[], Any]] = {
    "head dims": lambda: F.scaled_dot_product_attention(Q, K[..., :8], V),
    "heads": lambda: F.scaled_dot_product_attention(Q, K[:, :2], V[:, :2]),
    "dtypes": lambda: F.scaled_dot_product_attention(Q, K.half(), V),
    "int": lambda: F.scaled_dot_product_attention(Q.int(), K.int(), V.int()),
    "rank 1": lambda: F.scaled_dot_product_attention(Q[0, 0, 0], K[0, 0, 0], V[0, 0, 0]),
    "mask shape": lambda: F.scaled_dot_product_attention(Q, K, V, torch.ones(3, 3, dtype=torch.bool)),
    "mask dtype": lambda: F.scaled_dot_product_attention(Q, K, V, torch.ones(5, 7, dtype=torch.int)),
    "dropout": lambda: F.scaled_dot_product_attention(Q, K, V, dropout_p=1.5),
    "no tensor": lambda: F.scaled_dot_product_attention(Q, K, "v"),
    "causal is an int": lambda: F.scaled_dot_product_attention(Q, K, V, is_causal=1),
    "seventh by position": lambda: F.scaled_dot_product_attention(Q, K, V, None, 0.0, False, 1.0),
    "unknown name": lambda: F.scaled_dot_product_attention(Q, K, V, mask=None),
}


@pytest.mark.parametrize("name", ERRORS)
def test_what_raised_raises_the_same_kind(name: str) -> None:
    with pytest.raises(Exception) as before:
        ERRORS[name]()
    with patch_sdpa(), pytest.raises(before.type):
        ERRORS[name]()


def test_dropout_is_seeded_by_torch_and_keeps_the_mean() -> None:
    ones = torch.ones(1, 1, 64, 64)
    with patch_sdpa():
        torch.manual_seed(5)
        first, second = (F.scaled_dot_product_attention(ones, ones, ones, dropout_p=0.25) for _ in range(2))
        torch.manual_seed(5)
        again = F.scaled_dot_product_attention(ones, ones, ones, dropout_p=0.25)
    assert torch.equal(first, again) and not torch.equal(first, second)
    assert 0.95 < first.mean() < 1.05 and first.std() > 0.01


def test_function_mode_sees_torchs_function() -> None:
    with patch_sdpa() as patch, NoMode(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        assert F.scaled_dot_product_attention(Q, K, V) == "intercepted"
    assert patch.fallbacks == {"function mode": 1}


# ---------------------------------------------------------------------------------------------- reversible, nested


def test_as_a_function(taken: list[tuple[int, ...]]) -> None:
    assert not unpatch_sdpa()
    patch = patch_sdpa()
    assert patch.active and F.scaled_dot_product_attention is not ORIGINAL
    F.scaled_dot_product_attention(Q, K, V)
    assert len(taken) == 1
    second = patch_sdpa()
    assert unpatch_sdpa() and not second.active and patch.active
    assert F.scaled_dot_product_attention is not ORIGINAL
    assert unpatch_sdpa() and not unpatch_sdpa()
    assert F.scaled_dot_product_attention is ORIGINAL
    patch.undo()  # a second time does nothing


def test_as_a_context_nested_and_through_errors(taken: list[tuple[int, ...]]) -> None:
    with pytest.raises(ZeroDivisionError), patch_sdpa():
        with patch_sdpa() as inner:
            F.scaled_dot_product_attention(Q, K, V)
        assert not inner.active
        F.scaled_dot_product_attention(Q, K, V)
        assert not unpatch_sdpa()  # a context ends with its block only
        raise ZeroDivisionError
    assert len(taken) == 2 and F.scaled_dot_product_attention is ORIGINAL


def test_blocks_left_in_the_wrong_order() -> None:
    first, second = patch_sdpa().__enter__(), patch_sdpa().__enter__()
    first.__exit__(None, None, None)
    assert F.scaled_dot_product_attention is not ORIGINAL
    second.__exit__(None, None, None)
    assert F.scaled_dot_product_attention is ORIGINAL


def test_a_foreign_patch_on_top_of_ours(taken: list[tuple[int, ...]]) -> None:
    """Someone wraps our function and outlives us: no circle, no loss, and ours works again below theirs."""
    patch = patch_sdpa()
    below, count = F.scaled_dot_product_attention, 0

    def foreign(*args: Any, **options: Any) -> Tensor:
        nonlocal count
        count += 1
        return below(*args, **options)

    F.scaled_dot_product_attention = foreign
    try:
        F.scaled_dot_product_attention(Q, K, V)
        patch.undo()
        assert F.scaled_dot_product_attention is foreign  # theirs to take away
        F.scaled_dot_product_attention(Q, K, V)
        assert (count, len(taken)) == (2, 1)
        with patch_sdpa(), warnings.catch_warnings():
            warnings.simplefilter("ignore", FallbackWarning)
            F.scaled_dot_product_attention(Q, K, V)
            F.scaled_dot_product_attention(Q.double(), K.double(), V.double())
        assert (count, len(taken)) == (4, 2)
    finally:
        F.scaled_dot_product_attention = ORIGINAL


def test_a_foreign_patch_below_ours() -> None:
    count = 0

    def foreign(*args: Any, **options: Any) -> Tensor:
        nonlocal count
        count += 1
        return ORIGINAL(*args, **options)

    F.scaled_dot_product_attention = foreign
    try:
        with patch_sdpa(), warnings.catch_warnings():
            warnings.simplefilter("ignore", FallbackWarning)
            F.scaled_dot_product_attention(Q.double(), K.double(), V.double())
            assert count == 1
        assert F.scaled_dot_product_attention is foreign
    finally:
        F.scaled_dot_product_attention = ORIGINAL


def test_threads_entering_and_leaving() -> None:
    """Blocks of several threads overlap at random: right results throughout, torch's function at the end."""
    wanted, errors, start = ORIGINAL(Q, K, V), [], threading.Barrier(6)

    def work(seed: int) -> None:
        try:
            start.wait()
            for i in range(40):
                with patch_sdpa(strict=(seed + i) % 3 == 0) as patch:
                    assert patch.active and F.scaled_dot_product_attention is not ORIGINAL
                    torch.testing.assert_close(F.scaled_dot_product_attention(Q, K, V), wanted, rtol=2e-5, atol=2e-5)
                torch.testing.assert_close(F.scaled_dot_product_attention(Q, K, V), wanted, rtol=2e-5, atol=2e-5)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors and not any(t.is_alive() for t in threads)
    assert F.scaled_dot_product_attention is ORIGINAL


# ------------------------------------------------------------------------------------------------ saying why, strict


def double() -> Tensor:
    return F.scaled_dot_product_attention(Q.double(), K.double(), V.double())


def test_says_why_once_per_kind() -> None:
    with warnings.catch_warnings(record=True) as said, patch_sdpa() as patch:
        warnings.simplefilter("always")
        double()
        double()
        F.scaled_dot_product_attention(Q.as_subclass(Loud), K, V)
    ours = [w for w in said if issubclass(w.category, FallbackWarning)]
    assert len(ours) == 2 and sum(patch.fallbacks.values()) == 3 and len(patch.fallbacks) == 2
    assert re.search("handed to torch: .*(fp64|float64)", str(ours[0].message))
    assert ours[0].filename == __file__
    with warnings.catch_warnings(record=True) as said, patch_sdpa():  # a new patch says it again
        warnings.simplefilter("always")
        double()
    assert len(said) == 1


def test_strict_raises_the_reason(taken: list[tuple[int, ...]]) -> None:
    with patch_sdpa(strict=True):
        F.scaled_dot_product_attention(Q, K, V)
        with pytest.raises(NotImplementedError, match=r"handed to torch: .*(fp64|float64)"):
            double()
        with patch_sdpa(), pytest.raises(NotImplementedError):  # the strictest active patch counts, whatever the order
            double()
    assert len(taken) == 1
    with pytest.raises(TypeError, match="strict: must be a bool, but is int"):
        patch_sdpa(1)  # type: ignore[arg-type]


def test_nothing_is_kept_alive() -> None:
    import weakref

    with patch_sdpa():
        x = randn(1, 1, 4, 8)
        alive = weakref.ref(x)
        F.scaled_dot_product_attention(x, x, x)
        del x
        gc.collect()
        assert alive() is None


def test_grouped_heads_of_512_make_no_square() -> None:
    """The scores would take 16 MB in half precision; no single allocation may be larger than the output, 4 MB."""
    q, kv = (randn(1, h, 1024, 512, dtype=torch.bfloat16) for h in (4, 1))
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with patch_sdpa(strict=True), torch.profiler.profile(activities=cpu, profile_memory=True) as seen:
        F.scaled_dot_product_attention(q, kv, kv, is_causal=True, enable_gqa=True)
    largest = max(abs(event.self_cpu_memory_usage) for event in seen.key_averages())
    assert q.nbytes <= largest < 1.5 * q.nbytes


def test_package_names() -> None:
    assert ffpa.patch_sdpa is patch_sdpa and issubclass(ffpa.FallbackWarning, UserWarning)
