# SPDX-License-Identifier: Apache-2.0
"""Write a Lua script as an array of C, with its SHA-1, by which Redis identifies it.

Usage: embed.py OUT.c SCRIPT.lua. The build calls this. It removes comment lines and indentation,
but keeps all line breaks, because error messages of Redis contain line numbers."""

import hashlib
import sys
from pathlib import Path


def stripped(script: str) -> bytes:
    """Return the script as the library sends it to Redis."""
    lines = (line.strip() for line in script.splitlines())
    kept = ("" if line.startswith("--") else line for line in lines)
    return ("\n".join(kept) + "\n").encode("ascii")


def as_c(script: bytes) -> str:
    """Return C definitions of a script's bytes and of their SHA-1."""
    rows = (script[at : at + 20] for at in range(0, len(script), 20))
    array = "\n".join("\t" + ", ".join(f"{byte}" for byte in row) + "," for row in rows)
    return (
        f"\nconst char slots_script[] = {{\n{array}\n\t0\n}};\n"
        f'const char slots_script_sha1[] = "{hashlib.sha1(script).hexdigest()}";\n'
    )


if __name__ == "__main__":
    out, script = map(Path, sys.argv[1:])
    head = '/* Made by embed.py. */\n#include "internal.h"\n'
    out.write_text(head + as_c(stripped(script.read_text("utf-8"))), "ascii")
