"""Random problems, all options combined, forward, on every kernel, against the oracle.

Gradients of random problems: tests/simd/random_test.cc against the reference engine, test_reference.py that engine
against PyTorch.
"""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings

import ffpa
from ffpa import _math, _native
from oracle import check, int32, randn

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
KERNELS = [k for k in _native.kernels() if k.usable and k.pass_ == "forward" and k.engine in ("ref", "cpu")]


@st.composite
def problems(draw: st.DrawFn, dtype: torch.dtype, slow: bool) -> dict[str, Any]:
    b, h_kv, group = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 4))
    most = 24 if slow else 300
    n_q, n_kv = draw(st.integers(1, most)), draw(st.integers(1, most))
    d = draw(
        st.integers(1, 40) if slow else st.one_of(st.integers(1, 96), st.sampled_from([128, 257, 512, 1024, 1100]))
    )
    if d > 200:
        n_q, n_kv = min(n_q, 70), min(n_kv, 130)
    d_v = draw(st.one_of(st.just(d), st.integers(1, 64)))
    h_q = h_kv * group

    def tensor(heads: int, rows: int, width: int, seed: int) -> torch.Tensor:
        layout = draw(st.sampled_from(["bhnd", "bnhd", "every other", "offset", "expanded"]))
        if layout == "bnhd":
            return randn(b, rows, heads, width, dtype=dtype, seed=seed).transpose(1, 2)
        if layout == "every other":
            return randn(b, heads, rows, 2 * width, dtype=dtype, seed=seed)[..., ::2]
        if layout == "offset":
            return randn(b * heads * rows * width + 1, dtype=dtype, seed=seed)[1:].view(b, heads, rows, width)
        if layout == "expanded":
            return randn(1, heads, rows, width, dtype=dtype, seed=seed).expand(b, heads, rows, width)
        return randn(b, heads, rows, width, dtype=dtype, seed=seed)

    def broadcast(seed: int) -> torch.Tensor:
        return randn(*(draw(st.sampled_from([1, n])) for n in (b, h_q, n_q, n_kv)), seed=seed)

    options: dict[str, Any] = {}
    some = lambda: draw(st.integers(0, 3)) == 0  # noqa: E731
    if draw(st.booleans()):
        options["causal"] = True
    if some():
        options["window"] = (draw(st.integers(-1, 60)), draw(st.integers(-1, 60)))
    options["anchor"] = draw(st.sampled_from(["top_left", "bottom_right"]))
    if some():
        options["scale"] = draw(st.sampled_from([0.0, -0.2, 0.3])) * (64 / max(d, 64)) ** 0.5
    if some():
        options["softcap"] = draw(st.sampled_from([0.7, 15.0]))
    if some():
        options["mask"] = broadcast(5) > draw(st.sampled_from([-1.0, 0.0, 1.5]))
    if some():
        bias = broadcast(6)
        options["bias"] = torch.where(bias > 1.2, -torch.inf, bias) if draw(st.booleans()) else bias
    if some():
        options["alibi_slopes"] = randn(*((h_q,) if draw(st.booleans()) else (b, h_q)), seed=7).abs() / 16
    if some():
        options["sinks"] = randn(h_q, seed=8)
    if some():
        options["seqlens_kv"] = int32([draw(st.integers(0, n_kv)) for _ in range(b)])
    forced = {"num_splits": draw(st.sampled_from([0, 1, 2, 5])), "deterministic": draw(st.booleans())}
    q, k, v = tensor(h_q, n_q, d, 1), tensor(h_kv, n_kv, d, 2), tensor(h_kv, n_kv, d_v, 3)
    dropout = draw(st.sampled_from([0.0, 0.0, 0.0, 0.2]))
    return dict(q=q, k=k, v=v, options=options, forced=forced, dropout=dropout)


@pytest.mark.parametrize("kernel,dtype", [(k, x) for k in KERNELS for x in k.dtypes if x in DTYPES])
def test_random_problems(kernel: _native.KernelInfo, dtype: str) -> None:
    slow = kernel.engine == "ref"

    @settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(problems(DTYPES[dtype], slow))
    def holds(problem: dict[str, Any]) -> None:
        q, k, v, options, dropout = (problem[name] for name in ("q", "k", "v", "options", "dropout"))
        call = ffpa.attention
        if dropout:
            state = torch.tensor([3, 4])
            keep = _math.dropout_keep(state, dropout, (*q.shape[:3], k.shape[2]))
            options = {**options, "factors": keep / (1 - dropout)}

            def call(q: Any, k: Any, v: Any, factors: Any, **rest: Any) -> Any:
                return ffpa.attention(q, k, v, dropout_p=dropout, dropout_state=state, **rest)

        check(
            q,
            k,
            v,
            call=call,
            forced={"kernel": kernel.name, **problem["forced"]},
            slack=1.0,
            backward=False,
            **options,
        )

    holds()
