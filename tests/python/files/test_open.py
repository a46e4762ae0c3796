# SPDX-License-Identifier: Apache-2.0
"""ioshape.open(): files in any format, with the guarantees of checkpoints."""

import errno
import gc
import io
import json
import logging
import os
import pickle
import random
import shutil
import struct
import threading
import time
import tracemalloc
import warnings
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import ioshape
import ioshape.safetensors
import numpy as np
import pytest
import torch
from checkpoints import left_clean, names_in
from command import call, succeed
from ioshape._core import config
from processes import run_interpreter
from same import assert_same

STATE = {"weight": torch.arange(300_000.0), "note": "x"}
OLD = b"what was there before"
MIB = 1 << 20


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(OLD)
    return path


# ---- Libraries that write to the file ------------------------------------------------------------


def _zip(file: BinaryIO) -> None:
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a", b"one" * 1000)
        with archive.open("b", "w", force_zip64=True) as member:
            member.write(b"two")
        archive.writestr("c/d", os.urandom(MIB))


def _text(file: BinaryIO) -> None:
    text = io.TextIOWrapper(file, encoding="utf-8")
    text.write("\N{LATIN SMALL LETTER A WITH DIAERESIS}\n" * 100_000)
    text.detach()  # its destructor would close the file


def _copy(file: BinaryIO) -> None:
    shutil.copyfileobj(io.BytesIO(bytes(range(256)) * 5000), file)


WRITERS: dict[str, Callable[[Any], object]] = {
    "torch.save": lambda file: torch.save(STATE, file),
    "torch.save, old format": lambda file: torch.save(
        STATE, file, _use_new_zipfile_serialization=False
    ),
    "pickle": lambda file: pickle.dump([b"x" * 300_000, {"a": 1}], file, protocol=5),
    "numpy.save": lambda file: np.save(file, np.arange(200_000).reshape(2, -1)),
    "numpy.save, Fortran": lambda file: np.save(file, np.arange(200_000).reshape(2, -1).T),
    "numpy.savez": lambda file: np.savez(file, a=np.arange(9), b=np.ones(100_000)),
    "copyfileobj": _copy,
    "lines": lambda file: file.writelines([b"one\n", bytearray(b"two\n"), memoryview(b"three")]),
    "zipfile": _zip,
    "text": _text,
    "nothing": lambda _file: None,
}

READERS: dict[str, Callable[[Any], object]] = {
    "torch.save": torch.load,
    "torch.save, old format": torch.load,
    "pickle": pickle.load,
    "numpy.save": np.load,
    "numpy.save, Fortran": np.load,
    "numpy.savez": lambda file: {**np.load(file)},
    "zipfile": lambda file: zipfile.ZipFile(file).testzip(),
}


@pytest.mark.parametrize("name", WRITERS)
def test_what_is_written_to_it_is_what_a_usual_file_holds(name: str, path: Path) -> None:
    usual = path.with_name("usual")
    with usual.open("wb") as file:
        WRITERS[name](file)
        expected_bytes = file.tell()
    with ioshape.open(path, "wb") as ours:
        WRITERS[name](ours)
        # zipfile cannot seek back here, so it writes lengths behind the members (data descriptors).
        is_zip = name in ("zipfile", "numpy.savez")
        assert ours.tell() == expected_bytes or is_zip
        assert path.read_bytes() == OLD
    assert ours.report is not None
    assert ours.report.file_bytes == path.stat().st_size
    assert ours.report.written_by == "caller"
    assert names_in(path.parent) == ["file", "usual"]
    if name in READERS:
        with ioshape.open(path, "rb") as read, usual.open("rb") as same:
            assert_same(READERS[name](read), READERS[name](same))
    # torch.save gives each archive an id of its own.
    assert path.read_bytes() == usual.read_bytes() or is_zip or name == "torch.save"


def test_zipfile_does_not_go_back_in_it(path: Path) -> None:
    """Check that the file is not seekable: zipfile would seek back to rewrite headers."""
    with ioshape.open(path, "wb") as file:
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr("a", bytes(3 * MIB))
        with pytest.raises(io.UnsupportedOperation):
            file.seek(0)
    with zipfile.ZipFile(path) as archive:
        assert archive.read("a") == bytes(3 * MIB)
        assert archive.testzip() is None


def test_it_goes_forward_over_zeros(path: Path) -> None:
    with ioshape.open(path, "wb") as file:
        file.write(b"a")
        assert file.seek(5 * MIB) == file.tell() == 5 * MIB
        assert file.seek(2, os.SEEK_CUR) == 5 * MIB + 2
        assert file.seek(0, os.SEEK_CUR) == 5 * MIB + 2
        file.write(b"b")
        for offset, whence in [(5, os.SEEK_SET), (-1, os.SEEK_CUR), (0, os.SEEK_END)]:
            with pytest.raises(io.UnsupportedOperation):
                file.seek(offset, whence)
        with pytest.raises(io.UnsupportedOperation):
            file.read()
        with pytest.raises(io.UnsupportedOperation):
            file.truncate()
        with pytest.raises(io.UnsupportedOperation):
            file.fileno()
    assert path.read_bytes() == b"a" + bytes(5 * MIB + 1) + b"b"


def test_a_large_buffer_is_written_from_where_it_lies(path: Path) -> None:
    data = bytes(64 * MIB)
    tracemalloc.start()
    try:
        with ioshape.open(path, "wb") as file:
            assert file.write(data) == len(data)
            assert file.write(np.zeros((3, 1000), dtype=np.int64).data) == 24_000
        _now, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < MIB
    assert path.stat().st_size == len(data) + 24_000


def test_threads_may_write_to_one_file(path: Path) -> None:
    lines = [bytes([number]) * 1000 for number in range(8)]

    def write(line: bytes) -> None:
        for _ in range(200):
            file.write(line)

    with ioshape.open(path, "wb") as file:
        threads = [threading.Thread(target=write, args=(line,)) for line in lines]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    data = path.read_bytes()
    found = [data[at : at + 1000] for at in range(0, len(data), 1000)]
    assert sorted(found) == sorted(line for line in lines for _ in range(200))


# ---- Closing and discarding ----------------------------------------------------------------------


def test_it_is_in_place_when_it_is_closed(path: Path) -> None:
    file = ioshape.open(path, "wb")
    assert (file.name, file.mode, file.writable(), file.readable()) == (
        str(path),
        "wb",
        True,
        False,
    )
    file.write(b"new")
    file.flush()
    assert path.read_bytes() == OLD
    assert file.report is None
    assert not file.closed
    file.close()
    file.close()
    assert file.closed
    assert path.read_bytes() == b"new"
    assert file.report is not None
    assert file.report.sync_s > 0
    with pytest.raises(ValueError, match="closed"):
        file.write(b"more")
    file.discard()
    assert path.read_bytes() == b"new"


@pytest.mark.parametrize("n_bytes", [10, 5 * MIB])
def test_a_block_that_fails_leaves_what_was_there(n_bytes: int, path: Path) -> None:
    with pytest.raises(ZeroDivisionError), ioshape.open(path, "wb") as file:  # noqa: PT012
        file.write(bytes(n_bytes))
        raise ZeroDivisionError
    assert file.closed
    assert file.report is None
    assert path.read_bytes() == OLD
    assert names_in(path.parent) == ["file"]


def test_it_can_be_dropped(path: Path) -> None:
    with ioshape.open(path, "wb") as file:
        file.write(bytes(MIB))
        file.discard()
        assert file.closed
    assert path.read_bytes() == OLD
    assert names_in(path.parent) == ["file"]


def test_what_is_never_closed_is_dropped_and_warned_of(path: Path) -> None:
    file = ioshape.open(path, "wb")
    file.write(bytes(MIB))
    with pytest.warns(ResourceWarning, match="not closed"):  # noqa: PT031
        del file
        gc.collect()
    assert path.read_bytes() == OLD
    assert names_in(path.parent) == ["file"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with ioshape.open(path, "wb") as file:
            file.write(b"new")
        del file
        gc.collect()


def test_what_a_process_leaves_open_is_dropped(path: Path) -> None:
    finished = run_interpreter(
        path.parent,
        """
        import ioshape

        file = ioshape.open("file", "wb")
        file.write(bytes(3 << 20))
        """,
        variables={"PYTHONWARNINGS": "default"},
    )
    assert "ResourceWarning" in finished.stderr
    assert path.read_bytes() == OLD
    assert names_in(path.parent) == ["file", "program.py"]


def test_a_child_that_was_forked_leaves_it_alone(path: Path) -> None:
    with ioshape.open(path, "wb") as file:
        file.write(bytes(3 * MIB))
        child = os.fork()
        if not child:
            try:
                file.discard()
            finally:
                os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        file.write(b"end")
    assert path.read_bytes() == bytes(3 * MIB) + b"end"


def test_a_failure_is_not_lost(path: Path) -> None:
    """Check that a failed write fails the block even if the library swallows or wraps the error.

    Torch is such a library.
    """
    full = path.with_name("full")
    full.symlink_to("/dev/full")

    def write(way: str) -> None:
        with ioshape.open(full, "wb") as file:
            seen.append(file)
            try:
                file.write(bytes(10 if way == "at the end" else 40 * MIB))
            except OSError as error:
                if way == "wrapped":
                    raise KeyError from error
                if way == "plain":
                    raise

    for way in ("swallowed", "wrapped", "plain", "at the end"):
        seen: list[ioshape.types.AtomicFile] = []
        with pytest.raises(ioshape.StorageError) as caught:
            write(way)
        assert caught.value.errno == errno.ENOSPC, way
        assert seen[0].closed
        assert seen[0].report is not None
        assert not seen[0].report.file_bytes


def test_a_file_that_has_failed_is_not_closed_as_if_it_had_not(path: Path) -> None:
    path.with_name("full").symlink_to("/dev/full")
    file = ioshape.open(path.with_name("full"), "wb")
    with pytest.raises(ioshape.StorageError) as failed:
        file.write(bytes(40 * MIB))
    assert failed.value.errno == errno.ENOSPC
    with pytest.raises(ioshape.StorageError):
        file.close()
    assert file.closed


# ---- Options -------------------------------------------------------------------------------------


def test_it_replaces_nothing_where_that_was_said(path: Path) -> None:
    with pytest.raises(FileExistsError), ioshape.open(path, "wb", replace=False) as file:
        file.write(b"new")
    assert path.read_bytes() == OLD
    with ioshape.open(path.with_name("other"), "wb", replace=False) as file:
        file.write(b"new")
    assert names_in(path.parent) == ["file", "other"]


def test_it_is_durable_as_saves_are(path: Path) -> None:
    def syncs(**named: Any) -> bool:
        with ioshape.open(path, "wb", **named) as file:
            file.write(bytes(MIB))
        assert file.report is not None
        return file.report.sync_s > 0

    assert syncs()
    assert not syncs(durable=False)
    with left_clean():
        ioshape.configure(durable=False)
        try:
            assert not syncs()
            assert syncs(durable=True)
        finally:
            config.reset()


def test_it_has_a_deadline_as_saves_have(path: Path) -> None:
    with ioshape.open(path, "wb", deadline=60) as file:
        file.write(b"new")
    assert file.report is not None
    assert file.report.deadline_met
    assert 0 < file.report.deadline_left_s < 60


def test_its_report_is_in_the_trace(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = path.with_name("trace")
    monkeypatch.setenv("IOSHAPE_TRACE", str(folder))
    with ioshape.open(path, "wb") as file:
        file.write(b"new")
    with pytest.raises(FileExistsError), ioshape.open(path, "wb", replace=False) as file:
        file.write(b"newer")
    lines = [json.loads(line) for one in folder.iterdir() for line in one.read_text().splitlines()]
    assert [(line["path"], line["file_bytes"], bool(line["error"])) for line in lines] == [
        (str(path), 3, False),
        (str(path), 0, True),
    ]


@pytest.mark.parametrize("mode", ["w", "r", "wt", "ab", "r+b", "xb", "w+b", ""])
def test_other_modes_are_refused(mode: str, path: Path) -> None:
    with pytest.raises(ValueError, match='use "rb" or "wb"'):
        ioshape.open(path, mode)  # type: ignore[call-overload]
    assert path.read_bytes() == OLD


@pytest.mark.parametrize("url", ["s3://bucket/a.pt", "gs://bucket/a.pt", "file:/tmp/a.pt"])
def test_urls_are_refused(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for given in (url, Path(url)):
        for way in (
            lambda given: ioshape.open(given, "wb"),
            lambda given: ioshape.open(given, "rb"),
            lambda given: ioshape.save(STATE, given),
            lambda given: ioshape.save_async(STATE, given),
        ):
            with pytest.raises(FileNotFoundError, match="is a URL") as refused:
                way(given)
            assert isinstance(refused.value, RuntimeError)  # torch.save raises this class
    (tmp_path / "s3:").mkdir()
    ioshape.save(STATE, "s3:/a.pt")
    assert names_in(tmp_path / "s3:") == ["a.pt"]


@pytest.mark.wording
def test_a_home_directory_that_nobody_has_written_out_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for way in (
        lambda: ioshape.open("~/a.pt", "wb"),
        lambda: ioshape.save(STATE, "~/a.pt"),
        lambda: ioshape.save_async(STATE, "~/a.pt").result(),
    ):
        with pytest.raises(FileNotFoundError, match="expanduser"):
            way()
    (tmp_path / "~").mkdir()
    ioshape.save(STATE, "~/a.pt")  # torch.save accepts such a path
    assert names_in(tmp_path / "~") == ["a.pt"]


# ---- Checksums -----------------------------------------------------------------------------------

DATA = random.Random(1).randbytes(3 * MIB + 17)


def sums_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.ioshape-sums")


def write_with_checksums(path: Path, data: bytes = DATA, **named: Any) -> ioshape.Report:
    with ioshape.open(path, "wb", checksums=True, **named) as file:
        for begin in range(0, len(data), 1_000_003):
            file.write(data[begin : begin + 1_000_003])
    assert file.report is not None
    return file.report


def flip(path: Path, offset: int) -> None:
    """Flip a bit as a failing disk does: the file's times stay."""
    times = path.stat()
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


@pytest.mark.parametrize("n_bytes", [0, 1, MIB, MIB + 1, len(DATA)])
def test_checksums_lie_beside_the_file_as_the_documentation_says(n_bytes: int, path: Path) -> None:
    report = write_with_checksums(path, DATA[:n_bytes])
    assert not report.downgrades
    assert names_in(path.parent) == ["file", "file.ioshape-sums"]
    bytes_of = sums_of(path).read_bytes()
    magic, version, crc, block, size, modified = struct.unpack_from("<8sIIQQq", bytes_of)
    assert (magic, version, block, size) == (b"ioshsums", 1, MIB, n_bytes)
    assert crc == zlib.crc32(bytes_of[16:])
    assert modified == path.stat().st_mtime_ns
    blocks = [DATA[at : min(at + MIB, n_bytes)] for at in range(0, n_bytes, MIB)]
    assert bytes_of[40:] == b"".join(struct.pack("<I", zlib.crc32(one)) for one in blocks)
    with ioshape.open(path) as file:
        assert file.has_checksums
        assert file.read() == DATA[:n_bytes]
    ioshape.verify(path)
    ioshape.verify(path, quick=True)


def test_damage_is_found_where_it_lies(path: Path) -> None:
    write_with_checksums(path)
    flip(path, 2 * MIB + 5)
    with ioshape.open(path) as file:
        assert file.read(MIB) == DATA[:MIB]
        file.seek(3 * MIB)
        assert file.read() == DATA[3 * MIB :]
        file.seek(2 * MIB + 900_000)
        with pytest.raises(ioshape.DamagedError) as caught:
            file.read(10)
    assert (caught.value.offset, caught.value.record) == (2 * MIB, None)
    with pytest.raises(ioshape.DamagedError):
        ioshape.verify(path)


def test_the_command_verifies_by_them(path: Path) -> None:
    write_with_checksums(path)
    assert "ok" in succeed(call("verify", path))
    flip(path, 7)
    done = call("verify", "--json", path)
    assert (done.returncode, json.loads(done.stdout)[0]["state"]) == (1, "damaged")


def rewrite_in_place(path: Path) -> None:
    time.sleep(0.01)  # the filesystem's clock must advance
    with path.open("r+b") as file:
        file.write(b"other")


def rewrite_by_us(path: Path) -> None:
    """Replace the file until it has a new time: the filesystem's clock takes some ms to advance."""
    before = path.stat().st_mtime_ns
    while path.stat().st_mtime_ns == before:
        with ioshape.open(path, "wb") as file:
            file.write(bytes(len(DATA)))


def in_its_place(path: Path, make: Callable[[Path], object]) -> None:
    path.unlink()
    make(path)


def until_its_time_is_another(path: Path, change: Callable[[Path], object]) -> None:
    """Repeat a change until the file has a new time: the clock takes some ms to advance."""
    before = path.stat().st_mtime_ns
    while path.stat().st_mtime_ns == before:
        change(path)


#: Changes that healthy programs make to a file or to its checksums.
CHANGES: dict[str, Callable[[Path], object]] = {
    "rewritten in place": rewrite_in_place,
    "replaced without checksums": rewrite_by_us,
    "cut": lambda path: until_its_time_is_another(path, lambda one: os.truncate(one, MIB)),
    "checksums lost": lambda path: sums_of(path).unlink(),
    "a directory": lambda path: in_its_place(sums_of(path), os.mkdir),
    "a pipe": lambda path: in_its_place(sums_of(path), os.mkfifo),
    "a link": lambda path: in_its_place(sums_of(path), lambda one: one.symlink_to("file")),
}


@pytest.mark.parametrize("name", CHANGES)
def test_checksums_of_another_file_do_not_make_this_one_look_damaged(
    name: str, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_with_checksums(path)
    CHANGES[name](path)
    with ioshape.open(path) as file:
        assert not file.has_checksums
        assert file.read() == path.read_bytes()
    assert not caplog.records
    # verify() finds no valid checksums: the file is no torch zip, and its sums are missing or of
    # earlier content.
    with pytest.raises((ioshape.errors.FormatError, ioshape.StorageError)) as caught:
        ioshape.verify(path)
    assert not isinstance(caught.value, ioshape.DamagedError)


def test_verify_says_that_the_file_was_changed_after_its_checksums(path: Path) -> None:
    write_with_checksums(path)
    rewrite_in_place(path)
    with pytest.raises(ioshape.StorageError, match="changed or replaced after") as caught:
        ioshape.verify(path)
    assert caught.value.errno == errno.ENODATA


#: Damage by a disk, a power loss or a bad copy to the file of checksums.
DAMAGE: dict[str, Callable[[Path], object]] = {
    "the magic": lambda path: flip(sums_of(path), 0),
    "the version": lambda path: flip(sums_of(path), 8),
    "the sum of sums": lambda path: flip(sums_of(path), 12),
    "the block's length": lambda path: flip(sums_of(path), 18),
    "the file's length": lambda path: flip(sums_of(path), 24),
    "the file's time": lambda path: flip(sums_of(path), 32),
    "a checksum": lambda path: flip(sums_of(path), 41),
    "cut": lambda path: os.truncate(sums_of(path), 30),
    "emptied": lambda path: os.truncate(sums_of(path), 0),
    "overwritten": lambda path: sums_of(path).write_bytes(bytes(MIB)),
    "as large as no checksums are": lambda path: os.truncate(sums_of(path), 1 << 40),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_checksums_do_not_silently_switch_verification_off(
    name: str, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_with_checksums(path)
    DAMAGE[name](path)
    with ioshape.open(path) as file:
        assert not file.has_checksums
        assert file.read() == DATA
    [warning] = caplog.records
    assert warning.levelno == logging.WARNING
    assert "file.ioshape-sums" in warning.getMessage()
    for quick in (False, True):
        with pytest.raises(ioshape.DamagedError, match=r"file\.ioshape-sums.*is damaged") as caught:
            ioshape.verify(path, quick=quick)
        assert caught.value.remedy


def test_every_bit_of_the_checksums_counts(path: Path) -> None:
    write_with_checksums(path, DATA[: MIB + 1])
    for bit in range(8 * sums_of(path).stat().st_size):
        intact = sums_of(path).read_bytes()
        damaged = bytearray(intact)
        damaged[bit // 8] ^= 1 << bit % 8
        sums_of(path).write_bytes(damaged)
        with pytest.raises(ioshape.DamagedError):
            ioshape.verify(path, quick=True)
        sums_of(path).write_bytes(intact)
    ioshape.verify(path)


@pytest.mark.parametrize("quick", [False, True])
def test_damaged_checksums_count_beside_files_that_can_be_checked_otherwise(
    quick: bool, tmp_path: Path
) -> None:
    archive = tmp_path / "a.pt"
    with ioshape.open(archive, "wb", checksums=True) as file:
        torch.save(torch.ones(3), file)
    safetensors = tmp_path / "a.safetensors"
    ioshape.safetensors.save_file({"a": torch.ones(3)}, safetensors, checksums=True)
    for one in (archive, safetensors):
        ioshape.verify(one, quick=quick)
        flip(sums_of(one), 41)
        with pytest.raises(ioshape.DamagedError, match="ioshape-sums"):
            ioshape.verify(one, quick=quick)


def test_a_file_of_its_old_time_and_another_length_is_damaged(path: Path) -> None:
    write_with_checksums(path)
    times = path.stat()
    os.truncate(path, MIB)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    for read in (ioshape.open, ioshape.verify):
        with pytest.raises(ioshape.DamagedError, match="truncated"):
            read(path)


def test_the_command_says_that_checksums_are_damaged(path: Path) -> None:
    write_with_checksums(path)
    flip(sums_of(path), 41)
    done = call("verify", "--json", path)
    assert (done.returncode, json.loads(done.stdout)[0]["state"]) == (1, "damaged")


def test_what_another_user_puts_there_says_nothing_of_the_file(path: Path) -> None:
    write_with_checksums(path)
    if os.geteuid():
        pytest.skip("only root can give files away")
    os.chown(sums_of(path), 12345, -1)
    with ioshape.open(path) as file:
        assert not file.has_checksums


def test_checksums_follow_the_file_when_it_is_renamed_or_copied(path: Path) -> None:
    write_with_checksums(path)
    link, copy = path.with_name("link"), path.with_name("copy")
    link.symlink_to("file")
    shutil.copy2(path, copy)
    shutil.copy2(sums_of(path), sums_of(copy))
    for one in (link, copy):
        with ioshape.open(one) as file:
            assert file.has_checksums
    with ioshape.open(link, "wb", checksums=True) as new:
        new.write(b"new")
    assert not sums_of(link).exists()
    with ioshape.open(path) as file:
        assert file.has_checksums
        assert file.read() == b"new"


def test_checksums_can_be_read_by_those_who_can_read_the_file(path: Path) -> None:
    path.chmod(0o640)
    write_with_checksums(path)
    assert sums_of(path).stat().st_mode & 0o777 == path.stat().st_mode & 0o777 == 0o640


def test_a_file_without_room_for_checksums_beside_it_stands(path: Path) -> None:
    long = path.with_name("x" * 250)
    report = write_with_checksums(long)
    assert [step.code for step in report.downgrades] == ["checksums"]
    assert long.read_bytes() == DATA
    with ioshape.open(long) as file:
        assert not file.has_checksums


# ---- Reading -------------------------------------------------------------------------------------


def test_a_file_is_read_as_any_file_is(path: Path) -> None:
    data = os.urandom(3 * MIB + 17)
    path.write_bytes(data)
    with ioshape.open(path) as file:
        assert (file.name, file.mode, file.readable(), file.writable()) == (
            str(path),
            "rb",
            True,
            False,
        )
        assert file.read(10) == data[:10]
        assert file.tell() == 10
        assert file.seek(-7, os.SEEK_END) == len(data) - 7
        assert file.read() == data[-7:]
        assert file.read(5) == b""
        into = bytearray(2 * MIB)
        file.seek(5)
        assert file.readinto(into) == len(into)
        assert into == data[5 : 5 + len(into)]
        file.seek(0)
        assert file.readline() == data[: data.index(b"\n") + 1]
        file.seek(1)
        assert file.read() == data[1:]
    assert file.closed


def test_reading_asks_for_no_more_memory_than_there_is(path: Path) -> None:
    with ioshape.open(path) as file:
        assert file.read(1 << 50) == OLD


def test_a_wrong_bit_in_a_checkpoint_is_found(path: Path) -> None:
    ioshape.save(torch.arange(MIB), path)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with ioshape.open(path) as file, pytest.raises(ioshape.DamagedError):
        file.read()
    with ioshape.open(path) as file:
        assert file.read(4) == data[:4]


def test_who_reads_while_it_is_replaced_reads_what_was_there(path: Path) -> None:
    path.write_bytes(b"a" * (4 * MIB))
    with ioshape.open(path) as reader:
        assert reader.read(1) == b"a"
        with ioshape.open(path, "wb") as writer:
            writer.write(b"b" * (4 * MIB))
        assert reader.read() == b"a" * (4 * MIB - 1)
    with ioshape.open(path) as reader:
        assert reader.read(1) == b"b"


@pytest.mark.parametrize("data", [b"", b"P", b"PK\3\4", b"text" * 100])
def test_any_file_can_be_read(data: bytes, path: Path) -> None:
    path.write_bytes(data)
    with ioshape.open(path) as file:
        assert file.read() == data
        assert not file.has_checksums


def test_what_cannot_be_read_says_so(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        ioshape.open(tmp_path / "missing")
    with pytest.raises(IsADirectoryError):
        ioshape.open(tmp_path)
