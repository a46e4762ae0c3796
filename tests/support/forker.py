# SPDX-License-Identifier: Apache-2.0
"""A process that has imported modules, such as torch, and forks programs on request.

Its arguments are the modules. It starts no thread and computes nothing. So a program starts fast,
in the state after these imports, and ends like every program, except for _let_forks_end_fast().
Class Forker in processes.py is its client. With the arguments "--shared NAME" before the modules it
serves the clients that connect to the abstract socket of this name, each in a process of its own.

A request is one packet of JSON with "arguments", "environment", "folder" and "namespace" (a path or
""), and the program's stdin, stdout and stderr; or with "pid" and "signal". Answers are packets,
too: {"started": PID}, and {"ended": PID, "status": STATUS} when a program has ended.
"""

import atexit
import ctypes
import gc
import json
import os
import select
import signal
import socket
import sys
import time
import types
import weakref
from importlib import import_module
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)

#: seconds within which the first client connects; it began to connect before the imports
_FIRST_WITHIN_S = 60.0

#: modules that are in memory when programs are forked, except those of ioshape
_imported: dict[str, types.ModuleType] = {}


# The first callback that a process registers is the last that it calls.
@atexit.register
def _forget() -> None:
    """Hide the modules from the end of Python, which would clear each of their objects."""
    for name in _imported:
        sys.modules.pop(name, None)


def _let_forks_end_fast() -> None:
    """Spare the programs that will be forked what takes them longer at their end than their work.

    Each object of torch that the end visits is in memory that the process must copy first. So the
    garbage collector and the end of Python do not visit these objects, torch does not withdraw its
    operators, and its C++ destructors, which free memory, do not run. Everything that a program
    registers for its end runs before, and its own modules and those of ioshape end as always. The
    stage coverage needs the full end: C code writes its counts last.
    """
    _imported.update(
        (name, module)
        for name, module in sys.modules.items()
        if name not in ("builtins", "sys", "__main__") and name.partition(".")[0] != "ioshape"
    )
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(_imported))  # it outlives this module
    for one in getattr(weakref.finalize, "_registry", ()):
        one.atexit = False
    gc.collect()
    gc.freeze()
    if "COVERAGE_FILE" not in os.environ:
        _LIBC.on_exit(_LIBC._exit, None)


def _listen(name: str) -> socket.socket:
    """Return a listening socket. End this process if another one has the name."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        listener.bind("\0" + name)
    except OSError:
        sys.exit()
    listener.listen(64)
    return listener


def _accept(listener: socket.socket) -> socket.socket | None:
    """Fork a process for each client.

    Return, in such a process, its connection; return None when the last client has gone.
    """
    alive: set[int] = set()
    first_until = time.monotonic() + _FIRST_WITHIN_S
    while alive or time.monotonic() < first_until:
        if select.select([listener], [], [], 1.0)[0]:
            connection, _ = listener.accept()
            child = os.fork()
            if not child:
                listener.close()
                return connection
            connection.close()
            alive.add(child)
            first_until = 0.0
        alive = {pid for pid in alive if not os.waitpid(pid, os.WNOHANG)[0]}
    return None


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
            data, descriptors, _, _ = socket.recv_fds(self._connection, 1 << 20, 3)
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


def _enter(namespace: str) -> None:
    with open(namespace, "rb") as file:  # noqa: PTH123
        if _LIBC.setns(file.fileno(), 0):
            raise OSError(ctypes.get_errno(), "setns")


def _become(request: dict[str, Any], descriptors: list[int]) -> None:
    """Make this forked process the program of a request, and run it."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if request["namespace"]:
        _enter(request["namespace"])
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    sys.argv[:] = request["arguments"]
    path = Path(sys.argv[0])
    sys.path[0] = str(path.parent)
    main = types.ModuleType("__main__")
    main.__file__ = str(path)
    sys.modules["__main__"] = main
    exec(compile(path.read_text(encoding="utf-8"), path, "exec"), main.__dict__)


def _main(arguments: list[str]) -> None:
    listener = None
    if arguments[0] == "--shared":
        listener = _listen(arguments[1])
        arguments = arguments[2:]
    for module in arguments:
        import_module(module)
    _let_forks_end_fast()
    connection = _accept(listener) if listener else socket.socket(fileno=os.dup(0))
    given = _Server(connection).serve() if connection else None
    if given:
        _become(*given)


if __name__ == "__main__":
    _main(sys.argv[1:])
