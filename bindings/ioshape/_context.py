# SPDX-License-Identifier: Apache-2.0
"""The library's context of this process: made at need, remade when the settings change."""

from __future__ import annotations

import _thread
import contextlib
import os
import threading
from pathlib import Path
from typing import Any

from ioshape import _config
from ioshape._errors import failure
from ioshape._job import job
from ioshape._native import ffi, lib

_MESSAGE_BYTES = 1024

_ENUMS = {
    "engine": {
        "auto": lib.IOSHAPE_ENGINE_AUTO,
        "uring": lib.IOSHAPE_ENGINE_URING,
        "uring-async": lib.IOSHAPE_ENGINE_URING_ASYNC,
        "threads": lib.IOSHAPE_ENGINE_THREADS,
        "buffered": lib.IOSHAPE_ENGINE_BUFFERED,
    },
    "direct": {
        "prefer": lib.IOSHAPE_DIRECT_PREFER,
        "require": lib.IOSHAPE_DIRECT_REQUIRE,
        "off": lib.IOSHAPE_DIRECT_OFF,
    },
    "staging_full": {
        "wait": lib.IOSHAPE_STAGING_WAIT,
        "refuse": lib.IOSHAPE_STAGING_REFUSE,
    },
    "calibrate": {
        "auto": lib.IOSHAPE_CALIBRATE_AUTO,
        "off": lib.IOSHAPE_CALIBRATE_OFF,
        "again": lib.IOSHAPE_CALIBRATE_AGAIN,
    },
    "full": {
        "fail": lib.IOSHAPE_FULL_FAIL,
        "wait": lib.IOSHAPE_FULL_WAIT,
        "skip": lib.IOSHAPE_FULL_SKIP,
    },
    "away": {
        "stagger": lib.IOSHAPE_AWAY_STAGGER,
        "wait": lib.IOSHAPE_AWAY_WAIT,
        "fail": lib.IOSHAPE_AWAY_FAIL,
    },
    "log_level": {
        "error": lib.IOSHAPE_LOG_ERROR,
        "warning": lib.IOSHAPE_LOG_WARNING,
        "info": lib.IOSHAPE_LOG_INFO,
        "debug": lib.IOSHAPE_LOG_DEBUG,
    },
}


def encoded(path: str) -> bytes:
    """A path as C takes it."""
    if "\0" in path:
        raise ValueError(
            f"the path {path!r} has a null character in it; no file can have that name"
        )
    return os.fsencode(path)


class Context:
    """Settings, kept memory and I/O engines. It lives until its last save and reader have ended."""

    def __init__(self, **preferred: Any) -> None:
        """What is given here wins, also over variables."""
        options = ffi.new("struct ioshape_context_options *")
        options.size = ffi.sizeof("struct ioshape_context_options")
        self._texts: list[Any] = []
        options.log = lib.ioshape_py_log
        for setting in _config.SETTINGS.values():
            of_context = setting.in_library and setting.in_context
            value = _config.value_of(setting.name) if of_context else None
            value = preferred.get(setting.name, value)
            if value is None and setting.name == "job":
                value = job().id or None
            if value is not None:
                setattr(options, setting.name, self._in_c(setting.name, value))
        if not options.staging_bytes:
            options.staging_bytes = _share_of_memory()
        out = ffi.new("struct ioshape_context **")
        message = ffi.new("char[]", _MESSAGE_BYTES)
        code = lib.ioshape_context_open(out, options, message, _MESSAGE_BYTES)
        if code:
            # A variable with a bad value, as a rule: that is the same kind of mistake as a bad
            # argument of configure().
            sentence = ffi.string(message).decode(errors="replace")
            if sentence.startswith("the layout ") and os.environ.get("IOSHAPE_LAYOUT"):
                sentence = f"IOSHAPE_LAYOUT: {sentence}"
            raise ValueError(sentence)
        self.pointer: Any = ffi.gc(out[0], lib.ioshape_context_free)

    def _in_c(self, name: str, value: Any) -> Any:
        """A setting as its field takes it."""
        if name in _ENUMS:
            return _ENUMS[name][value]
        if isinstance(value, str):
            self._texts.append(ffi.new("char[]", os.fsencode(value)))
            return self._texts[-1]
        return value

    def failure(self, code: int, path: str, operation: str) -> Exception:
        """The exception for the last call in this thread that failed."""
        sentence = ffi.string(lib.ioshape_context_message(self.pointer)).decode(errors="replace")
        return failure(code, sentence or _plain(code), path, operation)


def _plain(code: int) -> str:
    return str(ffi.string(lib.ioshape_strerror(code)).decode())


def _share_of_memory() -> int:
    """This rank's part of the memory for staging, where the library itself could not know it.

    The library looks at LOCAL_WORLD_SIZE, which torchrun sets; other launchers say it otherwise.
    """
    ranks = job().local_world_size
    if ranks == 1 or os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("IOSHAPE_STAGING_BYTES"):
        return 0
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    # What the library looks at, too: the limit of a container.
    with contextlib.suppress(OSError, ValueError):
        memory = min(memory, int(Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii")))
    return max(memory // 4 // ranks, 64 << 20)


_lock = threading.Lock()
_current: Context | None = None
_current_generation = -1


def current() -> Context:
    """The context for a new save or reader."""
    global _current, _current_generation  # noqa: PLW0603
    with _lock:
        generation = _config.generation()
        if _current is None or generation != _current_generation:
            _current = Context()
            _current_generation = generation
        return _current


def current_if_any() -> Context | None:
    """The context, if there is one."""
    return _current


def _forget_in_child() -> None:
    # The parent's context answers -EPERM here, and freeing it does nothing. Somebody may have held
    # the lock.
    global _current, _lock  # noqa: PLW0603
    _current = None
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_forget_in_child)

_LEVELS = {
    lib.IOSHAPE_LOG_ERROR: 40,
    lib.IOSHAPE_LOG_WARNING: 30,
    lib.IOSHAPE_LOG_INFO: 20,
    lib.IOSHAPE_LOG_DEBUG: 10,
}


def _later(kind: Any, _value: Any, _traceback: Any) -> None:
    # A log line cannot fail; but Ctrl-C that came just then must not be lost.
    if kind is not None and issubclass(kind, KeyboardInterrupt):
        _thread.interrupt_main()


@ffi.def_extern(onerror=_later)  # type: ignore[untyped-decorator]
def ioshape_py_log(_user: Any, level: int, message: Any) -> None:
    import logging  # noqa: PLC0415 - seldom needed, and not quick to import

    logger = logging.getLogger("ioshape")
    if not logger.handlers:
        # As libraries should: without it, programs that never set logging up would have our lines
        # on stderr.
        logger.addHandler(logging.NullHandler())
    logger.log(_LEVELS.get(level, 20), "%s", ffi.string(message).decode(errors="replace"))
