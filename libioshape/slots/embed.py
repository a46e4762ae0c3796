# SPDX-License-Identifier: Apache-2.0
"""embed.py OUT.c SCRIPT.lua: a script as bytes of C, with the SHA-1 that names it.

Comment lines and indentation go, lines stay: Redis names the line in its error messages."""

import hashlib
import sys
from pathlib import Path


def stripped(script: str) -> bytes:
    """Return the script as it is sent."""
    lines = (line.strip() for line in script.splitlines())
    kept = ("" if line.startswith("--") else line for line in lines)
    return ("\n".join(kept) + "\n").encode("ascii")


def as_c(script: bytes) -> str:
    """Return the definitions of a script's bytes and their SHA-1."""
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
