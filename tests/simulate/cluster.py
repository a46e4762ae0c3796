# SPDX-License-Identifier: Apache-2.0
"""Simulate jobs that train, save in the background and fail, and whose nodes ask for slots."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from .events import Events
from .script import Scripted
from .storage import Storage
from .workload import RESTART_S, Job, Save

#: The library closes a connection that was unused for this time, or shortly before.
CONNECTED_S = 30.0


class Event(NamedTuple):
    """The end of something that a job does. It is void if the job has restarted since."""

    kind: str
    job: int
    life: int
    save: Save | None = None


@dataclass
class State:
    """The state of one job."""

    job: Job
    failures: Iterator[float]
    life: int = 0
    work_s: float = 0.0  # time since when work is not saved
    waits: bool = False  # training stands still until the save before is done
    saving: Save | None = None
    takes_s: list[float] = field(default_factory=list)  # from the request until durable


@dataclass
class Counts:
    asked: int = 0
    granted: int = 0
    finished: int = 0
    cancelled: int = 0
    most_writing: int = 0
    most_waiting: int = 0
    most_connected: int = 0  # nodes


class Cluster(Events):
    """Jobs on a storage, whose slots the queue grants."""

    def __init__(self, jobs: list[Job], storage: Storage, queue: Scripted, seed: int = 1) -> None:
        super().__init__()
        self.storage, self.queue = storage, queue
        self.storm = False
        self.counts = Counts()
        self.writing = self.waiting = 0
        self.states = [State(job, job.failures(seed)) for job in jobs]
        self.grants: list[tuple[float, int]] = []  # (time, job)
        # times when nodes closed the last connection that is still open
        self._left: deque[float] = deque()

    # ---- Clock and events -----------------------------------------------------------------------

    def start(self) -> None:
        for number, state in enumerate(self.states):
            self._later(next(state.failures), "fails", number, -1)
            self._later(state.job.interval_s - state.job.phase_s, "save", number, 0)

    def start_storm(self) -> None:
        """Let all jobs save at the same moment, and never again."""
        self.storm = True
        for number in range(len(self.states)):
            self._later(0.0, "save", number, 0)

    def passes(self, at: float) -> None:
        super().passes(at)
        self.queue.advance(at)

    def happened(self) -> None:
        """Grant free slots."""
        while self.writing < self.queue.capacity and (save := self.queue.pop()):
            self.waiting -= 1
            self.writing += 1
            save.writing += 1
            self.counts.granted += 1
            self.counts.most_writing = max(self.counts.most_writing, self.writing)
            self.grants.append((self.now, save.job.number))
            end_s = self.now + self.storage.write_s(save.job.node_bytes)
            self._later(end_s, "written", save.job.number, -1, save)

    def _later(self, at_s: float, kind: str, job: int, life: int, save: Save | None = None) -> None:
        self.at(at_s, partial(self._happen, Event(kind, job, life, save)))

    def _happen(self, event: Event) -> None:
        state = self.states[event.job]
        if event.save:
            self._give_back(event.save)
        elif event.kind == "fails":
            self._fail(event.job, state)
        elif event.life != state.life:
            return
        elif event.kind == "trains":
            self._train(event.job, state)
        elif state.saving:
            state.waits = True
        else:
            self._save(event.job, state)

    # ---- Life of a job --------------------------------------------------------------------------

    def _train(self, number: int, state: State) -> None:
        if not self.storm:
            self._later(self.now + state.job.interval_s, "save", number, state.life)

    def _save(self, number: int, state: State) -> None:
        state.saving = Save(state.job, self.now, state.work_s, state.job.nodes)
        self._later(self.now + state.job.stage_s, "trains", number, state.life)
        self.counts.asked += state.job.nodes
        self.waiting += state.job.nodes
        self.counts.most_waiting = max(self.counts.most_waiting, self.waiting)
        self._count_connected()
        self.queue.push(state.saving)

    def _saved(self, number: int, state: State, save: Save) -> None:
        """End a save that all nodes have written."""
        state.saving = None
        state.work_s = save.asked_s
        state.takes_s.append(self.now - save.asked_s)
        if state.waits:
            state.waits = False
            self._save(number, state)

    def _fail(self, number: int, state: State) -> None:
        self._later(next(state.failures), "fails", number, -1)
        if state.saving:
            self._cancel(state.saving)
        state.saving, state.waits = None, False
        # A job that fails during its restart begins the restart again.
        state.life += 1
        state.work_s = self.now + RESTART_S
        self._later(self.now + RESTART_S, "trains", number, state.life)

    # ---- Slots and writes ----------------------------------------------------------------------

    def _count_connected(self) -> None:
        while self._left and self._left[0] <= self.now - CONNECTED_S:
            self._left.popleft()
        connected = self.waiting + self.writing + len(self._left)
        self.counts.most_connected = max(self.counts.most_connected, connected)

    def _give_back(self, save: Save) -> None:
        self.writing -= 1
        save.writing -= 1
        self.counts.finished += 1
        self._left.append(self.now)
        self.queue.done(save)
        number = save.job.number
        if not save.cancelled and save.waiting == save.writing == 0:
            self._saved(number, self.states[number], save)

    def _cancel(self, save: Save) -> None:
        """Cancel a save whose processes are dead.

        Nodes that hold a slot keep it as long as the write would have taken, which stands for the
        lease.
        """
        save.cancelled = True
        self.counts.cancelled += save.waiting
        self.waiting -= save.waiting
        self.queue.cancel(save)
