# SPDX-License-Identifier: Apache-2.0
"""Messages of the package on stderr."""

from __future__ import annotations

import contextlib
import sys

from ioshape._core.text import harmless


def say(text: str) -> None:
    """Print a line on stderr."""
    # Errors are ignored: stderr may be closed, its reader may be gone, or a signal handler may have
    # interrupted a write to it (RuntimeError).
    with contextlib.suppress(OSError, ValueError, AttributeError, RuntimeError):
        sys.stderr.write(f"ioshape: {harmless(text)}\n")
        sys.stderr.flush()
