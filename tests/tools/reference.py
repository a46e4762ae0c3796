# SPDX-License-Identifier: Apache-2.0
"""Generates documentation and code from the package's docstrings, the table of settings and the
commands.

It makes parts of docs/python.md and docs/python-reference.md, docs/cli-reference.md, and the
arguments of configure(). With the package of this tree installed (tests/support/package.sh)

    python tests/tools/reference.py --write

writes them. Without the option, it reports whether they are up to date; a test does that, too.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
from pathlib import Path
from types import FunctionType, ModuleType

import cli_reference
import ioshape
import ioshape.dcp
import ioshape.safetensors
from ioshape._core.setting import SETTINGS

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "python.md"
REFERENCE = ROOT / "docs" / "python-reference.md"
CONFIG = ROOT / "bindings" / "ioshape" / "_core" / "config.py"

# The order for readers; other names follow.
FIRST = ["save", "save_async", "SaveHandle", "wait_all", "load", "Report"]

#: modules that users import directly; those for large frameworks have only pages
MODULES = [ioshape.types, ioshape.errors, ioshape.staging, ioshape.dcp, ioshape.safetensors]

SECTION = re.compile(r"^(Args|Returns|Raises):$", re.MULTILINE)


def prose(doc: str | None) -> str:
    """Convert a docstring to Markdown; its sections become lists."""
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


def source_of(cls: type) -> str:
    """Return the source of a class.

    A public class names a public module as its own, which need not contain it.
    """
    for name, module in sorted(sys.modules.items()):
        if name.startswith("ioshape.") and vars(module).get(cls.__name__) is cls:
            home = inspect.getsource(module)
            for node in ast.parse(home).body:
                if isinstance(node, ast.ClassDef) and node.name == cls.__name__:
                    return ast.get_source_segment(home, node) or ""
    raise LookupError(cls)


def fields(cls: type) -> str:
    """Return what a class says about its attributes in comments that begin with "#:"."""
    out = []
    comment: list[str] = []
    for line in textwrap.dedent(source_of(cls)).splitlines():
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
    """Return a signature as a code block, on one line if it fits."""
    text = str(inspect.signature(function))  # type: ignore[arg-type]
    # Defaults that are modules print with their path on this machine.
    text = re.sub(r"<module '(\w+)' from [^>]*>", r"\1", text).replace("'", "")
    if len(name + text) > 100:
        arguments, _, result = text.rpartition(" -> ")
        arguments = re.sub(r", (?=[*\w])(?![^\[]*\])", ",\n    ", arguments[1:-1])
        text = f"(\n    {arguments},\n) -> {result}"
    return f"```python\n{name}{text}\n```"


def method(owner: str, name: str, member: object) -> str:
    """Describe a public method or property of a class."""
    if isinstance(member, property):
        return f"- `{owner}.{name}`: {' '.join(prose(member.__doc__).split())}"
    text = str(inspect.signature(member)).replace("'", "").replace("(self, ", "(")  # type: ignore[arg-type]
    text = text.replace("(self)", "()")
    about = prose(inspect.getdoc(member)).replace("\n", " ")
    return f"- `{owner}.{name}{text}`: {about}"


def describe(name: str, module: ModuleType = ioshape) -> str:
    """Describe a public name."""
    value = getattr(module, name)
    full = f"{module.__name__}.{name}"
    parts = [f"## {name if module is ioshape else full}"]
    if isinstance(value, FunctionType):
        parts += [signature(full, value), prose(value.__doc__)]
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
    """Return the whole reference."""
    names = [name for name in ioshape.__all__ if not name.startswith("_")]
    order = FIRST + [name for name in names if name not in FIRST]
    parts = [describe(name) for name in order]
    for module in MODULES:
        # Names from the package of this name are described there.
        own = [
            name
            for name in module.__all__
            if is_ours(getattr(module, name)) and name not in ioshape.__all__
        ]
        parts += [describe(name, module) for name in own]
    return "\n\n".join(parts) + "\n"


def is_ours(value: object) -> bool:
    """Return whether a value is defined in the package."""
    return str(getattr(value, "__module__", "")).startswith("ioshape")


# ---- Settings -----------------------------------------------------------------------------------

#: types that configure() accepts, by the kind of a setting
TYPES = {
    "bytes": "int | str",
    "count": "int",
    "text": "str",
    "name": "str",
    "path": "str | os.PathLike[str]",
    "switch": "bool",
}


def arguments() -> str:
    """Return the arguments of configure()."""
    lines = []
    for row in SETTINGS.values():
        words = ", ".join(f'"{word}"' for word in row.words)
        kind = f"Literal[{words}]" if row.words else TYPES[row.kind]
        lines.append(f"    {row.name}: {kind} | None = None,")
    return "\n".join(lines)


def settings() -> str:
    """Return the table of settings."""
    rows = ["| setting | values | default | | who needs it |", "|---|---|---|---|---|"]
    rows += [
        f"| `{one.name}` | {one.values} | {one.default} | {one.about} | {one.user} |"
        for one in SETTINGS.values()
    ]
    return "\n".join(rows)


def renewed_config(module: str) -> str:
    """Return the module with updated arguments of configure(), and their names."""
    names = "\n".join(f'        "{one.name}": {one.name},' for one in SETTINGS.values())
    for indent, made, text in (("    ", "made", arguments()), ("        ", "named", names)):
        begin, end = (f"{indent}# {made} from the table: {word}\n" for word in ("begin", "end"))
        before, _, rest = module.partition(begin)
        module = f"{before}{begin}{text}\n{end}{rest.partition(end)[2]}"
    return module


# ---- Files ---------------------------------------------------------------------------------------


def renewed(path: Path, title: str, text: str) -> str:
    """Return a page with its generated part updated."""
    begin, end = (f"<!-- {title}: {word} -->" for word in ("made from the source", "end"))
    before, found, rest = path.read_text(encoding="utf-8").partition(begin)
    assert found, f"{path} has no {begin}"
    return f"{before}{begin}\n\n{text.strip()}\n\n{end}{rest.partition(end)[2]}"


def files() -> dict[Path, str]:
    """Return all generated files with their contents."""
    return {
        CONFIG: renewed_config(CONFIG.read_text(encoding="utf-8")),
        PAGE: renewed(PAGE, "settings", settings()),
        REFERENCE: renewed(REFERENCE, "reference", reference()),
        cli_reference.PAGE: cli_reference.page(),
    }


def is_of_this_tree() -> bool:
    """Return whether the installed package is that of this tree."""
    installed, here = Path(ioshape.__file__).parent, CONFIG.parents[1]
    modules = [path.relative_to(here) for path in here.rglob("*.py")]
    return all(
        (installed / name).exists()
        and (installed / name).read_bytes() == (here / name).read_bytes()
        for name in modules
        if here / name != CONFIG  # this tool may change it
    )


def main() -> None:
    if not is_of_this_tree():
        sys.exit("the installed package is not of this tree: run tests/support/package.sh")
    for path, text in files().items():
        if sys.argv[1:] == ["--write"]:
            path.write_text(text, encoding="utf-8")
        elif not path.exists() or path.read_text(encoding="utf-8") != text:
            sys.exit(f"{path} is not up to date; run this with --write")


if __name__ == "__main__":
    main()
