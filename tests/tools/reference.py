# SPDX-License-Identifier: Apache-2.0
"""Generate documentation and code from the table of settings and from the commands.

It makes a part of docs/python.md, docs/cli-reference.md, and the arguments of configure(). With the
package of this tree installed (tests/support/package.sh)

    python tests/tools/reference.py --write

writes them. Without the option, it reports whether they are up to date; a test does that, too.
"""

from __future__ import annotations

import sys
from pathlib import Path

import cli_reference
import ioshape
from ioshape._core.config import SETTINGS

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "python.md"
CONFIG = ROOT / "bindings" / "ioshape" / "_core" / "config.py"

# ---- Settings -----------------------------------------------------------------------------------

#: types that configure() accepts, by the kind of a setting
TYPES = {
    "bytes": "int | str",
    "count": "int",
    "text": "str",
    "name": "str",
    "path": "str | os.PathLike[str]",
    "rules": "str | Mapping[str, str]",
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
