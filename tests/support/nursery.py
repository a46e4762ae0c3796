# SPDX-License-Identifier: Apache-2.0
"""A process that has imported torch and forks programs on request, so that they start fast.

It imports nothing of the library, starts no thread and computes nothing. So a program is in the
state after `import torch`, and ends like every program, except that the collector does not visit
torch's objects: visiting them took each program longer than its work. processes.py is its client.
A request is one packet of JSON, with the program's stdin, stdout and stderr. The answers are the
process ID, a word when the process has ended, and its status when that word has been acknowledged.
"""

import array
import gc
import json
import os
import socket
import sys
import types
from pathlib import Path
from typing import Any

import torch  # noqa: F401 - what takes so long


def _receive(connection: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    descriptors = array.array("i")
    data, ancillary, _, _ = connection.recvmsg(1 << 20, socket.CMSG_SPACE(3 * descriptors.itemsize))
    for _, _, payload in ancillary:
        descriptors.frombytes(payload)
    return json.loads(data) if data else None, list(descriptors)


def _serve(connection: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    """Serve requests.

    Return, in a child, the request that it must fulfil; return None at the end.
    """
    while True:
        request, descriptors = _receive(connection)
        if request is None:
            return None, []
        child = os.fork()
        if not child:
            connection.close()
            return request, descriptors
        for descriptor in descriptors:
            os.close(descriptor)
        connection.send(str(child).encode())
        # The process is not reaped before the client knows that it has ended, so that its process
        # ID cannot be reused.
        os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
        connection.send(b"ended")
        connection.recv(64)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        connection.send(str(status).encode())


def _become(request: dict[str, Any], descriptors: list[int]) -> tuple[Any, types.ModuleType]:
    """Prepare the forked process for its program: descriptors, environment and arguments."""
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    sys.argv[:] = request["arguments"]
    path = request["arguments"][0]
    main = types.ModuleType("__main__")
    main.__file__ = path
    sys.modules["__main__"] = main
    sys.path[0] = str(Path(path).parent)
    return compile(Path(path).read_text(encoding="utf-8"), path, "exec"), main


if __name__ == "__main__":
    gc.collect()
    gc.freeze()
    _request, _descriptors = _serve(socket.socket(fileno=os.dup(0)))
    if _request is not None:
        _code, _main = _become(_request, _descriptors)
        exec(_code, _main.__dict__)
