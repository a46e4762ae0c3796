# SPDX-License-Identifier: Apache-2.0
"""The binary interface: where each field of each public struct lies, and what each constant is.

Programs are built against these numbers, which stand in abi.txt. They may be added to; where one
changes, soname_version in libioshape/meson.build has to move with it. (LP64: what all supported
machines have.) After a change that is meant: python tests/python/core/test_abi.py > tests/python/core/abi.txt
"""

from pathlib import Path

from ioshape._native import ffi, lib

KNOWN = Path(__file__).with_name("abi.txt")


def is_opaque(name: str) -> bool:
    try:
        ffi.sizeof(f"struct {name}")
    except ffi.error:
        return True
    return False


def interface() -> list[str]:
    lines = []
    for name in ffi.list_types()[1]:
        # "ioshape_py_" is the package's own, not of the headers.
        if not name.startswith("ioshape_") or name.startswith("ioshape_py_") or is_opaque(name):
            continue
        struct = ffi.typeof(f"struct {name}")
        lines += [f"{name} has {ffi.sizeof(struct)} bytes"]
        lines += [f"{name}.{field} at {where.offset}" for field, where in struct.fields]
    constants = {name: getattr(lib, name) for name in dir(lib) if name.startswith("IOSHAPE_")}
    return lines + [
        f"{name} = {value}"
        for name, value in sorted(constants.items())
        if isinstance(value, int) and not name.startswith("IOSHAPE_VERSION_")
    ]


def test_programs_built_before_go_on_working() -> None:
    known, found = KNOWN.read_text().splitlines(), interface()
    assert set(known) <= set(found), "has moved: programs built before would break"
    assert known == found, "is new: add it to abi.txt"


if __name__ == "__main__":
    print(*interface(), sep="\n")
