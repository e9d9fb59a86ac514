"""Batching rules of torch.ops.ffpa for torch.vmap. SPDX-License-Identifier: Apache-2.0

The mapped dimension joins the batch where nothing else in the problem counts sequences; otherwise it is one call each.
Dropout counts them too: with randomness="same" every sample must get the same mask.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from . import _ops

_Dims = Sequence[int | None]
_OWN = 5  # arguments of backward before those of the call: dout, dlse, o, lse, needs
_SEQUENCES = 7  # tensors from this place of a call on are not laid out [B, H, ...]
_BIAS = 4


@torch.library.register_vmap("ffpa::forward")
def _(info: Any, in_dims: _Dims, *call: Any) -> tuple[Any, Any]:
    n = info.batch_size
    if not _joins(call):
        return _one_by_one(_ops.forward_op, n, in_dims, call)
    batch = _batch(call[0], in_dims[0])
    joined = [_join(x, dim, n, batch) for x, dim in zip(call, in_dims, strict=True)]
    return tuple(x.unflatten(0, (n, batch)) for x in _ops.forward_op(*joined)), (0, 0)


@torch.library.register_vmap("ffpa::backward")
def _(info: Any, in_dims: _Dims, *arguments: Any) -> tuple[Any, Any]:
    n, call = info.batch_size, arguments[_OWN:]
    if not _joins(call):
        return _one_by_one(_ops.backward_op, n, in_dims, arguments)
    batch = _batch(call[0], in_dims[_OWN])
    joined = [_join(x, dim, n, batch) for x, dim in zip(arguments, in_dims, strict=True)]
    dq, dk, dv, dbias, dsinks = (
        x.unflatten(0, (n, batch)) if x.dim() > 1 else x.expand(n, 0) for x in _ops.backward_op(*joined)
    )
    if dbias.dim() > 2 and _batch(call[_BIAS], in_dims[_OWN + _BIAS]) == 1:
        dbias = dbias.sum(1, keepdim=True)
    return (dq, dk, dv, dbias, dsinks), (0,) * 5


def _joins(call: Sequence[Any]) -> bool:
    return not any(isinstance(x, Tensor) for x in call[_SEQUENCES:])


def _batch(x: Tensor, dim: int | None) -> int:
    """B of [B, ...] with a mapped dimension somewhere."""
    return x.shape[1 if dim == 0 else 0]


def _join(x: Any, dim: int | None, n: int, batch: int) -> Any:
    """[B or 1, ...] with a mapped dimension or without to [n * B, ...]."""
    if not isinstance(x, Tensor):
        return x
    x = x.expand(n, *x.shape) if dim is None else x.movedim(dim, 0)
    return x.expand(n, batch, *x.shape[2:]).flatten(0, 1)


def _one_by_one(op: Callable[..., Any], n: int, dims: _Dims, arguments: Sequence[Any]) -> tuple[Any, Any]:
    samples = (
        [x if dim is None else x.select(dim, i) for x, dim in zip(arguments, dims, strict=True)] for i in range(n)
    )
    results = [op(*sample) for sample in samples]
    return tuple(torch.stack(parts) for parts in zip(*results, strict=True)), (0,) * len(results[0])
