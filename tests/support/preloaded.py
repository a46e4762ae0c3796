# SPDX-License-Identifier: Apache-2.0
"""Runs a program twice, without and with a preloaded library, and compares what it did.

Both runs have a folder of the same path, so paths in outputs are equal. Compared are the exit
status, stdout, stderr, and every file that the program left: its kind, mode, size, content, holes
and number of links.
"""

import hashlib
import itertools
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from processes import environment
from tree import ROOT, build_folder

LIMIT_S = 300.0
#: time in which the output of a program ends after it
OUTPUT_ENDS_S = 3.0
#: time in which helper processes of the library end after the program
HELPERS_END_S = 10.0
PROGRAMS = ROOT / "tests" / "support" / "programs"
#: variable with a value of its own for each run, to find the processes that a run left
MARK = "PRELOADED_RUN"
#: a file is sparse if it has less than this part of its size on the disk
SPARSE_PART = 0.75

#: number of a process in a message of bash, as in "bash: line 4:  1744 Killed"
_PID_OF_BASH = re.compile(r"(line \d+): +\d+ ")

#: variables that make outputs of programs the same in each run
_SAME_IN_EACH_RUN = {
    "LC_ALL": "C.UTF-8",
    "TZ": "UTC",
    "SOURCE_DATE_EPOCH": "1700000000",
    "CCACHE_DISABLE": "1",
    "PYTHONHASHSEED": "0",
    "PYTHONDONTWRITEBYTECODE": "1",
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_AUTHOR_NAME": "A",
    "GIT_AUTHOR_EMAIL": "a@example.org",
    "GIT_COMMITTER_NAME": "A",
    "GIT_COMMITTER_EMAIL": "a@example.org",
    "GIT_AUTHOR_DATE": "1700000000 +0000",
    "GIT_COMMITTER_DATE": "1700000000 +0000",
}


@dataclass(frozen=True)
class Case:
    """A program of the table."""

    #: a function of preloaded_programs.sh and its arguments
    name: str
    #: whether the library must see a large sequential write
    takes_turns: bool = False
    #: commands, or modules of Python such as "import h5py", without which the case cannot run
    needs: tuple[str, ...] = ()
    #: runs in the long stage only
    is_long: bool = False
    #: runs as root only
    needs_root: bool = False
    status: int = 0
    #: longest wait for slots of a file
    wait_s: int = 60


@dataclass(frozen=True)
class Seen:
    """The results of a run."""

    status: int | str
    stdout: str
    stderr: str
    files: Mapping[str, str]
    #: command lines of processes that the run left
    left: tuple[str, ...] = ()


def missing(case: Case) -> str:
    """Return why the case cannot run here, or "" if it can."""
    if case.needs_root and os.geteuid() != 0:
        return "only root can do that"
    for need in case.needs:
        if not is_installed(need):
            return f"not installed: {need}"
    return ""


def is_installed(need: str) -> bool:
    if not need.startswith("import "):
        return shutil.which(need) is not None
    done = subprocess.run([sys.executable, "-c", need], capture_output=True, check=False)
    return done.returncode == 0


# ---- Inputs --------------------------------------------------------------------------------------


def make_inputs(folder: Path) -> None:
    """Fill a folder with files that the programs of the table read."""
    from preloaded_writers import MIB, content  # noqa: PLC0415 - it is a program as well

    folder.mkdir()
    (folder / "random.bin").write_bytes(content(1, 3 * MIB))
    lines = (f"{(number * 7919) % 100_003} line {number}\n" for number in range(80_000))
    (folder / "text.txt").write_text("".join(lines), encoding="utf-8")
    with (folder / "sparse.bin").open("wb") as sparse:
        for offset in (0, 8 * MIB, 20 * MIB):
            sparse.seek(offset)
            sparse.write(content(offset, 300_000))
        sparse.truncate(24 * MIB)
    shutil.copy(PROGRAMS / "preloaded_writers.py", folder)
    for name in (
        "libioshape/base",
        "libioshape/format",
        "libioshape/fs",
        "libioshape/io",
        "include",
    ):
        # Compilers get the sources of one layer, which is enough work.
        kept = None if name == "libioshape/fs" else shutil.ignore_patterns("*.c")
        shutil.copytree(ROOT / name, folder / "project" / Path(name).name, ignore=kept)
    shutil.copy(ROOT / "libioshape" / "internal.h", folder / "project")
    for name, source, *flags in (
        ("writers", "preloaded_writers.c"),
        ("writers-static", "preloaded_writers.c", "-static"),
        ("descriptors", "preloaded_descriptors.c"),
    ):
        compile_program(PROGRAMS / source, folder / name, *flags)
    for path in (folder, *folder.rglob("*")):
        os.utime(path, (1_600_000_000, 1_600_000_000), follow_symlinks=False)


def compile_program(source: Path, program: Path, *flags: str) -> None:
    command = ["gcc", "-D_GNU_SOURCE", "-O1", "-w", "-pthread", *flags, source, "-o", program]
    subprocess.run([*map(str, command), "-luring"], check=True)


# ---- Runs ----------------------------------------------------------------------------------------


def content_of(path: Path) -> str:
    """Return a word on everything about a file that programs decide."""
    status = path.lstat()
    words = [oct(status.st_mode)]
    if stat.S_ISLNK(status.st_mode):
        words.append(str(path.readlink()))
    elif stat.S_ISREG(status.st_mode):
        digest = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
        words += [f"{status.st_size} bytes", digest, f"{status.st_nlink} links"]
        # Small files have no holes that matter, and may be stored in the inode.
        if status.st_size > 1 << 16 and status.st_blocks * 512 < status.st_size * SPARSE_PART:
            words.append("sparse")
    return " ".join(words)


def tree_of(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): content_of(path) for path in sorted(folder.rglob("*"))}


def marked(mark: str) -> Iterator[tuple[int, str]]:
    """Yield number and command line of each process that has this mark in its environment."""
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={mark}".encode() in (path / "environ").read_bytes().split(b"\0"):
                words = (path / "cmdline").read_bytes().split(b"\0")
                yield int(path.name), b" ".join(words).decode(errors="replace").strip()
        except OSError:
            continue  # it has ended, or belongs to another user


def leftovers(mark: str) -> tuple[str, ...]:
    """Wait for the processes of a run. Kill those that do not end, and return what they are."""
    end = time.monotonic() + HELPERS_END_S
    while list(marked(mark)) and time.monotonic() < end:
        time.sleep(0.05)
    found = list(marked(mark))
    for pid, _ in found:
        os.kill(pid, signal.SIGKILL)
    return tuple(command for _, command in found)


@contextmanager
def _on_another_filesystem() -> Iterator[str]:
    """Yield a folder in memory, always of the same name in this process."""
    folder = Path(f"/dev/shm/ioshape-preloaded-{os.getpid()}")
    folder.mkdir()
    try:
        yield str(folder)
    finally:
        shutil.rmtree(folder)


def _outcome(process: subprocess.Popen[bytes], mark: str) -> tuple[int | str, bytes, bytes]:
    """Wait for a program. Return its status, or what is wrong with its end, and its output."""
    wrong, ended = "", 0.0
    end = time.monotonic() + LIMIT_S
    while True:
        try:
            stdout, stderr = process.communicate(timeout=0.2)
            return wrong or process.returncode, stdout, stderr
        except subprocess.TimeoutExpired:
            now = time.monotonic()
        if not ended and os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            ended = now
        if now > end:
            wrong = f"does not end within {LIMIT_S:g} s"
        elif ended and now > ended + OUTPUT_ENDS_S:
            wrong = "has ended, and another process keeps its output open"
        if wrong:
            for pid, _ in marked(mark):
                os.kill(pid, signal.SIGKILL)


def run(case: Case, inputs: Path, folder: Path, variables: Mapping[str, str]) -> Seen:
    """Run a case in an empty folder, and remove the folder."""
    mark = uuid.uuid4().hex
    folder.mkdir()
    with _on_another_filesystem() as other:
        kept = {name: value for name, value in environment().items() if name != "PYTHONPATH"}
        own = {"INPUTS": str(inputs), "OTHER": other, "HOME": str(folder), MARK: mark}
        with subprocess.Popen(
            [PROGRAMS / "preloaded_programs.sh", *case.name.split()],
            cwd=folder,
            env={**kept, **_SAME_IN_EACH_RUN, **own, **variables},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        ) as process:
            status, stdout, stderr = _outcome(process, mark)
        left = leftovers(mark)
    seen = Seen(
        status,
        stdout.decode(errors="backslashreplace"),
        _PID_OF_BASH.sub(r"\1: PID ", stderr.decode(errors="backslashreplace")),
        tree_of(folder),
        left,
    )
    shutil.rmtree(folder)
    return seen


def first_difference(a: str, b: str) -> str:
    """Return the first lines that differ, with their number."""
    lines = itertools.zip_longest(a.splitlines(), b.splitlines())
    number, (one, other) = next(
        ((number, pair) for number, pair in enumerate(lines, 1) if pair[0] != pair[1]),
        (0, ("other ends of lines", "")),
    )
    return f"line {number}: {one!r} without the library, {other!r} with it"


def differences(plain: Seen, preloaded: Seen) -> list[str]:
    """Return a sentence for each difference."""
    found = [
        f"{name}, {first_difference(a, b)}"
        for name in ("stdout", "stderr")
        for a, b in [(getattr(plain, name), getattr(preloaded, name))]
        if a != b
    ]
    if plain.status != preloaded.status:
        found.append(f"status {plain.status} without the library, {preloaded.status} with it")
    found += [f"left with the library: {command}" for command in preloaded.left]
    for name in sorted({*plain.files, *preloaded.files}):
        a, b = plain.files.get(name, "absent"), preloaded.files.get(name, "absent")
        if a != b:
            found.append(f"{name}: {a} without the library, {b} with it")
    return found


# ---- The library ---------------------------------------------------------------------------------

LIBRARY = Path("libioshape/preload/libioshape-preload.so")
#: growth after which a file takes turns, so small that each file of the table does
LARGE_BYTES = 64 << 10

_LOGGED = re.compile(
    r'program="(?P<program>[^"]*)" path="(?P<path>[^"]*)" .*'
    r" bytes=(?P<n_bytes>\d+) end=(?P<end>\w+)"
)
#: ends of log lines about files that got no slot
NO_SLOT = {"timeout", "local", "refused"}


@dataclass(frozen=True)
class Turn:
    """A line of the library's log: a slot, or why there was none."""

    program: str
    path: str
    n_bytes: int
    end: str


def preload(folder: Path, **more: str) -> dict[str, str]:
    """Return variables with which programs take turns with every file, one at a time.

    The coordinator and the log are in `folder`.
    """
    slots = folder / "slots"
    slots.mkdir(exist_ok=True)
    return {
        "LD_PRELOAD": str(build_folder() / LIBRARY),
        "IOSHAPE_PRELOAD_ALL": "yes",
        "IOSHAPE_PRELOAD_BYTES": str(LARGE_BYTES),
        "IOSHAPE_PRELOAD_LOG": str(folder / "preload.log"),
        "IOSHAPE_COORDINATOR": f"local:{slots}",
        "IOSHAPE_SLOTS": "1",
        **more,
    }


def turns(folder: Path) -> list[Turn]:
    """Return the turns in the log of these variables."""
    log = folder / "preload.log"
    lines = log.read_text(encoding="utf-8").splitlines() if log.exists() else []
    found = []
    for line in lines:
        match = _LOGGED.search(line)
        assert match, f"not a line of the log: {line}"
        found.append(Turn(match["program"], match["path"], int(match["n_bytes"]), match["end"]))
    return found
