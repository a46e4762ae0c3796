# SPDX-License-Identifier: Apache-2.0
"""Measure the size and the tangles of the source tree and the built library."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import sizes
import type_completeness
from coordinators import GRACE_S, running_redis, short_folder
from imports import cycles, imports
from tree import HEADERS, LIBRARY, ROOT

from .setting import Figure, Outcome, Setting

OBJECTS = ROOT / "build/release/libioshape/libioshape_internal.a.p"
SHARED_OBJECT = ROOT / "build/release/libioshape/libioshape.so"
# tests/run.sh writes the duration of complete runs to these files.
SECONDS = {"quick_s": ROOT / "build/seconds-quick", "run_s": ROOT / "build/seconds-run"}

CALL = re.compile(r"\b(?:call|jmp|b|bl|j[a-z]+)q?\s")
RELOCATION = re.compile(r"R_(?:X86_64_\w+|AARCH64_(?:CALL|JUMP)26)\s+(\w+)")


def output_of(*command: str) -> str:
    return subprocess.run(command, check=True, cwd=ROOT, capture_output=True, text=True).stdout


# ---- Lines, files and functions ------------------------------------------------------------------


def size_figures() -> Iterator[Figure]:
    """Yield the totals of what tests/house/budget.json limits for each folder."""
    c_files = [path for path in LIBRARY.rglob("*") if path.suffix in sizes.C_SUFFIXES]
    shared = sizes.shared_functions()
    single = sum(one.callers == 1 for one in shared)
    headers = [path.name for path in HEADERS.glob("*.h")]
    for name, value, most, remark in (
        ("c_code", sizes.lines_in("libioshape"), 31_000, "lines of C, headers and Lua"),
        ("lua_code", sizes.lines_in("libioshape", ".lua"), 500, "lines"),
        ("python_code", sizes.lines_in("bindings"), 16_000, "lines of the package"),
        ("test_code", sizes.lines_in("tests"), 80_000, "lines"),
        ("c_files", len(c_files), 130, "of libioshape"),
        ("cross_file_functions", len(shared), 400, "that headers of libioshape declare"),
        ("single_caller", single, 120, "of these are named in one other file"),
        ("public_headers", len(headers), 6, ", ".join(sorted(headers))),
    ):
        yield Figure(name, value, "<=", most, remark)


# ---- Calls -------------------------------------------------------------------------------------


def calls_among_files(folder: Path = OBJECTS) -> dict[str, set[str]]:
    """Return for each object file of the library the other object files that it calls."""
    objects = sorted(folder.glob("*.o"))
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
    """Return the sets of two or more names that reach each other, largest first."""

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


def circle_figures() -> Iterator[Figure]:
    calls = calls_among_files()
    found = circles(calls)
    remark = "; ".join(
        " ".join(sorted(name.removesuffix(".c.o") for name in circle)) for circle in found
    )
    yield Figure("circles", len(found), "<=", 0, f"of calls among files: {remark or 'none'}")


# ---- Traced calls ------------------------------------------------------------------------------


def files_entered(program: Path, *arguments: str) -> set[str]:
    """Return the library's .c files that a call enters; see trace.c."""
    addresses = output_of(str(program), *arguments)
    places = subprocess.run(
        ["addr2line", "-e", str(program)],
        check=True,
        input=addresses,
        capture_output=True,
        text=True,
    ).stdout.splitlines()
    files = {os.path.normpath(place.rpartition(":")[0]) for place in places}
    return {name for name in files if "/libioshape/" in name and name.endswith(".c")}


def trace_figures() -> Iterator[Figure]:
    build = ROOT / "build" / "trace"
    subprocess.run(
        [
            *(ROOT / "tests/support/build.sh", build.relative_to(ROOT), "-Dbench=true"),
            *("-Doptimization=0", "-Dc_args=-finstrument-functions -Wno-format-truncation"),
        ],
        check=True,
        cwd=ROOT,
    )
    program = build / "tests" / "bench" / "bench-trace"
    with short_folder() as folder:
        saved = files_entered(program, "save", f"local:{folder}", str(folder / "weights.pt"))
    with running_redis() as redis:
        time.sleep(GRACE_S)
        asked = files_entered(program, "slot", redis.address)
    for name, files, most in (
        ("files_of_a_save", saved, 18),
        ("files_of_a_slot_request", asked, 9),
    ):
        listed = " ".join(sorted(Path(one).stem for one in files))
        yield Figure(name, len(files), "<=", most, listed)


# ---- The Python package, settings and test runs -------------------------------------------------


SAVE = """
import sys, tempfile
from pathlib import Path
import torch, ioshape
folder = Path(tempfile.mkdtemp())
root = str(Path(ioshape.__file__).parent)
ioshape.save(torch.ones(1000), folder / "first")
entered = set()
def enter(frame, event, _):
    name = frame.f_code.co_filename
    if event == "call" and name.startswith(root):
        entered.add(name[len(root) + 1 :])
sys.setprofile(enter)
ioshape.save(torch.ones(1000), folder / "second")
sys.setprofile(None)
print(*sorted(entered))
"""


def python_figures() -> Iterator[Figure]:
    found = cycles(imports())
    knots = "; ".join(" ".join(knot) for knot in found)
    yield Figure(
        "python_cycles", len(found), "<=", 0, knots or "of packages that import each other"
    )
    entered = output_of(sys.executable, "-c", SAVE).split()
    yield Figure("files_of_ioshape_save", len(entered), "<=", 7, " ".join(entered))
    names = output_of(sys.executable, "-c", "import ioshape; print(*ioshape.__all__)").split()
    yield Figure("top_level_names", len(names), "<=", 32, "of ioshape.__all__")
    percent, unknown = type_completeness.of_package()
    remark = f"unknown: {' '.join(unknown)}" if unknown else "of what type checkers see is known"
    yield Figure("verifytypes_percent", percent, ">=", 100, remark)


def settings_listed() -> Figure:
    clean = {key: value for key, value in os.environ.items() if not key.startswith("IOSHAPE_")}
    done = subprocess.run(
        [sys.executable, "-m", "ioshape", "settings", "--json"],
        check=True,
        env=clean,
        capture_output=True,
        text=True,
    )
    return Figure("settings", len(json.loads(done.stdout)), "<=", 20, "that ioshape settings lists")


def public_functions() -> Figure:
    symbols = output_of(
        "nm", "-D", "--defined-only", "-f", "posix", str(SHARED_OBJECT)
    ).splitlines()
    names = [line.split()[0] for line in symbols if line.startswith("ioshape_")]
    return Figure("public_functions", len(names), "<=", 50, "that libioshape exports")


def figures_of_runs(outcome: Outcome) -> Iterator[Figure]:
    """Yield the figures of the last test runs. Figures that were not measured are left out."""
    for name, file in SECONDS.items():
        if file.is_file():
            seconds, commit = file.read_text(encoding="utf-8").split()
            most = 150 if name == "quick_s" else 600
            yield Figure(name, float(seconds), "<=", most, f"of tests/run.sh at {commit}")
        else:
            option = " --quick" if name == "quick_s" else ""
            outcome.ceilings.append(f"{name}: not measured; run tests/run.sh{option}")


def measure(setting: Setting) -> Outcome:
    del setting  # counting depends on no setting
    outcome = Outcome()
    outcome.figures += [*size_figures(), settings_listed(), public_functions(), *circle_figures()]
    outcome.figures += [*trace_figures(), *python_figures()]
    outcome.figures += figures_of_runs(outcome)
    return outcome
