# SPDX-License-Identifier: Apache-2.0
"""Made by cffi from bindings/cdef.h."""

from typing import Any

ffi: Any
lib: Any
