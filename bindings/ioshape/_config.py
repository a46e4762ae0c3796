# SPDX-License-Identifier: Apache-2.0
"""Settings: configure(), IOSHAPE_* variables and keyword arguments, in rising precedence."""

from __future__ import annotations

import os
import re
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def _size(value: object) -> int:
    """A number of bytes, as in 64, "64" or "64M"."""
    if isinstance(value, str):
        digits = value.strip()
        unit = _UNITS.get(digits[-1:].upper(), 1)
        number = int(digits[:-1] if unit > 1 else digits) * unit
    else:
        number = _count(value)
    return number


def _count(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise ValueError
    return int(value)


def _bounded(
    parse: Callable[[object], int], low: int, high: int, *, power_of_two: bool = False
) -> Callable[[object], int]:
    def parse_bounded(value: object) -> int:
        number = parse(value)
        if not low <= number <= high or (power_of_two and number & (number - 1)):
            raise ValueError
        return number

    return parse_bounded


def _seconds(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ValueError
    number = float(value)
    if not number >= 0:
        raise ValueError
    return number


def _switch(value: object) -> bool:
    if value in (True, False):
        return bool(value)
    if value in ("1", "yes", "true", "on"):
        return True
    if value in ("0", "no", "false", "off"):
        return False
    raise ValueError


def _word(*words: str) -> Callable[[object], str]:
    def parse(value: object) -> str:
        if value not in words:
            raise ValueError
        return str(value)

    return parse


def _text(pattern: str) -> Callable[[object], str]:
    def parse(value: object) -> str:
        text = os.fspath(value) if isinstance(value, os.PathLike) else value
        if not isinstance(text, str) or not re.fullmatch(pattern, text):
            raise ValueError
        return text

    return parse


def without_password(text: str) -> str:
    """The same text with *** where addresses in it have their passwords."""
    # A password may have any character in it that need not be escaped by those who are careless.
    text = re.sub(r"(\w+://[^\s:/@,]*):\S*@", r"\1:***@", text)
    return re.sub(r"([?&]password=)[^\s&]*", r"\1***", text, flags=re.IGNORECASE)


def _shown(value: object) -> object:
    """For people: no setting has a secret but the coordinator's address."""
    return without_password(value) if isinstance(value, str) else value


@dataclass(frozen=True)
class Setting:
    """One row of the table in docs/python.md."""

    name: str
    values: str
    default: str
    about: str
    parse: Callable[[object], Any]
    #: The C library's, which has the default.
    in_library: bool = True
    #: Of its contexts; otherwise of its groups.
    in_context: bool = True

    @property
    def variable(self) -> str:
        return f"IOSHAPE_{self.name.upper()}"


SETTINGS = {
    setting.name: setting
    for setting in (
        Setting(
            "engine",
            "`auto`, `uring`, `uring-async`, `threads`, `buffered`",
            "`auto`",
            "what moves the bytes; `auto` takes what the mount was found to like",
            _word("auto", "uring", "uring-async", "threads", "buffered"),
        ),
        Setting(
            "direct",
            "`prefer`, `require`, `off`",
            "`prefer`",
            "whether they go past the page cache (O_DIRECT)",
            _word("prefer", "require", "off"),
        ),
        Setting(
            "block_bytes",
            "a power of two, `64K` to `64M`",
            "by rule",
            "bytes of a request; by rule a stripe, `4M` where there are none",
            _bounded(_size, 64 << 10, 64 << 20, power_of_two=True),
        ),
        Setting(
            "queue_depth",
            "1 to 64",
            "by rule",
            "requests in flight; by rule as stripes and `target_bytes` have it, else 14",
            _bounded(_count, 1, 64),
        ),
        Setting(
            "copy_threads",
            "1 to 64",
            "cores, at most 4",
            "threads that copy tensors for a background save, or read from the page cache",
            _bounded(_count, 1, 64),
        ),
        Setting(
            "staging_bytes",
            "`16M` or more",
            "a quarter of the memory ÷ ranks of the node",
            "most memory that background saves hold",
            _bounded(_size, 16 << 20, (1 << 63) - 1),
        ),
        Setting(
            "staging_full",
            "`wait`, `refuse`",
            "`wait`",
            "what a background save does when earlier ones hold that memory: wait for room, or "
            "raise BlockingIOError",
            _word("wait", "refuse"),
        ),
        Setting(
            "log_level",
            "`error`, `warning`, `info`, `debug`",
            "`info`",
            'what is sent to the logger "ioshape"',
            _word("error", "warning", "info", "debug"),
        ),
        Setting(
            "coordinator",
            "`local`, `local:/FOLDER`, `redis://…`, `rediss://…`, `unix:///SOCKET`, "
            "`sentinel://…/SERVICE`, `open`",
            "`local`",
            "who says which saves may write now: the processes of this host among themselves, a "
            "Redis, or nobody",
            _text(r"open|local(:/[^\0\n]*)?|(rediss?|sentinel|unix)://[^\0\n]+|test:[^\0\n]*"),
        ),
        Setting(
            "password_file",
            "a path",
            "none",
            "its first line is the password, if the coordinator's address has none; so is the "
            "variable `IOSHAPE_PASSWORD`",
            _text(r"[^\0\n]+"),
        ),
        Setting(
            "pool",
            "up to 127 letters, digits and `._:@+/-`",
            "named after the filesystem",
            "the pool that all saves take their slots from",
            _text(r"[A-Za-z0-9._:@+/-]{1,127}"),
        ),
        Setting(
            "job",
            "a name of up to 63 letters, digits and signs",
            "the launcher's, see `ioshape.job()`",
            "whose saves these are: jobs that share a pool have their turns by their shares",
            _text(r"[!-~]{1,63}"),
        ),
        Setting(
            "share",
            "1 to 1000",
            "100",
            "of the pool for this job, against those of others",
            _bounded(_count, 1, 1000),
        ),
        Setting(
            "slots",
            "1 to 65536",
            "2",
            "how many may write at a time, if the operator has set nothing",
            _bounded(_count, 1, 65536),
        ),
        Setting(
            "lease_ms",
            "300 to 600000",
            "15000",
            "how long the slot of a writer that died stays taken",
            _bounded(_count, 300, 600_000),
        ),
        Setting(
            "stall_ms",
            "`lease_ms` or more",
            "120000",
            "a writer that has moved nothing for so long loses its slot",
            _bounded(_count, 300, (1 << 32) - 1),
        ),
        Setting(
            "away",
            "`stagger`, `wait`, `fail`",
            "`stagger`",
            "what a save does while the coordinator is out of reach: wait for a share of time of "
            "its own and write, wait until it is back, or fail",
            _word("stagger", "wait", "fail"),
        ),
        Setting(
            "stagger_most_ms",
            "milliseconds",
            "120000",
            "the longest such wait",
            _bounded(_count, 1, (1 << 32) - 1),
        ),
        Setting(
            "rate",
            "bytes, such as `500M`",
            "any",
            "bytes per second of all ranks of the job together",
            _bounded(_size, 1, (1 << 63) - 1),
        ),
        Setting(
            "layout",
            "`auto`, `directory`, or such as `stripe_count=8,stripe_size=4M,pool=flash`",
            "`auto`",
            "how new files shall lie on a striped filesystem, see [Layouts](layouts.md)",
            _text(r"[ -~]{1,1023}"),
        ),
        Setting(
            "target_bytes",
            "`64K` or more",
            "by rule",
            "most bytes in flight for one storage target, per file",
            _bounded(_size, 64 << 10, (1 << 63) - 1),
        ),
        Setting(
            "calibrate",
            "`auto`, `off`, `again`",
            "`auto`",
            "whether the first large save to a mount finds out by a short trial how it is best "
            "written to",
            _word("auto", "off", "again"),
        ),
        Setting(
            "full",
            "`fail`, `wait`, `skip`",
            "`fail`",
            "what a save does that does not fit into the free space",
            _word("fail", "wait", "skip"),
        ),
        Setting(
            "full_wait_ms",
            "milliseconds",
            "600000",
            "how long it waits for room at most",
            _bounded(_count, 1, (1 << 32) - 1),
        ),
        Setting(
            "mode",
            "`auto`, `each`, `node`, `rank0`",
            "`auto`",
            "who writes a group's checkpoint: every rank, one for each node, or rank 0",
            _word("auto", "each", "node", "rank0"),
            in_context=False,
        ),
        Setting(
            "board",
            "`auto`, `redis`, `sockets`, `files`",
            "`auto`",
            "where the ranks of a group leave each other notes: the coordinator, sockets of this "
            "host, or files beside the generations",
            _word("auto", "redis", "sockets", "files"),
            in_context=False,
        ),
        Setting(
            "deadline_ms",
            "1000 to 3600000",
            "120000",
            "a rank that gives no sign of life for so long is lost to its group",
            _bounded(_count, 1000, 3_600_000),
            in_context=False,
        ),
        Setting(
            "node",
            "up to 127 letters, digits and signs",
            "this host",
            "ranks of a group with the same name share memory",
            _text(r"[!-~]{1,127}"),
            in_context=False,
        ),
        Setting(
            "durable",
            "`1`, `0`",
            "`1`",
            "whether a save waits for stable storage; without, it is still atomic for readers",
            _switch,
            in_library=False,
        ),
        Setting(
            "verify",
            "`1`, `0`",
            "`1`",
            "whether a load compares checksums",
            _switch,
            in_library=False,
        ),
        Setting(
            "trace",
            "a folder",
            "none",
            "where each process writes down what its saves reported, for `ioshape trace`",
            _text(r"[^\0\n]+"),
            in_library=False,
        ),
        Setting(
            "exit_timeout_s",
            "seconds",
            "no limit",
            "how long the end of the process waits for background saves before it aborts them",
            _seconds,
            in_library=False,
        ),
        Setting(
            "exit_progress",
            "`1`, `0`",
            "`1`",
            "whether it says on stderr what it is waiting for",
            _switch,
            in_library=False,
        ),
    )
}

_lock = threading.Lock()


def _forget_lock() -> None:
    # Another thread of the parent may have held it.
    global _lock  # noqa: PLW0603
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_forget_lock)
_configured: dict[str, Any] = {}
_generation = 0


def configure(
    *,
    engine: str | None = None,
    direct: str | None = None,
    block_bytes: int | str | None = None,
    queue_depth: int | None = None,
    copy_threads: int | None = None,
    staging_bytes: int | str | None = None,
    staging_full: str | None = None,
    log_level: str | None = None,
    coordinator: str | None = None,
    password_file: str | os.PathLike[str] | None = None,
    pool: str | None = None,
    job: str | None = None,
    share: int | None = None,
    slots: int | None = None,
    lease_ms: int | None = None,
    stall_ms: int | None = None,
    away: str | None = None,
    stagger_most_ms: int | None = None,
    rate: int | str | None = None,
    layout: str | None = None,
    target_bytes: int | str | None = None,
    calibrate: str | None = None,
    full: str | None = None,
    full_wait_ms: int | None = None,
    mode: str | None = None,
    board: str | None = None,
    deadline_ms: int | None = None,
    node: str | None = None,
    durable: bool | None = None,
    verify: bool | None = None,
    trace: str | os.PathLike[str] | None = None,
    exit_timeout_s: float | None = None,
    exit_progress: bool | None = None,
) -> None:
    """Sets what the process prefers; what is left out stays as it is.

    A variable IOSHAPE_... of the same name, in capitals, wins over what is set here, so that an
    operator has the last word, and the keyword of a single call over both. Saves under way go on
    with the settings that they began with. Sizes may be written "64M".

    A password in the coordinator's address is never shown again: settings() and errors have *** in
    its place.
    """
    global _generation  # noqa: PLW0603
    given = {name: value for name, value in locals().items() if value is not None}
    parsed = {name: _parse(SETTINGS[name], name, value) for name, value in given.items()}
    with _lock:
        _configured.update(parsed)
        _generation += 1


def reset() -> None:
    """Forgets what was configured. For tests."""
    global _generation  # noqa: PLW0603
    with _lock:
        _configured.clear()
        _generation += 1


def generation() -> int:
    """Changes whenever configure() was called."""
    return _generation


def _parse(setting: Setting, name: str, value: object) -> Any:
    try:
        return setting.parse(value)
    except ValueError:
        values = setting.values.replace("`", "")
        raise ValueError(f"{name} cannot be {_shown(value)!r}; it takes {values}") from None


def value_of(name: str) -> Any:
    """A setting: from its variable, from configure(), or None for the default."""
    setting = SETTINGS[name]
    text = os.environ.get(setting.variable)
    if text:
        return _parse(setting, setting.variable, text)
    return _configured.get(name)


def settings() -> dict[str, tuple[Any, str]]:
    """Each setting's value, None for the default, and where it comes from.

    The second of each pair is "default", "configure()", or the name of the variable. A password in
    the coordinator's address is shown as ***.
    """
    found: dict[str, tuple[Any, str]] = {}
    for setting in SETTINGS.values():
        text = os.environ.get(setting.variable)
        if text:
            value = _parse(setting, setting.variable, text)
            found[setting.name] = (_shown(value), setting.variable)
        elif setting.name in _configured:
            found[setting.name] = (_shown(_configured[setting.name]), "configure()")
        else:
            found[setting.name] = (None, "default")
    return found
