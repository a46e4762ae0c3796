# SPDX-License-Identifier: Apache-2.0
"""Settings: configure(), IOSHAPE_* variables and keyword arguments, in rising precedence."""

from __future__ import annotations

import os
import warnings
from typing import TYPE_CHECKING, Any

from ioshape._core.locks import ForkedLock
from ioshape._core.setting import RETIRED, SETTINGS, shown, switch_argument
from ioshape._core.text import without_password

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Literal

__all__ = ["SETTINGS", "configure", "settings", "value_of", "without_password"]

#: Variables of ours that are no settings.
_OTHERS = ("IOSHAPE_INTEGRATIONS", "IOSHAPE_PASSWORD", "IOSHAPE_RUN")

_lock = ForkedLock()
_configured: dict[str, Any] = {}
_warned: set[str] = set()
_generation = 0


def configure(
    *,
    # made from the table: begin
    engine: Literal["auto", "uring", "uring-async", "threads", "buffered"] | None = None,
    direct: Literal["prefer", "require", "off"] | None = None,
    staging_bytes: int | str | None = None,
    coordinator: str | None = None,
    password_file: str | os.PathLike[str] | None = None,
    pool: str | None = None,
    job: str | None = None,
    share: int | None = None,
    slots: int | None = None,
    unreachable: Literal["stagger", "wait", "fail"] | None = None,
    rate: int | str | None = None,
    layout: str | None = None,
    full: Literal["fail", "skip"] | None = None,
    unchanged: Literal["warn", "fail", "ignore"] | None = None,
    mode: Literal["auto", "each", "node", "rank0"] | None = None,
    deadline_ms: int | None = None,
    parity: Literal["none", "1/2", "1/4", "1/8", "2/4", "2/6", "2/8"] | None = None,
    durable: bool | None = None,
    tier: str | os.PathLike[str] | None = None,
    trace: str | os.PathLike[str] | None = None,
    # made from the table: end
    **retired: object,
) -> None:
    """Sets what the process prefers; what is left out stays as it is.

    A variable IOSHAPE_... of the same name, in capitals, wins over what is set here, so that an
    operator has the last word, and the keyword of a single call over both. Saves under way go on
    with the settings that they began with. Sizes may be written "64M".

    A password in the coordinator's address is never shown again: settings() and errors have *** in
    its place. A setting that the release before had is accepted, warns once and does nothing.

    Raises:
        ValueError: a value cannot be used, alone or together with the others, variables included.
            Then nothing of this call is set.
    """
    global _configured, _generation  # noqa: PLW0603
    _warn_of_retired(retired)
    given = {
        # named from the table: begin
        "engine": engine,
        "direct": direct,
        "staging_bytes": staging_bytes,
        "coordinator": coordinator,
        "password_file": password_file,
        "pool": pool,
        "job": job,
        "share": share,
        "slots": slots,
        "unreachable": unreachable,
        "rate": rate,
        "layout": layout,
        "full": full,
        "unchanged": unchanged,
        "mode": mode,
        "deadline_ms": deadline_ms,
        "parity": parity,
        "durable": durable,
        "tier": tier,
        "trace": trace,
        # named from the table: end
    }
    parsed = {
        name: SETTINGS[name].parse(value, name)
        for name, value in given.items()
        if value is not None
    }
    # Not before it is needed: the library, that is.
    from ioshape._core import context  # noqa: PLC0415

    with _lock:
        while True:
            before = _configured
            wanted = {**before, **parsed}
            made = context.Context(wanted)  # checks all of them
            # The handler of a signal may have set something meanwhile.
            if _configured is before:
                break
        _configured = wanted
        _generation += 1
        context.adopt(made, _generation)


def _warn_of_retired(names: Iterable[str]) -> None:
    """Raise TypeError for a name that never was a setting."""
    for name in names:
        if name not in RETIRED:
            raise TypeError(f"configure() has no setting {name!r}")
        if name not in _warned:
            _warned.add(name)
            sentence = f"configure({name}=...) does nothing any more: {RETIRED[name]}; leave it out"
            warnings.warn(sentence, FutureWarning, stacklevel=3)


def reset() -> None:
    """Forgets what was configured. For tests."""
    global _configured, _generation  # noqa: PLW0603
    with _lock:
        _configured = {}
        _generation += 1


def generation() -> int:
    """Changes whenever configure() was called."""
    return _generation


def configured() -> dict[str, Any]:
    """What configure() has set."""
    return _configured


def value_of(name: str, among: dict[str, Any] | None = None) -> Any:
    """A setting: from its variable, from configure(), or None for the default."""
    setting = SETTINGS[name]
    text = os.environ.get(setting.variable)
    if text:
        return setting.parse(text, setting.variable)
    return (_configured if among is None else among).get(name)


def is_durable(keyword: bool | None) -> bool:
    """Whether a save waits for stable storage."""
    if keyword is not None:
        return switch_argument("durable", keyword)
    return value_of("durable") is not False


def tier_folder(tier: str | os.PathLike[str] | bool | None) -> str:
    """Returns the folder of the tier that a call is to use; "" for none."""
    if tier is None:
        tier = value_of("tier")
    if not tier:
        return ""
    given: str = SETTINGS["tier"].parse(tier, "tier")
    return os.path.abspath(given)  # noqa: PTH100


def settings() -> dict[str, tuple[Any, str]]:
    """Each setting's value, None for the default, and where it comes from.

    The second of each pair is "default", "configure()", or the name of the variable. A password in
    the coordinator's address is shown as ***.
    """
    found: dict[str, tuple[Any, str]] = {}
    for setting in SETTINGS.values():
        value = value_of(setting.name)
        source = "default" if value is None else "configure()"
        if os.environ.get(setting.variable):
            source = setting.variable
        found[setting.name] = (shown(value), source)
    return found


def mistakes() -> list[str]:
    """What is wrong with the variables, for those who begin something: a sentence for each."""
    found = _unknown()
    for setting in SETTINGS.values():
        try:
            value_of(setting.name)
        except ValueError as error:
            found.append(str(error))
    if not found:
        from ioshape._core import context  # noqa: PLC0415

        try:
            context.Context()
        except ValueError as error:
            found.append(without_password(str(error)))
    return found


def _unknown() -> list[str]:
    known = [setting.variable for setting in SETTINGS.values()]
    # The library warns of those that are retired.
    retired = [f"IOSHAPE_{name.upper()}" for name in RETIRED]
    found = []
    for name in sorted(os.environ):
        if not name.startswith("IOSHAPE_") or name in (*known, *retired, *_OTHERS):
            continue
        if name.startswith("IOSHAPE_TEST_"):
            continue
        from difflib import get_close_matches  # noqa: PLC0415 - only for those who mistyped

        nearest = get_close_matches(name, known, 1)
        remedy = f"did you mean {nearest[0]}?" if nearest else '"ioshape settings" lists them'
        found.append(f"there is no setting {name}; {remedy}")
    return found
