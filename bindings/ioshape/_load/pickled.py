# SPDX-License-Identifier: Apache-2.0
"""The tensors that a pickle names.

Containers become lists of pairs, so that nothing is hashed; names and shapes have a limit. So time
and memory are at most in proportion to the pickle's length: see pickle_machine.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pickle import UnpicklingError
from typing import IO, TYPE_CHECKING, Any

from ioshape._formats.pickle_machine import BUILTINS, MOST_DIMENSIONS, Global, Machine
from ioshape._load.collector import collector_rests

if TYPE_CHECKING:
    from collections.abc import Iterator

_MAX_DEPTH = 400
_LONGEST_NAME = 1000
_LONGEST_KEY = 255
# The list of tensors has at most so many characters, and as many more as the file has bytes.
_LISTED_CHARACTERS = 1 << 24
# What a tensor in the list takes besides its names.
_TENSOR_CHARACTERS = 64

_DTYPES = {
    "ByteStorage": "uint8",
    "CharStorage": "int8",
    "ShortStorage": "int16",
    "IntStorage": "int32",
    "LongStorage": "int64",
    "HalfStorage": "float16",
    "FloatStorage": "float32",
    "DoubleStorage": "float64",
    "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
    "BoolStorage": "bool",
    "BFloat16Storage": "bfloat16",
    "QUInt8Storage": "quint8",
    "QInt8Storage": "qint8",
    "QInt32Storage": "qint32",
    "UntypedStorage": "uint8",
}

_ITEM_BYTES = {
    **dict.fromkeys(("bool", "uint8", "int8", "quint8", "qint8", "bits8", "float4_e2m1fn_x2"), 1),
    **dict.fromkeys(("uint16", "int16", "float16", "bfloat16", "bits16"), 2),
    **dict.fromkeys(("uint32", "int32", "float32", "complex32", "qint32"), 4),
    **dict.fromkeys(("uint64", "int64", "float64", "complex64"), 8),
    "complex128": 16,
}


def item_bytes(dtype: str) -> int | None:
    """Bytes of an element; None if that is not known."""
    return 1 if dtype.startswith("float8_") else _ITEM_BYTES.get(dtype)


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
    #: of its first element in the record, in bytes
    storage_offset: int
    #: where it was when it was saved: "cpu", "cuda:0"
    location: str
    #: whether its elements are numbers that lie there as they are. They are not in a tensor that is
    #: quantized or a conjugate, and a storage by itself has none.
    is_plain: bool = True


# ---- What stands for what the pickle makes -----------------------------------------------------


class _Parts(list[Any]):
    """Stands for a dict, or for what a global makes: key and value of each part, in turn."""

    __slots__ = ()


#: A key: the parts of what stands behind it are parts of this one.
_SAME = object()


@dataclass(frozen=True, slots=True)
class _Storage:
    kind: str
    record: str
    location: str


@dataclass(frozen=True, slots=True)
class _View:
    storage: _Storage
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset_bytes: int
    is_plain: bool
    #: of a quantized tensor: may have tensors of its own
    quantizer: Any


def _is_number(value: Any) -> bool:
    return type(value) is int and value.bit_length() < 64


def _numbers(value: Any) -> tuple[int, ...] | None:
    if not isinstance(value, (tuple, list)) or len(value) > MOST_DIMENSIONS:
        return None
    return tuple(value) if all(_is_number(number) for number in value) else None


#: Which argument says that a tensor is the conjugate of what lies there, or the negative of it.
_FLAGS_AT = {"_rebuild_tensor": 4, "_rebuild_tensor_v2": 6, "_rebuild_tensor_v3": 7}


def _view(function: str, arguments: tuple[Any, ...]) -> _View | None:
    """What torch._utils._rebuild_... makes, if it is a tensor in a storage."""
    if len(arguments) < 4:
        return None
    storage, offset, shape, stride = arguments[:4]
    if not isinstance(storage, _Storage) or not _is_number(offset):
        return None
    dtype = _DTYPES.get(storage.kind, storage.kind)
    for argument in arguments[4:8]:  # _rebuild_tensor_v3 says the dtype itself
        if isinstance(argument, Global) and argument.module == "torch":
            dtype = argument.name
    quantizer = arguments[4] if function == "_rebuild_qtensor" and len(arguments) > 4 else None
    lengths, steps = _numbers(shape), _numbers(stride)
    flags = _FLAGS_AT.get(function)
    is_plain = (
        flags is not None
        and not (len(arguments) > flags and arguments[flags])
        and lengths is not None
        and steps is not None
        and len(lengths) == len(steps)
        and all(number >= 0 for number in (offset, *lengths, *steps))
    )
    offset_bytes = offset * (item_bytes(dtype) or 1)
    return _View(storage, dtype, lengths or (), steps or (), offset_bytes, is_plain, quantizer)


def _made(function: Any, arguments: tuple[Any, ...]) -> Any:
    """What a call makes, as far as a list of tensors needs it."""
    if isinstance(function, Global):
        name = function.name
        if function.module == "torch._utils":
            if name in ("_rebuild_parameter", "_rebuild_parameter_with_state"):
                return arguments[0] if arguments else None
            view = _view(name, arguments) if name.startswith("_rebuild") else None
            if view is not None:
                return view
        elif function.module in BUILTINS and name in ("set", "frozenset"):
            return arguments[0] if arguments else ()
    parts = _Parts()
    if arguments:
        parts += (_SAME, arguments)
    if not isinstance(function, Global):
        parts += (_SAME, (function,))
    return parts


def _storage(reference: Any) -> _Storage:
    """What a persistent id stands for."""
    if isinstance(reference, tuple) and len(reference) >= 4 and reference[0] == "storage":
        kind, key, location = reference[1:4]
        kind = kind.name if isinstance(kind, Global) else kind
        texts = all(isinstance(text, str) for text in (kind, key, location))
        if texts and len(key) <= _LONGEST_KEY:
            return _Storage(kind, f"data/{key}", location)
    raise UnpicklingError("a reference that is not to a storage")


class _Machine(Machine):
    """Makes what a list of tensors needs."""

    def call(self, function: Any, arguments: tuple[Any, ...], named: Any = None) -> Any:
        """Return a tensor, or the parts of what else is made."""
        made = _made(function, arguments)
        if named is not None:
            self.build(made, named)
        return made

    def build(self, to: Any, state: Any) -> None:
        """Give its state to an object."""
        if not isinstance(to, _Parts):
            return
        # The state of an object with slots is a pair: its __dict__, and its slots.
        for some in state if isinstance(state, tuple) and len(state) == 2 else (state,):
            if some is not None:
                to += (_SAME if isinstance(some, _Parts) else "state", some)

    def refer(self, reference: Any) -> Any:
        """Return a storage."""
        return _storage(reference)

    def new_dict(self) -> Any:
        """Return the parts of an empty dict."""
        return _Parts()

    def set_items(self, to: Any, values: list[Any]) -> None:
        """Add to what stands for a dict, or for an object that is like one."""
        if not isinstance(to, _Parts) or len(values) % 2:
            raise UnpicklingError("it sets items of what is no dict")
        to += values

    def append(self, to: Any, values: list[Any]) -> None:
        """Add to a list or set, or to what stands for an object that is like one."""
        if isinstance(to, _Parts):
            to += itertools.chain.from_iterable(enumerate(values, len(to) // 2))
        elif type(to) is list:
            to.extend(values)
        else:
            raise UnpicklingError("it appends to what is no list")

    add = append

    def new_set(self, values: Any = (), kind: type = set) -> Any:
        """Return a list."""
        del kind
        return list(values)


# ---- The list ----------------------------------------------------------------------------------


def _shown(key: Any) -> str:
    """A key that is no text."""
    if isinstance(key, tuple):
        return f"({', '.join('...' if isinstance(k, tuple) else _shown(k) for k in key[:8])})"
    if key is None or isinstance(key, (bool, float)) or _is_number(key):
        return repr(key)
    return repr(key[:_LONGEST_KEY]) if isinstance(key, (str, bytes, bytearray)) else "..."


def _join(path: str, key: Any) -> str:
    if key is _SAME:
        return path
    if isinstance(key, str):
        name = f"{path}.{key[:_LONGEST_NAME]}" if path else key
    else:
        name = f"{path}[{_shown(key)}]"
    return name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 3]}..."


def _children(value: Any) -> Iterator[tuple[Any, Any]] | None:
    if isinstance(value, _Parts):
        one = iter(value)
        return zip(one, one, strict=True)
    if isinstance(value, (list, tuple)):
        return enumerate(value)
    return iter((("quantizer", value.quantizer),)) if isinstance(value, _View) else None


def _leaves(root: Any) -> Iterator[tuple[str, _View | _Storage]]:
    """All that lie below, with their names; each container is looked into once, in order."""
    seen: set[int] = set()
    stack = [("", iter([(_SAME, root)]))]
    while stack:
        path, children = stack[-1]
        for key, value in children:
            if isinstance(value, (_View, _Storage)):
                yield _join(path, key), value
            inside = _children(value)
            if inside is not None and id(value) not in seen and len(stack) <= _MAX_DEPTH:
                seen.add(id(value))
                stack.append((_join(path, key), inside))
                break
        else:
            stack.pop()


def list_tensors(pickled: IO[bytes], file_bytes: int) -> tuple[Tensor, ...]:
    """Return the tensors of a pickle, in its order; its file has `file_bytes`.

    Raises:
        Exception: whatever is wrong with it.
    """
    listed = []
    left = _LISTED_CHARACTERS + file_bytes
    with collector_rests():
        root = _Machine(pickled).read()
    for name, leaf in _leaves(root):
        if isinstance(leaf, _View):
            at = leaf.storage
            tensor = Tensor(
                name,
                leaf.dtype,
                leaf.shape,
                leaf.stride,
                at.record,
                leaf.offset_bytes,
                at.location,
                leaf.is_plain,
            )
        else:
            tensor = Tensor(name, "uint8", (), (), leaf.record, 0, leaf.location, is_plain=False)
        listed.append(tensor)
        texts = (tensor.name, tensor.dtype, tensor.record, tensor.location)
        left -= _TENSOR_CHARACTERS + sum(map(len, texts))
        if left < 0:
            raise UnpicklingError("it names too many tensors for a file of this length")
    return tuple(listed)
