# SPDX-License-Identifier: Apache-2.0
"""Runs Python programs in processes of their own, for tests of exits, forks and kills."""

import atexit
import contextlib
import functools
import json
import os
import queue
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, NamedTuple

from tree import PYTHONPATH, ROOT

#: limit for programs, long enough for a busy machine
TIMEOUT_S = 600.0

# Variables of other settings, jobs or terminals, which programs must not inherit. pytest-xdist sets
# a width.
_FOREIGN = ("IOSHAPE_", "SLURM_", "OMPI_", "PMI_", "PMIX_", "MPI_", "TORCHELASTIC_")
_FOREIGN_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "COLUMNS", "LINES")


#: coordinator of these tests, so that their saves do not wait for others on this machine
SLOTS = f"local:{tempfile.mkdtemp(prefix='ioshape-slots-')}"


def _remove_slots(owner: int) -> None:
    # Not in a forked child, whose parent still needs the folder.
    if os.getpid() == owner:
        shutil.rmtree(SLOTS.removeprefix("local:"), ignore_errors=True)


atexit.register(_remove_slots, os.getpid())


class Finished(NamedTuple):
    """The output of a program that has ended."""

    stdout: str
    stderr: str


def environment(**more: str) -> dict[str, str]:
    """Return this process's environment without settings and launchers' variables, plus those
    given.
    """
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(_FOREIGN) and name not in _FOREIGN_NAMES
    }
    # Programs may import the tests' helpers. One thread each is enough for what they compute.
    paths = [PYTHONPATH, kept.get("PYTHONPATH", "")]
    kept["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    kept["IOSHAPE_COORDINATOR"] = SLOTS
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1", **more}


# ---- The process that forks programs -------------------------------------------------------------


# Programs that checkpoint or optimise would import the latter two, each for most of a second.
_OF_TORCH = ("torch", "torch.distributed.checkpoint", "torch._dynamo")


class Nursery:
    """A client of nursery.py, which serves one program after another."""

    def __init__(
        self,
        modules: Sequence[str] = _OF_TORCH,
        *,
        python: str = sys.executable,
        prefix: Sequence[str] = (),
        under_run: bool = False,
    ) -> None:
        """Start nursery.py.

        Args:
            modules: Modules that it imports before it forks.
            python: The interpreter, which may have packages of its own.
            prefix: A command such as `strace`, behind which it runs.
            under_run: Whether programs see torch as under `ioshape run`.
        """
        self._under_run = under_run
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                (*prefix, python, str(ROOT / "tests" / "support" / "nursery.py"), *modules),
                env=self.environment(),
                stdin=theirs.fileno(),
                # The stdout of its programs is a pipe, too: Python asks once whether it can seek.
                stdout=subprocess.PIPE,
            )
        self._connection.settimeout(TIMEOUT_S)

    def environment(self) -> dict[str, str]:
        """Return the environment of a program that starts now."""
        if not self._under_run:
            return environment()
        from ioshape._run import run  # noqa: PLC0415 - few tests need it

        return run.environment(environment())

    def start(self, request: object, *files: int) -> int:
        """Start a program. Return its process ID."""
        socket.send_fds(self._connection, [json.dumps(request).encode()], files)
        return int(self._connection.recv(64))

    def status(self) -> int:
        """Wait until the program has ended. Return its status."""
        self._connection.recv(64)
        self._connection.send(b"heard")
        return int(self._connection.recv(64))

    def close(self) -> None:
        """End nursery.py."""
        self._connection.close()
        self._process.wait(TIMEOUT_S)


@functools.cache
def common_nursery(*, under_run: bool = False) -> Nursery:
    """Return a nursery that tests share."""
    return Nursery(under_run=under_run)


class Program:
    """A running program."""

    def __init__(
        self,
        folder: Path,
        command: Sequence[str],
        variables: Mapping[str, str],
        nursery: Nursery | None = None,
        namespace: str = "",
    ) -> None:
        #: file for its stderr
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        read_input, write_input = os.pipe()
        read_output, write_output = os.pipe()
        self._nursery = nursery or common_nursery()
        request = {
            "arguments": list(command),
            "environment": {**self._nursery.environment(), **variables},
            "folder": str(folder),
            "namespace": namespace,
        }
        self._status: int | None = None
        self.pid = self._nursery.start(request, read_input, write_output, self._errors.fileno())
        os.close(read_input)
        os.close(write_output)
        #: a file object, so that a test can close it
        self.stdin: IO[str] = open(write_input, "w", encoding="utf-8")  # noqa: PTH123, SIM115
        self._lines: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read, args=(read_output,))
        self._reader.start()

    def _read(self, output: int) -> None:
        """Read the program's output continuously, so that it never blocks."""
        with open(output, encoding="utf-8", errors="replace") as lines:
            for line in lines:
                self._lines.put(line)
        self._lines.put("")

    def tell(self, line: str) -> None:
        """Send a line to the program."""
        self.stdin.write(line + "\n")
        self.stdin.flush()

    def expect(self, line: str) -> None:
        """Wait for the program's next line, which must be this one."""
        try:
            said = self._lines.get(timeout=TIMEOUT_S).rstrip("\n")
        except queue.Empty:
            said = "nothing"
        if said != line:
            self.kill()
            raise AssertionError(f"it said {said!r}, not {line!r}\n{self.errors()}")

    def errors(self) -> str:
        """Return what it has written to stderr.

        A read must not move the offset, which the program shares.
        """
        size = os.fstat(self._errors.fileno()).st_size
        return os.pread(self._errors.fileno(), size, 0).decode(errors="replace")

    def end(self, status: int = 0) -> Finished:
        """Wait until the program has ended with this status (-9: signal 9). Return its output."""
        ended, output, errors = self.outcome()
        if ended != status:
            raise AssertionError(f"status {ended}, not {status}\n{output}\n{errors}")
        return Finished(output, errors)

    def outcome(self) -> tuple[int, str, str]:
        """Wait until the program has ended. Return its status and what it has written."""
        ended = self.wait()
        self._reader.join(TIMEOUT_S)
        output = "".join(self._lines.get_nowait() for _ in range(self._lines.qsize()))
        return ended, output, self.errors()

    def wait(self) -> int:
        """Wait for the program.

        Return its status. If it hangs, fail with the stacks of its threads.
        """
        if self._status is None:
            try:
                self._status = self._nursery.status()
            except TimeoutError:
                os.kill(self.pid, signal.SIGABRT)  # faulthandler prints the stacks of all threads
                self._status = self._nursery.status()
                raise AssertionError(f"it does not end\n{self.errors()}") from None
        return self._status

    def kill(self) -> None:
        """Kill the program with signal 9 if it still runs."""
        if self._status is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            self.wait()

    def close(self) -> None:
        """Kill the program and close its files."""
        self.kill()
        with contextlib.suppress(BrokenPipeError):
            self.stdin.close()
        self._reader.join(TIMEOUT_S)
        self._errors.close()


# ---- Interface for tests -------------------------------------------------------------------------


def _written(folder: Path, source: str) -> str:
    program = folder / "program.py"
    program.write_text(textwrap.dedent(source), encoding="utf-8")
    return str(program)


@contextmanager
def started_program(
    folder: Path,
    source: str,
    *arguments: str | Path,
    variables: Mapping[str, str] | None = None,
    nursery: Nursery | None = None,
) -> Iterator[Program]:
    """Start a program, and kill it at the end."""
    command = [_written(folder, source), *map(str, arguments)]
    program = Program(folder, command, variables or {}, nursery)
    try:
        yield program
    finally:
        program.close()


def run_program(
    folder: Path,
    source: str,
    *arguments: str | Path,
    status: int = 0,
    variables: Mapping[str, str] | None = None,
    nursery: Nursery | None = None,
) -> Finished:
    """Run a program to its end, which must be with this status."""
    with started_program(
        folder, source, *arguments, variables=variables, nursery=nursery
    ) as program:
        return program.end(status)


def run_where_mounted(
    mount: Sequence[str],
    folder: Path,
    source: str,
    *arguments: str | Path,
    variables: Mapping[str, str] | None = None,
) -> Finished:
    """Run a program that sees what a command prefix of mounts.py mounts."""
    if os.geteuid() != 0:  # only root may enter the namespace of another process
        return run_interpreter(folder, source, *arguments, prefix=mount, variables=variables)
    command = [_written(folder, source), *map(str, arguments)]
    with subprocess.Popen(
        (*mount, "sh", "-c", "echo mounted && read -r line"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"mounted\n"
        namespace = f"/proc/{holder.pid}/ns/mnt"
        program = Program(folder, command, variables or {}, namespace=namespace)
        with contextlib.closing(program):
            return program.end()


def run_interpreter(
    folder: Path,
    source: str,
    *arguments: str | Path,
    prefix: Sequence[str] = (),
    status: int = 0,
    variables: Mapping[str, str] | None = None,
) -> Finished:
    """Run a program in a new interpreter, optionally behind a command such as `strace`."""
    finished = subprocess.run(
        (*prefix, sys.executable, _written(folder, source), *map(str, arguments)),
        env=environment(**(variables or {})),
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert finished.returncode == status, (
        f"status {finished.returncode}\n{finished.stdout}\n{finished.stderr}"
    )
    return Finished(finished.stdout, finished.stderr)
