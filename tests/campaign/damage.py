# SPDX-License-Identifier: Apache-2.0
"""Damage files, at random and deliberately. The result follows from the Random alone.

Random damage makes checksums wrong, so the library must notice it, or it must not matter. After
deliberate damage the checksums are corrected. Such a file is valid but has other contents, and may
be loaded.
"""

import functools
import io
import pickle
import pickletools
import re
import struct
import warnings
import zipfile
import zlib
from collections.abc import Callable, Sequence
from random import Random

MOST_BYTES = 1 << 20

NUMBERS: tuple[int, ...] = (
    0,
    1,
    2,
    0x7F,
    0x80,
    0xFF,
    0x7FFF,
    0xFFFE,
    0xFFFF,
    1 << 20,
    (1 << 31) - 1,
    1 << 31,
)
NUMBERS += ((1 << 32) - 2, (1 << 32) - 1, 1 << 32, 1 << 62, (1 << 63) - 1, (1 << 64) - 1)

#: Offset and length of the fields after each signature of a zip.
FIELDS = {
    b"PK\3\4": ((4, 2), (6, 2), (8, 2), (10, 4), (14, 4), (18, 4), (22, 4), (26, 2), (28, 2)),
    b"PK\7\x08": ((4, 4), (8, 4), (12, 4)),
    b"PK\1\2": (
        *((4, 2), (6, 2), (8, 2), (10, 4), (16, 4), (20, 4), (24, 4), (28, 2), (30, 2), (32, 2)),
        *((34, 2), (36, 2), (38, 4), (42, 4), (46, 4)),
    ),
    b"PK\6\6": ((4, 8), (12, 2), (14, 2), (16, 4), (20, 4), (24, 8), (32, 8), (40, 8), (48, 8)),
    b"PK\6\7": ((4, 4), (8, 8), (16, 4)),
    b"PK\5\6": ((4, 2), (6, 2), (8, 2), (10, 2), (12, 4), (16, 4), (20, 2)),
}


def _range(rng: Random, data: bytes) -> slice:
    """Return a random range of the data, short or long."""
    length = min(len(data), 1 << rng.randrange(16))
    start = rng.randrange(len(data) - length + 1)
    return slice(start, start + length)


# ---- Random damage ------------------------------------------------------------------------------

Blind = Callable[[Random, bytes, Sequence[bytes]], bytes]


def flipped(rng: Random, data: bytes, _others: Sequence[bytes]) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 5, 50))):
        changed[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def flipped_at_the_end(rng: Random, data: bytes, _others: Sequence[bytes]) -> bytes:
    """Flip a bit near the end, where the directory is."""
    changed = bytearray(data)
    changed[-1 - rng.randrange(min(len(data), 2000))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def overwritten(rng: Random, data: bytes, _others: Sequence[bytes]) -> bytes:
    at = _range(rng, data)
    length = at.stop - at.start
    new = rng.choice((bytes(length), rng.randbytes(length), length * rng.randbytes(1)))
    return data[: at.start] + new + data[at.stop :]


def a_lost_page(rng: Random, data: bytes, _others: Sequence[bytes]) -> bytes:
    start = rng.randrange(len(data)) & -rng.choice((512, 4096))
    length = min(rng.choice((512, 4096, 65536)), len(data) - start)
    return data[:start] + bytes(length) + data[start + length :]


def cut_short(rng: Random, data: bytes, _others: Sequence[bytes]) -> bytes:
    return data[: rng.choice((rng.randrange(len(data)), len(data) - 1 - rng.randrange(100)))]


def lengthened(rng: Random, data: bytes, _others: Sequence[bytes]) -> bytes:
    length = rng.choice((1, 22, 4096, 1 << rng.randrange(17)))
    return data + rng.choice((bytes(length), rng.randbytes(length), data[-length:]))


def shifted(rng: Random, data: bytes, _others: Sequence[bytes]) -> bytes:
    """Remove bytes, or repeat them."""
    at = _range(rng, data)
    again = data[at] if rng.random() < 0.5 else b""
    return data[: at.start] + 2 * again + data[at.stop :]


def exchanged(rng: Random, data: bytes, _others: Sequence[bytes]) -> bytes:
    """Swap the bytes of two ranges."""
    one, other = sorted((_range(rng, data), _range(rng, data)), key=lambda at: at.start)
    if one.stop > other.start:
        return data[: other.start] + data[one.start :]
    middle = data[one.stop : other.start]
    return data[: one.start] + data[other] + middle + data[one] + data[other.stop :]


def spliced(rng: Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """Join the beginning of one file and the end of another."""
    other = rng.choice(others)
    at = rng.randrange(len(data))
    if rng.random() < 0.5:
        return data[:at] + other[at:]
    return data[:at] + other[rng.randrange(len(other)) :]


def with_other_fields(rng: Random, data: bytes, _others: Sequence[bytes]) -> bytes:
    """Change one field of the zip, rarely two."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2))):
        signature = rng.choice(tuple(FIELDS))
        places = [found.start() for found in re.finditer(signature, data)] or [0]
        offset, length = rng.choice(FIELDS[signature])
        at = rng.choice(places) + offset
        old = int.from_bytes(data[at : at + length], "little")
        near = old + rng.choice((-64, -2, -1, 1, 2, 64))
        number = rng.choice((near, rng.choice(NUMBERS), rng.getrandbits(8 * length)))
        changed[at : at + length] = (number % (1 << 8 * length)).to_bytes(length, "little")
    return bytes(changed)


def with_other_numbers(rng: Random, data: bytes, _others: Sequence[bytes]) -> bytes:
    """Replace one number in a text such as JSON, rarely two."""
    for _ in range(rng.choice((1, 1, 1, 2))):
        if places := [*re.finditer(rb"-?\d+", data)]:
            at = rng.choice(places)
            old = int(at[0][:18])
            number = rng.choice((old - 1, old + 1, -old, 2 * old, rng.choice(NUMBERS)))
            data = data[: at.start()] + b"%d" % number + data[at.end() :]
    return data


BLIND: tuple[Blind, ...] = (
    *(flipped, flipped_at_the_end, overwritten, a_lost_page, cut_short, lengthened, shifted),
    *(exchanged, spliced, with_other_fields, with_other_fields),
)

#: Damage of texts such as JSON.
TEXT: tuple[Blind, ...] = (*BLIND, *(3 * (with_other_numbers,)))

# ---- Deliberate damage --------------------------------------------------------------------------

Members = list[tuple[str, bytes]]


def _members(data: bytes) -> Members:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return [(info.filename, archive.read(info)) for info in archive.infolist()]


def _archive(rng: Random, members: Members) -> bytes:
    stream = io.BytesIO()
    method = rng.choice((zipfile.ZIP_STORED, zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))
    with warnings.catch_warnings(), zipfile.ZipFile(stream, "w", method) as archive:
        warnings.simplefilter("ignore")  # duplicate names
        for name, content in members:
            info = zipfile.ZipInfo(name)
            info.compress_type = method
            if rng.random() < 0.05:
                info.extra = struct.pack("<HH", rng.choice((1, 0x4246, 0x7075)), 16) + bytes(16)
            with archive.open(info, "w", force_zip64=rng.random() < 0.05) as member:
                member.write(content)
        if rng.random() < 0.1:
            archive.comment = rng.randbytes(rng.randrange(100))
    return stream.getvalue()


def with_right_sums(rng: Random, data: bytes) -> bytes:
    """Replace the contents of a record in place by others of equal length, with right checksums."""
    changed = bytearray(data)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        directory = archive.start_dir
        filled = [info for info in archive.infolist() if info.file_size and not info.compress_type]
    if not filled:
        return data
    info = rng.choice(filled)
    lengths = struct.unpack_from("<HH", data, info.header_offset + 26)
    begin = info.header_offset + 30 + sum(lengths)
    end = begin + info.file_size
    changed[begin:end] = flipped(rng, data[begin:end], ())
    crc = struct.pack("<I", zlib.crc32(changed[begin:end]))
    if changed[end : end + 4] == b"PK\7\x08":
        changed[end + 4 : end + 8] = crc
    else:
        changed[info.header_offset + 14 : info.header_offset + 18] = crc
    entry = changed.index(info.filename.encode(), directory) - 46
    changed[entry + 16 : entry + 20] = crc
    return bytes(changed)


def with_other_members(rng: Random, data: bytes) -> bytes:
    members = _members(data)
    for _ in range(rng.choice((1, 1, 2, 4))):
        at = rng.randrange(len(members))
        name, content = members[at]
        other = rng.choice(members)
        names = (other[0], name + "x", "/" + name, "../" + name, "x" * 70_000, "", name[:-1])
        change = rng.randrange(5)
        if change == 0:
            members[at] = (rng.choice(names)[:65535], content)
        elif change == 1:
            members[at] = (name, other[1])
        elif change == 2 and len(members) > 1:
            del members[at]
        elif change == 3:
            members.insert(rng.randrange(len(members)), (name, content))
        else:
            length = rng.choice((0, 1, 1 << rng.randrange(18)))
            members[at] = (name, rng.choice((bytes(length), rng.randbytes(length))))
    return _archive(rng, members)


@functools.lru_cache
def _operations(pickled: bytes) -> tuple[bytes, ...]:
    """Return the operations of a pickle with their arguments, or none if it is no pickle."""
    try:
        places = [position or 0 for _, _, position in pickletools.genops(pickled)]
    except (ValueError, IndexError, pickle.UnpicklingError):
        return ()
    return tuple(pickled[a:b] for a, b in zip(places, [*places[1:], None], strict=True))


def other_pickle(rng: Random, pickled: bytes) -> bytes:
    """Remove, repeat, move or replace operations of a pickle, or change an argument."""
    pieces = [*_operations(pickled)]
    if not pieces:
        return flipped(rng, pickled, ()) if pickled else b"."
    for _ in range(rng.choice((1, 1, 2, 5))):
        at = rng.randrange(len(pieces))
        change = rng.randrange(6)
        if change == 0:
            pieces[at] = b""
        elif change == 1:
            pieces.insert(rng.randrange(len(pieces)), pieces[at])
        elif change == 2:
            pieces[at] = rng.choice(pieces)
        elif change == 3:
            pieces[at] = rng.choice(b"0125().]}NtelsuqhRb\x81\x85\x86\x87\x94").to_bytes(1, "big")
        elif change == 4:
            times = rng.choice((2, 100, 5000))
            if times * len(pieces[at]) <= MOST_BYTES:  # it may have grown before
                pieces[at] *= times
        elif len(pieces[at]) > 1:
            argument = rng.choice(NUMBERS) % (1 << 8 * min(4, len(pieces[at]) - 1))
            bytes_ = argument.to_bytes(min(4, len(pieces[at]) - 1), "little")
            pieces[at] = pieces[at][:1] + bytes_ + pieces[at][1 + len(bytes_) :]
    return b"".join(pieces)


def with_other_pickle(rng: Random, data: bytes) -> bytes:
    members = [
        (name, other_pickle(rng, content) if name.endswith("data.pkl") else content)
        for name, content in _members(data)
    ]
    return _archive(rng, members)


KNOWING: tuple[Callable[[Random, bytes], bytes], ...] = (
    *(with_right_sums, with_right_sums, with_other_members, with_other_pickle, with_other_pickle),
)
