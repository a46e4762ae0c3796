# SPDX-License-Identifier: Apache-2.0
"""ioshape.load()."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import stat
import tempfile
import zipfile
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from ioshape import _torch as original
from ioshape._core import terminal as _terminal
from ioshape._core.errors import DamagedError, StorageError, damaged, failure
from ioshape._load.collector import collector_rests
from ioshape._load.contents import verify as verify_file
from ioshape._load.into import filling_of
from ioshape._load.placement import Only, Plan
from ioshape._load.reader import open_if_ours
from ioshape._load.together import Together, all_ranks
from ioshape._load.unread import UnreadFile, failures_of
from ioshape._load.verified import BoundedFile, Source
from ioshape._native import lib
from ioshape._tier.drain import folder_to_load_from, nearest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import IO, Literal

    from ioshape._core.report import Progress
    from ioshape._load.reader import Reader

# The largest possible ratio of Deflate. A larger one means that several records share their bytes.
_MOST_INFLATED = 1032
# A larger archive is inflated into a temporary file instead of memory.
_INFLATED_IN_MEMORY_BYTES = 64 << 20
# Below this average size, the records of a file count as small.
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
    """Load an object that torch.save or ioshape.save has saved, and verify its checksums.

    The first arguments are those of torch.load. torch.load does the unpickling, with its rules on
    what is safe (weights_only) and its map_location. The library reads the bytes ahead, past the
    page cache, and compares a checksum for each MiB. Files of torch.save have one checksum for each
    storage.

    With mmap=True storages are mapped and not read, so no checksum is compared. With verify=True as
    well, the whole file is verified first. File objects, and files in the formats from before torch
    1.6, are read by torch alone.

    With `into` the call fills existing tensors: those of a module, an optimizer, a state dict, or
    nested containers of these, on any device. Names, shapes and dtypes are compared before a byte
    is read. The result contains the given tensors, modules and optimizers, and the file's values
    for everything else.

        # Fill a model and an optimizer.
        epoch = ioshape.load(path, into={"model": model, "optimizer": optimizer})["epoch"]

    With `only` the call returns parts of the object. Large tensors outside these parts are not
    read. The names are those that inspect() lists, and names of values and containers. In a name, *
    matches any text.

        # Load the model.
        model.load_state_dict(ioshape.load(path, only=["model.*"])["model"])

    To read a slice of a tensor, use ioshape.open(). If the file contains more than tensors,
    containers and plain values, torch.load creates the whole object first, by its rules.

    Any thread may call this. With `into`, no other thread may use the targets during the call.

    Args:
        f: A path, or a file object.
        map_location: As in torch.load.
        pickle_module: As in torch.load.
        weights_only: As in torch.load.
        mmap: As in torch.load.
        verify: False compares no checksums. "first" compares all of them before anything else. A
            damaged file then changes nothing in `into`, but the file is read twice. Default: verify
            while reading.
        into: The object to fill. An optimizer that has made no step has no tensors yet, and gets
            new ones. It excludes `only`, map_location and mmap. Default: create new tensors.
        strict: False ignores names that only the file or only `into` has. Tensors of another shape
            or dtype are always refused. Default: True.
        only: The names of the parts to load. In a list, the items that remain move up. Default:
            all.
        progress: A function that is called with a Progress from time to time. An exception in it
            stops the load, which raises it. Default: none.
        tier: The folder of a tier, as in save(). The copy on the tier is loaded, unless the file at
            the path is newer. If the copy is damaged, a FallbackWarning names it, and the file at
            the path is loaded. False ignores the tier. Default: the setting "tier".
        shared: True if all ranks of a job on several nodes load this file. All of them must make
            this call. One rank reads each piece of the file and sends it to the others over
            torch.distributed. On a single node the page cache has this effect for tensors on the
            CPU. Pieces for devices go from device to device by the backend of the default group.
            Default: False.
        pickle_load_args: As in torch.load.

    Returns:
        The object, as torch.load would return it.

    Raises:
        DamagedError: A checksum does not match; the message names the tensor and the offset. Its
            field `changed` names the tensors in `into` whose content may have changed.
        MismatchError: The file does not match `into`. Nothing has been changed.
        ValueError: The file contains nothing that `only` names, or arguments exclude each other.
        FormatError: The file is a zip archive, but not one of torch.save.
        StorageError: The file could not be read. It is an OSError with errno and path.

    Other exceptions of torch.load are passed on.
    """

    plan: Plan | None = filling_of(into, strict=strict, map_location=map_location, mmap=mmap)
    if only is not None:
        if plan is not None:
            raise ValueError("give into or only, not both")
        plan = Only(only, map_location)
    request = LoadRequest(
        map_location, pickle_module, weights_only, pickle_load_args, plan, progress
    )
    if not isinstance(f, (str, os.PathLike)):
        return request.finish(request.by_torch(f, mmap=mmap), str(getattr(f, "name", f)))

    def from_path(path: str) -> Any:
        # Pass the caller's own object if possible, because torch quotes it in its messages.
        return _from_path(
            path, f if path == os.fspath(f) else path, request, mmap, verify, together
        )

    together = all_ranks() if shared else None
    with together or contextlib.nullcontext():
        return nearest(os.fspath(f), folder_to_load_from(tier), from_path)


@dataclass(frozen=True)
class LoadRequest:
    """The arguments of torch.load, and the plan of the load."""

    map_location: Any
    pickle_module: Any
    weights_only: bool | None
    #: other arguments of torch.load
    others: dict[str, Any]
    #: what is loaded, and to where; None: everything, to new memory
    plan: Plan | None
    progress: Callable[[Progress], object] | None

    @property
    def is_usual(self) -> bool:
        """True unless there is a custom unpickler, which expects to see the whole pickle."""
        return self.pickle_module is None and not self.others

    @property
    def is_plain(self) -> bool:
        """True if the file must contain only what weights_only=True allows."""
        return self.is_usual and self.weights_only is not False

    def by_torch(self, file: Any, *, mmap: bool | None = False) -> Any:
        """Return the object that torch.load loads."""
        return original.load(
            file,
            self.map_location,
            self.pickle_module,
            weights_only=self.weights_only,
            mmap=mmap,
            **self.others,
        )

    def finish(self, loaded: Any, path: str) -> Any:
        """Return the result for an object that torch has loaded completely."""
        return loaded if self.plan is None else self.plan.finish(loaded, path)


def _from_path(
    path: str,
    given: Any,
    request: LoadRequest,
    mmap: bool | None,
    verify: bool | Literal["first"] | None,
    together: Together | None,
) -> Any:
    def by_torch(file: Any, mmap: bool | None = False) -> Any:
        return request.finish(request.by_torch(file, mmap=mmap), path)

    if isinstance(path, str) and path.endswith(".safetensors"):
        return by_torch(given, mmap)  # newer versions of torch read them
    is_new = request.plan is None or request.plan.is_new
    is_mapped = is_new and _is_mapped(mmap)
    if verify == "first" or (verify and is_mapped):
        verify_file(path, progress=request.progress, tier=False)
    if is_mapped:
        return by_torch(given, mmap)
    reader = _open(path, verify=verify is not False, fresh=is_new)
    try:
        if reader is not None:
            return load_through(reader, request, together)
        file = _inflated(path) if verify is not False else None
        if file is None and _is_regular(path):
            file = BoundedFile(io.FileIO(path), os.path.getsize(path))  # noqa: PTH202
        if file is None:
            return by_torch(given, mmap)
        with file:
            return by_torch(file, mmap)
    except RuntimeError as error:
        if isinstance(error, StorageError) or not _is_foreign_zip(path):
            raise
        raise failure(
            lib.IOSHAPE_E_FORMAT,
            f'cannot load "{path}": it is a zip archive, but not one of torch.save',
            path,
            "load",
            remedy="check the path, or unpack it if the checkpoint is in it",
        ) from error


def load_through(reader: Reader, request: LoadRequest, together: Together | None = None) -> Any:
    """Return the object that torch loads from an open file, or from a shard. Close the reader.

    By the plan, torch creates the object without the bytes of its storages, which are then read to
    where they are wanted. If the object contains more than tensors, containers and plain values,
    torch reads the bytes, and the plan takes the complete object. Without a plan all bytes are
    read.
    """
    with reader, _terminal.shown("loading ", reader.path, request.progress) as progress:
        has_small = reader.file_bytes < _SMALL_BYTES * reader.n_records
        map_location = request.map_location
        plan = request.plan if request.is_usual else None
        # A function as map_location may look at the bytes.
        if plan is None and request.is_plain and not has_small and not callable(map_location):
            plan = Plan(map_location)
        if together is not None and (plan is None or not plan.is_whole):
            together.leave()
        if plan is not None:
            unread = UnreadFile(reader, progress, is_whole=plan.is_whole, together=together)
            try:
                with failures_of(unread):
                    found = plan.read(unread)
            except DamagedError as error:
                error.changed = tuple(plan.changed)
                raise
            if found is not None:
                return found[0]
        if together is not None:
            together.leave()
        file = Source(reader, progress)
        with failures_of(file), collector_rests():
            # A buffer reads many small records in one call.
            loaded = request.by_torch(BoundedFile(file, file.n_bytes) if has_small else file)
        return request.finish(loaded, reader.path)


def _open(path: str, *, verify: bool, fresh: bool) -> Reader | None:
    """Open a file of ioshape's formats. Return None if torch must read it by itself."""
    # Do not open a pipe, because that would consume its data.
    with contextlib.suppress(OSError):
        if not stat.S_ISREG(mode := os.stat(path).st_mode) and not stat.S_ISDIR(mode):  # noqa: PTH116
            return None
    return open_if_ours(path, verify=verify, fresh=fresh)


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
            raise zipfile.BadZipFile("its records overlap")
        for name in dict.fromkeys(archive.namelist()):
            with archive.open(name) as record, copy.open(name, "w", force_zip64=True) as same:
                shutil.copyfileobj(record, same)
    into.seek(0)


def _inflated(path: str) -> IO[bytes] | None:
    """Return an uncompressed copy of an archive that another tool has compressed.

    Return None if the file is not an archive. torch can inflate it as well, but it compares no
    checksums. For a record that the directory calls a folder it even returns uninitialised memory.
    So torch gets a verified copy.
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
    raise damaged(path, reason, "load")


def _is_mapped(mmap: bool | None) -> bool:
    if mmap is not None:
        return mmap
    try:
        from torch.utils.serialization import config  # noqa: PLC0415
    except ImportError:
        return False  # older versions of torch do not have this default
    return bool(config.load.mmap)
