# SPDX-License-Identifier: Apache-2.0
"""The dtypes of the safetensors format, and the library's numbers of dtypes."""

from __future__ import annotations

import functools

from ioshape._native import lib

#: For each name of the format: torch's name, and the bits of an element. Files contain the dtypes
#: in the reverse of this order.
DTYPES = {
    "BOOL": ("bool", 8),
    "F4": ("float4_e2m1fn_x2", 4),
    "U8": ("uint8", 8),
    "I8": ("int8", 8),
    "F8_E5M2": ("float8_e5m2", 8),
    "F8_E4M3": ("float8_e4m3fn", 8),
    "F8_E8M0": ("float8_e8m0fnu", 8),
    "F8_E4M3FNUZ": ("float8_e4m3fnuz", 8),
    "F8_E5M2FNUZ": ("float8_e5m2fnuz", 8),
    "I16": ("int16", 16),
    "U16": ("uint16", 16),
    "F16": ("float16", 16),
    "BF16": ("bfloat16", 16),
    "I32": ("int32", 32),
    "U32": ("uint32", 32),
    "F32": ("float32", 32),
    "C64": ("complex64", 64),
    "F64": ("float64", 64),
    "I64": ("int64", 64),
    "U64": ("uint64", 64),
}


@functools.cache  # each save asks for each tensor
def number_of(dtype: str) -> int:
    """Return the library's number of one of torch's dtypes; 0 if it does not know the dtype."""
    return int(getattr(lib, f"IOSHAPE_{dtype.upper()}", 0))
