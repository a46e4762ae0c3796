# SPDX-License-Identifier: Apache-2.0
"""A process that has imported modules, such as torch, and forks programs on request.

Its arguments are the modules. It starts no thread and computes nothing. So a program starts fast,
in the state after these imports, and ends like every program, except for let_forks_end_fast().
processes.py is its client. A request is one packet of JSON, with the program's stdin, stdout and
stderr. The answers are the process ID, a word when the process has ended, and its status when that
word has been acknowledged.
"""

import array
import json
import os
import socket
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from forked import become, enter, let_forks_end_fast


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


if __name__ == "__main__":
    for _module in sys.argv[1:]:
        import_module(_module)
    let_forks_end_fast()
    _request, _descriptors = _serve(socket.socket(fileno=os.dup(0)))
    if _request is not None:
        if _request["namespace"]:
            enter(_request["namespace"])
        sys.path[0] = str(Path(_request["arguments"][0]).parent)
        become(_request, _descriptors, first=0)
