"""ffpa.explain: the kernel that then really runs, why no better one, and what a patched call would say."""

from __future__ import annotations

import pytest
import torch

import ffpa
from ffpa import Explanation, explain

Q, KV = torch.randn(1, 4, 9, 64), torch.randn(1, 2, 17, 64)


def test_forward_and_backward() -> None:
    forward, backward = explain(Q, KV, KV, causal=True), explain(Q, KV, KV, causal=True, backward=True)
    for found, part in ((forward, "_fwd_"), (backward, "_bwd_")):
        assert isinstance(found, Explanation)
        assert found.kernel is not None and part in found.kernel and found.engine in ("cpu", "ref")
        assert found.workspace_bytes is not None and found.workspace_bytes >= 0 and found.num_splits == 1
        assert found.error is None and found.fallback is None
        for line in (found.kernel, found.engine, f"{found.workspace_bytes} bytes"):
            assert line in str(found)


def test_reasons_of_better_kernels() -> None:
    found = explain(Q, KV, KV, engine="ref")
    assert found.engine == "ref" and found.kernel == "ref_fwd_loops"
    assert all(reason for _, reason in found.refused)
    for name, reason in found.refused:
        assert f"not {name}: {reason}" in str(found)


def test_forced_kernel_is_the_one_explained() -> None:
    assert explain(Q, KV, KV, kernel="ref_fwd_loops").kernel == "ref_fwd_loops"


def test_sdpa_arguments() -> None:
    mask = torch.ones(9, 17, dtype=torch.bool)
    for found in (
        explain(Q, KV, KV, mask, enable_gqa=True),
        explain(Q, KV, KV, attn_mask=mask, is_causal=True, enable_gqa=True),
        explain(Q, Q, Q, None, 0.0, True),
        explain(Q[0], Q[0], Q[0], is_causal=True),  # any rank that SDPA takes
    ):
        assert found.kernel is not None and found.fallback is None and found.error is None
    double = [x.double() for x in (Q, Q, Q)]
    found = explain(*double, is_causal=True)
    assert found.fallback is not None and f"handed to torch: {found.fallback}" in str(found)
    with ffpa.patch_sdpa(strict=True), pytest.raises(NotImplementedError) as raised:
        torch.nn.functional.scaled_dot_product_attention(*double, is_causal=True)
    assert found.fallback in str(raised.value)


def test_a_call_that_raises_is_explained_by_its_error() -> None:
    found = explain(Q, KV, KV[:, :, :5])
    with pytest.raises(RuntimeError) as raised:
        ffpa.attention(Q, KV, KV[:, :, :5])
    assert found.kernel is None and found.error is not None and found.error in str(raised.value)
    assert f"refused: {found.error}" in str(found)
    found = explain(Q, KV, KV, is_causal=True)  # heads differ without enable_gqa
    assert found.kernel is None and found.error is not None


def test_mixed_or_unknown_arguments() -> None:
    with pytest.raises(TypeError):
        explain(Q, KV, KV, is_causal=True, window=(1, 1))
    with pytest.raises(TypeError):
        explain(Q, KV, KV, casual=True)
