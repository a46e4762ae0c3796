# SPDX-License-Identifier: Apache-2.0
"""Describe and read a file or directory that is uploaded, and verify it meanwhile."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import stat
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ioshape._core.errors import damaged, failure
from ioshape._core.names import is_unfinished
from ioshape._group import dcp_contents as families
from ioshape._group.checkpoints import Handle, checkpoints
from ioshape._group.kinds import CHECKPOINT
from ioshape._load.contents import BESIDE
from ioshape._load.reader import Reader
from ioshape._remote.listing import LISTING, MARKERS, MOST_NAMES, Kind, check_name
from ioshape._remote.sums import Known, Sums

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ioshape._core.errors import StorageError
    from ioshape._load.reader import Record

# Parity files on a tier, which protect files of other nodes.
_PARITY = re.compile(r"node-\d{5,}\.parity")


class Stopped(Exception):
    """Raised by a read if the upload has failed elsewhere."""


@dataclass(frozen=True)
class SourceFile:
    """A file that is uploaded."""

    path: str
    #: path relative to the directory, with slashes
    name: str
    n_bytes: int
    modified_ns: int
    #: checksum in the manifest; None if it has none
    crc32: int | None = None


@dataclass(frozen=True)
class Source:
    """A checkpoint that is uploaded."""

    path: str
    kind: Kind
    files: tuple[SourceFile, ...]
    directories: tuple[str, ...] = ()

    @property
    def n_bytes(self) -> int:
        """The total size of all files in bytes."""
        return sum(one.n_bytes for one in self.files)


def refused(path: str, why: str, remedy: str, number: int = errno.EINVAL) -> StorageError:
    """Return the exception for a path that cannot be uploaded."""
    sentence = f'cannot upload "{path}": {why}'
    return failure(-number, sentence, path, "upload", remedy=remedy)


def _file(path: str, name: str, crc32: int | None = None) -> SourceFile:
    try:
        status = os.stat(path)  # noqa: PTH116
    except OSError as error:
        why = error.strerror or str(error)
        raise refused(path, why, "", error.errno or errno.EIO) from None
    if not stat.S_ISREG(status.st_mode):
        raise refused(path, "it is neither a file nor a directory", "name one, or remove it")
    _check_name(path, name)
    return SourceFile(path, name, status.st_size, status.st_mtime_ns, crc32)


def _check_name(path: str, name: str) -> None:
    try:
        check_name(name)
    except ValueError as error:
        raise refused(path, str(error), "rename it") from None


def _walk(path: str, sums: dict[str, int]) -> tuple[tuple[SourceFile, ...], tuple[str, ...]]:
    """Return the files and directories below a path, without those that are being written."""

    def stop(error: OSError) -> None:
        raise refused(str(error.filename), error.strerror or "", "", error.errno or errno.EIO)

    files, directories = [], []
    for folder, subfolders, names in os.walk(path, onerror=stop):
        subfolders[:] = sorted(one for one in subfolders if not is_unfinished(one))
        prefix = os.path.relpath(folder, path)
        for name in (*subfolders, *sorted(names)):
            full = os.path.join(folder, name)  # noqa: PTH118
            relative = name if prefix == "." else f"{prefix}/{name}"
            if name in subfolders:
                if os.path.islink(full):  # noqa: PTH114
                    why = "it is a symbolic link to a directory"
                    raise refused(full, why, "copy what it points to, or remove it")
                _check_name(full, relative)
                directories.append(relative)
            elif not is_unfinished(name) and relative != LISTING:
                files.append(_file(full, relative, sums.get(relative)))
        if max(len(files), len(directories)) > MOST_NAMES:
            remedy = "pack them into fewer files"
            raise refused(path, f"it has more than {MOST_NAMES:,} files or directories", remedy)
    return tuple(files), tuple(directories)


def _directory(path: str) -> Source:
    if families.is_checkpoint(path):
        families.look(path)  # raises if a file of the checkpoint is missing
        return Source(path, "dcp", *_walk(path, {}))
    inside = checkpoints(path)
    if inside:
        why = f"it is not a checkpoint, but a directory with {len(inside)} of them"
        raise refused(path, why, "name one of them, or add --newest 1 or --all")
    return Source(path, "directory", *_walk(path, {}))


def _checkpoint(path: str) -> Source:
    with open(os.path.join(path, MARKERS["group"]), "rb") as file:  # noqa: PTH118, PTH123
        manifest = json.loads(file.read())
    sums = {one["name"]: int(one["crc32"], 16) for one in manifest["files"]}
    files, directories = _walk(path, sums)
    missing = sums.keys() - {one.name for one in files}
    if missing:
        why = f'"{min(missing)}" is missing: it was removed, or is on the tier of another node'
        remedy = "drain the tiers of all nodes, and upload the checkpoint from its destination"
        raise refused(path, why, remedy, errno.ENOENT)
    kept = tuple(one for one in files if not _PARITY.fullmatch(one.name))
    return Source(path, "group", kept, directories)


@contextmanager
def look(path: str) -> Iterator[Source]:
    """Yield the description of a checkpoint to upload, which is not removed meanwhile.

    Raises:
        StorageError: The path is not a checkpoint, is incomplete, or cannot be read.
    """
    absolute = os.path.abspath(path)  # noqa: PTH100
    folder, name = os.path.split(absolute)
    step = CHECKPOINT.fullmatch(name)
    with contextlib.ExitStack() as stack:
        if is_unfinished(name):
            remedy = "give the name that it has when it is complete"
            raise refused(path, "it is being written, or is a leftover of a dead process", remedy)
        if not os.path.isdir(absolute):  # noqa: PTH112
            beside = [end for end in BESIDE if os.path.exists(absolute + end)]  # noqa: PTH110
            files = [_file(absolute + end, name + end) for end in (*beside, "")]
            yield Source(absolute, "file", tuple(files))
        elif step and not families.is_checkpoint(absolute):
            stack.enter_context(Handle(folder, int(step[1]), "upload"))  # raises if it is damaged
            yield _checkpoint(absolute)
        else:
            yield _directory(absolute)


def is_whole(path: str) -> bool:
    """Return whether a checkpoint is complete; a tier may have only the files of one node.

    Raises:
        StorageError: The path is not a checkpoint, or cannot be read.
    """
    try:
        with look(path):
            return True
    except FileNotFoundError:
        return False


class Stream:
    """A file that is read once, from beginning to end, and verified meanwhile."""

    def __init__(
        self,
        file: SourceFile,
        stopped: Callable[[], bool],
        tell: Callable[[int], object] | None = None,
    ) -> None:
        """Open a file for reading.

        Args:
            file: The file.
            stopped: Is asked before each read; if it returns True, the read raises Stopped.
            tell: Is called with the number of bytes after each read.
        """
        self.file = file
        self.stopped = stopped
        self._tell = tell
        self._position = 0
        self._reader = Reader(
            file.path, any_format=True, operation="upload", fresh=False, shared=False
        )
        self._sums = Sums(self._known())
        if self._reader.file_bytes != file.n_bytes:
            raise self._changed()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self._reader.close()

    def read(self, n_bytes: int = -1) -> bytes:
        """Return the next bytes; none at the end.

        Raises:
            StorageError: The file is damaged, or a process is writing to it. The last bytes are
                returned only if the whole file is valid.
        """
        if self.stopped():
            raise Stopped
        left = self.file.n_bytes - self._position
        data = bytearray(left if n_bytes < 0 else min(n_bytes, left))
        if data:
            with memoryview(data) as view:
                self._reader.read_file(self._position, view)
            self._sums.add(self._position, data)
            self._position += len(data)
            if self._tell is not None:
                self._tell(len(data))
        if self._position == self.file.n_bytes:
            self._check()
        return bytes(data)

    @property
    def crc32(self) -> int:
        """The checksum of the file. All of it must have been read."""
        return self._sums.whole()

    def _known(self) -> Iterator[Known]:
        """Yield checksums of whole records or of the file, which the library does not compare."""
        reader, file = self._reader, self.file
        for record in reader.records() if reader.is_torch_zip else ():
            crc32 = reader.crc32_of_all(record)
            if crc32 is not None:
                yield Known(record.file_offset, record.n_bytes, crc32, self._damaged(record))
        if file.crc32 is not None:
            yield Known(0, file.n_bytes, file.crc32, self._differs)

    def _damaged(self, record: Record) -> Callable[[], StorageError]:
        return lambda: self._reader.damaged(record)

    def _differs(self) -> StorageError:
        return damaged(self.file.path, "it does not match the manifest", "upload")

    def _changed(self) -> StorageError:
        remedy = "upload it after the writer has ended"
        return refused(self.file.path, "another process is writing to it", remedy, errno.EBUSY)

    def _check(self) -> None:
        """Check that the file is undamaged and has not changed since the upload began."""
        self._sums.check()
        status = os.stat(self.file.path)  # noqa: PTH116
        if (status.st_size, status.st_mtime_ns) != (self.file.n_bytes, self.file.modified_ns):
            raise self._changed()
