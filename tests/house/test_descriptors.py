# SPDX-License-Identifier: Apache-2.0
"""Test that no descriptor takes the number of a standard stream that the program closed."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

#: Calls that return a descriptor. Members of structs with these names do not match.
GIVES = re.compile(r"(?<![\w>.])(?:open|openat|socket|accept4|eventfd|memfd_create|dup)\(")
MOVES = re.compile(r"(?:base_register_fd|base_above_streams)\(\s*$")
NOT_CODE = re.compile(r"/\*.*?\*/|\"(?:\\.|[^\"\\])*\"", re.DOTALL)
#: Exceptions. A new file is not moved in the same expression, because it must be removed if no
#: number is left. The other `open` is a variable.
ELSEWHERE = {"fs/layout.c": "openat(", "format/reader.c": "open("}
#: The Python package, without commands: these are programs of their own that close no streams.
PYTHON_OPENS = re.compile(r"(?<!\w)os\.open\(")
PYTHON_ROOT = ROOT / "bindings" / "ioshape"


def not_moved(source: str) -> list[str]:
    code = NOT_CODE.sub(lambda match: " " * len(match[0]), source)
    return [match[0] for match in GIVES.finditer(code) if not MOVES.search(code[: match.start()])]


def test_every_descriptor_of_the_library_is_above_those_of_the_streams() -> None:
    found = {
        str(path.relative_to(ROOT / "libioshape")): calls
        for path in (ROOT / "libioshape").rglob("*.c")
        if (calls := not_moved(path.read_text(encoding="utf-8")))
    }
    assert found == {file: [call] for file, call in ELSEWHERE.items()}


@pytest.mark.parametrize(
    ("source", "calls"),
    [
        ("fd = open(path, O_RDONLY);", ["open("]),
        ("fd = base_register_fd(open(path, O_RDONLY));", []),
        ("fd = base_above_streams(\n\t\tsocket(AF_UNIX, SOCK_STREAM, 0));", []),
        ("fd = base_register_fd(x); fd = dup(fd);", ["dup("]),
        ('ret = ops->open(&engine); /* as open() does */ say("openat(");', []),
    ],
)
def test_the_rule_notices(source: str, calls: list[str]) -> None:
    assert not_moved(source) == calls


def test_what_the_package_opens_is_above_them_too() -> None:
    found = [
        path.name
        for path in PYTHON_ROOT.rglob("*.py")
        if "_cli" not in path.parts and PYTHON_OPENS.search(path.read_text(encoding="utf-8"))
    ]
    assert found == ["descriptors.py"]
