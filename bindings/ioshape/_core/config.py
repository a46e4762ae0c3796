# SPDX-License-Identifier: Apache-2.0
"""The table of settings, and their values from defaults, configure() and IOSHAPE_* variables.

A variable has precedence over configure(), and a keyword of a single call over both.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from ioshape._core.locks import module_lock
from ioshape._core.structs import said
from ioshape._core.text import address_without_password, without_password
from ioshape._native import lib

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Literal


__all__ = ["SETTINGS", "configure", "settings", "value_of", "without_password"]

#: variables with the prefix IOSHAPE_ that are not settings
_OTHERS = ("IOSHAPE_INTEGRATIONS", "IOSHAPE_PASSWORD", "IOSHAPE_RUN")

#: held while settings change, and while a context is made of them
lock = module_lock()
#: values that configure() has set, by name; a new object after each change
given: dict[str, Any] = {}
_warned: set[str] = set()


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
    examine: str | Mapping[str, str] | None = None,
    mode: Literal["auto", "each", "node", "rank0"] | None = None,
    deadline_ms: int | None = None,
    parity: Literal["none", "1/2", "1/4", "1/8", "2/4", "2/6", "2/8"] | None = None,
    durable: bool | None = None,
    tier: str | os.PathLike[str] | None = None,
    trace: str | os.PathLike[str] | None = None,
    # made from the table: end
    **retired: object,
) -> None:
    """Set defaults for this process. A setting that you leave out, or pass as None, stays as it is.

    The environment variable IOSHAPE_NAME overrides the setting `name`, so the operator has the last
    word. A keyword of a single call overrides both. Saves in progress keep the settings that they
    began with.

    Each keyword is a setting of that name. docs/python.md lists the settings with their values,
    units and defaults. Sizes are in bytes: an int, or a str such as "64M". `examine` takes a
    mapping of rules to actions, too: {"nonfinite": "fail", "jump": "off"}.

    A password in the coordinator's address is never shown: settings() and error messages show ***
    instead. A setting that existed in the previous release is accepted and ignored, with one
    FutureWarning per name.

    Any thread may call this. A call sets all of its values or none.

    Raises:
        ValueError: A value is invalid, alone or combined with the other settings and variables.
            Nothing of this call is set then.
        TypeError: A keyword is not the name of a setting.
    """
    global given  # noqa: PLW0603
    _warn_of_retired(retired)
    arguments = {
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
        "examine": examine,
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
        for name, value in arguments.items()
        if value is not None
    }
    # Imported late, because it imports this module.
    from ioshape._core import context  # noqa: PLC0415

    with lock:
        while True:
            before = given
            wanted = {**before, **parsed}
            made = context.Context(wanted)  # raises ValueError if the combination is invalid
            # A signal handler may have called configure() meanwhile. If it did, merge again.
            if given is before:
                break
        given = wanted
        context.live = made


def _warn_of_retired(names: Iterable[str]) -> None:
    """Warn once for each retired setting. Raise TypeError for a name that never was a setting."""
    for name in names:
        if name not in RETIRED:
            raise TypeError(f"configure() has no setting {name!r}")
        if name not in _warned:
            _warned.add(name)
            sentence = f"configure({name}=...) does nothing any more: {RETIRED[name]}; leave it out"
            warnings.warn(sentence, FutureWarning, stacklevel=3)


def reset() -> None:
    """Forget everything that configure() has set. Tests call this."""
    global given  # noqa: PLW0603
    with lock:
        given = {}


def value_of(name: str, among: dict[str, Any] | None = None) -> Any:
    """Return a setting's value from its variable or from configure(); None for the default.

    `among` replaces the values that configure() has set.
    """
    setting = SETTINGS[name]
    text = os.environ.get(setting.variable)
    if text:
        return setting.parse(text, setting.variable)
    return (given if among is None else among).get(name)


def is_durable(keyword: bool | None) -> bool:
    """Return whether a save waits for stable storage. None stands for the setting "durable"."""
    if keyword is None:
        return value_of("durable") is not False
    try:
        return switch(keyword)
    except ValueError:
        raise ValueError(f"durable cannot be {keyword!r}; it takes True or False") from None


def tier_folder(tier: str | os.PathLike[str] | bool | None) -> str:
    """Return the absolute folder of the tier that a call uses; "" for none.

    None stands for the setting "tier". False or "" means that the call uses no tier.
    """
    if tier is None:
        tier = value_of("tier")
    if not tier:
        return ""
    folder: str = SETTINGS["tier"].parse(tier, "tier")
    return os.path.abspath(folder)  # noqa: PTH100


def settings() -> dict[str, tuple[Any, str]]:
    """Return the value and the source of each setting, by name.

    A value is None if the built-in default applies. The source is "default", "configure()" or the
    name of the environment variable. A password in the coordinator's address is replaced by ***.

    Any thread may call this.

    Raises:
        ValueError: An environment variable has an invalid value.
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
    """Return one sentence for each IOSHAPE_ variable that is unknown or has an invalid value.

    If all variables are valid one by one, their combination is checked as well. Commands and
    `ioshape run` call this before they start.
    """
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
    # The library itself warns of variables that are retired.
    retired = [f"IOSHAPE_{name.upper()}" for name in RETIRED]
    found = []
    for name in sorted(os.environ):
        if not name.startswith("IOSHAPE_") or name in (*known, *retired, *_OTHERS):
            continue
        if name.startswith(("IOSHAPE_TEST_", "IOSHAPE_PRELOAD")):
            continue
        from difflib import get_close_matches  # noqa: PLC0415 - only for those who mistyped

        nearest = get_close_matches(name, known, 1)
        remedy = f"did you mean {nearest[0]}?" if nearest else '"ioshape settings" lists them'
        found.append(f"there is no setting {name}; {remedy}")
    return found


# ---- The table of settings -----------------------------------------------------------------------
#
# The table of settings, and the parsing of their values.

_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


class Setting(NamedTuple):
    """One row of the table of settings (libioshape/base/settings.def)."""

    name: str
    #: The struct of the library that has the field: "context", "group" or "tier"; "package" for
    #: none.
    owner: str
    #: The kind of value: "choice", "bytes", "count", "text", "name", "path", "rules" or
    #: "switch".
    kind: str
    #: The words that a choice takes, in the order of the library's enum.
    words: tuple[str, ...]
    #: Bounds: of the value for numbers, of the length in bytes for texts.
    least: int
    most: int
    #: Texts for people, as the columns of the table in docs/python.md.
    values: str
    default: str
    about: str
    user: str

    @property
    def variable(self) -> str:
        return f"IOSHAPE_{self.name.upper()}"

    def parse(self, value: object, where: str) -> Any:
        """Return a value in the form that the package keeps. Raise ValueError if it is invalid.

        `where` names its source for the error message: an argument or a variable.
        """
        try:
            return self._parsed(value)
        except (ValueError, OverflowError):
            values = self.values.replace("`", "")
            raise ValueError(f"{where} cannot be {shown(value)!r}; it takes {values}") from None

    def _parsed(self, value: object) -> Any:
        if self.kind == "choice":
            return _one_of(value, self.words)
        if self.kind == "switch":
            return switch(value)
        if self.kind == "rules" and isinstance(value, Mapping):
            value = ",".join(f"{rule}={word}" for rule, word in value.items())
        if self.kind in ("text", "name", "path", "rules"):
            return self._text(value)
        number = _count(value) if self.kind == "count" else number_of_bytes(value)
        if not self.least <= number <= self.most:
            raise ValueError
        return number

    def _text(self, value: object) -> str:
        text = os.fspath(value) if isinstance(value, os.PathLike) else value
        if not isinstance(text, str):
            raise ValueError
        allowed = "[!-~]*" if self.kind == "name" else r"[^\x00-\x1f\x7f]*"
        if not self.least <= len(os.fsencode(text)) <= self.most or not re.fullmatch(allowed, text):
            raise ValueError
        return text


def _one_of(value: object, words: tuple[str, ...]) -> str:
    if value not in words:
        raise ValueError
    return str(value)


def _count(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise ValueError
    return int(value)


def number_of_bytes(value: object) -> int:
    """Return a number of bytes, given as 64, "64" or "64M"."""
    if not isinstance(value, str):
        return _count(value)
    digits = value.strip()
    unit = _UNITS.get(digits[-1:].upper(), 1)
    return int(digits[:-1] if unit > 1 else digits) * unit


def switch(value: object) -> bool:
    """Return a bool, given as bool, 0, 1 or a word such as "yes" or "off"."""
    if value in (True, False):
        return bool(value)
    word = value.lower() if isinstance(value, str) else value
    if word in ("1", "yes", "true", "on"):
        return True
    if word in ("0", "no", "false", "off"):
        return False
    raise ValueError


def shown(value: object) -> object:
    """Return a value as it may be shown to people.

    Passwords in addresses are replaced: the coordinator's address is the only setting that can hold
    a secret.
    """
    return address_without_password(value) if isinstance(value, str) else value


def _row(row: Any) -> Setting:
    owner, kind = said(row.owner).lower(), said(row.kind)
    words = tuple(said(row.words).split())
    values, default = said(row.values), said(row.otherwise)
    if words:
        values, default = ", ".join(f"`{word}`" for word in words), f"`{words[0]}`"
    least, most, about, user = row.least, row.most, said(row.about), said(row.user)
    return Setting(said(row.name), owner, kind, words, least, most, values, default, about, user)


_ROWS = [_row(row) for row in lib.ioshape_py_settings]
SETTINGS = {row.name: row for row in _ROWS if row.kind != "retired"}
#: Settings of the previous release that have no effect now, each with the reason.
RETIRED = {row.name: row.about for row in _ROWS if row.kind == "retired"}
