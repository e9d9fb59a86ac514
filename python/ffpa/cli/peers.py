"""The implementations that `ffpa bench` knows: ours, and those peers that this Python has installed.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ffpa.cli.cases import Case
from ffpa.cli.measure import Call

TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}

# (q, k, v, causal) in [B, H, N, D] -> o
Attention = Callable[[Tensor, Tensor, Tensor, bool], Tensor]


@dataclass(frozen=True)
class Peer:
    """`note` says what it is, and `layout` where its sequence axis stands: "BHND" or "BNHD"."""

    name: str
    note: str
    load: Callable[[], Attention]
    package: str = "torch"
    layout: str = "BHND"

    @property
    def installed(self) -> bool:
        return importlib.util.find_spec(self.package) is not None


def _ours() -> Attention:
    import ffpa

    def run(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        o = ffpa.attention(q, k, v, causal=causal)
        assert isinstance(o, Tensor)
        return o

    return run


def _sdpa(backend: SDPBackend | None) -> Callable[[], Attention]:
    def load() -> Attention:
        def run(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
            chosen = sdpa_kernel(backend) if backend is not None else contextlib.nullcontext()
            with chosen:
                return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])

        return run

    return load


def _function(module: str, name: str) -> Callable[[], Attention]:
    """A peer's function that takes (q, k, v, causal=...)."""

    def load() -> Attention:
        function: Callable[..., Any] = getattr(importlib.import_module(module), name)

        def run(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
            o = function(q, k, v, causal=causal)
            first: Tensor = o[0] if isinstance(o, tuple) else o
            return first

        return run

    return load


OURS = Peer("ffpa", "this library, kernel chosen for the problem", _ours)
PEERS = [
    Peer("sdpa", "F.scaled_dot_product_attention, backend chosen by torch", _sdpa(None)),
    Peer("sdpa-math", "its MATH backend", _sdpa(SDPBackend.MATH)),
    Peer("sdpa-flash", "its FLASH_ATTENTION backend", _sdpa(SDPBackend.FLASH_ATTENTION)),
    Peer("sdpa-efficient", "its EFFICIENT_ATTENTION backend", _sdpa(SDPBackend.EFFICIENT_ATTENTION)),
    Peer("sdpa-cudnn", "its CUDNN_ATTENTION backend", _sdpa(SDPBackend.CUDNN_ATTENTION)),
    Peer("flash-attn", "flash_attn.flash_attn_func", _function("flash_attn", "flash_attn_func"), "flash_attn", "BNHD"),
    Peer("ffpa-attn", "ffpa_attn.ffpa_attn_func", _function("ffpa_attn", "ffpa_attn_func"), "ffpa_attn"),
]
BY_NAME = {peer.name: peer for peer in [OURS, *PEERS]}


def prepare(case: Case, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v and dout of a case: normal values, one seed; laid out [B, N, H, D] as models do, seen as [B, H, N, D]."""
    generator = torch.Generator(device).manual_seed(20)

    def draw(heads: int, rows: int, width: int) -> Tensor:
        shape = (case.batch, rows, heads, width)
        return torch.randn(shape, generator=generator, device=device).to(TORCH_DTYPES[case.dtype]).transpose(1, 2)

    q = draw(case.h_q, case.n_q, case.d_qk)
    k = draw(case.h_kv, case.n_kv, case.d_qk)
    v = draw(case.h_kv, case.n_kv, case.d_v)
    return q, k, v, draw(case.h_q, case.n_q, case.d_v)


def as_call(peer: Peer, case: Case, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> Call:
    """One forward, or one forward and backward, of a peer; tensors come in its own layout so that no copy is timed."""
    attention = peer.load()
    if peer.layout == "BNHD":
        q, k, v, dout = (t.transpose(1, 2) for t in (q, k, v, dout))
    q, k, v = (t.detach().requires_grad_(case.work == "fwdbwd") for t in (q, k, v))

    def forward() -> Tensor:
        with torch.no_grad():
            return attention(q, k, v, case.causal)

    def both() -> tuple[Tensor, ...]:
        return torch.autograd.grad(attention(q, k, v, case.causal), (q, k, v), dout)

    return both if case.work == "fwdbwd" else forward


def kernels_of(case: Case, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> str:
    """Names of our kernels that run a case, e.g. "avx512_fwd_tiled + avx512_bwd_tiled"."""
    import ffpa

    passes = (False, True) if case.work == "fwdbwd" else (False,)
    return " + ".join(str(ffpa.explain(q, k, v, causal=case.causal, backward=backward).kernel) for backward in passes)
