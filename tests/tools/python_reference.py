# SPDX-License-Identifier: Apache-2.0
"""Print the reference of the Python package as Markdown, made from its docstrings.

docs/site/pages.py puts it into docs/python-reference.md of the site. The package of this tree must
be installed (tests/support/package.sh).
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import sys
import textwrap
from dataclasses import dataclass
from signal import Signals
from types import FunctionType, ModuleType
from typing import Any

import ioshape
import ioshape.dcp
import ioshape.safetensors
from page_text import fill, paragraphs

# The order for readers; other names follow.
FIRST = ["save", "save_async", "SaveHandle", "wait_all", "load", "Report"]

#: modules that users import directly; those for large frameworks have only pages
MODULES = [ioshape.types, ioshape.errors, ioshape.staging, ioshape.dcp, ioshape.safetensors]

#: columns of a block of code on the site
CODE_COLUMNS = 90

SECTION = re.compile(r"^(Args|Returns|Raises):$", re.MULTILINE)


def sections_of(doc: str | None) -> dict[str, str]:
    """Split a docstring into its description "", its sections, and "after" for what follows."""
    found = {"": ""}
    section = ""
    for line in inspect.cleandoc(doc or "").splitlines():
        heading = SECTION.match(line)
        if heading:
            section = heading[1]
        elif section and line and not line.startswith("    "):
            section = "after"
        found[section] = found.get(section, "") + ("" if heading else line + "\n")
    return found


def items_of(section: str) -> list[str]:
    """Return the items of a section as "`name`: text". Names with equal texts share an item."""
    items: dict[str, str] = {}
    name = ""
    for line in textwrap.dedent(section).splitlines():
        if found := re.match(r"(\w+): (.*)", line):
            name = found[1]
            items[name] = found[2]
        elif line:
            items[name] += " " + line.strip()
    names: dict[str, list[str]] = {}
    for name, text in items.items():
        names.setdefault(text, []).append(f"`{name}`")
    return [f"{', '.join(some)}: {text}" for text, some in names.items()]


def items_of_all(found: dict[str, str]) -> list[str]:
    """Return the arguments, the result and the exceptions of a docstring, one item for each."""
    items = items_of(found.get("Args", ""))
    items += [f"**Returns** {found['Returns']}"] if "Returns" in found else []
    return items + [f"**Raises** {one}" for one in items_of(found.get("Raises", ""))]


def prose(doc: str | None) -> str:
    """Convert a docstring to Markdown; its sections become one list."""
    found = sections_of(doc)
    items = [fill(one, "- ", "  ") for one in items_of_all(found)]
    parts = [paragraphs(found[""]), "\n".join(items), paragraphs(found.get("after", ""))]
    return "\n\n".join(part for part in parts if part)


def prose_in_list(first: str, doc: str | None) -> str:
    """Convert the docstring of a method to an item of a list."""
    found = sections_of(doc)
    parts = [f"{first}:", found[""], *items_of_all(found), found.get("after", "")]
    return fill(" ".join(parts), "- ", "  ")


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


def fields(cls: type) -> list[str]:
    """Return what a class says about its attributes in comments that begin with "#:"."""
    out: list[str] = []
    plain: list[str] = []  # attributes without a comment share a line
    comment: list[str] = []
    for line in textwrap.dedent(source_of(cls)).splitlines():
        text = line.strip()
        if text.startswith("#:"):
            comment.append(text.removeprefix("#:").strip())
        elif match := re.match(r"    (\w+): ([^=#]+?)( = .*)?$", line):
            name = f"`{match[1]}` (`{match[2]}`)"
            if comment:
                out.append(fill(f"{name}: {' '.join(comment)}", "- ", "  "))
            else:
                plain.append(name)
            comment = []
        elif text and not text.startswith('"""'):
            comment = []
    return ["- " + ", ".join(plain)] * bool(plain) + out


def methods(handle: str, cls: type) -> list[str]:
    """Return what a class says about its methods, except for those that torch calls."""
    of_torch = {
        name for base in cls.__mro__ if base.__module__.startswith("torch.") for name in vars(base)
    }
    return [
        method(handle, name, member)
        for name, member in vars(cls).items()
        if not name.startswith("_") and isinstance(member, (FunctionType, property))
        if name not in of_torch
    ]


@dataclass
class Source:
    """A part of a signature that prints as this text."""

    text: str

    def __repr__(self) -> str:
        return self.text


def default_of(value: object) -> Source:
    """Return a default as the source has it."""
    if isinstance(value, ModuleType):
        return Source(value.__name__)
    if isinstance(value, tuple):
        return Source(f"({', '.join(map(str, map(default_of, value)))})")
    if isinstance(value, Signals):
        return Source(f"signal.{value.name}")
    return Source(json.dumps(value) if isinstance(value, str) else repr(value))


def annotation_of(text: object) -> Any:
    """Return an annotation, which the modules keep as text, with its quotes as in the source."""
    return Source(text.replace("'", '"')) if isinstance(text, str) else text


def text_of(function: object) -> str:
    """Return the parameters and the result of a function or method, without self."""
    found = inspect.signature(function)  # type: ignore[arg-type]
    empty = inspect.Parameter.empty
    parameters = [
        one.replace(
            annotation=annotation_of(one.annotation),
            default=one.default if one.default is empty else default_of(one.default),
        )
        for one in found.parameters.values()
        if one.name != "self"
    ]
    result = annotation_of(found.return_annotation)
    return str(inspect.Signature(parameters, return_annotation=result))


def signature(name: str, function: object) -> str:
    """Return a signature as a block of code. A long one has a line for each parameter."""
    text = f"{name}{text_of(function)}"
    if len(text) > CODE_COLUMNS:
        opening, _, rest = text.partition("(")
        parameters, _, result = rest.rpartition(")")
        lines = re.sub(r", (?=\*|/|\w+(?::|=|,|$))", ",\n    ", parameters)
        text = f"{opening}(\n    {lines},\n){result}"
    return f"```python\n{text}\n```"


def method(owner: str, name: str, member: object) -> str:
    """Describe a public method or property of a class."""
    if isinstance(member, property):
        return prose_in_list(f"`{owner}.{name}`", member.__doc__)
    return prose_in_list(f"`{owner}.{name}{text_of(member)}`", inspect.getdoc(member))


def describe(name: str, module: ModuleType = ioshape) -> str:
    """Describe a public name."""
    value = getattr(module, name)
    full = f"{module.__name__}.{name}"
    parts = [f"## {name if module is ioshape else full}"]
    if isinstance(value, FunctionType):
        parts += [signature(full, value), prose(value.__doc__)]
    elif isinstance(value, type):
        parts.append(prose(value.__doc__))
        handle = name[0].lower() if name != "SaveHandle" else "handle"
        parts.append("\n".join([*fields(value), *methods(handle, value)]))
    title, *rest = (part for part in parts if part)
    return title + "\n" + "\n\n".join(rest)


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


if __name__ == "__main__":
    sys.stdout.write(reference())
