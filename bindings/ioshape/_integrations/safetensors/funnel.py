# SPDX-License-Identifier: Apache-2.0
"""Replace serialize_file(), through which the package safetensors writes all files.

The function gets a dtype, a shape and the position of the bytes for each name. These are the
arguments of the library's ioshape_save_tensors().
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from ioshape._core import trace
from ioshape._core.context import encoded
from ioshape._core.report import Downgrade, Report
from ioshape._core.structs import sized
from ioshape._core.under_way import raise_unheard
from ioshape._formats.dtypes import DTYPES, number_of
from ioshape._integrations.safetensors.patching import by_safetensors
from ioshape._native import ffi, lib
from ioshape._save import collected
from ioshape._save.request import Payload, SaveRequest, start

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ioshape._save.handle import SaveHandle


class _NotOurs(Exception):
    """Raised if the original function must write the file, or reject it. The argument is why."""


def _text(what: str, value: Any) -> bytes:
    """Return a text as C takes it."""
    if not isinstance(value, str):
        raise _NotOurs(f"{what} is not text")
    try:
        text = value.encode()
    except UnicodeEncodeError:
        raise _NotOurs(f"{what} is not valid text") from None
    if b"\0" in text:
        raise _NotOurs(f"{what} has a NUL")
    return text


def _name(what: str, value: Any) -> bytes:
    name = _text(what, value)
    if not 0 < len(name) <= lib.IOSHAPE_MAX_NAME_BYTES:
        raise _NotOurs(f"{what} has {len(name)} bytes")
    return name


class _Segment(NamedTuple):
    """A tensor, as the package describes it."""

    dtype: int
    shape: tuple[int, ...]
    address: Any
    keep: Any


def _segment(spec: Any) -> _Segment:
    if isinstance(spec, dict):  # safetensors before 0.8
        dtype, shape, data = spec["dtype"], tuple(spec["shape"]), spec["data"]
        view = ffi.from_buffer(data)
        bits = dict(DTYPES.values()).get(dtype, 0)
        address, n_bytes = view, len(data)
    else:
        # The shape is that of the header: for F4 it counts values, but torch counts bytes of two
        # values.
        dtype, bits = DTYPES.get(spec.dtype, (spec.dtype, 0))
        shape, view = tuple(spec.shape), None
        address, n_bytes = ffi.cast("void *", spec.data_ptr), spec.data_len
        if bits == 4 and shape and not shape[-1] % 2:
            shape, bits = (*shape[:-1], shape[-1] // 2), 8
    elements = 1
    for length in shape:
        elements *= length
    # The original function has an error message for each of these cases.
    fits = elements * (bits // 8) == n_bytes and max(shape, default=0) >> 63 == 0
    if not bits or bits % 8 or not fits:
        raise _NotOurs(f"dtype {dtype}, shape {shape} and {n_bytes} bytes")
    return _Segment(number_of(dtype), shape, address, view)


def _tensors_of(specs: Mapping[str, Any]) -> Payload:
    tensors = ffi.new("struct ioshape_tensor[]", len(specs))
    keep: list[Any] = [tensors, dict(specs)]
    for (name, spec), to in zip(specs.items(), tensors, strict=True):
        segment = _segment(spec)
        to.name = text = ffi.new("char[]", _name("the name of a tensor", name))
        to.dtype = segment.dtype
        to.dims = len(segment.shape)
        to.shape = shape = ffi.new("int64_t[]", segment.shape)
        to.data = segment.address
        keep += [text, shape, segment.keep]
    return Payload(tensors, len(specs), keep)


def _metadata_of(metadata: Any) -> tuple[Any, list[Any]]:
    """Return the metadata as C takes it, and the objects that must live as long.

    None and {} are different for the original function.
    """
    if metadata is None:
        return ffi.NULL, []
    if not isinstance(metadata, dict) or len(metadata) > lib.IOSHAPE_MAX_ATTRIBUTES:
        raise _NotOurs("the metadata is not a dict, or is too large")
    attributes = ffi.new("struct ioshape_attribute[]", len(metadata))
    keep = [attributes]
    for (name, value), to in zip(metadata.items(), attributes, strict=True):
        to.name = first = ffi.new("char[]", _name("a name of the metadata", name))
        to.value = second = ffi.new("char[]", _text("a value of the metadata", value))
        keep += [first, second]
    struct = sized("ioshape_metadata")
    struct.attributes = attributes
    struct.attribute_count = len(metadata)
    return struct, [*keep, struct]


def _payload_of(specs: Any, metadata: Any, request: SaveRequest) -> Payload:
    begin = time.perf_counter()
    if not isinstance(specs, dict):
        raise _NotOurs("not a dict")
    payload = _tensors_of(specs)
    given, keep = _metadata_of(metadata)
    payload.keep += keep
    payload.options = {"metadata": given, "format": lib.IOSHAPE_FORMAT_SAFETENSORS}
    if request.checksums:
        payload.options["checksums"] = lib.IOSHAPE_CHECKSUMS_BESIDE
    payload.pickle_s = time.perf_counter() - begin
    return payload


def _start(payload: Payload, request: SaveRequest, *, background: bool) -> SaveHandle:
    context = request.ordered_context()
    return start(
        request,
        context,
        payload,
        lib.ioshape_save_tensors,
        context.pointer,
        encoded(request.path),
        payload.array,
        payload.length,
        background=background,
    )


def _by_original(specs: Any, metadata: Any, request: SaveRequest, why: _NotOurs) -> Report:
    begin, started = time.perf_counter(), time.time()
    by_safetensors(specs, request.path, metadata=metadata)
    step = Downgrade(
        f"written by safetensors itself, without fsync and without a slot: {why}", "safetensors"
    )
    report = Report(
        path=request.path,
        written_by="safetensors",
        downgrades=(step,),
        total_s=time.perf_counter() - begin,
        started_s=started,
    )
    trace.record(request.context.trace, report)
    return report


def save(specs: Any, metadata: Any, request: SaveRequest) -> Report:
    """Save and wait. If ioshape cannot save these tensors, let the original do or reject it."""
    try:
        payload = _payload_of(specs, metadata, request)
    except _NotOurs as reason:
        report = _by_original(specs, metadata, request, reason)
    else:
        report = _start(payload, request, background=False)._complete()
    raise_unheard()
    return report


def begin(specs: Any, metadata: Any, request: SaveRequest) -> SaveHandle:
    """Save in the background."""
    try:
        payload = _payload_of(specs, metadata, request)
    except _NotOurs as reason:
        raise ValueError(f'cannot save "{request.path}" in the background: {reason}') from None
    handle = _start(payload, request, background=True)
    raise_unheard(but=handle)
    return handle


def serialize_file(tensor_dict: Any, filename: Any, metadata: Any = None) -> None:
    """Write a file in place of the original function."""
    request = SaveRequest.of(os.fsdecode(filename))
    if not collected.begins(lambda: begin(tensor_dict, metadata, request)):
        save(tensor_dict, metadata, request)
