# SPDX-License-Identifier: Apache-2.0
"""probe(): describes the filesystem of a path, and how a save would write there."""

from __future__ import annotations

import os
from dataclasses import dataclass

from ioshape._core.context import current, encoded
from ioshape._core.errors import last_failure
from ioshape._core.structs import path_said, shared_fields
from ioshape._native import ffi, lib


@dataclass(frozen=True)
class StorageTarget:
    """A server or disk that files are spread over: a Lustre OST or a BeeGFS target."""

    name: str
    total_bytes: int
    free_bytes: int


@dataclass(frozen=True)
class Storage:
    """The filesystem of a path, and how a save would write there, as ioshape.probe() found it."""

    #: the directory that was examined: the path itself, or its parent
    directory: str
    #: filesystem family: "lustre", "nfs", "ext", ... or "other"
    family: str
    #: filesystem type in the mount table: "lustre", "nfs4", "fuse.juicefs"
    type: str = ""
    #: source in the mount table, such as "server:/export" or "/dev/sda1"
    source: str = ""
    mount_point: str = ""
    #: options of the mount and of its filesystem, separated by commas
    options: str = ""
    #: size of the filesystem; 0 if it does not report one
    total_bytes: int = 0
    #: free space for this user, without regard to quotas
    free_bytes: int = 0
    #: alignment of memory that direct I/O needs, in bytes; 0 if unknown
    memory_alignment: int = 0
    #: alignment of file offsets that direct I/O needs, in bytes; 0 if unknown
    offset_alignment: int = 0
    #: whether direct I/O works; None if unknown
    direct: bool | None = None
    #: whether other hosts may mount the filesystem, too
    remote: bool = False
    #: number of storage targets; 0 if unknown
    target_count: int = 0
    #: the storage targets that are known, 64 at most
    targets: tuple[StorageTarget, ...] = ()
    #: layout of new files, such as "8 x 1M, pool flash"; "" if they are not striped
    stripes: str = ""
    #: stripe size of the component that holds most of a file of for_bytes; 0 if unknown
    stripe_bytes: int = 0
    #: stripes of that component; 0: not striped, or the filesystem decides; -1: all targets
    stripe_count: int = 0
    #: copies of the file's data; 0 if not striped
    mirrors: int = 0
    #: pool of storage targets for new files; "" if none
    target_pool: str = ""
    #: whether the path is an existing file
    is_file: bool = False
    #: layout of that file; "" if it is not striped
    file_stripes: str = ""
    #: size of the file that the following members describe the writing of
    for_bytes: int = 0
    #: the engine that would write it: "uring", "uring-async", "threads", "buffered"
    engine: str = ""
    #: reason for the engine, block_bytes and queue_depth
    choice: str = ""
    #: bytes of a request
    block_bytes: int = 0
    #: number of buffers
    queue_depth: int = 0
    #: errno with which the kernel refuses io_uring; 0 if it works
    uring_errno: int = 0
    #: engines that do not work here, with the reason; "" if all do
    engine_note: str = ""
    #: layout that the save would request; "" if it keeps the directory's own
    stripes_asked: str = ""
    #: reason for that layout
    stripes_why: str = ""
    #: name of the pool of slots
    pool: str = ""
    #: files written at a time, unless an operator has set another capacity
    writers: int = 0
    #: reason for that number
    writers_why: str = ""


def probe(path: str | os.PathLike[str], *, nbytes: int = 0, files: int = 0) -> Storage:
    """Describe the filesystem of a path, and how a save would write there. Write nothing.

    Args:
        path: a folder or a file. Its last component need not exist.
        nbytes: size of the file to be saved; 0 means 4 GiB.
        files: number of files written at the same time; 0 if unknown.

    Returns:
        A Storage.

    Raises:
        StorageError: the folder does not exist or cannot be examined.
    """
    name = os.fspath(path)
    found = ffi.new("struct save_probe *")
    context = current()
    if lib.save_probe_path(context.pointer, encoded(name), nbytes, files, found):
        raise last_failure(name, "probe")
    values = shared_fields(Storage, found, text=path_said)
    values["direct"] = None if found.direct < 0 else bool(found.direct)
    values["targets"] = tuple(
        StorageTarget(**shared_fields(StorageTarget, one, text=path_said))
        for one in found.targets[0 : found.targets_listed]
    )
    return Storage(**values)
