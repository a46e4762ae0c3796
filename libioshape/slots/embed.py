# SPDX-License-Identifier: Apache-2.0
"""embed.py SCRIPT.lua OUT.c: the script as bytes of C, and the SHA-1 under which Redis knows it.

Comment lines and indentation go, lines stay: Redis names the line in its error messages."""

import hashlib
import sys
from pathlib import Path


def stripped(script: str) -> bytes:
    lines = (line.strip() for line in script.splitlines())
    kept = ("" if line.startswith("--") else line for line in lines)
    return ("\n".join(kept) + "\n").encode("ascii")


def as_c(script: bytes) -> str:
    rows = (script[at : at + 20] for at in range(0, len(script), 20))
    array = "\n".join("\t" + ", ".join(f"{byte}" for byte in row) + "," for row in rows)
    return (
        "/* Made by embed.py from slots.lua. */\n"
        '#include "slots/script.h"\n\n'
        f"const char slots_script[] = {{\n{array}\n\t0\n}};\n"
        "const size_t slots_script_bytes = sizeof(slots_script) - 1;\n"
        f'const char slots_script_sha1[] = "{hashlib.sha1(script).hexdigest()}";\n'
    )


def main() -> None:
    source, out = map(Path, sys.argv[1:])
    out.write_text(as_c(stripped(source.read_text("utf-8"))), "ascii")


if __name__ == "__main__":
    main()
