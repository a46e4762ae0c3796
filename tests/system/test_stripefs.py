# SPDX-License-Identifier: Apache-2.0
"""Test that stripefs does what its README says: its model, its faults, and its counts."""

import contextlib
import ctypes
import errno
import mmap
import os
import platform
import random
import re
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from striped import INSTANT, StripefsError, opened, striped, stripefs, unmount
from stripefs_model import TOLERANCE, validate

pytestmark = pytest.mark.usefixtures("_mounts_of_stripefs")

MIB = 1 << 20


@contextlib.contextmanager
def aligned(size: int, seed: int = 0) -> Iterator[mmap.mmap]:
    """Yield random bytes in memory that O_DIRECT accepts."""
    with mmap.mmap(-1, size) as memory:
        memory.write(random.Random(seed).randbytes(size))
        yield memory


@contextlib.contextmanager
def preallocated(path: Path, size: int) -> Iterator[int]:
    """Yield a file for O_DIRECT. Its size does not change, so its requests run in parallel."""
    with opened(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT) as file:
        os.posix_fallocate(file, 0, size)
        yield file


def fails(code: int, call: Callable[..., object], *arguments: object) -> None:
    with pytest.raises(OSError, match=re.escape(f"[Errno {code}]")):
        call(*arguments)


#: Numbers of io_setup, io_destroy, io_getevents and io_submit.
IO_CALLS = {"x86_64": (206, 207, 208, 209), "aarch64": (0, 1, 4, 2)}


class Request(ctypes.Structure):
    """The kernel's struct iocb."""

    _fields_ = (
        ("data", ctypes.c_uint64),
        ("key", ctypes.c_uint64),
        ("opcode", ctypes.c_uint16),
        ("priority", ctypes.c_int16),
        ("file", ctypes.c_uint32),
        ("buffer", ctypes.c_uint64),
        ("bytes", ctypes.c_uint64),
        ("offset", ctypes.c_int64),
        ("more", ctypes.c_uint64 * 2),
    )


def write_at_once(data: mmap.mmap, file: int) -> float:
    """Write the data by one asynchronous request, and return the seconds.

    A pwrite() would be split by the kernel into pieces that are sent one after another.
    """
    system = ctypes.CDLL(None).syscall
    setup, destroy, get_events, submit = IO_CALLS[platform.machine()]
    write = 1
    context = ctypes.c_ulong(0)
    memory = (ctypes.c_char * len(data)).from_buffer(data)
    request = Request(
        opcode=write, file=file, buffer=ctypes.addressof(memory), bytes=len(data), offset=0
    )
    one, event = ctypes.c_long(1), (ctypes.c_int64 * 4)()
    assert system(setup, one, ctypes.byref(context)) == 0
    begin = time.monotonic()
    requests = (ctypes.c_void_p * 1)(ctypes.addressof(request))
    assert system(submit, context, one, requests) == 1
    assert system(get_events, context, one, one, ctypes.byref(event), None) == 1
    took_s = time.monotonic() - begin
    assert event[2] == len(data)
    system(destroy, context)
    del memory
    return took_s


def quickest(run: Callable[[], float], good_s: float) -> float:
    """Repeat a run until it is fast enough, and return its seconds.

    Other programs use the machine.
    """
    took_s = run()
    for _ in range(4):
        if took_s <= good_s:
            break
        took_s = min(took_s, run())
    return took_s


def counted(run: Callable[[], int], good: Callable[[int], bool]) -> int:
    """Repeat a run until its count is good, and return the last. Other programs may delay a run."""
    for _ in range(4):
        count = run()
        if good(count):
            return count
    return run()


def timed(run: Callable[[], object]) -> float:
    begin = time.monotonic()
    run()
    return time.monotonic() - begin


# ---- The model -----------------------------------------------------------------------------------


def test_what_a_server_caches_is_durable_after_fsync_only() -> None:
    parameters = {"bandwidth": "1500k", "link": 0, "cache": "through", **INSTANT}
    with striped("nfs", **parameters) as mount, opened(mount.path / "file") as file:
        os.write(file, bytes(MIB))
        assert mount.statistics()["targets"][0]["queue"] > 0
        os.fsync(file)
        assert mount.statistics()["targets"][0]["queue"] == 0
        mount.order("target 0 failing")
        os.write(file, b"x")
        fails(errno.EIO, os.fsync, file)
        os.fsync(file)


def test_a_client_s_cache_lets_whole_stripes_leave_a_window_at_a_time() -> None:
    parameters = {"bandwidth": "12M", "seek_ms": 0, "cache": "client", "window": 2, **INSTANT}
    with striped("hdd", targets=1, **parameters) as mount, opened(mount.path / "file") as file:

        def write() -> int:
            os.fsync(file)
            os.ftruncate(file, 0)
            os.lseek(file, 0, os.SEEK_SET)
            mount.reset()
            for _ in range(40):
                os.write(file, bytes(100_000))
            return int(mount.statistics()["targets"][0]["queue"])

        assert counted(write, lambda queue: queue == 2) == 2
        os.fsync(file)
        target = mount.statistics()["targets"][0]
        assert target["bytes_written"] == 40 * 100_000
        assert (target["requests"], target["queue"], target["longest_queue"]) == (4, 0, 2)


@pytest.mark.parametrize(("direct", "together"), [("parallel", 1), ("threads", 1), ("serial", 4)])
def test_direct_writes_of_threads(direct: str, together: int) -> None:
    with (
        striped("ssd", latency_ms=100, direct=direct, **INSTANT) as mount,
        preallocated(mount.path / "file", 4 * MIB) as file,
        aligned(MIB) as data,
        ThreadPoolExecutor(4) as threads,
    ):

        def write() -> None:
            for done in [threads.submit(os.pwrite, file, data, i * MIB) for i in range(4)]:
                assert done.result() == MIB

        took_s = quickest(lambda: timed(write), 0.150 if together == 1 else 60)
    assert took_s >= 0.100 * together
    assert together > 1 or took_s <= 0.150


def test_pieces_of_one_asynchronous_write_go_side_by_side_where_they_do() -> None:
    took_s = {}
    for direct in ("parallel", "threads"):
        with (
            striped("ssd", latency_ms=100, direct=direct, **INSTANT) as mount,
            preallocated(mount.path / "file", 4 * MIB) as file,
            aligned(4 * MIB) as data,
        ):
            good_s = 0.15 if direct == "parallel" else 60
            took_s[direct] = quickest(partial(write_at_once, data, file), good_s)
    assert took_s["parallel"] <= 0.15
    assert took_s["threads"] >= 0.4


@pytest.mark.slow
def test_times_follow_from_the_parameters_however_busy_the_machine_is() -> None:
    """Validate the model at a slow clock, on which the machine's own time has little influence."""
    found = list(validate(slow=16))
    assert {one.name: one.error for one in found if one.error > TOLERANCE} == {}


# ---- Several clients -----------------------------------------------------------------------------


@pytest.mark.parametrize("cache", ["through", "client"])
def test_clients_of_one_storage_see_what_the_others_do(cache: str) -> None:
    with striped("ssd", clients=3, cache=cache, **INSTANT) as mount:
        here, there, third = mount.paths
        assert len({path.stat().st_dev for path in mount.paths}) == 3
        (here / "folder").mkdir()
        for turn in range(3):
            text = f"turn {turn}" * 1000 * (turn + 1)
            (here / "folder" / "new").write_text(text)
            assert (there / "folder" / "new").read_text() == text  # the pages stay cached there
            (here / "folder" / "new").rename(here / "folder" / "file")
            for path in (there, third):
                assert not (path / "folder" / "new").exists()
                assert (path / "folder" / "file").read_text() == text
                assert (path / "folder" / "file").stat().st_size == len(text)
        (third / "folder" / "file").write_text("short")
        assert (here / "folder" / "file").read_text() == "short"
        assert (there / "folder" / "file").stat().st_size == 5
        with (third / "folder" / "file").open("r+") as file:
            file.write("SHORT")  # equal size, so only the server knows of the change
        assert (here / "folder" / "file").read_text() == "SHORT"
        (there / "folder" / "file").chmod(0o600)
        assert (third / "folder" / "file").stat().st_mode & 0o777 == 0o600
        assert [path.name for path in (here / "folder").iterdir()] == ["file"]
        (there / "folder" / "file").unlink()
        (third / "folder").rmdir()
        assert not (here / "folder").exists()


def test_a_file_that_another_client_removes_is_there_as_long_as_it_is_open() -> None:
    def used() -> int:
        return sum(target["used_bytes"] for target in mount.statistics()["targets"])

    with striped("ssd", clients=2, **INSTANT) as mount:
        here, there = (path / "file" for path in mount.paths)
        here.write_bytes(b"x" * MIB)
        with here.open("rb", buffering=0) as file:
            there.unlink()
            assert file.read() == b"x" * MIB
            assert used() == MIB
        deadline = time.monotonic() + 10
        while used():  # this client's kernel still knows the file
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_a_client_asks_again_only_for_what_others_have_changed() -> None:
    with striped("ssd", clients=2, **INSTANT) as mount:
        here, there = (path / "file" for path in mount.paths)
        here.write_text("old")
        mount.reset()
        for _ in range(3):
            assert here.stat().st_size == 3
        before = mount.statistics()["metadata"]  # the kernel sends a close at any time
        assert (before["lookup"], before["getattr"]) == (0, 0)
        for _ in range(3):
            assert there.stat().st_size == 3
        there.write_text("longer")
        before = mount.statistics()["metadata"]
        assert (before["lookup"], before["getattr"]) == (1, 0)
        for _ in range(3):
            assert here.stat().st_size == 6
        after = mount.statistics()["metadata"]
        assert (after["lookup"], after["getattr"]) == (1, 1)
        there.rename(there.with_name("other"))
        here.write_text("new")
        assert there.read_text() == "new"
        assert mount.statistics()["metadata"]["lookup"] - after["lookup"] == 4


# ---- Places of data -----------------------------------------------------------------------------


@pytest.mark.parametrize("cache", ["through", "back", "client"])
def test_every_byte_comes_back(cache: str, tmp_path: Path) -> None:
    chance = random.Random(5)
    layout = {"stripe_size": "64Ki", "stripe_count": 3, "cache": cache}
    with (
        striped("ssd", targets=5, bandwidth="8G", seek_ms=0, **layout, **INSTANT) as mount,
        opened(mount.path / "file") as file,
        opened(tmp_path / "same") as same,
        aligned(4 * MIB) as data,
    ):
        for step in range(120):
            at, size = chance.randrange(6 * MIB), chance.choice([1, 5000, 70_000, 2 * MIB])
            if step % 10 == 9:
                for each in (file, same):
                    os.ftruncate(each, at)
            elif step % 10 == 8:
                with opened(mount.path / "file", os.O_RDWR | os.O_DIRECT) as direct:
                    at -= at % 4096
                    assert os.pwrite(direct, data, at) == 4 * MIB
                os.pwrite(same, data, at)
            elif step % 10 == 7:
                for each in (file, same):
                    os.posix_fallocate(each, at, size)
            else:
                for each in (file, same):
                    os.pwrite(each, data[at % MIB : at % MIB + size], at)
        os.fsync(file)
        for folder in (mount.path / "file", tmp_path / "same"):
            with opened(folder, os.O_RDONLY) as each:
                os.posix_fadvise(each, 0, 0, os.POSIX_FADV_DONTNEED)
        assert (mount.path / "file").read_bytes() == (tmp_path / "same").read_bytes()


def test_stripes_lie_on_the_targets_in_turn() -> None:
    with striped("ssd", targets=4, stripe_size="64Ki", stripe_count=3, **INSTANT) as mount:
        with opened(mount.path / "file") as file:
            os.write(file, bytes(7 * 65536 + 100))
            os.fsync(file)
        before = [target["bytes_written"] for target in mount.statistics()["targets"]]
        assert before == [3 * 65536, 2 * 65536 + 100, 2 * 65536, 0]
        # The next file begins on the next target.
        mount.reset()
        (mount.path / "next").write_bytes(bytes(1000))
        after = [target["bytes_written"] for target in mount.statistics()["targets"]]
        assert after == [0, 1000, 0, 0]
        used = [target["used_bytes"] for target in mount.statistics()["targets"]]
        assert used == [3 * 65536, 4 * 65536, 2 * 65536, 0]
        (mount.path / "file").unlink()
        (mount.path / "next").unlink()
        # Contents are removed when the kernel has forgotten the files.
        deadline = time.monotonic() + 10
        while any(target["used_bytes"] for target in mount.statistics()["targets"]):
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_space_is_what_the_targets_have() -> None:
    with striped("ssd", targets=2, capacity="1Gi", used=["0=512Mi"], **INSTANT) as mount:
        before = os.statvfs(mount.path)
        assert before.f_blocks * before.f_frsize == 2 << 30
        assert before.f_bavail * before.f_frsize == (2 << 30) - (512 << 20)
        (mount.path / "file").write_bytes(bytes(MIB))
        after = os.statvfs(mount.path)
        assert (before.f_bavail - after.f_bavail) * after.f_frsize == MIB
        # The numbers are updated from time to time.
        end, wanted = time.monotonic() + 10, [511 << 10, 1 << 20]
        found: list[int] = []
        while found != wanted and time.monotonic() < end:
            time.sleep(0.01)
            shown = sorted(mount.backing.glob("sys/fs/lustre/osc/*-OST*/kbytesavail"))
            found = [int(path.read_text() or 0) for path in shown]
        assert found == wanted


# ---- Counters -----------------------------------------------------------------------------------


def test_metadata_operations_are_counted_to_the_last_one() -> None:
    with striped("ssd", **INSTANT) as mount:
        mount.reset()
        (mount.path / "folder").mkdir()
        with opened(mount.path / "folder" / "a") as file:
            os.fsync(file)
        (mount.path / "folder" / "a").rename(mount.path / "folder" / "b")
        (mount.path / "folder" / "b").unlink()
        counted = mount.statistics()["metadata"]
        kinds = {"lookup": 3, "mkdir": 1, "create": 1, "fsync": 1, "close": 1, "rename": 1}
        kinds["unlink"] = 1
        assert {name: counted[name] for name in kinds} == kinds
        assert counted["total"] == sum(kinds.values())


def test_writes_that_cross_a_stripe_or_begin_in_one_are_counted() -> None:
    def counted() -> tuple[int, int, int]:
        writes = mount.statistics()["writes"]
        return writes["requests"], writes["crossing"], writes["off_stripe"]

    with (
        striped("ssd", stripe_size="256Ki", stripe_count=2, **INSTANT) as mount,
        opened(mount.path / "file") as file,
    ):
        for at in range(4):
            os.pwrite(file, bytes(1 << 18), at << 18)
        assert counted() == (4, 0, 0)
        os.pwrite(file, bytes(4096), 4 << 18)
        os.pwrite(file, bytes(100), (4 << 18) + 4096)
        assert counted() == (6, 0, 0)  # the end of a file may be a partial stripe
        os.pwrite(file, bytes(1 << 18), 5 << 18)
        assert counted() == (7, 0, 1)  # the earlier partial write was not the end
        os.pwrite(file, bytes(1 << 18), 1 << 17)
        assert counted() == (8, 1, 2)


# ---- Faults --------------------------------------------------------------------------------------


def test_faults_of_targets() -> None:
    with striped("ssd", targets=2, **INSTANT) as mount:
        a, b = mount.path / "a", mount.path / "b"
        with opened(a), opened(b):
            mount.order("target 0 full")
            fails(errno.ENOSPC, a.write_bytes, b"x")
            b.write_bytes(b"x")
            assert os.statvfs(mount.path).f_bavail > 0
            mount.order("target 0 well")
            mount.order("target 1 failing")
            a.write_bytes(b"x")
            fails(errno.EIO, b.write_bytes, b"x")
            mount.order("target 1 well")
            mount.order("target 1 slow 10")
            mount.reset()
            b.write_bytes(bytes(MIB))
            busy_s = mount.statistics()["targets"][1]["busy_s"]
            assert busy_s == pytest.approx(10 * (0.00005 + MIB / 250e6), rel=1e-3)
        with pytest.raises(StripefsError, match="Invalid"):
            mount.order("target 2 full")


def test_a_full_target_refuses() -> None:
    with (
        striped("ssd", targets=1, capacity="2Mi", **INSTANT) as mount,
        opened(mount.path / "file") as file,
    ):
        fails(errno.ENOSPC, os.posix_fallocate, file, 0, 3 * MIB)


def test_a_frozen_server_does_not_answer() -> None:
    with striped("ssd", **INSTANT) as mount:
        (mount.path / "file").write_bytes(b"x")
        mount.order("freeze")
        done = threading.Event()

        def write() -> None:
            (mount.path / "file").write_bytes(b"y")
            done.set()

        thread = threading.Thread(target=write)
        thread.start()
        assert not done.wait(0.2)
        mount.order("restore")
        thread.join()
        assert (mount.path / "file").read_bytes() == b"y"


@pytest.mark.parametrize("frozen", [False, True])
def test_it_ends_without_a_trace(frozen: bool) -> None:
    with striped("ssd") as mount:
        if frozen:
            mount.order("freeze")
        path, backing = mount.path, mount.backing
    assert not path.exists()
    assert not backing.exists()
    assert str(path) not in Path("/proc/self/mountinfo").read_text(encoding="utf-8")


def test_it_ends_with_whoever_holds_its_input_and_can_be_unmounted_after_a_crash(
    tmp_path: Path,
) -> None:
    with striped("ssd") as mount:
        mount.kill()
        fails(errno.ENOTCONN, os.stat, mount.path)
    path, backing = tmp_path / "mount", tmp_path / "backing"
    path.mkdir()
    backing.mkdir()
    command: list[str | Path] = [stripefs(), "--backing", backing, path]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdin is not None
            assert process.stdout.readline() == b"mounted\n"
            process.stdin.close()
            assert process.wait(10) == 0
        finally:
            process.kill()
            unmount(path)
    assert not path.is_mount()


# ---- Direct I/O ----------------------------------------------------------------------------------


def test_direct_io_has_rules() -> None:
    with (
        striped("ssd", fallocate="no", **INSTANT) as mount,
        opened(mount.path / "file", os.O_RDWR | os.O_CREAT | os.O_DIRECT) as file,
        aligned(MIB) as data,
    ):
        assert os.pwrite(file, data, 0) == MIB
        fails(errno.EINVAL, os.pwrite, file, bytes(512), 0)
        fails(errno.EINVAL, os.pwrite, file, data, 512)
        assert mount.statistics()["writes"]["misaligned"] == 2
        with opened(mount.path / "other") as other:
            assert os.write(other, b"any") == 3
    with striped("ssd", direct="none", **INSTANT) as mount:
        fails(errno.EINVAL, os.open, mount.path / "file", os.O_WRONLY | os.O_CREAT | os.O_DIRECT)
        (mount.path / "file").touch()
