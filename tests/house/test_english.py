# SPDX-License-Identifier: Apache-2.0
"""Unclear prose is found; tests/house/budget.json bounds how much of it there is."""

from pathlib import Path

import english
import pytest


def kinds(path: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return what is found in a file of this text, by kind."""
    monkeypatch.setattr(english, "ROOT", path.parent)
    path.write_text(text, encoding="utf-8")
    return [one.kind for one in english.findings(path)]


LONG = "Write " + "one word more " * 10 + "here."


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("a.py", 'def a():\n    """Return it."""\n', []),
        ("a.py", 'def a():\n    """Of a file: its size."""\n', ["fragment"]),
        ("a.py", 'def a():\n    """The size of a file."""\n', ["fragment"]),
        ("a.py", '@property\ndef a():\n    """The size of a file."""\n', []),
        ("a.py", 'class A:\n    """A file."""\n', []),
        ("a.py", 'class A:\n    """What is written."""\n', ["fragment"]),
        ("a.py", f'def a():\n    """{LONG}"""\n', ["long"]),
        ("a.py", "# Nobody reads it.\n", ["riddle"]),
        ("a.c", "/* Returns it. */\nint a(void)\n{\n}\n", []),
        ("a.c", "/* 0: it is there. */\nstatic int a(void)\n{\n}\n", ["fragment"]),
        ("a.c", "/* Whether it is there. */\nint *a(const char *b,\n\t int c);\n", ["fragment"]),
        ("a.c", "/* The size of a file. */\nstatic int a;\n", []),
        ("a.c", "int a; /* for whoever asks */\n", ["riddle"]),
        ("a.md", f"A page.\n\n- {LONG}\n", ["long"]),
        ("a.md", "Rank 0 writes. The others do the same.\n", ["riddle"]),
        ("a.md", f"    {LONG}\n\n```\nsomebody\n```\n", []),
        ("a.c", "int make_room(int room);\n", ["word"]),
        ("a.c", "int make_bedroom(int roomy);\n", []),
        ("a.py", "class Room: ...\n", ["word"]),
        ("a.py", "from dataclasses import __post_init__\n", []),
        ("a.md", "A message is posted.\n", ["word"]),
        ("a.md", "The file is renamed into place.\n", []),
    ],
)
def test_unclear_prose_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str, expected: list[str]
) -> None:
    assert kinds(tmp_path / name, text, monkeypatch) == expected
