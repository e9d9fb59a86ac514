"""``ffpa.explain(...)``: which kernel would run a call, and why no better one. SPDX-License-Identifier: Apache-2.0"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn.attention.bias import CausalBias, CausalVariant

from . import _sdpa
from ._attention import explain_text
from .patch import why_not_taken

__all__ = ["Explanation", "explain"]

_SDPA_ONLY = ("attn_mask", "is_causal", "enable_gqa")


@dataclass(frozen=True)
class Explanation:
    """What :func:`explain` found. ``str()`` gives it as lines to read."""

    kernel: str | None
    """Name of the kernel that would run, <arch>_<pass>_<idea>; None if no kernel would."""
    engine: str | None
    """Its engine: "cpu", "cuda" or "ref" (plain loops in double)."""
    workspace_bytes: int | None
    """Memory it needs beside its inputs and outputs."""
    num_splits: int | None
    """Parts of N_kv that it works on in parallel."""
    refused: tuple[tuple[str, str], ...]
    """(kernel, reason) for each better kernel, best first."""
    error: str | None
    """Why the call would raise, naming argument, rule and value; None if it would not."""
    fallback: str | None
    """Why a call under ffpa.patch_sdpa would be handed to torch (SDPA's arguments only); None if ffpa takes it."""

    def __str__(self) -> str:
        lines = []
        if self.fallback is not None:
            lines.append(f"handed to torch: {self.fallback}")
        if self.error is not None:
            lines.append(f"refused: {self.error}")
        if self.kernel is not None:
            lines.append(f"kernel: {self.kernel} (engine {self.engine})")
            lines.append(f"workspace: {self.workspace_bytes} bytes, splits: {self.num_splits}")
        lines += [f"not {name}: {reason}" for name, reason in self.refused]
        return "\n".join(lines)


def explain(
    query: Tensor, key: Tensor, value: Tensor, *arguments: Any, backward: bool = False, **options: Any
) -> Explanation:
    """What would run for these arguments, without running it.

    Takes the arguments of :func:`ffpa.attention`, or those of :func:`ffpa.scaled_dot_product_attention` (``attn_mask``,
    ``dropout_p`` and ``is_causal`` also by position); the latter if ``attn_mask``, ``is_causal`` or ``enable_gqa`` is
    among them, or nothing but ``dropout_p`` and ``scale``, which mean the same in both. ``backward``: explain the
    backward pass.

    A call that would raise is explained by its ``error``. TypeError for arguments of both functions mixed, or of
    neither.
    """
    if not (arguments or any(name in options for name in _SDPA_ONLY)):
        plain = options.keys() <= {"dropout_p", "scale"}
        fallback = _fallback(query, key, value, **options) if plain else None
        return _parse(explain_text(query, key, value, backward=backward, **options), fallback)
    call = _sdpa_arguments(*arguments, **options)
    fallback = _fallback(query, key, value, **call)
    bottom_right = False
    if isinstance(mask := call["attn_mask"], CausalBias):
        bottom_right = mask.variant == CausalVariant.LOWER_RIGHT
        call |= dict(attn_mask=None, is_causal=True)
    try:
        q, k, v, translated = _sdpa.as_attention(query, key, value, **call)
    except RuntimeError as refusal:  # NotImplementedError is one, too
        return Explanation(None, None, None, None, (), str(refusal), fallback)
    if bottom_right:
        translated["anchor"] = "bottom_right"
    return _parse(explain_text(q, k, v, backward=backward, **translated), fallback)


def _fallback(query: Tensor, key: Tensor, value: Tensor, **call: Any) -> str | None:
    try:
        return why_not_taken(query, key, value, **call)
    except RuntimeError:  # torch refuses the call as well: that is the error, not a fallback
        return None


def _sdpa_arguments(
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> dict[str, Any]:
    return dict(attn_mask=attn_mask, dropout_p=dropout_p, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)


def _parse(text: str, fallback: str | None) -> Explanation:
    """From the lines of ffpa_forward_explain (ffpa.h): "error: ", "kernel: ", "engine: ", "workspace: ", "splits: ",
    "refused NAME: "."""
    fields: dict[str, str] = {}
    refused = []
    for line in text.splitlines():
        head, _, rest = line.partition(": ")
        if head.startswith("refused "):
            refused.append((head.removeprefix("refused "), rest))
        else:
            fields[head] = rest
    return Explanation(
        kernel=fields.get("kernel"),
        engine=fields.get("engine"),
        workspace_bytes=int(fields["workspace"].split()[0]) if "workspace" in fields else None,
        num_splits=int(fields["splits"]) if "splits" in fields else None,
        refused=tuple(refused),
        error=fields.get("error"),
        fallback=fallback,
    )
