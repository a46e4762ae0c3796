# SPDX-License-Identifier: Apache-2.0
"""Cleaning of texts for people that quote foreign names and addresses.

No escape sequence of theirs reaches a terminal, and no password reaches a log.
"""

from __future__ import annotations

import re

_WORD = re.compile(r"\S+")
_USER = re.compile(r"(?<=[\w+.-])://([^\s:/@,]*)([:@])")
_QUERY = re.compile(
    r"([?&](?:password|x-amz-signature|x-amz-security-token|x-amz-credential)=)[^\s&]*",
    re.IGNORECASE,
)


def one_line(text: str) -> str:
    """Return the text with escapes for all characters that a terminal would obey or hide."""
    if text.isprintable():
        return text
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode()
        for letter in text
    )


def _hide(word: str) -> str:
    # A password may contain any character that its owner did not escape. So it ends at the last
    # "@".
    last = word.rfind("@")
    for match in _USER.finditer(word, 0, last + 1):
        if match[2] == ":":
            return f"{word[: match.end()]}***{word[last:]}"
        # A name without a password is a user's name in Redis. For HTTP servers it can be a token.
        if match[1] and word.endswith(("http", "https"), 0, match.start()):
            return f"{word[: match.start(1)]}***{word[last:]}"
    return word


def without_password(text: str) -> str:
    """Return the text with *** instead of the passwords and tokens in addresses.

    The time is linear in the length of the text, whatever it contains.
    """
    if "://" in text:
        text = _WORD.sub(lambda match: _hide(match[0]), text)
    return _QUERY.sub(r"\1***", text)


def address_without_password(address: str) -> str:
    """Return an address with *** instead of its password, which may contain spaces."""
    return _QUERY.sub(r"\1***", _hide(address))


def harmless(text: str) -> str:
    """Return an error's text or a log line in a form that is safe to show.

    It is one line, without escape sequences and passwords.
    """
    return one_line(without_password(text))
