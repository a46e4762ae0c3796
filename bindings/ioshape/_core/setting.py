# SPDX-License-Identifier: Apache-2.0
"""The table of settings, and the parsing of their values."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from ioshape._core.structs import said
from ioshape._core.text import address_without_password
from ioshape._native import lib

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


def switch_argument(name: str, value: object) -> bool:
    """Return a call's argument as bool; "no" means False. Raise ValueError if it is no bool."""
    try:
        return switch(value)
    except ValueError:
        raise ValueError(f"{name} cannot be {value!r}; it takes True or False") from None


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
