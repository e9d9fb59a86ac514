"""Values of command-line flags: lists of numbers or names, refused with the flag, the rule and the value.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import Sequence

import typer


def numbers(text: str, flag: str) -> list[int]:
    """ "128,256" -> [128, 256]; every entry at least 1."""
    values = []
    for piece in text.split(","):
        try:
            value = int(piece)
        except ValueError:
            raise typer.BadParameter(f"{flag}: must be whole numbers separated by commas, but is {text!r}") from None
        if value < 1:
            raise typer.BadParameter(f"{flag}: must be at least 1, but is {value}")
        values.append(value)
    return values


def names(text: str, flag: str, known: Sequence[str]) -> list[str]:
    """ "fp32,bf16" -> ["fp32", "bf16"]; every entry one of `known`."""
    values = [piece.strip() for piece in text.split(",")]
    for value in values:
        if value not in known:
            raise typer.BadParameter(f"{flag}: must be among {', '.join(known)}, but is {value!r}")
    return values


def one(text: str, flag: str, known: Sequence[str]) -> str:
    values = names(text, flag, known)
    if len(values) != 1:
        raise typer.BadParameter(f"{flag}: takes one of {', '.join(known)}, but is {text!r}")
    return values[0]
