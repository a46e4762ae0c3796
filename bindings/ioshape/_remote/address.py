# SPDX-License-Identifier: Apache-2.0
"""Where on an object store something lies: s3://bucket/key."""

from __future__ import annotations

import re
from typing import NamedTuple

# pathlib makes one slash of two.
_URL = re.compile(r"s3:/{1,2}([A-Za-z0-9][A-Za-z0-9._-]{1,62})(?:/(.*))?", re.DOTALL)
#: of a key, in UTF-8: S3's limit
MOST_KEY_BYTES = 1024


class Address(NamedTuple):
    """Of an object, or of what all keys of a checkpoint begin with."""

    bucket: str
    key: str

    def __str__(self) -> str:
        return f"s3://{self.bucket}/{self.key}"

    def below(self, name: str) -> Address:
        """Of what lies in it."""
        return Address(self.bucket, f"{self.key}/{name}" if self.key else name)

    @property
    def name(self) -> str:
        """The last part of the key."""
        return self.key.rpartition("/")[2]


def parse(url: str) -> tuple[Address, bool]:
    """What a URL names; and whether it is what something goes below: its end is a slash, or the
    bucket's name."""
    match = _URL.fullmatch(url)
    key = (match[2] or "") if match else ""
    is_above = not key or key.endswith("/")
    key = key.removesuffix("/")
    # Clients and servers take such keys for paths, each in its own way.
    if match is None or any(part in ("", ".", "..") for part in key.split("/") if key):
        raise ValueError(f'"{url}" is no address on an object store; give one as s3://bucket/key')
    return Address(match[1], key), is_above


def destination(url: str, name: str) -> Address:
    """Where something of that name goes, as by "cp": below a URL that ends with a slash."""
    address, is_above = parse(url)
    return address.below(name) if is_above else address
