# SPDX-License-Identifier: Apache-2.0
"""Writes the C source of ioshape._native from the public headers and internal.h.

The build runs it:

    make_native.py NATIVE_H INTERNAL_H CALLBACKS_H OUTPUT INCLUDE COMPILER...
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

from cffi import FFI


def main() -> None:
    native, internal, callbacks, output, include = map(Path, sys.argv[1:6])
    headers = preprocessed(native, include, sys.argv[6:])
    ffi = FFI()
    ffi.cdef(constants(headers))
    ffi.cdef(re.sub(r"^#.*", "", headers, flags=re.MULTILINE))
    for header in (internal, callbacks):
        ffi.cdef(re.sub(r"^#.*", "", header.read_text(encoding="utf-8"), flags=re.MULTILINE))
    ffi.set_source("ioshape._native", f'#include "{native.name}"')
    ffi.emit_c_code(str(output))


def preprocessed(native: Path, include: Path, compiler: list[str]) -> str:
    """Return the preprocessed text of the public headers that native.h includes.

    Empty system headers replace the real ones, because cffi knows their types.

    Args:
        native: path of native.h.
        include: folder of the public headers.
        compiler: command of the C compiler.
    """
    includes = re.findall(
        r"^#include <ioshape/.*", native.read_text(encoding="utf-8"), re.MULTILINE
    )
    with tempfile.TemporaryDirectory() as system:
        for name in ("stddef.h", "stdint.h"):
            (Path(system) / name).touch()
        done = subprocess.run(
            [*compiler, "-E", "-P", "-dD", "-xc", "-nostdinc", f"-I{system}", f"-I{include}", "-"],
            input="\n".join(includes) + "\n",
            stdout=subprocess.PIPE,
            check=True,
            encoding="utf-8",
        )
    return done.stdout


def constants(headers: str) -> str:
    """Return cffi declarations of the numeric IOSHAPE_ macros. The compiler gives their values."""
    names = re.findall(r"^#define (IOSHAPE_\w+) +\(?(?:\d|UINT)", headers, re.MULTILINE)
    return "".join(f"#define {name} ...\n" for name in names)


main()
