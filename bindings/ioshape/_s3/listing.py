# SPDX-License-Identifier: Apache-2.0
"""The object that says what an uploaded directory consists of."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any, Literal

#: its name; it is written when all that it lists is there
LISTING = ".ioshape-objects.json"
#: it takes some 150 bytes for each file
MOST_BYTES = 1 << 28

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
    """As JSON."""
    value = {"format": "ioshape-objects", "version": 1, **asdict(listing)}
    return (json.dumps(value, indent=1) + "\n").encode()


def decode(data: bytes) -> Listing:
    """What encode() made. Nothing of it is believed.

    Raises:
        ValueError: it is none.
    """
    value = json.loads(data)
    if not isinstance(value, dict) or value.get("format") != "ioshape-objects":
        raise ValueError("it is no listing")
    if value.get("version") != 1:
        raise ValueError("a newer version of ioshape has written it; use that one")
    try:
        files = tuple(_entry(one) for one in value["files"])
        directories = tuple(_name(one) for one in value["directories"])
        kind = value["kind"]
    except (KeyError, TypeError) as error:
        raise ValueError(f"it lacks something ({error})") from None
    if kind not in ("generation", "dcp", "directory"):
        raise ValueError("it is of an unknown kind")
    names = [*(one.name for one in files), *directories]
    if len(set(names)) != len(names):
        raise ValueError("it has a name twice")
    return Listing(kind, files, directories)


def _entry(one: Any) -> Entry:
    entry = Entry(_name(one["name"]), one["bytes"], one["crc32"], one["modified_ns"])
    for number, bits in ((entry.bytes, 63), (entry.crc32, 32), (entry.modified_ns, 63)):
        if not isinstance(number, int) or not 0 <= number < 1 << bits:
            raise ValueError(f'of "{entry.name}" a number is out of range')
    return entry


def _name(name: Any) -> str:
    """Of what lies in the directory or below."""
    if not isinstance(name, str) or "\0" in name:
        raise ValueError(f"{str(name)[:100]!r} is no name")
    if any(part in ("", ".", "..") for part in name.split("/")):
        raise ValueError(f"{name[:100]!r} is outside of the directory")
    return name
