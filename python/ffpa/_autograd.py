"""Derivatives of torch.ops.ffpa.forward. SPDX-License-Identifier: Apache-2.0

Reverse mode runs torch.ops.ffpa.backward; second derivatives and forward mode run as differentiable torch operations
(``_math``). Each of the two Functions below comes in two styles: a plain one for eager and compiled code, and a
setup_context one, slower to call, that torch.func's transforms need. ``register_autograd`` is not used: it costs more
per call and gives silent zeros for second and forward-mode derivatives.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import TransformType
from torch._functorch.pyfunctorch import retrieve_all_functorch_interpreters
from torch.autograd import forward_ad

from . import _math, _ops
from . import _vmap as _vmap
from ._ops import GRADIENTS, Call

__all__ = ["attend", "wants_derivatives"]


def attend(*call: Any) -> tuple[Tensor, Tensor]:
    """(o, lse) of the arguments of :class:`Call` with whatever derivatives are asked for."""
    compiling = torch.compiler.is_compiling()
    if not compiling:
        if torch._C._are_functorch_transforms_active():
            if any(level.key() == TransformType.Jvp for level in retrieve_all_functorch_interpreters()):
                return _math.forward(Call(*call))
            return _pair(_TransformableForward.apply(*call))  # type: ignore[no-untyped-call]
        if forward_ad._current_level >= 0 and any(_has_tangent(x) for x in call):
            return _math.forward(Call(*call))
    if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in call):
        if compiling:
            call = _distinct(call)
        return _pair(_Forward.apply(*call))  # type: ignore[no-untyped-call]
    return _ops.forward(*call)


def wants_derivatives(*tensors: Tensor | None) -> bool:
    """Whether `attend` would do more than call the op."""
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
        return True
    return not torch.compiler.is_compiling() and (
        torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
    )


def _has_tangent(x: Any) -> bool:
    return isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None


def _distinct(call: Sequence[Any]) -> tuple[Any, ...]:
    """A tensor given twice (self-attention, K = V) as two views: torch.compile takes no Function with equal inputs."""
    found: list[Any] = []
    for x in call:
        found.append(x.view_as(x) if isinstance(x, Tensor) and any(x is y for y in found) else x)
    return tuple(found)


def _pair(results: Any) -> tuple[Tensor, Tensor]:
    o, lse = results
    return o, lse


# --------------------------------------------------------------------------------------------------- first derivatives


def _save(ctx: Any, arguments: Sequence[Any], *results: Tensor) -> None:
    """Keep tensors where autograd watches them, the rest beside them."""
    ctx.save_for_backward(*results, *(x if isinstance(x, Tensor) else None for x in arguments))
    ctx.others = [None if isinstance(x, Tensor) else x for x in arguments]
    ctx.set_materialize_grads(False)


def _saved(ctx: Any, results: int) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    tensors = ctx.saved_tensors
    arguments = (other if x is None else x for x, other in zip(tensors[results:], ctx.others, strict=True))
    return tensors[:results], tuple(arguments)


def _forward_backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    (o, lse), call = _saved(ctx, 2)
    gradients: list[Tensor | None] = [None] * len(call)
    needs = _needs(ctx)
    if needs == 0 or (dout is None and dlse is None):
        return tuple(gradients)
    if dout is None:
        dout = o.new_zeros(()).expand(o.shape)
    if dout.is_cuda and dout.stride() != o.stride():  # the kernels there copy whole rows
        dout = dout.contiguous()
    found: Any
    if not torch.is_grad_enabled():
        found = _ops.backward(dout, dlse, o, lse, needs, *call)
    elif torch._C._are_functorch_transforms_active():
        found = _TransformableBackward.apply(dout, dlse, o, lse, needs, *call)  # type: ignore[no-untyped-call]
    else:  # create_graph=True
        found = _Backward.apply(dout, dlse, o, lse, needs, *call)  # type: ignore[no-untyped-call]
    for bit, place in enumerate(GRADIENTS):
        if needs >> bit & 1:
            gradients[place] = found[bit]
    return tuple(gradients)


def _needs(ctx: Any) -> int:
    """Bits of the gradients that are asked for, in the order of GRADIENTS."""
    asked = ctx.needs_input_grad
    return sum(1 << bit for bit, place in enumerate(GRADIENTS) if place < len(asked) and asked[place])


class _Forward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *call: Any) -> tuple[Tensor, Tensor]:
        o, lse = _ops.forward(*call, needs=_needs(ctx))
        _save(ctx, call, o, lse)
        return o, lse

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        return _forward_backward(ctx, *gradients)


class _TransformableForward(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(*call: Any) -> tuple[Tensor, Tensor]:
        return _ops.forward(*call)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        _save(ctx, inputs, *output)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        return _forward_backward(ctx, *gradients)


# -------------------------------------------------------------------------------------------------- second derivatives
# The gradients as functions of dout, dlse and the call's tensors; o and lse are results of these and have no part.

_OWN = 5  # dout, dlse, o, lse, needs


def _backward_backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
    _, arguments = _saved(ctx, 0)
    dout, dlse, _, _, needs, *rest = arguments
    results: list[Tensor | None] = [None] * len(arguments)
    places = [i for i in (0, 1, *(_OWN + place for place in GRADIENTS)) if i < len(arguments)]
    places = [i for i in places if ctx.needs_input_grad[i]]
    asked = [bit for bit in range(len(GRADIENTS)) if needs >> bit & 1 and gradients[bit] is not None]
    if not places or not asked:
        return tuple(results)

    def of(*inputs: Tensor) -> tuple[Tensor | None, ...]:
        changed = [dout, dlse, None, None, needs, *rest]
        for place, x in zip(places, inputs, strict=True):
            changed[place] = x
        found = _math.backward(changed[0], changed[1], needs, Call(*changed[_OWN:]))
        return tuple(found[bit] for bit in asked)

    _, pull_back = _math.vjp(of, *(arguments[place] for place in places))
    found = pull_back(tuple(gradients[bit] for bit in asked))
    for place, gradient in zip(places, found, strict=True):
        results[place] = gradient
    return tuple(results)


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, ...]:
        _save(ctx, arguments)
        return _ops.backward(*arguments)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        return _backward_backward(ctx, *gradients)


class _TransformableBackward(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, ...]:
        return _ops.backward(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        _save(ctx, inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        return _backward_backward(ctx, *gradients)
