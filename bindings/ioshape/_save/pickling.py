# SPDX-License-Identifier: Apache-2.0
"""Conversion of an object to the records of a torch zip, with torch's own pickling.

The function torch.serialization._save() pickles an object and passes one record after the other to
a zip writer. It calls only write_record() of that writer. The writer here collects the small
records as they are, and a reference to the memory of each storage. It does no pickling of its own,
so it supports all that torch can pickle.

This function is private. Before the first use it is tried on a small object. If it behaves in an
unknown way, collect() raises Unsupported, and the caller uses the public torch.save.

For a storage of a GPU, _save() makes a copy on the host before it passes it on. This module wants
to fetch such a storage in pieces into staging memory instead, so it must act before that copy. When
the last small record arrives, _save() has all storages in a local variable. If a storage is not on
the CPU, the storages are taken from that variable, and an exception leaves _save().

At the end, records_of() gives the records the form that C takes.
"""

from __future__ import annotations

import contextlib
import io
import pickle
import sys
import time
import zipfile
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.serialization

from ioshape import _first_use as first_use
from ioshape import _torch as original
from ioshape._core.locks import module_lock
from ioshape._core.report import Downgrade
from ioshape._device.outgoing import FETCH, Fetched, couriers_for
from ioshape._formats.dtypes import number_of
from ioshape._load.pickled import list_tensors
from ioshape._native import ffi, lib
from ioshape._save.request import Payload

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

# torch uses these two records only to compute offsets by the layout of its own writer. In ioshape's
# files, records begin on page boundaries. Without the two records torch reads the offsets from the
# file's headers.
_LAYOUT_RECORDS = (".format_version", ".storage_alignment")

# It is "3" since torch 1.6. The C++ part of torch's writer adds it, which is not used here.
_VERSION_RECORD = ("version", b"3\n")

_DATA = "data/"
_PICKLE = "data.pkl"
_NEW_DTYPES = (b"float8_", b"uint16", b"uint32", b"uint64")

# Groups of storages that the library judges together: see struct ioshape_record.
_PARAMETERS, _OPTIMIZER = 1, 2

_LARGE_BYTES = 256 << 10
_LARGE_ALIGNMENT = 4096


class Unsupported(Exception):
    """An object or a torch that only torch itself can save. The argument is the reason."""


@dataclass
class Record:
    """A member of the archive. Either `data` or `storage` is set."""

    name: str
    data: bytes | memoryview | None = None
    storage: torch.UntypedStorage | None = None
    #: alignment in bytes of the data in the file; 0 lets the library choose
    alignment: int = 0

    @property
    def n_bytes(self) -> int:
        if self.storage is not None:
            return self.storage.nbytes()
        return len(self.data or b"")


@dataclass
class Pickled:
    """All records of an object, in the order of the file."""

    records: list[Record] = field(default_factory=list)
    #: whether a storage is on a device other than the CPU
    has_device_storages: bool = False
    #: seconds that it took
    seconds: float = 0.0
    #: downgrades of the pickling
    downgrades: tuple[Downgrade, ...] = ()
    #: the dtype of the elements by the address of the storage, as far as torch tells it
    dtypes: dict[int, torch.dtype] = field(default_factory=dict)
    #: addresses of the storages that hold the state of optimizers
    optimizer_storages: frozenset[int] = frozenset()

    @property
    def n_bytes(self) -> int:
        return sum(record.n_bytes for record in self.records)

    @property
    def pickle(self) -> bytes:
        """The pickle, which has the names of the tensors."""
        return bytes(next(one.data or b"" for one in self.records if one.name == _PICKLE))

    def dtype_names(self) -> dict[str, str]:
        """Return the name of the dtype of the elements of each storage, by record."""
        names = {
            record.name: str(self.dtypes[record.storage.data_ptr()]).removeprefix("torch.")
            for record in self.records
            if record.storage is not None and record.storage.data_ptr() in self.dtypes
        }
        # torch pickles the storages of new dtypes as bytes. Their tensors have the dtype.
        pickle = self.pickle if "uint8" in names.values() else b""
        if any(mark in pickle for mark in _NEW_DTYPES):
            with contextlib.suppress(Exception):  # the pickle may have what only torch can read
                tensors = list_tensors(io.BytesIO(pickle), self.n_bytes)
                names |= {one.record: one.dtype for one in tensors if one.is_plain}
        return names


def _on_device(storage: torch.UntypedStorage) -> bool:
    return storage.device.type not in ("cpu", "meta")


def _local(frame: FrameType, name: str) -> dict[Any, Any]:
    """Return a dict among the local variables of _save() while it calls; empty if it has none."""
    found = frame.f_locals.get(name)
    return found if isinstance(found, dict) else {}


def _storages_of(frame: FrameType) -> dict[str, torch.UntypedStorage]:
    """Return the storages that _save() has gathered, by key, from its frame while it calls."""
    return _local(frame, "serialized_storages")


def _optimizer_storages(obj: object, depth: int = 3) -> Iterator[int]:
    """Yield the addresses of the storages in the state of each optimizer in an object."""
    if type(obj) is dict and {"state", "param_groups"} <= obj.keys():
        states = obj["state"].values() if isinstance(obj["state"], dict) else ()
        for state in states:
            for value in state.values() if isinstance(state, dict) else ():
                if type(value) is torch.Tensor and value.layout == torch.strided:
                    yield value.untyped_storage().data_ptr()
    elif depth and type(obj) in (dict, list, tuple):
        for value in obj.values() if type(obj) is dict else obj:  # type: ignore[attr-defined]
            yield from _optimizer_storages(value, depth - 1)


class _PickleComplete(Exception):
    """Raised through _save() to leave it before it copies the storages of a GPU."""


class _Recorder:
    """The zip writer that _save() is given. It collects records and writes nothing."""

    def __init__(self, alignment: int) -> None:
        self.pickled = Pickled()
        self.alignment = alignment
        #: all storages by torch's keys, if one of them is not on the CPU; otherwise empty
        self.storages: dict[str, torch.UntypedStorage] = {}

    def write_record(self, name: str, data: Any, n_bytes: int) -> None:
        if name == _PICKLE:
            self.pickled.dtypes = dict(_local(sys._getframe(1), "storage_dtypes"))
        if name.startswith(_DATA):
            self.pickled.records.append(self._storage_record(name, data, n_bytes))
        elif name not in _LAYOUT_RECORDS:
            content = data.encode() if isinstance(data, str) else bytes(data)
            self.pickled.records.append(Record(name, content[:n_bytes]))
        if name == _last_before_storages:
            storages = _storages_of(sys._getframe(1))
            if any(map(_on_device, storages.values())):
                self.storages = dict(storages)
                raise _PickleComplete

    def write_record_metadata(self, _name: str, _n_bytes: int) -> NoReturn:
        raise Unsupported("the storages' data is skipped")

    def __getattr__(self, name: str) -> NoReturn:
        raise Unsupported(f"torch calls {name}() of its writer")

    def _storage_record(self, name: str, storage: Any, n_bytes: int) -> Record:
        if type(storage) is not torch.UntypedStorage or storage.device.type != "cpu":
            raise Unsupported(f"a storage of type {type(storage).__name__}")
        if storage.nbytes() != n_bytes:
            raise Unsupported("a storage whose length torch states otherwise")
        return Record(name, storage=storage, alignment=alignment_for(n_bytes, self.alignment))


def alignment_for(n_bytes: int, wanted: int) -> int:
    """Return the alignment in the file of a storage of this size.

    It is the one that the library would choose, or a stricter one if `wanted` asks for it.
    """
    if n_bytes >= _LARGE_BYTES or wanted > _LARGE_ALIGNMENT:
        return _LARGE_ALIGNMENT
    return wanted if wanted > 64 and wanted & (wanted - 1) == 0 else 64


def _private(name: str, default: Any) -> Any:
    """Return a private attribute of torch.serialization, or `default` if this torch lacks it."""
    return getattr(torch.serialization, name, default)


def check_arguments(f: object, pickle_module: Any) -> None:
    """Check arguments as torch.save does before its work. Raise the errors that it raises."""
    _private("_check_dill_version", lambda _module: None)(pickle_module)
    _private("_check_save_filelike", lambda _file: None)(f)


def _run(obj: object, recorder: _Recorder, module: Any, protocol: int) -> None:
    # The last argument is False, so _save() writes the record "byteorder". With True, the C++ part
    # of torch's writer adds it at the end, and that part is not used here.
    torch.serialization._save(obj, recorder, module, protocol, False)  # type: ignore[no-untyped-call]


# None until _save() has been tried. Then "" if it behaves as expected, or the reason why it does
# not.
_probed: str | None = None
# The name of the record that _save() writes last before the storages; None if unknown.
_last_before_storages: str | None = None
_probe_lock = module_lock()


def _probe() -> str:
    """Try _save() on a small object. Return "", or why it is unknown. Pass its exceptions on.

    It runs on the caller's thread. Another thread that imports something could wait for an import
    lock that this thread holds, if a signal has interrupted an import. The object has storages but
    no tensors. The caller's torch.device(), FakeTensorMode and similar modes affect only functions
    that make tensors.
    """
    global _last_before_storages  # noqa: PLW0603
    shared = torch.UntypedStorage(12)  # type: ignore[no-untyped-call]
    other = torch.UntypedStorage(8)  # type: ignore[no-untyped-call]
    sample = {"a": shared, "b": shared, "c": other, "d": [1, "x"]}
    names: list[str] = []
    gathered: list[dict[str, torch.UntypedStorage]] = []

    class Probe(_Recorder):
        def write_record(self, name: str, data: Any, n_bytes: int) -> None:
            if not name.startswith(_DATA):
                gathered.append(dict(_storages_of(sys._getframe(1))))
            names.append(name)
            super().write_record(name, data, n_bytes)

    recorder = Probe(64)
    _run(sample, recorder, pickle, 2)
    written = {record.name: record.storage for record in recorder.pickled.records if record.storage}
    known = {f"{_DATA}{key}": storage for key, storage in gathered[-1].items()} if gathered else {}
    if (
        names[:1] != [_PICKLE]
        or names[-2:] != ["data/0", "data/1"]
        or written["data/0"].data_ptr() != shared.data_ptr()
    ):
        return f"torch {torch.__version__} writes records that ioshape does not know"
    # Fetching by pieces needs torch.accelerator, which older versions of torch lack.
    is_known = list(written) == list(known) and all(
        written[name] is known[name] for name in written
    )
    if is_known and hasattr(torch, "accelerator"):
        _last_before_storages = names[-3]
    # Otherwise torch itself copies all storages of a GPU before the first one is written.
    return ""


def problem() -> str:
    """Return why torch's pickling cannot be used without its writer; "" if it can."""
    global _probed  # noqa: PLW0603
    if _probed is not None:
        return _probed
    with _probe_lock, first_use:  # torch may import modules for it
        if _probed is None:
            try:
                _probed = _probe()
            except Exception as error:
                # A signal handler may have raised the exception. If torch is the cause, it raises
                # again.
                try:
                    _probe()
                except Exception:
                    version = torch.__version__
                    _probed = (
                        f"torch {version} pickles in a way that ioshape does not know ({error})"
                    )
                else:
                    raise
        return _probed


def collect(obj: object, module: Any, protocol: int) -> Pickled:
    """Pickle an object as torch.save would. Pass torch's exceptions on.

    Storages are not copied: the records refer to the object's own. Raise Unsupported if torch must
    save the object itself.
    """
    begin = time.perf_counter()
    if getattr(_private("_serialization_tls", None), "skip_data", False):
        raise Unsupported("the storages' data is skipped")
    reason = problem()
    if reason:
        raise Unsupported(reason)
    recorder = _Recorder(_private("_get_storage_alignment", lambda: 64)())
    try:
        _run(obj, recorder, module, protocol)
    except _PickleComplete:
        recorder.pickled.has_device_storages = True
        if any(storage.device.type == "meta" for storage in recorder.storages.values()):
            # torch.save has the right behaviour for storages without data.
            raise Unsupported("storages without data") from None
        for key, storage in recorder.storages.items():
            recorder.pickled.records.append(
                Record(
                    f"{_DATA}{key}",
                    storage=storage,
                    alignment=alignment_for(storage.nbytes(), recorder.alignment),
                )
            )
    recorder.pickled.records.append(Record(*_VERSION_RECORD))
    recorder.pickled.optimizer_storages = frozenset(_optimizer_storages(obj))
    recorder.pickled.seconds = time.perf_counter() - begin
    return recorder.pickled


_LOCAL_HEADER_BYTES = 30
_SERIALIZATION_ID = ".data/serialization_id"  # identifies the file that torch would have written


def by_torch(obj: object, module: Any, protocol: int, why: Unsupported) -> Pickled:
    """Return the records of an object that collect() does not support, and `why` as a downgrade.

    The public torch.save writes it into memory, and the records are cut out of that.
    """
    begin = time.perf_counter()
    file = io.BytesIO()
    original.save(obj, file, module, protocol, True)
    view = file.getbuffer()
    pickled = Pickled()
    with zipfile.ZipFile(file) as archive:
        for member in archive.infolist():
            name = member.filename.partition("/")[2]
            if name in (*_LAYOUT_RECORDS, _SERIALIZATION_ID):
                continue
            header = view[member.header_offset :][:_LOCAL_HEADER_BYTES]
            names, extra = (int.from_bytes(header[at : at + 2], "little") for at in (26, 28))
            begin = member.header_offset + _LOCAL_HEADER_BYTES + names + extra
            data = view[begin : begin + member.file_size]
            alignment = alignment_for(data.nbytes, 64) if name.startswith(_DATA) else 0
            pickled.records.append(Record(name, data, alignment=alignment))
    pickled.downgrades = (Downgrade(f"pickled by torch itself, to memory: {why}", "torch"),)
    pickled.seconds = time.perf_counter() - begin
    return pickled


def records_of(
    pickled: Pickled,
    is_steady: Callable[[torch.UntypedStorage], bool] | None = None,
    path: str = "",
    *,
    copies_shared: bool = False,
) -> Payload:
    """Return the records of an object for C.

    Args:
        pickled: The records.
        is_steady: Returns whether a storage may be copied after the call.
        path: The path for the error message if such a storage changes too early.
        copies_shared: Whether memory that other processes may change is copied before the library
            computes checksums. A save that copies nothing needs this.
    """
    records = ffi.new("struct ioshape_record[]", len(pickled.records))
    keep: list[Any] = [records]
    dtypes = pickled.dtype_names()
    fetched: list[tuple[Any, Any, bool]] = []
    later = [
        is_steady is not None and record.storage is not None and is_steady(record.storage)
        for record in pickled.records
    ]
    for record, to, is_later in zip(pickled.records, records, later, strict=True):
        to.name = name = ffi.new("char[]", record.name.encode())
        keep.append(name)
        to.bytes = record.n_bytes
        to.alignment = record.alignment
        to.dtype = number_of(dtypes.get(record.name, ""))
        if record.storage is not None:
            is_of_optimizer = record.storage.data_ptr() in pickled.optimizer_storages
            to.group = _OPTIMIZER if is_of_optimizer else _PARAMETERS
        if not record.n_bytes:
            continue
        if record.storage is None:
            to.data = data = ffi.from_buffer(record.data)
            keep.append(data)
        elif pickled.has_device_storages and record.storage.device.type != "cpu":
            fetched.append((to, record, is_later))
        elif copies_shared and record.storage.is_shared():
            to.fetch = lib.ioshape_py_copy
            to.fetch_user = ffi.cast("void *", record.storage.data_ptr())
            keep.append(record.storage)
        else:
            to.data = ffi.cast("void *", record.storage.data_ptr())
            keep.append(record.storage)
    payload = Payload(
        records,
        len(pickled.records),
        keep,
        later=ffi.new("uint8_t[]", later) if any(later) else ffi.NULL,
        pickle=pickled.pickle,
        pickle_s=pickled.seconds,
        downgrades=pickled.downgrades,
    )
    if fetched:
        _fetch(fetched, path, payload)
    return payload


def _fetch(fetched: list[tuple[Any, Any, bool]], path: str, payload: Payload) -> None:
    """Let C fetch the records that lie on devices."""
    payload.couriers, recorder = couriers_for(
        [Fetched(one.name, one.storage, is_later) for _to, one, is_later in fetched], path
    )
    payload.downgrades += tuple(Downgrade(note, "torch") for note in recorder)
    for (to, _record, _later), courier in zip(fetched, payload.couriers, strict=True):
        to.fetch = FETCH
        to.fetch_user = handle = ffi.new_handle(courier)
        payload.keep += [handle, courier]
