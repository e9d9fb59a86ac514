"""Pictures of a bench run: bars (one a case and implementation, a panel a kind of work), and curves over D and N.

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

from ffpa.cli.cases import AXES, sweep, swept
from ffpa.cli.results import Row, summary

# Ours first; a colour-blind safe order (Okabe and Ito) for the peers.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#999999", "#F0E442")
TITLES = {"fwd": "forward", "bwd": "backward", "fwdbwd": "forward and backward", "decode": "decode, one query row"}


def _kind(row: Row) -> str:
    return "decode" if row.case.n_q == 1 and row.case.work == "fwd" else row.case.work


def _short_label(row: Row, shared: set[str]) -> str:
    """The parts of the case's label that differ within its panel."""
    return " ".join(part for part in row.case.label.split()[1:] if part not in shared)


def _panel(axes: Axes, rows: Sequence[Row], names: list[str], baseline: str) -> None:
    shared = set.intersection(*(set(row.case.label.split()) for row in rows)) if len(rows) > 1 else set()
    thickness = 0.8 / len(names)
    rates = [[row.rate(name) / 1e9 for row in rows] for name in names]
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


# --------------------------------------------------------------------------------------------------------------- curves


def _curve_panel(axes: Axes, rows: list[Row], names: list[str], axis: str) -> None:
    places = sorted({swept(row.case, axis) for row in rows})
    for index, name in enumerate(names):
        for causal, style in ((False, "-"), (True, "--")):
            points = sorted(
                (swept(row.case, axis), row.rate(name) / 1e12)
                for row in rows
                if row.case.causal == causal and row.rate(name)
            )
            if points:
                axes.plot(
                    *zip(*points, strict=True),
                    style,
                    marker="o",
                    markersize=4,
                    color=COLOURS[index % len(COLOURS)],
                    label=f"{name}, {'causal' if causal else 'full'}",
                )
    products = sorted(
        (swept(row.case, axis), 2 * row.gemm_n**3 / row.gemm.median / 1e12)
        for row in rows
        if row.gemm is not None and not row.gemm.refused and not row.case.causal
    )
    if products:
        axes.plot(*zip(*products, strict=True), ":", color="black", label=f"GEMM {rows[0].gemm_n}^3")
    shared = set.intersection(*(set(row.case.label.split()) for row in rows))
    axes.set_title(
        f"{TITLES[_kind(rows[0])]} over {axis}   {' '.join(p for p in rows[0].case.label.split()[1:] if p in shared)}",
        loc="left",
        fontsize=11,
    )
    axes.set_xscale("log", base=2)
    axes.set_xticks(places, [str(place) for place in places], rotation=45, fontsize=8)
    axes.minorticks_off()
    axes.set_xlabel("head dim" if axis == "D" else "query rows and keys", fontsize=9)
    axes.set_ylabel("TFLOP/s, counted over visible pairs", fontsize=9)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def save_curves(rows: list[Row], peers: list[str], machine: dict[str, object], path: Path) -> None:
    """TFLOP/s over D and over N, a panel for each sweep that the cases hold."""
    cases = [row.case for row in rows]
    found = {axis: set(sweep(cases, axis)) for axis in AXES}
    panels = [(axis, [row for row in rows if row.case in wanted]) for axis, wanted in found.items() if wanted]
    figure, all_axes = plt.subplots(1, len(panels), figsize=(7.5 * len(panels), 5), squeeze=False, layout="constrained")
    for axes, (axis, swept_rows) in zip(all_axes[0], panels, strict=True):
        _curve_panel(axes, swept_rows, ["ffpa", *peers], axis)
    handles, labels = all_axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 5), frameon=False, fontsize=9)
    figure.suptitle(f"{machine.get('device') or machine.get('cpu')}, commit {machine.get('commit')}", x=0.01, ha="left")
    figure.savefig(path, dpi=130)
    plt.close(figure)
