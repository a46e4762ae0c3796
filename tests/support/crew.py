# SPDX-License-Identifier: Apache-2.0
"""Starts many Python processes, forked from one that has imported torch and ioshape.

Run as a program, this file is the process to fork from. It has not used the library, started a
thread or computed anything, so a forked process is in the state after its imports. Tests use class
Crew.

A request is one packet of JSON. With "start" come the new process's stdout and stderr. Answers are
packets, too: {"started": PID}, and {"ended": PID, "status": STATUS} when a process has ended.
"""

import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from forked import become, enter, let_forks_end_fast

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)

# ---- The process that forks ----------------------------------------------------------------------


class _Server:
    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._alive: set[int] = set()

    def serve(self) -> tuple[dict[str, Any], list[int]] | None:
        """Serve requests.

        Return, in a child, the request that it must fulfil; return None at the end.
        """
        # SIGCHLD wakes up the select() below.
        wake, woken = socket.socketpair()
        for end in (wake, woken):
            end.setblocking(False)
        signal.set_wakeup_fd(woken.fileno())
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
        while True:
            ready, _, _ = select.select([self._connection, wake], [], [], 1.0)
            if wake in ready:
                wake.recv(4096)
            self._reap()
            if self._connection not in ready:
                continue
            data, descriptors, _, _ = socket.recv_fds(self._connection, 1 << 20, 2)
            if not data:
                for pid in self._alive:
                    os.kill(pid, signal.SIGKILL)
                return None
            request = json.loads(data)
            if "signal" in request:
                self._signal(request["pid"], request["signal"])
                continue
            child = os.fork()
            if not child:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for one in (wake, woken, self._connection):
                    one.close()
                return request, list(descriptors)
            self._alive.add(child)
            for descriptor in descriptors:
                os.close(descriptor)
            self._say(started=child)

    def _say(self, **what: int) -> None:
        self._connection.send(json.dumps(what).encode())

    def _reap(self) -> None:
        for pid in list(self._alive):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                self._alive.discard(pid)
                self._say(ended=pid, status=os.waitstatus_to_exitcode(status))

    def _signal(self, pid: int, number: int) -> None:
        """Send a signal.

        The process ID cannot have been reused, because the process has not been reaped.
        """
        if pid in self._alive:
            os.kill(pid, number)


# ---- Interface for tests -------------------------------------------------------------------------


class Member:
    """A running process. It reports events as lines of JSON on its stdout."""

    def __init__(self, crew: "Crew", pid: int, output: Path, errors: Path) -> None:
        self.pid = pid
        self.status: int | None = None
        #: time.monotonic() when its end was noticed
        self.ended_at = 0.0
        self._crew = crew
        self._output = output
        self._errors = errors

    def said(self) -> list[dict[str, Any]]:
        """Return the events so far, from complete lines."""
        text = self._output.read_text(encoding="utf-8", errors="replace")
        lines = text[: text.rfind("\n") + 1].splitlines()
        return [json.loads(line) for line in lines if line.startswith("{")]

    def errors(self) -> str:
        """Return what it has written to stderr."""
        return self._errors.read_text(encoding="utf-8", errors="replace")

    def signal(self, number: int) -> None:
        """Send a signal. Do nothing if the process has ended."""
        self._crew.signal(self.pid, number)

    def kill(self) -> None:
        """Kill the process, as a crash would."""
        self.signal(signal.SIGKILL)

    def wait(self, timeout_s: float) -> int | None:
        """Wait for the process. Return its status (-9: signal 9), or None after the time-out."""
        end = time.monotonic() + timeout_s
        while self.status is None and (left := end - time.monotonic()) > 0:
            self._crew.hear(left)
        return self.status

    def await_said(self, event: str, timeout_s: float) -> dict[str, Any] | None:
        """Wait for the first line with this "event". Return it, or None after the time-out."""
        end = time.monotonic() + timeout_s
        while True:
            found = [line for line in self.said() if line.get("event") == event]
            if found or time.monotonic() > end or self.status is not None:
                return found[0] if found else None
            self._crew.hear(0.005)


class Crew:
    """A client of the forking process: starts processes and notices when they end.

    For one thread.
    """

    def __init__(self, variables: Mapping[str, str]) -> None:
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._members: dict[int, Member] = {}
        self._count = 0
        with theirs:
            self._process = subprocess.Popen(
                (sys.executable, str(Path(__file__))),
                env=dict(variables),
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
            )

    def start(
        self,
        folder: Path,
        arguments: Sequence[str],
        variables: Mapping[str, str],
        namespace: str = "",
    ) -> Member:
        """Start a process in a folder and, if given, a network namespace (/proc/PID/ns/net)."""
        self._count += 1
        output, errors = (folder / f"member-{self._count}.{kind}" for kind in ("out", "err"))
        request = {
            "arguments": list(arguments),
            "environment": dict(variables),
            "folder": str(folder),
            "namespace": namespace,
        }
        with output.open("wb") as out, errors.open("wb") as err:
            files = [out.fileno(), err.fileno()]
            socket.send_fds(self._connection, [json.dumps(request).encode()], files)
        while (pid := self._take(60.0)) is None:
            pass
        self._members[pid] = Member(self, pid, output, errors)
        return self._members[pid]

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
            raise ConnectionError("the process that ranks are forked from has ended")
        if "ended" in answer:
            member = self._members.pop(answer["ended"])
            member.status = answer["status"]
            member.ended_at = time.monotonic()
            return None
        return int(answer["started"])

    def close(self) -> None:
        """End the forking process, which kills all remaining processes."""
        self._connection.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(30.0)
        self._process.kill()
        self._process.wait()


if __name__ == "__main__":
    import ioshape._group.load  # noqa: F401
    import torch
    import torch.distributed  # the slowest imports
    import torch.distributed.distributed_c10d  # noqa: F401

    let_forks_end_fast()
    _given = _Server(socket.socket(fileno=os.dup(0))).serve()
    if _given is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if _given[0]["namespace"]:
            enter(_given[0]["namespace"])
        # sys.path[0] is this file's folder, from which tests import their helpers.
        become(*_given, first=1)
