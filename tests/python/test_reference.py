"""The reference engine against the contract's formula in float64, written in torch operations, and its gradients
against autograd's; the dropout mask against a Philox of its own. Random problems, all options combined."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

import ffpa
from formula import attend

INF = float("inf")


# --------------------------------------------------------------------------------------------------- the dropout mask


def philox(counter: list[int], key: list[int]) -> list[int]:
    """Philox4x32-10 as its paper defines it."""
    mask = 0xFFFFFFFF
    for _ in range(10):
        a, b = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = [(b >> 32) ^ counter[1] ^ key[0], b & mask, (a >> 32) ^ counter[3] ^ key[1], a & mask]
        key = [(key[0] + 0x9E3779B9) & mask, (key[1] + 0xBB67AE85) & mask]
    return counter


def keep(p: float, state: Tensor, b: int, h_q: int, n_q: int, n_kv: int) -> Tensor:
    """[H_q, N_q, N_kv]: 0 or 1 / (1 - p), as src/core/philox.h words it."""
    seed, offset = (int(x) % 2**64 for x in state)
    threshold = int(p * 65536 + 0.5)
    key = [seed % 2**32, (seed >> 32) ^ (offset >> 32)]
    kept = torch.zeros(h_q, n_q, n_kv, dtype=torch.float64)
    for h in range(h_q):
        for i in range(n_q):
            for j in range(n_kv):
                words = philox([j // 8, i, b * h_q + h, offset % 2**32], key)
                piece = words[j % 8 // 2] >> (16 * (j % 2)) & 0xFFFF
                kept[h, i, j] = piece >= threshold
    return kept / (1 - p) if p < 1 else kept


def test_philox_known_answer() -> None:
    pi = [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344], [0xA4093822, 0x299F31D0]
    assert philox(*pi) == [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]


# ----------------------------------------------------------------------------------------------------- random problems


@dataclass
class Random:
    """A problem for ffpa.attention, and where each of its sequences lies."""

    seed: int
    tensors: dict[str, Tensor] = field(default_factory=dict)  # q, k, v, bias, sinks
    options: dict[str, Any] = field(default_factory=dict)  # the other arguments
    rows: list[tuple[int, slice]] = field(default_factory=list)  # of q, by sequence: batch, rows
    keys: list[list[tuple[int, int]]] = field(default_factory=list)  # by sequence, by key: batch or page, row

    def __post_init__(self) -> None:
        draw = self.draw = random.Random(self.seed)
        torch.manual_seed(self.seed)
        b, h_kv = draw.randint(1, 3), draw.randint(1, 2)
        h_q, d_qk, d_v = h_kv * draw.choice([1, 1, 2, 3]), draw.randint(0, 6), draw.randint(1, 6)
        packed_q = draw.random() < 0.3
        kind = draw.choice(["dense", "indexed", "paged", *(["packed"] * 4 if packed_q else [])])
        n_q = [draw.randint(0, 6) for _ in range(b)] if packed_q else [draw.randint(0, 6)] * b
        most = [draw.randint(0, 9) for _ in range(b)] if kind == "packed" else [draw.randint(0, 9)] * b
        n_kv = [draw.randint(0, n) for n in most] if kind == "paged" or draw.random() < 0.3 else most
        if n_kv is not most or kind == "paged":
            self.options["seqlens_kv"] = int32(n_kv)
        starts = [sum(n_q[:i]) for i in range(b + 1)]
        if packed_q:
            self.options["cu_seqlens_q"] = int32(starts)
            self.rows = [(0, slice(starts[i], starts[i + 1])) for i in range(b)]
        else:
            self.rows = [(i, slice(0, n_q[0])) for i in range(b)]
        shape_q = (1, h_q, starts[-1] + draw.randint(0, 1)) if packed_q else (b, h_q, n_q[0])
        longest = max(most)
        match kind:
            case "dense":
                shape_kv: tuple[int, int] = b, longest
                self.keys = [[(i, j) for j in range(n_kv[i])] for i in range(b)]
            case "indexed":
                index = [draw.randint(0, 3) for _ in range(b)]
                self.options["kv_batch_idx"] = int32(index)
                shape_kv = 4, longest
                self.keys = [[(index[i], j) for j in range(n_kv[i])] for i in range(b)]
            case "packed":
                begin = [sum(most[:i]) for i in range(b + 1)]
                self.options["cu_seqlens_kv"] = int32(begin)
                shape_kv = 1, begin[-1] + draw.randint(0, 1)
                self.keys = [[(0, begin[i] + j) for j in range(n_kv[i])] for i in range(b)]
            case _:
                page = draw.randint(1, 4)
                columns = -(-longest // page) or 1
                table = torch.randperm(b * columns + 1)[: b * columns].view(b, columns)
                self.options["block_table"] = table.int()
                shape_kv, longest = (b * columns + 1, page), columns * page
                self.keys = [[(int(table[i, j // page]), j % page) for j in range(n_kv[i])] for i in range(b)]
        self.n_q, self.n_kv, self.h_q = n_q, n_kv, h_q
        self.paged = kind == "paged"
        self.tensors["q"] = torch.randn(*shape_q, d_qk, dtype=torch.float64)
        for name, d in (("k", d_qk), ("v", d_v)):
            x = torch.full((shape_kv[0], h_kv, shape_kv[1], d), torch.nan, dtype=torch.float64)
            for i, j in {place for places in self.keys for place in places}:
                x[i, :, j] = torch.randn(h_kv, d, dtype=torch.float64)
            self.tensors[name] = x
        self._draw_options([b, h_q, max(n_q), longest])

    def _draw_options(self, scores: list[int]) -> None:
        draw, options = self.draw, self.options

        def some(chance: float) -> bool:
            return draw.random() < chance

        def broadcast() -> list[int]:
            return [1 if some(0.3) else n for n in scores]

        options["causal"] = some(0.4)
        options["anchor"] = draw.choice(["top_left", "bottom_right"])
        options["window"] = draw.choice([(-1, -1), (-1, -1), (2, 3), (0, -1), (-1, 1), (3, 0)])
        options["softcap"] = draw.choice([0.0, 0.0, 0.7, 5.0])
        options["scale"] = draw.choice([None, None, 0.0, -0.8, 1.3])
        if some(0.3):
            options["mask"] = torch.rand(broadcast()) < 0.7
        if some(0.4):
            bias = torch.randn(broadcast(), dtype=torch.float64)
            self.tensors["bias"] = bias.masked_fill(torch.rand(bias.shape) < 0.1, -INF)
        if some(0.3):
            options["alibi_slopes"] = torch.rand(*([] if some(0.5) else [scores[0]]), self.h_q)
        if some(0.3):
            sinks = torch.randn(self.h_q, dtype=torch.float64)
            self.tensors["sinks"] = sinks.masked_fill(torch.rand(self.h_q) < 0.2, -INF)
        if some(0.3):
            options["dropout_p"] = draw.choice([0.1, 0.5, 1.0])
            options["dropout_state"] = torch.randint(-(2**62), 2**62, (2,))

    def formula(self, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """o and lse, one sequence at a time."""
        q, k, v = (inputs[name] for name in "qkv")
        option = self.options
        o = q.new_zeros(*q.shape[:3], v.shape[3])
        lse = q.new_full(q.shape[:3], -INF)
        o_parts, lse_parts = [], []
        for b, (batch, rows) in enumerate(self.rows):
            at = torch.tensor(self.keys[b], dtype=torch.int64).view(-1, 2)
            k_b, v_b = (x[at[:, 0], :, at[:, 1]].transpose(0, 1) for x in (k, v))
            mask, bias = (
                None if x is None else x.expand(len(self.rows), self.h_q, *(m if n == 1 else n for n, m in zip(
                    x.shape[2:], (self.n_q[b], self.n_kv[b]), strict=True)))[b, :, : self.n_q[b], : self.n_kv[b]]
                for x in (option.get("mask"), inputs.get("bias"))
            )  # fmt: skip
            slopes = option.get("alibi_slopes")
            out, log_sum, probs = attend(
                q[batch, :, rows], k_b, v_b,
                scale=option["scale"] if option["scale"] is not None or q.shape[3] else 1.0,
                causal=option["causal"], window=option["window"], bottom_right=option["anchor"] == "bottom_right",
                softcap=option["softcap"], slopes=slopes[b] if slopes is not None and slopes.dim() == 2 else slopes,
                mask=mask, bias=bias, sinks=inputs.get("sinks"),
            )  # fmt: skip
            if "dropout_p" in option:
                p, state = option["dropout_p"], option["dropout_state"]
                kept = keep(p, state, b, self.h_q, self.n_q[b], self.n_kv[b])
                out = (probs * kept) @ v_b.repeat_interleave(self.h_q // v_b.shape[0], 0)
            o_parts.append((batch, rows, out))
            lse_parts.append((batch, rows, log_sum))
        for parts, whole in ((o_parts, o), (lse_parts, lse)):
            for batch, rows, x in parts:
                whole[batch, :, rows] = x
        return o, lse


def int32(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def leaves(problem: Random, grad: bool) -> dict[str, Tensor]:
    return {name: x.clone().requires_grad_(grad) for name, x in problem.tensors.items()}


def close(got: Tensor, expected: Tensor, what: str) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-10, msg=lambda text: f"{what}: {text}")


@pytest.mark.parametrize("block", range(12))
def test_follows_the_formula(block: int) -> None:
    for seed in range(25 * block, 25 * block + 25):
        problem = Random(seed)
        grad = not problem.paged
        ours, theirs = leaves(problem, grad), leaves(problem, grad)
        o, lse = ffpa.attention(**ours, **problem.options, engine="ref", return_lse=True)
        expected = problem.formula(theirs)
        what = f"seed {seed}, {problem.options}, { {n: list(x.shape) for n, x in ours.items()} }"
        close(o, expected[0], "o: " + what)
        close(lse, expected[1], "lse: " + what)
        if not grad:
            continue
        gradients = torch.randn_like(o), torch.randn_like(lse)
        for results, inputs in (((o, lse), ours), (expected, theirs)):
            kept = torch.isfinite(results[1].detach())
            loss = (results[0] * gradients[0]).sum() + (results[1][kept] * gradients[1][kept]).sum()
            if loss.requires_grad:
                loss.backward()
            for x in inputs.values():
                if x.grad is None:
                    x.grad = torch.zeros_like(x)
        for name, x in ours.items():
            close(x.grad, theirs[name].grad, f"d{name}: {what}")
