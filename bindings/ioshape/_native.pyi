# SPDX-License-Identifier: Apache-2.0
"""Made by cffi from the public headers: see bindings/make_native.py."""

from typing import Any

ffi: Any
lib: Any
