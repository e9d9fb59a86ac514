"""Commands of `ffpa`: flags in, tables out. What they show is worked out in the modules beside this one.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from ffpa import _native
from ffpa.cli import flags, machine

if TYPE_CHECKING:
    from ffpa.cli.cases import Case
    from ffpa.cli.results import Row

app = typer.Typer(
    help="Exact attention for head dims from 1 to 1024: what this machine runs, whether it is right, how fast it is.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
console = Console(width=None if Console().is_terminal else 150)  # a log keeps whole lines


def _need_torch(command: str) -> None:
    try:
        import torch  # noqa: F401
    except ModuleNotFoundError:
        typer.echo(f"ffpa {command} needs torch: pip install 'ffpa[torch]'", err=True)
        raise typer.Exit(2) from None


def _refuse(text: str) -> typer.BadParameter:
    return typer.BadParameter(text)


def _widths(kernel: _native.KernelInfo) -> str:
    low, high = max(kernel.min_d, 1), kernel.max_d
    return f"{low} to {high}" if high else f"{low} and up"


# ----------------------------------------------------------------------------------------------------------------- info


@app.command()
def info(as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False) -> None:
    """Engines, devices, kernels with their limits, versions."""
    kernels, devices = _native.kernels(), _native.devices()
    if as_json:
        console.print_json(
            json.dumps(
                {
                    "ffpa": _native.version(),
                    "library": str(_native.library_path()),
                    "machine": machine.describe(),
                    "devices": [device._asdict() for device in devices],
                    "kernels": [kernel._asdict() for kernel in kernels],
                }
            )
        )
        return
    packages = ", ".join(f"{name} {version}" for name, version in machine.package_versions().items())
    console.print(f"ffpa {_native.version()}  ({_native.library_path()})", highlight=False)
    console.print(f"with {packages}", highlight=False)

    table = Table()
    for heading in ("device", "name", "features", "processors", "memory"):
        table.add_column(heading, justify="right" if heading in ("processors", "memory") else "left")
    for device in devices:
        table.add_row(
            f"{device.type}:{device.index}",
            device.name,
            device.features,
            str(device.processors),
            f"{device.memory_bytes / 2**30:.1f} GiB",
        )
    _show("devices", table)

    table = Table()
    for heading in ("kernel", "pass", "engine", "dtypes", "head dims", "here", "idea"):
        table.add_column(heading, no_wrap=heading in ("kernel", "dtypes"))
    for kernel in kernels:
        usable = Text("yes", style="green") if kernel.usable else Text("no", style="dim")
        table.add_row(
            kernel.name, kernel.pass_, kernel.engine, " ".join(kernel.dtypes), _widths(kernel), usable, kernel.summary
        )
    _show("kernels, best first", table)


# ---------------------------------------------------------------------------------------------------------------- check


@app.command()
def check(
    kernel: Annotated[str | None, typer.Option(help="Only kernels whose name contains this.")] = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Show every problem, and why one was refused.")
    ] = False,
) -> None:
    """Self-test: every kernel that runs here, against plain attention in float64. Exits with 1 on a wrong result."""
    _need_torch("check")
    from ffpa.cli.check import PROBLEMS, Outcome, check_kernel

    chosen = [k for k in _native.kernels() if k.usable and (kernel is None or kernel in k.name)]
    if not chosen:
        known = ", ".join(k.name for k in _native.kernels() if k.usable)
        raise _refuse(f"--kernel: no usable kernel's name contains {kernel!r}; usable are {known}")
    table = Table()
    for heading in ("kernel", "dtype", "right", "refused", "wrong", "worst"):
        table.add_column(heading, justify="left" if heading in ("kernel", "dtype") else "right", no_wrap=True)
    details: list[Outcome] = []
    work = [(k, dtype) for k in chosen for dtype in k.dtypes]
    with _progress() as progress:
        task = progress.add_task("checking", total=len(work))
        for k, dtype in work:
            progress.update(task, description=f"{k.name} {dtype}")
            device = "cuda" if k.engine == "cuda" else "cpu"
            outcomes = list(check_kernel(k.name, k.pass_ == "backward", dtype, device))
            details += outcomes
            count = Counter("wrong" if o.failed else "refused" if o.refused else "right" for o in outcomes)
            worst = max(o.worst for o in outcomes)
            table.add_row(
                k.name,
                dtype,
                str(count["right"]),
                str(count["refused"] or ""),
                Text(str(count["wrong"] or ""), style="bold red"),
                Text(f"{worst:.0%}", style="red" if worst > 1 else ""),
            )
            progress.advance(task)
    _show(f"{len(PROBLEMS)} problems a line; worst = largest share of the allowed error in use", table)
    wrong = [o for o in details if o.failed]
    for o in details if verbose else wrong:
        verdict = o.failed or (f"refused: {o.refused}" if o.refused else f"right, {o.worst:.0%} of the allowed error")
        console.print(f"{o.kernel} {o.dtype}, {o.problem}: {verdict}", highlight=False, markup=False)
    if wrong:
        console.print(f"{len(wrong)} of {len(details)} results are wrong", style="bold red")
        raise typer.Exit(1)
    console.print(f"all {len(details) - sum(o.refused is not None for o in details)} results are right", style="green")


# ---------------------------------------------------------------------------------------------------------------- bench

GEMM = "GEMM"  # its name among the calls of a round
Sizes = Annotated[str | None, typer.Option(help="One number, or several separated by commas.")]


@app.command()
def bench(
    set_names: Annotated[
        str | None, typer.Option("--set", help="Named shapes, separated by commas; --list shows them.")
    ] = None,
    batch: Sizes = None,
    heads: Annotated[str | None, typer.Option(help="H_q.")] = None,
    kv_heads: Annotated[str | None, typer.Option(help="H_kv; default H_q.")] = None,
    rows: Annotated[str | None, typer.Option("--rows", "-n", help="N_q.")] = None,
    kv_rows: Annotated[str | None, typer.Option(help="N_kv; default N_q.")] = None,
    dim: Annotated[str | None, typer.Option("--dim", "-d", help="D_qk.")] = None,
    v_dim: Annotated[str | None, typer.Option(help="D_v; default D_qk.")] = None,
    dtype: Annotated[str, typer.Option(help="Among fp32, bf16, fp16.")] = "bf16",
    mask: Annotated[str, typer.Option(help="Among full, causal.")] = "full",
    work: Annotated[
        str, typer.Option("--pass", help="Among fwd, bwd (the backward alone), fwdbwd (both together).")
    ] = "fwd",
    option: Annotated[
        str,
        typer.Option(help="Among none, softcap, bias, bias-fp32, mask, alibi, dropout, negative-scale."),
    ] = "none",
    peers: Annotated[
        str, typer.Option(help="Rivals, the first is the baseline of the plot; 'all': those installed; 'none'.")
    ] = "sdpa",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    threads: Annotated[int, typer.Option(help="CPU threads of every implementation; 0 = torch's default.")] = 0,
    rounds: Annotated[int, typer.Option(help="Interleaved rounds a case.")] = 15,
    seconds: Annotated[float, typer.Option(help="A case ends after 3 rounds once these are over.")] = 5.0,
    gemm: Annotated[
        int | None,
        typer.Option(help="Rows of a square product in the same rounds, for a column of ratios; default 8192 on cuda."),
    ] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write all figures to this file.")] = None,
    plot_path: Annotated[Path | None, typer.Option("--plot", help="Write a picture (PNG) to this file.")] = None,
    curves_path: Annotated[
        Path | None, typer.Option("--curves", help="Write curves over D and over N (PNG) to this file.")
    ] = None,
    list_sets: Annotated[bool, typer.Option("--list", help="List named shapes and rivals, then stop.")] = False,
) -> None:
    """Measure against what is installed: interleaved rounds, medians, ratios.

    Shapes come from --set, or from --batch, --heads, --rows, --dim and so on: every combination of what they list.
    """
    _need_torch("bench")
    import torch

    from ffpa.cli import peers as peer_table
    from ffpa.cli import results
    from ffpa.cli.cases import AXES, SETS, sweep

    if list_sets:
        _list_bench()
        return
    by_flags = {
        "--batch": batch,
        "--heads": heads,
        "--kv-heads": kv_heads,
        "--rows": rows,
        "--kv-rows": kv_rows,
        "--dim": dim,
        "--v-dim": v_dim,
    }
    given = [flag for flag, value in by_flags.items() if value is not None]
    if set_names is not None and given:
        raise _refuse(f"--set: names whole shapes, so {', '.join(given)} cannot be given with it")
    if rounds < 1:
        raise _refuse(f"--rounds: must be at least 1, but is {rounds}")
    if threads < 0:
        raise _refuse(f"--threads: must be at least 0, but is {threads}")
    if set_names is not None or not given:
        cases = [case for name in flags.names(set_names or "quick", "--set", list(SETS)) for case in SETS[name][1]()]
    else:
        cases = _grid_from_flags(by_flags, dtype, mask, work, option)
    for path, flag in ((json_path, "--json"), (plot_path, "--plot"), (curves_path, "--curves")):
        if path is not None and not path.absolute().parent.is_dir():
            raise _refuse(f"{flag}: its folder {path.absolute().parent} does not exist")
    if curves_path is not None and not any(sweep(cases, axis) for axis in AXES):
        raise _refuse("--curves: the shapes must hold three values of D, or of N, and be alike in the rest")
    flags.one(device, "--device", ("cpu", "cuda"))
    if device == "cuda" and not torch.cuda.is_available():
        raise _refuse("--device: is cuda, but torch finds no GPU here")
    if gemm is not None and gemm < 0:
        raise _refuse(f"--gemm: must be at least 0 (none), but is {gemm}")
    if peers == "all":
        chosen = [peer.name for peer in peer_table.PEERS if peer.installed]
    elif peers == "none":
        chosen = []
    else:
        chosen = flags.names(peers, "--peers", [peer.name for peer in peer_table.PEERS])
        for name in chosen:
            if not peer_table.BY_NAME[name].installed:
                raise _refuse(f"--peers: {name} is not installed here")
    if threads:
        torch.set_num_threads(threads)
    gemm_n = gemm if gemm is not None else 8192 if device == "cuda" else 0
    measured, host = _run_bench(cases, chosen, device, rounds, seconds, gemm_n)
    _show_bench(measured, chosen, host)
    if json_path is not None:
        json_path.write_text(json.dumps(results.record(measured, chosen, host), indent=1) + "\n")
    if plot_path is not None or curves_path is not None:
        from ffpa.cli import plot

        if plot_path is not None:
            plot.save(measured, chosen, host, plot_path)
        if curves_path is not None:
            plot.save_curves(measured, chosen, host, curves_path)
    if any(row.timings["ffpa"].refused for row in measured):
        raise typer.Exit(1)


def _grid_from_flags(values: dict[str, str | None], dtype: str, mask: str, work: str, option: str) -> list[Case]:
    import itertools

    from ffpa.cli.cases import DTYPES, OPTIONS, PASSES, Case

    defaults = {"--batch": "1", "--heads": "4", "--rows": "2048", "--dim": "512"}
    lists = {flag: flags.numbers(text, flag) for flag in values if (text := values[flag] or defaults.get(flag))}
    cases = []
    for b, h, n, d in itertools.product(lists["--batch"], lists["--heads"], lists["--rows"], lists["--dim"]):
        for h_kv, n_kv, d_v in itertools.product(
            lists.get("--kv-heads", [h]), lists.get("--kv-rows", [n]), lists.get("--v-dim", [d])
        ):
            choices = itertools.product(
                flags.names(work, "--pass", PASSES),
                flags.names(dtype, "--dtype", DTYPES),
                flags.names(mask, "--mask", ("full", "causal")),
                flags.names(option, "--option", OPTIONS),
            )
            for w, t, m, x in choices:
                try:
                    cases.append(Case(b, h, h_kv, n, n_kv, d, d_v, t, m == "causal", w, x))
                except ValueError as error:
                    raise _refuse(str(error)) from None
    return cases


def _list_bench() -> None:
    from ffpa.cli.cases import SETS
    from ffpa.cli.peers import PEERS

    table = Table("--set", "cases", "what")
    for name, (what, make) in SETS.items():
        table.add_row(name, str(len(make())), what)
    _show("named shapes", table)
    table = Table("--peers", "here", "what")
    for peer in PEERS:
        table.add_row(peer.name, "yes" if peer.installed else "no", peer.note)
    _show("rivals", table)


def _run_bench(
    cases: list[Case], chosen: list[str], device: str, rounds: int, seconds: float, gemm_n: int
) -> tuple[list[Row], dict[str, object]]:
    import torch

    from ffpa.cli import results
    from ffpa.cli.measure import measure
    from ffpa.cli.peers import BY_NAME, as_call, gemm, kernels_of, prepare

    host = machine.describe() | {"threads": torch.get_num_threads()}
    if device == "cuda":
        host["device"] = torch.cuda.get_device_name()
        host["gpu_before"] = machine.gpu()
    measured: list[results.Row] = []
    with _progress() as progress:
        task = progress.add_task("bench", total=len(cases))
        for case in cases:
            progress.update(task, description=case.label)
            inputs = prepare(case, device)
            calls = {name: as_call(BY_NAME[name], case, inputs) for name in ["ffpa", *chosen]}
            if gemm_n:
                calls[GEMM] = gemm(gemm_n, case.dtype, device)
            timings = measure(calls, device, rounds, seconds)
            product = timings.pop(GEMM, None)
            measured.append(results.Row(case, kernels_of(case, inputs), timings, product, gemm_n))
            progress.advance(task)
    if device == "cuda":
        host["gpu_after"] = machine.gpu()
    return measured, host


def _show_bench(measured: list[Row], chosen: list[str], host: dict[str, object]) -> None:
    from ffpa.cli import results

    console.print(
        f"{host.get('device') or host['cpu']}, {host['threads']} threads, commit {host['commit']}", highlight=False
    )
    _show("medians; ± is half the distance between the quartiles", results.table(measured, chosen))
    products = [row.gemm.median for row in measured if row.gemm is not None and not row.gemm.refused]
    if products:
        n = measured[0].gemm_n
        low, high = (results.rate(2 * n**3 / seconds) for seconds in (max(products), min(products)))
        console.print(f"GEMM {n}^3 in the same rounds: {low} to {high}FLOP/s over the cases", highlight=False)
    for peer in chosen:
        found = results.summary(measured, peer)
        if found:
            console.print(
                f"geometric mean {found[0]:.2f}x {peer} over {found[2]} cases, smallest {found[1]:.2f}x",
                highlight=False,
            )
    for row in measured:
        for name, timing in row.timings.items():
            if timing.refused:
                console.print(
                    f"{row.case.label}: {name} refused: {timing.refused}", highlight=False, markup=False, style="dim"
                )


# -------------------------------------------------------------------------------------------------------------- explain


@app.command()
def explain(
    batch: Annotated[int, typer.Option(min=0, help="B.")] = 1,
    heads: Annotated[int, typer.Option(min=0, help="H_q.")] = 8,
    kv_heads: Annotated[int | None, typer.Option(min=0, help="H_kv; default H_q.")] = None,
    rows: Annotated[int, typer.Option("--rows", "-n", min=0, help="N_q.")] = 1024,
    kv_rows: Annotated[int | None, typer.Option(min=0, help="N_kv; default N_q.")] = None,
    dim: Annotated[int, typer.Option("--dim", "-d", min=0, help="D_qk.")] = 512,
    v_dim: Annotated[int | None, typer.Option(min=0, help="D_v; default D_qk.")] = None,
    dtype: Annotated[str, typer.Option(help="fp64, fp32, bf16 or fp16.")] = "bf16",
    backward: Annotated[bool, typer.Option("--backward", help="The backward pass instead of the forward.")] = False,
    causal: Annotated[bool, typer.Option("--causal")] = False,
    anchor: Annotated[str, typer.Option(help="Diagonal: top_left or bottom_right.")] = "top_left",
    window: Annotated[str, typer.Option(help="LEFT,RIGHT keys around the diagonal; -1 = unbounded.")] = "-1,-1",
    softcap: Annotated[float, typer.Option()] = 0.0,
    scale: Annotated[float | None, typer.Option(help="Default 1/sqrt(D_qk).")] = None,
    dropout: Annotated[float, typer.Option(help="Probability.")] = 0.0,
    mask: Annotated[bool, typer.Option("--mask", help="With a bool mask [B, H_q, N_q, N_kv].")] = False,
    bias: Annotated[bool, typer.Option("--bias", help="With an additive mask [B, H_q, N_q, N_kv].")] = False,
    alibi: Annotated[bool, typer.Option("--alibi", help="With ALiBi slopes.")] = False,
    sinks: Annotated[bool, typer.Option("--sinks", help="With a sink a head.")] = False,
    deterministic: Annotated[bool, typer.Option("--deterministic")] = False,
    num_splits: Annotated[int, typer.Option(min=0, help="Parts of N_kv; 0 = planned.")] = 0,
    engine: Annotated[str | None, typer.Option(help="ref, cpu or cuda.")] = None,
    kernel: Annotated[str | None, typer.Option(help="A kernel by name.")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
) -> None:
    """What would run for a problem, and why every better kernel was refused."""
    _need_torch("explain")
    import torch

    import ffpa
    from ffpa.cli.peers import TORCH_DTYPES

    flags.one(device, "--device", ("cpu", "cuda"))
    if device == "cuda" and not torch.cuda.is_available():
        raise _refuse("--device: is cuda, but torch finds no GPU here")
    flags.one(dtype, "--dtype", list(TORCH_DTYPES))
    flags.one(anchor, "--anchor", ("top_left", "bottom_right"))
    if engine is not None:
        flags.one(engine, "--engine", ("ref", "cpu", "cuda"))
    try:
        left, right = (int(piece) for piece in window.split(","))
    except ValueError:
        raise _refuse(f"--window: must be two whole numbers LEFT,RIGHT, but is {window!r}") from None

    h_kv, n_kv, d_v = (
        (heads if kv_heads is None else kv_heads),
        (rows if kv_rows is None else kv_rows),
        (dim if v_dim is None else v_dim),
    )

    def empty(*shape: int, dtype: torch.dtype = TORCH_DTYPES[dtype]) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    options: dict[str, Any] = {
        "causal": causal,
        "anchor": anchor,
        "window": (left, right),
        "softcap": softcap,
        "scale": scale,
        "dropout_p": dropout,
        "deterministic": deterministic or None,
        "num_splits": num_splits,
        "engine": engine,
        "kernel": kernel,
    }
    if mask:
        options["mask"] = empty(batch, heads, rows, n_kv, dtype=torch.bool)
    if bias:
        options["bias"] = empty(batch, heads, rows, n_kv, dtype=torch.float32)
    if alibi:
        options["alibi_slopes"] = empty(heads, dtype=torch.float32)
    if sinks:
        options["sinks"] = empty(heads, dtype=torch.float32)
    q, k, v = empty(batch, heads, rows, dim), empty(batch, h_kv, n_kv, dim), empty(batch, h_kv, n_kv, d_v)
    try:
        answer = ffpa.explain(q, k, v, **options, backward=backward)
    except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None
    console.print(str(answer), highlight=False, markup=False, soft_wrap=True)
    if answer.error:
        raise typer.Exit(1)


def _show(title: str, table: Table) -> None:
    console.print(title, style="bold")
    console.print(table)


def _progress() -> Progress:
    """A bar on a terminal; nothing where output goes to a file."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
