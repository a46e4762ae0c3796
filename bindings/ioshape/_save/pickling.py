# SPDX-License-Identifier: Apache-2.0
"""From an object to the records of a torch zip, with torch's own pickling.

torch.serialization._save() pickles an object and hands one record after the other to a writer, of
which it uses write_record() alone. Ours takes notes: the small records as they are, and for each
storage the memory where it lies. Nothing of torch's pickling is done again here, so whatever torch
learns to pickle is right at once.

_save() is private. Before its first use it is tried on a small object; if it is not what we know,
collect() raises Unsupported, and the caller goes by the public torch.save.

_save() copies a storage of a GPU to fresh memory before it hands it over. To fetch it piece by
piece into staging memory instead, we must know it earlier: when the last of the small records
comes, _save() has all storages in a variable. If one of them is not the CPU's, they are taken from
there, and _save() is left.
"""

from __future__ import annotations

import io
import pickle
import sys
import zipfile
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.serialization

from ioshape import _first_use as first_use
from ioshape import _torch as original
from ioshape._core.locks import ForkedLock

if TYPE_CHECKING:
    from types import FrameType

# Torch needs these two only to compute where records lie from the layout of its own writer. Our
# records lie on page boundaries; without the two, torch looks at the file's headers.
_LAYOUT_RECORDS = (".format_version", ".storage_alignment")

# "3" since torch 1.6; written by the C++ side of torch's writer, in the place of which we are.
_VERSION_RECORD = ("version", b"3\n")

_DATA = "data/"

_LARGE_BYTES = 256 << 10
_LARGE_ALIGNMENT = 4096


class Unsupported(Exception):
    """torch must write this itself. The argument says why, for the report."""


@dataclass
class Record:
    """A member of the archive. Exactly one of the two sources is there."""

    name: str
    data: bytes | memoryview | None = None
    storage: torch.UntypedStorage | None = None
    #: where in the file it may begin; 0 leaves that to the library
    alignment: int = 0

    @property
    def n_bytes(self) -> int:
        if self.storage is not None:
            return self.storage.nbytes()
        return len(self.data or b"")


@dataclass
class Pickled:
    """All of an object: what save() has to write."""

    records: list[Record] = field(default_factory=list)
    #: some of the storages are not the CPU's
    has_device_storages: bool = False

    @property
    def n_bytes(self) -> int:
        return sum(record.n_bytes for record in self.records)


def _on_device(storage: torch.UntypedStorage) -> bool:
    return storage.device.type not in ("cpu", "meta")


def _storages_of(frame: FrameType) -> dict[str, torch.UntypedStorage]:
    """What _save() has gathered, by key; looked at while it calls us."""
    storages = frame.f_locals.get("serialized_storages")
    return storages if isinstance(storages, dict) else {}


class _PickleComplete(Exception):
    """Raised through _save() to leave it before it copies storages of a GPU."""


class _Notes:
    """What _save() takes for a zip writer."""

    def __init__(self, alignment: int) -> None:
        self.pickled = Pickled()
        self.alignment = alignment
        #: by torch's keys, if some are not the CPU's
        self.storages: dict[str, torch.UntypedStorage] = {}

    def write_record(self, name: str, data: Any, n_bytes: int) -> None:
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
        raise Unsupported(f"torch's writer is asked for {name}()")

    def _storage_record(self, name: str, storage: Any, n_bytes: int) -> Record:
        if type(storage) is not torch.UntypedStorage or storage.device.type != "cpu":
            raise Unsupported(f"a storage of type {type(storage).__name__}")
        if storage.nbytes() != n_bytes:
            raise Unsupported("a storage whose length torch states otherwise")
        return Record(name, storage=storage, alignment=alignment_for(n_bytes, self.alignment))


def alignment_for(n_bytes: int, wanted: int) -> int:
    """Where a storage of this size may begin in the file, as the library aligns or stricter."""
    if n_bytes >= _LARGE_BYTES or wanted > _LARGE_ALIGNMENT:
        return _LARGE_ALIGNMENT
    return wanted if wanted > 64 and wanted & (wanted - 1) == 0 else 64


def _private(name: str, default: Any) -> Any:
    """Something of torch's that another version need not have."""
    return getattr(torch.serialization, name, default)


def check_arguments(f: object, pickle_module: Any) -> None:
    """What torch.save checks before it does anything, with its errors."""
    _private("_check_dill_version", lambda _module: None)(pickle_module)
    _private("_check_save_filelike", lambda _file: None)(f)


def _run(obj: object, notes: _Notes, module: Any, protocol: int) -> None:
    # Whoever turns the record "byteorder" off here gets it at the end, from the C++ side of torch's
    # writer. So it is never off.
    torch.serialization._save(obj, notes, module, protocol, False)  # type: ignore[no-untyped-call]


# None until _save() has been tried; then "" if it is as we know it, or why it is not.
_probed: str | None = None
# Name of the record that _save() writes last before the storages.
_last_before_storages: str | None = None
_probe_lock = ForkedLock()


def _probe() -> str:
    """Try _save() on a small object. Raise what it raises.

    The caller's thread tries it, because another thread that imports something could wait for an
    import that this one was interrupted in. The object has storages but no tensors: the caller's
    torch.device(), FakeTensorMode and the like change only what makes tensors.
    """
    global _last_before_storages  # noqa: PLW0603
    shared = torch.UntypedStorage(12)  # type: ignore[no-untyped-call]
    other = torch.UntypedStorage(8)  # type: ignore[no-untyped-call]
    sample = {"a": shared, "b": shared, "c": other, "d": [1, "x"]}
    names: list[str] = []
    gathered: list[dict[str, torch.UntypedStorage]] = []

    class Probe(_Notes):
        def write_record(self, name: str, data: Any, n_bytes: int) -> None:
            if not name.startswith(_DATA):
                gathered.append(dict(_storages_of(sys._getframe(1))))
            names.append(name)
            super().write_record(name, data, n_bytes)

    notes = Probe(64)
    _run(sample, notes, pickle, 2)
    written = {record.name: record.storage for record in notes.pickled.records if record.storage}
    known = {f"{_DATA}{key}": storage for key, storage in gathered[-1].items()} if gathered else {}
    if (
        names[:1] != ["data.pkl"]
        or names[-2:] != ["data/0", "data/1"]
        or written["data/0"].data_ptr() != shared.data_ptr()
    ):
        return f"torch {torch.__version__} writes records that are not known"
    # What brings them by itself needs torch.accelerator, which older versions of torch have not.
    is_known = list(written) == list(known) and all(
        written[name] is known[name] for name in written
    )
    if is_known and hasattr(torch, "accelerator"):
        _last_before_storages = names[-3]
    # Otherwise torch copies the storages of a GPU itself, all of them, before the first is written.
    return ""


def problem() -> str:
    """Return why torch's pickling cannot be used by itself; "" if it can."""
    global _probed  # noqa: PLW0603
    with _probe_lock, first_use:  # torch may import something for it
        if _probed is None:
            try:
                _probed = _probe()
            except Exception as error:
                # The handler of a signal may have raised it. Torch raises it again.
                try:
                    _probe()
                except Exception:
                    version = torch.__version__
                    _probed = f"torch {version} pickles in a way that is not known ({error})"
                else:
                    raise
        return _probed


def collect(obj: object, module: Any, protocol: int) -> Pickled:
    """Pickles an object as torch.save would. What that raises, this raises.

    Storages are not copied: they are the object's own.
    """
    if getattr(_private("_serialization_tls", None), "skip_data", False):
        raise Unsupported("the storages' data is skipped")
    reason = problem()
    if reason:
        raise Unsupported(reason)
    notes = _Notes(_private("_get_storage_alignment", lambda: 64)())
    try:
        _run(obj, notes, module, protocol)
    except _PickleComplete:
        notes.pickled.has_device_storages = True
        if any(storage.device.type == "meta" for storage in notes.storages.values()):
            # torch knows what to say of them.
            raise Unsupported("storages without data") from None
        for key, storage in notes.storages.items():
            notes.pickled.records.append(
                Record(
                    f"{_DATA}{key}",
                    storage=storage,
                    alignment=alignment_for(storage.nbytes(), notes.alignment),
                )
            )
    notes.pickled.records.append(Record(*_VERSION_RECORD))
    return notes.pickled


_LOCAL_HEADER_BYTES = 30
_SERIALIZATION_ID = ".data/serialization_id"  # of the file that torch itself would have written


def by_torch(obj: object, module: Any, protocol: int) -> Pickled:
    """The same with the public torch.save, through memory, where collect() says Unsupported."""
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
    return pickled
