"""ffpa: exact attention for head dims from 1 to 1024, forward and backward. SPDX-License-Identifier: Apache-2.0

    import ffpa
    o = ffpa.scaled_dot_product_attention(q, k, v, is_causal=True)   # torch's signature and semantics
    o, lse = ffpa.attention(q, k, v, causal=True, window=(1023, 0), softcap=30.0, return_lse=True)
    ffpa.patch_sdpa()                                                # or: send the whole program's attention here

Without torch installed, ``ffpa.numpy`` computes on numpy arrays; the rest of the names need torch and say so.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

from ._native import version as _version

if TYPE_CHECKING:
    from ._attention import attention
    from ._explain import Explanation, explain
    from ._sdpa import scaled_dot_product_attention
    from .ffpa_attn import ffpa_attn_func, ffpa_attn_varlen_func
    from .flash import (
        flash_attn_func,
        flash_attn_kvpacked_func,
        flash_attn_qkvpacked_func,
        flash_attn_varlen_func,
        flash_attn_varlen_kvpacked_func,
        flash_attn_varlen_qkvpacked_func,
        flash_attn_with_kvcache,
    )
    from .patch import FallbackWarning, patch_sdpa, unpatch_sdpa

_HOME = {
    "attention": "_attention",
    "Explanation": "_explain",
    "explain": "_explain",
    "scaled_dot_product_attention": "_sdpa",
    "ffpa_attn_func": "ffpa_attn",
    "ffpa_attn_varlen_func": "ffpa_attn",
    "flash_attn_func": "flash",
    "flash_attn_kvpacked_func": "flash",
    "flash_attn_qkvpacked_func": "flash",
    "flash_attn_varlen_func": "flash",
    "flash_attn_varlen_kvpacked_func": "flash",
    "flash_attn_varlen_qkvpacked_func": "flash",
    "flash_attn_with_kvcache": "flash",
    "FallbackWarning": "patch",
    "patch_sdpa": "patch",
    "unpatch_sdpa": "patch",
}
_SUBMODULES = ("integrations", "numpy")

__all__ = [
    "Explanation",
    "FallbackWarning",
    "attention",
    "explain",
    "ffpa_attn_func",
    "ffpa_attn_varlen_func",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "patch_sdpa",
    "scaled_dot_product_attention",
    "unpatch_sdpa",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return _version()
    if name in _SUBMODULES:
        return importlib.import_module(f"ffpa.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'ffpa' has no attribute {name!r}")
    try:
        value = getattr(importlib.import_module(f"ffpa.{_HOME[name]}"), name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ImportError(f"ffpa.{name} needs torch 2.10 or later (pip install 'ffpa[torch]')") from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME, *_SUBMODULES, "__version__"})


if importlib.util.find_spec("torch") is not None:
    # At once, not on first use: torch.export.load and torch.compile look for operators and functions that exist. What
    # fails here (an old torch, a library that is not found) is raised again where a name is used.
    with contextlib.suppress(ImportError, OSError, RuntimeError):
        for _name in _HOME:
            __getattr__(_name)
