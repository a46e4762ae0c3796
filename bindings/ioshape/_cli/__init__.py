# SPDX-License-Identifier: Apache-2.0
"""The command line "ioshape". Each module here with a function `command` is one command."""

from __future__ import annotations


def main() -> None:
    """Run the command line. The installed command and "python -m ioshape" call it."""
    from ioshape._cli.app import run  # noqa: PLC0415 - click is not needed to import this

    run()
