# SPDX-License-Identifier: Apache-2.0
"""Runs Python programs in processes of their own, for tests of exits, forks and kills."""

import atexit
import contextlib
import functools
import json
import os
import queue
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
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


class Forked:
    """A process that a forker has started."""

    def __init__(self, forker: "Forker", pid: int) -> None:
        self.pid = pid
        #: exit code (-9: signal 9); None if it has not been seen to end
        self.status: int | None = None
        #: time.monotonic() when its end was noticed
        self.ended_at = 0.0
        self._forker = forker

    def signal(self, number: int) -> None:
        """Send a signal. Do nothing if the process has ended."""
        self._forker.signal(self.pid, number)

    def kill(self) -> None:
        """Kill the process, as a crash would."""
        self.signal(signal.SIGKILL)

    def wait(self, timeout_s: float) -> int | None:
        """Wait for the process. Return its status, or None after the time-out."""
        end = time.monotonic() + timeout_s
        while self.status is None and (left := end - time.monotonic()) > 0:
            self._forker.hear(left)
        return self.status


class Forker:
    """A client of forker.py, for one thread: starts programs and notices when they end."""

    def __init__(
        self,
        modules: Sequence[str] = _OF_TORCH,
        *,
        python: str = sys.executable,
        prefix: Sequence[str] = (),
        under_run: bool = False,
        parent: "Forker | None" = None,
        shared: str = "",
    ) -> None:
        """Start forker.py.

        Args:
            modules: Modules that it imports before it forks.
            python: The interpreter, which may have packages of its own.
            prefix: A command such as `strace`, behind which it runs.
            under_run: Whether programs see torch as under `ioshape run`.
            parent: A forker that forks it instead, so that it has the parent's modules, too.
            shared: A name by which all processes of pytest-xdist share it. It ends with the last
                of them.
        """
        self._under_run = under_run
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._running: dict[int, Forked] = {}
        self._process: Forked | subprocess.Popen[bytes]
        command = [str(ROOT / "tests" / "support" / "forker.py"), *modules]
        run = os.environ.get("PYTEST_XDIST_TESTRUNUID") if shared else None
        if run:
            shared = f"ioshape-tests-{run}-{shared}"
            command[1:1] = ["--shared", shared]
        with theirs:
            if parent:
                files = (theirs.fileno(), 1, 2)
                self._process = parent.start(Path.cwd(), command, self.environment(), files)
                return
            self._process = subprocess.Popen(
                (*prefix, python, *command),
                env=self.environment(),
                stdin=theirs.fileno(),
                # The stdout of its programs is a pipe, too: Python asks once whether it can seek.
                stdout=subprocess.PIPE,
            )
        if run:
            self._connection.close()
            # The first process has the name. Others that were started for it have ended.
            self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            end = time.monotonic() + TIMEOUT_S
            while self._connection.connect_ex("\0" + shared):
                if time.monotonic() > end:
                    raise TimeoutError("forker.py does not listen")
                time.sleep(0.05)

    def environment(self) -> dict[str, str]:
        """Return the environment of a program that starts now."""
        if not self._under_run:
            return environment()
        from ioshape._run import run  # noqa: PLC0415 - few tests need it

        return run.environment(environment())

    def start(
        self,
        folder: Path,
        arguments: Sequence[str],
        variables: Mapping[str, str],
        files: Sequence[int],
        namespace: str = "",
    ) -> Forked:
        """Start a program in a folder and, if given, in a namespace (such as /proc/PID/ns/net).

        The files are its stdin, stdout and stderr.
        """
        request = {
            "arguments": list(arguments),
            "environment": dict(variables),
            "folder": str(folder),
            "namespace": namespace,
        }
        socket.send_fds(self._connection, [json.dumps(request).encode()], files)
        while (pid := self._take(TIMEOUT_S)) is None:
            pass
        self._running[pid] = Forked(self, pid)
        return self._running[pid]

    def signal(self, pid: int, number: int) -> None:
        """Send a signal to a process that has not ended."""
        self._connection.send(json.dumps({"pid": pid, "signal": number}).encode())

    def hear(self, timeout_s: float) -> None:
        """Handle one answer, if one arrives within this time."""
        if select.select([self._connection], [], [], timeout_s)[0]:
            self._take(timeout_s)

    def _take(self, timeout_s: float) -> int | None:
        """Receive one answer. Return the process ID if it reports a start, else None."""
        self._connection.settimeout(timeout_s)
        answer = json.loads(self._connection.recv(4096) or b"{}")
        if not answer:
            raise ConnectionError("the process that programs are forked from has ended")
        if "ended" in answer:
            process = self._running.pop(answer["ended"])
            process.status = answer["status"]
            process.ended_at = time.monotonic()
            return None
        return int(answer["started"])

    def close(self) -> None:
        """End forker.py, which kills all its programs that still run."""
        self._connection.close()
        self._process.wait(TIMEOUT_S)


@functools.cache
def common_forker(*, under_run: bool = False) -> Forker:
    """Return a forker that tests share."""
    return Forker(under_run=under_run, shared="run" if under_run else "plain")


class Program:
    """A running program."""

    def __init__(
        self,
        folder: Path,
        command: Sequence[str],
        variables: Mapping[str, str],
        forker: Forker | None = None,
        namespace: str = "",
    ) -> None:
        #: file for its stderr
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        read_input, write_input = os.pipe()
        read_output, write_output = os.pipe()
        forker = forker or common_forker()
        self._process = forker.start(
            folder,
            command,
            {**forker.environment(), **variables},
            (read_input, write_output, self._errors.fileno()),
            namespace,
        )
        self.pid = self._process.pid
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
        status = self._process.wait(TIMEOUT_S)
        if status is None:
            self._process.signal(signal.SIGABRT)  # faulthandler prints the stacks of all threads
            self._process.wait(TIMEOUT_S)
            raise AssertionError(f"it does not end\n{self.errors()}")
        return status

    def kill(self) -> None:
        """Kill the program with signal 9 if it still runs."""
        if self._process.status is None:
            self._process.kill()
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
    forker: Forker | None = None,
) -> Iterator[Program]:
    """Start a program, and kill it at the end."""
    command = [_written(folder, source), *map(str, arguments)]
    program = Program(folder, command, variables or {}, forker)
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
    forker: Forker | None = None,
) -> Finished:
    """Run a program to its end, which must be with this status."""
    with started_program(folder, source, *arguments, variables=variables, forker=forker) as program:
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
