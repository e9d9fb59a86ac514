"""One line that sends a program's attention here: ``ffpa.patch_sdpa()``. SPDX-License-Identifier: Apache-2.0

Replaces ``torch.nn.functional.scaled_dot_product_attention`` for the whole process. Whatever looks that name up when it
runs is served: a program's own calls, torch.nn.MultiheadAttention and the Transformer layers (outside their inference
fast path, which is one fused operator without SDPA), diffusers, transformers with attn_implementation="sdpa". Code that
imported the function itself beforehand (``from torch.nn.functional import scaled_dot_product_attention``) keeps
torch's, as do graphs compiled before.

A call that worked before still works: what ffpa does not take goes to the function that was there before, and the first
time for each kind of reason a :class:`FallbackWarning` says why. ``ffpa.explain(...)`` tells it for one call
beforehand.
"""

from __future__ import annotations

import threading
import warnings
from collections import Counter
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import CausalBias, CausalVariant
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from . import _sdpa
from ._attention import attention

__all__ = ["FallbackWarning", "SdpaPatch", "patch_sdpa", "unpatch_sdpa"]


class FallbackWarning(UserWarning):
    """A call that ffpa did not take and torch computed; silence it with ``warnings.filterwarnings``."""


class SdpaPatch:
    """An active patch, made by :func:`patch_sdpa`. Ends with its ``with`` block or with :meth:`undo`.

    ``strict``: as given. ``fallbacks``: how often a call was handed to torch while this patch was active, by kind of
    reason (calls inside compiled graphs are counted when they are traced, if at all).
    """

    def __init__(self, strict: bool) -> None:
        self.strict = strict
        self.fallbacks: Counter[str] = Counter()
        self._scoped = False

    def __enter__(self) -> SdpaPatch:
        self._scoped = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.undo()

    @property
    def active(self) -> bool:
        """Whether this patch is still in force."""
        return self in _active

    def undo(self) -> None:
        """End this patch; with the last one the function that was there before returns. A second time does nothing."""
        global _active
        with _lock:
            _active = tuple(p for p in _active if p is not self)
            if not _active:
                _uninstall()


def patch_sdpa(strict: bool = False) -> SdpaPatch:
    """Send this process's ``torch.nn.functional.scaled_dot_product_attention`` to ffpa's.

    As a function, ``ffpa.patch_sdpa()``, until :func:`unpatch_sdpa`; as a context manager, ``with ffpa.patch_sdpa():``,
    until the block ends. Patches nest and may be entered and left by several threads in any order: the function is ours
    from the first to the last of them, for all threads.

    ``strict``: raise NotImplementedError with the reason where torch would be called instead. It holds for every call
    while any strict patch is active.
    """
    if not isinstance(strict, bool):
        raise TypeError(f"strict: must be a bool, but is {type(strict).__name__}")
    patch = SdpaPatch(strict)
    global _active
    with _lock:
        if not _active:
            _warned.clear()
            _install()
        _active = (*_active, patch)
    return patch


def unpatch_sdpa() -> bool:
    """Undo the latest ``ffpa.patch_sdpa()`` that was not used as a context manager. False if there is none."""
    for patch in reversed(_active):
        if not patch._scoped:
            patch.undo()
            return True
    return False


# ----------------------------------------------------------------------------------------------------------- machinery

_lock = threading.Lock()
_active: tuple[SdpaPatch, ...] = ()  # replaced under the lock, never changed: readers need no lock
_warned: set[str] = set()
_before: Callable[..., Tensor] = F.scaled_dot_product_attention  # what was there before us
_covered = False  # someone patched over us and was still there when we left


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """torch's function, while ffpa.patch_sdpa() holds: computed by ffpa where it takes the call."""
    patches = _active
    options: dict[str, Any] = dict(scale=scale, enable_gqa=enable_gqa)
    if not patches:
        return _before(query, key, value, attn_mask, dropout_p, is_causal, **options)
    if isinstance(attn_mask, CausalBias):
        return _with_causal_bias(query, key, value, attn_mask, dropout_p, is_causal, **options)
    reason = why_not_taken(query, key, value, attn_mask, dropout_p, is_causal, **options)
    if reason is None:
        try:
            return _sdpa.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, **options)
        except NotImplementedError as refusal:
            reason = f"not supported: {refusal}"
    if any(p.strict for p in patches):
        raise NotImplementedError(f"ffpa.patch_sdpa(strict=True): this call would be handed to torch: {reason}")
    if not torch.compiler.is_compiling():
        _report(reason, patches)
    return _before(query, key, value, attn_mask, dropout_p, is_causal, **options)


def _with_causal_bias(
    query: Tensor, key: Tensor, value: Tensor, mask: CausalBias, dropout_p: float, is_causal: bool, **options: Any
) -> Tensor:
    """torch.nn.attention.bias masks, which torch knows by comparing a function with the one that we replaced."""
    if is_causal:
        raise ValueError("attn_mask: a CausalBias must not come with is_causal=True")
    n_q, n_kv = mask.seq_len_q, mask.seq_len_kv
    if mask.variant == CausalVariant.UPPER_LEFT or n_q == n_kv:
        return scaled_dot_product_attention(query, key, value, None, dropout_p, True, **options)
    if query.dim() == 4 and why_not_taken(query, key, value, None, dropout_p, False, **options) is None:
        q, k, v, call = _sdpa.as_attention(query, key, value, None, dropout_p, False, **options)
        out = attention(q, k, v, **{**call, "causal": True, "anchor": "bottom_right"})
        assert isinstance(out, Tensor)
        return out
    visible = torch.ones(n_q, n_kv, dtype=torch.bool, device=query.device).tril(n_kv - n_q)
    return scaled_dot_product_attention(query, key, value, visible, dropout_p, False, **options)


def why_not_taken(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> str | None:
    """Why a patched call with these arguments would be handed to torch, as "kind: sentence"; None if ffpa takes it."""
    attn_mask = None if isinstance(attn_mask, CausalBias) else attn_mask  # translated, see _with_causal_bias
    compiling = torch.compiler.is_compiling()
    if torch.compiler.is_exporting() or (not compiling and torch._C._get_tracing_state() is not None):
        return "export: an exported or traced program keeps torch's own operator, so that it runs without ffpa"
    if not compiling and torch._C._is_torch_function_mode_enabled():
        for mode in _get_current_function_mode_stack():
            if not isinstance(mode, DeviceContext):  # torch.set_default_device, which does not mind
                return f"function mode: {type(mode).__name__} is active and may want to see torch's function"
    return _sdpa.fallback_reason(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)


def _report(reason: str, patches: tuple[SdpaPatch, ...]) -> None:
    kind = reason.partition(":")[0]
    with _lock:
        for patch in patches:
            patch.fallbacks[kind] += 1
        first = kind not in _warned
        _warned.add(kind)
    if first:
        warnings.warn(
            f"scaled_dot_product_attention handed to torch: {reason} (said once per kind)",
            FallbackWarning,
            stacklevel=3,
        )


def _install() -> None:
    global _before, _covered
    current = F.scaled_dot_product_attention
    if current is scaled_dot_product_attention or (_covered and current is not _before):
        return  # still in place, or below a foreign patch that calls us: installing again would make a circle
    _before, _covered = current, False
    F.scaled_dot_product_attention = scaled_dot_product_attention  # type: ignore[assignment]


def _uninstall() -> None:
    global _covered
    if F.scaled_dot_product_attention is scaled_dot_product_attention:
        F.scaled_dot_product_attention = _before
    else:  # a foreign patch came later; it may still call us, and without active patches we only pass on
        _covered = True


def _let_torchscript_see_the_operator() -> None:
    """torch.jit.script compiles the Python functions that it meets; tell it that this one is aten's."""
    try:
        from torch.jit._builtins import _register_builtin

        _register_builtin(scaled_dot_product_attention, "aten::scaled_dot_product_attention")
    except Exception:  # a private table: without it scripting inside a patch fails, nothing else does
        pass


_let_torchscript_see_the_operator()
