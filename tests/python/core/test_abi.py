# SPDX-License-Identifier: Apache-2.0
"""The binary interface: offsets of the fields of public structs, and values of constants.

Compiled programs rely on these numbers, which abi.txt records. Additions are allowed. If a number
changes, raise soname_version in libioshape/meson.build. The numbers are those of LP64, the data
model of all supported machines.

After an intended change: python tests/python/core/test_abi.py > tests/python/core/abi.txt
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
        # Structs named "ioshape_py_" belong to the package, not to the public headers.
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
