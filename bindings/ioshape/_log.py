# SPDX-License-Identifier: Apache-2.0
"""The package's log."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ioshape._text import harmless

if TYPE_CHECKING:
    import logging


def _make_harmless(record: logging.LogRecord) -> bool:
    record.msg, record.args = harmless(record.getMessage()), None
    return True


def logger() -> logging.Logger:
    """Return the logger "ioshape". Its lines show no password, and no name in them drives a
    terminal."""
    import logging  # noqa: PLC0415 - seldom needed, and not quick to import

    made = logging.getLogger("ioshape")
    made.addFilter(_make_harmless)  # once: a filter that is there is not added again
    return made
