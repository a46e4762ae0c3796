# SPDX-License-Identifier: Apache-2.0
"""Write a checkpoint to a hidden directory, and put it in place by one rename.

If the path does not exist, the hidden directory is beside it, and is renamed to the path. If the
path is a directory, the hidden one is inside it. Then the data files get unused names, and the new
.metadata file replaces the old one. Both ways need one decisive rename, on every filesystem. A
process that reads the old checkpoint meanwhile never gets bytes of the new one.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import pickle
import time
from pathlib import Path
from typing import TYPE_CHECKING

from ioshape._core.descriptors import open_file
from ioshape._core.errors import StorageError, failure
from ioshape._core.log import logger
from ioshape._group.dcp_contents import DATA, DESCRIPTION, OF_A_RANK
from ioshape._integrations.dcp import metadata as description
from ioshape._save.atomic import AtomicFile, Directory, sync
from ioshape._save.request import SaveRequest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.distributed.checkpoint.metadata import Metadata

# Seconds to wait for another process that puts a checkpoint in place at this path: a few renames.
_MOST_WAIT_S = 120.0

_log = logger()


class Attempt:
    """A checkpoint that is being saved, in the process that will put it in place.

    That is rank 0, or each rank if every rank has a checkpoint of its own.
    """

    def __init__(self, path: str, *, durable: bool, rank: int | None) -> None:
        #: path of the checkpoint, with symbolic links resolved
        self.path = os.path.realpath(path)
        #: the rank, if each rank has a checkpoint of its own; else None
        self.rank = rank
        self._durable = durable
        self._inside = rank is not None or os.path.lexists(self.path)
        if self._inside:
            os.makedirs(self.path, exist_ok=True)  # noqa: PTH103
            self._directory = Directory(os.path.join(self.path, "checkpoint"))  # noqa: PTH118
        else:
            self._directory = Directory(self.path)

    @property
    def folder(self) -> str:
        """The hidden directory to which the files are written."""
        return self._directory.path

    @property
    def relative_folder(self) -> str:
        """The hidden directory relative to the checkpoint, as Assignment has it."""
        return os.path.relpath(self.folder, self.path)

    @property
    def _name(self) -> str:
        return DESCRIPTION if self.rank is None else f"__{self.rank}{DESCRIPTION}"

    def close(self) -> None:
        """Remove what is not in place yet."""
        self._directory.close()

    def commit(self, metadata: Metadata) -> None:
        """Put the checkpoint in place."""
        with contextlib.closing(self):
            self._check_files(metadata)
            if not self._inside:
                self._write(self.folder, metadata)
                try:
                    self._directory.commit()
                    return
                except FileExistsError:  # another process has created the path meanwhile
                    Path(self.folder, self._name).unlink()
            with _locked(self.path):
                self._commit_inside(metadata)

    def _write(self, folder: str, metadata: Metadata) -> None:
        path = os.path.join(folder, self._name)  # noqa: PTH118
        known_as = os.path.join(self.path, self._name)  # noqa: PTH118
        with AtomicFile(SaveRequest.of(path, self._durable), known_as=known_as) as file:
            file.write(pickle.dumps(metadata))

    def _check_files(self, metadata: Metadata) -> None:
        """Check that all data files are visible here, before they replace the old checkpoint.

        Other ranks have written them, perhaps to another filesystem.
        """
        for name in description.files_of(metadata):
            if not Path(self.folder, name).is_file():
                raise failure(
                    -errno.ENOENT,
                    f'cannot commit "{self.path}": rank 0 does not see "{name}", which another '
                    "rank has written",
                    self.path,
                    "save",
                    remedy="all nodes must share the directory",
                )

    def _commit_inside(self, metadata: Metadata) -> None:
        there = set(os.listdir(self.path))  # noqa: PTH208
        names = _free_names(description.files_of(metadata), there)
        try:
            for old, new in names.items():
                os.rename(Path(self.folder, old), Path(self.path, new))  # noqa: PTH104
            for info in metadata.storage_data.values():
                info.relative_path = names[info.relative_path]
            if self._durable:
                sync(self.path)
            self._write(self.path, metadata)
        except BaseException:
            for new in names.values():
                Path(self.path, new).unlink(missing_ok=True)
            raise
        self._remove_others(there, set(names.values()))

    def _remove_others(self, there: set[str], ours: set[str]) -> None:
        """Remove data files that no .metadata refers to any more.

        They belong to the replaced checkpoint, or to attempts that were killed during their last
        steps.
        """
        mine = f"__{self.rank}_" if self.rank is not None else "__"
        unused = {name for name in there - ours if _is_data(name) and name.startswith(mine)}
        try:
            for name in there if unused else ():
                if name != self._name and _describes(name):
                    unused -= description.files_of(description.load(Path(self.path, name)))
        except StorageError as error:
            _log.warning("replaced files in %s were not removed: %s", self.path, error)
            return
        for name in unused:
            with contextlib.suppress(OSError):
                Path(self.path, name).unlink()


def _is_data(name: str) -> bool:
    return DATA.fullmatch(name) is not None


def _describes(name: str) -> bool:
    return name == DESCRIPTION or OF_A_RANK.fullmatch(name) is not None


def _free_names(names: set[str], there: set[str]) -> dict[str, str]:
    """Return an unused name for each name: that of its rank, with the next free number."""
    taken: dict[str, int] = {}
    for name in there:
        if match := DATA.fullmatch(name):
            taken[match[1]] = max(taken.get(match[1], -1), int(match[2]))
    free = {}
    for name in names:
        match = DATA.fullmatch(name)
        if match is None:
            raise ValueError(f"{name!r} is not a file name of DCP")
        free[name] = f"__{match[1]}_{taken.get(match[1], -1) + 1 + int(match[2])}.distcp"
    return free


@contextlib.contextmanager
def _locked(folder: str) -> Iterator[None]:
    """Let one process at a time put a checkpoint in place in a folder."""
    fd = open_file(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _lock(fd, folder)
        yield
    finally:
        os.close(fd)


def _lock(fd: int, folder: str) -> None:
    end = time.monotonic() + _MOST_WAIT_S
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > end:
                raise failure(
                    -errno.ETIMEDOUT,
                    f'cannot commit "{folder}": another process has been committing it for more '
                    f"than {_MOST_WAIT_S:.0f} s",
                    folder,
                    "save",
                    remedy="let only one job at a time save to a path",
                ) from None
            time.sleep(0.01)
        except OSError:
            return  # the filesystem cannot lock directories
