# SPDX-License-Identifier: Apache-2.0
"""Checksums of a file in another format than ours, as a value."""

from __future__ import annotations

from typing import Any, NamedTuple

from ioshape._c import sized
from ioshape._native import ffi


class Checksums(NamedTuple):
    """A CRC-32 for each block of a file; the last block is as long as what is left."""

    file_bytes: int
    block_bytes: int
    #: little-endian, four bytes for each block
    crc32: bytes
    #: a file that was modified at another time is another file; 0: not known
    modified_ns: int = 0

    @classmethod
    def from_struct(cls, struct: Any) -> Checksums:
        """As the library tells them."""
        crc32 = bytes(ffi.buffer(struct.crc32, 4 * struct.blocks)) if struct.blocks else b""
        return cls(struct.file_bytes, struct.block_bytes, crc32, struct.modified_ns)

    def as_struct(self) -> tuple[Any, object]:
        """As the library takes them, and what must live as long."""
        struct = sized("ioshape_checksums")
        struct.file_bytes, struct.block_bytes = self.file_bytes, self.block_bytes
        struct.blocks, struct.modified_ns = len(self.crc32) // 4, self.modified_ns
        values = ffi.new("uint32_t[]", max(1, struct.blocks))
        ffi.memmove(values, self.crc32, 4 * struct.blocks)
        struct.crc32 = values
        return struct, values
