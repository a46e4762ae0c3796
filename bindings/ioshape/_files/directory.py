# SPDX-License-Identifier: Apache-2.0
"""ioshape.directory(): a directory that a framework fills, and that appears complete."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ioshape._core.config import is_durable
from ioshape._core.job import job
from ioshape._core.names import UNDER_WAY
from ioshape._native import lib
from ioshape._save.atomic import Directory, sync

if TYPE_CHECKING:
    from collections.abc import Iterator

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2

_INDEX = ".index.json"
# Matches weights as Hugging Face names them, in one file or in several with an index, and ioshape's
# files of checksums and statistics beside such a file.
_WEIGHTS = re.compile(
    r"(.+?)(?:-\d{5}-of-\d{5})?(\.safetensors|\.bin)(?:\.index\.json)?(?:\.ioshape-(?:sums|stats))?"
)


class NewDirectory(Directory):
    """A directory that is filled, and then replaces the directory at its path.

    Files of the old directory that the new one does not contain are kept. But a set of weights
    replaces the old set completely, whatever its files are called.
    """

    def __init__(
        self, path: str, *, durable: bool, beside: str | None = None, ranks_agree: bool = False
    ) -> None:
        """Create the temporary directory.

        Args:
            path: The final path of the directory.
            durable: Whether commit() syncs directories.
            beside: A path beside which to create the temporary directory. The commit then replaces
                nothing. None: create it beside `path`.
            ranks_agree: Whether no other rank writes to the path meanwhile.
        """
        self._ranks_agree = ranks_agree
        #: the final path with symbolic links resolved, so that a link at the path stays a link
        self.target = os.path.realpath(path)
        self._durable = durable
        self._is_beside = beside is not None
        near = os.path.realpath(beside) if beside else self.target
        super().__init__(os.path.join(os.path.dirname(near), os.path.basename(self.target)))  # noqa: PTH118, PTH119, PTH120

    def commit(self) -> None:
        """Rename the directory into place, or merge it into the directory that is there."""
        if self._is_beside:
            os.makedirs(os.path.dirname(self.target), exist_ok=True)  # noqa: PTH103, PTH120
            os.rename(self.path, self.target)  # noqa: PTH104
            self._sync(os.path.dirname(self.target))  # noqa: PTH120
            return
        try:
            super().commit()
            return
        except FileExistsError:
            if not Path(self.target).is_dir():
                raise
        if self._can_be_exchanged():
            seen = self._keep_others()
            if _exchange(self.path, self.target):
                self._keep_late(seen)
                self._sync(os.path.dirname(self.target))  # noqa: PTH120
                shutil.rmtree(self.path, ignore_errors=True)  # now it is the old directory
                return
        self._move_in(self.path, self.target)

    def _sync(self, folder: str) -> None:
        if self._durable:
            sync(folder)

    def _can_be_exchanged(self) -> bool:
        """Return whether the old directory may be exchanged for the new one in one step.

        It may not if another program may be at work in it. That is assumed if it is or contains the
        current directory, or if other ranks may write to it. It is also assumed if it has other
        subdirectories or unfinished files.
        """
        here = Path.cwd()
        if Path(self.target) in (here, *here.parents) or not (self._ranks_agree or job()[1] == 1):
            return False
        return not any(
            other.entry.is_dir(follow_symlinks=False) or UNDER_WAY in other.entry.name
            for other in _others(self.target, self.path)
        )

    def _keep_others(self) -> set[str]:
        """Link files to keep into the new directory. Return the new paths of all that were seen."""
        others = list(_others(self.target, self.path))
        for other in others:
            if other.stays:
                _link(other.entry.path, other.to)
        shutil.copymode(self.target, self.path)
        for folder in {self.path, *(os.path.dirname(other.to) for other in others)}:  # noqa: PTH120
            self._sync(folder)
        return {other.to for other in others}

    def _keep_late(self, seen: set[str]) -> None:
        """Move files that were created since _keep_others() into the new directory."""
        for other in _others(self.path, self.target):
            if other.entry.path not in seen and UNDER_WAY not in other.entry.name:
                os.rename(other.entry.path, other.to)  # noqa: PTH104
                self._sync(os.path.dirname(other.to))  # noqa: PTH120

    def _move_in(self, new: str, old: str) -> None:
        """Move the files one by one, and an index last.

        Meanwhile a set of shards has no index, so that readers find none instead of a mixture of
        two sets.
        """
        names = set(os.listdir(new))  # noqa: PTH208
        sets = _sets(names)
        for entry in os.scandir(old):
            goes = entry.name not in names or entry.name.endswith(_INDEX)
            if goes and _belongs(entry.name, sets):
                Path(entry.path).unlink()
        for name in sorted(names, key=lambda name: (name.endswith(_INDEX), name)):
            self._move(os.path.join(new, name), os.path.join(old, name))  # noqa: PTH118
        self._sync(old)

    def _move(self, path: str, to: str) -> None:
        if _is_directory(path) and _is_directory(to):
            self._move_in(path, to)
            return
        if _is_directory(path) or _is_directory(to):  # rename() fails unless both are directories
            if _exchange(path, to):
                return
            if _is_directory(to):
                shutil.rmtree(to)
            else:
                Path(to).unlink(missing_ok=True)
        os.replace(path, to)  # noqa: PTH105


@dataclass(frozen=True)
class _Other:
    """An entry of the old directory that the new one does not contain."""

    entry: os.DirEntry[str]
    to: str  # its path in the new directory
    stays: bool  # whether to keep it: it belongs to no set of weights that is replaced


def _others(old: str, new: str) -> Iterator[_Other]:
    names = set(os.listdir(new))  # noqa: PTH208
    sets = _sets(names)
    for entry in os.scandir(old):
        to = os.path.join(new, entry.name)  # noqa: PTH118
        if entry.name not in names:
            yield _Other(entry, to, not _belongs(entry.name, sets))
        elif entry.is_dir(follow_symlinks=False) and _is_directory(to):
            yield from _others(entry.path, to)


def _is_directory(path: str) -> bool:
    return os.path.isdir(path) and not os.path.islink(path)  # noqa: PTH112, PTH114


def sync_tree(path: str) -> None:
    """Bring a directory and its content to stable storage. Return when that is done."""
    for folder, _, names in os.walk(path, topdown=False):
        for name in names:
            file = os.path.join(folder, name)  # noqa: PTH118
            # Another rank may remove its temporary file meanwhile.
            with contextlib.suppress(FileNotFoundError):
                if not os.path.islink(file):  # noqa: PTH114
                    sync(file)
        sync(folder)


def _sets(names: set[str]) -> set[tuple[str, str]]:
    """Return the sets of weights that files of these names belong to, as stem and suffix."""
    found = (_WEIGHTS.fullmatch(name) for name in names)
    return {(match[1], match[2]) for match in found if match}


def _belongs(name: str, sets: set[tuple[str, str]]) -> bool:
    of = _sets({name})
    return bool(of) and of <= sets


def _exchange(one: str, other: str) -> bool:
    """Exchange two paths in one step. Return False, without effect, if that is not supported."""
    paths = (_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other))
    return not lib.renameat2(*paths, _RENAME_EXCHANGE)


def _link(path: str, to: str) -> None:
    try:
        os.link(path, to, follow_symlinks=False)
    except OSError:  # some filesystems have no hard links
        shutil.copy2(path, to, follow_symlinks=False)
        if not os.path.islink(to):  # noqa: PTH114
            sync(to)


@contextlib.contextmanager
def directory(path: str | os.PathLike[str], *, durable: bool | None = None) -> Iterator[str]:
    """Provide a directory for the block to fill, and make it appear complete at the end.

        with ioshape.directory("model") as folder:
            # The block fills the temporary folder.
            model.save_pretrained(folder, max_shard_size="5GB")

    The block gets the path of a hidden directory beside the final one. At its end all files are
    synced, and one rename gives the directory its name. If the block raises, or the process dies,
    the previous state remains.

    If the path is a directory already, the new one replaces it. Files of the old directory that
    were not written again are kept. On ext4, XFS, Btrfs and tmpfs one atomic step replaces the
    directory, unless another program may be at work in it. That is so if it is the current
    directory, if it contains other directories or unfinished saves, or if this job has several
    ranks. Otherwise the files are moved in one by one, and the index of a set of weights comes
    last.

    Any thread may use this. Two processes should not fill the same path at the same time.

    Args:
        path: The path of the directory.
        durable: False does not wait for stable storage. Default: the setting "durable".

    Raises:
        StorageError: The directory could not be created or put in place. It is an OSError with
            errno and path.
    """
    is_synced = is_durable(durable)
    with NewDirectory(os.fspath(path), durable=is_synced) as made:
        yield made.path
        if is_synced:
            sync_tree(made.path)
        made.commit()
