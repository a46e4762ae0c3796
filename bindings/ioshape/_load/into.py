# SPDX-License-Identifier: Apache-2.0
"""load(into=...): fill existing tensors from a file.

torch.load creates the object, but its storages get no bytes: their memory is allocated and not
touched. The object is then compared with the targets, and the bytes are read directly into the
targets.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ioshape._core.errors import Different, MismatchError
from ioshape._device.stream import changed, memory_on_device
from ioshape._load.pickled import is_dense
from ioshape._load.placement import Plan, join_names
from ioshape._load.unread import (
    TENSORS,
    Unread,
    UnreadFile,
    address_of,
    tensors_in,
    unread_object,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from ioshape._load.reader import Record


class Pair(NamedTuple):
    """A tensor of the file, and the existing tensor that it fills."""

    name: str
    source: torch.Tensor
    target: torch.Tensor


# ---- Comparison of the file with the targets ----------------------------------------------------


def _has_state(target: object) -> bool:
    return hasattr(target, "state_dict") and hasattr(target, "load_state_dict")


class _Match:
    """The comparison of an object from a file with the targets to fill."""

    def __init__(self) -> None:
        self.pairs: list[Pair] = []
        self.missing: list[str] = []
        self.unexpected: list[str] = []
        self.different: list[Different] = []
        #: objects that the caller gets as they are in the file
        self.kept: list[Any] = []
        #: functions to call when all tensors are filled
        self.after: list[Callable[[], object]] = []

    def match(self, source: Any, target: Any, name: str = "") -> Any:
        """Return load()'s result: the target's tensors, and the file's values for the rest."""
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
            # Only a tensor subclass itself knows how to read a plain tensor.
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
        """Match the items of a mapping. Without `keep`, leave out items that only the file has."""
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
        """Match an object with state_dict(): a module, an optimizer, a scheduler.

        State that cannot be filled in place is passed to load_state_dict() at the end.
        """
        own = target.state_dict()
        if isinstance(target, torch.nn.Module):
            self._module(source, own, target, name)
            return target
        # An optimizer that has made no step has no state, so missing and unexpected names do not
        # count.
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
        # The rest are results of get_extra_state(), and tensors that state_dict() has copied.
        rest = {
            key: value
            for key, value in self._mapping(source, own, name, keep=False).items()
            if type(value) not in TENSORS or (value.numel() and value.data_ptr() not in here)
        }
        if rest:
            self.after.append(lambda: target.load_state_dict(rest, strict=False))


def _has_tensors(value: Any) -> bool:
    """Return whether a value contains something that tensors of a file fill, as far as visible."""
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


# ---- Reading into targets -----------------------------------------------------------------------


def _covers(tensor: torch.Tensor, n_bytes: int) -> bool:
    """Return whether a tensor contains each byte of its storage exactly once, in order."""
    return tensor.storage_offset() == 0 and tensor.numel() * tensor.element_size() == n_bytes


def _is_raw(tensor: torch.Tensor) -> bool:
    """Return whether the tensor's bytes are its values, without a lazy conjugate or negation."""
    return not tensor.is_conj() and not tensor.is_neg()


def _same_layout(one: torch.Tensor, other: torch.Tensor) -> bool:
    return all(
        size == 1 or stride == wanted
        for size, stride, wanted in zip(one.shape, one.stride(), other.stride(), strict=True)
    )


class Bringer:
    """Reads the bytes of tensors that torch.load has left unread.

    It adds the names of targets to `changed` before their content changes.
    """

    def __init__(self, file: UnreadFile, changed: list[str]) -> None:
        self._file = file
        self._incoming = file.incoming()
        self._changed = changed

    def bring(self, pairs: list[Pair], kept: list[Any]) -> None:
        """Fill the targets, and the storages of the objects in `kept`."""
        unread = self._file.unread
        whole = {address_of(tensor) for tensor in tensors_in(kept)}
        # Storages that stay where torch has allocated them. Their other targets are copied from
        # there.
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
        _copy(copied)

    def _begins(self, pair: Pair) -> None:
        self._changed.append(pair.name)
        changed(pair.target)

    def _direct(self, record: Record, pair: Pair, direct: list[Unread]) -> bool:
        """Read a record directly into its target. Return False if it needs a copy instead."""
        _, source, target = pair
        if not (
            type(target) in TENSORS
            and _covers(source, record.n_bytes)
            and _same_layout(source, target)
            and is_dense(target.shape, target.stride())
            and _is_raw(source)
            and _is_raw(target)
        ):
            return False
        if self._incoming.takes(target.device):
            into = memory_on_device(target)
            self._incoming.add(self._file.wanted(record, into, lambda: self._begins(pair)))
            return True
        if target.device.type != "cpu":
            return False
        direct.append(Unread(record, target.data_ptr(), lambda: self._begins(pair)))
        return True


def _copy(pairs: list[Pair]) -> None:
    with torch.no_grad():
        for pair in pairs:
            pair.target.copy_(pair.source)


# ---- The plan -----------------------------------------------------------------------------------


class Into(Plan):
    """The plan of load(into=..., strict=...)."""

    is_new = False

    def __init__(self, target: Any, *, strict: bool) -> None:
        super().__init__("cpu")
        self._target = target
        self._strict = strict
        self.changed = []

    def read(self, file: UnreadFile) -> tuple[Any] | None:
        """Fill the targets directly from a file."""
        found = unread_object(file, "cpu")
        if found is None:
            return None
        return (self._filled(found[0], file.name, file),)

    def finish(self, loaded: Any, path: str) -> Any:
        """Fill the targets by copies."""
        return self._filled(loaded, path)

    def _filled(self, loaded: Any, path: str, file: UnreadFile | None = None) -> Any:
        found = _Match()
        result = found.match(loaded, self._target)
        if found.different or (self._strict and (found.missing or found.unexpected)):
            raise MismatchError(
                path, tuple(found.missing), tuple(found.unexpected), tuple(found.different)
            )
        if file is None:
            _copy(found.pairs)
        else:
            Bringer(file, self.changed).bring(found.pairs, found.kept)
        for call in found.after:
            call()
        return result


def filling_of(
    into: Any, *, strict: bool, map_location: Any = None, mmap: bool | None = None
) -> Into | None:
    """Check the arguments of load() and return their plan; None if `into` was not given."""
    if into is None:
        return None
    if map_location is not None or mmap:
        raise ValueError(
            "into determines where tensors are loaded: leave out map_location and mmap"
        )
    return Into(into, strict=strict)
