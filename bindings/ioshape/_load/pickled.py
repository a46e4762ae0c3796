# SPDX-License-Identifier: Apache-2.0
"""The tensors that a pickle names, whoever wrote it.

Nothing of it is run or imported, and nothing of it is compared, hashed, copied or printed that may
hold something of its own: a few bytes can make tuples in which a tuple occurs 2^40 times. So time
and memory are at most in proportion to its length.
"""

from __future__ import annotations

import pickletools
from dataclasses import dataclass
from pickle import UnpicklingError
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# Half a million tensors take so many.
_MOST_OPERATIONS = 1 << 24
_MAX_DEPTH = 400
_MOST_DIMENSIONS = 64
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


class _Parts(list[tuple[Any, Any]]):
    """Stands for a dict, or for what a global makes: what it holds, with the key of each."""

    __slots__ = ()


#: A key: the parts of what stands behind it are parts of this one.
_SAME = object()


@dataclass(frozen=True, slots=True)
class _Global:
    module: str
    name: str


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
    if not isinstance(value, (tuple, list)) or len(value) > _MOST_DIMENSIONS:
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
        if isinstance(argument, _Global) and argument.module == "torch":
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


def _made(function: Any, arguments: Any) -> Any:
    """What a call makes, as far as a list of tensors needs it."""
    if not isinstance(arguments, tuple):
        raise UnpicklingError("a call without a tuple of arguments")
    if isinstance(function, _Global):
        name = function.name
        if function.module == "torch._utils":
            if name in ("_rebuild_parameter", "_rebuild_parameter_with_state"):
                return arguments[0] if arguments else None
            view = _view(name, arguments) if name.startswith("_rebuild") else None
            if view is not None:
                return view
        elif function.module in ("builtins", "__builtin__") and name in ("set", "frozenset"):
            return arguments[0] if arguments else ()
    parts = _Parts()
    if arguments:
        parts.append((_SAME, arguments))
    if not isinstance(function, _Global):
        parts.append((_SAME, (function,)))
    return parts


def _storage(reference: Any) -> _Storage:
    """What a persistent id stands for."""
    if isinstance(reference, tuple) and len(reference) >= 4 and reference[0] == "storage":
        kind, key, location = reference[1:4]
        kind = kind.name if isinstance(kind, _Global) else kind
        texts = all(isinstance(text, str) for text in (kind, key, location))
        if texts and len(key) <= _LONGEST_KEY:
            return _Storage(kind, f"data/{key}", location)
    raise UnpicklingError("a reference that is not to a storage")


# ---- Operations --------------------------------------------------------------------------------


class _Machine:
    """The stack of a pickle, the marks on it, and what it remembers."""

    def __init__(self, most_memos: int) -> None:
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: list[Any] = []
        # Pickles number what they remember from 0 or 1 on.
        self._most_memos = most_memos

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def pop(self) -> Any:
        return self.stack.pop()

    def pop_or_unmark(self) -> None:
        if self.marks and self.marks[-1] == len(self.stack):
            self.marks.pop()
        else:
            self.stack.pop()

    def to_mark(self) -> list[Any]:
        """What is above the mark, which goes."""
        mark = self.marks.pop()
        values = self.stack[mark:]
        del self.stack[mark:]
        return values

    def last(self, count: int) -> list[Any]:
        """As many from the top as there are in every sound pickle."""
        values = self.stack[-count:]
        del self.stack[-count:]
        return values

    def put(self, index: int) -> None:
        if not 0 <= index <= self._most_memos:
            raise UnpicklingError("it numbers what it remembers beyond its length")
        self.memo.extend([None] * (index + 1 - len(self.memo)))
        self.memo[index] = self.stack[-1]

    def add(self, values: list[Any]) -> None:
        """To a list or set, or to what stands for an object that is like one."""
        to = self.stack[-1]
        if isinstance(to, _Parts):
            to.extend(enumerate(values, len(to)))
        elif isinstance(to, list):
            to.extend(values)
        else:
            raise UnpicklingError("it appends to what is no list")

    def set_items(self, values: list[Any]) -> None:
        to = self.stack[-1]
        if not isinstance(to, _Parts):
            raise UnpicklingError("it sets items of what is no dict")
        to.extend(zip(values[::2], values[1::2]))  # noqa: B905 - of a sound one both are as long

    def make_dict(self) -> None:
        values = self.to_mark()
        self.push(_Parts())
        self.set_items(values)

    def find(self) -> None:
        module, name = self.last(2)
        if not isinstance(name, str) or not isinstance(module, str):
            raise UnpicklingError("a global without a name")
        self.push(_Global(module, name))

    def call(self) -> None:
        function, arguments = self.last(2)
        self.push(_made(function, arguments))

    def call_with_names(self) -> None:
        function, arguments, named = self.last(3)
        self.push(_made(function, arguments))
        self.build(named)

    def build(self, state: Any) -> None:
        """Gives its state to an object."""
        to = self.stack[-1]
        if not isinstance(to, _Parts):
            return
        # The state of whoever has slots is a pair: what is in __dict__, and what is in the slots.
        for some in state if isinstance(state, tuple) and len(state) == 2 else (state,):
            if some is not None:
                to.append((_SAME if isinstance(some, _Parts) else "state", some))


def _global(argument: str) -> _Global:
    module, _, name = argument.partition(" ")
    return _Global(module, name)


# Those that push what stands behind them in the pickle.
_LITERALS = frozenset(
    opcode.name
    for opcode in pickletools.opcodes
    if opcode.arg and opcode.stack_after and not opcode.stack_before
) - {"GET", "BINGET", "LONG_BINGET", "EXT1", "EXT2", "EXT4", "GLOBAL", "INST", "PERSID"}

_OPERATIONS: dict[str, Callable[[_Machine, Any], object]] = {
    **dict.fromkeys(_LITERALS, _Machine.push),
    **dict.fromkeys(("PROTO", "FRAME", "STOP"), lambda _machine, _argument: None),
    "NONE": lambda machine, _: machine.push(None),
    "NEWTRUE": lambda machine, _: machine.push(True),
    "NEWFALSE": lambda machine, _: machine.push(False),
    "EMPTY_LIST": lambda machine, _: machine.push([]),
    "EMPTY_SET": lambda machine, _: machine.push([]),
    "EMPTY_TUPLE": lambda machine, _: machine.push(()),
    "EMPTY_DICT": lambda machine, _: machine.push(_Parts()),
    "LIST": lambda machine, _: machine.push(machine.to_mark()),
    "TUPLE": lambda machine, _: machine.push(tuple(machine.to_mark())),
    "FROZENSET": lambda machine, _: machine.push(tuple(machine.to_mark())),
    "TUPLE1": lambda machine, _: machine.push(tuple(machine.last(1))),
    "TUPLE2": lambda machine, _: machine.push(tuple(machine.last(2))),
    "TUPLE3": lambda machine, _: machine.push(tuple(machine.last(3))),
    "DICT": lambda machine, _: machine.make_dict(),
    "APPEND": lambda machine, _: machine.add(machine.last(1)),
    "APPENDS": lambda machine, _: machine.add(machine.to_mark()),
    "ADDITEMS": lambda machine, _: machine.add(machine.to_mark()),
    "SETITEM": lambda machine, _: machine.set_items(machine.last(2)),
    "SETITEMS": lambda machine, _: machine.set_items(machine.to_mark()),
    "MARK": lambda machine, _: machine.marks.append(len(machine.stack)),
    "POP": lambda machine, _: machine.pop_or_unmark(),
    "POP_MARK": lambda machine, _: machine.to_mark(),
    "DUP": lambda machine, _: machine.push(machine.stack[-1]),
    "MEMOIZE": lambda machine, _: machine.put(len(machine.memo)),
    **dict.fromkeys(("PUT", "BINPUT", "LONG_BINPUT"), _Machine.put),
    **dict.fromkeys(
        ("GET", "BINGET", "LONG_BINGET"),
        lambda machine, index: machine.push(machine.memo[index]),
    ),
    "GLOBAL": lambda machine, argument: machine.push(_global(argument)),
    "STACK_GLOBAL": lambda machine, _: machine.find(),
    "REDUCE": lambda machine, _: machine.call(),
    "NEWOBJ": lambda machine, _: machine.call(),
    "NEWOBJ_EX": lambda machine, _: machine.call_with_names(),
    "INST": lambda machine, argument: machine.push(
        _made(_global(argument), tuple(machine.to_mark()))
    ),
    "BUILD": lambda machine, _: machine.build(machine.pop()),
    "BINPERSID": lambda machine, _: machine.push(_storage(machine.pop())),
}


def _read(pickled: IO[bytes], n_bytes: int) -> Any:
    machine = _Machine(n_bytes)
    left = _MOST_OPERATIONS
    for opcode, argument, _position in pickletools.genops(pickled):
        operation = _OPERATIONS.get(opcode.name)
        left -= 1
        if operation is None or not left:
            raise UnpicklingError(
                f"{opcode.name} is nothing that torch writes" if left else "it is too long"
            )
        operation(machine, argument)
    return machine.pop()


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
        return iter(value)
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


def list_tensors(pickled: IO[bytes], n_bytes: int, file_bytes: int) -> tuple[Tensor, ...]:
    """The tensors of a pickle of `n_bytes`, in its order; its file has `file_bytes`.

    Raises:
        Exception: whatever is wrong with it.
    """
    listed = []
    left = _LISTED_CHARACTERS + file_bytes
    for name, leaf in _leaves(_read(pickled, n_bytes)):
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
