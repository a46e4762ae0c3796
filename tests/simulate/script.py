# SPDX-License-Identifier: Apache-2.0
"""Run slots.lua as the queue of the simulation, in a real Redis or as a model, on its clock.

Each node sends its own request and heartbeats, as the library does. A client asks, sends a
heartbeat every third of a lease, confirms a granted slot, and releases it.
"""

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from coordinators import Reply, Value
from slots_model import Answer, Identity, Pool
from slots_script import Script, Server, fields, info_text, scripted_text

from .workload import Save, boost_s

STARTED_MS = 1_700_000_000_000
LEASE_MS = 15_000
BEAT_S = LEASE_MS / 3 / 1000
WAITING, HOLDING = 1, 2
#: All clients share one wake-up list. In reality each client has its own.
CLIENT = "sim"
#: Heartbeats within this time are sent together.
TOGETHER_S = 0.05


@dataclass
class Asked:
    """The state of a request, as the client of a node knows it."""

    id: str
    save: Save
    rank: int
    state: int = WAITING
    fence: int = 0
    given: int = 0

    @property
    def size(self) -> int:
        return int(self.save.job.node_bytes)

    @property
    def job(self) -> str:
        return f"job{self.save.job.number}"

    @property
    def boost_ms(self) -> int:
        return int(boost_s(self.save) * 1000)

    @property
    def node(self) -> str:
        return f"node{self.rank}"


class Rules(Protocol):
    """The side that decides about slots. Answers are those of slots.lua."""

    def clock(self, now_ms: int) -> None: ...
    def fail_over(self, *, lose_all: bool) -> None: ...
    def acquire(self, new: Sequence[Asked], capacity: int, epoch: int) -> list[Answer]: ...
    def beat(self, due: Sequence[Asked], epoch: int) -> list[Answer]: ...
    def release(self, held: Asked, epoch: int) -> None: ...
    def woken(self) -> list[str]:
        """Return the ids that were granted a slot since the last call."""


class Real:
    """slots.lua in a redis-server."""

    def __init__(self, server: Server, at_once: int = 50) -> None:
        self.connection = server.connection
        self.script = Script(server, scripted_text(), "simulated")
        self.calls = 0
        self._at_once = at_once
        self._run = 1
        self.clock(STARTED_MS)
        self._tell_server()

    def _tell_server(self) -> None:
        self.connection.call("SET", "info", info_text(self._run, 100_000))

    def clock(self, now_ms: int) -> None:
        self._now_ms = now_ms
        self.connection.call("SET", "now", now_ms)

    def fail_over(self, *, lose_all: bool) -> None:
        if lose_all:
            self.connection.call("FLUSHALL")
        self._run += 1
        self.clock(self._now_ms)
        self._tell_server()

    def acquire(self, new: Sequence[Asked], capacity: int, epoch: int) -> list[Answer]:
        return self._ask(
            [
                self.script.command(
                    *("acquire", one.id, CLIENT, one.node, one.job, one.rank, 100, 1),
                    *(one.size, capacity, 1, "u", 0, one.boost_ms),
                    lease=LEASE_MS,
                    known=epoch,
                )
                for one in new
            ]
        )

    def beat(self, due: Sequence[Asked], epoch: int) -> list[Answer]:
        return self._ask(
            [
                self.script.command(
                    *("beat", one.id, 0, int(one.state == HOLDING), one.fence),
                    *(one.given, one.size, CLIENT, one.node, one.job, one.rank, 100),
                    lease=LEASE_MS,
                    known=epoch,
                )
                for one in due
            ]
        )

    def release(self, held: Asked, epoch: int) -> None:
        command = self.script.command("release", held.id, held.size, lease=LEASE_MS, known=epoch)
        self._call([command])

    def woken(self) -> list[str]:
        found = self.connection.call("LPOP", f"{self.script.prefix}w:{CLIENT}", 1_000_000)
        return [str(one) for one in found] if isinstance(found, list) else []

    def _ask(self, commands: list[list[Value]]) -> list[Answer]:
        return [fields(answer) for answer in self._call(commands)]

    def _call(self, commands: list[list[Value]]) -> list[Reply]:
        self.calls += len(commands)
        answers: list[Reply] = []
        for start in range(0, len(commands), self._at_once):
            for answer in self.connection.call_all(commands[start : start + self._at_once]):
                if isinstance(answer, Exception):
                    raise answer
                answers.append(answer)
        return answers


class Modelled:
    """The model in tests/support/models/slots_model.py. It is slow, so crowds must be small."""

    def __init__(self) -> None:
        self._now_ms = STARTED_MS
        self._run = 1
        self.pool = Pool(lambda: self._now_ms, lambda: (f"{self._run:040x}", 100_000))

    def clock(self, now_ms: int) -> None:
        self._now_ms = now_ms

    def fail_over(self, *, lose_all: bool) -> None:
        if lose_all:
            self.pool.lose_all()
        self._run += 1

    @staticmethod
    def _who(one: Asked) -> Identity:
        return Identity(CLIENT, one.node, one.job, one.rank, 100)

    def acquire(self, new: Sequence[Asked], capacity: int, epoch: int) -> list[Answer]:
        return [
            self.pool.acquire(
                *(one.id, self._who(one), 1, one.size, LEASE_MS, capacity),
                known_epoch=epoch,
                boost=one.boost_ms,
            )
            for one in new
        ]

    def beat(self, due: Sequence[Asked], epoch: int) -> list[Answer]:
        return [
            self.pool.beat(
                *(one.id, self._who(one), 0, LEASE_MS, epoch, one.state == HOLDING),
                *(one.fence, one.given, one.size),
            )
            for one in due
        ]

    def release(self, held: Asked, epoch: int) -> None:
        self.pool.release(held.id, held.size, LEASE_MS, epoch)

    def woken(self) -> list[str]:
        found, self.pool.woken = self.pool.woken, []
        return found


class Scripted:
    """A queue of saves. The rules decide which of them gets the next slot."""

    def __init__(self, rules: Rules, capacity: int) -> None:
        self.rules, self.capacity = rules, capacity
        self.now = 0.0
        self._epoch = 0
        self._asked: dict[str, Asked] = {}
        self._holding: dict[int, deque[Asked]] = {}  # keyed by the save
        self._granted: deque[Asked] = deque()
        self._beats: list[tuple[float, str]] = []
        self._made = 0

    def fail_over(self, *, lose_all: bool) -> None:
        """Switch to another server, with all data or with none."""
        self.rules.fail_over(lose_all=lose_all)

    def advance(self, at_s: float) -> None:
        """Send all heartbeats that are due until then."""
        while self._beats and self._beats[0][0] <= at_s:
            self._to(self._beats[0][0])
            due: list[Asked] = []
            while self._beats and self._beats[0][0] <= self.now + TOGETHER_S:
                asked = self._asked.get(heapq.heappop(self._beats)[1])
                if asked:
                    due.append(asked)
            self._beat(due)
        self._to(at_s)

    def _to(self, at_s: float) -> None:
        if at_s > self.now:
            self.now = at_s
            self.rules.clock(STARTED_MS + int(at_s * 1000))

    # ---- The interface to the cluster -----------------------------------------------------------

    def push(self, save: Save) -> None:
        new = [Asked(f"{self._made + n}", save, n) for n in range(save.waiting)]
        self._made += len(new)
        self._asked |= {asked.id: asked for asked in new}
        self._acquire(new)

    def pop(self) -> Save | None:
        """Return the save of a node that has been granted a slot."""
        while self._granted:
            asked = self._granted.popleft()
            if asked.id in self._asked:
                asked.save.waiting -= 1
                self._holding.setdefault(id(asked.save), deque()).append(asked)
                return asked.save
        return None

    def done(self, save: Save) -> None:
        """Take back the slot of a node."""
        asked = self._holding[id(save)].popleft()
        del self._asked[asked.id]
        self.rules.release(asked, self._epoch)
        self._confirm()

    def cancel(self, save: Save) -> None:
        """Forget the waiting clients of a save. They are dead, and their leases run out."""
        save.waiting = 0
        for asked in list(self._asked.values()):
            if asked.save is save and asked not in self._holding.get(id(save), ()):
                del self._asked[asked.id]

    # ---- Calls ---------------------------------------------------------------------------------

    def _acquire(self, new: Sequence[Asked]) -> None:
        answers = self.rules.acquire(new, self.capacity, self._epoch)
        # A request without an answer would be asked again forever.
        assert all(answer["state"] for answer in answers)
        self._hear(new, answers)

    def _beat(self, due: Sequence[Asked]) -> None:
        self._hear(due, self.rules.beat(due, self._epoch))

    def _hear(self, asked: Sequence[Asked], answers: Sequence[Answer]) -> None:
        lost = []
        for one, answer in zip(asked, answers, strict=True):
            state, self._epoch = answer["state"], int(answer["epoch"])
            if state == HOLDING:
                self._hold(one, int(answer["fence"]), int(answer["weight"]))
            elif one.state == WAITING and state != WAITING:
                lost.append(one)  # the server has forgotten this request, so the client asks again
                continue
            heapq.heappush(self._beats, (self.now + BEAT_S, one.id))
        if lost:
            self._acquire(lost)
        self._confirm()

    def _hold(self, asked: Asked, fence: int, given: int) -> None:
        asked.fence, asked.given = fence, given
        if asked.state != HOLDING:
            asked.state = HOLDING
            self._granted.append(asked)

    def _confirm(self) -> None:
        """Send a heartbeat for each request that was woken."""
        ids = self.rules.woken()
        if ids:
            self._beat([self._asked[one] for one in ids if one in self._asked])
