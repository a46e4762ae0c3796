# SPDX-License-Identifier: Apache-2.0
"""Addresses on an object store, and the object that lists the files of an uploaded directory."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

from ioshape._remote.sums import crc32

#: name of the object; it is written when all files that it lists have been written
LISTING = ".ioshape-objects.json"
#: bytes of the listing at most; it takes some 150 bytes for each file
MOST_BYTES = 32 << 20
#: number of files, and of directories, at most
MOST_NAMES = 100_000
#: depth of nested directories at most
MOST_LEVELS = 64
#: bytes of one component of a name at most: the limit of all filesystems
_MOST_PART_BYTES = 255
# Brackets and commas per name, with a margin for names that contain some.
_MARKS = 8
_MOST_DIGITS = 20
_CRC32 = b',\n "crc32": '
_MEMBERS = {"format", "version", "kind", "files", "directories", "crc32"}

Kind = Literal["file", "group", "dcp", "directory"]

#: The objects that are written last, after the listing. Other readers of these kinds regard a
#: checkpoint as complete only if it has this file.
MARKERS: dict[str, str] = {"group": "manifest.json", "dcp": ".metadata"}


@dataclass(frozen=True)
class Entry:
    """A file in a listing."""

    name: str
    bytes: int
    crc32: int
    #: time of modification in nanoseconds since 1970. A file's separate checksums count only for
    #: this time
    modified_ns: int


@dataclass(frozen=True)
class Listing:
    """The contents of an uploaded directory."""

    kind: Kind
    files: tuple[Entry, ...]
    #: names of all directories, also of empty ones
    directories: tuple[str, ...]

    @property
    def n_bytes(self) -> int:
        """The total size of all files in bytes."""
        return sum(one.bytes for one in self.files)

    @property
    def last(self) -> str:
        """The name of the object that was written last."""
        return MARKERS.get(self.kind, LISTING)


def encode(listing: Listing) -> bytes:
    """Return JSON whose last member is the checksum of the lines before it."""
    value = {"format": "ioshape-objects", "version": 1, **asdict(listing)}
    body = json.dumps(value, indent=1).encode().removesuffix(b"\n}")
    return body + _CRC32 + b'"%08x"\n}\n' % crc32(body)


def decode(data: bytes) -> Listing:
    """Return the listing in an untrusted object that claims to come from encode().

    Raises:
        ValueError: The object is not a valid listing.
    """
    value = _parsed(data)
    if not isinstance(value, dict) or value.get("format") != "ioshape-objects":
        raise ValueError("it is not a listing")
    if value.get("version") != 1:
        raise ValueError("a newer version of ioshape wrote it; use that version")
    _check_sum(data, value)
    try:
        files = tuple(_entry(one) for one in value["files"])
        directories = tuple(_name(one) for one in value["directories"])
        kind = value["kind"]
    except (KeyError, TypeError) as error:
        raise ValueError(f"a member is missing ({error})") from None
    if kind not in ("group", "dcp", "directory"):
        raise ValueError("it is of an unknown kind")
    _check_together([one.name for one in files], directories)
    return Listing(kind, files, directories)


def _check_sum(data: bytes, value: dict[str, Any]) -> None:
    # Versions before 0.2 wrote no checksum. A damaged member name must not look like a missing
    # checksum.
    if not set(value) <= _MEMBERS:
        raise ValueError("it has an unknown member")
    right = f"{crc32(data.rpartition(_CRC32)[0]):08x}"
    if value.get("crc32", right) != right:
        raise ValueError("its checksum is wrong")


def _parsed(data: bytes) -> Any:
    """Parse untrusted JSON; limits on its length and its counts bound time and memory."""
    if len(data) > MOST_BYTES or not data.isascii():
        raise ValueError("it is too large, or not a listing")
    if max(data.count(b"{"), data.count(b"[")) > 2 * MOST_NAMES + _MARKS:
        raise ValueError("it has too many names")
    if data.count(b",") > _MARKS * MOST_NAMES:
        raise ValueError("it has too many names")
    try:
        return json.loads(data, parse_int=_whole, parse_float=_whole, parse_constant=_whole)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _whole(digits: str) -> int:
    # Before Python 3.10.7 the time of int() grows with the square of the number of digits.
    if len(digits) > _MOST_DIGITS:
        raise ValueError("a number is out of range")
    return int(digits)


def _check_together(files: list[str], directories: tuple[str, ...]) -> None:
    if max(len(files), len(directories)) > MOST_NAMES:
        raise ValueError("it has too many names")
    names, above = {*files, *directories}, {"", *directories}
    if len(names) != len(files) + len(directories):
        raise ValueError("it has a name twice")
    # Otherwise one name could create as many directories as it has levels.
    if any(name.rpartition("/")[0] not in above for name in names):
        raise ValueError("the directory of a name in it is missing")


def _entry(one: Any) -> Entry:
    entry = Entry(_name(one["name"]), one["bytes"], one["crc32"], one["modified_ns"])
    for number, bits in ((entry.bytes, 63), (entry.crc32, 32), (entry.modified_ns, 63)):
        if type(number) is not int or not 0 <= number < 1 << bits:
            raise ValueError(f'a number of "{entry.name}" is out of range')
    return entry


def _name(name: Any) -> str:
    """Return a name in the directory, after a check."""
    if not isinstance(name, str) or "\0" in name:
        raise ValueError(f"{str(name)[:100]!r} is not a name")
    check_name(name)
    return name


def check_name(name: str) -> None:
    """Check that a file of this name can be in an uploaded directory.

    Raises:
        ValueError: It cannot; the message says why.
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


# ---- Addresses -----------------------------------------------------------------------------------
#
# Parse addresses on an object store: s3://bucket/key.

# pathlib turns two slashes into one.
_URL = re.compile(r"s3:/{1,2}([A-Za-z0-9][A-Za-z0-9._-]{1,62})(?:/(.*))?", re.DOTALL)
#: bytes of a key in UTF-8 at most: S3's limit
MOST_KEY_BYTES = 1024


class Address(NamedTuple):
    """The address of an object, or the common prefix of the objects of a checkpoint."""

    bucket: str
    key: str

    def __str__(self) -> str:
        return f"s3://{self.bucket}/{self.key}"

    def below(self, name: str) -> Address:
        """Return the address of an object below this one."""
        return Address(self.bucket, f"{self.key}/{name}" if self.key else name)

    @property
    def name(self) -> str:
        """The last component of the key."""
        return self.key.rpartition("/")[2]


def parse(url: str) -> tuple[Address, bool]:
    """Return the address in a URL, and whether the URL is a folder for new objects.

    A URL is a folder if it ends with a slash or names only a bucket.

    Raises:
        ValueError: The URL is not an address on an object store.
    """
    match = _URL.fullmatch(url)
    key = (match[2] or "") if match else ""
    is_above = not key or key.endswith("/")
    key = key.removesuffix("/")
    # Clients and servers treat such keys as paths, each in its own way.
    if match is None or any(part in ("", ".", "..") for part in key.split("/") if key):
        raise ValueError(
            f'"{url}" is not an address on an object store; give one such as s3://bucket/key'
        )
    return Address(match[1], key), is_above


def destination(url: str, name: str) -> Address:
    """Return the destination of an object with this name: below the URL of a folder, as by cp."""
    address, is_above = parse(url)
    return address.below(name) if is_above else address
