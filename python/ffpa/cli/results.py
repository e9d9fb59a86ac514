"""Figures of one `ffpa bench` run: the table on the terminal and the record in JSON.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import math
import statistics
from dataclasses import asdict, dataclass

from rich.table import Table
from rich.text import Text

from ffpa.cli.cases import Case, bytes_touched, flops
from ffpa.cli.measure import Timing, half_quartiles, ratios


@dataclass
class Row:
    """One case: a timing for each implementation, "ffpa" among them, and the name of the kernel that ran it.

    `gemm`: the timing of a square product of `gemm_n` rows in the same rounds, if one was asked for.
    """

    case: Case
    kernel: str
    timings: dict[str, Timing]
    gemm: Timing | None = None
    gemm_n: int = 0

    def rate(self, name: str) -> float:
        """FLOP/s, counted over visible pairs; 0 if refused."""
        timing = self.timings[name]
        return 0.0 if timing.refused else flops(self.case) / timing.median

    def shares_of_gemm(self) -> list[float]:
        """Our FLOP/s over the product's, round by round; empty without one or if we were refused."""
        ours = self.timings["ffpa"]
        if self.gemm is None or ours.refused or self.gemm.refused:
            return []
        counted = flops(self.case) / (2 * self.gemm_n**3)
        return [counted * ratio for ratio in ratios(self.gemm, ours)]

    def ratios_to(self, peer: str) -> list[float]:
        """How many times faster than the peer, round by round; empty if either was refused."""
        ours, theirs = self.timings["ffpa"], self.timings[peer]
        return [] if ours.refused or theirs.refused else ratios(theirs, ours)


def geometric_mean(values: list[float]) -> float:
    return math.exp(statistics.fmean(math.log(value) for value in values))


def summary(rows: list[Row], peer: str) -> tuple[float, float, int] | None:
    """Geometric mean and smallest of the cases' median ratios, and their count; None without any."""
    medians = [statistics.median(values) for row in rows if (values := row.ratios_to(peer))]
    return (geometric_mean(medians), min(medians), len(medians)) if medians else None


def duration(seconds: float) -> str:
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    return f"{seconds * 1e3:.2f} ms" if seconds < 1 else f"{seconds:.2f} s"


def rate(value: float) -> str:
    """Three figures with a prefix: 1.61e12 is "1.61 T"."""
    for factor, prefix in ((1e12, "T"), (1e9, "G")):
        if value >= factor:
            return f"{value / factor:.3g} {prefix}"
    return f"{value / 1e6:.3g} M"


def table(rows: list[Row], peers: list[str]) -> Table:
    """One line a case. The ratio columns say how many times faster ffpa is than the peer."""
    grid = Table()
    grid.add_column("case", no_wrap=True)
    for heading in ("ffpa", "FLOP/s", "B/s"):
        grid.add_column(heading, justify="right", no_wrap=True)
    with_gemm = any(row.gemm for row in rows)
    if with_gemm:
        grid.add_column("of GEMM", justify="right", no_wrap=True)
    for peer in peers:
        grid.add_column(peer, justify="right", no_wrap=True)
        grid.add_column(f"x {peer}", justify="right", no_wrap=True)
    grid.add_column("kernel", overflow="fold")
    for row in rows:
        ours = row.timings["ffpa"]
        cells: list[str | Text] = [row.case.label]
        if ours.refused:
            cells += [Text("refused", style="red"), "", ""]
        else:
            cells += [
                f"{duration(ours.median)} ±{ours.spread:.0%}",
                rate(row.rate("ffpa")),
                rate(bytes_touched(row.case) / ours.median) if row.case.work == "fwd" else "",
            ]
        if with_gemm:
            shares = row.shares_of_gemm()
            cells.append(f"{statistics.median(shares):.2f} ±{half_quartiles(shares):.2f}" if shares else "")
        for peer in peers:
            theirs = row.timings[peer]
            values = row.ratios_to(peer)
            cells.append("refused" if theirs.refused else f"{duration(theirs.median)} ±{theirs.spread:.0%}")
            cells.append(_ratio_cell(values) if values else "")
        grid.add_row(*cells, row.kernel)
    return grid


def _ratio_cell(values: list[float]) -> Text:
    median = statistics.median(values)
    style = "green" if median >= 1.05 else "red" if median < 0.95 else ""
    return Text(f"{median:.2f} ±{half_quartiles(values):.2f}", style=style)


def record(rows: list[Row], peers: list[str], machine: dict[str, object]) -> dict[str, object]:
    """All of it as plain values: seconds of every round, not only the medians."""
    return {
        "machine": machine,
        "method": "interleaved rounds; ratio = peer's seconds / ffpa's within a round; share of GEMM = FLOP/s of ffpa "
        "over those of a product of two matrices [gemm_n, gemm_n] of the case's dtype within a round",
        "cases": [
            {
                "label": row.case.label,
                **asdict(row.case),
                "flops": flops(row.case),
                "bytes": bytes_touched(row.case),
                "kernel": row.kernel,
                "seconds": {name: timing.seconds for name, timing in row.timings.items()},
                "refused": {name: timing.refused for name, timing in row.timings.items() if timing.refused},
                "ratio": {peer: statistics.median(values) for peer in peers if (values := row.ratios_to(peer))},
                **_gemm_record(row),
            }
            for row in rows
        ],
        "summary": {
            peer: {"geometric_mean": found[0], "smallest": found[1], "cases": found[2]}
            for peer in peers
            if (found := summary(rows, peer))
        },
    }


def _gemm_record(row: Row) -> dict[str, object]:
    if row.gemm is None:
        return {}
    shares = row.shares_of_gemm()
    return {
        "gemm_n": row.gemm_n,
        "gemm_seconds": row.gemm.seconds,
        "share_of_gemm": statistics.median(shares) if shares else None,
    }
