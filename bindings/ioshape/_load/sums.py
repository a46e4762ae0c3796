# SPDX-License-Identifier: Apache-2.0
"""Checksums beside a file that several processes have written, each its own ranges.

One process gathers the checksums of all ranges. It writes them before the directory of the file is
renamed into place.
"""

from __future__ import annotations

import errno
import os
import struct

from ioshape._core.descriptors import open_file
from ioshape._core.errors import failure
from ioshape._native import ffi, lib

PART_UNIT: int = lib.IOSHAPE_PART_UNIT
#: the size of a checksum in bytes
BYTES = 4
#: the suffix that the name of the file of checksums adds
SUFFIX = ".ioshape-sums"


def of(content: memoryview) -> bytes:
    """Return the checksums of a range: one for each PART_UNIT, the last for the remainder."""
    sums = b""
    for begin in range(0, len(content), PART_UNIT):
        block = content[begin : begin + PART_UNIT]
        sums += struct.pack("<I", lib.base_crc32(0, ffi.from_buffer(block), len(block)))
    return sums


def put_beside(path: str, sums: bytes) -> None:
    """Write the checksums of all ranges beside a file that no process changes any more."""
    # Open the file: without that, a shared filesystem may answer with cached attributes.
    descriptor = open_file(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
    finally:
        os.close(descriptor)
    numbers = ffi.new("uint32_t[]", [number for (number,) in struct.iter_unpack("<I", sums)])
    found = ffi.new("struct format_checksums *")
    found.file_bytes = status.st_size
    found.block_bytes = PART_UNIT
    found.blocks = len(numbers)
    found.crc32 = numbers
    found.modified_ns = status.st_mtime_ns
    encoded = ffi.new("struct base_buffer *")
    code = lib.format_checksums_encode(encoded, found)
    if code == -errno.ENOMEM:
        raise MemoryError
    if code:
        sentence = f'cannot store checksums of "{path}": the file is too large'
        raise failure(code, sentence, path, "save", remedy="save smaller files")
    try:
        new = open_file(path + SUFFIX, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
        with os.fdopen(new, "wb") as file:
            file.write(ffi.buffer(encoded.data, encoded.bytes))
    finally:
        lib.base_buffer_free(encoded)
