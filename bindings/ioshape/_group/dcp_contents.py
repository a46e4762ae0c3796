# SPDX-License-Identifier: Apache-2.0
"""Read, verify, list and remove checkpoints of torch.distributed.checkpoint (DCP).

Nothing in the checkpoint is run or imported, and torch is not imported either.
"""

from __future__ import annotations

import errno
import itertools
import os
import re
import shutil
import stat
from dataclasses import dataclass
from datetime import datetime, timezone
from pickle import UnpicklingError
from typing import IO, TYPE_CHECKING, Any, NamedTuple

from ioshape._core.descriptors import open_file
from ioshape._core.errors import (
    DamagedError,
    FormatError,
    PassedOver,
    StorageError,
    damaged,
    failure,
    holding,
    is_our_fault,
)
from ioshape._core.names import numbered
from ioshape._core.report import ALARMS as RULES
from ioshape._core.report import Progress
from ioshape._formats.pickle_machine import Global, Inert, Machine, is_count, lengths_of
from ioshape._load.collector import collector_rests
from ioshape._load.reader import Reader, unhealthy
from ioshape._native import lib
from ioshape._save.atomic import Directory, sync

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


# A description of a million tensors takes a quarter of this.
_MOST_BYTES = 1 << 30
# The commands print a file name again for each shard.
_LONGEST_FILE_NAME = 1024
_LONGEST_DTYPE = 64


def read_description(
    path: str, operation: str, take: Callable[[IO[bytes]], Any], remedy: str = ""
) -> Any:
    """Return what `take` makes of a description file; `take` may raise anything for a bad one.

    Raises:
        FormatError: The file is not a description.
        StorageError: The file could not be read.
    """
    try:
        # O_NONBLOCK: a named pipe with this name must not block the program.
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
        with os.fdopen(open_file(path, flags), "rb") as file, collector_rests():
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise UnpicklingError("it is not a regular file")
            if status.st_size > _MOST_BYTES:
                raise UnpicklingError("it is too large")
            return take(file)
    except OSError as error:
        code = -(error.errno or errno.EIO)
        sentence = f'cannot read "{path}": {error.strerror}'
        raise failure(code, sentence, path, operation) from None
    except MemoryError:
        raise
    except Exception as error:
        sentence = f'"{path}" is not the metadata of a checkpoint: {str(error)[:300]}'
        raise failure(lib.IOSHAPE_E_FORMAT, sentence, path, operation, remedy=remedy) from None


def check_file_name(name: object) -> None:
    """Refuse the name of a data file that is not below the checkpoint's directory."""
    if type(name) is not str:
        raise UnpicklingError("it has a file name that is not text")
    is_inside = not name.startswith("/") and ".." not in name.split("/")
    if not is_inside or "\0" in name or not 0 < len(os.fsencode(name)) <= _LONGEST_FILE_NAME:
        raise UnpicklingError(f"it has the file name {name[:100]!r}, which is not valid")


# ---- Stand-ins for pickled objects --------------------------------------------------------------


class _StandIn(Inert):
    """A stand-in for an object of the pickle. The fields are the state of the object."""

    __slots__ = ("fields",)

    def __init__(self, *_: Any, **__: Any) -> None:
        self.fields: dict[str, Any] = {}


class _Machine(Machine):
    plain_keys = Machine.plain_keys | {_StandIn}

    def find(self, module: str, name: str) -> Any:
        """Return the name of a dtype, and a maker of stand-ins for everything else."""
        if (module, name) == ("torch", "Size"):
            return Global(module, name, lengths_of)
        if module == "torch":
            return name
        if (module, name) == ("collections", "OrderedDict"):
            return Global(module, name, lambda *_: {})
        return Global(module, name, _StandIn)

    def build(self, to: Any, state: Any) -> None:
        """Give a stand-in its fields; the state of other objects does not matter."""
        if type(to) is _StandIn:
            to.fields = state if type(state) is dict else {"state": state}


def _fields(value: Any) -> dict[str, Any]:
    return value.fields if type(value) is _StandIn else {}


# ---- Items of a checkpoint ----------------------------------------------------------------------


@dataclass(frozen=True)
class Chunk:
    """A shard of an item of the state dict, as one rank saved it."""

    #: name of the item: "model.layer.weight"
    name: str
    #: path of the data file, relative to the checkpoint
    file: str
    offset: int
    n_bytes: int
    #: whether an extension of DCP has transformed the bytes; only that can read them
    is_transformed: bool

    def open(self, checkpoint: str, operation: str) -> Reader:
        """Open the shard, which is an archive in the file, of the checkpoint in this directory."""
        path = os.path.join(checkpoint, self.file)  # noqa: PTH118
        return Reader(path, part=(self.offset, self.n_bytes), operation=operation, fresh=False)


#: Attribute of the Metadata in .metadata: names of the items that raised an alarm, by rule.
ALARMS = "ioshape_alarms"


def check_alarms(alarms: Any) -> dict[str, frozenset[str]]:
    """Refuse alarms that are not lists of names by rules."""
    lists = [alarms.get(rule, []) for rule in RULES.values()] if type(alarms) is dict else [None]
    if not all(type(one) is list and {str} >= set(map(type, one)) for one in lists):
        raise UnpicklingError("it has alarms that are not valid")
    return {rule: frozenset(alarms[rule]) for rule in RULES.values() if rule in alarms}


@dataclass(frozen=True)
class Item:
    """An item of the state dict, and its shards."""

    name: str
    #: "" if the item is not a tensor
    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


def is_checkpoint(path: str | os.PathLike[str]) -> bool:
    """Return whether a directory is a checkpoint of DCP."""
    return os.path.isfile(os.path.join(path, DESCRIPTION))  # noqa: PTH113, PTH118


class Contents(NamedTuple):
    """The description of a checkpoint."""

    #: sorted by name
    items: list[Item]
    #: names of the items that raised an alarm when they were saved, by rule
    alarms: dict[str, frozenset[str]]


def contents(path: str, operation: str = "inspect") -> Contents:
    """Return the description of the checkpoint in a directory.

    Raises:
        FormatError: The checkpoint's .metadata is invalid.
        StorageError: The .metadata does not exist or cannot be read.
    """
    name = os.path.join(path, DESCRIPTION)  # noqa: PTH118

    def take(file: IO[bytes]) -> Contents:
        described = _fields(_Machine(file).read())
        return Contents(_items(described), check_alarms(described.get(ALARMS, {})))

    found: Contents = read_description(name, operation, take)
    return found


def _items(described: dict[str, Any]) -> list[Item]:
    items: Any = described.get("state_dict_metadata")
    storage_data: Any = described.get("storage_data") or {}
    if type(items) is not dict or type(storage_data) is not dict:
        raise UnpicklingError("it does not hold DCP metadata")
    chunks: dict[str, list[Chunk]] = {}
    for index, info in storage_data.items():
        chunk = _chunk(_fields(index).get("fqn"), _fields(info))
        chunks.setdefault(chunk.name, []).append(chunk)
    if not all(type(name) is str for name in items):
        raise UnpicklingError("it has an item name that is not text")
    return [_item(name, items[name], chunks) for name in sorted(items)]


def _chunk(name: Any, told: dict[str, Any]) -> Chunk:
    file: Any
    offset: Any
    n_bytes: Any
    file, offset, n_bytes = (told.get(key) for key in ("relative_path", "offset", "length"))
    check_file_name(file)
    if type(name) is not str or not is_count(offset) or not is_count(n_bytes):
        raise UnpicklingError("it has an item whose name or position is not valid")
    return Chunk(name, file, offset, n_bytes, bool(told.get("transform_descriptors")))


def _item(name: str, item: Any, chunks: dict[str, list[Chunk]]) -> Item:
    told = _fields(item)
    state = _fields(told.get("properties")).get("state")
    dtype = state[0] if type(state) is tuple and state else ""
    if type(dtype) is not str or len(dtype) > _LONGEST_DTYPE:
        raise UnpicklingError("it has a dtype that is not valid")
    shape = lengths_of(told["size"]) if "size" in told else ()
    return Item(name, dtype, shape, tuple(chunks.get(name, ())))


def verify(
    path: str, *, quick: bool = False, progress: Callable[[Progress], object] | None = None
) -> int:
    """Read all data of a checkpoint and compare all checksums; return the number of bytes.

    Args:
        path: The directory of the checkpoint.
        quick: Whether to check only the structure.
        progress: Is called with a Progress after each shard.

    Raises:
        DamagedError: A checksum is wrong. The message names the tensor.
        StorageError: A file is missing, or could not be read.
    """
    chunks = [chunk for item in contents(path, "verify").items for chunk in item.chunks]
    chunks.sort(key=lambda chunk: (chunk.file, chunk.offset))
    _check_apart(os.path.join(path, DESCRIPTION), chunks)  # noqa: PTH118
    total, done = sum(chunk.n_bytes for chunk in chunks), 0
    for chunk in chunks:
        _verify(path, chunk, quick)
        done += chunk.n_bytes
        if progress is not None:
            progress(Progress("read", done, total))
    return total


def _check_apart(path: str, chunks: list[Chunk]) -> None:
    """Refuse overlapping shards: a short description could ask for any number of reads."""
    for chunk, other in itertools.pairwise(chunks):
        if chunk.file == other.file and chunk.offset + chunk.n_bytes > other.offset:
            why = f"the bytes of '{other.name[:100]}' overlap another item's"
            raise damaged(path, why, "verify", remedy="use another copy")


def _verify(path: str, chunk: Chunk, quick: bool) -> None:
    try:
        with chunk.open(path, "verify") as reader:
            reader.verify(quick=quick)
    except FormatError:
        if not chunk.is_transformed:
            raise
    except DamagedError as error:
        raise holding(error, f"'{chunk.name}'") from None


# ---- Families of checkpoints ---------------------------------------------------------------------
#
# List and remove the DCP checkpoints of a directory whose names differ in a number: step-1000.
#
# Nothing in the checkpoints is run or imported, and torch is not imported either.

# An unreadable directory with such a name may be the newest checkpoint. Others, such as "job-4711",
# may belong to another user.
_OF_CHECKPOINTS = re.compile(r"(step|epoch|iter|iteration|checkpoint|ckpt)[-_=.]?[0-9]+$", re.I)


@dataclass(frozen=True)
class Member:
    """A complete checkpoint of a family."""

    step: int
    path: str
    saved: datetime
    ranks: int
    files: int
    n_bytes: int


def _step_of(name: str) -> int | None:
    """Return the number in "step-1000", "epoch_3", "checkpoint500"; None for "best"."""
    found = numbered(name)
    return None if found is None or found.suffix else found.number


def prefix_of(path: str) -> str | None:
    """Return the name of a checkpoint without its number; None if it belongs to no family."""
    found = numbered(os.path.basename(path))  # noqa: PTH119
    return None if found is None or found.suffix else found.prefix


def may_be_checkpoint(name: str) -> bool:
    """Return whether an unreadable directory of that name is taken for a checkpoint."""
    return _OF_CHECKPOINTS.search(name) is not None


def cannot_look(where: str, path: str, error: OSError) -> StorageError:
    """Return the exception for a load from `where` that cannot read this path."""
    sentence = f'cannot load "{where}": cannot look at "{path}": {error.strerror}'
    return failure(-(error.errno or errno.EIO), sentence, path, "load")


def listed(directory: str) -> list[str]:
    """Return the names in a directory, sorted; none if there is no such directory.

    Raises:
        StorageError: The directory cannot be read.
    """
    try:
        return sorted(os.listdir(directory))  # noqa: PTH208
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise cannot_look(directory, directory, error) from None


def _paths(directory: str) -> list[tuple[str, StorageError | None]]:
    """Return the directories that have a .metadata file, newest first.

    If two have one time, the higher step comes first. Directories that cannot be read come before
    all others, each with the reason: one of them may be the newest checkpoint.
    """
    found, closed = [], []
    for name in listed(directory):
        path = os.path.join(directory, name)  # noqa: PTH118
        step = _step_of(name)
        if step is None:
            continue
        try:
            found.append((_saved_ns(path), step, path))
        except PermissionError as error:
            if may_be_checkpoint(name):
                closed.append((path, cannot_look(directory, path, error)))
        except OSError:  # no .metadata, or removed just now
            continue
    return [*closed, *((path, None) for _saved, _step, path in sorted(found, reverse=True))]


def _saved_ns(path: str) -> int:
    return os.stat(os.path.join(path, DESCRIPTION)).st_mtime_ns  # noqa: PTH116, PTH118


def look(path: str, *, healthy: bool = False) -> Member:
    """Describe one checkpoint without reading its data files.

    Raises:
        StorageError: The checkpoint is damaged: .metadata is invalid, or a file is shorter than
            .metadata says. Or it could not be read. Or with `healthy`, its save raised alarms.
    """
    ends: dict[str, int] = {}
    found = contents(path, "load")
    for item in found.items:
        for chunk in item.chunks:
            ends[chunk.file] = max(ends.get(chunk.file, 0), chunk.offset + chunk.n_bytes)
    n_bytes = sum(_file_bytes(path, name, end) for name, end in ends.items())
    if healthy and found.alarms:
        raise unhealthy(path, found.alarms, "load")
    ranks = {match[1] for match in map(DATA.fullmatch, ends) if match}
    return Member(
        step=_step_of(os.path.basename(path)) or 0,  # noqa: PTH119
        path=path,
        saved=datetime.fromtimestamp(_saved_ns(path) / 1e9, tz=timezone.utc),
        ranks=len(ranks),
        files=len(ends),
        n_bytes=n_bytes,
    )


def _file_bytes(path: str, name: str, end: int) -> int:
    file = os.path.join(path, name)  # noqa: PTH118
    try:
        n_bytes = os.stat(file).st_size  # noqa: PTH116
    except OSError as error:
        code = -(error.errno or errno.EIO)
        sentence = f'cannot load "{path}": "{name}" is missing: {error.strerror}'
        raise failure(code, sentence, file, "load") from None
    if n_bytes < end:
        raise damaged(file, f"it has {n_bytes} bytes, but {end} were saved", "load")
    return n_bytes


def newest_first(
    directory: str, *, healthy: bool = False
) -> Iterator[tuple[str, Member | StorageError]]:
    """Yield the path of each checkpoint, and its description or why it is not complete.

    With `healthy`, the alarms of its save are such a reason, too.
    """
    for path, closed in _paths(directory):
        if closed is not None:
            yield path, closed
            continue
        try:
            yield path, look(path, healthy=healthy)
        except StorageError as error:
            if is_checkpoint(path):  # otherwise it was removed just now
                yield path, error


def newest(directory: str) -> tuple[Member | None, list[PassedOver]]:
    """Return the newest complete checkpoint, and the newer ones that are not complete.

    Raises:
        StorageError: This process could not read a checkpoint that may be complete.
    """
    passed_over: list[PassedOver] = []
    for path, one in newest_first(directory):
        if isinstance(one, Member):
            return one, passed_over
        if is_our_fault(one):
            raise one
        passed_over.append(PassedOver(path, one))
    return None, passed_over


def members(directory: str) -> tuple[list[Member], list[tuple[str, StorageError]]]:
    """Return the complete checkpoints, oldest first, and the others with their reasons."""
    found = list(newest_first(directory))[::-1]
    complete = [one for _path, one in found if isinstance(one, Member)]
    return complete, [(path, one) for path, one in found if isinstance(one, StorageError)]


def remove(
    directory: str,
    *,
    keep_last: int,
    keep_every: int = 0,
    dry_run: bool = False,
    prefix: str | None = None,
) -> list[Member]:
    """Remove the checkpoints that are not to be kept, oldest first, and return them.

    Their directories are removed with all contents. With `prefix`, only checkpoints whose names are
    this prefix and a number count.
    """
    complete, _damaged = members(directory)
    if prefix is not None:
        complete = [one for one in complete if prefix_of(one.path) == prefix]
    going = [one for one in complete[:-keep_last] if not keep_every or one.step % keep_every]
    for one in () if dry_run else going:
        _remove(one.path)
    return going


def _remove(path: str) -> None:
    """Remove a checkpoint so that readers see all of it or none.

    The directory is first renamed to the name of a dead process's leftover, which a later cleanup
    would remove.
    """
    with Directory(path) as hidden:
        os.rename(path, hidden.path)  # noqa: PTH104
        sync(os.path.dirname(os.path.abspath(path)))  # noqa: PTH100, PTH120
        shutil.rmtree(hidden.path, ignore_errors=True)


# ---- Names ---------------------------------------------------------------------------------------
#
# Names of the files of a checkpoint of torch.distributed.checkpoint (DCP).

#: description of a checkpoint; it exists once the checkpoint is complete
DESCRIPTION = ".metadata"
#: data files: groups for rank and number
DATA = re.compile(r"__(\d+)_(\d+)\.distcp")
#: descriptions that each rank writes for itself, under use_collectives=False
OF_A_RANK = re.compile(r"__(\d+)\.metadata")
