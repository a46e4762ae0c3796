# SPDX-License-Identifier: Apache-2.0
"""Small files that demand much time, memory or stack. Each has at most a few MiB."""

import io
import json
import struct
import zipfile
import zlib
from collections.abc import Iterable
from pathlib import Path

_MANY = 200_000
_LONG = 100_000

# ---- Pickles -------------------------------------------------------------------------------------

_GLOBAL = b"cmodule\nname\n"
#: a tuple in which one tuple occurs 2^40 times
_LAUGHS = b")" + 40 * b"2\x86"
#: end of a tensor: offset, one dimension, and its stride
_PLACE = b"K\0K\1\x85K\1\x85"


def _text(text: str) -> bytes:
    encoded = text.encode()
    return b"X" + struct.pack("<I", len(encoded)) + encoded


def _storage(key: bytes = _text("0"), location: bytes = _text("cpu")) -> bytes:
    return b"(" + _text("storage") + b"ctorch\nFloatStorage\n" + key + location + b"K\1tQ"


def _tensor(storage: bytes = _storage(), place: bytes = _PLACE) -> bytes:
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + place + b"\x89NtR"


def _remembered(value: bytes, number: int = 0) -> bytes:
    return value + b"q" + bytes([number])


def _in_list(*values: bytes) -> bytes:
    return b"](" + b"".join(values) + b"e"


def _long(number: int) -> bytes:
    data = number.to_bytes(number.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8b" + struct.pack("<I", len(data)) + data


def _uint64(number: int) -> bytes:
    return struct.pack("<Q", number)


_NAME = _remembered(_text("x" * _LONG))
_TUPLE = _remembered(b"(" + _MANY * b"N" + b"t")
_DICT = _remembered(b"}(" + _MANY * b"K\1N" + b"u")
_LIST = _remembered(_in_list(_MANY * b"N"))
_SET = b"c__builtin__\nset\n"

#: by effect; without the first and the last byte
PICKLES = {
    "laughs as a key": b"}" + _LAUGHS + _tensor() + b"s",
    "laughs in a set": b"\x8f(" + _LAUGHS + b"\x90",
    "laughs in a frozenset": b"(" + _LAUGHS + b"\x91",
    "laughs as a storage's key": _storage(_LAUGHS),
    "laughs as a storage's location": _storage(location=_LAUGHS),
    "laughs as a shape": _tensor(place=b"K\0" + _LAUGHS + _LAUGHS),
    "laughs as arguments": _GLOBAL + _LAUGHS + b"R",
    "laughs as a state": _GLOBAL + b")R" + _LAUGHS + b"b",
    "laughs as a storage's state": _storage() + b"}" + _text("record") + _LAUGHS + b"sb",
    "laughs in lists": b"]"
    + b"".join(b"q%c](h%ch%ce" % (number, number, number) for number in range(40)),
    "keys of one hash": b"}("
    + b"".join(_long(i * (2**61 - 1)) + b"N" for i in range(30_000))
    + b"u",
    "memories of one hash": b"N" + b"".join(b"p%d\n" % (i * (2**61 - 1)) for i in range(30_000)),
    "a deep key": b"})" + _MANY * b"\x85" + b"Ns",
    "deep lists": _MANY * b"]" + (_MANY - 1) * b"a",
    "deep states": _GLOBAL + b")R" + _MANY * (b"2" + b"b"),
    "lists": _in_list(_MANY * b"]"),
    "dicts": _in_list(_MANY * b"}"),
    "marks": _MANY * b"(" + b"N",
    "memories": b"N" + _MANY * b"\x94",
    "objects": _in_list(_remembered(_GLOBAL) + _MANY * b"h\0)R"),
    "long globals": _in_list(_NAME, 20_000 * b"h\0h\0\x93)R"),
    "long storages": _in_list(_remembered(_storage(_NAME)), 20_000 * b"h\0"),
    "long locations": _in_list(
        _NAME, _remembered(_tensor(_storage(location=b"h\0")), 1), 20_000 * b"h\1"
    ),
    "long names": 3 * (b"}" + _text("x" * _LONG)) + _in_list(20_000 * _tensor()) + b"sss",
    "long names of no tensors": b"}" + _text("x" * _LONG) + _in_list(_MANY * b"]") + b"s",
    "one tensor often": _in_list(_remembered(_tensor()), _MANY * b"h\0"),
    "the same arguments": _in_list(_TUPLE, _remembered(_GLOBAL, 1), 20_000 * b"h\1h\0R"),
    "the same arguments of tensors": _in_list(
        _remembered(b"(" + _storage() + _PLACE + _MANY * b"N" + b"t"),
        _remembered(b"ctorch._utils\n_rebuild_tensor_v2\n", 1),
        20_000 * b"h\1h\0R",
    ),
    "the same shape": _in_list(
        _remembered(b"(" + _MANY * b"K\1" + b"t"),
        20_000 * _tensor(place=b"K\0h\0h\0"),
    ),
    "the same state": _in_list(_DICT, _remembered(_GLOBAL, 1), 20_000 * b"h\1)Rh\0b"),
    "the same set": _in_list(_LIST, _remembered(_SET, 1), 20_000 * b"h\1h\0\x85R"),
    "the same class and arguments": _in_list(
        _TUPLE, _remembered(_GLOBAL, 1), 20_000 * b"h\1h\0\x81"
    ),
    "a number of 200,000 digits": b"I" + _MANY * b"9" + b"\n",
    "a long number of 200,000 digits": b"L" + _MANY * b"9" + b"L\n",
    "a huge number": _long(1 << 8 * _MANY),
    "a huge number as a key": b"}" + _long(1 << 8 * _MANY) + _tensor() + b"s",
    "a huge shape": _tensor(
        place=b"K\0(" + 60 * _long(1 << 62) + b"t(" + 60 * _long(1 << 62) + b"t"
    ),
    "a huge dimension": _tensor(place=b"K\0" + _long(1 << 8 * _MANY) + b"\x85K\1\x85"),
    "a huge offset": _tensor(place=_long(1 << 8 * _MANY) + _PLACE[2:]),
    "a number that goes on": b"\x8b\xff\xff\xff\x7f",
    "bytes that go on": b"\x8e" + _uint64(1 << 62),
    "a bytearray that goes on": b"\x96" + _uint64(1 << 62),
    "a text that goes on": b"\x8d" + _uint64(1 << 62),
    "a frame that goes on": b"\x95" + _uint64(1 << 62) + b"N",
    "a far memory": b"Nr\xff\xff\xff\xff",
    "a farther memory": b"Np999999999999999999\n",
    "a text without a quote": b"S" + _MANY * b"\xff" + b"\n",
    "nothing to take from": b"0",
    "nothing marked": b"t",
    "nothing at all": b"",
}

#: pickles that keep ordinary unpicklers such as torch's busy, because these build what the pickle
#: says
TOO_MUCH_FOR_TORCH = frozenset(
    name for name in PICKLES if name.startswith(("laughs", "keys of one", "a deep key", "deep"))
)

# ---- Archives ------------------------------------------------------------------------------------


def _archive(*members: tuple[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", compression) as archive:
        for name, data in members:
            archive.writestr(f"archive/{name}", data)
    return stream.getvalue()


def with_pickle(pickled: bytes) -> bytes:
    """Return a torch file with this pickle and a damaged storage."""
    data = b"\0\1\2\3 to be damaged"
    whole = _archive(
        ("data.pkl", b"\x80\4" + pickled + b"."),
        ("byteorder", b"little"),
        ("data/0", data),
        ("version", b"3\n"),
    )
    at = whole.index(data)
    return whole[:at] + b"\xff" + whole[at + 1 :]


def valid() -> bytes:
    """Return a valid torch file."""
    return _archive(("data.pkl", b"\x80\2}."), ("data/0", bytes(4)), ("version", b"3\n"))


def _directory(whole: bytes) -> tuple[bytes, bytes]:
    """Return the bytes before the central directory, and the directory."""
    size, offset = struct.unpack_from("<II", whole, len(whole) - 10)
    return whole[:offset], whole[offset : offset + size]


def _ended(records: bytes, directory: bytes, count: int) -> bytes:
    """Return the archive with a zip64 end record, so that numbers may be large."""
    end64 = len(records) + len(directory)
    return (
        records
        + directory
        + struct.pack(
            "<IQHHIIQQQQ", 0x06064B50, 44, 45, 45, 0, 0, count, count, len(directory), len(records)
        )
        + struct.pack("<IIQI", 0x07064B50, 0, end64, 1)
        + struct.pack("<IHHHHIIH", 0x06054B50, 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0)
    )


def _patched(whole: bytes, offset_from_end: int, data: bytes) -> bytes:
    at = len(whole) - offset_from_end
    return whole[:at] + data + whole[at + len(data) :]


def _archives() -> dict[str, bytes]:
    whole = valid()
    records, directory = _directory(whole)
    inflating = _archive(("data.pkl", bytes(32 << 20)), compression=zipfile.ZIP_DEFLATED)
    deflated, its_directory = _directory(inflating)
    return {
        "65535 records": _patched(whole, 14, b"\xff\xff\xff\xff"),
        "2^60 records": _ended(records, directory, 1 << 60),
        "as many as fit, of one": _ended(records, 20_000 * directory, 60_000),
        "a directory of 4 GiB": _patched(whole, 10, b"\xfe\xff\xff\xff"),
        "a directory far behind": _patched(whole, 6, b"\xfe\xff\xff\xff"),
        "a long comment": _patched(whole, 2, b"\xff\xff") + 65535 * b"c",
        "ends in its comment": _patched(whole, 2, b"\xff\xff") + 16383 * b"PK\5\6" + b"PKP",
        "long names": _archive(*((f"{i}" + 60_000 * "n", b"") for i in range(30))),
        "compressed, of itself": _ended(deflated, 1000 * its_directory, 1000),
        "nothing but ends": 100_000 * (b"PK\5\6" + bytes(18)),
    }


def files() -> dict[str, bytes]:
    """Return all files by name."""
    pickles = {f"pickle, {name}": with_pickle(pickled) for name, pickled in PICKLES.items()}
    archives = {f"zip, {name}": whole for name, whole in _archives().items()}
    return pickles | archives | {"a text that goes on": b"\x80\2X\xff\xff\xff\x7f"}


# ---- Checkpoints of groups -----------------------------------------------------------------------


def _manifest(text: str) -> bytes:
    """Return a manifest with its checksum."""
    body = '{\n  "format": "ioshape-generation",\n  "version": 1,\n' + text
    return f'{body}  "crc32": "{zlib.crc32(body.encode()):08x}"\n}}\n'.encode()


def _lists(members: str, step: str = "7", mode: str = "rank0", attempt: str = "a") -> str:
    numbers = f'  "step": {step},\n  "saved": 1,\n'
    return f'{numbers}  "mode": "{mode}",\n  "attempt": "{attempt}",\n{members}'


def _list(name: str, entries: Iterable[str]) -> str:
    """Return a list in the layout of manifests."""
    return f'  "{name}": [{",".join(f"{chr(10)}    {one}" for one in entries)}\n  ],\n'


def _file(name: str, n_bytes: int) -> str:
    return json.dumps({"name": name, "bytes": n_bytes, "crc32": "00000000", "bundle": True})


def _parts(count: int, n_bytes: int) -> str:
    each = (
        json.dumps({"rank": i, "file": 0, "offset": i, "bytes": 1, "crc32": "00000000"})
        for i in range(count)
    )
    return _list("files", [_file("f", n_bytes)]) + _list("parts", each)


MANIFESTS = {
    "deep": lambda: _lists(f'  "files": {_MANY * "["}{_MANY * "]"},\n'),
    "a long text": lambda: _lists("", attempt=10 * _MANY * "a"),
    "a long number": lambda: _lists("", step=_MANY * "9"),
    "long names": lambda: _lists(_list("files", [_file(_MANY * "x", 1)])),
    "many parts": lambda: _lists(_parts(20_000, 20_000)),
    "many of nothing": lambda: _lists(_list("files", 20_000 * ["{}"])),
}


def write_checkpoint(directory: Path, name: str) -> None:
    """Write step 7 with a manifest that is valid except for its claims."""
    folder = directory / "step-0000000007"
    folder.mkdir(parents=True)
    (folder / "f").write_bytes(bytes(20_000))
    (folder / "manifest.json").write_bytes(_manifest(MANIFESTS[name]()))


def write_part(directory: Path, part: bytes) -> None:
    """Write step 7 with one rank whose part is this file."""
    folder = directory / "step-0000000007"
    folder.mkdir(parents=True)
    (folder / "rank-00000.pt").write_bytes(part)
    sums = {"bytes": len(part), "crc32": f"{zlib.crc32(part):08x}"}
    file = json.dumps({"name": "rank-00000.pt", **sums, "bundle": False})
    one = json.dumps({"rank": 0, "file": 0, "offset": 0, **sums})
    lists = _list("files", [file]) + _list("parts", [one])
    (folder / "manifest.json").write_bytes(_manifest(_lists(lists, mode="each")))


# ---- Metadata of DCP -----------------------------------------------------------------------------

_DCP = "torch.distributed.checkpoint.metadata"


def named(module: str, name: str) -> bytes:
    """Return a pickle of a class or function."""
    return _text(module) + _text(name) + b"\x93"


def described(name: str, *fields: bytes, module: str = _DCP) -> bytes:
    """Return a pickle of an object with these fields: name and value in turn."""
    return named(module, name) + b")\x81}(" + b"".join(fields) + b"ub"


def description(
    items: bytes = b"}", storage: bytes = b"}", planner: bytes = b"N", *, before: bytes = b""
) -> bytes:
    """Return a .metadata file; `before` is code that fills the memo."""
    fields = (_text("state_dict_metadata"), items, _text("storage_data"), storage)
    planned = (_text("planner_data"), planner)
    return b"\x80\4" + before + described("Metadata", *fields, *planned) + b"."


def _index(fqn: bytes, offset: bytes = b"N") -> bytes:
    return described("MetadataIndex", _text("fqn"), fqn, _text("offset"), offset)


def _info(path: bytes, offset: bytes = b"K\0") -> bytes:
    fields = (_text("relative_path"), path, _text("offset"), offset, _text("length"), b"K\1")
    return described("_StorageInfo", *fields, module="torch.distributed.checkpoint.filesystem")


def _dag(levels: int) -> bytes:
    return b")" + levels * b"2\x86"


def _colliding_offsets(count: int) -> bytes:
    """Return keys with different offsets and one hash: 0 and 2^61 - 1 have equal hashes."""
    large, size = _long((1 << 61) - 1), named("torch", "Size")
    keys = []
    for number in range(count):
        digits = (large if number >> bit & 1 else b"K\0" for bit in range(20))
        keys.append(_index(_text("a"), size + b"(" + b"".join(digits) + b"t\x85R") + b"N")
    return b"}(" + b"".join(keys) + b"u"


_PARTS = _info(_text("f"))


def descriptions() -> dict[str, bytes]:
    """Return all metadata files by name."""
    found: dict[str, bytes] = {
        "a far memory": b"\x80\4Nr\xff\xff\xff\x7f.",
        "globals": b"\x80\4" + b"".join(b"cm\nn%d\n0" % i for i in range(_MANY)) + b"N.",
        "torch's names": b"\x80\4" + b"".join(b"ctorch\nn%d\n0" % i for i in range(_MANY)) + b"N.",
        "deep lists": description(planner=_MANY * b"]" + (_MANY - 1) * b"a"),
        "deep keys": description(planner=b"})" + _MANY * b"\x85" + b"Ns"),
        "keys of one hash": description(planner=PICKLES["keys of one hash"]),
        "indices of one hash": description(storage=_colliding_offsets(5000)),
        "sets of one hash": description(
            planner=b"\x8f(" + b"".join(_long(i * (2**61 - 1)) for i in range(30_000)) + b"\x90"
        ),
        "a long key": description(
            planner=b"](" + _remembered(b"(" + _MANY * b"N" + b"t") + 20_000 * b"}h\0Ns" + b"e"
        ),
        "sets": description(planner=_in_list(_MANY * b"\x8f")),
        "dicts": description(planner=_in_list(_MANY * b"}NNs")),
        "shared chunks": description(
            b"}("
            + b"".join(
                _text(f"{i}")
                + described(
                    "TensorStorageMetadata",
                    *(_text("chunks"), b"h\1" if i else _remembered(_in_list(_MANY * b"N"), 1)),
                )
                for i in range(5000)
            )
            + b"u"
        ),
        "a long shape": description(
            b"}("
            + b"".join(
                _text(f"{i}")
                + described(
                    "TensorStorageMetadata",
                    *(_text("size"), named("torch", "Size")),
                    (b"h\1" if i else _remembered(b"(" + _MANY * b"K\1" + b"t", 1)) + b"\x85R",
                )
                for i in range(5000)
            )
            + b"u"
        ),
        "the same set": description(
            planner=_in_list(_LIST, _remembered(_SET, 1), _MANY * b"h\1h\0\x85R")
        ),
        "the same path": description(
            planner=_in_list(
                _remembered(_text(_MANY * "a/")),
                _remembered(named("pathlib", "PosixPath"), 1),
                20_000 * b"h\1h\0\x85R",
            )
        ),
        "the same path of many parts": description(
            planner=_in_list(
                _remembered(_text("a"), 2),
                _remembered(b"(" + _MANY * b"h\2" + b"t"),
                _remembered(named("pathlib", "PosixPath"), 1),
                20_000 * b"h\1h\0R",
            )
        ),
        "the same huge shape": description(
            planner=_in_list(
                _remembered(b"(" + 63 * _long(1 << 62) + b"K\0t"),
                _remembered(named("torch", "Size"), 1),
                10 * _MANY * b"h\1h\0\x85R",
            )
        ),
        "a text that goes on": b"\x80\4\x8d" + _uint64(1 << 62),
        "bytes that go on": b"\x80\4\x8e" + _uint64(1 << 62),
    }
    for levels in (30, 45):
        found |= {
            f"{levels} levels of a name": description(
                storage=b"}" + _index(_dag(levels)) + _PARTS + b"s"
            ),
            f"{levels} levels of a file": description(
                storage=b"}" + _index(_text("a")) + _info(_dag(levels)) + b"s"
            ),
            f"{levels} levels of an offset": description(
                storage=b"}" + _index(_text("a")) + _info(_text("f"), _dag(levels)) + b"s"
            ),
            f"{levels} levels of a state": description(
                b"}"
                + _text("a")
                + described(
                    "TensorStorageMetadata",
                    _text("properties"),
                    named(_DCP, "TensorProperties") + b")\x81" + _dag(levels) + b"\x85b",
                )
                + b"s"
            ),
            f"{levels} levels of a key": description(planner=b"}" + _dag(levels) + b"Ns"),
            f"{levels} levels of an item": description(b"}" + _dag(levels) + b"Ns"),
            f"{levels} levels in a set": description(planner=b"\x8f(" + _dag(levels) + b"\x90"),
        }
    return found
