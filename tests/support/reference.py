# SPDX-License-Identifier: Apache-2.0
"""What is made from the package's docstrings, the table of settings and the commands.

That is parts of docs/python.md and docs/python-reference.md, docs/cli-reference.md, the package's
own table, and the arguments of configure().

    python tests/support/reference.py --write

renews them there. Without the option, it says whether they are up to date; a test does the same.
"""

from __future__ import annotations

import inspect
import re
import sys
import textwrap
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING

import ioshape
from ioshape._settings.setting import Setting

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "python.md"
REFERENCE = ROOT / "docs" / "python-reference.md"
TABLE = ROOT / "bindings" / "ioshape" / "_settings" / "table.py"
CONFIG = ROOT / "bindings" / "ioshape" / "_settings" / "config.py"

# In the order in which a reader wants them; the rest follows.
FIRST = ["save", "save_async", "SaveHandle", "wait_all", "load", "Report", "Progress"]

SECTION = re.compile(r"^(Args|Returns|Raises):$", re.MULTILINE)


def prose(doc: str | None) -> str:
    """A docstring as Markdown: its sections become lists."""
    lines = inspect.cleandoc(doc or "").splitlines()
    out: list[str] = []
    section = ""
    for line in lines:
        heading = SECTION.match(line)
        if heading:
            section = heading.group(1)
            out.append(f"**{'Arguments' if section == 'Args' else section}**\n")
        elif section and line.startswith("    ") and section != "Returns":
            item = re.match(r"    (\w+): (.*)", line)
            out.append(f"- `{item.group(1)}`: {item.group(2)}" if item else "  " + line.strip())
        elif section and line.startswith("    "):
            out.append(line.strip())
        else:
            section = "" if line else section
            out.append(line)
    return "\n".join(out).strip()


def fields(cls: type) -> str:
    """What a class says about its attributes in comments that begin with "#:"."""
    out = []
    comment: list[str] = []
    for line in textwrap.dedent(inspect.getsource(cls)).splitlines():
        text = line.strip()
        if text.startswith("#:"):
            comment.append(text.removeprefix("#:").strip())
        elif match := re.match(r"    (\w+): ([^=#]+?)( = .*)?$", line):
            about = f": {' '.join(comment)}" if comment else ""
            out.append(f"- `{match.group(1)}` (`{match.group(2)}`){about}")
            comment = []
        elif text and not text.startswith('"""'):
            comment = []
    return "\n".join(out)


def signature(name: str, function: object) -> str:
    """A call, one line if it fits."""
    text = str(inspect.signature(function))  # type: ignore[arg-type]
    # Defaults that are modules print as where they lie on this machine.
    text = re.sub(r"<module '(\w+)' from [^>]*>", r"\1", text).replace("'", "")
    if len(name + text) > 100:
        arguments, _, result = text.rpartition(" -> ")
        arguments = re.sub(r", (?=[*\w])(?![^\[]*\])", ",\n    ", arguments[1:-1])
        text = f"(\n    {arguments},\n) -> {result}"
    return f"```python\n{name}{text}\n```"


def method(owner: str, name: str, member: object) -> str:
    """A public method or property of a class."""
    if isinstance(member, property):
        return f"- `{owner}.{name}`: {' '.join(prose(member.__doc__).split())}"
    text = str(inspect.signature(member)).replace("'", "").replace("(self, ", "(")  # type: ignore[arg-type]
    text = text.replace("(self)", "()")
    about = prose(inspect.getdoc(member)).replace("\n", " ")
    return f"- `{owner}.{name}{text}`: {about}"


def describe(name: str) -> str:
    """All about one public name."""
    value = getattr(ioshape, name)
    parts = [f"## {name}"]
    if isinstance(value, FunctionType):
        parts += [signature(f"ioshape.{name}", value), prose(value.__doc__)]
    elif isinstance(value, type):
        parts.append(prose(value.__doc__))
        parts.append(fields(value))
        handle = name[0].lower() if name != "SaveHandle" else "handle"
        parts.append(
            "\n".join(
                method(handle, key, member)
                for key, member in vars(value).items()
                if not key.startswith("_") and isinstance(member, (FunctionType, property))
            )
        )
    return "\n\n".join(part for part in parts if part)


def reference() -> str:
    """The whole of it."""
    names = [name for name in ioshape.__all__ if not name.startswith("_")]
    order = FIRST + [name for name in names if name not in FIRST]
    return "\n\n".join(describe(name) for name in order) + "\n"


# ---- Settings -----------------------------------------------------------------------------------

UNITS = {"KIB": 1 << 10, "MIB": 1 << 20, "INT64_MAX": (1 << 63) - 1}
OWNERS = ("CONTEXT", "GROUP", "PACKAGE")

#: What configure() takes, by the kind of a setting.
TYPES = {
    "bytes": "int | str",
    "power": "int | str",
    "count": "int",
    "text": "str",
    "name": "str",
    "path": "str | os.PathLike[str]",
    "switch": "bool",
    "seconds": "float",
}


def read_table() -> list[Setting]:
    """The rows of libioshape/base/settings.def, which are calls for Python, too."""
    rows: list[Setting] = []

    def choice(owner: str, name: str, words: str, about: str, user: str) -> None:
        for_all = tuple(word for word in words.split() if not word.startswith("("))
        values = ", ".join(f"`{word}`" for word in for_all)
        default = f"`{for_all[0]}`"
        rows.append(Setting(name, owner, "choice", for_all, 0, 0, values, default, about, user))

    def number(kind: str) -> Callable[..., None]:
        def row(owner: str, name: str, least: int, most: int, *texts: str) -> None:
            values, default, about, user = texts
            rows.append(Setting(name, owner, kind, (), least, most, values, default, about, user))

        return row

    def count(owner: str, name: str, least: int, most: int, *texts: str) -> None:
        number("count")(owner, name, least, most, f"{least} to {most}", *texts)

    def text(kind: str) -> Callable[..., None]:
        return lambda owner, name, most, *texts: number(kind)(owner, name, 1, most, *texts)

    def of_package(kind: str) -> Callable[..., None]:
        return lambda owner, name, *texts: number(kind)(owner, name, 0, 0, *texts)

    def a_switch(owner: str, name: str, *texts: str) -> None:
        of_package("switch")(owner, name, "`yes`, `no`", *texts)

    source = (ROOT / "libioshape/base/settings.def").read_text(encoding="utf-8")
    source = re.sub(r"/\*.*?\*/", "", source, flags=re.DOTALL)
    names = set(re.findall(r"^\w+\(\w+, (\w+),", source, re.MULTILINE))
    calls = {"CHOICE": choice, "COUNT": count, "SWITCH": a_switch, "SECONDS": of_package("seconds")}
    calls |= {kind.upper(): number(kind) for kind in ("bytes", "power")}
    calls |= {kind.upper(): text(kind) for kind in ("text", "name", "path")}
    words = {owner: owner.lower() for owner in OWNERS} | {name: name for name in names}
    lines = "\n".join(line.strip() for line in source.splitlines())
    exec(lines, {**UNITS, **words, **calls})
    return rows


def table() -> str:
    """The module with the rows."""
    rows = []
    for row in read_table():
        fields = "\n".join(f"        {name}={value!r}," for name, value in row._asdict().items())
        rows.append(f"    Setting(\n{fields}\n    ),")
    body = "\n".join(rows)
    return f"""# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E501
# fmt: off
\"\"\"Made from libioshape/base/settings.def by tests/support/reference.py: change that.\"\"\"

from ioshape._settings.setting import Setting

_ROWS = (
{body}
)

SETTINGS = {{row.name: row for row in _ROWS}}
"""


def arguments() -> str:
    """Of configure()."""
    lines = []
    for row in read_table():
        words = ", ".join(f'"{word}"' for word in row.words)
        kind = f"Literal[{words}]" if row.words else TYPES[row.kind]
        lines.append(f"    {row.name}: {kind} | None = None,")
    return "\n".join(lines)


def settings() -> str:
    """The table of settings."""
    rows = ["| setting | values | default | | who needs it |", "|---|---|---|---|---|"]
    rows += [
        f"| `{one.name}` | {one.values} | {one.default} | {one.about} | {one.user} |"
        for one in read_table()
    ]
    return "\n".join(rows)


def renewed_config(module: str) -> str:
    """The module with the arguments of configure()."""
    begin, end = (f"    # made from the table: {word}\n" for word in ("begin", "end"))
    before, _, rest = module.partition(begin)
    return f"{before}{begin}{arguments()}\n{end}{rest.partition(end)[2]}"


# ---- The page -----------------------------------------------------------------------------------


def renewed(path: Path, title: str, text: str) -> str:
    """The page with what is made put in its place."""
    begin, end = (f"<!-- {title}: {word} -->" for word in ("made from the source", "end"))
    before, found, rest = path.read_text(encoding="utf-8").partition(begin)
    assert found, f"{path} has no {begin}"
    return f"{before}{begin}\n\n{text.strip()}\n\n{end}{rest.partition(end)[2]}"


def files() -> dict[Path, str]:
    """All that is made, as it should be."""
    made = {TABLE: table(), CONFIG: renewed_config(CONFIG.read_text(encoding="utf-8"))}
    if TABLE.exists():
        import cli_reference  # noqa: PLC0415 - of a package that can be imported

        made[PAGE] = renewed(PAGE, "settings", settings())
        made[REFERENCE] = renewed(REFERENCE, "reference", reference())
        made[cli_reference.PAGE] = cli_reference.page()
    return made


def main() -> None:
    for path, text in files().items():
        if sys.argv[1:] == ["--write"]:
            path.write_text(text, encoding="utf-8")
        elif not path.exists() or path.read_text(encoding="utf-8") != text:
            sys.exit(f"{path} is not up to date; run this with --write")


if __name__ == "__main__":
    main()
