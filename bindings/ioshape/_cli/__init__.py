# SPDX-License-Identifier: Apache-2.0
"""The command "ioshape"."""

from __future__ import annotations


def main() -> None:
    """What the installed command and "python -m ioshape" call."""
    from ioshape._cli.app import run  # noqa: PLC0415 - click is not needed to import this

    run()
