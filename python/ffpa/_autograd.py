"""Gradients of torch.ops.ffpa.forward. SPDX-License-Identifier: Apache-2.0

Two Functions with one forward and one backward: the plain one for eager and compiled code, and the setup_context one,
slower to call, that torch.func's transforms need. ``register_autograd`` is not used: it costs more per call and gives
silent zeros for second and forward-mode derivatives. Here those run as differentiable torch math (``_math``).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import _math, _native, _ops

__all__ = ["attend"]

_TENSORS = 13  # arguments of the op that are tensors; its options follow
_DIFFERENTIABLE = (0, 1, 2, 4, 6)  # q, k, v, bias, sinks among them


def attend(tensors: tuple[Tensor | None, ...], options: _native.Options) -> tuple[Tensor, Tensor]:
    """(o, lse) with whatever derivatives are asked for; arguments as for :func:`ffpa._ops.forward`."""
    if not torch.compiler.is_compiling():
        if forward_ad._current_level >= 0:
            return _math.forward(tensors, options)
        if torch._C._are_functorch_transforms_active():
            return _split(_Transformable.apply(*tensors, *options))  # type: ignore[no-untyped-call]
    if torch.is_grad_enabled():
        for index in _DIFFERENTIABLE:
            x = tensors[index]
            if x is not None and x.requires_grad:
                if torch.compiler.is_compiling():
                    tensors = _distinct(tensors)
                return _split(_Plain.apply(*tensors, *options))  # type: ignore[no-untyped-call]
    return _ops.forward(tensors, options)


def _distinct(tensors: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    """A tensor given twice (self-attention, K = V) as two views: torch.compile takes no Function with equal inputs."""
    found: list[Tensor | None] = []
    for x in tensors:
        found.append(x.view_as(x) if x is not None and any(x is y for y in found) else x)
    return tuple(found)


def _split(results: Any) -> tuple[Tensor, Tensor]:
    o, lse = results
    return o, lse


def _save(ctx: Any, arguments: tuple[Any, ...], o: Tensor, lse: Tensor) -> None:
    ctx.save_for_backward(*arguments[:_TENSORS], o, lse)
    ctx.options = arguments[_TENSORS:]
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    *tensors, o, lse = ctx.saved_tensors
    options = ctx.options
    gradients: list[Tensor | None] = [None] * (_TENSORS + len(options))
    needed = [ctx.needs_input_grad[index] for index in _DIFFERENTIABLE]
    if (dout is None and dlse is None) or not any(needed):
        return tuple(gradients)
    if dout is None:
        dout = torch.zeros_like(o)
    found: tuple[Tensor | None, ...]
    if torch.is_grad_enabled():  # create_graph=True, torch.func.grad
        found = _math.backward(dout, dlse, tensors, options, needed)
    else:
        found = _ops.backward(dout, dlse, tensors, o, lse, _for_backward(options), needed)
    for index, need, gradient in zip(_DIFFERENTIABLE, needed, found, strict=True):
        if need:
            gradients[index] = gradient
    return tuple(gradients)


def _for_backward(options: tuple[Any, ...]) -> tuple[Any, ...]:
    """A forced forward kernel forces its sibling."""
    kernel = options[-1]
    if kernel < 0:
        return options
    return (*options[:-1], _native.kernel_index(_native.kernels()[kernel].name, "backward"))


class _Plain(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        o, lse = _ops.forward(arguments[:_TENSORS], arguments[_TENSORS:])
        _save(ctx, arguments, o, lse)
        return o, lse

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        return _backward(ctx, *gradients)


class _Transformable(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, Tensor]:
        return _ops.forward(arguments[:_TENSORS], arguments[_TENSORS:])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        _save(ctx, inputs, *output)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        return _backward(ctx, *gradients)
