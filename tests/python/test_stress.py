"""Threads, forks and memory."""

from __future__ import annotations

import concurrent.futures
import os
import subprocess
import sys
import textwrap

import pytest
import torch
from torch.utils.data import DataLoader

import ffpa
from oracle import qkv


def run(code: str, timeout: float = 120) -> str:
    """A program of its own; its output. Fails on a non-zero exit and on a hang."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=timeout
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_many_threads_at_once_even_on_the_first_call() -> None:
    assert "same" in run("""
        import threading, torch
        go, found = threading.Barrier(8), []
        q = torch.randn(2, 4, 300, 64)
        def work():
            go.wait()
            import ffpa
            for _ in range(10):
                x = q.clone().requires_grad_()
                o = ffpa.scaled_dot_product_attention(x, x, x, is_causal=True)
                found.append((o.detach(), *torch.autograd.grad(o.sum(), x)))
        threads = [threading.Thread(target=work) for _ in range(8)]
        [t.start() for t in threads]; [t.join() for t in threads]
        assert len(found) == 80
        assert all(torch.equal(a, b) for pair in found for a, b in zip(pair, found[0]))
        print("same")
    """)


def test_threads_get_their_own_errors() -> None:
    def refused(d: int) -> str:
        with pytest.raises(RuntimeError) as error:
            ffpa.attention(torch.randn(1, 1, 2, d), torch.randn(1, 1, 2, d + 1), torch.randn(1, 1, 2, d))
        return str(error.value)

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for d, text in zip(range(1, 200), pool.map(refused, range(1, 200)), strict=True):
            assert f"{d}," in text and str(d + 1) in text


def test_results_do_not_depend_on_the_number_of_threads() -> None:
    q, k, v = qkv(1, 3, 3, 500, 500, 64, torch.float32)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3, 7):
            torch.set_num_threads(threads)
            found.append(ffpa.scaled_dot_product_attention(q, k, v))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(found[0], x) for x in found)


@pytest.mark.timeout(120)
def test_a_child_forked_after_use_computes() -> None:
    assert "right" in run("""
        import os, signal, torch, ffpa
        torch.set_num_threads(2)
        q = torch.randn(2, 8, 400, 64)
        before = ffpa.scaled_dot_product_attention(q, q, q)
        child = os.fork()
        if child == 0:
            signal.alarm(60)
            torch.set_num_threads(1)
            ours = ffpa.attention(q, q, q)
            os._exit(0 if torch.equal(ours, before) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert torch.equal(ffpa.scaled_dot_product_attention(q, q, q), before)
        print("right")
    """)


@pytest.mark.timeout(120)
def test_the_pool_survives_a_fork_in_the_c_interface() -> None:
    """Two threads in the child, where OpenMP's pool of the parent is gone."""
    assert "right" in run("""
        import os, signal, numpy as np, ffpa.numpy
        rng = np.random.default_rng(0)
        q = rng.standard_normal((2, 8, 500, 64), dtype=np.float32)
        before = ffpa.numpy.attention(q, q, q)
        child = os.fork()
        if child == 0:
            signal.alarm(60)
            os._exit(0 if np.array_equal(ffpa.numpy.attention(q, q, q), before) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        print("right")
    """)


class Attend(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        x = torch.full((1, 2, 40, 64), float(index))
        out = ffpa.attention(x, x, x)
        assert isinstance(out, torch.Tensor)
        return out


@pytest.mark.timeout(120)
def test_data_loader_workers() -> None:
    ffpa.attention(*qkv(1, 2, 2, 300, 300, 64, torch.float32))
    for index, batch in enumerate(DataLoader(Attend(), batch_size=1, num_workers=2)):
        assert (batch == index).all()


@pytest.mark.parametrize("passes", ["forward", "backward"])
def test_memory_never_grows_with_the_square(passes: str) -> None:
    """D 512, N 8192, causal, grouped heads: N_q * N_kv in fp32 would be 512 MiB for the two heads."""
    out = run(
        f"""
        import resource, torch, ffpa
        ffpa.attention(*(torch.randn(1, 1, 64, 64) for _ in range(3)))
        q, k, v = (torch.randn(1, h, 8192, 512).bfloat16().requires_grad_({passes == "backward"}) for h in (2, 1, 1))
        inputs = sum(x.numel() * 2 for x in (q, k, v))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        o = ffpa.attention(q, k, v, causal=True)
        if o.requires_grad:
            torch.autograd.grad(o, (q, k, v), torch.ones_like(o))
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
        print(grown / inputs)
    """,
        280,
    )
    assert float(out) < 6


@pytest.mark.parametrize("fault", ["lengths", "head dim", "window", "splits"])
def test_a_refused_call_writes_nothing(fault: str) -> None:
    cache = torch.full((1, 8, 1, 16), 3.0)
    q = torch.randn(1, 2, 2, 17 if fault == "head dim" else 16)
    options = {"lengths": {}, "head dim": {}, "window": {"softcap": -1.0}, "splits": {"num_splits": -1}}[fault]
    with pytest.raises(RuntimeError, match=r"seqlens_kv|D_qk|softcap|num_splits"):
        ffpa.flash_attn_with_kvcache(
            q, cache, cache.clone(), torch.randn(1, 2, 1, 16), torch.randn(1, 2, 1, 16),
            cache_seqlens=7 if fault == "lengths" else 2, **options,
        )  # fmt: skip
    assert (cache == 3).all()


def test_environment_forces_a_kernel() -> None:
    code = """
        import torch, ffpa
        x = torch.randn(1, 1, 4, 8)
        print(ffpa.explain(x, x, x).kernel)
    """
    os.environ["FFPA_KERNEL"] = "portable_fwd_tiled"
    try:
        assert run(code).strip() == "portable_fwd_tiled"
    finally:
        del os.environ["FFPA_KERNEL"]
