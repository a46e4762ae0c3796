# SPDX-License-Identifier: Apache-2.0
"""Make the reference of the C API from the comments in the public headers.

    make_reference.py VERSION FOLDER HEADER...

The build calls it. It writes FOLDER/reference.md, and man pages into FOLDER/man3 and FOLDER/man7:
one for each function, struct, enum and type. From docs/cli-reference.md it makes
FOLDER/man1/ioshape.1. It fails if a comment is missing, or leaves out a parameter or the result.
"""

import re
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path

COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)
FUNCTION = re.compile(r"\b(ioshape_\w+)\((.*)\);$", re.DOTALL)
TYPE = re.compile(r"^(?:struct|enum) (ioshape_\w+)\b|^typedef .*?\(\*(ioshape_\w+)\)", re.DOTALL)
MACRO = re.compile(r"^#define (\w+)")
OPTIONS = re.compile(r"\bstruct (ioshape_\w+_options) \*")


@dataclass
class Item:
    """One thing that a header declares, and its comment."""

    header: str
    name: str
    declaration: str
    text: str  # of the comment, without its tags
    params: dict[str, str] = field(default_factory=dict)
    returns: str = ""
    is_function: bool = False

    @property
    def summary(self) -> str:
        return re.split(r"(?<=\.)\s", self.text, maxsplit=1)[0].rstrip(".")


class Undocumented(Exception):
    """A header says too little."""


def plain(comment: str) -> str:
    """Return the text of a comment without its frame."""
    inner = comment.removeprefix("/**").removeprefix("/*").removesuffix("*/")
    return "\n".join(re.sub(r"^\s*\* ?", "", line) for line in inner.splitlines()).strip()


def joined(text: str) -> str:
    return " ".join(text.split())


def declaration_after(text: str, start: int) -> str:
    """Return a macro's line, or a declaration up to its semicolon outside of braces."""
    rest = text[start:].lstrip()
    if rest.startswith("#"):
        return rest.partition("\n")[0]
    depth = 0
    for match in re.finditer(r"/\*.*?\*/|[{};]", rest, re.DOTALL):
        depth += {"{": 1, "}": -1}.get(match[0], 0)
        if match[0] == ";" and not depth:
            return rest[: match.end()]
    raise Undocumented(f"a comment is followed by no declaration: {rest[:60]!r}")


def item_of(header: str, comment: str, declaration: str) -> Item:
    body, *tags = re.split(r"^@(?=param|return)", plain(comment), flags=re.MULTILINE)
    code = COMMENT.sub("", declaration)
    function, kind, macro = FUNCTION.search(code), TYPE.search(code), MACRO.search(code)
    if not code.startswith("typedef") and function:
        name = function[1]
    elif found := kind or macro:
        name = next(group for group in found.groups() if group)
    else:
        raise Undocumented(f"{header}: what is this? {code}")
    is_function = bool(function) and not code.startswith("typedef")
    shown = declaration.replace("/**<", "/*").replace("/**", "/*")
    item = Item(header, name, shown, body.strip(), is_function=is_function)
    for tag in tags:
        word, _, rest = tag.partition(" ")
        if word == "param":
            param, _, about = rest.strip().partition(" ")
            item.params[param] = joined(about)
        else:
            item.returns = joined(rest)
    if item.is_function:
        check(item, code, function[2] if function else "")
    return item


def check(item: Item, code: str, parameters: str) -> None:
    names = re.findall(r"(\w+)(?:\[\w*\])?\s*(?:,|$)", joined(parameters))
    wanted = [] if names == ["void"] else names
    if list(item.params) != wanted:
        raise Undocumented(f"{item.name}: @param {list(item.params)}, parameters {wanted}")
    if bool(item.returns) == code.startswith("void ") and not code.startswith("void *"):
        raise Undocumented(f"{item.name}: what does it return?")


def items_of(path: Path) -> tuple[str, list[Item]]:
    """Return the description of a header and its declarations."""
    text = path.read_text(encoding="utf-8")
    found = [
        item_of(path.name, match[0], declaration_after(text, match.end()))
        for match in re.finditer(r"^/\*\*.*?\*/", text, re.MULTILINE | re.DOTALL)
    ]
    code = COMMENT.sub("", text)
    declared = set(re.findall(r"^[a-z][\w *]*?\b(ioshape_\w+)\(", code, re.MULTILINE))
    declared |= set(re.findall(r"^(?:struct|enum) (ioshape_\w+)(?: \{|;)", code, re.MULTILINE))
    declared |= set(re.findall(r"^typedef .*?\(\*(ioshape_\w+)\)", code, re.MULTILINE))
    if missing := declared - {item.name for item in found}:
        raise Undocumented(f"{path.name}: no comment /** ... */ for {sorted(missing)}")
    comments = [plain(match[0]) for match in COMMENT.finditer(text)]
    return next((one for one in comments if not one.startswith("SPDX")), ""), found


# ---- Man pages --------------------------------------------------------------------------------


def roff(text: str) -> str:
    escaped = text.replace("\\", "\\e").replace("-", "\\-")
    return re.sub(r"^([.'])", r"\\&\1", escaped, flags=re.MULTILINE)


def paragraphs(text: str) -> str:
    """Text with empty lines between paragraphs; what is indented stays as it is."""
    parts = []
    for block in re.split(r"\n\s*\n", text):
        if block.startswith("    "):
            parts.append(f".nf\n{roff(block)}\n.fi")
        else:
            parts.append(roff(joined(block)))
    return "\n.PP\n".join(parts)


def fields(item: Item, structs: dict[str, Item]) -> list[str]:
    """List the structs of options that a function takes: what callers set stands in them."""
    lines = []
    for name in OPTIONS.findall(item.declaration if item.is_function else ""):
        if name not in structs:
            raise Undocumented(f"{item.name}: no header declares struct {name}")
        lines += [
            ".SH OPTIONS",
            f"{name.upper()}_INIT initializes a struct {name} with all defaults. Its fields:",
            f".PP\n.nf\n{roff(structs[name].declaration)}\n.fi",
        ]
    return lines


def man_page(item: Item, others: list[Item], structs: dict[str, Item], version: str) -> str:
    lines = [
        f'.TH {item.name} 3 "" "libioshape {version}" "libioshape"',
        ".SH NAME",
        f"{item.name} \\- {roff(joined(item.summary))}",
        ".SH SYNOPSIS",
        f".nf\n#include <ioshape/{item.header}>\n\n{roff(item.declaration)}\n.fi",
        ".SH DESCRIPTION",
        paragraphs(item.text),
    ]
    if item.params:
        lines.append(".SH ARGUMENTS")
        lines += [f".TP\n.I {name}\n{roff(about)}" for name, about in item.params.items()]
    if item.returns:
        lines += [".SH RETURN VALUE", roff(item.returns)]
    lines += fields(item, structs)
    near = sorted(other.name for other in others if other.name != item.name)
    lines += [".SH SEE ALSO", ".BR ioshape (7),", roff(", ".join(near))]
    return "\n".join(lines) + "\n"


def overview(headers: list[tuple[str, str, list[Item]]], version: str) -> str:
    lines = [
        f'.TH ioshape 7 "" "libioshape {version}" "libioshape"',
        ".SH NAME",
        "ioshape \\- checkpoints that are durable, atomic and written in turn",
    ]
    for header, about, found in headers:
        lines += [f'.SH "<ioshape/{header}>"', paragraphs(about), ".PP"]
        functions = [item for item in found if item.is_function]
        lines += [f".TP\n.BR {one.name} (3)\n{roff(joined(one.summary))}" for one in functions]
    return "\n".join(lines) + "\n"


def command_page(reference: str, version: str) -> str:
    """Convert docs/cli-reference.md: paragraphs, lines of code, lists of options."""
    lines = [
        f'.TH ioshape 1 "" "libioshape {version}" "libioshape"',
        ".SH NAME",
        "ioshape \\- runs, checks and watches programs that save checkpoints",
        ".SH SYNOPSIS\n.B ioshape\n.I COMMAND\n[ARGUMENT]...",
        ".SH COMMANDS",
    ]
    for section in reference.split("\n## ")[1:]:
        name, _, rest = section.partition("\n")
        lines.append(f".SS {roff(name.strip())}")
        for block in rest.split("\n\n"):
            text = block.strip("\n").replace("`", "")
            if text.startswith("- "):
                options = [joined(item).split(": ", 1) for item in f"\n{text}".split("\n- ")[1:]]
                lines += [f".TP\n.B {roff(option)}\n{roff(what)}" for option, what in options]
            else:
                lines += [".PP", paragraphs(text.replace("\\|", "|"))]
    lines += [".SH SEE ALSO", ".BR ioshape (7)"]
    return "\n".join(lines) + "\n"


# ---- One page ---------------------------------------------------------------------------------


def markdown(headers: list[tuple[str, str, list[Item]]], version: str) -> str:
    out = [f"# libioshape {version}: the C functions and types"]
    for header, about, found in headers:
        out += [f"## ioshape/{header}", about]
        for item in found:
            out += [f"### {item.name}", f"```c\n{item.declaration}\n```", item.text]
            if item.params:
                out.append("\n".join(f"- `{name}`: {what}" for name, what in item.params.items()))
            if item.returns:
                out.append(f"Returns {item.returns}.")
    return "\n\n".join(out) + "\n"


def main() -> None:
    version, folder = sys.argv[1], Path(sys.argv[2])
    headers = [(path.name, *items_of(path)) for path in map(Path, sys.argv[3:])]
    for section in ("man1", "man3", "man7"):
        shutil.rmtree(folder / section, ignore_errors=True)
        (folder / section).mkdir(parents=True)
    structs = {item.name: item for _, _, found in headers for item in found}
    for _, _, found in headers:
        for item in found:
            if not MACRO.match(item.declaration):
                page = folder / "man3" / f"{item.name}.3"
                page.write_text(man_page(item, found, structs, version), encoding="utf-8")
    command = Path(__file__).with_name("cli-reference.md").read_text(encoding="utf-8")
    (folder / "man1" / "ioshape.1").write_text(command_page(command, version), encoding="utf-8")
    (folder / "man7" / "ioshape.7").write_text(overview(headers, version), encoding="utf-8")
    (folder / "reference.md").write_text(markdown(headers, version), encoding="utf-8")


main()
