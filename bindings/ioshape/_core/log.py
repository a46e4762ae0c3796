# SPDX-License-Identifier: Apache-2.0
"""The package's log."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from ioshape._core.text import harmless

if TYPE_CHECKING:
    import logging


def _make_harmless(record: logging.LogRecord) -> bool:
    record.msg, record.args = harmless(record.getMessage()), None
    return True


def logger() -> logging.Logger:
    """Return the logger "ioshape". Its lines show no password, and no name in them drives a
    terminal."""
    import logging  # noqa: PLC0415 - seldom needed, and not quick to import

    return _prepared(logging.getLogger("ioshape"))


def imported_logger() -> logging.Logger | None:
    """Return the same logger; None until a program has imported logging.

    A thread of the library must not import it: the thread that waits for the save may have been
    interrupted in an import.
    """
    try:
        return _prepared(sys.modules["logging"].getLogger("ioshape"))
    except (KeyError, AttributeError):  # half imported
        return None


def _prepared(made: logging.Logger) -> logging.Logger:
    made.addFilter(_make_harmless)  # once: a filter that is there is not added again
    return made
