# SPDX-License-Identifier: Apache-2.0
"""directory(): what a framework writes into a directory appears whole."""

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
from ioshape._save.directory import Directory, sync

if TYPE_CHECKING:
    from collections.abc import Iterator

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2

_INDEX = ".index.json"
# Weights, in one file or in several with an index, as Hugging Face names them; and what we keep
# beside a file.
_WEIGHTS = re.compile(
    r"(.+?)(?:-\d{5}-of-\d{5})?(\.safetensors|\.bin)(?:\.index\.json)?(?:\.ioshape-sums)?"
)


class NewDirectory(Directory):
    """A directory that is filled, and then takes the place of what is there.

    What was there and is not written again stays. But a set of weights is replaced by the new set,
    whatever its files are called.
    """

    def __init__(
        self, path: str, *, durable: bool, beside: str | None = None, ranks_agree: bool = False
    ) -> None:
        """With `beside` the temporary directory is beside that one, and nothing is replaced.

        With `ranks_agree` no other rank writes to the path meanwhile.
        """
        self._ranks_agree = ranks_agree
        #: without symbolic links: those stay
        self.place = os.path.realpath(path)
        self._durable = durable
        self._is_beside = beside is not None
        near = os.path.realpath(beside) if beside else self.place
        super().__init__(os.path.join(os.path.dirname(near), os.path.basename(self.place)))  # noqa: PTH118, PTH119, PTH120

    def commit(self) -> None:
        """Puts it in place."""
        if self._is_beside:
            os.makedirs(os.path.dirname(self.place), exist_ok=True)  # noqa: PTH103, PTH120
            os.rename(self.path, self.place)  # noqa: PTH104
            self._sync(os.path.dirname(self.place))  # noqa: PTH120
            return
        try:
            super().commit()
            return
        except FileExistsError:
            if not Path(self.place).is_dir():
                raise
        if self._can_be_exchanged():
            seen = self._keep_others()
            if _exchange(self.path, self.place):
                self._keep_late(seen)
                self._sync(os.path.dirname(self.place))  # noqa: PTH120
                shutil.rmtree(self.path, ignore_errors=True)  # what was there
                return
        self._move_in(self.path, self.place)

    def _sync(self, folder: str) -> None:
        if self._durable:
            sync(folder)

    def _can_be_exchanged(self) -> bool:
        """Not where somebody works: in the current one, in further directories, other ranks, or
        those whose saves are under way."""
        here = Path.cwd()
        if Path(self.place) in (here, *here.parents) or not (self._ranks_agree or job()[1] == 1):
            return False
        return not any(
            other.entry.is_dir(follow_symlinks=False) or UNDER_WAY in other.entry.name
            for other in _others(self.place, self.path)
        )

    def _keep_others(self) -> set[str]:
        """Where all would be that was looked at."""
        others = list(_others(self.place, self.path))
        for other in others:
            if other.stays:
                _link(other.entry.path, other.to)
        shutil.copymode(self.place, self.path)
        for folder in {self.path, *(os.path.dirname(other.to) for other in others)}:  # noqa: PTH120
            self._sync(folder)
        return {other.to for other in others}

    def _keep_late(self, seen: set[str]) -> None:
        """What others have put in place since the look, and is now in the directory that goes."""
        for other in _others(self.path, self.place):
            if other.entry.path not in seen and UNDER_WAY not in other.entry.name:
                os.rename(other.entry.path, other.to)  # noqa: PTH104
                self._sync(os.path.dirname(other.to))  # noqa: PTH120

    def _move_in(self, new: str, old: str) -> None:
        """One after the other. Meanwhile a set of shards has no index: rather none than mixed."""
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
        if _is_directory(path) or _is_directory(to):  # one of them: rename() refuses that
            if _exchange(path, to):
                return
            if _is_directory(to):
                shutil.rmtree(to)
            else:
                Path(to).unlink(missing_ok=True)
        os.replace(path, to)  # noqa: PTH105


@dataclass(frozen=True)
class _Other:
    """What is there, and is not written again."""

    entry: os.DirEntry[str]
    to: str  # where it would be in the new directory
    stays: bool  # it is of no set of weights that is replaced


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
    """A directory and what is in it is on stable storage when this returns."""
    for folder, _, names in os.walk(path, topdown=False):
        for name in names:
            file = os.path.join(folder, name)  # noqa: PTH118
            # Another rank's temporary file may go meanwhile.
            with contextlib.suppress(FileNotFoundError):
                if not os.path.islink(file):  # noqa: PTH114
                    sync(file)
        sync(folder)


def _sets(names: set[str]) -> set[tuple[str, str]]:
    """The sets of weights that files of these names belong to."""
    found = (_WEIGHTS.fullmatch(name) for name in names)
    return {(match[1], match[2]) for match in found if match}


def _belongs(name: str, sets: set[tuple[str, str]]) -> bool:
    of = _sets({name})
    return bool(of) and of <= sets


def _exchange(one: str, other: str) -> bool:
    """In one step. False, and nothing is done, where the filesystem cannot."""
    paths = (_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other))
    return not lib.renameat2(*paths, _RENAME_EXCHANGE)


def _link(path: str, to: str) -> None:
    try:
        os.link(path, to, follow_symlinks=False)
    except OSError:  # there are filesystems without
        shutil.copy2(path, to, follow_symlinks=False)
        if not os.path.islink(to):  # noqa: PTH114
            sync(to)


@contextlib.contextmanager
def directory(path: str | os.PathLike[str], *, durable: bool | None = None) -> Iterator[str]:
    """A directory that is filled by whatever is called in the block, and then appears whole.

        with ioshape.directory("model") as folder:
            model.save_pretrained(folder, max_shard_size="5GB")

    The block gets the path of a hidden directory beside it. When the block ends, all files in it
    are synced, and the directory gets its name in one rename. If the block raises, or the process
    dies, nothing is there but what was there before.

    If a directory is there already, the new one takes its place, with those of its files that are
    not written again; in one step where the filesystem has one for that (ext4, XFS, Btrfs, tmpfs),
    and unless others may be at work in it: it is the current one, has further directories or a save
    under way in it, or this is one of several ranks. Else the files are moved in one after the
    other, the index of a set of weights last.

    Args:
        path: of the directory.
        durable: as in save().

    Raises:
        StorageError: it could not be made or put in place. It is an OSError with errno and path.
    """
    is_synced = is_durable(durable)
    with NewDirectory(os.fspath(path), durable=is_synced) as made:
        yield made.path
        if is_synced:
            sync_tree(made.path)
        made.commit()
