"""The `ffpa` command: info, check, bench, explain. Needs the extra "cli" (typer, rich, matplotlib).

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line; without its libraries say how to get them, and exit with 2."""
    try:
        import rich  # noqa: F401
        import typer  # noqa: F401
    except ModuleNotFoundError as error:
        sys.exit(f"ffpa: {error.name} is not installed; the command line needs: pip install 'ffpa[cli]'")
    from ffpa.cli.app import app

    app(prog_name="ffpa")
