# SPDX-License-Identifier: Apache-2.0
"""What lies in a file: inspect() and verify(). Nothing of the file is run, nor torch imported."""

from __future__ import annotations

import io
import os
import pickle
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from ioshape._errors import DamagedError, StorageError
from ioshape._load.reader import RawRecord, Reader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ioshape._save.report import Progress

# A pickle holds names and numbers; the largest that anybody has had a use for is far smaller.
_MAX_PICKLE_BYTES = 1 << 30
_MAX_DEPTH = 200

_DTYPES = {
    "ByteStorage": ("uint8", 1),
    "CharStorage": ("int8", 1),
    "ShortStorage": ("int16", 2),
    "IntStorage": ("int32", 4),
    "LongStorage": ("int64", 8),
    "HalfStorage": ("float16", 2),
    "FloatStorage": ("float32", 4),
    "DoubleStorage": ("float64", 8),
    "ComplexFloatStorage": ("complex64", 8),
    "ComplexDoubleStorage": ("complex128", 16),
    "BoolStorage": ("bool", 1),
    "BFloat16Storage": ("bfloat16", 2),
    "QUInt8Storage": ("quint8", 1),
    "QInt8Storage": ("qint8", 1),
    "QInt32Storage": ("qint32", 4),
    "UntypedStorage": ("uint8", 1),
}


@dataclass(frozen=True)
class Record:
    """A member of the archive."""

    name: str
    n_bytes: int
    #: where in the file its data begins
    file_offset: int
    #: the largest power of two up to 4096 that file_offset is a multiple of
    alignment: int
    crc32: int


@dataclass(frozen=True)
class Tensor:
    """A tensor in the pickle, and where its storage lies."""

    #: how to get to it from the loaded object: "model.layer.weight", "optimizer.state[0].exp_avg"
    name: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    #: the record that holds its storage, which other tensors may share
    record: str
    #: of its first element in the record
    storage_offset: int
    #: where it was when it was saved: "cpu", "cuda:0"
    location: str


@dataclass(frozen=True)
class Contents:
    """What lies in a file."""

    path: str
    file_bytes: int
    records: tuple[Record, ...]
    #: in the order of the pickle; empty if there are none, or if `problem` says why
    tensors: tuple[Tensor, ...]
    #: why the tensors could not be listed; "" if they were
    problem: str = ""


# ---- Reading a pickle without running it -------------------------------------------------------


class _Global(type):
    """Stands for a global of the pickle, which may be called, or instantiated without a call."""

    global_name: str

    def __call__(cls, *arguments: Any, **named: Any) -> Any:
        rebuilt = _rebuild(cls.global_name, arguments)
        thing: Any = cls
        return thing.__new__(thing, *arguments, **named) if rebuilt is None else rebuilt


class _Thing(metaclass=_Global):
    """Stands for whatever a global of the pickle makes."""

    global_name = ""
    parts: dict[Any, Any]

    def __new__(cls, *arguments: Any, **named: Any) -> _Thing:
        made = super().__new__(cls)
        made.parts = {**dict(enumerate(arguments)), **named}
        return made

    def __call__(self, *arguments: Any, **named: Any) -> _Thing:
        return _Thing.__new__(_Thing, self, *arguments, **named)

    def __setstate__(self, state: Any) -> None:
        # The state of whoever has slots is a pair: what is in __dict__, and what is in the slots.
        for some in state if isinstance(state, tuple) and len(state) == 2 else (state,):
            if isinstance(some, dict):
                self.parts.update(some)
            elif some is not None:
                self.parts["state"] = state

    def __setitem__(self, key: Any, value: Any) -> None:
        self.parts[key] = value

    def __hash__(self) -> int:
        return id(self)

    def append(self, value: Any) -> None:
        self.parts[len(self.parts)] = value

    def extend(self, values: Any) -> None:
        for value in values:
            self.append(value)

    def add(self, value: Any) -> None:
        self.append(value)


class _Mapping(dict[Any, Any]):
    """Stands for an OrderedDict, which may have attributes: those of state_dict() do."""

    attributes: Any = None

    def __setstate__(self, state: Any) -> None:
        self.attributes = state


@dataclass(frozen=True)
class _Storage:
    kind: str
    key: str
    location: str


@dataclass(frozen=True)
class _View:
    storage: _Storage
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    item_bytes: int
    #: of a quantized tensor: may have tensors of its own
    quantizer: Any = None


def _numbers(value: Any) -> tuple[int, ...]:
    if not isinstance(value, (tuple, list)) or not all(type(number) is int for number in value):
        return ()
    return tuple(value)


def _rebuild(name: str, arguments: tuple[Any, ...]) -> Any:
    """What torch's functions make of their arguments, as far as a list of tensors needs it."""
    if name in ("torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state"):
        return arguments[0] if arguments else None
    if name == "collections.OrderedDict":
        return _Mapping(*arguments)
    if name in ("builtins.set", "builtins.frozenset", "__builtin__.set", "__builtin__.frozenset"):
        return tuple(*arguments)  # like a frozenset it can be a key
    if name.startswith("torch._utils._rebuild") and len(arguments) >= 4:
        storage, offset, shape, stride = arguments[:4]
        if isinstance(storage, _Storage) and isinstance(offset, int):
            dtype, item_bytes = _DTYPES.get(storage.kind, (storage.kind, 1))
            for argument in arguments[4:]:  # _rebuild_tensor_v3 says the dtype itself
                if isinstance(argument, _Global) and argument.global_name.startswith("torch."):
                    dtype = argument.global_name.removeprefix("torch.")
            quantizer = arguments[4] if name.endswith("_rebuild_qtensor") else None
            sizes, strides = _numbers(shape), _numbers(stride)
            return _View(storage, dtype, sizes, strides, offset, item_bytes, quantizer)
    return None


# The unpickler that is written in Python: the other makes room for as much as the pickle says that
# there will be, so that a few bytes of a file fill the memory. Its stubs know little of it.
_PythonUnpickler: Any = pickle._Unpickler


class _Unpickler(_PythonUnpickler):  # type: ignore[misc]
    dispatch: ClassVar = dict(_PythonUnpickler.dispatch)

    def _load_bytearray(self) -> None:
        # This alone would make room, too.
        n_bytes = int.from_bytes(self.read(8), "little")
        data = self.read(n_bytes)
        if len(data) < n_bytes:
            raise pickle.UnpicklingError("it ends in the middle")
        self.append(bytearray(data))

    dispatch[pickle.BYTEARRAY8[0]] = _load_bytearray

    def find_class(self, module: str, name: str) -> Any:
        # Nothing is imported, so nothing of the file can run.
        return _Global("_Thing", (_Thing,), {"global_name": f"{module}.{name}"})

    def persistent_load(self, pid: Any) -> Any:
        if not isinstance(pid, tuple) or len(pid) < 5 or pid[0] not in ("storage", b"storage"):
            raise pickle.UnpicklingError("a reference that is not to a storage")
        kind = str(getattr(pid[1], "global_name", pid[1])).rpartition(".")[2]
        return _Storage(kind, str(pid[2]), str(pid[3]))


def _join(path: str, key: Any) -> str:
    if isinstance(key, str):
        return f"{path}.{key}" if path else key
    return f"{path}[{key!r}]"


def _tensors(root: Any) -> Iterator[Tensor]:
    """All tensors below, each container once, in order."""
    seen: set[int] = set()
    stack: list[tuple[str, Any, int]] = [("", root, 0)]
    while stack:
        path, value, depth = stack.pop()
        children: Any = ()
        if isinstance(value, _View):
            yield Tensor(
                path,
                value.dtype,
                value.shape,
                value.stride,
                f"data/{value.storage.key}",
                value.offset * value.item_bytes,
                value.storage.location,
            )
            children = [("quantizer", value.quantizer)] if value.quantizer else ()
        elif isinstance(value, _Storage):
            yield Tensor(path, "uint8", (), (), f"data/{value.key}", 0, value.location)
        elif id(value) in seen or depth > _MAX_DEPTH:
            continue
        elif isinstance(value, dict):
            children = list(value.items())
            if isinstance(value, _Mapping) and value.attributes:
                children.append(("__dict__", value.attributes))
        elif isinstance(value, (list, tuple)):
            children = list(enumerate(value))
        elif isinstance(value, _Thing):
            children = list(value.parts.items())
        if children:
            seen.add(id(value))
            stack.extend((_join(path, key), child, depth + 1) for key, child in reversed(children))


def _list_tensors(reader: Reader, records: list[RawRecord]) -> tuple[tuple[Tensor, ...], str]:
    entry = next((record for record in records if record.name == "data.pkl"), None)
    if entry is None:
        return (), "it has no record data.pkl"
    if entry.n_bytes > _MAX_PICKLE_BYTES:
        return (), f"its pickle is larger than {_MAX_PICKLE_BYTES} bytes"
    data = bytearray(entry.n_bytes)
    try:
        if data:
            reader.read_file(entry.file_offset, memoryview(data))
        root = _Unpickler(io.BytesIO(data), encoding="utf-8", errors="replace").load()
        return tuple(_tensors(root)), ""
    except StorageError:
        raise
    except Exception as error:
        return (), f"its pickle cannot be read ({error})"


# ---- What users call ---------------------------------------------------------------------------


def inspect(path: str | os.PathLike[str]) -> Contents:
    """Lists the records and tensors of a file. Their data is not read.

    Raises:
        FormatError: the file is not a torch zip.
        StorageError: the file could not be read.
    """
    name = os.fspath(path)
    with Reader(name, operation="inspect") as reader:
        raw = reader.records()
        tensors, problem = _list_tensors(reader, raw)
        return Contents(
            name,
            reader.file_bytes,
            tuple(
                Record(
                    record.name,
                    record.n_bytes,
                    record.file_offset,
                    min(record.file_offset & -record.file_offset or 4096, 4096),
                    record.crc32,
                )
                for record in raw
            ),
            tensors,
            problem,
        )


def verify(
    path: str | os.PathLike[str], *, progress: Callable[[Progress], object] | None = None
) -> None:
    """Reads all of a file and compares all of its checksums.

    Returns if every one is right.

    Raises:
        DamagedError: one is not; the message names the tensor and where it lies.
        FormatError: the file is not a torch zip.
        StorageError: the file could not be read; with errno ENODATA if it has no checksums.
    """
    try:
        with Reader(os.fspath(path), operation="verify", progress=progress) as reader:
            reader.verify()
    except DamagedError as error:
        raise name_damage(error) from None


def name_damage(error: DamagedError, part: tuple[int, int] | None = None) -> DamagedError:
    """The same error, with the names of the tensors that lie in the damaged record.

    `part` is where a member of a bundle lies in its file.
    """
    if error.record is None:
        return error
    try:
        with Reader(error.filename, part=part, operation="inspect") as reader:
            tensors, _problem = _list_tensors(reader, reader.records())
    except (StorageError, ValueError):
        return error
    names = [tensor.name for tensor in tensors if tensor.record == error.record]
    if not names:
        return error
    # A tensor that was saved by itself has no name.
    shown = ", ".join(f"'{name}'" if name else "the tensor" for name in names[:3])
    if len(names) > 3:
        shown += f" and {len(names) - 3} more"
    return DamagedError(error.facts._replace(sentence=f"{error.sentence}, which holds {shown}"))
