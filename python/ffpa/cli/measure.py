"""Timing in interleaved pairs.

One round runs every implementation once, in an order that turns by one from round to round, so that a change of the
machine's clock or of its other load meets all of them alike. A turn first makes a call that is not timed (it wakes the
threads and warms caches that another's turn left cold), then times calls until `TURN_SECONDS` are over. Figures are
medians over the rounds; a ratio is the median of the ratios within a round; a spread is half the distance between the
quartiles. On CUDA, calls are timed by events on the stream, and the L2 cache is overwritten before each.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

TURN_SECONDS = 0.05
L2_EVICT_BYTES = 256 << 20

Call = Callable[[], object]


@dataclass
class Timing:
    """Seconds a call, one entry a round; `refused` says why there are none."""

    seconds: list[float] = field(default_factory=list)
    refused: str | None = None

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """Half the distance between the quartiles, as a fraction of the median."""
        return half_quartiles(self.seconds) / self.median


def half_quartiles(values: list[float]) -> float:
    if len(values) < 2:
        return 0.0
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return (high - low) / 2


def ratios(numerator: Timing, denominator: Timing) -> list[float]:
    """How many times faster `denominator` is than `numerator`, round by round."""
    return [a / b for a, b in zip(numerator.seconds, denominator.seconds, strict=True)]


def time_host(call: Call) -> float:
    call()
    start = now = time.perf_counter()
    calls = 0
    while calls == 0 or now - start < TURN_SECONDS:
        call()
        calls += 1
        now = time.perf_counter()
    return (now - start) / calls


def time_cuda(call: Call) -> float:
    evict = torch.empty(L2_EVICT_BYTES, dtype=torch.uint8, device="cuda")
    call()
    total, calls = 0.0, 0
    while calls == 0 or total < TURN_SECONDS:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        evict.zero_()
        start.record()
        call()
        end.record()
        end.synchronize()
        total += start.elapsed_time(end) / 1e3
        calls += 1
    return total / calls


def measure(calls: dict[str, Call], device: str, rounds: int, seconds: float) -> dict[str, Timing]:
    """Time all calls for `rounds` rounds, fewer (but at least 3) once `seconds` are over. One that raises is out."""
    clock = time_cuda if device == "cuda" else time_host
    timings = {name: Timing() for name in calls}
    for name, call in calls.items():
        try:
            call()
        except (
            Exception
        ) as error:  # a peer may refuse in any way it likes: NotImplementedError, RuntimeError, out of memory
            timings[name].refused = f"{type(error).__name__}: {error}".splitlines()[0]
    running = [name for name in calls if timings[name].refused is None]
    deadline = time.perf_counter() + seconds
    for turn in range(rounds):
        if turn >= 3 and time.perf_counter() > deadline:
            break
        first = turn % max(len(running), 1)
        for name in running[first:] + running[:first]:
            timings[name].seconds.append(clock(calls[name]))
    return timings
