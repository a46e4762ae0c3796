# SPDX-License-Identifier: Apache-2.0
"""How large and how tangled the source is: counted from the tree and the built library."""

import io
import json
import os
import re
import subprocess
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from xml.etree import ElementTree as ET

from .setting import Figure, Outcome, Setting

ROOT = Path(__file__).resolve().parents[2]
OBJECTS = ROOT / "build/release/libioshape/libioshape_internal.a.p"
LIBRARY = ROOT / "build/release/libioshape/libioshape.so"
# tests/run.sh leaves here what only a whole run can tell.
SECONDS = {"quick_s": ROOT / "build/seconds-quick", "run_s": ROOT / "build/seconds-run"}
GARBLED = ROOT / "build/garbled.xml"

# Where the rework of the house began: lines are compared with it.
BASELINE = "6722c94"
SHRINK = 0.85

PRODUCT = ("libioshape/", "include/", "bindings/")
TESTS = ("tests/",)
C_SUFFIXES = (".c", ".h", ".cpp", ".hpp")
SUFFIXES = (*C_SUFFIXES, ".py", ".lua")

C_COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)
LUA_COMMENT = re.compile(r"--[^\n]*")
CALL = re.compile(r"\b(?:call|jmp|b|bl|j[a-z]+)q?\s")
RELOCATION = re.compile(r"R_(?:X86_64_\w+|AARCH64_(?:CALL|JUMP)26)\s+(\w+)")
BODY = re.compile(r"^\{\n.*?^\}", re.DOTALL | re.MULTILINE)


def output_of(*command: str) -> str:
    return subprocess.run(command, check=True, cwd=ROOT, capture_output=True, text=True).stdout


# ---- Lines -------------------------------------------------------------------------------------


def python_lines(text: str) -> int:
    ignored = (
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENCODING,
        tokenize.ENDMARKER,
    )
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in ignored:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines)


def lines_of_code(name: str, text: str) -> int:
    """Neither blank ones nor those that hold nothing but a comment."""
    if name.endswith(".py"):
        return python_lines(text)
    text = (C_COMMENT if name.endswith(C_SUFFIXES) else LUA_COMMENT).sub("", text)
    return sum(1 for line in text.splitlines() if line.strip())


def sources_at(commit: str) -> dict[str, str]:
    """The sources of a commit by their paths; none if this clone lacks the commit."""
    try:
        names = output_of("git", "ls-tree", "-r", "--name-only", commit).splitlines()
    except subprocess.CalledProcessError:
        return {}
    names = [name for name in names if name.endswith(SUFFIXES)]
    asked = "".join(f"{commit}:{name}\n" for name in names).encode()
    blobs = subprocess.run(
        ["git", "cat-file", "--batch"], check=True, cwd=ROOT, input=asked, capture_output=True
    ).stdout
    texts, at = {}, 0
    for name in names:
        end_of_head = blobs.index(b"\n", at)
        size = int(blobs[at:end_of_head].split()[-1])
        texts[name] = blobs[end_of_head + 1 : end_of_head + 1 + size].decode()
        at = end_of_head + 1 + size + 1
    return texts


def sources_here() -> dict[str, str]:
    names = output_of("git", "ls-files", "--cached", "--others", "--exclude-standard").splitlines()
    paths = [name for name in names if name.endswith(SUFFIXES) and (ROOT / name).is_file()]
    return {name: (ROOT / name).read_text(encoding="utf-8") for name in paths}


def count(texts: Mapping[str, str], folders: tuple[str, ...]) -> int:
    return sum(
        lines_of_code(name, text) for name, text in texts.items() if name.startswith(folders)
    )


def line_figures(here: Mapping[str, str]) -> Iterator[Figure]:
    before = sources_at(BASELINE)
    for name, folders in (("product_lines", PRODUCT), ("test_lines", TESTS)):
        now, then = count(here, folders), count(before, folders)
        change = f"{then} at {BASELINE}: {now / then - 1:+.1%}" if then else f"no {BASELINE} here"
        yield Figure(name, now, "<=", int(then * SHRINK) if then else now, change)


def longest_function(here: Mapping[str, str]) -> Figure:
    lengths = [
        (body.count("\n") + 1, name)
        for name, text in here.items()
        if name.startswith("libioshape/") and name.endswith(".c")
        for body in BODY.findall(text)
    ]
    length, name = max(lengths)
    return Figure("longest_function", length, ">=", 0, f"of C, in {name}; no bound")


def longest_file(here: Mapping[str, str]) -> Figure:
    length, name = max((text.count("\n"), name) for name, text in here.items())
    return Figure("longest_file", length, ">=", 0, f"{name}; no bound")


# ---- Calls -------------------------------------------------------------------------------------


def calls_among_files() -> dict[str, set[str]]:
    """By object file of the library: those of others that it calls."""
    objects = sorted(OBJECTS.glob("*.o"))
    homes = {}
    for path in objects:
        for line in output_of("nm", "--defined-only", "-g", "-f", "posix", str(path)).splitlines():
            homes[line.split()[0]] = path.name
    calls: dict[str, set[str]] = {path.name: set() for path in objects}
    for path in objects:
        instruction = ""
        for line in output_of("objdump", "-dr", "--no-show-raw-insn", str(path)).splitlines():
            found = RELOCATION.search(line)
            if not found:
                instruction = line
            elif CALL.search(instruction):
                calls[path.name].add(homes.get(found[1], path.name))
    return {name: called - {name} for name, called in calls.items()}


def circles(calls: Mapping[str, Iterable[str]]) -> list[set[str]]:
    """Sets of two or more that reach each other, largest first."""

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        left = [start]
        while left:
            for name in calls[left.pop()]:
                if name not in seen:
                    seen.add(name)
                    left.append(name)
        return seen

    reach = {name: reached(name) for name in calls}
    found = {
        frozenset(other for other in reach[name] if name in reach[other])
        for name in calls
        if name in reach[name]
    }
    return sorted((set(one) for one in found if len(one) > 1), key=len, reverse=True)


def floor_of(name: str) -> str:
    """Meson calls an object after its source's path: "save_context.c.o"."""
    return name.partition("_")[0]


def circle_figures() -> Iterator[Figure]:
    calls = calls_among_files()
    largest = circles(calls)
    size = len(largest[0]) if largest else 0
    remark = ", ".join(sorted(name.removesuffix(".c.o") for name in largest[0])) if largest else ""
    yield Figure("largest_circle", size, "<=", 4, f"of calls among files: {remark}")
    floors: dict[str, set[str]] = defaultdict(set)
    for name, called in calls.items():
        floors[floor_of(name)] |= {floor_of(other) for other in called} - {floor_of(name)}
    yield Figure("cross_floor_circles", len(circles(floors)), "<=", 0, "of calls among floors")


# ---- The rest ----------------------------------------------------------------------------------


def settings_listed() -> Figure:
    clean = {key: value for key, value in os.environ.items() if not key.startswith("IOSHAPE_")}
    done = subprocess.run(
        [sys.executable, "-m", "ioshape", "settings", "--json"],
        check=True,
        env=clean,
        capture_output=True,
        text=True,
    )
    # 22, and "unchanged": whether stale bytes are worth a failed save, only the user can say.
    return Figure("settings", len(json.loads(done.stdout)), "<=", 23, "that ioshape settings lists")


def public_functions() -> Figure:
    symbols = output_of("nm", "-D", "--defined-only", "-f", "posix", str(LIBRARY)).splitlines()
    names = [line.split()[0] for line in symbols if line.startswith("ioshape_")]
    return Figure("public_functions", len(names), "<=", 62, "that libioshape exports")


def figures_of_runs(outcome: Outcome) -> Iterator[Figure]:
    """What the last runs of the tests left; a figure that nobody measured is not told."""
    for name, file in SECONDS.items():
        if file.is_file():
            seconds, commit = file.read_text(encoding="utf-8").split()
            most = 240 if name == "quick_s" else 1200
            yield Figure(name, float(seconds), "<=", most, f"of tests/run.sh at {commit}")
        else:
            option = " --quick" if name == "quick_s" else ""
            outcome.ceilings.append(f"{name}: not measured; run tests/run.sh{option}")
    if GARBLED.is_file():
        failed = sum(
            1
            for case in ET.parse(GARBLED).iter("testcase")
            if case.find("failure") is not None or case.find("error") is not None
        )
        remark = "tests that fail where the library's sentences are garbled"
        yield Figure("sentences_parsed", failed, "<=", 0, remark)
    else:
        outcome.ceilings.append("sentences_parsed: not measured; run tests/run.sh garbled")


def measure(setting: Setting) -> Outcome:
    del setting  # nothing here depends on where or how much
    outcome = Outcome()
    here = sources_here()
    outcome.figures += [settings_listed(), public_functions(), *circle_figures()]
    outcome.figures += [*line_figures(here), longest_function(here), longest_file(here)]
    outcome.figures += figures_of_runs(outcome)
    return outcome
