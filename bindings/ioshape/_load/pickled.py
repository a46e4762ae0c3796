# SPDX-License-Identifier: Apache-2.0
"""A list of the tensors in a pickle, made without unpickling it.

Containers become lists of pairs, so that nothing is hashed. Names and shapes have limits. So time
and memory are at most proportional to the length of the pickle; see pickle_machine.
"""

from __future__ import annotations

import io
import itertools
from dataclasses import dataclass, replace
from pickle import UnpicklingError
from typing import IO, TYPE_CHECKING, Any

from ioshape._formats.pickle_machine import BUILTINS, MOST_DIMENSIONS, Global, Machine
from ioshape._load.collector import collector_rests

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_MAX_DEPTH = 400
_LONGEST_NAME = 1000
_LONGEST_KEY = 255
# The list of tensors has at most this many characters, plus one for each byte of the file.
_LISTED_CHARACTERS = 1 << 24
# the characters that count for a tensor beside its names
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
    """Return the size of an element in bytes; None if it is unknown."""
    return 1 if dtype.startswith("float8_") else _ITEM_BYTES.get(dtype)


def is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Return whether elements fill a range of memory, in any order of the dimensions."""
    expected = 1
    for step, length in sorted(zip(stride, shape, strict=True)):
        if length != 1 and step != expected:
            return False
        expected *= length
    return True


@dataclass(frozen=True)
class Tensor:
    """A tensor in a pickle, and the location of its storage."""

    #: The path to it in the loaded object: "model.layer.weight", "optimizer.state[0].exp_avg".
    name: str
    #: The dtype without the "torch." in front: "bfloat16".
    dtype: str
    #: The lengths of its dimensions, in elements.
    shape: tuple[int, ...]
    #: The distance between neighbours in each dimension, in elements.
    stride: tuple[int, ...]
    #: The name of the record with its storage, which other tensors may share.
    record: str
    #: The offset of its first element in the record, in bytes.
    storage_offset: int
    #: The device that it was on when it was saved: "cpu", "cuda:0".
    location: str
    #: Whether the bytes in the record are its elements. This is False for quantized tensors, lazy
    #: conjugates and negatives, and for a storage without a tensor.
    is_plain: bool = True


# ---- Placeholders for the objects of a pickle --------------------------------------------------


class _Parts(list[Any]):
    """Placeholder for a dict or for a global's result: key and value of each part, in turn."""

    __slots__ = ()


#: A key whose value is not a part of its own: the parts of the value belong to this object.
_SAME = object()


@dataclass(frozen=True, slots=True)
class _Storage:
    kind: str
    record: str
    location: str


@dataclass(frozen=True, slots=True)
class _View:
    #: the tensor without its name
    tensor: Tensor
    #: the quantizer of a quantized tensor, which may contain tensors
    quantizer: Any


def _is_number(value: Any) -> bool:
    return type(value) is int and value.bit_length() < 64


def _numbers(value: Any) -> tuple[int, ...] | None:
    if not isinstance(value, (tuple, list)) or len(value) > MOST_DIMENSIONS:
        return None
    return tuple(value) if all(_is_number(number) for number in value) else None


#: The index of the argument that marks a tensor as a lazy conjugate or negative, by function.
_FLAGS_AT = {"_rebuild_tensor": 4, "_rebuild_tensor_v2": 6, "_rebuild_tensor_v3": 7}


def _view(function: str, arguments: tuple[Any, ...]) -> _View | None:
    """Return the result of torch._utils._rebuild_..., or None if it is no tensor in a storage."""
    if len(arguments) < 4:
        return None
    storage, offset, shape, stride = arguments[:4]
    if not isinstance(storage, _Storage) or not _is_number(offset):
        return None
    dtype = _DTYPES.get(storage.kind, storage.kind)
    for argument in arguments[4:8]:  # _rebuild_tensor_v3 has a dtype among its arguments
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
    tensor = Tensor(
        "",
        dtype,
        lengths or (),
        steps or (),
        storage.record,
        offset * (item_bytes(dtype) or 1),
        storage.location,
        is_plain,
    )
    return _View(tensor, quantizer)


def _made(function: Any, arguments: tuple[Any, ...]) -> Any:
    """Return a placeholder for the result of a call, as far as a list of tensors needs it."""
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
    """Return the storage that a persistent id refers to."""
    if isinstance(reference, tuple) and len(reference) >= 4 and reference[0] == "storage":
        kind, key, location = reference[1:4]
        kind = kind.name if isinstance(kind, Global) else kind
        texts = all(isinstance(text, str) for text in (kind, key, location))
        if texts and len(key) <= _LONGEST_KEY:
            return _Storage(kind, f"data/{key}", location)
    raise UnpicklingError("it has a reference to something that is not a storage")


class _Machine(Machine):
    """A pickle machine that creates only what a list of tensors needs."""

    def call(self, function: Any, arguments: tuple[Any, ...], named: Any = None) -> Any:
        """Return a tensor, or a placeholder with the parts of any other object."""
        made = _made(function, arguments)
        if named is not None:
            self.build(made, named)
        return made

    def build(self, to: Any, state: Any) -> None:
        """Add an object's state to its parts."""
        if not isinstance(to, _Parts):
            return
        # The state of an object with slots is a pair of its __dict__ and its slots.
        for some in state if isinstance(state, tuple) and len(state) == 2 else (state,):
            if some is not None:
                to += (_SAME if isinstance(some, _Parts) else "state", some)

    def refer(self, reference: Any) -> Any:
        """Return the storage for a persistent id."""
        return _storage(reference)

    def new_dict(self) -> Any:
        """Return the placeholder for an empty dict."""
        return _Parts()

    def set_items(self, to: Any, values: list[Any]) -> None:
        """Add items to the placeholder for a dict, or for an object like a dict."""
        if not isinstance(to, _Parts) or len(values) % 2:
            raise UnpicklingError("it sets items of something that is not a dict")
        to += values

    def append(self, to: Any, values: list[Any]) -> None:
        """Add values to a list or set, or to the placeholder for an object like a list."""
        if isinstance(to, _Parts):
            to += itertools.chain.from_iterable(enumerate(values, len(to) // 2))
        elif type(to) is list:
            to.extend(values)
        else:
            raise UnpicklingError("it appends to something that is not a list")

    add = append

    def new_set(self, values: Any = (), kind: type = set) -> Any:
        """Return a list in the place of a set."""
        del kind
        return list(values)


# ---- The list of tensors -----------------------------------------------------------------------


def _shown(key: Any) -> str:
    """Return the text for a key that is not a str."""
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
    """Yield all tensors and storages below an object with their names. Visit a container once."""
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
    """Return the tensors of a pickle, in its order. `file_bytes` is the size of its file.

    Raises:
        Exception: The pickle is malformed, in whatever way.
    """
    listed = []
    left = _LISTED_CHARACTERS + file_bytes
    with collector_rests():
        root = _Machine(pickled).read()
    for name, leaf in _leaves(root):
        if isinstance(leaf, _View):
            tensor = replace(leaf.tensor, name=name)
        else:
            tensor = Tensor(name, "uint8", (), (), leaf.record, 0, leaf.location, is_plain=False)
        listed.append(tensor)
        texts = (tensor.name, tensor.dtype, tensor.record, tensor.location)
        left -= _TENSOR_CHARACTERS + sum(map(len, texts))
        if left < 0:
            raise UnpicklingError("it names too many tensors for a file of this length")
    return tuple(listed)


def names_of_records(pickle: bytes) -> dict[str, str]:
    """Return the name of the first tensor in each record of a pickle, by the record's name."""
    names: dict[str, str] = {}
    for tensor in list_tensors(io.BytesIO(pickle), len(pickle)):
        names.setdefault(tensor.record, tensor.name)
    return names
