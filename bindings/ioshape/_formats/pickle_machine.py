# SPDX-License-Identifier: Apache-2.0
"""An interpreter of pickles that gives them no access to objects of the process.

A pickle is a program. Python's unpickler gives that program real classes and functions, and lets it
call them and set their attributes. This interpreter gives it names instead. A subclass decides what
the call of a name returns, and what a state does to an object.

Time and memory are proportional to the bytes of the pickle that were read, whatever it contains:

- The file is read in pieces, so a refused file costs no more than the part before the refusal.
- The index of a memo entry must not exceed the number of bytes read so far.
- After half a million containers, each further one must take some bytes of the pickle.
- A call that copies data is limited, because a few bytes can call a set of the same list again.
- Keys are hashed only if that takes a short, constant time, and few keys may have equal hashes.
- Values that may contain others are never compared, copied or printed, because a few bytes can
  build tuples in which one tuple occurs 2^40 times.
"""

from __future__ import annotations

import pickle
import struct
from collections import OrderedDict
from collections.abc import Callable, Iterable
from functools import partial
from pickle import UnpicklingError
from typing import IO, Any

#: the most dimensions of a tensor, as IOSHAPE_MAX_DIMS
MOST_DIMENSIONS = 64

#: names of the module of built-in functions: in Python 3, and in protocols before 3
BUILTINS = ("builtins", "__builtin__")
#: functions by which protocols before 4 make sets
SETS: dict[tuple[str, str], type] = {
    (module, kind.__name__): kind for module in BUILTINS for kind in (set, frozenset)
}

_CHUNK_BYTES = 1 << 20
_LONGEST_LINE = 4000
# This margin holds every line, and every argument other than text or bytes.
_MARGIN_BYTES = _LONGEST_LINE + 64
_FREE_CONTAINERS = 1 << 19
# DCP's descriptions have one container in 12 bytes, and pickles of tensors have one in 17.
_CONTAINER_BYTES = 6
# Copying this many characters or elements in a call counts as one container.
_COPIED = 8
_SIZED = frozenset({str, bytes, bytearray, list, tuple})
_MOST_KEY_PARTS = 64
_MOST_EQUAL_HASHES = 64
_MOST_KEY_BITS = 64
# Below this value an integer is its own hash.
_OWN_HASH = (1 << 61) - 1
_ENDED = 1 << 62


class Global:
    """The name of a class or function.

    `make` is called instead of it, unless it is None. `new` makes an object without a state, and is
    the same as `make` by default.
    """

    __slots__ = ("make", "module", "name", "new")

    def __init__(
        self,
        module: str,
        name: str,
        make: Callable[..., Any] | None = None,
        new: Callable[..., Any] | None = None,
    ) -> None:
        self.module = module
        self.name = name
        self.make = make
        self.new = new or make


class Inert:
    """Placeholder for an object that a reader does not create. It ignores its items and state."""

    __slots__ = ()


class Machine:
    """The interpretation of one pickle.

    A subclass overrides the hooks find(), call(), new(), build() and refer(). If it does not want
    Python's own containers, it also overrides the functions that create and fill them.
    """

    #: types of keys that hash in a short time, and whose hashes the file cannot choose
    plain_keys: frozenset[type] = frozenset({str, bytes, bool, float, type(None)})

    def __init__(self, file: IO[bytes]) -> None:
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: list[Any] = []
        #: number of containers and objects made so far, plus the number of times that one grew
        self.made = 0
        #: the bytes of the file in memory, and the offset in the file of the first of them
        self.data = b""
        self.offset = 0
        self._file = file
        self._globals: dict[tuple[str, str], Any] = {}
        self._hashes: dict[int, int] = {}

    def read(self) -> Any:
        """Run the pickle and return its result.

        Raises:
            UnpicklingError: The pickle is damaged, exceeds a limit, or a hook refuses a part of it.
        """
        try:
            self._run()
            return self.stack.pop()
        except (IndexError, struct.error):
            raise UnpicklingError("it is damaged") from None

    def _run(self) -> None:
        operations, stack, memo = _OPERATIONS, self.stack, self.memo
        memoize, get = pickle.MEMOIZE[0], pickle.BINGET[0]
        at = 0
        while True:
            piece = self._file.read(_CHUNK_BYTES)
            data = self.data = self.data[at:] + piece
            self.offset += at
            self._check_made()
            at, last = 0, len(data) if len(piece) < _CHUNK_BYTES else len(data) - _MARGIN_BYTES
            while at < last:
                code = data[at]
                at += 1
                # These two operations are two fifths of all operations of a checkpoint.
                if code == memoize:
                    memo.append(stack[-1])
                elif code == get:
                    stack.append(memo[data[at]])
                    at += 1
                else:
                    at = operations[code](self, at)
            if at >= _ENDED:
                return
            if last == len(data) and len(piece) < _CHUNK_BYTES:
                raise UnpicklingError("it ends too early")

    def _check_made(self) -> None:
        if self.made > _FREE_CONTAINERS + self.offset // _CONTAINER_BYTES:
            raise UnpicklingError("it makes too many objects for its length")

    def _make(self, make: Callable[..., Any], arguments: tuple[Any, ...], named: Any) -> Any:
        """Call a function, unless it could copy too much for the length of the pickle."""
        if named:
            if type(named) is not dict:
                raise UnpicklingError("it names arguments by something that is not a dict")
            make = partial(make, **named)
        if arguments or named:
            given = (*arguments, *named.values()) if named else arguments
            count = len(given) + sum(len(value) for value in given if type(value) in _SIZED)
            if count >= _COPIED:
                self.made += count // _COPIED
                self._check_made()
        return make(*arguments)

    # ---- Hooks ----------------------------------------------------------------------------------

    def find(self, module: str, name: str) -> Any:
        """Return the object for a class or function. It is called once for each name."""
        return Global(module, name)

    def call(self, function: Any, arguments: tuple[Any, ...], named: Any = None) -> Any:
        """Return the result of a call."""
        if type(function) is Global and function.make is not None:
            return self._make(function.make, arguments, named)
        if isinstance(function, Inert):
            return function
        raise UnpicklingError("it calls something that is not a function")

    def new(self, kind: Any, arguments: tuple[Any, ...], named: Any = None) -> Any:
        """Return a new object of a class, before its state is set."""
        if type(kind) is Global and kind.new is not None:
            return self._make(kind.new, arguments, named)
        return self.call(kind, arguments, named)

    def build(self, to: Any, _state: Any) -> None:
        """Set the state of an object."""
        if not isinstance(to, Inert):
            raise UnpicklingError("it sets the state of an object without one")

    def refer(self, _reference: Any) -> Any:
        """Return the object outside of the pickle that a persistent id refers to."""
        raise UnpicklingError("it refers to an object outside of the pickle")

    def new_dict(self) -> Any:
        """Return an empty dict."""
        return {}

    def set_items(self, to: Any, values: list[Any]) -> None:
        """Set items of a dict. `values` are keys and values in turn."""
        if type(to) is dict or type(to) is OrderedDict:
            keys = values[::2]
            self.check_keys(keys)
            to.update(zip(keys, values[1::2], strict=True))
        else:
            self.set_other_items(to, values)

    def set_other_items(self, to: Any, _values: list[Any]) -> None:
        """Set items of an object that is not a dict."""
        if not isinstance(to, Inert):
            raise UnpicklingError("it sets items of something that is not a dict")

    def append(self, to: Any, values: list[Any]) -> None:
        """Append values to a list."""
        if type(to) is list:
            to.extend(values)
        elif not isinstance(to, Inert):
            raise UnpicklingError("it appends to something that is not a list")

    def new_set(self, values: Any = (), kind: type = set) -> Any:
        """Return a set or frozenset."""
        if type(values) is not list and type(values) is not tuple:
            raise UnpicklingError("it makes a set of something that is not a list")
        self.check_keys(values)
        return kind(values)

    def add(self, to: Any, values: list[Any]) -> None:
        """Add members to a set."""
        if type(to) is set:
            self.check_keys(values)
            to.update(values)
        elif not isinstance(to, Inert):
            raise UnpicklingError("it adds to something that is not a set")

    # ---- Keys -----------------------------------------------------------------------------------

    def check_keys(self, keys: Iterable[Any]) -> None:
        """Refuse keys that could slow a dict or set down."""
        plain = self.plain_keys
        for key in keys:
            if type(key) not in plain:
                self.check_key(key)

    def check_key(self, key: Any) -> None:
        """Refuse a key that is not plain and that could slow a dict or set down."""
        if type(key) is not int or not -_OWN_HASH < key < _OWN_HASH:
            self._check_parts(key)
            self.count_hash(key)

    def _check_parts(self, key: Any) -> None:
        left, parts = [key], 0
        while left:
            part = left.pop()
            parts += 1
            if type(part) is tuple and len(part) <= _MOST_KEY_PARTS:
                left += part
            elif type(part) is int:
                parts += _MOST_KEY_PARTS * (part.bit_length() > _MOST_KEY_BITS)
            elif type(part) not in self.plain_keys:
                raise UnpicklingError("it has a key that is not a text, number or short tuple")
            if parts > _MOST_KEY_PARTS:
                raise UnpicklingError("it has a key that is too long")

    def count_hash(self, key: Any) -> None:
        """Refuse too many keys with equal hashes. Each of them is compared with all before it."""
        own = hash(key)
        count = self._hashes[own] = self._hashes.get(own, 0) + 1
        if count > _MOST_EQUAL_HASHES:
            raise UnpicklingError("it has too many keys that collide")

    # ---- Helpers of the operations --------------------------------------------------------------

    def to_mark(self) -> list[Any]:
        """Remove the last mark, and return the values above it."""
        mark = self.marks.pop()
        values = self.stack[mark:]
        del self.stack[mark:]
        return values

    def put(self, index: int, at: int) -> None:
        """Store the top of the stack in the memo. `at` is the offset in `data`, for the limit."""
        memo = self.memo
        if index < len(memo):
            memo[index] = self.stack[-1]
            return
        if index > self.offset + at:
            raise UnpicklingError("it has a memo number larger than its length")
        memo.extend([None] * (index - len(memo)))
        memo.append(self.stack[-1])

    def look_up(self, module: Any, name: Any) -> Any:
        """Return the result of find() for a name, from a cache."""
        if type(module) is not str or type(name) is not str:
            raise UnpicklingError("it has a name that is not text")
        found = self._globals.get((module, name))
        if found is None:
            found = self._globals[module, name] = self.find(module, name)
            self.made += 1
        return found

    def take(self, at: int, n_bytes: int) -> tuple[bytes, int]:
        """Return `n_bytes` bytes, and the offset of the next operation."""
        end = at + n_bytes
        piece = self.data[at:end]
        if len(piece) == n_bytes:
            return piece, end
        # Memory is allocated only for bytes that were read.
        pieces, left = [piece], n_bytes - len(piece)
        while left:
            piece = self._file.read(min(left, _CHUNK_BYTES))
            if not piece:
                raise UnpicklingError("it ends too early")
            pieces.append(piece)
            left -= len(piece)
        self.offset += end - len(self.data)
        return b"".join(pieces), len(self.data)

    def line(self, at: int) -> tuple[str, int]:
        """Return a line, and the offset of the next one."""
        end = self.data.find(b"\n", at, at + _LONGEST_LINE)
        if end < 0:
            raise UnpicklingError("it has a line that is too long")
        return str(self.data[at:end], "utf-8"), end + 1


# ---- Values --------------------------------------------------------------------------------------


def is_count(value: object) -> bool:
    """Return whether a value can be a number of bytes or elements, or an offset."""
    return type(value) is int and 0 <= value < 1 << 63


def lengths_of(value: Any = ()) -> tuple[int, ...]:
    """Return the shape of a tensor; refuse a value that cannot be one."""
    wrong = UnpicklingError("it has a shape that is not valid")
    if type(value) not in (tuple, list) or len(value) > MOST_DIMENSIONS:
        raise wrong
    product = 1
    for length in value:
        if type(length) is not int or not 0 <= length < 1 << 63:
            raise wrong
        product *= length or 1  # torch also refuses such a product if another length is 0
        if product >= 1 << 63:
            raise wrong
    return tuple(value)


# ---- Operations ----------------------------------------------------------------------------------

#: It gets the offset of its argument in `data`, and returns the offset of the next operation.
_Operation = Callable[[Machine, int], int]


def _refused(machine: Machine, at: int) -> int:
    raise UnpicklingError(f"byte {machine.offset + at - 1} is not an operation of a checkpoint")


def _pushes(value: Any) -> _Operation:
    def push(machine: Machine, at: int) -> int:
        machine.stack.append(value)
        return at

    return push


def _skips(n_bytes: int) -> _Operation:
    return lambda _machine, at: at + n_bytes


def _byte(machine: Machine, at: int) -> int:
    machine.stack.append(machine.data[at])
    return at + 1


def _number(form: str) -> _Operation:
    number = struct.Struct(form)
    width, unpack = number.size, number.unpack_from

    def push(machine: Machine, at: int) -> int:
        machine.stack.append(unpack(machine.data, at)[0])
        return at + width

    return push


def _counted(width: int, decode: Callable[[bytes], Any]) -> _Operation:
    """Return an operation that reads bytes with their number before them."""

    def push(machine: Machine, at: int) -> int:
        begin = at + width
        count = int.from_bytes(machine.data[at:begin], "little")
        piece, end = machine.take(begin, count)
        machine.stack.append(decode(piece))
        return end

    return push


def _text(data: bytes) -> str:
    return str(data, "utf-8", "surrogatepass")


def _long(data: bytes) -> int:
    return int.from_bytes(data, "little", signed=True)


def _from_line(decode: Callable[[str], Any]) -> _Operation:
    def push(machine: Machine, at: int) -> int:
        line, end = machine.line(at)
        machine.stack.append(decode(line))
        return end

    return push


def _decimal(line: str) -> Any:
    return {"00": False, "01": True}.get(line) if line in ("00", "01") else int(line)


def _container(make: Callable[[Machine], Any], weight: int = 1) -> _Operation:
    def push(machine: Machine, at: int) -> int:
        machine.made += weight
        machine.stack.append(make(machine))
        return at

    return push


def _tuple_of_one(machine: Machine, at: int) -> int:
    machine.made += 1
    stack = machine.stack
    stack[-1] = (stack[-1],)
    return at


def _tuple_of_two(machine: Machine, at: int) -> int:
    machine.made += 1
    stack = machine.stack
    last = stack.pop()
    stack[-1] = (stack[-1], last)
    return at


def _tuple_of_three(machine: Machine, at: int) -> int:
    machine.made += 1
    stack = machine.stack
    last, middle = stack.pop(), stack.pop()
    stack[-1] = (stack[-1], middle, last)
    return at


def _dict(machine: Machine, at: int) -> int:
    machine.made += 1
    machine.stack.append(machine.new_dict())
    return at


def _make_dict(machine: Machine) -> Any:
    values = machine.to_mark()
    made = machine.new_dict()
    machine.set_items(made, values)
    return made


def _append(machine: Machine, at: int) -> int:
    machine.made += 1
    value = machine.stack.pop()
    machine.append(machine.stack[-1], [value])
    return at


def _appends(machine: Machine, at: int) -> int:
    machine.made += 1
    values = machine.to_mark()
    machine.append(machine.stack[-1], values)
    return at


def _add_items(machine: Machine, at: int) -> int:
    machine.made += 1
    values = machine.to_mark()
    machine.add(machine.stack[-1], values)
    return at


def _set_item(machine: Machine, at: int) -> int:
    machine.made += 1
    value, key = machine.stack.pop(), machine.stack.pop()
    machine.set_items(machine.stack[-1], [key, value])
    return at


def _set_items(machine: Machine, at: int) -> int:
    machine.made += 1
    values = machine.to_mark()
    machine.set_items(machine.stack[-1], values)
    return at


def _mark(machine: Machine, at: int) -> int:
    machine.marks.append(len(machine.stack))
    return at


def _pop(machine: Machine, at: int) -> int:
    if machine.marks and machine.marks[-1] == len(machine.stack):
        machine.marks.pop()
    else:
        machine.stack.pop()
    return at


def _pop_mark(machine: Machine, at: int) -> int:
    machine.to_mark()
    return at


def _dup(machine: Machine, at: int) -> int:
    machine.stack.append(machine.stack[-1])
    return at


_memory = struct.Struct("<I").unpack_from


def _get(machine: Machine, at: int) -> int:
    machine.stack.append(machine.memo[_memory(machine.data, at)[0]])
    return at + 4


def _get_by_line(machine: Machine, at: int) -> int:
    line, end = machine.line(at)
    machine.stack.append(machine.memo[int(line)])
    return end


def _put(width: int) -> _Operation:
    def put(machine: Machine, at: int) -> int:
        end = at + width
        machine.put(int.from_bytes(machine.data[at:end], "little"), at)
        return end

    return put


def _put_by_line(machine: Machine, at: int) -> int:
    line, end = machine.line(at)
    if not line.isascii() or not line.isdigit():
        raise UnpicklingError("it has a memo number that is not a number")
    machine.put(int(line), at)
    return end


def _global(machine: Machine, at: int) -> int:
    module, at = machine.line(at)
    name, at = machine.line(at)
    machine.stack.append(machine.look_up(module, name))
    return at


def _stack_global(machine: Machine, at: int) -> int:
    name, module = machine.stack.pop(), machine.stack.pop()
    machine.stack.append(machine.look_up(module, name))
    return at


def _arguments(machine: Machine) -> tuple[Any, ...]:
    arguments = machine.stack.pop()
    if type(arguments) is not tuple:
        raise UnpicklingError("it makes a call without a tuple of arguments")
    machine.made += 1
    return arguments


def _reduce(machine: Machine, at: int) -> int:
    arguments = _arguments(machine)
    machine.stack[-1] = machine.call(machine.stack[-1], arguments)
    return at


def _new(machine: Machine, at: int) -> int:
    arguments = _arguments(machine)
    machine.stack[-1] = machine.new(machine.stack[-1], arguments)
    return at


def _new_with_names(machine: Machine, at: int) -> int:
    named = machine.stack.pop()
    arguments = _arguments(machine)
    machine.stack[-1] = machine.new(machine.stack[-1], arguments, named)
    return at


def _build(machine: Machine, at: int) -> int:
    state = machine.stack.pop()
    machine.build(machine.stack[-1], state)
    return at


def _refer(machine: Machine, at: int) -> int:
    machine.made += 1
    machine.stack[-1] = machine.refer(machine.stack[-1])
    return at


_NAMED: dict[bytes, _Operation] = {
    pickle.PROTO: _skips(1),
    pickle.FRAME: _skips(8),
    pickle.STOP: lambda _machine, _at: _ENDED,
    pickle.NONE: _pushes(None),
    pickle.NEWTRUE: _pushes(True),
    pickle.NEWFALSE: _pushes(False),
    pickle.BININT: _number("<i"),
    pickle.BININT1: _byte,
    pickle.BININT2: _number("<H"),
    pickle.LONG1: _counted(1, _long),
    pickle.LONG4: _counted(4, _long),
    pickle.INT: _from_line(_decimal),
    pickle.LONG: _from_line(lambda line: int(line.removesuffix("L"))),
    pickle.FLOAT: _from_line(float),
    pickle.BINFLOAT: _number(">d"),
    pickle.SHORT_BINUNICODE: _counted(1, _text),
    pickle.BINUNICODE: _counted(4, _text),
    pickle.BINUNICODE8: _counted(8, _text),
    pickle.SHORT_BINSTRING: _counted(1, lambda data: str(data, "latin-1")),
    pickle.BINSTRING: _counted(4, lambda data: str(data, "latin-1")),
    pickle.SHORT_BINBYTES: _counted(1, bytes),
    pickle.BINBYTES: _counted(4, bytes),
    pickle.BINBYTES8: _counted(8, bytes),
    pickle.BYTEARRAY8: _counted(8, bytearray),
    pickle.EMPTY_LIST: _container(lambda _machine: []),
    pickle.EMPTY_DICT: _dict,
    pickle.EMPTY_SET: _container(lambda machine: machine.new_set(), weight=3),
    pickle.EMPTY_TUPLE: _pushes(()),
    pickle.LIST: _container(Machine.to_mark),
    pickle.TUPLE: _container(lambda machine: tuple(machine.to_mark())),
    pickle.TUPLE1: _tuple_of_one,
    pickle.TUPLE2: _tuple_of_two,
    pickle.TUPLE3: _tuple_of_three,
    pickle.DICT: _container(_make_dict),
    pickle.FROZENSET: _container(
        lambda machine: machine.new_set(machine.to_mark(), frozenset), weight=3
    ),
    pickle.APPEND: _append,
    pickle.APPENDS: _appends,
    pickle.ADDITEMS: _add_items,
    pickle.SETITEM: _set_item,
    pickle.SETITEMS: _set_items,
    pickle.MARK: _mark,
    pickle.POP: _pop,
    pickle.POP_MARK: _pop_mark,
    pickle.DUP: _dup,
    pickle.GET: _get_by_line,
    pickle.LONG_BINGET: _get,
    pickle.PUT: _put_by_line,
    pickle.BINPUT: _put(1),
    pickle.LONG_BINPUT: _put(4),
    pickle.GLOBAL: _global,
    pickle.STACK_GLOBAL: _stack_global,
    pickle.REDUCE: _reduce,
    pickle.NEWOBJ: _new,
    pickle.NEWOBJ_EX: _new_with_names,
    pickle.BUILD: _build,
    pickle.BINPERSID: _refer,
}
_OPERATIONS = [_NAMED.get(bytes((code,)), _refused) for code in range(256)]
