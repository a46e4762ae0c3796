# SPDX-License-Identifier: Apache-2.0
"""embed.py OUT.c NAME=SCRIPT.lua...: scripts as bytes of C, with the SHA-1 that names each.

Comment lines and indentation go, lines stay: Redis names the line in its error messages."""

import hashlib
import sys
from pathlib import Path


def stripped(script: str) -> bytes:
    """Return the script as it is sent."""
    lines = (line.strip() for line in script.splitlines())
    kept = ("" if line.startswith("--") else line for line in lines)
    return ("\n".join(kept) + "\n").encode("ascii")


def as_c(name: str, script: bytes) -> str:
    """Return the definitions of a script's bytes, their number and their SHA-1."""
    rows = (script[at : at + 20] for at in range(0, len(script), 20))
    array = "\n".join("\t" + ", ".join(f"{byte}" for byte in row) + "," for row in rows)
    return (
        f"\nconst char {name}[] = {{\n{array}\n\t0\n}};\n"
        f"const size_t {name}_bytes = sizeof({name}) - 1;\n"
        f'const char {name}_sha1[] = "{hashlib.sha1(script).hexdigest()}";\n'
    )


def main() -> None:
    """Write the file."""
    out, *scripts = sys.argv[1:]
    parts = ['/* Made by embed.py. */\n#include "slots/redis.h"\n']
    for script in scripts:
        name, _, path = script.partition("=")
        parts.append(as_c(name, stripped(Path(path).read_text("utf-8"))))
    Path(out).write_text("".join(parts), "ascii")


if __name__ == "__main__":
    main()
