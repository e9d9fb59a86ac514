"""The `ffpa` command: what it counts, how it measures, what it prints, what it refuses."""

from __future__ import annotations

import json
import statistics
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

import ffpa
from ffpa import _native
from ffpa.cli import check, machine, measure, peers, results
from ffpa.cli.app import app
from ffpa.cli.cases import OPTIONS, SETS, Case, bytes_touched, flops, sweep, visible_pairs

TINY = ["bench", "--rows", "48", "--dim", "64", "--heads", "2", "--rounds", "3", "--seconds", "0.01"]


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


@pytest.fixture
def short_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "TURN_SECONDS", 1e-4)


# ------------------------------------------------------------------------------------------------------ what is counted


@pytest.mark.parametrize("n_q", [1, 2, 7, 30])
@pytest.mark.parametrize("n_kv", [1, 5, 30])
def test_visible_pairs_are_those_that_a_mask_shows(n_q: int, n_kv: int) -> None:
    assert visible_pairs(n_q, n_kv, causal=False) == n_q * n_kv
    assert visible_pairs(n_q, n_kv, causal=True) == int(torch.ones(n_q, n_kv).tril().sum())


def test_flops_equal_torchs_own_count() -> None:
    from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count

    case = Case(2, 3, 3, 17, 29, 40, 40)
    x = peers.prepare(case, "cpu")
    q, k, v, dout = (t.shape for t in (x.q, x.k, x.v, x.dout))
    forward, backward = sdpa_flop_count(q, k, v), sdpa_backward_flop_count(dout, q, k, v)
    assert flops(case) == forward
    assert flops(replace(case, work="bwd")) == backward
    assert flops(replace(case, work="fwdbwd")) == forward + backward


def test_flops_of_unequal_widths() -> None:
    case = Case(1, 1, 1, 10, 20, 6, 4, work="fwd")
    assert flops(case) == 2 * 10 * 20 * (6 + 4)
    both = Case(1, 1, 1, 10, 20, 6, 4, work="fwdbwd")
    assert flops(both) == 2 * 10 * 20 * ((6 + 4) + (3 * 6 + 2 * 4))


def test_bytes_count_each_tensor_once() -> None:
    case = Case(8, 8, 2, 1, 16384, 512, 256, "bf16")
    x = peers.prepare(case, "cpu")
    assert bytes_touched(case) == sum(t.numel() * t.element_size() for t in (x.q, x.k, x.v, x.dout))


def test_the_cpu_set_is_the_documented_list() -> None:
    cases = SETS["cpu"][1]()
    assert len(cases) == len(set(cases)) == 34
    square = [c for c in cases if c.n_q > 1]
    assert {(c.batch, c.h_q, c.h_kv, c.n_q, c.n_kv) for c in square} == {(1, 4, 4, 2048, 2048)}
    assert {c.d_qk for c in square} == {c.d_v for c in square} == {128, 256, 512, 1024}
    assert {(c.dtype, c.causal, c.work) for c in square} == {
        (t, m, w) for t in ("fp32", "bf16") for m in (False, True) for w in ("fwd", "fwdbwd")
    }
    decode = [c for c in cases if c.n_q == 1]
    assert {(c.batch, c.h_q, c.h_kv, c.n_kv, c.d_qk) for c in decode} == {(8, 8, 2, 16384, 512)}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"h_q": 4, "h_kv": 3}, "h_q must be a multiple of h_kv, 3, but is 4"),
        ({"d_qk": 0}, "d_qk must be at least 1, but is 0"),
        ({"dtype": "int8"}, "dtype must be one of fp32, bf16, fp16, but is int8"),
        ({"work": "dq"}, "pass must be one of fwd, bwd, fwdbwd, but is dq"),
        ({"option": "sinks"}, "option must be one of none, softcap, bias, bias-fp32, mask, alibi, dropout"),
    ],
)
def test_a_case_refuses_what_it_cannot_be(change: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Case(**change)  # type: ignore[arg-type]


# --------------------------------------------------------------------------------------------------- how it is measured


def test_rounds_are_interleaved_and_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def clock(call: measure.Call) -> float:
        call()
        return 1.0

    monkeypatch.setattr(measure, "time_host", clock)
    timings = measure.measure({name: lambda name=name: seen.append(name) for name in "abc"}, "cpu", 3, 60.0)
    assert "".join(seen) == "abc" + "abc" + "bca" + "cab"  # one call each to see who refuses, then the rounds
    assert all(len(t.seconds) == 3 for t in timings.values())


def test_a_refusing_peer_is_left_out_with_its_words(short_turns: None) -> None:
    def refuse() -> None:
        raise NotImplementedError("no such head dim\nand more")

    timings = measure.measure({"ffpa": lambda: None, "peer": refuse}, "cpu", 4, 60.0)
    assert timings["peer"].refused == "NotImplementedError: no such head dim"
    assert timings["peer"].seconds == [] and len(timings["ffpa"].seconds) == 4
    row = results.Row(Case(), "a_fwd_b", timings)
    assert row.ratios_to("peer") == [] and results.summary([row], "peer") is None


def test_ratio_is_the_median_of_ratios_within_rounds() -> None:
    ours, theirs = measure.Timing([1.0, 2.0, 4.0]), measure.Timing([3.0, 4.0, 4.0])
    row = results.Row(Case(), "a_fwd_b", {"ffpa": ours, "sdpa": theirs})
    assert row.ratios_to("sdpa") == [3.0, 2.0, 1.0]
    other = results.Row(Case(), "a_fwd_b", {"ffpa": ours, "sdpa": measure.Timing([8.0, 16.0, 32.0])})
    assert results.summary([row, other], "sdpa") == (pytest.approx(4.0), 2.0, 2)


def test_time_host_counts_calls() -> None:
    import time

    assert measure.time_host(lambda: time.sleep(0.004)) == pytest.approx(0.004, rel=0.5)


def test_every_installed_cpu_peer_computes_the_same() -> None:
    case = Case(2, 4, 2, 20, 33, 48, 48, "fp32", causal=True)
    inputs = peers.prepare(case, "cpu")
    expected, _ = check.plain_attention(*(t.double() for t in (inputs.q, inputs.k, inputs.v)), causal=True)
    for name in ("ffpa", "sdpa", "sdpa-math", "sdpa-flash"):
        got = peers.as_call(peers.BY_NAME[name], case, inputs)()
        torch.testing.assert_close(got, expected.float(), msg=name)


# ------------------------------------------------------------------------------------------------------------- commands


def test_info_lists_every_kernel_and_the_version() -> None:
    result = run("info")
    assert result.exit_code == 0, result.output
    assert _native.version() in result.output
    for kernel in _native.kernels():
        assert kernel.name in result.output


def test_info_as_json() -> None:
    found = json.loads(run("info", "--json").output)
    assert [k["name"] for k in found["kernels"]] == [k.name for k in _native.kernels()]
    assert found["machine"]["cpus"] == machine.usable_cpus()
    assert found["devices"][0]["type"] == "cpu"


def test_plain_attention_is_torchs_math() -> None:
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(2, 4, 9, 16, generator=generator, dtype=torch.float64)
    k, v = torch.randn(2, 2, 2, 13, 16, generator=generator, dtype=torch.float64)
    mask = torch.rand(2, 4, 9, 13, generator=generator) < 0.5
    mask[0, 0, 0] = False
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(SDPBackend.MATH):
        expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
    o, lse = check.plain_attention(q, k, v, mask=mask)
    torch.testing.assert_close(o, expected)
    assert lse[0, 0, 0] == -torch.inf and lse[0, 1].isfinite().all()


def test_check_passes_on_the_reference() -> None:
    result = run("check", "--kernel", "ref_", "-v")
    assert result.exit_code == 0, result.output
    assert "results are right" in result.output
    for problem in check.PROBLEMS:
        assert f", {problem.name}: right" in result.output


def test_check_fails_on_a_wrong_result(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = ffpa.attention

    def broken(q: torch.Tensor, *args: object, **kwargs: object) -> object:
        o, lse = honest(q, *args, **kwargs)
        return (o * 1.001 if kwargs.get("softcap") else o), lse

    monkeypatch.setattr(ffpa, "attention", broken)
    result = run("check", "--kernel", "ref_fwd")
    assert result.exit_code == 1
    assert "ref_fwd_loops fp32, softcap: o: relative rmse" in result.output
    assert "softcap: right" not in result.output


def test_check_shows_refusals_without_failing(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = ffpa.attention

    def refusing(q: torch.Tensor, *args: object, **kwargs: object) -> object:
        if kwargs.get("softcap"):
            raise NotImplementedError("softcap: must be 0 here, but is 2")
        return honest(q, *args, **kwargs)

    monkeypatch.setattr(ffpa, "attention", refusing)
    result = run("check", "--kernel", "ref_fwd", "-v")
    assert result.exit_code == 0
    assert "softcap: refused: softcap: must be 0 here, but is 2" in result.output


def test_bench_writes_table_json_and_picture(tmp_path: Path, short_turns: None) -> None:
    figures, picture = tmp_path / "bench.json", tmp_path / "bench.png"
    result = run(
        *TINY, "--dtype", "fp32,bf16", "--mask", "full,causal", "--pass", "fwd,fwdbwd", "--peers", "sdpa,sdpa-math",
        "--json", str(figures), "--plot", str(picture),
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "geometric mean" in result.output and "x sdpa-math" in result.output

    record = json.loads(figures.read_text())
    assert record["machine"]["threads"] == torch.get_num_threads()
    assert record["machine"]["packages"]["torch"] == torch.__version__
    assert len(record["cases"]) == 8
    for case in record["cases"]:
        assert set(case["seconds"]) == {"ffpa", "sdpa", "sdpa-math"}
        assert all(len(seconds) == 3 and min(seconds) > 0 for seconds in case["seconds"].values())
        assert set(case["kernel"].split(" + ")) <= {k.name for k in _native.kernels()}
    assert record["summary"]["sdpa"]["cases"] == 8

    header = picture.read_bytes()[:24]
    assert header[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", header[16:24])
    assert width > 1000 and height > 500


def test_gemm_column_and_curves(tmp_path: Path, short_turns: None) -> None:
    figures, picture = tmp_path / "bench.json", tmp_path / "curves.png"
    result = run(
        "bench", "--rows", "16,24,32", "--dim", "8,16,64", "--heads", "2", "--dtype", "fp32", "--pass", "fwd,bwd",
        "--rounds", "3", "--seconds", "0.01", "--gemm", "128", "--json", str(figures), "--curves", str(picture),
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "of GEMM" in result.output and "GEMM 128^3 in the same rounds" in result.output
    for case in json.loads(figures.read_text())["cases"]:
        assert case["gemm_n"] == 128 and len(case["gemm_seconds"]) == 3
        shares = [
            case["flops"] / ours / (2 * 128**3 / product)
            for ours, product in zip(case["seconds"]["ffpa"], case["gemm_seconds"], strict=True)
        ]
        assert case["share_of_gemm"] == pytest.approx(statistics.median(shares))
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_sweeps_are_found_among_other_cases() -> None:
    by_d, by_n, apart = (SETS[name][1]() for name in ("over-d", "over-n", "apart"))
    assert sweep([*by_d, *by_n, *apart], "D")[: len(by_d)] == by_d
    assert set(sweep([*by_d, *by_n, *apart], "N")) >= set(by_n)
    assert sweep(by_d[:4], "D") == [] and sweep(by_n[:4], "N") == []  # two values


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("work", ["fwd", "bwd", "fwdbwd"])
def test_ours_and_torchs_calls_agree(option: str, work: str) -> None:
    """Both run the same problem, or torch's is refused by name; with dropout the draws differ."""
    case = Case(2, 4, 2, 20, 28, 16, 16, "fp32", causal=option not in ("bias", "bias-fp32", "mask"), work=work)
    case = replace(case, option=option)
    inputs = peers.prepare(case, "cpu")
    ours = peers.as_call(peers.OURS, case, inputs)()
    theirs = peers.as_call(peers.BY_NAME["sdpa-math"], case, inputs)
    if option in ("softcap", "alibi"):
        with pytest.raises(NotImplementedError, match=option):
            theirs()
    elif option != "dropout":
        torch.testing.assert_close(ours, theirs(), atol=1e-5, rtol=1e-5)
    assert set(peers.kernels_of(case, inputs).split(" + ")) <= {k.name for k in _native.kernels()}


def test_bench_lists_sets_and_rivals() -> None:
    output = run("bench", "--list").output
    assert all(name in output for name in [*SETS, *(peer.name for peer in peers.PEERS)])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["bench", "--set", "huge"], "--set: must be among"),
        (["bench", "--set", "quick", "--dim", "64"], "--dim cannot be given with it"),
        (["bench", "--dim", "64,x"], "--dim: must be whole numbers separated by commas, but is '64,x'"),
        (["bench", "--rows", "0"], "--rows: must be at least 1, but is 0"),
        (["bench", "--heads", "4", "--kv-heads", "3"], "h_q must be a multiple of h_kv, 3, but is 4"),
        (["bench", "--dim", "64", "--dtype", "fp8"], "--dtype: must be among fp32, bf16, fp16, but is 'fp8'"),
        (["bench", "--dim", "64", "--pass", "dq"], "--pass: must be among fwd, bwd, fwdbwd"),
        (["bench", "--peers", "cudnn"], "--peers: must be among"),
        (["bench", "--peers", "flash-attn"], "--peers: flash-attn is not installed here"),
        (["bench", "--device", "tpu"], "--device: must be among cpu, cuda"),
        (["bench", "--dim", "64", "--option", "sinks"], "--option: must be among none, softcap"),
        (["bench", "--dim", "64", "--gemm", "-1"], "--gemm: must be at least 0 (none), but is -1"),
        (
            ["bench", "--dim", "64,128", "--curves", "x.png"],
            "--curves: the shapes must hold three values of D, or of N",
        ),
        (["bench", "--rounds", "0"], "--rounds: must be at least 1, but is 0"),
        (["bench", "--threads", "-1"], "--threads: must be at least 0, but is -1"),
        (["bench", "--json", "/no/such/folder/x.json"], "--json: its folder /no/such/folder does not exist"),
        (["check", "--kernel", "sm999"], "--kernel: no usable kernel's name contains 'sm999'"),
        (["explain", "--window", "5"], "--window: must be two whole numbers LEFT,RIGHT, but is '5'"),
        (["explain", "--dtype", "int4"], "--dtype: must be among"),
        (["explain", "--anchor", "middle"], "--anchor: must be among top_left, bottom_right"),
    ],
)
def test_bad_flags_are_refused_in_words(arguments: list[str], words: str) -> None:
    if "flash-attn" in arguments and peers.BY_NAME["flash-attn"].installed:
        pytest.skip("flash-attn is installed")
    result = run(*arguments)
    assert result.exit_code == 2
    text = " ".join(result.output.replace("│", " ").split())
    assert words in text, text


def test_explain_names_the_kernel_and_the_refused() -> None:
    result = run("explain", "--dtype", "fp32", "--engine", "ref", "--causal", "--window", "8,0", "--sinks", "--alibi")
    assert result.exit_code == 0, result.output
    assert "ref_fwd_loops" in result.output
    result = run("explain", "--dtype", "fp32", "--backward", "--kernel", "ref_bwd_loops", "--mask", "--bias")
    assert result.exit_code == 0, result.output
    assert "ref_bwd_loops" in result.output


def test_explain_words_a_bad_problem() -> None:
    result = run("explain", "--heads", "4", "--kv-heads", "3")
    assert result.exit_code == 1
    assert "H_kv" in result.output and "3" in result.output


def test_without_its_libraries_the_command_says_how_to_get_them() -> None:
    program = "import sys; sys.modules['typer'] = None; import ffpa.cli; ffpa.cli.main()"
    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert finished.returncode == 1
    assert finished.stderr.strip() == "ffpa: typer is not installed; the command line needs: pip install 'ffpa[cli]'"


def test_runs_as_a_module() -> None:
    finished = subprocess.run([sys.executable, "-m", "ffpa.cli", "--help"], capture_output=True, text=True, check=False)
    assert finished.returncode == 0
    assert all(command in finished.stdout for command in ("info", "check", "bench", "explain"))
