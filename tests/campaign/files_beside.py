# SPDX-License-Identifier: Apache-2.0
"""Make inputs of the kind "files" that are not files of torch, with a function for each format.

The damage of an input follows from the file that is tried, so a seed reproduces it.
"""

import contextlib
import functools
import io
import os
import pickle
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from random import Random

import ioshape
import ioshape.dcp
import torch
from hostile import descriptions
from ioshape._cli import main
from ioshape.safetensors import load_file, save_file
from torch.distributed.checkpoint import filesystem, metadata

from .damage import BLIND, TEXT, flipped, other_pickle
from .files_store import HOSTILE_PART, answers

#: Refused raises a finding if the exception is not a proper refusal. Silent makes the exception for
#: wrong data that was accepted.
Refused = Callable[[Exception], None]
Silent = Callable[[str], Exception]


@functools.cache
def _hostile_descriptions() -> list[bytes]:
    return [*descriptions().values()]


@functools.cache
def _description() -> bytes:
    size = torch.Size([3, 4])
    items = {
        f"layer.{i}": metadata.TensorStorageMetadata(
            metadata.TensorProperties(torch.float32),
            size,
            [metadata.ChunkStorageMetadata(torch.Size([0, 0]), size)],
        )
        for i in range(12)
    }
    places = {
        metadata.MetadataIndex(name, size, 0): filesystem._StorageInfo("__0_0.distcp", 9 * i, 9)
        for i, name in enumerate(items)
    }
    planned = {name: ("model", i) for i, name in enumerate(items)}
    return pickle.dumps(metadata.Metadata({**items}, planned, places))


def _quietly(*arguments: str) -> None:
    sys.argv = ["ioshape", *arguments]
    quiet = io.StringIO()
    with (
        contextlib.redirect_stdout(quiet),
        contextlib.redirect_stderr(quiet),
        contextlib.suppress(SystemExit),
    ):
        main()


def description(path: Path, rng: Random, refused: Refused, _silent: Silent) -> None:
    """Try a .metadata of DCP: with random damage, with other operations, or hostile."""
    folder = path.with_name("checkpoint")
    folder.mkdir(exist_ok=True)
    data = _description()
    chance = rng.random()
    if chance < HOSTILE_PART:
        data = rng.choice(_hostile_descriptions())
    elif chance < 0.7:
        data = other_pickle(rng, data)
    else:
        data = rng.choice(BLIND)(rng, data, [data])
    (folder / ".metadata").write_bytes(data)
    try:
        ioshape.dcp.Reader(folder).read_metadata()
    except ioshape.StorageError as error:
        refused(error)
    _quietly("inspect", "--json", str(folder))


@functools.cache
def _valid_safetensors(path: Path) -> bytes:
    save_file({f"layer.{i}": torch.ones(3) for i in range(12)}, path)
    return path.read_bytes()


def header(path: Path, rng: Random, refused: Refused, _silent: Silent) -> None:
    """Try a safetensors file with a damaged header."""
    tried = path.with_name("tried.safetensors")
    data = _valid_safetensors(tried)
    length = 8 + int.from_bytes(data[:8], "little")
    text = rng.choice(TEXT)(rng, data[:length], [data[:length]])
    tried.write_bytes(text + data[length:])
    for read in (ioshape.inspect, load_file):
        try:
            read(tried)
        except ioshape.StorageError as error:
            refused(error)


@functools.cache
def _with_checksums(folder: Path, length: int) -> tuple[bytes, bytes, int]:
    """Write a file, and return its contents, those of its checksum file, and its time."""
    folder.mkdir(exist_ok=True)
    file = folder / "file"
    with ioshape.open(file, "wb", checksums=True) as opened:
        opened.write(bytes(range(256)) * length)
    sums = file.with_name("file.ioshape-sums")
    return file.read_bytes(), sums.read_bytes(), file.stat().st_mtime_ns


def checksums(path: Path, rng: Random, refused: Refused, silent: Silent) -> None:
    """Try a file with a checksum file, one of which is damaged.

    The file's time stays unchanged, as when a disk corrupts data.
    """
    folder = path.with_name("beside")
    content, sums, time_ns = _with_checksums(folder, rng.choice((1, 1, 40, 40, 40, 9000)))
    if rng.random() < 0.3:
        data = flipped(rng, content, ())
    else:
        data, sums = content, rng.choice(BLIND)(rng, sums, [sums])
    (folder / "file").write_bytes(data)
    (folder / "file.ioshape-sums").write_bytes(sums)
    os.utime(folder / "file", ns=(time_ns, time_ns))
    try:
        ioshape.verify(folder / "file")
    except ioshape.StorageError as error:
        refused(error)
    try:
        with ioshape.open(folder / "file", "rb") as file:
            found = file.read()
    except ioshape.StorageError as error:
        refused(error)
    else:
        if found != content:
            raise silent("is read, and is not what was written")


def trace(path: Path, rng: Random, _refused: Refused, _silent: Silent) -> None:
    """Try a trace with a damaged line, which may be repeated."""
    folder = path.with_name("trace")
    folder.mkdir(exist_ok=True)
    line = (
        b'{"ioshape":"save","host":"a","rank":0,"pid":1,"started_s":1.5e9,"total_s":2.5,'
        b'"pickle_s":0.5,"path":"/a/b.pt","file_bytes":1000,"flight":[[0.5,10],[1,0]]}\n'
    )
    data = rng.choice(TEXT)(rng, line, [line]) * rng.choice((1, 10, 100))
    (folder / "a.jsonl").write_bytes(data)
    _quietly("trace", str(folder))


BESIDE = {
    "description": description,
    "header": header,
    "checksums": checksums,
    "trace": trace,
    "answers": answers,
}


def rng_of(data: bytes) -> Random:
    """Return a Random that follows from a file alone."""
    return Random(zlib.crc32(data))
