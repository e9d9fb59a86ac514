"""flash_attn_with_kvcache: append in place, rotation, lengths, pages, padding on the left, against the formula."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ffpa import flash_attn_with_kvcache
from formula import attend, rotate, tolerance

B, CAPACITY, H_Q, H_KV, D = 3, 40, 4, 2, 32
LENGTHS = [7, 0, 33]


def randn(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


class Cache:
    """Dense or paged, with NaN wherever no key lies; `content` is what each sequence holds, in order."""

    def __init__(self, rows: int | None, indexed: bool = False, d: int = D, dtype: torch.dtype = torch.float32) -> None:
        self.content = [
            [randn(n, H_KV, d, seed=10 + s + b, dtype=dtype) for s in (0, 50)] for b, n in enumerate(LENGTHS)
        ]
        self.table: Tensor | None = None
        self.index: Tensor | None = None
        if rows is None:
            places = B + 2 if indexed else B
            shape: tuple[int, ...] = (places, CAPACITY, H_KV, d)
            order = torch.randperm(places, generator=torch.Generator().manual_seed(0))[:B]
            self.index = order.to(torch.int32) if indexed else None
        else:
            pages = -(-CAPACITY // rows)
            shape = (B * pages + 1, rows, H_KV, d)
            order = torch.randperm(B * pages + 1, generator=torch.Generator().manual_seed(0))
            self.table = order[: B * pages].view(B, pages).to(torch.int32)
        self.rows = rows
        self.k, self.v = (torch.full(shape, torch.nan, dtype=dtype) for _ in range(2))
        for b in range(B):
            for j in range(LENGTHS[b]):
                self.k[self.place(b, j)], self.v[self.place(b, j)] = (x[j] for x in self.content[b])

    def place(self, b: int, j: int) -> tuple[int, int]:
        if self.table is not None and self.rows is not None:
            return int(self.table[b, j // self.rows]), j % self.rows
        return (b if self.index is None else int(self.index[b])), j

    def arguments(self) -> dict[str, Any]:
        return dict(k_cache=self.k, v_cache=self.v, cache_batch_idx=self.index, block_table=self.table)


def int32(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def check(got: Tensor, wanted: Tensor, what: str) -> None:
    torch.testing.assert_close(got.double(), wanted.double(), **tolerance(got.dtype), msg=lambda m: f"{what}: {m}")


OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # ours, the formula's
    "plain": ({}, {}),
    "causal": (dict(causal=True), dict(causal=True)),
    "window": (dict(window_size=(5, 0)), dict(window=(5, 0))),
    "softcap": (dict(softcap=2.0, causal=True, softmax_scale=0.7), dict(softcap=2.0, causal=True, scale=0.7)),
    "alibi": (dict(alibi_slopes=torch.tensor([0.1, 0.5, 0.0, 1.0])), dict(slopes=torch.tensor([0.1, 0.5, 0.0, 1.0]))),
    "splits": (dict(num_splits=4), {}),
}


@pytest.mark.parametrize("n_new", [0, 1, 5])
@pytest.mark.parametrize("n_q", [1, 5])
@pytest.mark.parametrize("layout", ["dense", "indexed", 1, 3, 16, 19])
@pytest.mark.parametrize("case", OPTIONS)
def test_append_and_attend(case: str, layout: str | int, n_q: int, n_new: int) -> None:
    cache = Cache(layout if isinstance(layout, int) else None, layout == "indexed")
    options, how = OPTIONS[case]
    q = randn(B, n_q, H_Q, D, seed=1)
    new = [randn(B, n_new, H_KV, D, seed=s) for s in (2, 3)]
    before = cache.k.clone(), cache.v.clone()
    given = dict(k=new[0], v=new[1]) if n_new else {}
    arguments = {**cache.arguments(), **given, **options}
    out, lse = flash_attn_with_kvcache(q, **arguments, cache_seqlens=int32(LENGTHS), return_softmax_lse=True)
    assert out.shape == q.shape and out.is_contiguous() and lse.shape == (B, H_Q, n_q)
    for b in range(B):
        keys, values = (torch.cat([old, x[b]]) for old, x in zip(cache.content[b], new, strict=True))
        wanted, wanted_lse, _ = attend(*(x.transpose(0, 1) for x in (q[b], keys, values)), **how)
        check(out[b].transpose(0, 1), wanted, f"out of sequence {b}")
        check(lse[b], wanted_lse, f"lse of sequence {b}")
        for i, j in enumerate(range(LENGTHS[b], LENGTHS[b] + n_new)):  # written bit for bit, and nothing else
            for now, then, x in ((cache.k, before[0], new[0]), (cache.v, before[1], new[1])):
                assert torch.equal(now[cache.place(b, j)], x[b, i])
                then[cache.place(b, j)] = x[b, i]
    for now, then in zip((cache.k, cache.v), before, strict=True):
        assert torch.equal(now.view(torch.int32), then.view(torch.int32)), "a row outside the new keys was written"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("d", [64, 256, 512])
def test_decode_in_every_dtype(d: int, dtype: torch.dtype) -> None:
    cache = Cache(16, d=d, dtype=dtype)
    q, k, v = randn(B, 1, H_Q, d, seed=1, dtype=dtype), *(randn(B, 1, H_KV, d, seed=s, dtype=dtype) for s in (2, 3))
    out = flash_attn_with_kvcache(q, k=k, v=v, cache_seqlens=int32(LENGTHS), causal=True, **cache.arguments())
    assert out.dtype == dtype
    for b in range(B):
        keys, values = (torch.cat([old, x[b]]) for old, x in zip(cache.content[b], (k, v), strict=True))
        check(out[b].transpose(0, 1), attend(*(x.transpose(0, 1) for x in (q[b], keys, values)))[0], f"sequence {b}")


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("width", [8, 16])  # R / 2; R = D rotates all
@pytest.mark.parametrize("case", ["plain", "causal", "window"])
@pytest.mark.parametrize("rows", [None, 3])
def test_rotation(rows: int | None, case: str, width: int, interleaved: bool) -> None:
    cache = Cache(rows)
    options, how = OPTIONS[case]
    angles = torch.outer(torch.arange(CAPACITY + 2.0), 1000.0 ** -(torch.arange(width) / width))
    q, k, v = randn(B, 4, H_Q, D, seed=1), randn(B, 3, H_KV, D, seed=2), randn(B, 3, H_KV, D, seed=3)
    kept = q.clone()
    out = flash_attn_with_kvcache(
        q, k=k, v=v, rotary_cos=angles.cos(), rotary_sin=angles.sin(), cache_seqlens=int32(LENGTHS),
        rotary_interleaved=interleaved, **cache.arguments(), **options,
    )  # fmt: skip
    assert torch.equal(q, kept)
    for b, n in enumerate(LENGTHS):
        turn = [angles.cos(), angles.sin()]
        keys = rotate(k[b], *turn, torch.arange(n, n + 3), interleaved)
        for i in range(3):
            check(cache.k[cache.place(b, n + i)], keys[i], f"key {i} of sequence {b}")
        of_q = torch.full((4,), n) if case == "plain" else torch.arange(n, n + 4)
        query = rotate(q[b], *turn, of_q, interleaved)
        everything = torch.cat([cache.content[b][0], keys]), torch.cat([cache.content[b][1], v[b]])
        wanted, _, _ = attend(*(x.transpose(0, 1) for x in (query, *everything)), **how)
        check(out[b].transpose(0, 1), wanted, f"out of sequence {b}")


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.data())
def test_random_combinations(data: st.DataObject) -> None:
    """Every option drawn together; what the formula says of each sequence, or nothing."""
    draw = data.draw
    batch, h_kv, group = draw(st.integers(1, 3)), draw(st.integers(1, 2)), draw(st.integers(1, 3))
    d, n_q, n_new = draw(st.sampled_from([8, 24, 64])), draw(st.integers(1, 4)), draw(st.integers(0, 4))
    lengths = draw(st.lists(st.integers(0, 12), min_size=batch, max_size=batch))
    layout, rows = draw(st.sampled_from(["dense", "indexed", "padded", "paged"])), draw(st.integers(1, 7))
    causal, window = draw(st.booleans()), (draw(st.integers(-1, 6)), draw(st.integers(-1, 3)))
    softcap, scale = draw(st.sampled_from([0.0, 1.5])), draw(st.sampled_from([None, -0.5, 0.0]))
    slopes = draw(st.sampled_from([None, torch.rand(h_kv * group), torch.rand(batch, h_kv * group)]))
    turn = n_new > 0 and draw(st.booleans())
    interleaved, splits = draw(st.booleans()), draw(st.integers(0, 3))

    capacity = 18
    pages = -(-capacity // rows)
    places = batch * pages if layout == "paged" else batch + 1
    order = torch.randperm(places)
    table = order.view(batch, pages).to(torch.int32) if layout == "paged" else None
    index = order[:batch].to(torch.int32) if layout in ("indexed", "padded") else None
    pad = int32([draw(st.integers(0, n)) for n in lengths]) if layout == "padded" else None
    k_cache, v_cache = (torch.full((places, rows if layout == "paged" else capacity, h_kv, d), torch.nan) for _ in "kv")
    held = [[torch.randn(n, h_kv, d) for _ in "kv"] for n in lengths]
    for b, n in enumerate(lengths):
        for j in range(0 if pad is None else int(pad[b]), n):
            at = (b, j) if index is None else (int(index[b]), j)
            at = at if table is None else (int(table[b, j // rows]), j % rows)
            k_cache[at], v_cache[at] = held[b][0][j], held[b][1][j]
    q, new = torch.randn(batch, n_q, h_kv * group, d), [torch.randn(batch, n_new, h_kv, d) for _ in "kv"]
    angles = torch.rand(capacity + 5, d // 4)
    given_rows: dict[str, Any] = dict(k=new[0], v=new[1]) if n_new else {}
    if turn:
        given_rows |= dict(rotary_cos=angles.cos(), rotary_sin=angles.sin(), rotary_interleaved=interleaved)
    out, lse = flash_attn_with_kvcache(
        q, k_cache, v_cache, **given_rows, cache_seqlens=int32(lengths), cache_batch_idx=index, cache_leftpad=pad,
        block_table=table, softmax_scale=scale, causal=causal, window_size=window, softcap=softcap, alibi_slopes=slopes,
        num_splits=splits, return_softmax_lse=True,
    )  # fmt: skip
    for b, n in enumerate(lengths):
        query, keys = q[b], new[0][b]
        if turn:
            of_q = torch.arange(n, n + n_q) if causal or window != (-1, -1) else torch.full((n_q,), n)
            query = rotate(query, angles.cos(), angles.sin(), of_q, interleaved)
            keys = rotate(keys, angles.cos(), angles.sin(), torch.arange(n, n + n_new), interleaved)
        first = 0 if pad is None else int(pad[b])
        everything = torch.cat([held[b][0], keys])[first:], torch.cat([held[b][1], new[1][b]])[first:]
        slope = slopes[b] if slopes is not None and slopes.dim() == 2 else slopes
        wanted, wanted_lse, _ = attend(
            *(x.transpose(0, 1) for x in (query, *everything)),
            causal=causal, window=window, softcap=softcap, scale=scale, slopes=slope,
        )  # fmt: skip
        check(out[b].transpose(0, 1), wanted, f"out of sequence {b}")
        check(lse[b], wanted_lse, f"lse of sequence {b}")


def test_lengths_as_an_int_and_a_full_cache() -> None:
    k, v, q = randn(2, 9, H_KV, D, seed=1), randn(2, 9, H_KV, D, seed=2), randn(2, 3, H_Q, D, seed=3)
    for n in (0, 5, 9):
        got = flash_attn_with_kvcache(q, k, v, cache_seqlens=n, causal=True)
        wanted = flash_attn_with_kvcache(q, k[:, :n], v[:, :n], causal=True)
        torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-6)
    table = torch.arange(6, dtype=torch.int32).view(
        2, 3
    )  # an int counts for each sequence, however many pages there are
    pages = [x.reshape(6, 3, H_KV, D) for x in (k, v)]
    got = flash_attn_with_kvcache(q, *pages, cache_seqlens=5, block_table=table)
    torch.testing.assert_close(got, flash_attn_with_kvcache(q, k, v, cache_seqlens=5), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("case", ["plain", "causal", "window", "alibi"])
def test_leftpad(case: str) -> None:
    options, how = OPTIONS[case]
    cache = Cache(None, indexed=True)
    pad = int32([3, 0, 10])
    q, k, v = randn(B, 2, H_Q, D, seed=1), randn(B, 2, H_KV, D, seed=2), randn(B, 2, H_KV, D, seed=3)
    for b in range(B):
        cache.k[cache.place(b, 0)[0], : int(pad[b])] = torch.nan  # what is padding is not read into the result
        cache.v[cache.place(b, 0)[0], : int(pad[b])] = torch.nan
    out = flash_attn_with_kvcache(
        q, k=k, v=v, cache_seqlens=int32(LENGTHS), cache_leftpad=pad, **cache.arguments(), **options
    )
    for b in range(B):
        keys, values = (torch.cat([old, x[b]])[int(pad[b]) :] for old, x in zip(cache.content[b], (k, v), strict=True))
        check(
            out[b].transpose(0, 1),
            attend(*(x.transpose(0, 1) for x in (q[b], keys, values)), **how)[0],
            f"sequence {b}",
        )


def test_steps_of_a_decode_equal_one_prefill() -> None:
    q, k, v = randn(1, 12, H_Q, D, seed=1), randn(1, 12, H_KV, D, seed=2), randn(1, 12, H_KV, D, seed=3)
    k_cache, v_cache = torch.zeros(1, 16, H_KV, D), torch.zeros(1, 16, H_KV, D)
    whole = flash_attn_with_kvcache(q, k.clone(), v.clone(), causal=True)
    steps, length = [], 0
    for n in (4, 1, 1, 3, 3):
        piece = slice(length, length + n)
        steps.append(
            flash_attn_with_kvcache(
                q[:, piece], k_cache, v_cache, k[:, piece], v[:, piece], cache_seqlens=length, causal=True
            )
        )
        length += n
    torch.testing.assert_close(torch.cat(steps, 1), whole, rtol=1e-5, atol=1e-5)


def test_strided_cache_is_written_in_place() -> None:
    whole = torch.zeros(2, 8, 2, H_KV, D)
    k_cache, v_cache = whole.unbind(2)
    k = randn(2, 1, H_KV, D, seed=1)
    flash_attn_with_kvcache(randn(2, 1, H_Q, D, seed=2), k_cache, v_cache, k, 2 * k, cache_seqlens=int32([3, 0]))
    assert torch.equal(whole[0, 3, 0], k[0, 0]) and torch.equal(whole[1, 0, 1], 2 * k[1, 0])
    assert whole.count_nonzero() == 4 * H_KV * D


def test_backward_is_refused_not_lost() -> None:
    q = randn(1, 1, H_Q, D, seed=1).requires_grad_()
    out = flash_attn_with_kvcache(q, torch.ones(1, 4, H_KV, D), torch.ones(1, 4, H_KV, D))
    with pytest.raises(RuntimeError, match="has no backward pass"):
        out.sum().backward()


def test_compile_fullgraph() -> None:
    torch._dynamo.reset()

    def step(q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
        return flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=lengths, causal=True)

    q, k, v = randn(2, 1, H_Q, D, seed=1), randn(2, 1, H_KV, D, seed=2), randn(2, 1, H_KV, D, seed=3)
    caches = [[randn(2, 8, H_KV, D, seed=s) for s in (4, 5)] for _ in range(2)]
    eager = step(q, *caches[0], k, v, int32([3, 0]))
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")(q, *caches[1], k, v, int32([3, 0]))
    torch.testing.assert_close(compiled, eager)
    for a, b in itertools.chain(zip(*caches, strict=True)):
        assert torch.equal(a, b), "the compiled step did not write the cache"


Q, KV, NEW = torch.zeros(2, 1, 4, 8), torch.zeros(2, 6, 2, 8), torch.zeros(2, 1, 2, 8)
TURN, PAGES = torch.zeros(9, 4), int32([[0], [1]])
APPEND: dict[str, Any] = dict(k=NEW, v=NEW, cache_seqlens=0)
REFUSED: list[tuple[type[Exception], str, dict[str, Any]]] = [
    (RuntimeError, "v: k and v must be given together", dict(k=NEW, cache_seqlens=0)),
    (RuntimeError, "cache_seqlens: must say where", dict(k=NEW, v=NEW)),
    (RuntimeError, "rotary_sin: .*together", dict(APPEND, rotary_cos=TURN)),
    (RuntimeError, "rotary_cos: needs new keys", dict(rotary_cos=TURN, rotary_sin=TURN)),
    (RuntimeError, "rotary_cos: must have 2 dim", dict(APPEND, rotary_cos=TURN[0], rotary_sin=TURN[0])),
    (RuntimeError, "cache_batch_idx: must be None with", dict(block_table=PAGES, cache_batch_idx=int32([0, 1]))),
    (RuntimeError, "cache_batch_idx: dtype must be torch.int32", dict(cache_batch_idx=torch.tensor([0, 1]))),
    (RuntimeError, "cache_leftpad: must be None with", dict(block_table=PAGES, cache_leftpad=int32([0, 1]))),
    (RuntimeError, "cache_leftpad: must not be negative", dict(cache_leftpad=int32([0, -1]))),
    (RuntimeError, "cache_leftpad: must have B elements, 2, but has 1", dict(cache_leftpad=int32([0]))),
    (RuntimeError, "cache_seqlens: must have B elements", dict(cache_seqlens=int32([1, 2, 3]))),
    (RuntimeError, "cache_seqlens: dtype must be torch.int32", dict(cache_seqlens=torch.tensor([1, 2]))),
    (RuntimeError, "cache_seqlens: must be in", dict(cache_seqlens=-1)),
    (TypeError, "cache_seqlens: must be an int", dict(cache_seqlens=1.5)),
    (RuntimeError, "seqlens_kv", dict(cache_seqlens=7)),
    (RuntimeError, "seqlens_kv", dict(APPEND, cache_seqlens=int32([0, 6]))),
    (RuntimeError, "kv_batch_idx", dict(cache_batch_idx=int32([0, 5]))),
    (RuntimeError, "block_table", dict(block_table=int32([[0], [9]]), cache_seqlens=1)),
    (RuntimeError, "k_new", dict(APPEND, k=NEW[..., :4])),
    (RuntimeError, "num_splits", dict(num_splits=-1)),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_refusals_name_argument_rule_and_value_and_write_nothing(number: int) -> None:
    kind, words, options = REFUSED[number]
    k_cache, v_cache = KV.clone() + 3, KV.clone() + 4
    with pytest.raises(kind, match=words):
        flash_attn_with_kvcache(Q, k_cache, v_cache, **options)
    assert torch.all(k_cache == 3) and torch.all(v_cache == 4)
