# SPDX-License-Identifier: Apache-2.0
"""Real programs do the same with the preload library as without it, and take turns meanwhile.

The threshold is so small that every writer of the table takes turns, and one may write at a time.
"""

import re
from pathlib import Path

import pytest
from preloaded import (
    NO_SLOT,
    Case,
    compile_program,
    differences,
    make_inputs,
    missing,
    preload,
    run,
    turns,
)
from preloaded_table import TABLE
from tree import ROOT

LEAST_PROGRAMS = 30


@pytest.fixture(scope="module", name="inputs")
def _inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("preloaded") / "inputs"
    make_inputs(folder)
    return folder


def test_the_usual_stage_runs_enough_programs() -> None:
    assert len([case for case in TABLE if not case.is_long]) >= LEAST_PROGRAMS


def test_the_page_for_operators_names_what_was_tried() -> None:
    page = (ROOT / "docs" / "preload.md").read_text(encoding="utf-8")
    counted = re.search(r"(\d+) scripts of real programs", page)
    assert counted
    assert int(counted[1]) == len(TABLE)


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=case.name, marks=[pytest.mark.long] * case.is_long) for case in TABLE],
)
def test_a_program_does_the_same_with_the_library(case: Case, inputs: Path, tmp_path: Path) -> None:
    why = missing(case)
    if why:
        pytest.skip(why)
    plain = run(case, inputs, tmp_path / "work", {})
    assert plain.status == case.status, plain.stderr
    variables = preload(tmp_path, IOSHAPE_PRELOAD_WAIT_S=str(case.wait_s))
    preloaded = run(case, inputs, tmp_path / "work", variables)
    assert differences(plain, preloaded) == []
    if case.takes_turns:
        assert [turn for turn in turns(tmp_path) if turn.end not in NO_SLOT]


# ---- The comparison itself -----------------------------------------------------------------------

#: what a faulty preload library might do, and a case of the table that it harms
HARM = {
    "loses a byte": (
        "dd",
        """
        ssize_t write(int fd, const void *bytes, size_t n) {
            syscall(SYS_write, fd, bytes, n > 100000 ? n - 1 : n);
            return n;
        }
        """,
    ),
    "writes a part": (
        "c few",
        """
        ssize_t write(int fd, const void *bytes, size_t n) {
            return syscall(SYS_write, fd, bytes, n > 1000 ? 1000 : n);
        }
        """,
    ),
    "changes errno": (
        "dd",
        """
        ssize_t write(int fd, const void *bytes, size_t n) {
            ssize_t done = syscall(SYS_write, fd, bytes, n);
            if (done < 0) errno = EIO;
            return done;
        }
        """,
    ),
    "prints": (
        "cp",
        """
        int close(int fd) {
            if (fd > 2) syscall(SYS_write, 2, "x", 1);
            return syscall(SYS_close, fd);
        }
        """,
    ),
    "fills holes": (
        "dd",
        """
        off_t lseek(int fd, off_t offset, int whence) {
            if (whence == SEEK_CUR && offset > 0) syscall(SYS_fallocate, fd, 0, 0, 1 << 24);
            return syscall(SYS_lseek, fd, offset, whence);
        }
        """,
    ),
    "leaves a process": (
        "c few",
        """
        __attribute__((constructor)) static void start(void) {
            if (fork() == 0) { close(1); close(2); sleep(100); _exit(0); }
        }
        """,
    ),
    "keeps the output open": (
        "c few",
        """
        __attribute__((constructor)) static void start(void) {
            if (fork() == 0) { sleep(100); _exit(0); }
        }
        """,
    ),
    "takes a descriptor": (
        "c few",
        '__attribute__((constructor)) static void start(void) { open("/dev/null", O_RDONLY); }',
    ),
}


@pytest.mark.parametrize("harm", HARM)
def test_the_comparison_finds_what_a_faulty_library_does(
    harm: str, inputs: Path, tmp_path: Path
) -> None:
    name, text = HARM[harm]
    headers = ("errno.h", "fcntl.h", "sys/syscall.h", "unistd.h")
    source, library = tmp_path / "harm.c", tmp_path / "harm.so"
    source.write_text("".join(f"#include <{one}>\n" for one in headers) + text, encoding="utf-8")
    compile_program(source, library, "-shared", "-fPIC")
    plain = run(Case(name), inputs, tmp_path / "work", {})
    assert plain.status == 0, plain.stderr
    harmed = run(Case(name), inputs, tmp_path / "work", {"LD_PRELOAD": str(library)})
    assert differences(plain, harmed)
