# SPDX-License-Identifier: Apache-2.0
"""The parts of docs/python.md that come from the package: its docstrings, its settings.

    python tests/support/reference.py --write

renews them there. Without the option, it says whether they are up to date; a test does the same.
"""

import inspect
import re
import sys
import textwrap
from pathlib import Path
from types import FunctionType

import ioshape
from ioshape._config import SETTINGS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "python.md"

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
    parts = [f"### {name}"]
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


def settings() -> str:
    """The table of settings."""
    rows = ["| setting | variable | values | default | |", "|---|---|---|---|---|"]
    rows += [
        f"| `{one.name}` | `{one.variable}` | {one.values} | {one.default} | {one.about} |"
        for one in SETTINGS.values()
    ]
    return "\n".join(rows)


def renewed(page: str) -> str:
    """The page with all that is made put in its place."""
    for title, text in (("settings", settings()), ("reference", reference().strip())):
        begin, end = (f"<!-- {title}: {word} -->" for word in ("made from the source", "end"))
        before, found, rest = page.partition(begin)
        assert found, f"{PAGE} has no {begin}"
        page = f"{before}{begin}\n\n{text}\n\n{end}{rest.partition(end)[2]}"
    return page


def main() -> None:
    page = PAGE.read_text(encoding="utf-8")
    if sys.argv[1:] == ["--write"]:
        PAGE.write_text(renewed(page), encoding="utf-8")
    elif renewed(page) != page:
        sys.exit(f"{PAGE} is not up to date; run this with --write")


if __name__ == "__main__":
    main()
