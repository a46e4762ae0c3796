# SPDX-License-Identifier: Apache-2.0
"""Jobs of several ranks on several simulated nodes, each with its own network if wanted."""

import functools
import itertools
import json
import os
import signal
import subprocess
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ports import free_port
from processes import Forked, Forker, common_forker, environment

#: Limit for ranks. A rank that exceeds it hangs, or waits for the deadline although it could know
#: of a failure earlier. The default deadline is longer.
TIMEOUT_S = 90.0
DEADLINE_MS = 120_000


class NotPermitted(Exception):
    """This machine does not allow us to make network namespaces."""


class Networks:
    """A network namespace for each node, and one for a switch between them.

    A namespace lives as long as a process in it. These processes end when their input, a pipe from
    this process, is closed. So nothing is left, however this process ends.
    """

    PORT = "ioshape0"

    def __init__(self, nodes: int) -> None:
        self._holders: list[subprocess.Popen[bytes]] = []
        try:
            self._switch = self._hold()
            self._in(self._switch, "ip", "link", "add", "bridge", "type", "bridge")
            self._in(self._switch, "ip", "link", "set", "bridge", "up")
            self._nodes = [self._hold() for _ in range(nodes)]
            for number, node in enumerate(self._nodes):
                self._plug_in(number, node)
        except BaseException:
            self.close()
            raise

    def _plug_in(self, number: int, node: int) -> None:
        socket_name = f"port{number}"
        self._in(
            self._switch,
            *("ip", "link", "add", socket_name, "type", "veth"),
            *("peer", "name", self.PORT, "netns", str(node)),
        )
        self._in(self._switch, "ip", "link", "set", socket_name, "master", "bridge", "up")
        self._in(node, "ip", "addr", "add", f"{self.address(number)}/24", "dev", self.PORT)
        for device in ("lo", self.PORT):
            self._in(node, "ip", "link", "set", device, "up")

    def _hold(self) -> int:
        # `unshare` executes `sh` and that executes `cat`, so the process ID stays.
        holder = subprocess.Popen(
            ["unshare", "--net", "sh", "-c", "echo; exec cat"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self._holders.append(holder)
        assert holder.stdout is not None
        assert holder.stderr is not None
        if not holder.stdout.readline():
            raise NotPermitted(f"unshare --net: {holder.stderr.read().decode().strip()}")
        return holder.pid

    def _in(self, holder: int, *command: str) -> None:
        done = subprocess.run(
            [*self._prefix(holder), *command], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise NotPermitted(f"{' '.join(command)}: {done.stderr.strip()}")

    @staticmethod
    def _prefix(holder: int) -> tuple[str, ...]:
        return ("nsenter", f"--net=/proc/{holder}/ns/net")

    @staticmethod
    def address(node: int) -> str:
        """Return the address of a node."""
        return f"10.79.0.{node + 1}"

    def prefix(self, node: int) -> tuple[str, ...]:
        """Return the beginning of a command that runs on a node."""
        return self._prefix(self._nodes[node])

    def namespace(self, node: int) -> str:
        """Return the path of a node's namespace, for setns()."""
        return f"/proc/{self._nodes[node]}/ns/net"

    def cut(self, node: int) -> None:
        """Disconnect a node from the switch."""
        self._in(self._switch, "ip", "link", "set", f"port{node}", "down")

    def reconnect(self, node: int) -> None:
        """Connect a node to the switch again."""
        self._in(self._switch, "ip", "link", "set", f"port{node}", "up")

    def close(self) -> None:
        """End all holders. A namespace disappears with its last process."""
        for holder in self._holders:
            holder.kill()
            holder.communicate()


@contextmanager
def networks(nodes: int) -> Iterator[Networks]:
    """Make networks, and remove them at the end.

    Raise NotPermitted with the reason if only root may.
    """
    if os.geteuid() != 0:
        raise NotPermitted("network namespaces need root")
    made = Networks(nodes)
    try:
        yield made
    finally:
        made.close()


# ---- Ranks --------------------------------------------------------------------------------------

_jobs = itertools.count()
_members = itertools.count()


@functools.cache
def forker() -> Forker:
    """Return the forker of all ranks, which has also imported what they use of ioshape."""
    return Forker(("ioshape._group.load",), parent=common_forker())


class Member:
    """A running process, such as a rank. It reports events as lines of JSON on its stdout."""

    def __init__(
        self,
        folder: Path,
        arguments: Sequence[str],
        variables: Mapping[str, str],
        namespace: str = "",
    ) -> None:
        """Start the process in a folder and, if given, a network namespace (/proc/PID/ns/net)."""
        number = next(_members)
        self._output, self._errors = (folder / f"member-{number}.{kind}" for kind in ("out", "err"))
        with (
            Path(os.devnull).open("rb") as nothing,
            self._output.open("wb") as out,
            self._errors.open("wb") as err,
        ):
            files = (nothing.fileno(), out.fileno(), err.fileno())
            self.process: Forked = forker().start(folder, arguments, variables, files, namespace)

    def said(self) -> list[dict[str, Any]]:
        """Return the events so far, from complete lines."""
        text = self._output.read_text(encoding="utf-8", errors="replace")
        lines = text[: text.rfind("\n") + 1].splitlines()
        return [json.loads(line) for line in lines if line.startswith("{")]

    def errors(self) -> str:
        """Return what it has written to stderr."""
        return self._errors.read_text(encoding="utf-8", errors="replace")

    def await_said(self, event: str, timeout_s: float) -> dict[str, Any] | None:
        """Wait for the first line with this "event". Return it, or None after the time-out."""
        end = time.monotonic() + timeout_s
        while True:
            found = [line for line in self.said() if line.get("event") == event]
            if found or time.monotonic() > end or self.process.status is not None:
                return found[0] if found else None
            forker().hear(0.005)


def rank_variables(
    ranks: int, nodes: int, *, port: int, network: Networks | None = None, **more: str
) -> list[dict[str, str]]:
    """Return for each rank the variables that torchrun would set.

    Consecutive ranks share a node.
    """
    name = f"test-{os.getpid()}-{next(_jobs)}"
    found = []
    for rank in range(ranks):
        node = rank * nodes // ranks
        local = [other for other in range(ranks) if other * nodes // ranks == node]
        found.append(
            {
                "RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "LOCAL_RANK": str(local.index(rank)),
                "LOCAL_WORLD_SIZE": str(len(local)),
                "MASTER_ADDR": network.address(0) if network else "127.0.0.1",
                "MASTER_PORT": str(port),
                "TORCHELASTIC_RUN_ID": name,
                "GLOO_SOCKET_IFNAME": network.PORT if network else "lo",
                "IOSHAPE_TEST_NODE": f"{name}-node-{node}",
                "IOSHAPE_DEADLINE_MS": str(DEADLINE_MS),
                **more,
            }
        )
    return found


class Ranks:
    """The running ranks of a job."""

    def __init__(self, members: Sequence[Member]) -> None:
        self.members = members

    def said(self, event: str = "") -> list[list[dict[str, Any]]]:
        """Return for each rank its events so far, or only those of this name."""
        return [
            [line for line in member.said() if event in ("", line.get("event"))]
            for member in self.members
        ]

    def end(self, *others: int, status: int = 0) -> list[list[dict[str, Any]]]:
        """Wait until all ranks have ended, with this status except for `others`.

        Return their events.
        """
        end = time.monotonic() + TIMEOUT_S
        for rank, member in enumerate(self.members):
            ended = member.process.wait(max(0.0, end - time.monotonic()))
            if ended is None:
                # faulthandler prints the stacks of all threads.
                member.process.signal(signal.SIGABRT)
                member.process.wait(10.0)
                raise AssertionError(f"rank {rank} hangs\n{self._told(rank)}")
            if rank not in others and ended != status:
                raise AssertionError(f"rank {rank}: status {ended}\n{self._told(rank)}")
        return self.said()

    def _told(self, rank: int) -> str:
        return f"{self.members[rank].said()[-5:]}\n{self.members[rank].errors()[-6000:]}"

    def await_all(self, event: str, *, but: Sequence[int] = ()) -> list[dict[str, Any]]:
        """Wait until each rank has reported this event. Return the first such line of each."""
        found = []
        for rank, member in enumerate(self.members):
            if rank in but:
                continue
            line = member.await_said(event, TIMEOUT_S)
            if line is None:
                raise AssertionError(f"rank {rank} does not say {event!r}\n{self._told(rank)}")
            found.append(line)
        return found

    def kill(self) -> None:
        """Kill all ranks that still run."""
        for member in self.members:
            if member.process.status is None:
                member.process.kill()
        for member in self.members:
            member.process.wait(10.0)


@contextmanager
def started_ranks(
    folder: Path,
    source: str,
    *arguments: object,
    ranks: int = 2,
    nodes: int = 1,
    network: Networks | None = None,
    each: Mapping[int, Mapping[str, str]] | None = None,
    **variables: str,
) -> Iterator[Ranks]:
    """Start a program on each rank, and kill all ranks at the end.

    `each` has more variables for some ranks. Without a network, only names distinguish nodes. The
    program begins with all of group_program.py.
    """
    program = folder / "ranks.py"
    program.write_text(textwrap.dedent(source), encoding="utf-8")
    command = [str(program), *map(str, arguments)]
    members = []
    for rank, own in enumerate(
        rank_variables(ranks, nodes, port=free_port(), network=network, **variables)
    ):
        more = (each or {}).get(rank, {})
        node = rank * nodes // ranks
        members.append(
            Member(
                folder,
                command,
                environment(**{**own, **more}),
                network.namespace(node) if network else "",
            )
        )
    job = Ranks(members)
    try:
        yield job
    finally:
        job.kill()


def run_ranks(
    folder: Path, source: str, *arguments: object, **more: Any
) -> list[list[dict[str, Any]]]:
    """Run a program on each rank to its end. Return the events of each rank."""
    with started_ranks(folder, source, *arguments, **more) as job:
        return job.end()


# ---- torchrun -----------------------------------------------------------------------------------


TORCHRUN = "import sys; from torch.distributed.run import main; main(sys.argv[1:])"


def run_torchrun(
    folder: Path,
    source: str,
    *arguments: object,
    network: Networks,
    nodes: int,
    ranks_per_node: int,
) -> list[dict[str, Any]]:
    """Run a program with the real torchrun on each node. Return the events of all ranks."""
    (folder / "torchrun.py").write_text(TORCHRUN, encoding="utf-8")
    program = folder / "ranks.py"
    program.write_text(textwrap.dedent(source), encoding="utf-8")
    agents = []
    for node in range(nodes):
        command = [
            "torchrun.py",
            *("--nnodes", str(nodes), "--nproc-per-node", str(ranks_per_node)),
            *("--node-rank", str(node), "--rdzv-id", f"test-{os.getpid()}"),
            *("--master-addr", network.address(0), "--master-port", "29500"),
            str(program),
            *map(str, arguments),
        ]
        more = {
            "GLOO_SOCKET_IFNAME": network.PORT,
            "TORCH_CPP_LOG_LEVEL": "ERROR",
            "IOSHAPE_TEST_NODE": f"test-{os.getpid()}-node-{node}",
        }
        agents.append(Member(folder, command, environment(**more), network.namespace(node)))
    try:
        for agent in agents:
            assert agent.process.wait(TIMEOUT_S) == 0, agent.errors()[-6000:]
    finally:
        for agent in agents:
            agent.process.signal(signal.SIGTERM)  # it ends its ranks
        for agent in agents:
            agent.process.wait(10.0)
    return [line for agent in agents for line in agent.said()]
