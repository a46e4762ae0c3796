# SPDX-License-Identifier: Apache-2.0
"""docs/format.md against real files, which are parsed here from that page alone."""

import json
import re
import struct
import textwrap
import zipfile
import zlib
from dataclasses import dataclass, field
from pathlib import Path

import capi
import pytest
import torch
from capi import DTYPES, save
from tree import ROOT

KIB, MIB = 1 << 10, 1 << 20


@dataclass
class Record:
    name: str
    crc: int
    bytes: int
    header: int
    data: int = 0


@dataclass
class Tensor:
    name: str
    dtype: int
    record: int
    shape: list[int]
    strides: list[int]


@dataclass
class Index:
    directory_crc: int
    block: int
    records: int
    sections: dict[int, bytes] = field(default_factory=dict)


def numbers(code: str, data: bytes, at: int = 0) -> tuple[int, ...]:
    return struct.unpack_from("<" + code, data, at)


def read_directory(content: bytes) -> tuple[list[Record], int]:
    """Return the records, and the offset of the zip's central directory."""
    assert content[-22:-18] == b"PK\5\6"
    locator = content[-42:-22]
    assert locator[:4] == b"PK\6\7"
    end = numbers("Q", locator, 8)[0]
    assert content[end : end + 4] == b"PK\6\6"
    assert end == len(content) - 22 - 20 - 56
    size, made, needed, disks, count, same, length, begin = numbers("QHHQQQQQ", content, end + 4)
    assert (size, made, needed, disks, count) == (44, 0x31E, 45, 0, same)
    assert begin + length == end
    records, at = [], begin
    for _ in range(count):
        assert content[at : at + 4] == b"PK\1\2"
        head = numbers("HHHHIIIIHH", content, at + 4)
        assert head[:5] == (0, 0, 0x0808, 0, 0)
        crc, packed, plain, name_bytes, extra = head[5:]
        assert packed == plain
        assert extra == 0
        name = content[at + 46 : at + 46 + name_bytes].decode()
        records.append(Record(name, crc, plain, numbers("I", content, at + 42)[0]))
        at += 46 + name_bytes
    assert at == end
    return records, begin


def check_record(content: bytes, record: Record) -> int:
    """Find and check the data of a record. Return the offset of the next record."""
    at = record.header
    assert content[at : at + 4] == b"PK\3\4"
    name_bytes, extra = numbers("HH", content, at + 26)
    assert numbers("HHHIIII", content, at + 4) == (0, 0x0808, 0, 0, 0, 0, 0)
    assert content[at + 30 : at + 30 + name_bytes].decode() == record.name
    field_id, padding = numbers("HH", content, at + 30 + name_bytes)
    assert (field_id, padding) == (0x4246, extra - 4)
    record.data = at + 30 + name_bytes + extra
    assert content[record.data - padding : record.data] == b"Z" * padding
    assert record.data % (4096 if record.bytes >= 256 * KIB else 64) == 0
    end = record.data + record.bytes
    assert zlib.crc32(content[record.data : end]) == record.crc
    assert content[end : end + 4] == b"PK\7\10"
    assert numbers("III", content, end + 4) == (record.crc, record.bytes, record.bytes)
    return end + 16


def read_index(data: bytes) -> Index:
    assert data[:8] == b"ioshape\n"
    version, sections, crc, zero, block, records = numbers("IIIIQQ", data, 8)
    assert (version, zero, block) == (1, 0, MIB)
    index, at = Index(crc, block, records), 40
    for _ in range(sections):
        tag, zero, length = numbers("IIQ", data, at)
        assert zero == 0
        assert tag not in index.sections
        index.sections[tag] = data[at + 16 : at + 16 + length]
        at += 16 + length
        padding = -length % 8
        assert data[at : at + padding] == bytes(padding)
        at += padding
    assert at == len(data)
    return index


def read_tensors(table: bytes) -> list[Tensor]:
    count, dims = numbers("QQ", table)
    rows = [numbers("QIIII", table, 16 + 24 * i) for i in range(count)]
    at = 16 + 24 * count
    shapes = list(numbers(f"{dims}q", table, at))
    strides = list(numbers(f"{dims}q", table, at + 8 * dims))
    names = table[at + 16 * dims :]
    tensors = []
    for record, dtype, length, name_bytes, zero in rows:
        assert zero == 0
        tensors.append(
            Tensor(names[:name_bytes].decode(), dtype, record, shapes[:length], strides[:length])
        )
        names, shapes, strides = names[name_bytes:], shapes[length:], strides[length:]
    assert not names
    assert not shapes
    assert not strides
    return tensors


def some_tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {
        "small": torch.arange(6.0).reshape(2, 3),
        "large": torch.randint(0, 256, (3 * MIB + 5,), generator=generator, dtype=torch.uint8),
        "transposed": torch.rand(300, 400, generator=generator).t(),
        "permuted": torch.rand(4, 5, 6, generator=generator).permute(1, 0, 2),
        "größe": torch.tensor(3, dtype=torch.int16),
        "empty": torch.empty(0, 4, dtype=torch.bfloat16),
    }


@pytest.fixture
def content(tmp_path: Path) -> bytes:
    save(tmp_path / "file.pt", some_tensors())
    return (tmp_path / "file.pt").read_bytes()


def test_the_container_is_as_documented(content: bytes) -> None:
    records, directory = read_directory(content)
    data = [f"archive/data/{i}" for i in range(len(some_tensors()))]
    assert [record.name for record in records] == [
        "archive/data.pkl",
        "archive/byteorder",
        "archive/version",
        *data,
        "archive/.ioshape/index",
    ]
    at = 0
    for record in records:
        assert record.header == at
        at = check_record(content, record)
    assert at == directory


def test_the_index_is_as_documented(content: bytes) -> None:
    records, _ = read_directory(content)
    for record in records:
        check_record(content, record)
    last = records.pop()
    index = read_index(content[last.data : last.data + last.bytes])
    assert list(index.sections) == [1, 2, 3, 5]
    assert index.records == len(records)

    described = b"".join(
        struct.pack("<IIQQ", len(name), record.crc, record.bytes, record.header) + name
        for record in records
        for name in [record.name.removeprefix("archive/").encode()]
    )
    assert index.directory_crc == zlib.crc32(described)
    offsets = numbers(f"{len(records)}Q", index.sections[1])
    assert offsets == tuple(record.data for record in records)
    blocks = [
        zlib.crc32(content[record.data + begin : record.data + min(begin + MIB, record.bytes)])
        for record in records
        for begin in range(0, record.bytes, MIB)
    ]
    # Each record has one block, except that the empty one has none and the large one has four.
    assert len(blocks) == len(records) - 1 + 3
    assert numbers(f"{len(blocks)}I", index.sections[2]) == tuple(blocks)
    assert len(index.sections[2]) == 4 * len(blocks)


def test_the_tensor_table_is_as_documented(content: bytes) -> None:
    records, _ = read_directory(content)
    for record in records:
        check_record(content, record)
    last = records[-1]
    rows = read_tensors(read_index(content[last.data : last.data + last.bytes]).sections[3])
    tensors = some_tensors()
    assert [row.name for row in rows] == list(tensors)
    for i, (row, tensor) in enumerate(zip(rows, tensors.values(), strict=True)):
        assert records[row.record].name == f"archive/data/{i}"
        assert row.dtype == DTYPES[tensor.dtype]
        assert row.shape == list(tensor.shape)
        assert row.strides == list(tensor.stride())
        assert records[row.record].bytes == tensor.numel() * tensor.dtype.itemsize


def test_equal_tensors_give_equal_files(tmp_path: Path, content: bytes) -> None:
    save(tmp_path / "another name.pt", some_tensors())
    assert (tmp_path / "another name.pt").read_bytes() == content


def test_the_example_is_true(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IOSHAPE_EXAMINE", "off")
    monkeypatch.setattr(capi, "context", capi.context.__wrapped__)  # one with this setting
    save(tmp_path / "example.pt", {"w": torch.arange(6.0).reshape(2, 3)})
    content = (tmp_path / "example.pt").read_bytes()
    page = (Path(__file__).parents[3] / "docs" / "format.md").read_text(encoding="utf-8")
    lines = page.split("## An example")[1].split("\n## ")[0].splitlines()
    shown = 0
    for line in lines:
        if line.startswith("    "):
            # Each line shows an offset, bytes and a comment.
            at, data = int(line[4:7], 16), bytes.fromhex(line[9:56])
            assert content[at : at + len(data)] == data, line
            shown += len(data)
    assert f"{len(content)} bytes" in page
    with zipfile.ZipFile(tmp_path / "example.pt") as archive:
        assert shown == archive.getinfo("archive/.ioshape/index").file_size


def test_the_manifest_in_the_documentation_holds() -> None:
    """Check the page's manifest against its checksum, and against the file that unit tests use."""
    page = (ROOT / "docs" / "format.md").read_text(encoding="utf-8")
    shown = re.search(r'^    \{\n      "format".*?^    \}\n', page, re.DOTALL | re.MULTILINE)
    assert shown
    text = textwrap.dedent(shown[0])
    body, line, end = text.rpartition('  "crc32"')
    assert line + end == f'  "crc32": "{zlib.crc32(body.encode()):08x}"\n}}\n'
    corpus = ROOT / "tests" / "c" / "fuzz" / "corpus" / "manifest"
    assert (corpus / "whole").read_text(encoding="utf-8") == text
    assert (corpus / "body").read_text(encoding="utf-8") == body
    assert [part["rank"] for part in json.loads(text)["parts"]] == [0, 1, 2]
