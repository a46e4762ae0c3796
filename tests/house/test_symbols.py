# SPDX-License-Identifier: Apache-2.0
"""What the headers declare, the version map lists, and the libraries export: the same functions."""

import re
import subprocess
from pathlib import Path

from tree import HEADERS, LIBRARY, build_folder, code, program

NODE = "IOSHAPE_1"

# A declaration at the start of a line: a type, the name, an opening parenthesis. Calls and function
# pointers do not start so.
DECLARED = re.compile(r"^(?!\s|typedef\b|#)[\w \t*]*?\b(ioshape_\w+)\(", re.MULTILINE)


# What it declares is in a library of its own.
MPI = HEADERS / "mpi.h"


def declared_in(*headers: Path) -> set[str]:
    return {name for header in headers for name in DECLARED.findall(code(header))}


def declared() -> set[str]:
    return declared_in(*(set(HEADERS.glob("*.h")) - {MPI}))


def listed() -> list[str]:
    text = code(LIBRARY / "ioshape.map")
    node = re.fullmatch(r"\s*(\w+)\s*\{\s*global:(.*?)local:\s*\*;\s*\};\s*", text, re.DOTALL)
    assert node, "ioshape.map has one node with the sections global and local, which is *"
    assert node[1] == NODE
    return [name.strip() for name in node[2].split(";") if name.strip()]


def run(*command: str | Path) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def shared_library() -> Path:
    return build_folder() / "libioshape" / "libioshape.so"


def defined_symbols(*options: str | Path) -> set[str]:
    lines = run(program("nm"), "--defined-only", *options).splitlines()
    return {line.split()[2] for line in lines if len(line.split()) == 3}


def test_headers_declare_something() -> None:
    assert "ioshape_version" in declared()


def test_map_lists_exactly_what_headers_declare() -> None:
    assert set(listed()) == declared()


def test_map_is_sorted_and_names_each_function() -> None:
    assert listed() == sorted(set(listed()))
    assert all(re.fullmatch(r"ioshape_[a-z0-9_]+", name) for name in listed())


def test_shared_library_exports_exactly_what_headers_declare() -> None:
    exported = defined_symbols("--dynamic", shared_library())
    assert exported - {f"{NODE}"} == {f"{name}@@{NODE}" for name in declared()}


def test_mpi_library_exports_exactly_what_its_header_declares() -> None:
    library = build_folder() / "libioshape" / "mpi" / "libioshape-mpi.so"
    assert defined_symbols("--dynamic", library) == declared_in(MPI)


def test_soname() -> None:
    dynamic = run(program("readelf"), "--dynamic", "--wide", shared_library())
    assert "Library soname: [libioshape.so.1]" in dynamic


def test_library_needs_no_more_than_it_says() -> None:
    dynamic = run(program("readelf"), "--dynamic", "--wide", shared_library())
    needed = set(re.findall(r"\(NEEDED\).*\[(.+?)\.so", dynamic))
    ours = {"libc", "libpthread", "liburing", "libisal", "libhiredis", "ld-linux-x86-64"}
    with_tls = {"libhiredis_ssl", "libssl", "libcrypto"}
    assert needed <= ours | with_tls


def test_library_reads_no_variable_for_a_program_with_more_rights_than_its_user() -> None:
    """Setuid, for example: by secure_getenv()."""
    wanted = run(program("nm"), "--dynamic", "--undefined-only", shared_library())
    assert not re.search(r"\bgetenv\b", wanted)


def test_static_library_shows_exactly_what_headers_declare() -> None:
    archive = build_folder() / "libioshape" / "libioshape.a"
    assert defined_symbols("--extern-only", archive) == declared()
