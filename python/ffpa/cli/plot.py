"""The picture of a bench run: a bar a case and implementation, one panel a kind of work, the ratio beside ours.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from ffpa.cli.cases import flops
from ffpa.cli.results import Row, summary

# Ours first; a colour-blind safe order (Okabe and Ito) for the peers.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#999999", "#F0E442")
TITLES = {"fwd": "forward", "fwdbwd": "forward and backward", "decode": "decode, one query row"}


def _kind(row: Row) -> str:
    return "decode" if row.case.n_q == 1 and row.case.work == "fwd" else row.case.work


def _short_label(row: Row, shared: set[str]) -> str:
    """The parts of the case's label that differ within its panel."""
    return " ".join(part for part in row.case.label.split()[1:] if part not in shared)


def _panel(axes: Axes, rows: Sequence[Row], names: list[str], baseline: str) -> None:
    shared = set.intersection(*(set(row.case.label.split()) for row in rows)) if len(rows) > 1 else set()
    thickness = 0.8 / len(names)
    rates = [[_gflops(row, name) for row in rows] for name in names]
    widest = max(max(values) for values in rates) or 1.0
    for index, (name, values) in enumerate(zip(names, rates, strict=True)):
        at = [position + (index - (len(names) - 1) / 2) * thickness for position in range(len(rows))]
        axes.barh(at, values, height=thickness * 0.92, color=COLOURS[index % len(COLOURS)], label=name)
        for position, value, row in zip(at, values, rows, strict=True):
            ratio = row.ratios_to(baseline) if name == "ffpa" else []
            text = f"{value:.3g}" + (f"  ({statistics.median(ratio):.2f}x {baseline})" if ratio else "")
            axes.text(value + widest * 0.01, position, text if value else "refused", va="center", fontsize=8)
    axes.set_yticks(range(len(rows)), [_short_label(row, shared) for row in rows], fontsize=9)
    axes.set_ylim(len(rows) - 0.4, -0.6)  # first case on top
    axes.set_xlim(0, widest * 1.25)
    axes.set_title(
        f"{TITLES[_kind(rows[0])]}   {' '.join(p for p in rows[0].case.label.split()[1:] if p in shared)}",
        loc="left",
        fontsize=11,
    )
    axes.set_xlabel("GFLOP/s, counted over visible pairs", fontsize=9)
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _gflops(row: Row, name: str) -> float:
    timing = row.timings[name]
    return 0.0 if timing.refused else flops(row.case) / timing.median / 1e9


def save(rows: list[Row], peers: list[str], machine: dict[str, object], path: Path) -> None:
    names = ["ffpa", *peers]
    kinds = [[row for row in rows if _kind(row) == kind] for kind in TITLES]
    panels = [panel for panel in kinds if panel]
    heights = [0.9 + len(panel) * 0.26 * (len(names) * 0.75 + 0.25) for panel in panels]
    figure, all_axes = plt.subplots(
        len(panels), 1, figsize=(11, sum(heights) + 1.2), height_ratios=heights, squeeze=False, layout="constrained"
    )
    for axes, panel in zip(all_axes[:, 0], panels, strict=True):
        _panel(axes, panel, names, peers[0] if peers else "")
    all_axes[0, 0].legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=len(names), frameon=False, fontsize=9)
    found = summary(rows, peers[0]) if peers else None
    mean = f"geometric mean {found[0]:.2f}x {peers[0]} over {found[2]} cases. " if found else ""
    figure.suptitle(
        f"{mean}{machine.get('device') or machine.get('cpu')}, {machine.get('threads')} threads",
        fontsize=12,
        x=0.01,
        ha="left",
    )
    figure.savefig(path, dpi=130)
    plt.close(figure)
