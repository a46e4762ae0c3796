# SPDX-License-Identifier: Apache-2.0
"""Texts for people that quote foreign names and addresses: no escape of theirs reaches a terminal,
and no password a log."""

from __future__ import annotations

import re

_WORD = re.compile(r"\S+")
_USER = re.compile(r"(?<=[\w+.-])://([^\s:/@,]*)([:@])")
_QUERY = re.compile(
    r"([?&](?:password|x-amz-signature|x-amz-security-token|x-amz-credential)=)[^\s&]*",
    re.IGNORECASE,
)


def one_line(text: str) -> str:
    """Return the text with escapes for what a terminal would act on, or not show."""
    if text.isprintable():
        return text
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode()
        for letter in text
    )


def _hide(word: str) -> str:
    # A password may have any character that its owner did not escape: it ends at the last "@".
    last = word.rfind("@")
    for match in _USER.finditer(word, 0, last + 1):
        if match[2] == ":":
            return f"{word[: match.end()]}***{word[last:]}"
        # Alone it is a user's name for Redis, and as good as a password for servers of HTTP.
        if match[1] and word.endswith(("http", "https"), 0, match.start()):
            return f"{word[: match.start(1)]}***{word[last:]}"
    return word


def without_password(text: str) -> str:
    """Return the text with *** in the place of passwords and tokens in addresses.

    The time grows with the text's length, whatever is in it.
    """
    if "://" in text:
        text = _WORD.sub(lambda match: _hide(match[0]), text)
    return _QUERY.sub(r"\1***", text)


def address_without_password(address: str) -> str:
    """Return an address with *** in the place of its password, which may have spaces."""
    return _QUERY.sub(r"\1***", _hide(address))


def harmless(text: str) -> str:
    """Return the text of an error or a log line as it may be shown: one_line(), and
    without_password()."""
    return one_line(without_password(text))
