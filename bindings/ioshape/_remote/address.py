# SPDX-License-Identifier: Apache-2.0
"""Parse addresses on an object store: s3://bucket/key."""

from __future__ import annotations

import re
from typing import NamedTuple

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
