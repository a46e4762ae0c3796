# SPDX-License-Identifier: Apache-2.0
"""Sends a signal at each module that an import looks for. The signal's handler saves."""

import faulthandler
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import FrameType, ModuleType

#: limit for a handler
_HANGS_S = 100


class Finder:
    """A finder of sys.meta_path that finds nothing.

    Python holds the global import lock around it.
    """

    def __init__(self, handle: Callable[[str], object], only: int | None) -> None:
        #: modules that were looked for, but not by the handler
        self.names: list[str] = []
        self._handle = handle
        self._only = only
        self._is_in_handler = False

    def find_spec(
        self, name: str, _path: Sequence[str] | None = None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not self._is_in_handler:
            self.names.append(name)
            if self._only in (None, len(self.names) - 1):
                signal.raise_signal(signal.SIGUSR1)
        return None

    def on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self._is_in_handler = True
        try:
            self._handle(self.names[-1])
        finally:
            self._is_in_handler = False


def interrupt(
    imports: Callable[[], object], handle: Callable[[str], object], only: int | None = None
) -> list[str]:
    """Call imports(). At each module that it looks for, call handle(name) in a signal handler.

    Args:
        imports: what imports modules.
        handle: the work of the handler.
        only: the number of the one module at which the signal comes. Default: all.

    Returns:
        The modules that were looked for.
    """
    faulthandler.dump_traceback_later(_HANGS_S, exit=True)
    finder = Finder(handle, only)
    before = signal.signal(signal.SIGUSR1, finder.on_signal)
    sys.meta_path.insert(0, finder)
    try:
        imports()
    finally:
        sys.meta_path.remove(finder)
        signal.signal(signal.SIGUSR1, before)
        faulthandler.cancel_dump_traceback_later()
    return finder.names


def in_child(function: Callable[[], object]) -> None:
    """Call a function in a forked child, which has imported what this process has."""
    child = os.fork()
    if not child:
        try:
            function()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
