# SPDX-License-Identifier: Apache-2.0
"""Simulate jobs that train, save and fail on one storage, and count the time that they lose."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from .events import Events
from .order import Queue, Save
from .storage import Storage
from .workload import RESTART_S, Job

#: The library closes a connection that was unused for this time, or shortly before.
CONNECTED_S = 30.0


@dataclass
class Lost:
    """Lost seconds of one job. All its nodes lose each of them."""

    saving: float = 0.0  # training waits for its own save
    late: float = 0.0  # training waits for the save before
    again: float = 0.0  # work to repeat after failures; the expected value, not drawn at random
    restart: float = 0.0

    @property
    def all(self) -> float:
        return self.saving + self.late + self.again + self.restart


class Event(NamedTuple):
    """The end of something that a job does. It is void if the job has restarted since."""

    kind: str
    job: int
    life: int
    save: Save | None = None
    nodes: int = 0


@dataclass
class State:
    """The state of one job."""

    job: Job
    failures: Iterator[float]
    lost: Lost = field(default_factory=Lost)
    life: int = 0
    worked_s: float = 0.0  # since its start, without work that failures destroyed
    began_s: float = 0.0  # begin of the current stretch of training
    durable_s: float = 0.0  # work that the last complete save holds
    looked_s: float = 0.0  # time up to which the work at risk is counted in `lost`
    held_s: float | None = None  # time since when it waits for its save; None if it trains
    saving: Save | None = None
    saved_work_s: float = 0.0
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
    bytes: float = 0.0
    failures: int = 0


class Cluster(Events):
    """Jobs on a storage. `queue` grants its `capacity` slots; without a queue all write at once."""

    def __init__(
        self,
        jobs: list[Job],
        storage: Storage,
        queue: Queue | None,
        *,
        background: bool = False,
        seed: int = 1,
        capacity: int = 0,
    ) -> None:
        super().__init__(storage.rate)
        self.storage, self.queue, self.background = storage, queue, background
        self.capacity = capacity or storage.writers
        self.storm = False
        self.counts = Counts()
        self.writing = self.waiting = 0
        self.states = [State(job, job.failures(seed)) for job in jobs]
        self.grants: list[tuple[float, int, int]] = []  # (time, job, number of nodes)
        self.saves: list[tuple[Save, float]] = []  # (save, time when it was durable)
        # (time, number of nodes) of connections that are still open
        self._left: deque[tuple[float, int]] = deque()
        self._left_nodes = 0

    # ---- Clock and events -----------------------------------------------------------------------

    def start(self) -> None:
        for number, state in enumerate(self.states):
            self._later(next(state.failures), "fails", number, -1)
            state.began_s = 0.0
            state.worked_s = state.durable_s = 0.0
            self._later(state.job.interval_s - state.job.phase_s, "save", number, 0)

    def start_storm(self) -> None:
        """Let all jobs save at the same moment, and never again."""
        self.storm = True
        for number in range(len(self.states)):
            self._later(0.0, "save", number, 0)

    def passes(self, at: float) -> None:
        super().passes(at)
        if self.queue:
            self.queue.advance(at)

    def written(self, writer: object) -> None:
        """End the save of all nodes, which began at once."""
        assert isinstance(writer, Save)
        self.crowd.leave(writer, writer.job.nodes)
        self._give_back(writer, writer.job.nodes)

    def happened(self) -> None:
        self._grant()

    def _later(
        self, at_s: float, kind: str, job: int, life: int, save: Save | None = None, nodes: int = 0
    ) -> None:
        self.at(at_s, partial(self._happen, Event(kind, job, life, save, nodes)))

    def _risk(self, state: State) -> None:
        """Add the cost of failures that the time since the last call could have had.

        Failures drawn at random would make the result noisy.
        """
        if state.held_s is None and self.now > state.began_s:
            trained = self.now - state.began_s
        else:
            trained = 0.0
        past = max(self.now - state.looked_s, 0.0)
        at_risk = state.worked_s + trained - state.durable_s
        mean = at_risk - min(trained, past) ** 2 / 2 / past if past else 0.0
        state.lost.again += mean * past / state.job.mtbf_s
        state.looked_s = self.now

    def _happen(self, event: Event) -> None:
        state = self.states[event.job]
        if event.kind != "written" and (event.life == state.life or event.kind == "fails"):
            self._risk(state)
        if event.kind == "written" and event.save:
            self._give_back(event.save, event.nodes)
        elif event.kind == "fails":
            self._fail(event.job, state)
        elif event.life == state.life:
            if event.kind == "save":
                self._due(event.job, state)
            elif event.kind == "trains":
                self._train(event.job, state)

    # ---- Life of a job --------------------------------------------------------------------------

    def _train(self, number: int, state: State) -> None:
        state.began_s = self.now
        if not self.storm:
            self._later(self.now + state.job.interval_s, "save", number, state.life)

    def _due(self, number: int, state: State) -> None:
        """Save, because the job has trained for an interval, or wait for the save before."""
        state.worked_s += self.now - state.began_s
        state.began_s = self.now
        if state.saving:
            state.held_s = self.now  # until the save before is done
        else:
            self._save(number, state)

    def _save(self, number: int, state: State) -> None:
        job = state.job
        staged_s = job.stage_s if self.background else 0.0
        lost_since = self.now - (state.worked_s - state.durable_s)
        save = Save(job, self.now, lost_since, self.background, job.nodes)
        state.saving, state.saved_work_s = save, state.worked_s
        state.lost.saving += staged_s
        if self.background:
            state.began_s = self.now + staged_s
            self._later(self.now + staged_s, "trains", number, state.life)
        else:
            state.held_s = self.now
        self._ask(save)

    def _saved(self, state: State) -> None:
        """End a save that all nodes have written, and let the job go on."""
        self._risk(state)
        save, state.saving = state.saving, None
        assert save
        state.durable_s = state.saved_work_s
        state.takes_s.append(self.now - save.asked_s)
        self.saves.append((save, self.now))
        if state.held_s is None:
            return
        waited, state.held_s = self.now - state.held_s, None
        number = state.job.number
        if self.background:
            state.lost.late += waited
            self._save(number, state)
        else:
            state.lost.saving += waited
            self._train(number, state)

    def _fail(self, number: int, state: State) -> None:
        self.counts.failures += 1
        self._later(next(state.failures), "fails", number, -1)
        lost = state.lost
        if state.held_s is not None:
            if state.saving and state.saving.asked_s == state.held_s:
                lost.saving += self.now - state.held_s
            else:
                lost.late += self.now - state.held_s
        else:
            state.worked_s += max(self.now - state.began_s, 0.0)
        state.worked_s, state.held_s = state.durable_s, None
        if state.saving:
            self._cancel(state.saving)
            state.saving = None
        # A job that fails during its restart begins the restart again.
        lost.restart += RESTART_S
        state.life += 1
        state.began_s = self.now + RESTART_S
        state.looked_s = state.began_s
        self._later(self.now + RESTART_S, "trains", number, state.life)

    # ---- Slots and writes ----------------------------------------------------------------------

    def _ask(self, save: Save) -> None:
        nodes = save.job.nodes
        self.counts.asked += nodes
        if self.queue is None:
            save.waiting, save.writing, save.first_s = 0, nodes, self.now
            self._note_writing(nodes)
            needs = save.job.node_bytes
            needs += self.storage.overhead_s * self.storage.writer_bandwidth
            self.crowd.enter(save, needs, nodes)
        else:
            self.waiting += nodes
            self.counts.most_waiting = max(self.counts.most_waiting, self.waiting)
            self._count_connected()
            self.queue.push(save)

    def _count_connected(self) -> None:
        while self._left and self._left[0][0] <= self.now - CONNECTED_S:
            self._left_nodes -= self._left.popleft()[1]
        connected = self.waiting + self.writing + self._left_nodes
        self.counts.most_connected = max(self.counts.most_connected, connected)

    def _grant(self) -> None:
        """Grant free slots. Nodes of one save that begin together also end together."""
        if self.queue is None:
            return
        begun: dict[int, tuple[Save, int]] = {}
        while (free := self.capacity - self.writing) > 0 and (found := self.queue.pop(free)):
            save, nodes = found
            self._note_writing(nodes)
            self.waiting -= nodes
            save.writing += nodes
            save.first_s = min(save.first_s, self.now)
            begun[id(save)] = (save, begun.get(id(save), (save, 0))[1] + nodes)
        # A writer with a slot has its targets for itself, so other writers do not slow it down.
        for save, nodes in begun.values():
            rate = self.storage.rate(self.capacity)
            rate = min(rate, self.storage.writer_bandwidth * self.storage.alone)
            took = save.job.node_bytes / rate + self.storage.overhead_s
            self.grants.append((self.now, save.job.number, nodes))
            self._later(self.now + took, "written", save.job.number, -1, save, nodes)

    def _note_writing(self, nodes: int) -> None:
        self.writing += nodes
        self.counts.granted += nodes
        self.counts.most_writing = max(self.counts.most_writing, self.writing)

    def _give_back(self, save: Save, nodes: int) -> None:
        self.writing -= nodes
        save.writing -= nodes
        self.counts.finished += nodes
        self._left.append((self.now, nodes))
        self._left_nodes += nodes
        self.counts.bytes += nodes * save.job.node_bytes
        if self.queue:
            self.queue.done(save, nodes)
        if not save.cancelled and save.waiting == save.writing == 0:
            self._saved(self.states[save.job.number])

    def _cancel(self, save: Save) -> None:
        """Cancel a save whose processes are dead.

        Nodes that hold a slot keep it as long as the write would have taken, which stands for the
        lease.
        """
        save.cancelled = True
        self.counts.cancelled += save.waiting
        if self.queue is None:
            self.counts.cancelled += save.writing
            self.writing -= save.writing
            save.writing = 0
            self.crowd.leave(save, save.job.nodes)
        else:
            self.waiting -= save.waiting
            self.queue.cancel(save)
