"""torch.ops.ffpa: opcheck, strides of outputs and fakes, errors, threads, memory that is not theirs."""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import ffpa
from ffpa import _ops

FORWARD, BACKWARD = torch.ops.ffpa.forward.default, torch.ops.ffpa.backward.default
APPEND = torch.ops.ffpa.append_kv_.default
Call = _ops.Call


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def int32(*values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def calls() -> Iterator[tuple[str, Call]]:
    """One call for each option, and layouts of every order of memory."""
    q, k, v = randn(2, 4, 5, 8), randn(2, 2, 7, 8), randn(2, 2, 7, 6)
    yield "plain", Call(q, k, v)
    yield "mask", Call(q, k, v, mask=randn(2, 1, 5, 7) > 0)
    yield "bias", Call(q, k, v, bias=randn(1, 4, 1, 7))
    yield "scale, causal", Call(q, k, v, scale=-0.3, causal=True)
    yield "bottom right, window", Call(q, k, v, causal=True, bottom_right=True, window_left=2, window_right=0)
    yield "dropout", Call(q, k, v, dropout_p=0.3, dropout_state=torch.tensor([1, 2]))
    yield "sinks, softcap", Call(q, k, v, sinks=randn(4), softcap=3.0)
    yield "alibi", Call(q, k, v, alibi_slopes=randn(2, 4).abs())
    yield "lengths", Call(q, k, v, seqlens_kv=int32(3, 0), kv_batch_idx=int32(1, 1))
    yield "splits, invariant", Call(q, k, v, num_splits=3, batch_invariant=True, deterministic=True)
    yield "kernel", Call(q, k, v, kernel_name="ref_fwd_loops")
    yield "engine", Call(q, k, v, engine=1)
    yield (
        "packed",
        Call(
            randn(1, 4, 9, 8), randn(1, 2, 11, 8), randn(1, 2, 11, 6), cu_seqlens_q=int32(0, 4, 4, 9),
            cu_seqlens_kv=int32(0, 1, 6, 11), max_seqlen_q=5, max_seqlen_kv=5,
        ),
    )  # fmt: skip
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        yield str(dtype), Call(*(x.to(dtype) for x in (q, k, v)))
    for order in itertools.permutations(range(4)):
        yield f"order {order}", Call(*(permuted(x, order) for x in (q, k, v)))
    yield "one row", Call(randn(2, 1, 4, 8).transpose(1, 2), k, v)
    yield "expanded", Call(q[:, :, :1].expand(2, 4, 5, 8), k[:1].expand_as(k), v)
    yield "sliced", Call(randn(2, 5, 3, 4, 8).transpose(1, 3)[:, :, 1], k, v)
    yield "no keys", Call(q, k[:, :, :0], v[:, :, :0])
    yield "no rows", Call(q[:, :, :0], k, v)
    yield "no width", Call(q, k, v[..., :0])


def permuted(x: Tensor, order: tuple[int, ...]) -> Tensor:
    """x with its axes in memory in that order."""
    return x.permute(order).contiguous().permute([order.index(axis) for axis in range(4)])


CALLS = dict(calls())


def backward_arguments(call: Call, needs: int = 31, with_dlse: bool = True) -> tuple[Any, ...]:
    o, lse = FORWARD(*call)
    return torch.ones_like(o), torch.ones_like(lse) if with_dlse else None, o, lse, needs, *call


@pytest.mark.parametrize("name", CALLS)
def test_opcheck_forward(name: str) -> None:
    torch.library.opcheck(FORWARD, (*CALLS[name], 7))


@pytest.mark.parametrize("name", CALLS)
def test_opcheck_backward(name: str) -> None:
    torch.library.opcheck(BACKWARD, backward_arguments(CALLS[name]))


@pytest.mark.parametrize("needs", range(1, 32))
def test_opcheck_backward_of_some(needs: int) -> None:
    call = CALLS["plain"]._replace(bias=randn(1, 4, 1, 7), sinks=randn(4))
    arguments = backward_arguments(call, needs, with_dlse=needs % 2 == 0)
    torch.library.opcheck(BACKWARD, arguments, test_utils=("test_schema", "test_faketensor"))
    for bit, (gradient, every) in enumerate(
        zip(BACKWARD(*arguments), BACKWARD(*arguments[:4], 31, *call), strict=True)
    ):
        assert torch.equal(gradient, every) if needs >> bit & 1 else gradient.numel() == 0


@pytest.mark.parametrize("rotary", [False, True])
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("v", [False, True])
def test_opcheck_append(rotary: bool, paged: bool, v: bool) -> None:
    new, cache = randn(2, 3, 2, 8), randn(6, 3, 4, 8)
    arguments: tuple[Any, ...] = (new, new + 1 if v else None, cache, cache + 1 if v else None, int32(1, 2))
    arguments += (int32([5, 3], [0, 1]) if paged else None, None if paged else int32(4, 2))
    if rotary:
        arguments += (randn(9, 2), randn(9, 2), permuted(randn(2, 6, 1, 8), (0, 2, 1, 3)), True, False)
    torch.library.opcheck(APPEND, arguments)
    rotated = APPEND(*arguments)
    assert rotated.stride() == arguments[9].stride() if rotary else rotated.numel() == 0


@pytest.mark.parametrize("name", CALLS)
def test_layout_of_outputs_and_fakes(name: str) -> None:
    """o has the order of q, a gradient that of its input; a fake has the very strides of the real one."""
    call = CALLS[name]
    o, lse = FORWARD(*call)
    arguments = backward_arguments(call)
    gradients = BACKWARD(*arguments)
    if all(extent > 0 for extent in (*call.q.shape, *o.shape)) and 0 not in call.q.stride():
        order = sorted(range(4), key=lambda axis: -call.q.stride(axis))
        assert o.permute(order).is_contiguous()
    assert lse.is_contiguous() and lse.dtype == (torch.float64 if o.dtype == torch.float64 else torch.float32)
    for gradient, x in zip(gradients, (call.q, call.k, call.v), strict=False):
        assert gradient.shape == x.shape
        order = sorted(range(4), key=lambda axis: -x.stride(axis))
        if x.numel() and 0 not in x.stride() and x.permute(order).is_contiguous():
            assert gradient.stride() == x.stride()
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = [mode.from_tensor(x) if isinstance(x, Tensor) else x for x in call]
        fake_arguments = [mode.from_tensor(x) if isinstance(x, Tensor) else x for x in arguments]
        results = (*FORWARD(*fakes), *BACKWARD(*fake_arguments))
    for fake, real in zip(results, (o, lse, *gradients), strict=True):
        assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)


@pytest.mark.parametrize("name", CALLS)
def test_values_are_those_of_the_formula(name: str) -> None:
    from ffpa import _math

    call = CALLS[name]
    o, lse = FORWARD(*call)
    expected_o, expected_lse = _math.forward(call)
    tolerance = {torch.float32: 1e-5, torch.float64: 1e-12, torch.float16: 2e-3}.get(o.dtype, 2e-2)
    torch.testing.assert_close(o, expected_o, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-5, atol=1e-5)
    if 1 not in o.shape:
        assert o.stride() == expected_o.stride()
    arguments = backward_arguments(call, needs=7)
    gradients = _math.backward(arguments[0], arguments[1], 7, call)
    for found, wanted in zip(BACKWARD(*arguments)[:3], gradients, strict=False):
        assert wanted is not None
        torch.testing.assert_close(found, wanted, rtol=5 * tolerance, atol=5 * tolerance)


# -------------------------------------------------------------------------------------------------------------- errors


def test_errors_have_the_librarys_words_alone() -> None:
    q, k, v = randn(1, 2, 3, 4), randn(1, 2, 5, 4), randn(1, 2, 5, 4)
    for call, text in (
        (Call(q, k[..., :3], v), "k: extent 3 (D_qk) must equal q's, 4, but is 3"),
        (Call(q[0], k, v), "q: rank must be 4, but is 3"),
        (Call(q, k, v, dropout_p=1.5), "dropout_p: must be from 0 to 1, but is 1.5"),
        (Call(q[None], k, v), "q: must have from 1 to 4 dimensions, but has 5"),
        (Call(q, k, v, sinks=torch.tensor(1.0)), "sinks: must have from 1 to 4 dimensions, but has 0"),
        (Call(q, k, v, num_splits=2**40), "num_splits: must fit 32 bits, but is 1099511627776"),
    ):
        with pytest.raises(RuntimeError) as raised:
            FORWARD(*call)
        assert str(raised.value) == text and raised.type is RuntimeError


def test_status_not_supported_is_named() -> None:
    call = Call(*[randn(1, 2, 3, 4).to(torch.float8_e4m3fn)] * 3)
    with pytest.raises(RuntimeError, match=r"^FFPA_NOT_SUPPORTED: q: dtype"):
        FORWARD(*call)
    with pytest.raises(NotImplementedError, match=r"^q: dtype"):
        _ops.forward(*call)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.uint8, torch.float8_e5m2])
def test_dtypes_without_a_name_are_refused(dtype: torch.dtype) -> None:
    x = torch.zeros(1, 2, 3, 4).to(dtype)
    with pytest.raises(RuntimeError, match="q: dtype must be one that ffpa knows"):
        FORWARD(x, x, x)


def test_argument_types() -> None:
    q = randn(1, 2, 3, 4)
    with pytest.raises(TypeError, match="causal"):
        _ops.forward(q, q, q, None, None, None, "yes")
    with pytest.raises(NotImplementedError, match="Sparse"):
        FORWARD(q.to_sparse(), q, q)


@pytest.mark.parametrize("field", ["k", "v", "mask", "sinks"])
def test_tensors_of_two_devices(field: str) -> None:
    call = Call(randn(1, 2, 3, 4), randn(1, 2, 3, 4), randn(1, 2, 3, 4), mask=randn(1, 1, 3, 3) > 0, sinks=randn(2))
    with pytest.raises(RuntimeError, match=f"{field}: must lie on q's device"):
        FORWARD(*call._replace(**{field: getattr(call, field).to("meta")}))


def test_nothing_is_written_when_refused() -> None:
    cache = randn(1, 2, 4, 8)
    before = cache.clone()
    new = randn(1, 2, 3, 8)
    with pytest.raises(RuntimeError, match="seqlens_kv: entry 0"):
        APPEND(new, new, cache, cache.clone(), int32(2))
    assert torch.equal(cache, before)


def test_refused_calls_do_not_leak() -> None:
    """All that the op was given is released again, boxed optionals and strings included."""
    tensors = [randn(1, 2, 30, 64), randn(1, 2, 30, 64), randn(1, 2, 30, 63), randn(1, 1, 30, 30) > 0]
    alive = [torch._C._WeakTensorRef(x) for x in tensors]
    with pytest.raises(RuntimeError):
        FORWARD(*tensors, None, 0.5, kernel_name="no_such_kernel")
    del tensors
    assert all(x.expired() for x in alive)


# ------------------------------------------------------------------------------------------------- memory and threads


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_outside_the_tensors_is_not_read(poison: float, dtype: torch.dtype) -> None:
    shapes = (2, 4, 5, 33), (2, 2, 37, 33), (2, 2, 37, 17)

    def embedded(shape: tuple[int, ...], filler: float) -> Tensor:
        whole = torch.full([extent + 3 for extent in shape], filler, dtype=dtype)
        inner = whole[tuple(slice(1, 1 + extent) for extent in shape)]
        inner.copy_(randn(*shape, dtype=dtype))
        return inner

    def results(filler: float) -> tuple[Tensor, ...]:
        q, k, v = (embedded(shape, filler) for shape in shapes)
        lengths = int32(37, 20)
        for x in (k, v):
            x[1, :, 20:] = filler
        call = Call(q, k, v, seqlens_kv=lengths)
        o, lse = FORWARD(*call)
        return o, lse, *BACKWARD(embedded(tuple(o.shape), filler), None, o, lse, 7, *call)[:3]

    for clean, poisoned in zip(results(0.0), results(poison), strict=True):
        assert torch.equal(clean, poisoned)


def test_copy_on_write_inputs_stay_shared() -> None:
    q = randn(1, 2, 3, 4)
    lazy = torch._lazy_clone(q)
    FORWARD(lazy, lazy, lazy)
    assert torch._C._is_cow_tensor(lazy)


def test_threads_follow_torch_and_do_not_change_bits() -> None:
    q = randn(2, 4, 33, 64)
    expected = FORWARD(q, q, q)
    threads = torch.get_num_threads()
    try:
        for n in (1, 2, 5):
            torch.set_num_threads(n)
            assert all(torch.equal(a, b) for a, b in zip(FORWARD(q, q, q), expected, strict=True))
    finally:
        torch.set_num_threads(threads)


def test_calls_from_many_threads() -> None:
    inputs = [randn(1, 2, 9, 16, seed=i).requires_grad_() for i in range(8)]

    def work(x: Tensor) -> Tensor:
        return torch.autograd.grad(ffpa.attention(x, x, x, causal=True).square().sum(), x)[0]

    expected = [work(x) for x in inputs]
    wrong: list[int] = []

    def repeat(i: int) -> None:
        for _ in range(20):
            if not torch.equal(work(inputs[i]), expected[i]):
                wrong.append(i)
            with pytest.raises(RuntimeError, match=f"but is {i + 1}$"):  # each thread its own last error
                FORWARD(inputs[i], inputs[i][..., : i + 1], inputs[i])

    workers = [threading.Thread(target=repeat, args=(i,)) for i in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong
