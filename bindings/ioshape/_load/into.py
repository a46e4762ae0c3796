# SPDX-License-Identifier: Apache-2.0
"""load(into=...): the tensors of a file are brought to where tensors are already.

torch.load makes the object, but storages get no bytes: their memory is taken and never touched.
Then what is there is compared with what is wanted, and the bytes are read to their place.
"""

from __future__ import annotations

import bisect
import collections
import contextlib
import ctypes
import io
import struct
import sys
from collections.abc import Mapping
from typing import IO, TYPE_CHECKING, Any, NamedTuple, cast

import torch

from ioshape import _torch as original
from ioshape._device.incoming import Incoming, Wanted
from ioshape._device.stream import bytes_of, changed
from ioshape._errors import DamagedError, Different, MismatchError
from ioshape._files.verified import Source
from ioshape._load.contents import name_damage
from ioshape._load.reader import Request
from ioshape._native import ffi

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from ioshape._load.reader import RawRecord, Reader
    from ioshape._load.together import Together
    from ioshape._save.report import Progress

# What zip has before each record: a signature, and how long the two fields are that follow it.
_HEADER = struct.Struct("<4s22xHH")
_HEADER_SIGNATURE = b"PK\3\4"

# Less has come before anybody is ready for it.
_LEAST_EXPECTED_BYTES = 8 << 20

_TENSORS = (torch.Tensor, torch.nn.Parameter)
_CONTAINERS = (dict, collections.OrderedDict, list, tuple, set)
_PLAIN_TYPES = (
    str,
    bytes,
    bytearray,
    bool,
    int,
    float,
    complex,
    type(None),
    torch.Size,
    torch.dtype,
    torch.device,
)


def _nothing() -> None:
    pass


class Pair(NamedTuple):
    """A tensor to be filled."""

    name: str
    source: torch.Tensor
    target: torch.Tensor


# ---- What the file has --------------------------------------------------------------------------


class Unread(NamedTuple):
    """A record, and the address where it is wanted."""

    record: RawRecord
    address: int
    #: is called before the first of its bytes comes
    begins: Callable[[], object] = _nothing


class UnreadFile(Source):
    """A file of which torch gets all but the bytes of storages."""

    def __init__(
        self,
        reader: Reader,
        progress: Callable[[Progress], object] | None,
        *,
        is_whole: bool = True,
        together: Together | None = None,
    ) -> None:
        """`is_whole`: all storages will be wanted. `together`: by other ranks, too."""
        super().__init__(reader, progress)
        self._together = together
        self._is_expected = is_whole and together is None
        self._listed = reader.records()
        self._records = {record.file_offset: record for record in self._listed}
        self._numbers = {record.file_offset: number for number, record in enumerate(self._listed)}
        self._offsets = sorted(self._numbers)
        #: by the address that torch has given their bytes
        self.unread: dict[int, RawRecord] = {}
        #: the records that are no storages, by name
        self.small: dict[str, bytes] = {}

    def readinto(self, buffer: Any) -> int:
        """Leaves the memory of storages as it is."""
        view = memoryview(buffer).cast("B")
        record = self._records.get(self._position)
        if record is None or view.nbytes != record.n_bytes:
            header = self._header() if view.nbytes == _HEADER.size else None
            if header is None:
                return super().readinto(view)
            view[:] = header
        elif record.name.startswith("data/"):
            self._expect(record)
            self.unread[ctypes.addressof(ctypes.c_ubyte.from_buffer(view))] = record
        else:
            super().readinto(view)
            self.small[record.name] = bytes(view)
            return view.nbytes
        self._position += view.nbytes
        return view.nbytes

    def _expect(self, record: RawRecord) -> None:
        """The storage is not to idle while torch makes the object."""
        if not self.unread and self._is_expected and self.n_bytes >= _LEAST_EXPECTED_BYTES:
            self._reader.expect(self._numbers[record.file_offset])

    def _header(self) -> bytes | None:
        """What torch looks for before a record, without a read: where the data begin is known.

        Of the records that the reader has listed, the headers have been compared with that.
        """
        number = bisect.bisect(self._offsets, self._position)
        if number == len(self._offsets):
            return None
        gap = self._offsets[number] - self._position - _HEADER.size
        name_bytes = min(gap, 0xFFFF)
        if not 0 < name_bytes <= gap <= 2 * 0xFFFF:
            return None
        return _HEADER.pack(_HEADER_SIGNATURE, name_bytes, gap - name_bytes)

    def close(self) -> None:
        """The reader stays open: torch may have to read all of it, without this."""
        io.RawIOBase.close(self)

    def bring(self, wanted: Iterable[Unread]) -> None:
        """Reads records to where they are wanted, in the order of the file."""
        in_order = sorted(wanted, key=lambda one: one.record.file_offset)
        if not in_order or (self._together is not None and self._bring_together(in_order)):
            return
        for one in in_order:
            one.begins()
        first, last = in_order[0].record, in_order[-1].record
        try:
            self._reader.read_records(
                [
                    Request(self._numbers[record.file_offset], 0, record.n_bytes, address)
                    for record, address, _ in in_order
                ],
                lambda now: self.tell_progress(first.file_offset + now.done_bytes),
            )
            self.tell_progress(last.file_offset + last.n_bytes)
        except BaseException as error:
            self.failure = error
            raise

    def _bring_together(self, in_order: list[Unread]) -> bool:
        """False if other ranks want something else."""
        assert self._together is not None
        once = {one.record.file_offset: one for one in reversed(in_order)}
        wanted = [self._in_memory(one) for one in once.values() if one.record.n_bytes]
        if not self._together.wants_the_same(wanted, self.n_bytes):
            return False
        self._together.bring(wanted, self.read_at, self.tell_progress)
        for one in in_order:
            first = once[one.record.file_offset]
            if one is not first:
                one.begins()
                ctypes.memmove(one.address, first.address, one.record.n_bytes)
        return True

    def _in_memory(self, unread: Unread) -> Wanted:
        record, address, begins = unread
        memory = ffi.buffer(ffi.cast("char *", address), record.n_bytes)
        return self.wanted(record, torch.frombuffer(memory, dtype=torch.uint8), begins)

    def read_at(self, offset: int, into: memoryview) -> None:
        """Reads bytes of the file as it lies. What has a checksum of its own is verified."""
        self.seek(offset)
        super().readinto(into)

    def wanted(
        self, record: RawRecord, into: torch.Tensor, begins: Callable[[], object] | None = None
    ) -> Wanted:
        """All of a record, on a device."""
        crc32 = self._reader.crc32_of_all(record)
        return Wanted(record.file_offset, into, begins, crc32, lambda: self._damaged(record))

    def _damaged(self, record: RawRecord) -> BaseException:
        self.failure = self._reader.damaged(record)
        return self.failure


def tensors_in(root: Any) -> Iterator[torch.Tensor]:
    """All tensors in it.

    Raises:
        TypeError: there is something in it that may have looked at a tensor's bytes, or hides one.
    """
    seen: set[int] = set()
    left = [root]
    while left:
        value = left.pop()
        if type(value) in _TENSORS:
            is_strange = value.is_quantized or value.is_nested or value.__dict__
            if is_strange or value.layout != torch.strided:
                raise TypeError("not a plain tensor")
            yield value
        elif type(value) in _CONTAINERS:
            if id(value) not in seen:
                seen.add(id(value))
                left += getattr(value, "__dict__", {}).values()
                left += [*value.keys(), *value.values()] if isinstance(value, dict) else value
        elif type(value) not in _PLAIN_TYPES:
            raise TypeError(f"{type(value).__name__} may be anything")


def _allowed_by_user(pickled: bytes) -> bool:
    """Whether it names a function that torch itself does not trust, but the program does."""
    names: list[Any] = getattr(torch.serialization, "get_safe_globals", list)()
    for allowed in names:
        function = allowed[0] if isinstance(allowed, tuple) else allowed
        if getattr(function, "__qualname__", "").rpartition(".")[2].encode() in pickled:
            return True
    return False


def is_native(file: UnreadFile) -> bool:
    """Whether torch takes the bytes as they are."""
    asked = getattr(torch.serialization, "get_default_load_endianness", lambda: None)()
    return asked is None and file.small.get("byteorder", b"little") == sys.byteorder.encode()


def unread_object(file: UnreadFile, map_location: Any) -> tuple[Any, list[torch.Tensor]] | None:
    """The object without the bytes of its large tensors, and all tensors in it.

    None if something in it may have made something of those bytes: then all must be read.
    """
    try:
        loaded = original.load(cast("IO[bytes]", file), map_location, weights_only=True, mmap=False)
        tensors = list(tensors_in(loaded))
        addresses = {_address(tensor) for tensor in tensors}
    except Exception:  # whatever it is, torch.load will say it
        if file.failure is not None:
            raise file.failure from None
        return None
    if not file.unread.keys() <= addresses or not is_native(file):
        return None
    return None if _allowed_by_user(file.small.get("data.pkl", b"")) else (loaded, tensors)


# ---- What is wanted -----------------------------------------------------------------------------


def join_names(name: str, key: object) -> str:
    if not isinstance(key, str):
        return f"{name}[{key!r}]"
    return f"{name}.{key}" if name else key


def _has_state(target: object) -> bool:
    return hasattr(target, "state_dict") and hasattr(target, "load_state_dict")


class _Match:
    """What an object from a file and what is to be filled have in common, and what not."""

    def __init__(self) -> None:
        self.pairs: list[Pair] = []
        self.missing: list[str] = []
        self.unexpected: list[str] = []
        self.different: list[Different] = []
        #: what goes to the caller as the file has it
        self.kept: list[Any] = []
        #: to be called when all is filled
        self.after: list[Callable[[], object]] = []

    def match(self, source: Any, target: Any, name: str = "") -> Any:
        """What load() returns: the target's tensors, and of the rest what the file has."""
        if isinstance(target, torch.Tensor):
            return self._tensor(source, target, name)
        if _has_state(target):
            return self._stateful(source, target, name)
        if isinstance(target, (list, tuple)) and isinstance(source, (list, tuple)):
            if len(source) == len(target):
                named = enumerate(zip(source, target, strict=True))
                filled = [self.match(a, b, f"{name}[{i}]") for i, (a, b) in named]
                return filled if isinstance(source, list) else tuple(filled)
            self._differs(name, f"{len(source)} items", f"{len(target)} items")
        elif isinstance(target, Mapping) and isinstance(source, Mapping):
            return self._mapping(source, target, name)
        elif _has_tensors(target):
            self._differs(name, _described(source), _described(target))
        self.kept.append(source)
        return source

    def _differs(self, name: str, in_file: str, wanted: str) -> None:
        self.different.append(Different(name, in_file, wanted))

    def _tensor(self, source: Any, target: torch.Tensor, name: str) -> torch.Tensor:
        if (
            isinstance(source, torch.Tensor)
            and source.shape == target.shape
            and source.dtype == target.dtype
            and source.layout == target.layout
            and not source.is_meta
            and not target.is_meta
            # What another kind of tensor has of a plain one, only it knows.
            and (type(target) in _TENSORS or type(target) is type(source))
        ):
            self.pairs.append(Pair(name, source, target))
        else:
            self._differs(name, _described(source), _described(target))
        return target

    def _mapping(
        self,
        source: Mapping[Any, Any],
        target: Mapping[Any, Any],
        name: str,
        *,
        keep: bool = True,
    ) -> dict[Any, Any]:
        """`keep` is false where nobody wants what only the file has."""
        for key, value in target.items():
            if key not in source and _has_tensors(value):
                self.missing.append(join_names(name, key))
        filled = {}
        for key, value in source.items():
            if key in target:
                filled[key] = self.match(value, target[key], join_names(name, key))
                continue
            if _has_tensors(value):
                self.unexpected.append(join_names(name, key))
            if keep:
                filled[key] = value
                self.kept.append(value)
        return filled

    def _stateful(self, source: Any, target: Any, name: str) -> Any:
        """A module, an optimizer, a scheduler: what cannot be filled in place it is given."""
        own = target.state_dict()
        if isinstance(target, torch.nn.Module):
            self._module(source, own, target, name)
            return target
        # The state of an optimizer that has made no step is empty: it comes from the file.
        missing, unexpected = self.missing, self.unexpected
        self.missing, self.unexpected = [], []
        filled = self.match(source, own, name)
        self.missing, self.unexpected = missing, unexpected
        self.after.append(lambda: target.load_state_dict(filled))
        return target

    def _module(self, source: Any, own: Any, target: torch.nn.Module, name: str) -> None:
        if not isinstance(source, Mapping):
            self._differs(name, _described(source), _described(target))
            return
        here = {
            tensor.data_ptr()
            for tensor in (*target.parameters(), *target.buffers())
            if type(tensor) in _TENSORS
        }
        # What get_extra_state() says, and what state_dict() has copied.
        rest = {
            key: value
            for key, value in self._mapping(source, own, name, keep=False).items()
            if type(value) not in _TENSORS or (value.numel() and value.data_ptr() not in here)
        }
        if rest:
            self.after.append(lambda: target.load_state_dict(rest, strict=False))


def _has_tensors(value: Any) -> bool:
    """Whether some part of it is filled by tensors of a file, as far as one can see."""
    if isinstance(value, Mapping):
        return any(map(_has_tensors, value.values()))
    if isinstance(value, (list, tuple)):
        return any(map(_has_tensors, value))
    return isinstance(value, torch.Tensor) or _has_state(value)


def _described(value: object) -> str:
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    kind = "" if type(value) in _TENSORS else f"{type(value).__name__} "
    where = "" if value.device.type == "cpu" else f" on {value.device}"
    return f"{kind}{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}{where}"


# ---- Bringing -----------------------------------------------------------------------------------


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _covers(tensor: torch.Tensor, n_bytes: int) -> bool:
    """Whether a tensor has each byte of its storage once, beginning with the first."""
    return tensor.storage_offset() == 0 and tensor.numel() * tensor.element_size() == n_bytes


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether its memory is one piece."""
    expected = 1
    for size, stride in sorted(
        zip(tensor.shape, tensor.stride(), strict=True), key=lambda pair: pair[1]
    ):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _is_raw(tensor: torch.Tensor) -> bool:
    """Whether its bytes are its values."""
    return not tensor.is_conj() and not tensor.is_neg()


def _same_layout(one: torch.Tensor, other: torch.Tensor) -> bool:
    return all(
        size == 1 or stride == wanted
        for size, stride, wanted in zip(one.shape, one.stride(), other.stride(), strict=True)
    )


class Bringer:
    """Reads what was left unread."""

    def __init__(self, file: UnreadFile) -> None:
        self._file = file
        self._incoming = Incoming(file.n_bytes)
        #: names of the targets that are no longer what they were
        self.changed: list[str] = []

    def bring(self, pairs: list[Pair], kept: list[Any]) -> None:
        """Fills targets, and what is kept where it is."""
        unread = self._file.unread
        whole = {_address(tensor) for tensor in tensors_in(kept)}
        # What comes to where torch has made it. What else goes there has it from the file already.
        wanted = {at: Unread(unread[at], at) for at in whole & unread.keys()}
        direct: list[Unread] = []
        copied: list[Pair] = []
        for pair in pairs:
            at = _address(pair.source)
            if at in unread and at not in whole and self._direct(unread[at], pair, direct):
                continue
            if at in unread:
                wanted[at] = Unread(unread[at], at)
            copied.append(pair)
        self._file.bring([*wanted.values(), *direct])
        self._incoming.bring(self._file.read_at)
        for pair in copied:
            self._begins(pair)
            with torch.no_grad():
                pair.target.copy_(pair.source)

    def _begins(self, pair: Pair) -> None:
        self.changed.append(pair.name)
        changed(pair.target)

    def _direct(self, record: RawRecord, pair: Pair, direct: list[Unread]) -> bool:
        """False if it must take another way."""
        _, source, target = pair
        if not (
            type(target) in _TENSORS
            and _covers(source, record.n_bytes)
            and _same_layout(source, target)
            and _is_dense(target)
            and _is_raw(source)
            and _is_raw(target)
        ):
            return False
        if self._incoming.takes(target.device):
            begin = target.storage_offset() * target.element_size()
            into = bytes_of(target.untyped_storage())[begin : begin + record.n_bytes]
            self._incoming.add(self._file.wanted(record, into, lambda: self._begins(pair)))
            return True
        if target.device.type != "cpu":
            return False
        direct.append(Unread(record, target.data_ptr(), lambda: self._begins(pair)))
        return True


# ---- Loading ------------------------------------------------------------------------------------


@contextlib.contextmanager
def failures_of(file: Source, part: tuple[int, int] | None) -> Iterator[None]:
    """What a read failed with is raised, whatever torch makes of it.

    `part` is where a member of a bundle lies in its file.
    """
    try:
        yield
        if file.failure is not None:
            raise file.failure
    except BaseException as error:
        if isinstance(file.failure, DamagedError):
            raise name_damage(file.failure, part) from None
        if file.failure is not None and file.failure is not error:
            raise file.failure from None
        raise


class Into(NamedTuple):
    """What load() was given to fill."""

    target: Any
    strict: bool


def filling_of(
    into: Any, *, strict: bool, map_location: Any = None, mmap: bool | None = None
) -> Into | None:
    """What load() was given, checked; None if nothing is to be filled."""
    if into is None:
        return None
    if map_location is not None or mmap:
        raise ValueError("into says where tensors come to: leave out map_location and mmap")
    return Into(into, strict)


def fill(
    loaded: Any, path: str, into: Into, bring: Callable[[list[Pair], list[Any]], None] | None = None
) -> Any:
    """What load(into=) returns of what has been loaded; `bring` fills tensors that are unread."""
    found = _Match()
    result = found.match(loaded, into.target)
    if found.different or (into.strict and (found.missing or found.unexpected)):
        raise MismatchError(
            path, tuple(found.missing), tuple(found.unexpected), tuple(found.different)
        )
    if bring is None:
        with torch.no_grad():
            for pair in found.pairs:
                pair.target.copy_(pair.source)
    else:
        bring(found.pairs, found.kept)
    for call in found.after:
        call()
    return result


def load_into(
    reader: Reader,
    torch_load: Callable[[Any], Any],
    progress: Callable[[Progress], object] | None,
    part: tuple[int, int] | None,
    into: Into,
    together: Together | None = None,
) -> Any:
    """Fills what is there from an open file, or from its part."""
    file = UnreadFile(reader, progress, together=together)
    bringer = Bringer(file)
    try:
        with failures_of(file, part):
            found = unread_object(file, "cpu")
            if found is not None:
                return fill(found[0], reader.path, into, bringer.bring)
    except DamagedError as error:
        error.changed = tuple(bringer.changed)
        raise
    if together is not None:
        together.leave()
    whole = Source(reader, progress)
    with failures_of(whole, part):
        loaded = torch_load(whole)
    return fill(loaded, reader.path, into)
