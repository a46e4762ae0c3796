# SPDX-License-Identifier: Apache-2.0
"""A file from which torch creates the object without reading the bytes of its storages.

The memory of the storages is allocated and not touched. The bytes that are wanted are read to their
destinations afterwards.
"""

from __future__ import annotations

import bisect
import collections
import contextlib
import ctypes
import struct
import sys
from typing import IO, TYPE_CHECKING, Any, NamedTuple, cast

import torch

from ioshape import _torch as original
from ioshape._core.errors import DamagedError
from ioshape._device.incoming import Incoming, Wanted
from ioshape._load.collector import collector_rests
from ioshape._load.contents import name_damage
from ioshape._load.reader import Request
from ioshape._load.verified import Source
from ioshape._native import ffi

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from ioshape._core.report import Progress
    from ioshape._load.reader import Reader, Record
    from ioshape._load.together import Together

# The local header that zip has before each record: the signature, and the lengths of the two fields
# that follow.
_HEADER = struct.Struct("<4s22xHH")
_HEADER_SIGNATURE = b"PK\3\4"

# A smaller file is read before torch has created the object, so prefetching gains nothing.
_LEAST_PREFETCHED_BYTES = 8 << 20

TENSORS = (torch.Tensor, torch.nn.Parameter)
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


class Unread(NamedTuple):
    """A record, and the address to read it to."""

    record: Record
    address: int
    #: called before the first byte is read
    begins: Callable[[], object] = _nothing


class UnreadFile(Source):
    """A file that gives torch everything except the bytes of storages."""

    def __init__(
        self,
        reader: Reader,
        progress: Callable[[Progress], object] | None,
        *,
        is_whole: bool = True,
        together: Together | None = None,
    ) -> None:
        """Wrap a reader.

        Args:
            reader: The open file.
            progress: A function that is called with the progress, or None.
            is_whole: Whether all storages will be wanted, so that prefetching pays.
            together: The exchange with other ranks that load this file as well, or None.
        """
        super().__init__(reader, progress)
        self._together = together if is_whole else None
        self._prefetches = is_whole and together is None
        self._listed = reader.records()
        self._records = {record.file_offset: record for record in self._listed}
        self._numbers = {record.file_offset: number for number, record in enumerate(self._listed)}
        self._offsets = sorted(self._numbers)
        #: records that were not read, by the address that torch has allocated for them
        self.unread: dict[int, Record] = {}
        #: content of the records that are not storages, by name
        self.small: dict[str, bytes] = {}

    def readinto(self, buffer: Any) -> int:
        """Fill the buffer, but leave the memory of storages as it is."""
        view = memoryview(buffer).cast("B")
        record = self._records.get(self._position)
        if record is None or view.nbytes != record.n_bytes:
            header = self._header() if view.nbytes == _HEADER.size else None
            if header is None:
                return super().readinto(view)
            view[:] = header
        elif record.name.startswith("data/"):
            self._prefetch(record)
            self.unread[ctypes.addressof(ctypes.c_ubyte.from_buffer(view))] = record
        else:
            super().readinto(view)
            self.small[record.name] = bytes(view)
            return view.nbytes
        self._position += view.nbytes
        return view.nbytes

    def _prefetch(self, record: Record) -> None:
        """Start to prefetch at the first storage, so that the storage device does not idle."""
        if not self.unread and self._prefetches and self.n_bytes >= _LEAST_PREFETCHED_BYTES:
            self.reader.prefetch(self._numbers[record.file_offset])

    def _header(self) -> bytes | None:
        """Return a synthetic local header for the record at this position, or None.

        torch reads a header only to find where the data begins, which is known. The reader has
        already checked the real headers of all records that it lists.
        """
        number = bisect.bisect(self._offsets, self._position)
        if number == len(self._offsets):
            return None
        gap = self._offsets[number] - self._position - _HEADER.size
        name_bytes = min(gap, 0xFFFF)
        if not 0 < name_bytes <= gap <= 2 * 0xFFFF:
            return None
        return _HEADER.pack(_HEADER_SIGNATURE, name_bytes, gap - name_bytes)

    def bring(self, wanted: Iterable[Unread], incoming: Incoming) -> None:
        """Read records to their addresses, in the order of the file, and then all of `incoming`."""
        in_order = sorted(wanted, key=lambda one: one.record.file_offset)
        if self._together is None or not self._bring_together(self._together, in_order, incoming):
            self._bring(in_order)
            incoming.bring(self.read_at)

    def _bring(self, in_order: list[Unread]) -> None:
        if not in_order:
            return
        for one in in_order:
            one.begins()
        first, last = in_order[0].record, in_order[-1].record
        self.reader.read_records(
            [
                Request(self._numbers[record.file_offset], 0, record.n_bytes, address)
                for record, address, _ in in_order
            ],
            lambda now: self.tell_progress(first.file_offset + now.done_bytes),
        )
        self.tell_progress(last.file_offset + last.n_bytes)

    def _bring_together(
        self, together: Together, in_order: list[Unread], incoming: Incoming
    ) -> bool:
        """Read by exchange with other ranks. Return False if the ranks do not exchange anything."""
        on_devices = incoming.wanted()
        once = {one.record.file_offset: one for one in reversed(in_order)}
        here = [self._in_memory(one) for one in once.values() if one.record.n_bytes]
        pieces = incoming.pieces() if on_devices else together.pieces() if here else []
        if not pieces:
            together.leave()
            return False
        wanted = [*on_devices, *here]
        if not together.wants_the_same(wanted, self.n_bytes, on_devices=bool(on_devices)):
            return False

        def bring() -> None:
            together.bring(wanted, pieces, self.read_at, self.tell_progress)

        if on_devices:
            incoming.bring(self.read_at, exchange=bring)
        else:
            bring()
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
        """Read a range of the file into memory. Bytes with checksums of their own are verified."""
        self.seek(offset)
        super().readinto(into)

    def wanted(
        self, record: Record, into: torch.Tensor, begins: Callable[[], object] | None = None
    ) -> Wanted:
        """Return the request to read a whole record into a tensor of bytes, on any device."""
        crc32 = self.reader.crc32_of_all(record)
        return Wanted(record.file_offset, into, begins, crc32, lambda: self.reader.damaged(record))

    def incoming(self) -> Incoming:
        """Return the reader for records that are wanted on devices."""
        return Incoming(self.n_bytes)


def tensors_in(root: Any) -> Iterator[torch.Tensor]:
    """Yield all tensors in nested containers.

    Raises:
        TypeError: An object may have looked at a tensor's bytes, or may hide a tensor.
    """
    seen: set[int] = set()
    left = [root]
    while left:
        value = left.pop()
        if type(value) in TENSORS:
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
            raise TypeError(f"{type(value).__name__} may hold anything")


def _allowed_by_user(pickled: bytes) -> bool:
    """Return whether the pickle names a function that only the program has declared safe."""
    names: list[Any] = getattr(torch.serialization, "get_safe_globals", list)()
    for allowed in names:
        function = allowed[0] if isinstance(allowed, tuple) else allowed
        if getattr(function, "__qualname__", "").rpartition(".")[2].encode() in pickled:
            return True
    return False


def is_native(file: UnreadFile) -> bool:
    """Return whether torch uses the bytes of this file without swapping them."""
    asked = getattr(torch.serialization, "get_default_load_endianness", lambda: None)()
    return asked is None and file.small.get("byteorder", b"little") == sys.byteorder.encode()


def unread_object(file: UnreadFile, map_location: Any) -> tuple[Any, list[torch.Tensor]] | None:
    """Return the object without the bytes of its large tensors, and all tensors in it.

    Return None if code of an object may have used those bytes. Then the file must be read normally.
    """
    try:
        with collector_rests():
            loaded = original.load(
                cast("IO[bytes]", file), map_location, weights_only=True, mmap=False
            )
        tensors = list(tensors_in(loaded))
        addresses = {address_of(tensor) for tensor in tensors}
    except Exception:  # torch.load loads the file then, and raises the error if there is one
        if file.failure is not None:
            raise file.failure from None
        return None
    if not file.unread.keys() <= addresses or not is_native(file):
        return None
    return None if _allowed_by_user(file.small.get("data.pkl", b"")) else (loaded, tensors)


def address_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@contextlib.contextmanager
def failures_of(file: Source) -> Iterator[None]:
    """Raise the error of a failed read, even if torch has wrapped or swallowed it in the block."""
    try:
        yield
        if file.failure is not None:
            raise file.failure
    except BaseException as error:
        failure = file.failure or error
        if isinstance(failure, DamagedError):
            raise name_damage(failure, file.reader) from None
        if failure is not error:
            raise failure from None
        raise
