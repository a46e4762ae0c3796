# SPDX-License-Identifier: Apache-2.0
"""The object that says what an uploaded directory consists of."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any, Literal

from ioshape._remote.address import MOST_KEY_BYTES
from ioshape._remote.sums import crc32

#: its name; it is written when all that it lists is there
LISTING = ".ioshape-objects.json"
#: of it; it takes some 150 bytes for each file
MOST_BYTES = 32 << 20
#: of files, and of directories
MOST_NAMES = 100_000
#: of directories in each other
MOST_LEVELS = 64
#: of a file or a directory, in its own: of all filesystems
_MOST_PART_BYTES = 255
# Brackets and commas for each name. Names may have some, too.
_MARKS = 8
_MOST_DIGITS = 20
_CRC32 = b',\n "crc32": '
_MEMBERS = {"format", "version", "kind", "files", "directories", "crc32"}

Kind = Literal["file", "generation", "dcp", "directory"]

#: What comes last of all, behind the listing: whoever reads these kinds in their own ways sees them
#: as complete only then.
MARKERS: dict[str, str] = {"generation": "manifest.json", "dcp": ".metadata"}


@dataclass(frozen=True)
class Entry:
    """A file."""

    name: str
    bytes: int
    crc32: int
    #: in nanoseconds since 1970: checksums beside a file count only for this time
    modified_ns: int


@dataclass(frozen=True)
class Listing:
    """What a directory consists of."""

    kind: Kind
    files: tuple[Entry, ...]
    #: all that are in it, also those without files
    directories: tuple[str, ...]

    @property
    def n_bytes(self) -> int:
        """Of all files."""
        return sum(one.bytes for one in self.files)

    @property
    def last(self) -> str:
        """The name of what was written last."""
        return MARKERS.get(self.kind, LISTING)


def encode(listing: Listing) -> bytes:
    """Return JSON whose last member is a checksum of all before its line."""
    value = {"format": "ioshape-objects", "version": 1, **asdict(listing)}
    body = json.dumps(value, indent=1).encode().removesuffix(b"\n}")
    return body + _CRC32 + b'"%08x"\n}\n' % crc32(body)


def decode(data: bytes) -> Listing:
    """What encode() made. Nothing of it is believed.

    Raises:
        ValueError: it is none.
    """
    value = _parsed(data)
    if not isinstance(value, dict) or value.get("format") != "ioshape-objects":
        raise ValueError("it is no listing")
    if value.get("version") != 1:
        raise ValueError("a newer version of ioshape has written it; use that one")
    _check_sum(data, value)
    try:
        files = tuple(_entry(one) for one in value["files"])
        directories = tuple(_name(one) for one in value["directories"])
        kind = value["kind"]
    except (KeyError, TypeError) as error:
        raise ValueError(f"it lacks something ({error})") from None
    if kind not in ("generation", "dcp", "directory"):
        raise ValueError("it is of an unknown kind")
    _check_together([one.name for one in files], directories)
    return Listing(kind, files, directories)


def _check_sum(data: bytes, value: dict[str, Any]) -> None:
    # Versions before 0.2 wrote no checksum. A damaged name of it must not pass for that.
    if not set(value) <= _MEMBERS:
        raise ValueError("it has an unknown member")
    right = f"{crc32(data.rpartition(_CRC32)[0]):08x}"
    if value.get("crc32", right) != right:
        raise ValueError("its checksum is wrong")


def _parsed(data: bytes) -> Any:
    """JSON of an attacker, in time and memory that this length and these counts limit."""
    if len(data) > MOST_BYTES or not data.isascii():
        raise ValueError("it is too large, or no listing")
    if max(data.count(b"{"), data.count(b"[")) > 2 * MOST_NAMES + _MARKS:
        raise ValueError("it has too many names")
    if data.count(b",") > _MARKS * MOST_NAMES:
        raise ValueError("it has too many names")
    try:
        return json.loads(data, parse_int=_whole, parse_float=_whole, parse_constant=_whole)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _whole(digits: str) -> int:
    # Before version 3.10.7 the time of int() grows with the square of this.
    if len(digits) > _MOST_DIGITS:
        raise ValueError("a number is out of range")
    return int(digits)


def _check_together(files: list[str], directories: tuple[str, ...]) -> None:
    if max(len(files), len(directories)) > MOST_NAMES:
        raise ValueError("it has too many names")
    names, above = {*files, *directories}, {"", *directories}
    if len(names) != len(files) + len(directories):
        raise ValueError("it has a name twice")
    # Otherwise one name could make as many directories as it has levels.
    if any(name.rpartition("/")[0] not in above for name in names):
        raise ValueError("the directory of a name in it is missing")


def _entry(one: Any) -> Entry:
    entry = Entry(_name(one["name"]), one["bytes"], one["crc32"], one["modified_ns"])
    for number, bits in ((entry.bytes, 63), (entry.crc32, 32), (entry.modified_ns, 63)):
        if type(number) is not int or not 0 <= number < 1 << bits:
            raise ValueError(f'of "{entry.name}" a number is out of range')
    return entry


def _name(name: Any) -> str:
    """Of what lies in the directory or below."""
    if not isinstance(name, str) or "\0" in name:
        raise ValueError(f"{str(name)[:100]!r} is no name")
    check_name(name)
    return name


def check_name(name: str) -> None:
    """Check that a file of this name can be in an uploaded directory.

    Raises:
        ValueError: it cannot; says why.
    """
    parts = name.split("/")
    if not {"", ".", ".."}.isdisjoint(parts):
        raise ValueError(f"{name[:100]!r} is outside of the directory")
    try:
        n_bytes = len(name.encode())
    except UnicodeEncodeError:
        raise ValueError(f"the name {name[:100]!r} is not UTF-8") from None
    longest = max(map(len, parts if name.isascii() else name.encode().split(b"/")))
    if n_bytes > MOST_KEY_BYTES or longest > _MOST_PART_BYTES:
        raise ValueError(f"the name {name[:100]!r}... is too long")
    if len(parts) > MOST_LEVELS:
        raise ValueError(f"the name {name[:100]!r}... has more than {MOST_LEVELS} directories")
