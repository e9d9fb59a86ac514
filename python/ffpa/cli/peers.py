"""The implementations that `ffpa bench` knows: ours, and those peers that this Python has installed.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ffpa.cli.cases import Case
from ffpa.cli.measure import Call

TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}


@dataclass(frozen=True)
class Inputs:
    """Tensors of a case: q, k, v and dout as `Case` says; `mask` is the bool mask or the bias, `slopes` are ALiBi's."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    mask: Tensor | None = None
    slopes: Tensor | None = None


SOFTCAP = 30.0
DROPOUT = 0.1

# (case, its inputs, q, k and v in the peer's layout) -> o
Attention = Callable[[Case, Inputs, Tensor, Tensor, Tensor], Tensor]


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


def our_options(case: Case, inputs: Inputs) -> dict[str, Any]:
    """Keyword arguments of `ffpa.attention` and `ffpa.explain` for a case."""
    options: dict[str, Any] = {"causal": case.causal}
    if case.option == "softcap":
        options["softcap"] = SOFTCAP
    elif case.option == "mask":
        options["mask"] = inputs.mask
    elif case.option in ("bias", "bias-fp32"):
        options["bias"] = inputs.mask
    elif case.option == "alibi":
        options["alibi_slopes"] = inputs.slopes
    elif case.option == "dropout":
        options["dropout_p"] = DROPOUT
    elif case.option == "negative-scale":
        options["scale"] = _negative_scale(case)
    return options


def _negative_scale(case: Case) -> float:
    return float(-(case.d_qk**-0.5))


def _ours() -> Attention:
    import ffpa

    def run(case: Case, inputs: Inputs, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        o = ffpa.attention(q, k, v, **our_options(case, inputs))
        assert isinstance(o, Tensor)
        return o

    return run


def _sdpa(backend: SDPBackend | None) -> Callable[[], Attention]:
    def load() -> Attention:
        def run(case: Case, inputs: Inputs, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if case.option in ("softcap", "alibi"):
                raise NotImplementedError(f"has no {case.option}")
            chosen = sdpa_kernel(backend) if backend is not None else contextlib.nullcontext()
            with chosen:
                return F.scaled_dot_product_attention(
                    q,
                    k,
                    v,
                    attn_mask=inputs.mask,
                    dropout_p=DROPOUT if case.option == "dropout" else 0.0,
                    is_causal=case.causal,
                    scale=_negative_scale(case) if case.option == "negative-scale" else None,
                    enable_gqa=q.shape[1] != k.shape[1],
                )

        return run

    return load


def _function(module: str, name: str, takes: Sequence[str]) -> Callable[[], Attention]:
    """A peer's function (q, k, v, causal=...) that has the options `takes`, named as flash-attn names them."""

    def load() -> Attention:
        function: Callable[..., Any] = getattr(importlib.import_module(module), name)

        def run(case: Case, inputs: Inputs, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            options: dict[str, Any] = {"causal": case.causal}
            if case.option != "none":
                if case.option not in takes:
                    raise NotImplementedError(f"has no {case.option}")
                keyword, value = {
                    "softcap": ("softcap", SOFTCAP),
                    "alibi": ("alibi_slopes", inputs.slopes),
                    "dropout": ("dropout_p", DROPOUT),
                    "negative-scale": ("softmax_scale", _negative_scale(case)),
                }[case.option]
                options[keyword] = value
            o = function(q, k, v, **options)
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
    Peer(
        "flash-attn",
        "flash_attn.flash_attn_func",
        _function("flash_attn", "flash_attn_func", ("softcap", "alibi", "dropout", "negative-scale")),
        "flash_attn",
        "BNHD",
    ),
    Peer("ffpa-attn", "ffpa_attn.ffpa_attn_func", _function("ffpa_attn", "ffpa_attn_func", ()), "ffpa_attn"),
]
BY_NAME = {peer.name: peer for peer in [OURS, *PEERS]}


def prepare(case: Case, device: str) -> Inputs:
    """Normal values of one seed; q, k, v, dout laid out [B, N, H, D] as models do, seen as [B, H, N, D]."""
    generator = torch.Generator(device).manual_seed(20)
    dtype = TORCH_DTYPES[case.dtype]

    def draw(heads: int, rows: int, width: int) -> Tensor:
        shape = (case.batch, rows, heads, width)
        return torch.randn(shape, generator=generator, device=device).to(dtype).transpose(1, 2)

    q = draw(case.h_q, case.n_q, case.d_qk)
    k = draw(case.h_kv, case.n_kv, case.d_qk)
    v = draw(case.h_kv, case.n_kv, case.d_v)
    dout = draw(case.h_q, case.n_q, case.d_v)
    scores = (case.batch, case.h_q, case.n_q, case.n_kv)
    mask = slopes = None
    if case.option == "mask":
        mask = torch.randint(8, scores, generator=generator, device=device, dtype=torch.uint8) > 0
    elif case.option in ("bias", "bias-fp32"):
        mask_dtype = torch.float32 if case.option == "bias-fp32" else dtype
        mask = torch.randn(scores, generator=generator, device=device, dtype=mask_dtype)
    elif case.option == "alibi":
        slopes = torch.logspace(-1, -8, case.h_q, base=2.0, device=device)
    return Inputs(q, k, v, dout, mask, slopes)


def as_call(peer: Peer, case: Case, inputs: Inputs) -> Call:
    """One pass of a peer; tensors come in its own layout so that no copy is timed."""
    attention = peer.load()
    tensors = [inputs.q, inputs.k, inputs.v, inputs.dout]
    if peer.layout == "BNHD":
        tensors = [t.transpose(1, 2) for t in tensors]
    *leaves, dout = tensors
    q, k, v = (t.detach().requires_grad_(case.work != "fwd") for t in leaves)
    after: list[Tensor] = []  # the output whose backward is timed, made by the first call

    def forward() -> Tensor:
        with torch.no_grad():
            return attention(case, inputs, q, k, v)

    def backward() -> tuple[Tensor, ...]:
        if not after:
            after.append(attention(case, inputs, q, k, v))
        return torch.autograd.grad(after[0], (q, k, v), dout, retain_graph=True)

    def both() -> tuple[Tensor, ...]:
        return torch.autograd.grad(attention(case, inputs, q, k, v), (q, k, v), dout)

    return {"fwd": forward, "bwd": backward, "fwdbwd": both}[case.work]


def gemm(n: int, dtype: str, device: str) -> Call:
    """The product of two normal n x n matrices by torch (cuBLAS on a GPU): what the machine gives a dense product."""
    generator = torch.Generator(device).manual_seed(21)
    a, b = (torch.randn(n, n, generator=generator, device=device).to(TORCH_DTYPES[dtype]) for _ in range(2))
    out = torch.empty_like(a)
    return lambda: torch.mm(a, b, out=out)


def kernels_of(case: Case, inputs: Inputs) -> str:
    """Names of our kernels that run a case, e.g. "avx512_fwd_tiled + avx512_bwd_tiled"."""
    import ffpa

    passes = {"fwd": (False,), "bwd": (True,), "fwdbwd": (False, True)}[case.work]
    options = our_options(case, inputs)
    explained = (ffpa.explain(inputs.q, inputs.k, inputs.v, backward=backward, **options) for backward in passes)
    return " + ".join(str(one.kernel) for one in explained)
