# SPDX-License-Identifier: Apache-2.0
"""load(into=...): the tensors of a file are brought to where tensors are already.

torch.load makes the object, but storages get no bytes: their memory is taken and never touched.
Then what is there is compared with what is wanted, and the bytes are read to their place.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ioshape._core.errors import DamagedError, Different, MismatchError
from ioshape._device.stream import bytes_of, changed
from ioshape._load.unread import (
    TENSORS,
    Unread,
    UnreadFile,
    address_of,
    failures_of,
    tensors_in,
    unread_object,
)
from ioshape._load.verified import Source

if TYPE_CHECKING:
    from collections.abc import Callable

    from ioshape._core.report import Progress
    from ioshape._load.reader import RawRecord, Reader
    from ioshape._load.together import Together


class Pair(NamedTuple):
    """A tensor to be filled."""

    name: str
    source: torch.Tensor
    target: torch.Tensor


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
            and (type(target) in TENSORS or type(target) is type(source))
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
            if type(tensor) in TENSORS
        }
        # What get_extra_state() says, and what state_dict() has copied.
        rest = {
            key: value
            for key, value in self._mapping(source, own, name, keep=False).items()
            if type(value) not in TENSORS or (value.numel() and value.data_ptr() not in here)
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
    kind = "" if type(value) in TENSORS else f"{type(value).__name__} "
    where = "" if value.device.type == "cpu" else f" on {value.device}"
    return f"{kind}{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}{where}"


# ---- Bringing -----------------------------------------------------------------------------------


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
        self._incoming = file.incoming()
        #: names of the targets that are no longer what they were
        self.changed: list[str] = []

    def bring(self, pairs: list[Pair], kept: list[Any]) -> None:
        """Fills targets, and what is kept where it is."""
        unread = self._file.unread
        whole = {address_of(tensor) for tensor in tensors_in(kept)}
        # What comes to where torch has made it. What else goes there has it from the file already.
        wanted = {at: Unread(unread[at], at) for at in whole & unread.keys()}
        direct: list[Unread] = []
        copied: list[Pair] = []
        for pair in pairs:
            at = address_of(pair.source)
            if at in unread and at not in whole and self._direct(unread[at], pair, direct):
                continue
            if at in unread:
                wanted[at] = Unread(unread[at], at)
            copied.append(pair)
        self._file.bring([*wanted.values(), *direct], self._incoming)
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
            type(target) in TENSORS
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
