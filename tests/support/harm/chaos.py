# SPDX-License-Identifier: Apache-2.0
"""Clients and links that can be harmed, for the scenes of chaos_scenes.py."""

import contextlib
import os
import random
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from chaos_judge import Harm, Verdict, judge
from coordinators import short_folder
from processes import environment
from tree import build_folder


def now() -> int:
    """Return CLOCK_MONOTONIC in ns, as in the clients' logs."""
    return time.monotonic_ns()


def client_program() -> str:
    """Return the path of the program built from chaos_client.c."""
    return str(build_folder() / "tests" / "c" / "chaos-client")


# ---- A bad connection ----------------------------------------------------------------------------


class Proxy:
    """A proxy between clients and a server. What it does with bytes can be changed at any time:

    * "pass": It forwards them.
    * "slow": It delays each piece by 20 to 200 ms.
    * "swallow": It accepts connections, but no bytes pass in either direction (half open).
    * "cut": It cuts answers at a random position, and closes the connection.
    * "mute": It cuts answers at a random position, and keeps the connection open.
    """

    MODES = ("slow", "swallow", "cut", "mute")

    def __init__(self, path: Path, server: Path, seed: int) -> None:
        self.path = path
        self.mode = "pass"
        self._server = server
        self._random = random.Random(seed)
        self._selector = selectors.DefaultSelector()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(100)
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        self._others: dict[socket.socket, socket.socket] = {}
        self._muted: set[socket.socket] = set()
        self._late: list[tuple[float, socket.socket, bytes]] = []
        self._ending = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        """The address for clients."""
        return f"unix://{self.path}"

    def close(self) -> None:
        """End the proxy."""
        self._ending = True
        self._thread.join()
        for link in list(self._others):
            link.close()
        self._listener.close()
        self._selector.close()

    def _run(self) -> None:
        while not self._ending:
            for key, _ in self._selector.select(0.01):
                link = key.fileobj
                assert isinstance(link, socket.socket)
                if link is self._listener:
                    self._accept()
                elif link in self._others:
                    self._move(link, bool(key.data))
            due = time.monotonic()
            ready = [one for one in self._late if one[0] <= due]
            self._late = [one for one in self._late if one[0] > due]
            for _, link, data in ready:
                self._send(link, data)

    def _accept(self) -> None:
        client, _ = self._listener.accept()
        server = socket.socket(socket.AF_UNIX)
        try:
            server.connect(str(self._server))
        except OSError:
            client.close()
            return
        self._others[client], self._others[server] = server, client
        self._selector.register(client, selectors.EVENT_READ, False)
        self._selector.register(server, selectors.EVENT_READ, True)

    def _move(self, link: socket.socket, is_answer: bool) -> None:
        try:
            data = link.recv(65536)
        except OSError:
            data = b""
        other = self._others[link]
        if not data:
            self._drop(link)
        elif self.mode == "swallow" or link in self._muted:
            self._muted.update((link, other))  # for good, because the stream now lacks bytes
        elif self.mode == "slow" or any(other is late for _, late, _ in self._late):
            # Delayed pieces of a link keep their order.
            begin = max([time.monotonic(), *(at for at, late, _ in self._late if late is other)])
            self._late.append((begin + self._random.uniform(0.02, 0.2), other, data))
        elif self.mode in {"cut", "mute"} and is_answer:
            self._send(other, data[: self._random.randrange(len(data))])
            if self.mode == "cut":
                self._drop(link)
            else:
                self._muted.update((link, other))
        else:
            self._send(other, data)

    def _send(self, link: socket.socket, data: bytes) -> None:
        if link not in self._others:
            return
        try:
            link.sendall(data)
        except OSError:
            self._drop(link)

    def _drop(self, link: socket.socket) -> None:
        for one in (link, self._others[link]):
            self._selector.unregister(one)
            self._others.pop(one, None)
            self._muted.discard(one)
            one.close()


# ---- Clients ------------------------------------------------------------------------------------


class Client:
    """A process that takes turns or saves. After a kill it is started again under a new name."""

    def __init__(self, scene: "Scene", number: int, arguments: Sequence[str], **more: str) -> None:
        self.scene = scene
        self.number = number
        self.arguments = arguments
        self.variables = more
        self.prefix: Sequence[str] = ()
        self.lives = 0
        self.name = ""
        self.stopped_at = 0
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the process under a new name."""
        self.lives += 1
        mode, *rest = self.arguments
        self.name = f"{self.number}.{self.lives}-{mode[:4]}"
        seed = str(self.scene.random.randrange(1 << 32))
        variables = {**self.scene.variables, "RANK": str(self.number), **self.variables}
        with self.scene.errors.open("ab") as errors:
            self.process = subprocess.Popen(
                [*self.prefix, client_program(), mode, str(self.scene.log), self.name, seed, *rest],
                env=environment(**variables),
                stdin=subprocess.DEVNULL,
                stdout=errors,
                stderr=errors,
            )

    def kill(self) -> None:
        """Kill the process by SIGKILL."""
        assert self.process is not None
        self.scene.harm.deaths[self.name] = now()
        self.process.kill()
        self.process.wait()
        self.scene.harm.counts["kills_of_clients"] += 1
        if self.stopped_at:
            self._went_on()

    def stop(self) -> None:
        """Stop the process by SIGSTOP."""
        assert self.process is not None
        self.stopped_at = now()
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Continue the process by SIGCONT."""
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)
        self._went_on()

    def _went_on(self) -> None:
        at = now()
        self.scene.harm.stops.append((self.name, self.stopped_at, at))
        if at - self.stopped_at > self.scene.lease_ms * 1_000_000:
            self.scene.harm.counts["stops_past_lease"] += 1
        else:
            self.scene.harm.counts["stops_within_lease"] += 1
        self.stopped_at = 0

    def end(self) -> bool:
        """Ask the process to end. Return whether it ended well."""
        if self.process is None:
            return True
        self.process.terminate()
        try:
            ended = self.process.wait(self.scene.patience_s) == 0
        except subprocess.TimeoutExpired:
            # Reports in which calls its threads are.
            self.scene.verdict.hung.append(
                f"{self.name} does not end: {_threads(self.process.pid)}"
            )
            self.process.kill()
            self.process.wait()
            return True  # already reported
        return ended


def _threads(pid: int) -> str:
    told = []
    for task in Path(f"/proc/{pid}/task").glob("*"):
        with contextlib.suppress(OSError):
            told.append(f"{(task / 'wchan').read_text()} {(task / 'syscall').read_text().strip()}")
    return ", ".join(told)


# ---- A scene -------------------------------------------------------------------------------------


class Scene:
    """The clients of one pool, the harm done to them, and the results."""

    #: a client without a turn, or that does not end, for so long has hung; another job may have a
    #: turn of 20 s first (TURN in slots.lua)
    patience_s = 30.0

    def __init__(
        self, folder: Path, seed: int, address: str, *, lease_ms: int, capacity: int, **more: str
    ) -> None:
        self.folder = folder
        self.random = random.Random(seed)
        self.lease_ms = lease_ms
        self.capacity = capacity
        self.log = folder / "log"
        self.log.touch()
        self.errors = folder / "errors"
        self.errors.touch()
        self.harm = Harm()
        self.verdict = Verdict()
        self.clients: list[Client] = []
        self.variables = {
            "IOSHAPE_COORDINATOR": address,
            "IOSHAPE_POOL": "chaos",
            "IOSHAPE_SLOTS": str(capacity),
            "CHAOS_LEASE_MS": str(lease_ms),
            "WORLD_SIZE": "16",
            **more,
        }

    def add(
        self, count: int, *arguments: str, prefix: Sequence[str] = (), **more: str
    ) -> list[Client]:
        """Add clients and start them. "{}" in an argument is the client's number."""
        added = []
        for _ in range(count):
            number = len(self.clients)
            client = Client(self, number, [one.format(number) for one in arguments], **more)
            client.prefix = prefix
            client.start()
            self.clients.append(client)
            added.append(client)
        return added

    def add_takers(self, count: int, hold_ms: int = 60, **more: str) -> list[Client]:
        """Add clients of three jobs that take turns. One in five takes two slots at a time."""
        added = []
        for _ in range(count):
            number = len(self.clients)
            weight = 2 if number % 5 == 4 and self.capacity > 1 else 1
            job = f"job{number % 3}"
            added += self.add(
                1, "turns", str(hold_ms), str(weight), "mixed", IOSHAPE_JOB=job, **more
            )
        return added

    def pause(self, most_s: float) -> None:
        """Sleep for a random time up to this."""
        time.sleep(self.random.uniform(0, most_s))

    def lived_through(self, begin: int) -> None:
        """Record that the coordinator lost its data between then and now."""
        self.harm.losses.append((begin, now()))

    # -- At the end --

    def status(self) -> dict[str, object]:
        """Return the status of the pool."""
        import json  # noqa: PLC0415

        done = subprocess.run(
            [sys.executable, "-m", "ioshape", "slots", "status", "chaos", "--json"],
            env=environment(**self.variables),
            capture_output=True,
            text=True,
            check=False,
            timeout=30,
        )
        if done.returncode:
            return {"error": done.stderr}
        (told,) = json.loads(done.stdout)
        assert isinstance(told, dict)
        return told

    def _served_since(self, since: int) -> set[str]:
        served = set()
        with self.log.open("rb") as log:
            log.seek(max(0, self.log.stat().st_size - (4 << 20)))
            for line in log.read().splitlines():
                words = line.decode(errors="replace").split(maxsplit=6)
                if len(words) < 3 or not words[0].isdecimal() or int(words[0]) < since:
                    continue
                if words[2] in {"got", "kept", "saved"} and "by=stagger" not in words:
                    served.add(words[1])
        return served

    def tend(self) -> None:
        """Restart clients that have ended. For scenes whose clients end."""

    def _await_peace(self) -> None:
        """Wait until each client has had a turn after all harm: within a lease and some seconds."""
        since = now()
        deadline = time.monotonic() + 2 * self.lease_ms / 1000 + self.patience_s
        while missing := {client.name for client in self.clients} - self._served_since(since):
            self.tend()
            if time.monotonic() > deadline:
                self.verdict.hung.append(f"no turn after all was well again: {sorted(missing)}")
                return
            time.sleep(0.05)

    def _await_rest(self) -> None:
        """Wait until the slots of all ended clients are free: when their leases have ended."""
        deadline = time.monotonic() + 1.5 * self.lease_ms / 1000 + 1
        while True:
            told = self.status()
            # The slot file of a local pool is removed by the last process that uses it.
            if "has no pool" in str(told.get("error")):
                return
            if told.get("used") == 0 and told.get("waiters") == [] and told.get("holders") == []:
                return
            if time.monotonic() > deadline:
                self.verdict.used_at_rest.append(str(told))
                return
            time.sleep(0.05)

    def finish(self) -> Verdict:
        """Wait for turns and free slots, and judge the log."""
        for client in self.clients:
            if client.stopped_at:
                client.go_on()
        self._await_peace()
        for client in self.clients:
            if client.process:
                client.process.terminate()
        for client in self.clients:
            if not client.end():
                told = self.errors.read_text(encoding="utf-8", errors="replace")[-2000:]
                self.verdict.hung.append(f"{client.name} ended badly: {told}")
        self._await_rest()
        self.verdict.add(judge(self.log, self.harm, self.capacity, self.lease_ms))
        self._keep()
        return self.verdict

    def _keep(self) -> None:
        """Copy log and verdict of a failed scene if IOSHAPE_TEST_CHAOS_KEEP is set."""
        keep = os.environ.get("IOSHAPE_TEST_CHAOS_KEEP")
        if not keep or not (self.verdict.faults() or self.verdict.over_after_loss):
            return
        into = Path(keep) / f"{self.folder.name}"
        into.mkdir(parents=True, exist_ok=True)
        for path in (self.log, self.errors):
            shutil.copy(path, into)
        told = [str(vars(self.harm)), *self.verdict.faults(), *self.verdict.over_after_loss]
        (into / "verdict").write_text("\n".join(told), encoding="utf-8")

    def close(self) -> None:
        """Kill all remaining clients."""
        for client in self.clients:
            if client.process and client.process.poll() is None:
                client.process.kill()
                client.process.wait()


@contextmanager
def scene(seed: int, address: str, **more: object) -> Iterator[Scene]:
    """Make a scene in a folder of its own, and close it at the end."""
    with short_folder() as folder:
        made = Scene(folder, seed, address, **more)  # type: ignore[arg-type]
        try:
            yield made
        finally:
            made.close()
