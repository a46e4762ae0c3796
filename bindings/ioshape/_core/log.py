# SPDX-License-Identifier: Apache-2.0
"""The logger "ioshape", with a filter that removes passwords and terminal escapes."""

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
    """Return the logger "ioshape". Import logging if needed.

    Its lines show no password and contain no escape sequence that a terminal would obey.
    """
    import logging  # noqa: PLC0415 - seldom needed, and not quick to import

    return _prepared(logging.getLogger("ioshape"))


def imported_logger() -> logging.Logger | None:
    """Return the logger "ioshape", or None until the program has imported logging.

    A thread of the library must not import logging itself. The thread that waits for the save may
    have been interrupted inside an import, and would hold the import lock.
    """
    try:
        return _prepared(sys.modules["logging"].getLogger("ioshape"))
    except (KeyError, AttributeError):  # AttributeError: logging is only half imported
        return None


def _prepared(made: logging.Logger) -> logging.Logger:
    made.addFilter(_make_harmless)  # a filter that is there already is not added again
    return made
