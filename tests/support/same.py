# SPDX-License-Identifier: Apache-2.0
"""Compares two graphs of objects bit by bit, also when they are in two processes.

Function describe() turns a graph into tuples of plain values, which can be compared and piped.
They contain types, dtypes, layouts, strides, devices and the bytes of every storage.

Objects and storages have numbers in the order of the walk, which show which of them are shared.
assert_same() reports where two graphs differ.
"""

import copyreg
import ctypes
import functools
import hashlib
import io
import random
import struct
import types
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

Description = Any  # nested tuples of str, int, bytes, bool and None

# Longer contents are replaced by their hash.
_SHORT_BYTES = 64

_PLAIN = (type(None), bool, int, str, bytes)


def _name(thing: Any) -> str:
    return f"{thing.__module__}.{thing.__qualname__}"


def _content(data: Any) -> bytes:
    """Return the bytes, or their hash if they are long."""
    view = memoryview(data).cast("B")
    return bytes(view) if view.nbytes <= _SHORT_BYTES else hashlib.blake2b(view).digest()


def _memory(storage: torch.UntypedStorage) -> bytes:
    if not storage.nbytes():
        return b""
    if storage.is_cuda:
        bytes_of = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        storage = bytes_of.cpu().untyped_storage()
    return _content((ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr()))


def _has_memory(storage: torch.UntypedStorage) -> bool:
    if storage.device.type == "meta":
        return False
    try:
        storage.data_ptr()
    except RuntimeError:  # a subclass that has its data elsewhere
        return False
    return True


def _numbers(shape: Iterable[Any]) -> tuple[Any, ...]:
    """Return the lengths of a shape, or its strides."""
    return tuple(number if type(number) is int else "symbolic" for number in shape)


class _Walk:
    """A walk through a graph."""

    def __init__(self, with_data: bool) -> None:
        self.with_data = with_data
        self.objects: dict[int, int] = {}
        self.storages: dict[int, int] = {}
        self.alive: list[object] = []  # keeps objects alive, so that no two of them have one ID

    def value(self, value: Any) -> Description:
        kind = type(value)
        if kind in _PLAIN:
            return value if kind is not bytes else ("bytes", _content(value))
        if kind is float:
            return ("float", struct.pack("<d", value))
        if kind is complex:
            return ("complex", struct.pack("<dd", value.real, value.imag))
        if kind in (tuple, torch.Size, frozenset):
            return self._container(value)
        return self._told_once(value)

    def _told_once(self, value: Any) -> Description:
        """Describe an object that may occur again. Later occurrences have only its number."""
        if id(value) in self.objects:
            return ("seen", self.objects[id(value)])
        self.objects[id(value)] = len(self.objects)
        self.alive.append(value)
        for kinds, describe in _KINDS:
            if isinstance(value, kinds):
                return describe(self, value)
        return self._by_reduction(value)

    # ---- Python -------------------------------------------------------------------------------

    def _container(self, value: Any) -> Description:
        if isinstance(value, (set, frozenset)):
            # The order must not depend on addresses.
            members = sorted(value, key=lambda member: repr(describe(member)))
        else:
            members = value
        return (_name(type(value)), *(self.value(member) for member in members))

    def _plain_mapping(self, value: dict[Any, Any]) -> Description:
        return (
            _name(type(value)),
            *((self.value(key), self.value(item)) for key, item in value.items()),
        )

    def _mapping(self, value: dict[Any, Any]) -> Description:
        if type(value) is dict:
            return self._plain_mapping(value)
        # Other mappings may pickle more than their items: a factory, attributes.
        return (*self._by_reduction(value), self._plain_mapping(dict(value)))

    def _by_name(self, value: Any) -> Description:
        return ("global", _name(value))

    def _other(self, value: Any) -> Description:
        return (_name(type(value)), repr(value))

    def _by_reduction(self, value: Any) -> Description:
        """Describe an object by what its pickle contains: class, arguments, state, members."""
        registered = copyreg.dispatch_table.get(type(value))
        reduced = registered(value) if registered else value.__reduce_ex__(2)
        if isinstance(reduced, str):
            return ("global", reduced)
        make, arguments, *rest = reduced
        state, members, items = [*rest, None, None, None][:3]
        return (
            _name(type(value)),
            self.value(make),
            self.value(arguments),
            self.value(state),
            *(self.value(member) for member in members or ()),
            *((self.value(key), self.value(item)) for key, item in items or ()),
        )

    # ---- numpy --------------------------------------------------------------------------------

    def _array(self, array: Any) -> Description:
        if array.dtype.hasobject:
            data: Description = tuple(self.value(member) for member in array.ravel().tolist())
        else:
            data = _content(array.tobytes())
        masks = (self.value(array.mask),) if isinstance(array, np.ma.MaskedArray) else ()
        flags = (array.flags.c_contiguous, array.flags.f_contiguous, array.flags.writeable)
        return (_name(type(array)), repr(array.dtype), array.shape, flags, data, *masks)

    # ---- torch --------------------------------------------------------------------------------

    def storage(self, storage: torch.UntypedStorage) -> Description:
        """Describe a storage: its number, and its contents at its first occurrence."""
        place = (str(storage.device), storage.nbytes())
        number = self.storages.get(storage._cdata)
        if number is not None:
            return ("storage", number, *place)
        self.storages[storage._cdata] = number = len(self.storages)
        self.alive.append(storage)
        data = _memory(storage) if self.with_data and _has_memory(storage) else None
        return ("storage", number, *place, data)

    def _typed_storage(self, storage: Any) -> Description:
        return ("typed storage", str(storage.dtype), self.storage(storage._untyped_storage))

    def _generator(self, generator: torch.Generator) -> Description:
        return ("generator", str(generator.device), _content(generator.get_state().numpy()))

    def _tensor(self, tensor: torch.Tensor) -> Description:
        if isinstance(tensor, FakeTensor):
            return self._fake(tensor)
        if isinstance(tensor, ShardedTensor):
            shards = [(shard.tensor, shard.metadata) for shard in tensor.local_shards()]
            return (_name(type(tensor)), self.value(tensor.metadata()), self.value(shards))
        about = (
            _name(type(tensor)),
            str(tensor.dtype),
            str(tensor.layout),
            str(tensor.device),
            ("requires_grad", tensor.requires_grad, "leaf", tensor.is_leaf),
        )
        # The attributes of wrappers are their inner tensors and values computed from those.
        attributes = {} if is_traceable_wrapper_subclass(tensor) else vars(tensor)
        hooks = getattr(tensor, "_backward_hooks", None)
        return (
            *about,
            *_content_of(self, tensor),
            ("attributes", self.value(attributes)),
            ("hooks", self.value(dict(hooks) if hooks else None)),
        )

    def _fake(self, tensor: FakeTensor) -> Description:
        return (
            _name(type(tensor)),
            str(tensor.dtype),
            str(tensor.fake_device),
            str(tensor.layout),
            _numbers(tensor.shape),
            tensor.requires_grad,
            *(self.dense(tensor) if tensor.layout is torch.strided else ()),
        )

    def inner(self, tensor: torch.Tensor) -> Description:
        """Describe a subclass that holds other tensors."""
        names, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        return (
            _numbers(tensor.shape),
            _numbers(tensor.stride()),
            *((name, self.value(getattr(tensor, name))) for name in names),
            self.value(context),
        )

    def parts(self, tensor: torch.Tensor) -> Description:
        """Describe a sparse tensor."""
        if tensor.layout is torch.sparse_coo:
            tensors = [tensor._indices(), tensor._values()]
            more: tuple[Any, ...] = (tensor.is_coalesced(), tensor.sparse_dim(), tensor.dense_dim())
        elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
            tensors, more = [tensor.crow_indices(), tensor.col_indices(), tensor.values()], ()
        else:
            tensors, more = [tensor.ccol_indices(), tensor.row_indices(), tensor.values()], ()
        return (tuple(tensor.shape), *more, *(self.value(part.detach()) for part in tensors))

    def dense(self, tensor: torch.Tensor) -> Description:
        """Describe a tensor that is a view of a storage."""
        return (
            ("shape", tuple(tensor.shape)),
            ("stride", tuple(tensor.stride())),
            ("offset", tensor.storage_offset()),
            ("conj", tensor.is_conj(), "neg", tensor.is_neg()),
            self.storage(tensor.untyped_storage()),
            *((_quantizer(self, tensor),) if tensor.is_quantized else ()),
        )


def _quantizer(walk: _Walk, tensor: torch.Tensor) -> Description:
    try:
        scheme = tensor.qscheme()
    except RuntimeError:
        return "unknown quantizer"
    if scheme in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        return (str(scheme), walk.value(tensor.q_scale()), tensor.q_zero_point())
    return (
        str(scheme),
        walk.value(tensor.q_per_channel_scales()),
        walk.value(tensor.q_per_channel_zero_points()),
        tensor.q_per_channel_axis(),
    )


def _content_of(walk: _Walk, tensor: torch.Tensor) -> tuple[Description, ...]:
    if is_traceable_wrapper_subclass(tensor):
        return (walk.inner(tensor),)
    if tensor.is_nested:
        sizes, strides = tensor._nested_tensor_size(), tensor._nested_tensor_strides()
        return (
            walk.value(sizes),
            walk.value(strides),
            walk.value(tensor._nested_tensor_storage_offsets()),
            walk.storage(tensor.untyped_storage()),
        )
    if tensor.is_mkldnn:
        return (walk.value(tensor.to_dense()),)
    if tensor.layout is not torch.strided:
        return (walk.parts(tensor),)
    return (walk.dense(tensor),)


def _lazy(_walk: _Walk, tensor: Any) -> Description:
    return (_name(type(tensor)), str(tensor.dtype), str(tensor.device), tensor.requires_grad)


_FUNCTIONS = (type, types.FunctionType, types.BuiltinFunctionType, np.ufunc)
_TORCH_NAMES = (torch.dtype, torch.layout, torch.memory_format, torch.device, torch.qscheme)

_Described = Callable[[_Walk, Any], Description]

# The first matching entry is used.
_KINDS: tuple[tuple[Any, _Described], ...] = (
    ((nn.UninitializedParameter, nn.UninitializedBuffer), _lazy),
    (torch.Tensor, _Walk._tensor),
    (torch.UntypedStorage, _Walk.storage),
    (torch.storage.TypedStorage, _Walk._typed_storage),
    (torch.Generator, _Walk._generator),
    (_TORCH_NAMES, _Walk._other),
    (np.ndarray, _Walk._array),
    (functools.partial, _Walk._by_reduction),
    (_FUNCTIONS, _Walk._by_name),
    (dict, _Walk._mapping),
    (
        (list, set, deque),
        lambda walk, value: (
            walk._container(value)
            if type(value) in (list, set)
            else (*walk._by_reduction(value), walk._container(value))
        ),
    ),
    ((bytearray, io.BytesIO, random.Random), _Walk._by_reduction),
)


def describe(value: Any, *, with_data: bool = True) -> Description:
    """Return plain values that identify a graph of objects.

    Without data, the bytes of storages are ignored.
    """
    with torch._C.DisableTorchFunctionSubclass():
        return _Walk(with_data).value(value)


def _differences(left: Description, right: Description, where: str) -> Iterable[str]:
    if type(left) is tuple and type(right) is tuple and len(left) == len(right):
        for i, (one, other) in enumerate(zip(left, right, strict=True)):
            yield from _differences(one, other, f"{where}[{i}]")
    elif type(left) is not type(right) or left != right:
        yield f"{where}: {left!r:.1000}\n   instead of {right!r:.1000}"


def assert_same_description(found: Description, expected: Description) -> None:
    """Check that two descriptions are equal. Name the first differences."""
    if repr(found) != repr(expected):  # unlike ==, it tells 1, 1.0 and True apart
        differences = list(_differences(found, expected, "it"))
        assert not differences, "\n".join(differences[:5])


def assert_same(found: object, expected: object) -> None:
    """Check that two graphs are equal. Name the first differences."""
    assert_same_description(describe(found), describe(expected))
