# SPDX-License-Identifier: Apache-2.0
"""Writes the C source of ioshape._native: make_native.py CDEF OUTPUT. The build calls it."""

import sys
from pathlib import Path

from cffi import FFI


def main() -> None:
    cdef, output = map(Path, sys.argv[1:])
    ffi = FFI()
    ffi.cdef(cdef.read_text(encoding="utf-8"))
    ffi.set_source("ioshape._native", '#include "native.h"')
    ffi.emit_c_code(str(output))


main()
