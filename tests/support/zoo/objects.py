# SPDX-License-Identifier: Apache-2.0
"""Objects of Python and numpy, with and without tensors."""

import argparse
import collections
import copyreg
import dataclasses
import datetime
import decimal
import enum
import fractions
import functools
import operator
import pathlib
import re
import threading
import types
import uuid
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from zoo.cases import case
from zoo.special import Tagged, on_gradient
from zoo.training import Callback

# ---- numpy --------------------------------------------------------------------------------------


@case()
def numpy_arrays() -> Any:
    matrix = np.arange(12, dtype=np.float32).reshape(3, 4)
    kinds = ["?", "i1", "u2", "<i4", "f2", "<f8", "c8", "S3", "U4", "M8[ns]", "m8[s]"]
    return {
        "kinds": [np.arange(6).astype("i8").astype(kind) for kind in kinds],
        "fortran": np.asfortranarray(matrix),
        "nothing": np.zeros((0, 3)),
        "of no dimension": np.array(5.0),
        "structured": np.array([(1, 2.5, "x")], dtype=[("a", "i4"), ("b", "f8"), ("c", "U5")]),
        "objects": np.array([1, "two", None, [3]], dtype=object),
        "masked": np.ma.masked_array(np.arange(4), [True, False, False, True]),
        "large": np.arange(100000),
        "void": np.zeros(2, dtype="V7"),
    }


@case(exact=False)
def numpy_arrays_of_other_forms() -> Any:
    # Swapped bytes come back in this machine's order, slices in one piece.
    return [np.arange(6).astype(">i4"), np.arange(6).astype(">f8"), np.arange(12)[::3]]


@case()
def numpy_scalars() -> Any:
    return [
        np.float16(1.5),
        np.float64(float("nan")),
        np.int8(-3),
        np.uint64(2**64 - 1),
        np.bool_(True),
        np.complex64(1 + 2j),
        np.str_("text"),
        np.bytes_(b"bytes"),
        np.datetime64("2024-05-06"),
        np.dtype("f4"),
        np.dtype([("a", "i4")]),
        np.float32,
    ]


# ---- Python -------------------------------------------------------------------------------------


@dataclasses.dataclass
class Config:
    name: str
    sizes: list[int] = dataclasses.field(default_factory=list)
    weight: Any = None


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    number: int
    tensor: Any


class Point(NamedTuple):
    x: int
    y: Any


class Colour(enum.Enum):
    RED = "r"
    GREEN = 2


class Flag(enum.IntFlag):
    A = 1
    B = 2


class Slotted:
    __slots__ = ("__dict__", "a", "b")

    def __init__(self) -> None:
        self.a, self.b, self.c = 1, torch.arange(3), "c"


class WithState:
    """An object that does not pickle its lock."""

    def __init__(self) -> None:
        self.lock: Any = threading.Lock()
        self.data = torch.arange(5.0)

    def __getstate__(self) -> Any:
        return {"data": self.data, "version": 2}

    def __setstate__(self, state: Any) -> None:
        self.data = state["data"]
        self.lock = threading.Lock()


class Reduced:
    """An object that is built by a function, and then gets state, members and items."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.members: list[Any] = []
        self.items: dict[Any, Any] = {}
        self.note = ""

    def __reduce__(self) -> Any:
        return (
            Reduced,
            (self.tensor,),
            {"note": self.note},
            iter(self.members),
            iter(self.items.items()),
        )

    def append(self, member: Any) -> None:
        self.members.append(member)

    def extend(self, members: Any) -> None:
        self.members.extend(members)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.items[key] = value


class NewArguments:
    """An object that is built with keyword arguments."""

    def __new__(cls, *, size: int) -> "NewArguments":
        made = super().__new__(cls)
        made.size = size
        return made

    size: int

    def __getnewargs_ex__(self) -> Any:
        return (), {"size": self.size}


class MadeAnew:
    """An object whose tensors exist only while it is pickled."""

    def __reduce__(self) -> Any:
        return _made_anew, (torch.arange(1000.0), torch.arange(500.0) * 3)


def _made_anew(_first: Any, _second: Any) -> MadeAnew:
    return MadeAnew()


class TemporaryStorages:
    """An object that makes a storage for each member while it is pickled, so memory could be
    reused.
    """

    def __init__(self, tensors: Any) -> None:
        self.tensors = tensors

    def __reduce__(self) -> Any:
        return TemporaryStorages, ([],), None, (tensor.clone() for tensor in self.tensors)

    def append(self, tensor: Any) -> None:
        self.tensors.append(tensor)

    def extend(self, tensors: Any) -> None:
        self.tensors.extend(tensors)


class Registered:
    """An object that is pickled by a function of copyreg."""

    def __init__(self, value: Any) -> None:
        self.value = value


def _reduce_registered(registered: Registered) -> Any:
    return Registered, (registered.value,)


copyreg.pickle(Registered, _reduce_registered)


class OwnDict(dict[str, Any]):
    """A mapping with an attribute."""


class OwnList(list[Any]):
    """A list with an attribute."""


class OwnString(str):
    """A string with an attribute."""

    __slots__ = ("note",)


class CustomError(Exception):
    """An exception with more attributes."""


@case()
def python_objects() -> Any:
    return {
        "numbers": [0, -1, 255, 2**31, -(2**63), 2**100, 1.5, float("nan"), -0.0, 1 - 2j, True],
        "text": ["", "ascii", "ümläut 漢字 🙂", "\x00\n\r", "x" * 300, "\ud800"],
        "bytes": [b"", b"\x00\xff", bytearray(b"abc"), b"y" * 300],
        "containers": [(), (1,), (1, 2, 3, 4), [], {}, set(), frozenset({1, 2}), {1: {2: [3]}}],
        "set": {1, "two", (3, 4)},
        "keys": {1: 1, "1": 2, (1, 2): 3, None: 4, 2.5: 5, b"b": 6, frozenset({1}): 7},
        "ranges": [range(3), range(1, 10, 2), slice(1, None, 2)],
        "singletons": [None, Ellipsis, NotImplemented],
        "ordered": collections.OrderedDict([("b", 1), ("a", 2)]),
        "default": collections.defaultdict(list, {"a": [1]}),
        "counter": collections.Counter("abca"),
        "deque": collections.deque([1, 2, 3], maxlen=5),
        "path": pathlib.PurePosixPath("a/b"),
        "times": [
            datetime.datetime(2024, 5, 6, 7, 8, tzinfo=datetime.timezone.utc),
            datetime.timedelta(days=2),
            datetime.date(2024, 1, 2),
        ],
        "precise": [decimal.Decimal("1.10"), fractions.Fraction(3, 7)],
        "uuid": uuid.UUID(int=5),
        "namespaces": [argparse.Namespace(a=1), types.SimpleNamespace(b=[2])],
        "pattern": re.compile("a+b"),
        "error": CustomError("what", 3),
    }


@case()
def classes_of_ours() -> Any:
    text = OwnString("text")
    text.note = 5  # type: ignore[attr-defined]
    own_dict, own_list = OwnDict(a=1, b=torch.arange(2)), OwnList([1, 2])
    own_dict.note, own_list.note = "d", "l"  # type: ignore[attr-defined]
    return [
        Config("x", [1, 2], torch.arange(3.0)),
        Frozen(1, torch.arange(2)),
        Point(1, torch.arange(2)),
        Colour.RED,
        Flag.A | Flag.B,
        Slotted(),
        own_dict,
        own_list,
        text,
        Registered(torch.arange(4)),
        NewArguments(size=5),
    ]


@case()
def own_ways_of_pickling() -> Any:
    reduced = Reduced(torch.arange(3.0))
    reduced.note = "note"
    reduced.members = [torch.arange(2), "x"]
    reduced.items = {"a": reduced.tensor[1:]}
    return [WithState(), reduced]


@case()
def storages_that_live_shortly() -> Any:
    return [MadeAnew(), TemporaryStorages([torch.full((1000,), float(i)) for i in range(20)])]


@case()
def functions() -> Any:
    return [
        len,
        on_gradient,
        Tagged.make,
        functools.partial(on_gradient, gradient=torch.ones(2)),
        operator.itemgetter(2),
        operator.attrgetter("a.b"),
        torch.nn.functional.relu,
        torch.add,
        Config,
        "abc".upper,
        Callback().__call__,
    ]


@case()
def objects_of_torch() -> Any:
    return [
        torch.float32,
        torch.device("cpu"),
        torch.device("cuda:3"),
        torch.Size([1, 2]),
        torch.strided,
        torch.Tensor,
    ]


@case()
def recursive() -> Any:
    loop: list[Any] = [1]
    loop.append(loop)
    tree: dict[str, Any] = {"tensor": torch.arange(3)}
    tree["self"] = tree
    config = Config("x")
    config.weight = config
    return {"list": loop, "tree": tree, "object": config, "tuple": (loop, tree["tensor"])}


@case()
def module_in_a_circle() -> Any:
    child = nn.Linear(2, 2)
    object.__setattr__(child, "parent", [child])
    return child


@case()
def shared_objects() -> Any:
    inner, tensor = [1, 2], torch.arange(3.0)
    return [inner, inner, {"a": inner}, tensor, tensor, (tensor, [tensor])]


@case()
def strange_names() -> Any:
    return {
        name: torch.full((2,), float(i))
        for i, name in enumerate(
            ["ümläut", "漢字", "", " ", "a/b", "../x", "\n", "a\x00b", "🙂" * 100]
        )
    }


@case()
def many_tensors() -> Any:
    return [torch.full((3,), float(i)) for i in range(300)]


@case()
def nested_deeply() -> Any:
    value: Any = torch.arange(3)
    for _ in range(150):
        value = [value]
    return value
