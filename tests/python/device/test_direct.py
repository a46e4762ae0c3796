# SPDX-License-Identifier: Apache-2.0
"""Loads by GPUDirect Storage, with a simulated device and a simulated cuFile library.

The device is played_device.py, and the library is built from cufile.c. Tests marked `gpu` need a
real GPU.
"""

import ctypes
import logging
import random
import zlib
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import ioshape
import pytest
import torch
from ioshape._device import crc32, cufile, direct
from ioshape._device import incoming as _incoming
from ioshape._device import stream as _stream
from ioshape._load.load import load_through
from ioshape._load.reader import Reader
from played_device import PlayedDevice
from records import flip, offset_of
from same import assert_same
from tree import build_folder

MIB = 1 << 20
PIECE_BYTES = 2 * MIB

# Typed as Any because the tests replace their attributes.
READER: Any = Reader
CRC32: Any = crc32


class Play(ctypes.Structure):
    """struct cufile_play"""

    _fields_ = (
        ("refuses", ctypes.c_int),
        ("fails_after", ctypes.c_uint64),
        ("garbles", ctypes.c_uint64),
        ("reads", ctypes.c_uint64),
        ("bytes", ctypes.c_uint64),
        ("handles", ctypes.c_int64),
    )


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Iterator[Play]:
    """Yield the state of a simulated cuFile; loads to the CPU go to a simulated device."""
    library = build_folder() / "tests" / "c" / "libcufile.so"
    found = Play.in_dll(ctypes.CDLL(str(library)), "cufile_play")
    ctypes.memset(ctypes.addressof(found), 0, ctypes.sizeof(found))
    monkeypatch.setattr(cufile, "_LIBRARY", str(library))
    # Any existing path makes the kernel module count as loaded.
    monkeypatch.setattr(cufile, "_MODULE", library)
    cufile._library.cache_clear()
    monkeypatch.setattr(_incoming, "open_stream", PlayedDevice().open)
    monkeypatch.setattr(_stream, "PIECE_BYTES", PIECE_BYTES)
    monkeypatch.setattr(_incoming, "_LEAST_DIRECT_BYTES", 8 * MIB)
    for name, value in {"_THREADS": 2, "_TRIED": 2, "_LEAST": 10}.items():
        monkeypatch.setattr(direct, name, value)
    yield found
    assert found.handles == 0
    cufile._library.cache_clear()


class Clock:
    """A clock that only reads advance."""

    def __init__(self, play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
        self._play = play
        self._n_reads = 0
        #: seconds of a direct read of one piece; a read through the CPU takes one second
        self.direct_s = 0.1
        read_file = READER.read_file

        def counted(opened: Reader, offset: int, into: memoryview) -> None:
            self._n_reads += 1
            read_file(opened, offset, into)

        monkeypatch.setattr(READER, "read_file", counted)
        monkeypatch.setattr(direct, "time", self)

    def monotonic(self) -> float:
        return self._n_reads + int(self._play.bytes) / PIECE_BYTES * self.direct_s


@pytest.fixture
def clock(play: Play, monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(play, monkeypatch)


def state() -> Any:
    """Return 36 MiB: storages that end within a block or at its end, and small ones."""
    return {
        "large": torch.arange(3 * MIB + 333),
        "bias": torch.ones(777),
        "other": torch.arange(MIB),
        "odd": torch.arange(3 * MIB + 5, dtype=torch.int32)[1:],
        "tiny": torch.ones(3),
        "step": 7,
    }


@pytest.fixture
def path(tmp_path: Path) -> Path:
    ioshape.save(state(), tmp_path / "x.pt")
    return tmp_path / "x.pt"


def emptied(value: Any) -> Any:
    tensors = {key: torch.zeros_like(one) for key, one in value.items() if key != "step"}
    return {**tensors, "step": 0}


# ---- The faster way ------------------------------------------------------------------------------


@pytest.mark.usefixtures("clock")
def test_what_comes_faster_past_the_cpu_comes_so(
    path: Path, play: Play, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "ioshape"):
        assert_same(ioshape.load(path), state())
    assert f'loading "{path}": by GPUDirect Storage' in caplog.text
    # Only the first pieces and the ends of storages come through the CPU.
    assert play.bytes > 20 * MIB


@pytest.mark.usefixtures("clock")
def test_tensors_are_filled_past_the_cpu(
    path: Path, play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that direct reads wait until the device has done its earlier work."""
    played = PlayedDevice()
    monkeypatch.setattr(_incoming, "open_stream", played.open)
    target = emptied(state())
    versions = {key: target[key]._version for key in ("large", "bias", "other")}
    played.asked += [target["large"].data.zero_, target["other"].data.zero_]
    found = ioshape.load(path, into=target)
    assert all(torch.equal(found[key], one) for key, one in state().items() if key != "step")
    assert all(found[key] is target[key] for key in versions)
    assert all(target[key]._version == version + 1 for key, version in versions.items())
    assert play.bytes > 20 * MIB
    assert played.is_idle


@pytest.mark.parametrize(("direct_s", "n_tried"), [(2.1, 2), (1.1, 6)])
def test_what_comes_slower_past_the_cpu_comes_by_it(
    direct_s: float,
    n_tried: int,
    path: Path,
    play: Play,
    clock: Clock,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Check how many pieces are tried before the load goes through the CPU.

    The first one prepares cuFile, and the second one is timed. If it is not hopelessly slow, four
    more follow, with all threads at once.
    """
    clock.direct_s = direct_s
    with caplog.at_level(logging.INFO, "ioshape"):
        assert_same(ioshape.load(path), state())
    assert f'loading "{path}": through the CPU' in caplog.text
    assert play.bytes == n_tried * PIECE_BYTES


def test_a_file_that_cufile_refuses_comes_by_the_cpu(
    path: Path, play: Play, caplog: pytest.LogCaptureFixture
) -> None:
    play.refuses = 1
    with caplog.at_level(logging.INFO, "ioshape"):
        assert_same(ioshape.load(path), state())
    assert play.reads == 0
    assert f'"{path}": no GPUDirect Storage: cuFileHandleRegister() failed with 5009' in caplog.text


def test_without_cufile_all_comes_by_the_cpu(
    path: Path, play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cufile, "_LIBRARY", "libnowhere.so.0")
    assert_same(ioshape.load(path), state())
    assert play.reads == 0


@pytest.mark.parametrize("asks", ["nobody", "the environment", "a file"])
@pytest.mark.usefixtures("clock")
def test_without_the_kernel_module_it_is_used_if_somebody_asks_for_it(
    asks: str, path: Path, play: Play, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cufile, "_MODULE", tmp_path / "nowhere")
    configuration = tmp_path / "cufile.json"
    configuration.write_text('{ "properties": { // and more\n "use_pci_p2pdma" : false } }')
    monkeypatch.setenv("CUFILE_ENV_PATH_JSON", str(configuration))
    if asks == "the environment":
        monkeypatch.setenv("CUFILE_USE_PCIP2PDMA", "true")
    elif asks == "a file":
        configuration.write_text(configuration.read_text().replace("false", "true"))
    assert_same(ioshape.load(path), state())
    assert (play.reads > 0) == (asks != "nobody")


@pytest.mark.parametrize("how", ["torch", "unverified"])
@pytest.mark.usefixtures("clock")
def test_what_cannot_be_verified_on_the_gpu_comes_by_the_cpu(
    how: str, path: Path, play: Play
) -> None:
    if how == "torch":
        torch.save(state(), path)
    assert_same(ioshape.load(path, verify=how == "torch"), state())
    assert play.reads == 0


@pytest.mark.usefixtures("clock")
def test_a_part_of_a_file_is_read_from_where_it_lies(
    path: Path, play: Play, tmp_path: Path
) -> None:
    part = (8192, path.stat().st_size)
    whole = tmp_path / "whole"
    whole.write_bytes(bytes(part[0]) + path.read_bytes())
    reader = Reader(str(whole), part=part)
    assert_same(load_through(reader, torch.load, None, part, is_plain=True), state())
    assert play.bytes > 20 * MIB


# ---- Failures ------------------------------------------------------------------------------------


@pytest.mark.parametrize("fails_after", [0, 1, 5, 12])
@pytest.mark.usefixtures("clock")
def test_what_fails_past_the_cpu_comes_by_it(
    fails_after: int, path: Path, play: Play, caplog: pytest.LogCaptureFixture
) -> None:
    play.fails_after = fails_after or 1 << 40
    if not fails_after:
        play.garbles = 15
    with caplog.at_level(logging.WARNING, "ioshape"):
        assert_same(ioshape.load(path), state())
    assert ("Input/output error" if fails_after else "did not arrive intact") in caplog.text
    assert f'loading "{path}"' in caplog.text
    assert play.reads > fails_after


@pytest.mark.usefixtures("clock")
def test_a_gpu_without_memory_for_sums_gets_it_by_the_cpu(
    path: Path, play: Play, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(*_: Any) -> None:
        raise torch.OutOfMemoryError("no memory left")

    monkeypatch.setattr(direct.Direct, "_sums", failing)
    assert_same(ioshape.load(path), state())
    assert play.reads > 0
    assert "no memory left" in caplog.text


@pytest.mark.usefixtures("clock")
def test_without_threads_it_comes_by_the_cpu(
    path: Path, play: Play, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(*_: Any) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(futures.ThreadPoolExecutor, "submit", failing)
    assert_same(ioshape.load(path), state())
    assert play.reads == 0
    assert "new thread" in caplog.text


@pytest.mark.usefixtures("clock")
def test_progress_is_told_past_the_cpu_and_stops_it(path: Path, play: Play) -> None:
    told: list[int] = []
    ioshape.load(path, progress=lambda now: told.append(now.done_bytes))
    assert told == sorted(told)
    # Progress is reported for each piece, whichever way it comes.
    assert len(set(told)) > path.stat().st_size / PIECE_BYTES
    begun = play.bytes

    def stop(_now: Any) -> None:
        if play.bytes > begun:
            raise KeyError("enough")

    with pytest.raises(KeyError, match="enough"):
        ioshape.load(path, progress=stop)
    assert begun < play.bytes < 2 * begun


@pytest.mark.parametrize("at", [5 * MIB, 24 * MIB - 5], ids=["tried", "later"])
@pytest.mark.usefixtures("clock")
def test_damage_is_found_past_the_cpu(at: int, path: Path) -> None:
    flip(path, offset_of(path, "data/0") + at)
    with pytest.raises(ioshape.DamagedError, match="'large'") as raised:
        ioshape.load(path, into=emptied(state()))
    assert raised.value.record == "data/0"
    assert set(raised.value.changed) == {"large", "bias", "other", "tiny"}


# ---- Checksums on a device -----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["single", "half"])
@pytest.mark.parametrize("block_bytes", [128, 256, 128 * 32, 128 * 33, 64 << 10, MIB])
def test_sums_are_those_of_zlib(
    block_bytes: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CRC32, "_dtype", lambda _device: dtype)
    for cached in (CRC32._matrix, CRC32._masks):
        cached.cache_clear()
    numbers = random.Random(block_bytes)
    blocks = [
        bytes(block_bytes),
        b"\xff" * block_bytes,
        *(numbers.randbytes(block_bytes) for _ in range(3)),
    ]
    memory = torch.frombuffer(bytearray(b"".join(blocks)), dtype=torch.uint8)
    found = crc32.crc32_of_blocks(memory, block_bytes).tolist()
    sums = [int.from_bytes(bytes(one), "little") for one in found]
    assert sums == [zlib.crc32(block) for block in blocks]
    for cached in (CRC32._matrix, CRC32._masks):
        cached.cache_clear()


@pytest.mark.gpu
def test_sums_of_a_gpu_are_those_of_zlib() -> None:
    data = random.Random(5).randbytes(24 * MIB)
    memory = torch.frombuffer(bytearray(data), dtype=torch.uint8).cuda()
    found = crc32.crc32_of_blocks(memory, MIB).tolist()
    sums = [int.from_bytes(bytes(one), "little") for one in found]
    assert sums == [zlib.crc32(data[at : at + MIB]) for at in range(0, len(data), MIB)]


@pytest.mark.gpu
def test_a_gpu_is_loaded_as_by_the_cpu_whichever_way_is_faster(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check a real GPU. Direct reads happen only if there is a cuFile."""
    monkeypatch.setattr(_incoming, "_LEAST_DIRECT_BYTES", 8 * MIB)
    monkeypatch.setattr(_stream, "PIECE_BYTES", PIECE_BYTES)
    for name, value in {"_THREADS": 2, "_TRIED": 2, "_LEAST": 10}.items():
        monkeypatch.setattr(direct, name, value)
    found = ioshape.load(path, map_location="cuda")
    assert_same(found, torch.load(path, map_location="cuda"))
