# SPDX-License-Identifier: Apache-2.0
"""load()."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import stat
import tempfile
import zipfile
import zlib
from typing import TYPE_CHECKING, Any, cast

from ioshape import _torch as original
from ioshape._core import terminal as _terminal
from ioshape._core.errors import StorageError, failure
from ioshape._load import unpickle
from ioshape._load.contents import verify as verify_file
from ioshape._load.into import Into, fill, filling_of, load_into
from ioshape._load.only import Only, load_only, patterns_of, pick
from ioshape._load.places import load_at_once
from ioshape._load.reader import Reader, can_read
from ioshape._load.together import Together, all_ranks
from ioshape._load.unread import failures_of
from ioshape._load.verified import BoundedFile, Source
from ioshape._native import lib
from ioshape._tier.drain import folder_to_load_from
from ioshape._tier.nearest import nearest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import IO, Literal

    from ioshape._core.report import Progress

# What a byte of a compressed archive becomes at most, unless several records have the same bytes.
_MOST_INFLATED = 1032
# What is longer goes to a temporary file.
_INFLATED_IN_MEMORY_BYTES = 64 << 20
# Records that are smaller on the average are small.
_SMALL_BYTES = 64 << 10


def load(
    f: str | os.PathLike[str] | IO[bytes],
    map_location: Any = None,
    pickle_module: Any = None,
    *,
    weights_only: bool | None = None,
    mmap: bool | None = None,
    verify: bool | Literal["first"] | None = None,
    into: Any = None,
    strict: bool = True,
    only: Iterable[str] | None = None,
    progress: Callable[[Progress], object] | None = None,
    tier: str | os.PathLike[str] | Literal[False] | None = None,
    shared: bool = False,
    **pickle_load_args: Any,
) -> Any:
    """Loads what torch.save or ioshape.save has saved, and verifies its checksums on the way.

    The arguments are torch.load's, and torch.load does the unpickling, with its rules of what is
    safe (weights_only) and its map_location. The bytes come through the library, which reads ahead
    past the page cache and compares a checksum for each MiB. (Files of torch.save have one for each
    storage.)

    With mmap=True storages are mapped, not read, so there is nothing to verify yet; mmap=True with
    verify=True verifies the whole file first. Files in the formats from before torch 1.6, and
    file objects, are read by torch alone.

    With `into` nothing new is made: the file's tensors are read to where the tensors of a module,
    an optimizer, a state dict, or any nest of these are, on whatever device. Before a byte moves,
    names, shapes and dtypes are compared. What is returned has the given tensors, modules and
    optimizers in their places, and all else as the file has it.

        epoch = ioshape.load(path, into={"model": model, "optimizer": optimizer})["epoch"]

    With `only` the rest of the object is left out, and of large tensors not read. Names are those
    that inspect() lists, of values and of containers; * stands for anything:

        model.load_state_dict(ioshape.load(path, only=["model.*"])["model"])

    If what is asked for is more than tensors, containers and plain values, torch.load makes all of
    the object first, by its rules. ioshape.open() reads parts of a tensor.

    Args:
        f: the path, or a file object.
        map_location: as in torch.load.
        pickle_module: as in torch.load.
        weights_only: as in torch.load.
        mmap: as in torch.load.
        verify: False compares no checksums; "first" compares all of them before anything else, so
            that a damaged file changes nothing in `into`, and reads the file twice.
        into: what is to be filled. An optimizer that has made no step yet has no tensors, and gets
            new ones.
        strict: False leaves out what only the file has or only `into`. Tensors of another shape or
            dtype are always refused.
        only: names of what is loaded. What is left out of a list is not counted in the others'
            place.
        progress: is called with a Progress now and then; an exception in it stops the load.
        tier: as in save(). The copy on the tier is loaded, unless there is a newer file at the
            path. If it is damaged, a FallbackWarning names it, and the file at the path is loaded.
        shared: True where all ranks of a job on several nodes load this file, and call this: each
            piece of it is read by one of them, who sends it to the others over torch.distributed.
            On one node the page cache does that by itself, but for devices: from one to the others
            pieces go by the backend that the default group has for them.
        pickle_load_args: as in torch.load.

    Raises:
        DamagedError: a checksum is wrong; the message names the tensor and where it lies. Its field
            `changed` has the names of the tensors in `into` that may not be what they were.
        MismatchError: the file does not have what `into` has. Nothing has been changed.
        ValueError: it has nothing of what `only` names.
        FormatError: the file is a zip archive, but not one of torch.save.
        StorageError: the file could not be read. It is an OSError with errno and path.

    What torch.load raises for other reasons, this raises.
    """

    filling = filling_of(into, strict=strict, map_location=map_location, mmap=mmap)
    wanted = patterns_of(only)
    if filling is not None and wanted is not None:
        raise ValueError("give into or only, not both")

    def by_torch(file: Any, mmap: bool | None, load: Callable[..., Any] = original.load) -> Any:
        return load(
            file,
            map_location,
            pickle_module,
            weights_only=weights_only,
            mmap=mmap,
            **pickle_load_args,
        )

    def filled(loaded: Any) -> Any:
        if filling is not None:
            return fill(loaded, str(f), filling)
        return pick(loaded, str(getattr(f, "name", f)), wanted)

    if not isinstance(f, (str, os.PathLike)):
        return filled(by_torch(f, mmap))

    def from_path(path: str) -> Any:
        # As the caller has written it, torch has it in its messages.
        given = f if path == os.fspath(f) else path
        if isinstance(path, str) and path.endswith(".safetensors"):
            return filled(by_torch(given, mmap))  # newer versions of torch read them
        is_mapped = filling is None and _is_mapped(mmap)
        if verify == "first" or (verify and is_mapped):
            verify_file(path, progress=progress, tier=False)
        if is_mapped:
            return filled(by_torch(given, mmap))
        reader = _open(path, verify=verify is not False, fresh=filling is None)
        try:
            if reader is not None:
                # Whoever brings an unpickler of his own wants to see all of it.
                is_usual = pickle_module is None and not pickle_load_args
                loaded = load_through(
                    reader,
                    lambda file: by_torch(file, mmap=False, load=unpickle.load),
                    progress,
                    into=filling if is_usual else None,
                    only=Only(wanted, map_location) if is_usual and wanted is not None else None,
                    is_plain=is_usual and weights_only is not False,
                    map_location=map_location,
                    together=together,
                )
                return loaded if is_usual else filled(loaded)
            file = _inflated(path) if verify is not False else None
            if file is None and _is_regular(path):
                file = BoundedFile(io.FileIO(path), os.path.getsize(path))  # noqa: PTH202
            if file is None:
                return filled(by_torch(given, mmap))
            with file:
                return filled(by_torch(file, mmap))
        except RuntimeError as error:
            if isinstance(error, StorageError) or not _is_foreign_zip(path):
                raise
            raise failure(
                lib.IOSHAPE_E_FORMAT,
                f'cannot load "{path}": it is a zip archive, but not one of torch.save',
                path,
                "load",
                remedy="check the path, or unpack it if the checkpoint lies in it",
            ) from error

    together = all_ranks() if shared else None
    with together or contextlib.nullcontext():
        return nearest(os.fspath(f), folder_to_load_from(tier), from_path)


def load_through(
    reader: Reader,
    torch_load: Callable[[Any], Any],
    progress: Callable[[Progress], object] | None,
    part: tuple[int, int] | None = None,
    into: Into | None = None,
    only: Only | None = None,
    *,
    is_plain: bool = False,
    map_location: Any = None,
    together: Together | None = None,
) -> Any:
    """What torch makes of an open file, or of its part. The reader is closed.

    `is_plain`: it holds what weights_only=True allows, or is to be refused.
    """
    with reader, _terminal.shown("loading ", reader.path, progress) as progress:  # noqa: PLR1704
        if into is not None:
            return load_into(reader, torch_load, progress, part, into, together)
        if only is not None:
            _leave(together)
            return load_only(reader, torch_load, progress, part, only)
        has_small = reader.file_bytes < _SMALL_BYTES * reader.n_records
        if is_plain and not has_small:
            loaded = load_at_once(reader, map_location, progress, part, together)
            if loaded is not None:
                return loaded[0]
        _leave(together)
        file = Source(reader, progress)
        with failures_of(file, part):
            # Of small records many are read at once.
            return torch_load(BoundedFile(file, file.n_bytes) if has_small else file)


def _leave(together: Together | None) -> None:
    if together is not None:
        together.leave()


def _open(path: str, *, verify: bool, fresh: bool) -> Reader | None:
    """None if torch must read it."""
    # To open a pipe is to take what is in it.
    with contextlib.suppress(OSError):
        if not stat.S_ISREG(mode := os.stat(path).st_mode) and not stat.S_ISDIR(mode):  # noqa: PTH116
            return None
    try:
        return Reader(path, verify=verify, fresh=fresh)
    except StorageError as error:
        if can_read(error):
            raise
        return None


def _is_regular(path: str) -> bool:
    return stat.S_ISREG(os.stat(path).st_mode)  # noqa: PTH116


def _is_foreign_zip(path: str) -> bool:
    try:
        with zipfile.ZipFile(path) as archive:
            return not any(name.rpartition("/")[2] == "data.pkl" for name in archive.namelist())
    except (OSError, zipfile.BadZipFile):
        return False


def _inflate(path: str, into: IO[bytes]) -> None:
    with zipfile.ZipFile(path) as archive, zipfile.ZipFile(into, "w") as copy:
        n_bytes = sum(info.file_size for info in archive.infolist())
        if n_bytes > _MOST_INFLATED * os.path.getsize(path):  # noqa: PTH202
            raise zipfile.BadZipFile("its records share their bytes")
        for name in dict.fromkeys(archive.namelist()):
            with archive.open(name) as record, copy.open(name, "w", force_zip64=True) as same:
                shutil.copyfileobj(record, same)
    into.seek(0)


def _inflated(path: str) -> IO[bytes] | None:
    """An archive that another tool has compressed, as one that is not; None if it is no archive.

    Torch can inflate it, too, but compares no checksums, and for a record that the directory calls
    a folder it hands out memory as it happens to be. So it gets what was verified, nothing else.
    """
    with contextlib.ExitStack() as at_failure:
        try:
            if not _is_regular(path) or not zipfile.is_zipfile(path):
                return None
            spool = tempfile.SpooledTemporaryFile(_INFLATED_IN_MEMORY_BYTES)  # noqa: SIM115
            inflated = cast("IO[bytes]", at_failure.enter_context(spool))
            _inflate(path, inflated)
        except (zipfile.BadZipFile, zlib.error, NotImplementedError, EOFError) as error:
            reason = str(error)
        else:
            at_failure.pop_all()
            return inflated
    raise failure(
        lib.IOSHAPE_E_DAMAGED,
        f'"{path}" is damaged: {reason}',
        path,
        "load",
        remedy="use another copy or an older checkpoint",
    )


def _is_mapped(mmap: bool | None) -> bool:
    if mmap is not None:
        return mmap
    try:
        from torch.utils.serialization import config  # noqa: PLC0415
    except ImportError:
        return False  # older versions of torch have no such default
    return bool(config.load.mmap)
