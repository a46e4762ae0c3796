# SPDX-License-Identifier: Apache-2.0
"""Find prose that a reader stumbles over: fragments, riddles, long sentences and retired words.

    python tests/tools/english.py [PATH...]

prints the figures, and with paths each finding in these files or folders. The figures are those of
`tests/bench.sh english`; tests/house/test_english.py keeps them from rising.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

import terms
from tree import ROOT

#: A sentence of a page, a public header or a docstring has at most so many words.
MOST_WORDS = 30

#: A description of a function begins with its verb, and one of a class with a noun. No description
#: begins with one of these.
NEVER_FIRST = set(
    """
    and as at because before between but by despite during else for from how if in into like of
    off on onto or out over past per since so than that then those though through till to under
    unless until up upon via what whatever when whenever where wherever whether which whichever
    while who whoever whom whose why with within without
    """.split()  # noqa: SIM905 - one word a line would fill two screens
)
#: A description of a function begins with none of these either.
NEVER_FIRST_OF_FUNCTIONS = NEVER_FIRST | set(
    """
    a all an another any anybody anything both each either every everybody everything few here it
    its itself most neither no nobody none nothing one other others ours same she some somebody
    something such the their theirs them there these they this us we you your
    """.split()  # noqa: SIM905
)
RIDDLE = re.compile(
    r"\b(?:nobody|somebody|anybody|whoever|whomever|whom)\b|\bthe same\.", re.IGNORECASE
)

C_COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)
# A function of C with the comment that stands before it. Its first line begins in the first column.
C_FUNCTION = re.compile(
    r"(/\*(?:(?!\*/).)*?\*/)\n(?:[A-Z_]+\n)?"
    r"(?!typedef|struct \w+ \{|enum|union|#|extern|static const|/\*)"
    r"\w[\w\s*]*?\b\w+\([^;{]*?\)[^;{}=]*?[;{]",
    re.DOTALL,
)


class Finding(NamedTuple):
    """One place to be rewritten."""

    kind: str
    path: str
    line: int
    text: str


def _plain(comment: str) -> str:
    """Return the text of a comment or docstring, in one line."""
    return " ".join(
        re.sub(r"^\s*(?:/\*+|\*/?|//|#:?)|\*/\s*$", "", line).strip()
        for line in comment.splitlines()
    ).strip()


def first_word(text: str) -> str:
    """Return the first word of a description in small letters, "" if it begins otherwise."""
    found = re.match(r"[A-Za-z'-]+", _plain(text))
    return found[0].lower() if found else ""


def fragment(text: str, *, of_function: bool) -> bool:
    """Return whether a description begins with neither a verb nor a noun."""
    word = first_word(text)
    return word in (NEVER_FIRST_OF_FUNCTIONS if of_function else NEVER_FIRST) or (
        of_function and not word
    )


# ---- Descriptions --------------------------------------------------------------------------------


class Description(NamedTuple):
    """The description of a function, class or module."""

    line: int
    text: str
    of_function: bool


def c_descriptions(text: str) -> Iterator[Description]:
    for found in C_FUNCTION.finditer(text):
        plain = _plain(found[1])
        if not plain.startswith("----"):
            yield Description(text.count("\n", 0, found.start()) + 1, plain, of_function=True)


def python_descriptions(text: str) -> Iterator[Description]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module):
            docstring = ast.get_docstring(node)
            if docstring:
                # A property is described by what it is.
                is_property = isinstance(node, ast.FunctionDef) and any(
                    "property" in ast.unparse(one) for one in node.decorator_list
                )
                is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
                yield Description(node.body[0].lineno, docstring, is_function and not is_property)


def descriptions(path: Path, text: str) -> Iterator[Description]:
    """Yield the descriptions in a file of C or Python."""
    if path.suffix in (".py", ".pyi"):
        yield from python_descriptions(text)
    else:
        yield from c_descriptions(text)


# ---- Prose ---------------------------------------------------------------------------------------


def prose_of_code(path: Path, text: str) -> Iterator[tuple[int, str]]:
    """Yield the comments and docstrings of a file, each with its line."""
    if path.suffix in (".py", ".pyi"):
        for one in python_descriptions(text):
            yield one.line, one.text
        comments = re.compile(r"(?:^[ \t]*#.*\n)+", re.MULTILINE)
    elif path.suffix == ".lua":
        comments = re.compile(r"(?:^[ \t]*--.*\n)+", re.MULTILINE)
    else:
        comments = C_COMMENT
    for found in comments.finditer(text):
        yield text.count("\n", 0, found.start()) + 1, found[0]


def prose_of_page(text: str) -> Iterator[tuple[int, str]]:
    """Yield the paragraphs, list items and table cells of a page, without its code."""
    text = re.sub(
        r"^```.*?^```",
        lambda found: "\n" * found[0].count("\n"),
        text,
        flags=re.DOTALL | re.MULTILINE,
    )
    line = 1
    for block in re.split(r"\n[ \t]*\n|\n(?=[ \t]*(?:[-*|]|\d+\.) )", text):
        if not re.match(r"\s*(?: {4}|\t)(?![-*\d])", block):
            for cell in block.split("|") if block.lstrip().startswith("|") else [block]:
                yield line, cell
        line += block.count("\n") + 1


def sentences(prose: str) -> Iterator[str]:
    """Yield the sentences of a piece of prose."""
    text = re.sub(r"\]\([^)]*\)|https?://\S+", "", _plain(prose))
    text = re.sub(r"`[^`]*`", "CODE", text)
    text = re.sub(r"\s@(?:param|return)\b", ". @", text)  # each is a sentence of its own
    yield from re.split(
        r"(?<=[.!?:;])[\s\"')]+(?=[A-Z\"'(`0-9@-])|(?<=\))\s(?=[A-Z])|\n\s*\n| - ", text
    )


def words(sentence: str) -> int:
    return len(re.findall(r"[\w'-]*[A-Za-z][\w'-]*", sentence))


# ---- The tree ------------------------------------------------------------------------------------

PRODUCT = ("libioshape", "include", "bindings")
TESTS = ("tests", "examples")
PAGES = ("docs", "README.md", "CONTRIBUTING.md", "SECURITY.md")
CODE = (".c", ".h", ".hpp", ".cpp", ".lua", ".py", ".pyi")
#: Data for tests of other people's prose or files, and pages that record what was.
EXCEPT = ("tests/gallery", "tests/c/fuzz/corpus")


def files(*places: str) -> Iterator[Path]:
    """Yield the files of code and the pages below these paths of the repository."""
    for place in places:
        top = ROOT / place
        for path in sorted(top.rglob("*")) if top.is_dir() else [top]:
            name = path.relative_to(ROOT).as_posix()
            if path.suffix in (*CODE, ".md") and path.is_file() and not name.startswith(EXCEPT):
                yield path


def findings(path: Path) -> Iterator[Finding]:
    """Yield what is to be rewritten in a file."""
    text = path.read_text(encoding="utf-8")
    name = path.relative_to(ROOT).as_posix()
    is_page = path.suffix == ".md"
    described = [] if is_page else list(descriptions(path, text))
    for one in described:
        if fragment(one.text, of_function=one.of_function):
            yield Finding("fragment", name, one.line, _plain(one.text))
    prose = list(prose_of_page(text) if is_page else prose_of_code(path, text))
    for line, piece in prose:
        if RIDDLE.search(_plain(piece)):
            yield Finding("riddle", name, line, _plain(piece))
    # Comments are read beside their code. Pages, public headers and docstrings stand alone.
    if not (is_page or name.startswith("include")):
        prose = [(one.line, one.text) for one in described if path.suffix in (".py", ".pyi")]
    for line, piece in prose:
        for sentence in sentences(piece):
            if words(sentence) > MOST_WORDS:
                yield Finding("long", name, line, sentence)
    if not name.startswith(TESTS):
        for line, advice in terms.retired(name, text):
            yield Finding("word", name, line, advice)


def figures() -> dict[str, float]:
    """Return the figures of the product, its tests and its pages."""
    of_product = [one for path in files(*PRODUCT) for one in findings(path)]
    of_pages = [one for path in files(*PAGES) for one in findings(path)]
    of_tests = [one for path in files(*TESTS) for one in findings(path)]
    described = sum(
        1
        for path in files(*PRODUCT)
        if path.suffix in CODE
        for _ in descriptions(path, path.read_text(encoding="utf-8"))
    )

    def count(found: list[Finding], kind: str) -> int:
        return sum(one.kind == kind for one in found)

    return {
        "fragment_docstrings": round(100 * count(of_product, "fragment") / described, 1),
        "riddle_words": count(of_product + of_pages, "riddle"),
        "long_sentences": count(of_product + of_pages, "long"),
        "names_with_two_meanings": count(of_product + of_pages, "word"),
        "fragments_in_tests": count(of_tests, "fragment"),
        "riddles_in_tests": count(of_tests, "riddle"),
    }


def main() -> None:
    if len(sys.argv) == 1:
        for name, value in figures().items():
            print(f"{name} {value:g}")
    for place in sys.argv[1:]:
        for path in files(str(Path(place).resolve().relative_to(ROOT))):
            for one in findings(path):
                print(f"{one.path}:{one.line}: {one.kind}: {one.text[:160]}")


if __name__ == "__main__":
    main()
