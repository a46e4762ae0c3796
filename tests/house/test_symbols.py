# SPDX-License-Identifier: Apache-2.0
"""Test that headers, version maps and the exports of the libraries have the same functions."""

import re
import subprocess
from pathlib import Path

from tree import HEADERS, LIBRARY, build_folder, code, program

NODE, TIER_NODE = "IOSHAPE_1", "IOSHAPE_TIER_1"
#: Version of the functions that libioshape.so exports for libioshape-tier. It names the release.
INTERNAL_NODE = re.compile(r"IOSHAPE_TIER_\d+\.\d+\.\d+")

# A declaration at the start of a line: a type, a name, an opening parenthesis. Calls and function
# pointers do not begin like this.
DECLARED = re.compile(r"^(?!\s|typedef\b|#)[\w \t*]*?\b(ioshape_\w+)\(", re.MULTILINE)


# The functions of these headers are in libraries of their own.
MPI, TIER = HEADERS / "mpi.h", HEADERS / "tier.h"
MAP, TIER_MAP = LIBRARY / "ioshape.map", LIBRARY / "tier" / "tier.map"


def declared_in(*headers: Path) -> set[str]:
    return {name for header in headers for name in DECLARED.findall(code(header))}


def declared() -> set[str]:
    return declared_in(*(set(HEADERS.glob("*.h")) - {MPI, TIER}))


def listed(version_map: Path = MAP, name: str = NODE) -> list[str]:
    text = code(version_map)
    node = re.fullmatch(r"\s*(\w+)\s*\{\s*global:(.*?)local:\s*\*;\s*\};\s*", text, re.DOTALL)
    assert node, f"{version_map} has one node with the sections global and local, which is *"
    assert node[1] == name
    return [name.strip() for name in node[2].split(";") if name.strip()]


def run(*command: str | Path) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def shared_library(name: str = "libioshape") -> Path:
    return build_folder() / "libioshape" / f"{name}.so"


def static_library(name: str = "libioshape") -> Path:
    return build_folder() / "libioshape" / f"{name}.a"


def internal() -> set[str]:
    """Return the functions of the core that libioshape-tier calls and programs must not call."""
    exported = defined_symbols("--dynamic", shared_library())
    return {name.split("@@")[0] for name in exported if INTERNAL_NODE.search(name) and "@@" in name}


def defined_symbols(*options: str | Path) -> set[str]:
    lines = run(program("nm"), "--defined-only", *options).splitlines()
    return {line.split()[2] for line in lines if len(line.split()) == 3}


def test_headers_declare_something() -> None:
    assert "ioshape_version" in declared()


def test_maps_list_exactly_what_headers_declare() -> None:
    assert set(listed()) == declared()
    assert set(listed(TIER_MAP, TIER_NODE)) == declared_in(TIER)


def test_maps_are_sorted_and_name_each_function() -> None:
    for functions in (listed(), listed(TIER_MAP, TIER_NODE)):
        assert functions == sorted(set(functions))
        assert all(re.fullmatch(r"ioshape_[a-z0-9_]+", name) for name in functions)


def test_shared_library_exports_exactly_what_headers_declare() -> None:
    exported = defined_symbols("--dynamic", shared_library())
    public = {name for name in exported if not INTERNAL_NODE.search(name)}
    assert public - {NODE} == {f"{name}@@{NODE}" for name in declared()}


def test_tier_library_exports_exactly_what_its_header_declares() -> None:
    exported = defined_symbols("--dynamic", shared_library("libioshape-tier"))
    assert exported - {TIER_NODE} == {f"{name}@@{TIER_NODE}" for name in declared_in(TIER)}


def test_shared_library_shows_the_tier_library_exactly_what_that_calls() -> None:
    wanted = run(program("nm"), "--dynamic", "--undefined-only", shared_library("libioshape-tier"))
    called = set(re.findall(rf"\b(\w+)@{INTERNAL_NODE.pattern}", wanted))
    assert called == internal()
    assert called


def test_core_needs_no_erasure_code() -> None:
    wanted = run(program("nm"), "--dynamic", "--undefined-only", shared_library())
    assert "ec_encode_data" not in wanted


def test_mpi_library_exports_exactly_what_its_header_declares() -> None:
    library = build_folder() / "libioshape" / "mpi" / "libioshape-mpi.so"
    assert defined_symbols("--dynamic", library) == declared_in(MPI)


def test_preload_library_replaces_only_what_it_must() -> None:
    """Check the functions that programs get from the preload library. Each one is a risk."""
    library = build_folder() / "libioshape" / "preload" / "libioshape-preload.so"
    assert defined_symbols("--dynamic", library) == {
        *("write", "writev", "fwrite", "fwrite_unlocked"),
        *("pwrite", "pwrite64", "pwritev", "pwritev64", "pwritev2", "pwritev64v2"),
        *("copy_file_range", "sendfile", "sendfile64", "splice"),
        *("fsync", "fdatasync", "close", "fclose"),
    }


def test_preload_library_needs_only_the_c_library() -> None:
    library = build_folder() / "libioshape" / "preload" / "libioshape-preload.so"
    dynamic = run(program("readelf"), "--dynamic", "--wide", library)
    needed = set(re.findall(r"\(NEEDED\).*\[(.+?)\.so", dynamic))
    assert needed <= {"libc", "libdl", "ld-linux-x86-64"}
    wanted = run(program("nm"), "--dynamic", "--undefined-only", library)
    assert not re.search(r"\b(malloc|calloc|free|pthread_mutex_lock|printf|open|socket)\b", wanted)


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
    """Check that secure_getenv() is used, which matters for setuid programs."""
    wanted = run(program("nm"), "--dynamic", "--undefined-only", shared_library())
    assert not re.search(r"\bgetenv\b", wanted)


def test_static_libraries_show_exactly_what_headers_declare() -> None:
    """Check exports of the static libraries. Functions for the tier have names with a prefix."""
    shown = defined_symbols("--extern-only", static_library())
    assert shown == declared() | {f"ioshape_internal_{name}" for name in internal()}
    shown = defined_symbols("--extern-only", static_library("libioshape-tier"))
    assert shown == declared_in(TIER)
