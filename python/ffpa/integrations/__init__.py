"""What plugs ffpa into other libraries; each module imports its library when it is imported itself.
SPDX-License-Identifier: Apache-2.0

- ``ffpa.integrations.transformers``: ``attn_implementation="ffpa"``
- ``ffpa.integrations.diffusers``: ``FfpaAttnProcessor`` for VAEs, the attention backend "ffpa" for transformer blocks
"""

from __future__ import annotations

import importlib
from types import ModuleType

__all__ = ["diffusers", "transformers"]


def __getattr__(name: str) -> ModuleType:
    if name in __all__:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
