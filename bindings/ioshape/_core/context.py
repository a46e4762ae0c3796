# SPDX-License-Identifier: Apache-2.0
"""The library's context of this process, made on first use and again when settings change."""

from __future__ import annotations

import _thread
import errno
import os
import re
import sys
from typing import TYPE_CHECKING, Any

from ioshape._core import config
from ioshape._core import terminal as _terminal
from ioshape._core.errors import failure, last_failure
from ioshape._core.log import imported_logger
from ioshape._core.structs import called_from_c, owned, said
from ioshape._native import ffi, lib

if TYPE_CHECKING:
    from ioshape._core.config import Setting


# pathlib turns "//" into "/", so "s3:/x" counts as a URL. Any other "name:/" may be a directory.
_URL = re.compile(r"[a-z][a-z0-9+.-]+://|(?:s3|s3a|gs|gcs|abfss?|az|hf|hdfs|https?|file):/")


def encoded(path: str) -> bytes:
    """Return a path as bytes for C.

    Raise StorageError if the path is a URL, and ValueError if it contains a null character.
    """
    url = _URL.match(path)
    if url and not os.path.isdir(url[0].rstrip("/")):  # noqa: PTH112
        remedy = (
            "give the path of a mounted filesystem, or use a package that supports the URL: with "
            "fsspec.open(url, 'wb') as file: torch.save(obj, file)"
        )
        if path.startswith("s3:"):
            remedy = (
                f'save to a path, then run "ioshape upload PATH {path}" ("ioshape download" '
                "fetches it again)"
            )
        # torch.save raises a RuntimeError for a URL, and torch.load a FileNotFoundError. ENOENT
        # gives an exception that is both.
        why = f'cannot use "{path}": it is a URL, and ioshape reads and writes files'
        raise failure(-errno.ENOENT, why, path, "open", remedy=remedy)
    if "\0" in path:
        raise ValueError(
            f"the path {path!r} has a null character in it; no file can have that name"
        )
    return os.fsencode(path)


#: Values that tests set instead of built-in rules: fields of struct save_test_options.
test_options: dict[str, int] = {}


class Context:
    """Settings, kept memory and I/O engines of the library.

    A context stays alive until its last save and its last reader have ended.
    """

    #: the settings of the package; C does not read them
    durable: bool
    tier: str
    trace: str

    def __init__(self, configured: dict[str, Any] | None = None, **preferred: Any) -> None:
        """Open a context. Raise ValueError if a setting is invalid.

        Args:
            configured: Replaces the values that configure() has set.
            preferred: Settings that override all other sources, variables included.
        """
        given = ffi.new("struct save_test_options *", test_options)
        options = ffi.cast("struct ioshape_context_options *", given)
        options.size = ffi.sizeof("struct save_test_options")
        self._texts: list[Any] = []
        self._given = configured = config.given if configured is None else configured
        self._around = _around()
        options.log = ffi.addressof(lib, "ioshape_py_log")
        options.log_level = lib.IOSHAPE_LOG_DEBUG if _debugs() else lib.IOSHAPE_LOG_INFO
        for setting in config.SETTINGS.values():
            value = preferred.get(setting.name)
            if value is None:
                value = config.value_of(setting.name, configured)
                # The library reads the variable itself, and its error message names the variable.
                if os.environ.get(setting.variable):
                    continue
            if value is not None and setting.owner == "context":
                setattr(options, setting.name, self._in_c(setting, value))
        self._out = owned("context")
        if lib.ioshape_context_open(self._out, options):
            # The usual cause is a variable with an invalid value. That is the same kind of mistake
            # as an invalid argument of configure(), so it raises the same exception.
            raise ValueError(str(last_failure("", "open")))
        self.pointer: Any = self._out[0]
        self.durable = config.value_of("durable", configured) is not False
        self.tier = config.value_of("tier", configured) or ""
        self.trace = config.value_of("trace", configured) or ""

    def is_outdated(self) -> bool:
        """Return whether settings have changed since this context was made."""
        return self._given is not config.given or self._around != _around()

    def _in_c(self, setting: Setting, value: Any) -> Any:
        """Return a value in the form that its field of the C struct takes."""
        if setting.kind == "choice":
            return setting.words.index(value)
        if isinstance(value, str):
            self._texts.append(ffi.new("char[]", os.fsencode(value)))
            return self._texts[-1]
        return value


def _debugs() -> bool:
    """Return whether the program wants debug lines. They cost time: each line takes the GIL."""
    try:
        logger = sys.modules["logging"].getLogger("ioshape")
        return bool(logger.isEnabledFor(_LEVELS[lib.IOSHAPE_LOG_DEBUG]))
    except (KeyError, AttributeError):  # AttributeError: logging is only half imported
        return False


#: variables of the settings that C does not read
_VARIABLES = ("IOSHAPE_DURABLE", "IOSHAPE_TIER", "IOSHAPE_TRACE")


def _around() -> tuple[object, ...]:
    """Return what a program may change without configure(), and what a context depends on."""
    return (_debugs(), *map(os.environ.get, _VARIABLES))


#: the context for new saves and readers, unless it is outdated; None: none has been made
live: Context | None = None


def current() -> Context:
    """Return the context for a new save or reader. Make a new one if settings have changed."""
    global live  # noqa: PLW0603
    with config.lock:
        made = live
        if made is None or made.is_outdated():
            made = live = Context()
        return made


def _forget_in_child() -> None:
    # In a forked child the parent's context answers -EPERM, and freeing it does nothing.
    global live  # noqa: PLW0603
    live = None


os.register_at_fork(after_in_child=_forget_in_child)

_LEVELS = {
    lib.IOSHAPE_LOG_ERROR: 40,
    lib.IOSHAPE_LOG_WARNING: 30,
    lib.IOSHAPE_LOG_NOTICE: 30,  # Python has no level between a warning and a hidden line
    lib.IOSHAPE_LOG_INFO: 20,
    lib.IOSHAPE_LOG_DEBUG: 10,
}


def _later(kind: Any, _value: Any, _traceback: Any) -> None:
    # A log line cannot fail. But a Ctrl-C that arrived in the handler must not be lost.
    if kind is not None and issubclass(kind, KeyboardInterrupt):
        _thread.interrupt_main()


@called_from_c(onerror=_later)
def ioshape_py_on_log(_user: Any, level: int, message: Any) -> None:
    log = imported_logger()
    text = said(message)
    if log is not None and log.hasHandlers():
        _terminal.clear()  # a handler may write to the terminal
        log.log(_LEVELS.get(level, 20), "%s", text)
    elif level == lib.IOSHAPE_LOG_WARNING or (
        level == lib.IOSHAPE_LOG_NOTICE and not _terminal.is_waiting()
    ):
        # A program without logging still learns why a save waits. Errors need no line here, because
        # they are raised.
        _terminal.say(text)
