# SPDX-License-Identifier: Apache-2.0
"""Test that stripefs reports layouts as Lustre, BeeGFS and CephFS do, with their quirks."""

import ctypes
import errno
import os
import re
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from striped import INSTANT, opened, striped

pytestmark = pytest.mark.usefixtures("_mounts_of_stripefs")

LOV = "lustre.lov"
V1, V3, COMPOSITE = 0x0BD10BD0, 0x0BD30BD0, 0x0BD60BD0
SETSTRIPE, GETSTRIPE, GETOBDCOUNT = 0x4008669A, 0x4008669B, 0x800866A8
DELAY_CREATE = 0x2100
ANY = 0xFFFF


def fails(code: int, call: Callable[..., object], *arguments: object) -> None:
    with pytest.raises(OSError, match=re.escape(f"[Errno {code}]")):
        call(*arguments)


def ioctl(file: int, command: int, buffer: ctypes.Array[ctypes.c_char]) -> int:
    """Call ioctl, and return a negative errno if it fails.

    fcntl.ioctl() is no alternative, because the kernel is given the address of our buffer.
    """
    library = ctypes.CDLL(None, use_errno=True)
    result: int = library.ioctl(file, ctypes.c_ulong(command), buffer)
    return result if result >= 0 else -ctypes.get_errno()


def wish(count: int, size: int = 0, first: int = ANY, pool: str = "") -> bytes:
    """Return a struct lov_user_md of version 1, or of version 3 with a pool."""
    head = struct.pack("=II16xIHH", V3 if pool else V1, 1, size, count, first)
    return head + struct.pack("=16s", pool.encode()) if pool else head


def composite(*components: tuple[int, int, bytes]) -> bytes:
    """Return a composite layout. Each component has begin, end and a layout request."""
    at = 32 + 48 * len(components)
    entries, blobs = b"", b""
    for begin, end, blob in components:
        place = at + len(blobs)
        entries += struct.pack("=II2Q2I16x", 0, 0, begin, end, place, len(blob))
        blobs += blob
    head = struct.pack("=IIIHHH14x", COMPOSITE, at + len(blobs), 0, 0, len(components), 0)
    return head + entries + blobs


def setstripe(file: int, blob: bytes) -> int:
    return ioctl(file, SETSTRIPE, ctypes.create_string_buffer(blob, len(blob)))


def layout(path: Path) -> tuple[int, int, int, list[int]]:
    """Return magic, stripe size, count and targets of a file, or of a plain component."""
    return parsed(os.getxattr(path, LOV))


def parsed(blob: bytes) -> tuple[int, int, int, list[int]]:
    magic, size, count = struct.unpack_from("=I20xIH", blob)
    objects = blob[48 if magic == V3 else 32 :]
    targets = [struct.unpack_from("=I", objects, at)[0] for at in range(20, len(objects), 24)]
    return magic, size, count, targets


def test_a_layout_is_told_and_set_as_lustre_does() -> None:
    with striped("ssd", stripe_count=2, pool=["flash=4,5"], **INSTANT) as mount:
        plain, chosen, pooled = (mount.path / name for name in ("plain", "chosen", "pooled"))
        plain.touch()
        assert layout(plain) == (V1, 1 << 20, 2, [0, 1])
        assert LOV in os.listxattr(plain)
        with opened(chosen, os.O_RDWR | os.O_CREAT | os.O_EXCL | DELAY_CREATE) as file:
            fails(errno.ENODATA, os.getxattr, chosen, LOV)
            fails(errno.EBADF, os.write, file, b"lies nowhere")
            assert setstripe(file, wish(3, 1 << 17, first=6)) == 0
            assert layout(chosen) == (V1, 1 << 17, 3, [6, 7, 0])
            assert os.write(file, b"lies somewhere") == 14
            assert setstripe(file, wish(1)) == -errno.EEXIST
            room = ctypes.create_string_buffer(struct.pack("=28xH", 3), 32 + 3 * 24)
            assert ioctl(file, GETSTRIPE, room) == 0
            assert parsed(room.raw) == layout(chosen)
        with opened(pooled, os.O_RDWR | os.O_CREAT | DELAY_CREATE) as file:
            assert setstripe(file, wish(ANY, pool="flash")) == 0
            magic, size, count, targets = layout(pooled)
            assert (magic, size, count, sorted(targets)) == (V3, 1 << 20, 2, [4, 5])
        with opened(mount.path / "other", os.O_RDWR | os.O_CREAT | DELAY_CREATE) as file:
            asked = ctypes.create_string_buffer(wish(99), 32)
            assert ioctl(file, SETSTRIPE, asked) == 0
            assert parsed(asked.raw) == (V1, 1 << 20, 8, [])  # the layout that the file got
        with opened(mount.path / "another", os.O_RDWR | os.O_CREAT | DELAY_CREATE) as file:
            os.setxattr(file, LOV, wish(4))
            assert len(layout(mount.path / "another")[3]) == 4
        os.setxattr(pooled, LOV, wish(1))  # EEXIST is ignored
        assert layout(pooled)[2] == 2
        assert plain.stat().st_blksize == 4 << 20


def test_a_directory_has_a_default_or_tells_that_of_the_filesystem() -> None:
    with striped("ssd", targets=4, **INSTANT) as mount:
        folder = mount.path / "folder"
        folder.mkdir()
        assert layout(folder) == (V1, 1 << 20, 1, [])
        with opened(folder, os.O_RDONLY) as file:
            assert setstripe(file, wish(9, 1 << 16)) == 0
            count = ctypes.create_string_buffer(struct.pack("=I", 0) + b"mine")
            assert ioctl(file, GETOBDCOUNT, count) == 0
            assert count.raw[:8] == struct.pack("=I", 4) + b"mine"
        assert layout(folder) == (V1, 1 << 16, 9, [])
        (folder / "deeper").mkdir()
        (folder / "deeper" / "file").touch()
        magic, size, cut, targets = layout(folder / "deeper" / "file")
        assert (magic, size, cut, sorted(targets)) == (V1, 1 << 16, 4, [0, 1, 2, 3])
    with striped("ssd", trap=["no-default"], **INSTANT) as mount:
        fails(errno.ENODATA, os.getxattr, mount.path, LOV)


@pytest.mark.parametrize(
    "bad",
    [
        wish(1, 100_000),
        wish(1, first=99),
        b"\0" * 32,
        composite((0, 1 << 20, wish(1)), (2 << 20, 2**64 - 1, wish(1))),
        composite((0, 100, wish(1))),
    ],
    ids=["size", "target", "magic", "hole", "end"],
)
def test_what_makes_no_sense_is_refused(bad: bytes) -> None:
    with (
        striped("ssd", **INSTANT) as mount,
        opened(mount.path / "file", os.O_RDWR | os.O_CREAT | DELAY_CREATE) as file,
    ):
        assert setstripe(file, bad) == -errno.EINVAL
        fails(errno.EINVAL, os.setxattr, file, LOV, bad)
        fails(errno.ERANGE, os.setxattr, file, LOV, b"short")
        assert setstripe(file, wish(1)) == 0


def test_components_are_made_when_something_is_written_there() -> None:
    end = 2**64 - 1
    blob = composite((0, 1 << 20, wish(1)), (1 << 20, end, wish(3, 1 << 16)))
    with striped("ssd", targets=4, **INSTANT) as mount:
        path = mount.path / "file"
        with opened(path, os.O_RDWR | os.O_CREAT | DELAY_CREATE) as file:
            assert setstripe(file, blob) == 0
            told = os.getxattr(file, LOV)
            assert struct.unpack_from("=II", told) == (COMPOSITE, len(told))
            assert components(told) == [(0x10, 0, 1 << 20, 1, [0]), (0, 1 << 20, end, 3, [])]
            os.write(file, b"x")
            os.fsync(file)
            assert components(os.getxattr(file, LOV))[1][0] == 0
            os.pwrite(file, bytes((1 << 20) + 3 * 65536), 0)
            os.fsync(file)
            assert components(os.getxattr(file, LOV))[1] == (0x10, 1 << 20, end, 3, [1, 2, 3])
        written = [target["bytes_written"] for target in mount.statistics()["targets"]]
        assert written == [(1 << 20) + 1, 65536, 65536, 65536]


def components(blob: bytes) -> list[tuple[int, int, int, int, list[int]]]:
    """Return flags, begin, end, stripe count and targets of each component."""
    result = []
    for i in range(struct.unpack_from("=14xH", blob)[0]):
        flags, begin, end, at, size = struct.unpack_from("=4xI2Q2I", blob, 32 + 48 * i)
        _, _, count, targets = parsed(blob[at : at + size])
        result.append((flags, begin, end, count, targets))
    return result


def test_a_progressive_default() -> None:
    text = "64Ki:mdt:64Ki,100Mi:1,eof:-1:4Mi"
    with striped("ssd", progressive=text, **INSTANT) as mount:
        path = mount.path / "file"
        path.write_bytes(bytes(3 << 16))
        blob = os.getxattr(path, LOV)
        assert struct.unpack_from("=I10xH", blob) == (COMPOSITE, 3)
        at, size = struct.unpack_from("=24xII", blob, 32 + 48)
        assert parsed(blob[at : at + size]) == (V1, 1 << 20, 1, [0])
        # The first component is on the metadata server.
        assert mount.statistics()["targets"][0]["bytes_written"] == 2 << 16


@pytest.mark.parametrize("trap", ["setstripe-ignored", "setxattr-ignored", "no-layout"])
def test_traps(trap: str) -> None:
    with (
        striped("ssd", trap=[trap], **INSTANT) as mount,
        opened(mount.path / "file", os.O_RDWR | os.O_CREAT | DELAY_CREATE) as file,
    ):
        if trap == "setstripe-ignored":
            assert setstripe(file, wish(2)) == 0
            fails(errno.EBADF, os.write, file, b"x")
            # A plain open gives the file the default layout.
            with opened(mount.path / "file", os.O_WRONLY) as again:
                os.write(again, b"x")
            assert layout(mount.path / "file")[2] == 1
        elif trap == "setxattr-ignored":
            os.setxattr(file, LOV, wish(2))
            fails(errno.ENODATA, os.getxattr, file, LOV)
        else:
            assert setstripe(file, wish(2)) == -errno.ENOTTY
            assert LOV not in os.listxattr(file)
            fails(errno.EOPNOTSUPP, os.getxattr, file, LOV)


@pytest.mark.parametrize("refused", [False, True])
def test_an_unknown_pool_is_ignored_or_refused(refused: bool) -> None:
    traps = {"trap": ["pool-refused"]} if refused else {}
    with (
        striped("ssd", **traps, **INSTANT) as mount,
        opened(mount.path / "file", os.O_RDWR | os.O_CREAT | DELAY_CREATE) as file,
    ):
        result = setstripe(file, wish(2, pool="nowhere"))
        assert result == (-errno.EINVAL if refused else 0)
        if not refused:
            assert layout(mount.path / "file")[:3] == (V3, 1 << 20, 2)


def test_beegfs() -> None:
    with (
        striped("ssd", play="beegfs", targets=4, **INSTANT) as mount,
        opened(mount.path, os.O_RDONLY) as folder,
    ):
        said = ctypes.create_string_buffer(8)
        assert ioctl(folder, 0x80066616, said) == 0
        assert said.raw == b"_FhGFS_\0"
        name = ctypes.create_string_buffer(b"file")
        asked = [(2, 100_000, -errno.EINVAL), (99, 1 << 17, 0), (2, 1 << 17, -errno.EEXIST)]
        for targets, chunk, result in asked:
            hints = struct.pack("=QIII", ctypes.addressof(name), 0o640, targets, chunk)
            assert ioctl(folder, 0x4018661B, ctypes.create_string_buffer(hints, 24)) == result
        path = mount.path / "file"
        assert path.stat().st_mode & 0o777 == 0o640
        assert path.stat().st_blksize == 512 << 10
        with opened(path) as file:
            info = ctypes.create_string_buffer(12)
            assert ioctl(file, 0x800C6619, info) == 0
            assert struct.unpack("=IIH", info.raw[:10]) == (1, 1 << 17, 4)
        fails(errno.EOPNOTSUPP, os.getxattr, path, LOV)


def test_cephfs() -> None:
    name = "ceph.file.layout"
    text = b"stripe_unit=65536 stripe_count=2 object_size=131072 pool=cephfs_data"
    with striped("ssd", play="ceph", targets=4, stripe_size="4Mi", **INSTANT) as mount:
        path = mount.path / "file"
        with opened(path) as file:
            assert b"stripe_unit=4194304 stripe_count=1 " in os.getxattr(path, name)
            fails(errno.EINVAL, os.setxattr, path, name + ".object_size", b"65536")
            fails(errno.EINVAL, os.setxattr, path, name + ".no_field", b"65536")
            os.setxattr(path, name + ".stripe_unit", b"65536")
            os.setxattr(path, name, b"stripe_count=2 object_size=131072")
            assert os.getxattr(path, name) == text
            assert os.getxattr(path, name + ".stripe_count") == b"2"
            data = os.urandom(8 * 65536)
            os.write(file, data)
            fails(errno.ENOTEMPTY, os.setxattr, path, name + ".stripe_count", b"1")
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            assert os.pread(file, len(data), 0) == data
        # There are two objects of two units each, then the next two.
        written = [target["bytes_written"] for target in mount.statistics()["targets"]]
        assert written == [2 * 65536] * 4
        fails(errno.ENODATA, os.getxattr, mount.path, "ceph.dir.layout")
