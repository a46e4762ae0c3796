# SPDX-License-Identifier: Apache-2.0
"""What a path sits on, and what a save would do there."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from typing import Any

from ioshape._core.context import current, encoded
from ioshape._core.errors import last_failure
from ioshape._native import ffi, lib


@dataclass(frozen=True)
class StorageTarget:
    """One of the servers or disks that files are spread over: an OST, a BeeGFS target."""

    name: str
    total_bytes: int
    free_bytes: int


@dataclass(frozen=True)
class Storage:
    """What a path sits on, and what a save would do there, as ioshape.probe() found it."""

    #: that was looked at: the path, or the one that it is in
    directory: str
    #: "lustre", "nfs", "ext", ... or "other"
    family: str
    #: as the mount table has it: "lustre", "nfs4", "fuse.juicefs"
    type: str = ""
    #: such as "server:/export" or "/dev/sda1"
    source: str = ""
    mount_point: str = ""
    #: of the mount and of its filesystem, with commas
    options: str = ""
    #: 0: it does not tell
    total_bytes: int = 0
    #: for this user, quotas apart
    free_bytes: int = 0
    #: that direct I/O asks for; 0 if unknown
    memory_alignment: int = 0
    offset_alignment: int = 0
    #: whether direct I/O works; None if unknown
    direct: bool | None = None
    #: whether the local disk spins; None if unknown
    rotational: bool | None = None
    #: whether other hosts may share it
    remote: bool = False
    #: storage targets; 0 if unknown
    target_count: int = 0
    #: those that are known, 64 at most
    targets: tuple[StorageTarget, ...] = ()
    #: the layout of new files, such as "8 x 1M, pool flash"; "" if they are not striped
    stripes: str = ""
    #: where most of a file of for_bytes lies; 0 if unknown
    stripe_bytes: int = 0
    #: 0: not striped, or as the filesystem likes; -1: all targets
    stripe_count: int = 0
    #: copies; 0 if not striped
    mirrors: int = 0
    #: of storage targets; "" if none
    target_pool: str = ""
    #: whether the path is a file that exists
    is_file: bool = False
    #: the layout of that file; ""  if it is not striped
    file_stripes: str = ""
    file_stripe_count: int = 0
    #: the size of the file that the rest is about
    for_bytes: int = 0
    #: what would write it: "uring", "uring-async", "threads", "buffered"
    engine: str = ""
    #: why it is that one, and the next three
    choice: str = ""
    block_bytes: int = 0
    queue_depth: int = 0
    #: 0, or the errno that io_uring is refused with
    uring_errno: int = 0
    #: what of the engines does not work here, and why; or ""
    engine_note: str = ""
    #: io_uring would not register a save's buffers, mostly for want of memory that may be locked
    buffers_refused: bool = False
    #: the layout that would be asked for; "" if the directory's own is taken
    stripes_asked: str = ""
    asked_stripe_count: int = 0
    #: and why
    stripes_why: str = ""
    #: of slots
    pool: str = ""
    #: files written at a time, unless an operator has set that
    writers: int = 0
    #: and why
    writers_why: str = ""


def probe(path: str | os.PathLike[str], *, nbytes: int = 0, files: int = 0) -> Storage:
    """Describe the filesystem of a path, and what a save there would do. Write nothing.

    Args:
        path: a folder, or a file; the last part of it need not exist.
        nbytes: the size of a file that is to be saved; 0 is 4 GiB.
        files: how many are written at the same time; 0 is not known.

    Returns:
        A Storage.

    Raises:
        StorageError: there is no such folder, or it cannot be looked at.
    """
    name = os.fspath(path)
    found = ffi.new("struct save_probe *")
    context = current()
    if lib.save_probe_path(context.pointer, encoded(name), nbytes, files, found):
        raise last_failure(name, "probe")
    values: dict[str, Any] = {}
    for name in (one.name for one in fields(Storage)):
        if name != "targets":
            member = getattr(found, name)
            values[name] = _known(member) if name in _UNSURE else _value(member)
    targets = found.targets[0 : found.targets_listed]
    values["targets"] = tuple(
        StorageTarget(_value(one.name), one.total_bytes, one.free_bytes) for one in targets
    )
    return Storage(**values)


_UNSURE = ("direct", "rotational")


def _known(number: int) -> bool | None:
    return None if number < 0 else bool(number)


def _value(member: Any) -> Any:
    """Return a member of a struct. Names of files and mounts need not be valid in any encoding."""
    return os.fsdecode(ffi.string(member)) if isinstance(member, ffi.CData) else member
