"""What is measured: one attention shape a case, their named sets, and the work that a case counts.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

PASSES = ("fwd", "bwd", "fwdbwd")
OPTIONS = ("none", "softcap", "bias", "bias-fp32", "mask", "alibi", "dropout", "negative-scale")
DTYPES = ("fp32", "bf16", "fp16")
DTYPE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True)
class Case:
    """One shape: q [B, H_q, N_q, D_qk], k [B, H_kv, N_kv, D_qk], v [B, H_kv, N_kv, D_v]; causal from the top left.

    The pass "bwd" is dq, dk and dv after one forward that is not timed. Options: softcap 30; a bias of the case's dtype
    or fp32, a mask of 7 keys in 8, each [B, H_q, N_q, N_kv]; ALiBi slopes [H_q]; dropout 0.1; a scale of
    -1/sqrt(D_qk).
    """

    batch: int = 1
    h_q: int = 4
    h_kv: int = 4
    n_q: int = 2048
    n_kv: int = 2048
    d_qk: int = 512
    d_v: int = 512
    dtype: str = "bf16"
    causal: bool = False
    work: str = "fwd"  # one of PASSES
    option: str = "none"  # one of OPTIONS

    def __post_init__(self) -> None:
        if self.work not in PASSES:
            raise ValueError(f"pass must be one of {', '.join(PASSES)}, but is {self.work}")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, but is {self.dtype}")
        if self.option not in OPTIONS:
            raise ValueError(f"option must be one of {', '.join(OPTIONS)}, but is {self.option}")
        for name in ("batch", "h_q", "h_kv", "n_q", "n_kv", "d_qk", "d_v"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, but is {getattr(self, name)}")
        if self.h_q % self.h_kv:
            raise ValueError(f"h_q must be a multiple of h_kv, {self.h_kv}, but is {self.h_q}")

    @property
    def label(self) -> str:
        """A short line, e.g. "fwd B1 H8/2 N1x16384 D512 bf16 causal"."""
        heads = f"H{self.h_q}" if self.h_q == self.h_kv else f"H{self.h_q}/{self.h_kv}"
        rows = f"N{self.n_q}" if self.n_q == self.n_kv else f"N{self.n_q}x{self.n_kv}"
        width = f"D{self.d_qk}" if self.d_qk == self.d_v else f"D{self.d_qk}/{self.d_v}"
        words = [self.work, f"B{self.batch}", heads, rows, width, self.dtype, "causal" if self.causal else "full"]
        return " ".join(words if self.option == "none" else [*words, self.option])


def visible_pairs(n_q: int, n_kv: int, causal: bool) -> int:
    """How many (row, key) pairs of one head are visible: all, or those up to the diagonal from the top left."""
    if not causal:
        return n_q * n_kv
    on_triangle = min(n_q, n_kv)
    return on_triangle * (on_triangle + 1) // 2 + (n_q - on_triangle) * n_kv


def flops(case: Case) -> int:
    """Counted floating-point operations: 2 for a multiply-add over visible pairs, softmax not counted.

    Forward: QK' (D_qk) and PV (D_v). Backward: S again, dQ and dK (D_qk each), dP and dV (D_v each), whatever a kernel
    recomputes beyond that.
    """
    widths = 0
    if case.work != "bwd":
        widths += case.d_qk + case.d_v
    if case.work != "fwd":
        widths += 3 * case.d_qk + 2 * case.d_v
    return 2 * case.batch * case.h_q * visible_pairs(case.n_q, case.n_kv, case.causal) * widths


def bytes_touched(case: Case) -> int:
    """Bytes of q, k, v and o, each once: the least that the forward moves."""
    elems_q = case.batch * case.h_q * case.n_q * (case.d_qk + case.d_v)
    elems_kv = case.batch * case.h_kv * case.n_kv * (case.d_qk + case.d_v)
    return DTYPE_BYTES[case.dtype] * (elems_q + elems_kv)


AXES = ("D", "N")


def swept(case: Case, axis: str) -> int:
    """Where a case stands on an axis of `AXES`."""
    return case.d_qk if axis == "D" else case.n_q


def sweep(cases: Sequence[Case], axis: str) -> list[Case]:
    """The cases that sweep over an axis: square ones, else alike, at three values or more; empty if there are none.

    Over D the number of heads may change, over N the batch may, if batch * N stays.
    """
    groups: dict[tuple[object, ...], list[Case]] = {}
    for case in cases:
        if case.d_qk == case.d_v and case.n_q == case.n_kv and case.h_q == case.h_kv:
            fixed = (case.batch, case.n_q) if axis == "D" else (case.batch * case.n_q, case.h_q, case.d_qk)
            groups.setdefault((*fixed, case.dtype, case.work, case.option), []).append(case)
    values = {key: len({swept(case, axis) for case in group}) for key, group in groups.items()}
    longest = max(values, key=lambda key: values[key], default=None)
    return groups[longest] if longest is not None and values[longest] >= 3 else []


# ----------------------------------------------------------------------------------------------------------- named sets


def _grid(works: Iterable[str], dtypes: Iterable[str], widths: Iterable[int], base: Case) -> list[Case]:
    return [
        replace(base, work=work, dtype=dtype, d_qk=d, d_v=d, causal=causal)
        for work, dtype, d, causal in itertools.product(works, dtypes, widths, (False, True))
    ]


_CPU = Case(batch=1, h_q=4, h_kv=4, n_q=2048, n_kv=2048)
_CPU_WIDTHS = (128, 256, 512, 1024)


def _cpu_forward() -> list[Case]:
    return _grid(["fwd"], ["fp32", "bf16"], _CPU_WIDTHS, _CPU)


def _cpu_backward() -> list[Case]:
    return _grid(["fwdbwd"], ["fp32", "bf16"], _CPU_WIDTHS, _CPU)


def _cpu_decode() -> list[Case]:
    decode = Case(batch=8, h_q=8, h_kv=2, n_q=1, n_kv=16384, d_qk=512, d_v=512)
    return [replace(decode, dtype=dtype) for dtype in ("fp32", "bf16")]


def _quick() -> list[Case]:
    small = Case(batch=1, h_q=4, h_kv=4, n_q=512, n_kv=512)
    decode = Case(batch=4, h_q=8, h_kv=2, n_q=1, n_kv=4096, d_qk=512, d_v=512)
    return [
        *_grid(["fwd"], ["fp32", "bf16"], [256, 512], small),
        replace(small, work="fwdbwd", dtype="fp32"),
        replace(small, work="fwdbwd", dtype="bf16"),
        decode,
    ]


def _gpu() -> list[Case]:
    wide = Case(batch=1, h_q=32, h_kv=32, n_q=8192, n_kv=8192)
    wider = replace(wide, h_q=16, h_kv=16)
    decode = Case(batch=16, h_q=32, h_kv=4, n_q=1, n_kv=8192, d_qk=512, d_v=512)
    return [
        *_grid(["fwd", "fwdbwd"], ["bf16"], [64, 128, 256, 320, 512], wide),
        *_grid(["fwd", "fwdbwd"], ["bf16"], [768, 1024], wider),
        decode,
        replace(decode, batch=1, n_kv=65536),
    ]


_LONG = Case(batch=1, h_q=32, h_kv=32, n_q=8192, n_kv=8192)
_LONG_WIDE = replace(_LONG, h_q=16, h_kv=16)  # D >= 768


def _over_d(work: str) -> list[Case]:
    return [
        *_grid([work], ["bf16"], [64, 128, 256, 320, 384, 512, 640], _LONG),
        *_grid([work], ["bf16"], [768, 1024], _LONG_WIDE),
    ]


def _over_n(work: str) -> list[Case]:
    """16 heads of D 512, 16384 query rows a head in all."""
    return [
        replace(_LONG_WIDE, work=work, batch=16384 // n, n_q=n, n_kv=n, causal=causal)
        for n in (512, 1024, 2048, 4096, 8192, 16384)
        for causal in (False, True)
    ]


def _apart(work: str) -> list[Case]:
    """Shapes beside the sweeps: few heads, grouped heads, head dims between the listed ones, D_qk unlike D_v, fp16."""
    base = replace(_LONG, work=work)
    wide = replace(_LONG_WIDE, work=work)
    return [
        replace(base, batch=4, h_q=8, h_kv=8, n_q=4096, n_kv=4096, causal=True),
        replace(base, h_kv=4),
        *(replace(base, d_qk=d, d_v=d) for d in (264, 328, 400, 520)),
        replace(wide, d_qk=1000, d_v=1000),
        replace(base, d_qk=576, d_v=512),
        replace(base, d_qk=192, d_v=128),
        replace(base, dtype="fp16"),
        *(replace(base, option=option) for option in OPTIONS if option != "none"),
    ]


SETS: dict[str, tuple[str, Callable[[], list[Case]]]] = {
    "quick": ("a few seconds: forward, backward and decode at D 256 and 512", _quick),
    "cpu": (
        "the CPU figures of the README: cpu-fwd, cpu-bwd and cpu-decode",
        lambda: [
            *_cpu_forward(),
            *_cpu_backward(),
            *_cpu_decode(),
        ],
    ),
    "cpu-fwd": ("B1 H4 N2048, D 128 to 1024, full and causal, fp32 and bf16, forward", _cpu_forward),
    "cpu-bwd": ("the same, forward and backward together", _cpu_backward),
    "cpu-decode": ("B8 H_q 8 H_kv 2 N_kv 16384 D 512, one query row", _cpu_decode),
    "over-d": ("B1 H32 N8192 bf16 (H16 from D 768), D 64 to 1024, forward", lambda: _over_d("fwd")),
    "over-n": ("H16 D512 bf16, N 512 to 16384, 16384 rows in all, forward", lambda: _over_n("fwd")),
    "apart": ("options, grouped heads, head dims between, fp16; mostly D 512, forward", lambda: _apart("fwd")),
    "over-d-bwd": ("over-d, the backward alone", lambda: _over_d("bwd")),
    "over-n-bwd": ("over-n, the backward alone", lambda: _over_n("bwd")),
    "apart-bwd": ("apart, the backward alone", lambda: _apart("bwd")),
    "gpu": ("B1 H32 N8192 bf16, D 64 to 1024, forward and backward, and decode", _gpu),
}
