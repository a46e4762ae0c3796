# SPDX-License-Identifier: Apache-2.0
"""List every sentence that the product can say, for review: errors, log lines, help and reports.

    python tests/tools/messages.py

writes tests/house/messages.txt, which tests/house/test_messages.py compares with the source. "…"
stands for what is filled in. A change of words is a change of that file.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

from tree import COMMENT, LIBRARY, ROOT

GOLDEN = ROOT / "tests" / "house" / "messages.txt"
PACKAGE = ROOT / "bindings" / "ioshape"

STRING = r'"(?:[^"\\\n]|\\.)*"'
# Literals that the compiler joins, with PRIu64 and its like between them.
LITERAL = re.compile(rf"{STRING}(?:\s*(?:PRI\w+\s*)?{STRING})*")
PLACEHOLDER = re.compile(r"%(?:%|[-.+#0\d*]*(?:hh|h|ll|l|z|j|t)?[a-zA-Z])")
INCLUDE = re.compile(r"^\s*#\s*(?:include|error).*$", re.MULTILINE)


def is_sentence(text: str) -> bool:
    """Return whether this is prose: three words, or two that end as a sentence does."""
    found = re.findall(r"(?<![\w/])[A-Za-z][\w'-]+(?![\w/])", text)
    return len(found) >= 3 or (len(found) == 2 and text.rstrip().endswith((".", ":", "…")))


def of_c(text: str) -> Iterator[str]:
    """Yield the sentences of a file of C."""
    for found in LITERAL.finditer(INCLUDE.sub("", COMMENT.sub(" ", text))):
        joined = "".join(one[1:-1] for one in re.findall(STRING, found[0].replace("PRI", '"d"')))
        joined = re.sub(r"\\(.)", lambda escape: "\n" if escape[1] == "n" else escape[1], joined)
        yield PLACEHOLDER.sub(lambda one: "%" if one[0] == "%%" else "…", joined)


def _text_of(node: ast.AST) -> str:
    """Return the text of a string or an f-string."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(_text_of(part) for part in node.values)
    return "…"


def of_python(text: str) -> Iterator[str]:
    """Yield the sentences of a module, without its docstrings."""
    tree = ast.parse(text)
    ignored: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            ignored.add(node.value)  # a docstring
        if isinstance(node, ast.JoinedStr):
            ignored.update(part for part in ast.walk(node) if part is not node)
    found = [
        (node.lineno, node.col_offset, _text_of(node))
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant | ast.JoinedStr) and node not in ignored
    ]
    for _, _, sentence in sorted(found):
        yield sentence


def sources() -> Iterator[Path]:
    """Yield the files of the product that hold sentences."""
    for top, suffixes in ((LIBRARY, (".c", ".h", ".def")), (PACKAGE, (".py",))):
        yield from (path for path in sorted(top.rglob("*")) if path.suffix in suffixes)


def listed() -> str:
    """Return what the golden file is to be."""
    lines = []
    for path in sources():
        text = path.read_text(encoding="utf-8")
        said = [
            one for one in (of_python if path.suffix == ".py" else of_c)(text) if is_sentence(one)
        ]
        if said:
            lines.append(f"\n{path.relative_to(ROOT)}")
            lines += ["\t" + one.replace("\n", "\\n") for one in said]
    return "\n".join(lines).lstrip("\n") + "\n"


if __name__ == "__main__":
    GOLDEN.write_text(listed(), encoding="utf-8")
