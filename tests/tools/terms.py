# SPDX-License-Identifier: Apache-2.0
"""Words that the product no longer uses, because each had several meanings or no common one.

The glossary of docs/index.md has the terms that it uses. tests/tools/english.py lists the places
with a retired word.
"""

import fnmatch
import re
from collections.abc import Iterator
from typing import NamedTuple


class Term(NamedTuple):
    """A retired word."""

    #: finds it in code, comments and pages; in code the words of a name are separated by "_"
    pattern: re.Pattern[str]
    #: the words to use, with the meaning of each
    instead: str
    #: what the pattern finds and must not count, in the files of these names
    kept: tuple[tuple[str, str], ...] = ()


def _words(pattern: str) -> re.Pattern[str]:
    """Return a pattern for words of a sentence or of a name such as `make_room` or `MakeRoom`."""
    return re.compile(rf"(?<![A-Za-z])(?:{pattern})(?![A-Za-z])", re.IGNORECASE)


TERMS = (
    Term(
        _words("rooms?"),
        "space (of a filesystem), size or allocated (of a buffer)",
        # a message that other versions of the library read
        (("libioshape/group/messages.c", '{ "room",'),),
    ),
    Term(_words("series"), "checkpoint family"),
    Term(
        re.compile(
            r"(?<![A-Za-z])notes(?![A-Za-z.])|(?<![A-Za-z])note_|(?<!engine)_note\b|\bnoted\b"
        ),
        "message (of a rank), downgrade (of a save), to record",
        # a fuzz target, with its corpus
        (("docs/reliability.md", "| `notes` |"),),
    ),
    Term(_words("boards?|posts?|posted"), "store, put", (("*.py", "__post_init__"),)),
    Term(_words("lanes?"), "queue"),
    Term(_words("stakes?"), "priority inputs"),
    Term(re.compile(r"\bholds_up\b"), "blocks training"),
    Term(_words("hasty|impatient|calm|patience"), "spurious, back off; a limit of a wait"),
    Term(_words("leisure"), "background copy"),
    Term(
        re.compile(r"(?<![A-Za-z])(?:express|EXPRESS)(?![A-Za-z])"),
        "small-file bypass",
        # names of fields in a Redis, and names that users know from earlier versions
        (
            ("libioshape/slots/slots.lua", "express"),
            ("libioshape/slots/slots.lua", "EXPRESS"),
            ("bindings/*.py", '"express"'),
            ("bindings/*.py", '"--express"'),
            ("bindings/*.py", "SlotInfo.express"),
            ("docs/cli-reference.md", "`--express`"),
        ),
    ),
    Term(re.compile(r"\bbase_(?:own|disown)\b"), "register and unregister a descriptor"),
    Term(
        re.compile(r"\bbase_(?:refuse\w*|pass_on|leave|missing)\b"),
        "fail, propagate, return, null argument",
    ),
    Term(_words("settle[sd]?|settling"), "wait until written, record the end"),
    Term(_words("lends?|lent|lending|lender"), "borrow"),
    Term(re.compile(r"_expect\(|\bexpecting\b"), "prefetch"),
    Term(
        _words("anew"),
        "revalidate, again, start over",
        # an error of the script, which clients of this version read
        (("*", "IOSHAPE-ANEW"),),
    ),
    Term(_words("played"), "simulated"),
    Term(_words("is_sound|soundness"), "valid"),
    Term(_words("mends?|mended|mending"), "fix"),
    Term(
        # as a name; in sentences the idioms "in place" and "take the place of" are clear
        re.compile(r"\b\w*[a-z]_places?\b|\bplaces?_\w+|\bplaces\b|\bPlaces\b|[.>]place\b(?!\()"),
        "position, path, offset, address, group of targets",
        # the position in a queue
        (
            ("*", "ioshape_place"),
            ("*", "tell_place"),
            ("*", "track_place"),
            ("*", "describe_place"),
            ("*", "into_place"),
            ("*", "state.place"),
            ("*", "1 KiB in 16 places"),
            ("*", "lists the places"),
        ),
    ),
    Term(
        re.compile(
            r"\b[Pp]arts? of (?:a|the|each|that) ranks?\b|\branks?' parts?\b|\bPart\b(?! of)"
        ),
        "shard (of a rank), chunk (of a stored tensor)",
        # the part of a file that a process writes, and a name of version 0.1
        (
            ("bindings/ioshape/_save/atomic.py", "Part"),
            ("bindings/ioshape/_files/open.py", "Part"),
            ("bindings/ioshape/_integrations/dcp/*.py", "Part"),
            ("bindings/ioshape/__init__.py", '"Part"'),
        ),
    ),
)


def retired(name: str, text: str) -> Iterator[tuple[int, str]]:
    """Yield the lines of a file with a retired word, each with its number and the advice."""
    for term in TERMS:
        kept = [what for files, what in term.kept if fnmatch.fnmatch(name, files)]
        for number, line in enumerate(text.splitlines(), 1):
            rest = line
            for what in kept:
                rest = rest.replace(what, "")
            found = term.pattern.search(rest)
            if found:
                yield number, f"{found[0]} -> {term.instead}"
