# SPDX-License-Identifier: Apache-2.0
"""What a path sits on, and what a save would do there."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from ioshape._errors import last_failure
from ioshape._native import ffi, lib
from ioshape._settings.context import current, encoded


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
    #: such as "FSx for Lustre" or "NFSv4.2 over RDMA"; or ""
    variant: str = ""
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
    #: a request should be a multiple of it; 0 if unknown
    write_unit: int = 0
    #: in flight for one file or target, as the client can; 0 if unknown
    flight_bytes: int = 0
    #: that direct I/O asks for; 0 if unknown
    memory_alignment: int = 0
    offset_alignment: int = 0
    #: whether direct I/O works; None if unknown
    direct: bool | None = None
    #: whether the local disk spins; None if unknown
    rotational: bool | None = None
    #: whether other hosts may share it
    remote: bool = False
    #: whether direct writes to one file are known to be served one after the other
    serial_direct: bool = False
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
    #: in flight for one storage target, per file; 0: no limit
    target_bytes: int = 0
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
    #: whether engine, block and depth were found by a trial
    calibrated: bool = False
    #: the first save of that size will calibrate
    trial_to_come: bool = False
    #: when, in seconds since 1970
    calibrated_s: float = 0.0
    #: bytes per second that the trial wrote; 0 if unknown
    calibrated_rate: float = 0.0


_ANSWERS = {lib.IOSHAPE_UNKNOWN: None, lib.IOSHAPE_NO: False, lib.IOSHAPE_YES: True}


def _said(text: Any) -> str:
    """Names of files and mounts need not be valid in any encoding."""
    return os.fsdecode(ffi.string(text))


def _count(stripes: int) -> int:
    return -1 if stripes == lib.IOSHAPE_ALL_TARGETS else stripes


def _from_struct(struct: Any) -> Storage:
    return Storage(
        directory=_said(struct.directory),
        family=_said(struct.family),
        variant=_said(struct.variant),
        type=_said(struct.type),
        source=_said(struct.source),
        mount_point=_said(struct.mount_point),
        options=_said(struct.options),
        total_bytes=struct.total_bytes,
        free_bytes=struct.free_bytes,
        write_unit=struct.write_unit,
        flight_bytes=struct.flight_bytes,
        memory_alignment=struct.memory_alignment,
        offset_alignment=struct.offset_alignment,
        direct=_ANSWERS[struct.direct],
        rotational=_ANSWERS[struct.rotational],
        remote=bool(struct.remote),
        serial_direct=bool(struct.serial_direct),
        target_count=struct.targets,
        targets=tuple(
            StorageTarget(_said(one.name), one.total_bytes, one.free_bytes)
            for one in (struct.target[i] for i in range(struct.target_listed))
        ),
        stripes=_said(struct.stripes),
        stripe_bytes=struct.stripe_bytes,
        stripe_count=_count(struct.stripe_count),
        mirrors=struct.mirrors,
        target_pool=_said(struct.target_pool),
        is_file=bool(struct.is_file),
        file_stripes=_said(struct.file_stripes),
        file_stripe_count=_count(struct.file_stripe_count),
        for_bytes=struct.for_bytes,
        engine=_said(struct.engine),
        choice=_said(struct.choice),
        block_bytes=struct.block_bytes,
        queue_depth=struct.queue_depth,
        target_bytes=struct.target_bytes,
        uring_errno=-struct.uring_code,
        engine_note=_said(struct.engine_note),
        buffers_refused=bool(struct.buffers_refused),
        stripes_asked=_said(struct.stripes_asked),
        asked_stripe_count=_count(struct.asked_stripe_count),
        stripes_why=_said(struct.stripes_why),
        pool=_said(struct.pool),
        writers=struct.writers,
        writers_why=_said(struct.writers_why),
        calibrated=bool(struct.calibrated),
        trial_to_come=bool(struct.trial_to_come),
        calibrated_s=struct.calibrated_s,
        calibrated_rate=struct.calibrated_rate,
    )


def probe(
    path: str | os.PathLike[str], *, nbytes: int = 0, files: int = 0, calibrate: bool = False
) -> Storage:
    """What a path sits on, and what a save there would do.

    Args:
        path: a folder, or a file; the last part of it need not exist.
        nbytes: the size of a file that is to be saved; 0 is 4 GiB.
        files: how many are written at the same time; 0 is not known.
        calibrate: find out by a short trial how the filesystem is best written to, which writes a
            file there and removes it again. Otherwise nothing is written.

    Returns:
        A Storage.

    Raises:
        StorageError: there is no such folder, or it cannot be looked at.
    """
    name = os.fspath(path)
    options = ffi.new("struct ioshape_probe_options *")
    options.size = ffi.sizeof("struct ioshape_probe_options")
    options.bytes = nbytes
    options.files = files
    options.calibrate = calibrate
    context = current()
    out = ffi.new("struct ioshape_storage **")
    code = lib.ioshape_probe(context.pointer, encoded(name), options, out)
    if code:
        raise last_failure(name, "probe")
    return _from_struct(ffi.gc(out[0], lib.ioshape_free))
