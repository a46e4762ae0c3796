# SPDX-License-Identifier: Apache-2.0
"""The effects of the rules on jobs that share a pool, simulated with the reference model.

Events happen one after the other. The storage has a rate in bytes per millisecond for each slot.
The rate falls when there are more writers than slots. Each write also takes a fixed time.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import count
from random import Random

import pytest
from slots_model import BOOST, Identity, Pool

from tests.simulate.events import Events
from tests.simulate.fairness import jain

MIB, GIB = 1 << 20, 1 << 30
SPEED = 1e6  # bytes per millisecond and slot: 1 GB/s
OVERHEAD_MS = 20
NO_LEASE_ENDS = 10**10


@dataclass
class Save:
    """A request from the call to the release. Times are in milliseconds."""

    id: str
    who: Identity
    size: int
    weight: int
    asked: float
    granted: float = -1
    given: int = 0
    done: float = -1

    @property
    def waited(self) -> float:
        return self.granted - self.asked

    def alone(self) -> float:
        """Return how long the save would take on an idle pool."""
        return OVERHEAD_MS + self.size / SPEED / self.weight


class Simulation(Events):
    """A pool and its clients, in milliseconds. `saves` collects the requests."""

    def __init__(self, capacity: int) -> None:
        # If a grant exceeds the capacity, all writers become slower.
        super().__init__(lambda slots: min(1.0, capacity / slots))
        self.capacity = capacity
        self.pool = Pool(lambda: 1_700_000_000_000 + int(self.now), lambda: ("1" * 40, 10**9))
        self.saves: dict[str, Save] = {}
        self._again: dict[str, Callable[[], None]] = {}
        self._seen = 0

    def save(self, who: Identity, size: int, weight: int = 1, boost: int = 0) -> Save:
        """Request a slot for a save now."""
        save = Save(f"id{next(self._numbers)}", who, size, weight, self.now)
        self.saves[save.id] = save
        capacity = self.capacity
        self.pool.acquire(save.id, who, weight, size, NO_LEASE_ENDS, asked=capacity, boost=boost)
        self._start_granted()
        return save

    def keep_saving(self, who: Identity, size: int, weight: int = 1, boost: int = 0) -> None:
        """Save for ever: begin the next save when one is done."""
        save = self.save(who, size, weight, boost)
        self._again[save.id] = partial(self.keep_saving, who, size, weight, boost)

    def die(self, save: Save) -> None:
        """Kill a client without a release. An operator kicks its request."""
        save.done = self.now
        if save.granted >= 0:
            self.crowd.leave(save, max(save.given, 1))
        self.pool.kick(save.id)
        self._start_granted()

    def run_all(self) -> float:
        """Run until all saves are done, and return the time."""
        while not self.is_over:
            self.run(self.now + 1000)
        return max(save.done for save in self.saves.values())

    def slot_time(self, start: float, end: float) -> dict[str, float]:
        """Return the slot-milliseconds of each job between these times."""
        found: dict[str, float] = {}
        for save in self.saves.values():
            if save.granted < 0:
                continue
            until = min(save.done if save.done >= 0 else self.now, end)
            time = max(until - max(save.granted, start), 0) * max(save.given, 1)
            found[save.who.job] = found.get(save.who.job, 0) + time
        return found

    def _start_granted(self) -> None:
        for grant in self.pool.granted[self._seen :]:
            save = self.saves[grant.member.id]
            save.granted, save.given = self.now, grant.given
            self.crowd.enter(save, save.alone(), max(save.given, 1))
        self._seen = len(self.pool.granted)

    def written(self, writer: object) -> None:
        assert isinstance(writer, Save)
        writer.done = self.now
        self.crowd.leave(writer, max(writer.given, 1))
        self.pool.release(writer.id, writer.size, NO_LEASE_ENDS)
        self._start_granted()
        again = self._again.pop(writer.id, None)
        if again:
            again()


def ranks(job: str, number: int, share: int = 1) -> list[Identity]:
    return [Identity(f"{job}{rank}", f"node{rank}", job, rank, share) for rank in range(number)]


# Number of ranks, and bytes of each of their saves.
VERY_DIFFERENT = {
    "one": (1, 64 * GIB),
    "few": (4, 4 * GIB),
    "some": (16, GIB),
    "many": (64, 32 * MIB),
}


def fairness(capacity: int, jobs: dict[str, tuple[int, int]], hours: float = 0.25) -> float:
    """Return Jain's index for the slot-time of jobs with equal shares that always want slots."""
    simulation = Simulation(capacity)
    for job, (number, size) in jobs.items():
        for who in ranks(job, number):
            simulation.keep_saving(who, size)
    end = hours * 3_600_000
    simulation.run(end)
    times = simulation.slot_time(end / 10, end)
    return jain([times.get(job, 0) for job in jobs])


@pytest.mark.long
@pytest.mark.parametrize("capacity", [1, 2, 4])
def test_jobs_of_very_different_sizes_have_equal_parts(capacity: int) -> None:
    assert fairness(capacity, VERY_DIFFERENT) >= 0.95


@pytest.mark.parametrize("capacity", [1, 2, pytest.param(4, marks=pytest.mark.long)])
@pytest.mark.slow
def test_jobs_of_very_different_sizes_the_other_way_round(capacity: int) -> None:
    jobs = {"one": (1, 32 * MIB), "few": (4, GIB), "some": (16, 4 * GIB), "many": (64, 64 * GIB)}
    # A single rank cannot use more than one slot, and has one turn in a round.
    del jobs["one"]
    assert fairness(capacity, jobs, 2 / capacity) >= 0.95


@pytest.mark.parametrize("capacity", [1, 3, 8])
@pytest.mark.slow
def test_shares_are_respected(capacity: int) -> None:
    simulation = Simulation(capacity)
    shares = {"a": 1, "b": 2, "c": 4}
    for job, share in shares.items():
        for who in ranks(job, 16, share):
            simulation.keep_saving(who, {"a": GIB, "b": 256 * MIB, "c": 4 * GIB}[job])
    end = 1_800_000 / capacity
    simulation.run(end)
    times = simulation.slot_time(end / 10, end)
    part = sum(times.values()) / sum(shares.values())
    for job, share in shares.items():
        assert times[job] / share == pytest.approx(part, rel=0.1), times


@pytest.mark.slow
def test_one_that_dies_with_terabytes_announced_leaves_shares_as_they_were() -> None:
    simulation = Simulation(2)
    shares = {"a": 1, "b": 2, "c": 4}
    for job, share in shares.items():
        for who in ranks(job, 8, share):
            simulation.keep_saving(who, GIB)
    dead: list[Save] = []
    dies = Identity("a9", "node", "a", 9, 1)
    simulation.at(60_000, lambda: dead.append(simulation.save(dies, 100 * 1024 * GIB)))
    simulation.at(240_000, lambda: simulation.die(dead[0]))
    simulation.run(3_000_000)
    # An announced cost counts for five minutes at most. Job a pays for it with its share, a seventh
    # of two slots, for 17.5 minutes.
    times = simulation.slot_time(1_500_000, 3_000_000)
    part = sum(times.values()) / sum(shares.values())
    assert dead[0].granted > 0
    for job, share in shares.items():
        assert times[job] / share == pytest.approx(part, rel=0.1), times


def test_a_small_first_write_says_little_about_a_large_one() -> None:
    simulation, size = Simulation(1), 8 * GIB
    small, one, two = ranks("small", 3)
    simulation.save(small, 4096)  # it takes 20 ms, so at its speed a GiB would take an hour
    simulation.run_all()
    for who in ranks("large", 4):
        simulation.keep_saving(who, size)
    later: list[Save] = []

    def ask(who: Identity) -> None:
        later.append(simulation.save(who, GIB))

    simulation.at(simulation.now + 1000, partial(ask, one))  # during one write of the other job
    simulation.at(simulation.now + 3000, partial(ask, two))
    simulation.run(600_000)
    usual = Save("", one, size, 1, 0).alone()
    assert max(save.waited for save in later) <= 2 * usual


@pytest.mark.slow
def test_within_a_job_who_comes_first_goes_first() -> None:
    random, simulation = Random(1), Simulation(3)
    jobs = [ranks(job, 20, share) for job, share in (("a", 1), ("b", 3))]
    for _ in range(600):
        who = random.choice(random.choice(jobs))
        size, weight = random.choice([20 * MIB, GIB, 8 * GIB]), random.choice([1, 1, 2, 3])
        simulation.at(random.uniform(0, 400_000), partial(simulation.save, who, size, weight))
    simulation.run_all()
    for job in ("a", "b"):
        saves = [save for save in simulation.saves.values() if save.who.job == job]
        saves.sort(key=lambda save: save.asked)
        order = [save.granted for save in saves]
        assert order == sorted(order)


@pytest.mark.parametrize("same_job", [True, False])
def test_a_heavy_request_is_not_starved_by_light_ones(same_job: bool) -> None:
    simulation, capacity = Simulation(8), 8
    for who in ranks("light", 32):
        simulation.keep_saving(who, GIB)
    heavy: list[Save] = []
    who = Identity("heavy", "node", "light" if same_job else "heavy", 99)
    simulation.at(60_000, lambda: heavy.append(simulation.save(who, 8 * GIB, capacity)))
    simulation.run(300_000)
    light = Save("", who, GIB, 1, 0).alone()
    # The request waits for those that hold slots, and within its job for all earlier requests.
    assert 0 < heavy[0].waited <= light * (2 + (32 / capacity + 1 if same_job else 0))


def stream_of_new_jobs(simulation: Simulation, size: int, every: float, until: float) -> None:
    time = 0.0
    for number in count():
        time += every
        if time > until:
            return
        who = Identity(f"n{number}", "node", f"new{number}")
        simulation.at(time, partial(simulation.save, who, size))


def test_an_old_job_is_not_starved_by_a_stream_of_new_ones() -> None:
    capacity, until = 2, 1_200_000
    simulation = Simulation(capacity)
    # The new jobs leave a tenth of the storage, and the old job wants all of it.
    each = GIB / SPEED + OVERHEAD_MS
    stream_of_new_jobs(simulation, GIB, each / capacity / 0.9, until)
    for who in ranks("old", 4):
        simulation.at(30_000, partial(simulation.keep_saving, who, 8 * GIB))
    simulation.run(until)
    old = [save for save in simulation.saves.values() if save.who.job == "old"]
    waits = [(save.granted if save.granted >= 0 else until) - save.asked for save in old]
    # The old job's four ranks share that tenth of the capacity. 1.5 is a margin.
    assert max(waits) < 4 * old[0].alone() / (0.1 * capacity) * 1.5, waits
    assert simulation.slot_time(60_000, until)["old"] > 0.1 * capacity * (until - 60_000) * 0.9


def tiny_among_terabytes(every: float, until: float, sizes: list[int]) -> tuple[float, list[Save]]:
    """Return when two jobs with terabytes are done, and the tiny saves beside them."""
    simulation = Simulation(4)
    for job in ("x", "y"):
        for who in ranks(job, 16):
            simulation.save(who, 100 * GIB)
    random = Random(2)
    time = 1000.0
    while every and time < until:
        who = Identity("t", "node", f"tiny{random.randrange(3)}", 0)
        size = random.choice(sizes)
        simulation.at(time, partial(simulation.save, who, size))
        time += random.expovariate(1 / every)
    simulation.run_all()
    saves = simulation.saves.values()
    tiny = [save for save in saves if save.size < GIB]
    return max(save.done for save in saves if save.size > GIB), tiny


def test_tiny_saves_do_not_wait_for_terabytes() -> None:
    before, _ = tiny_among_terabytes(0, 0, [])
    after, tiny = tiny_among_terabytes(1000, before, [4096, MIB, 16 * MIB])
    waits = sorted(save.waited / save.alone() for save in tiny)
    assert len(tiny) > 500
    assert waits[int(len(waits) * 0.99)] <= 2
    assert waits[-1] <= 5
    assert after <= before * 1.03


@pytest.mark.long
def test_a_flood_of_tiny_saves_starves_nobody() -> None:
    capacity, end = 4, 300_000.0
    simulation = Simulation(capacity)
    for job in ("x", "y"):
        for who in ranks(job, 8):
            simulation.keep_saving(who, 4 * GIB)
    for who in ranks("flood", 64):
        simulation.keep_saving(who, 16 * MIB)
    others: list[Save] = []
    polite = Identity("polite", "node", "polite")
    for second in range(1, 300):
        simulation.at(1000.0 * second, lambda: others.append(simulation.save(polite, MIB)))
    simulation.run(end)
    times = simulation.slot_time(end / 10, end)
    part = capacity * end * 0.9 / 3
    assert times["x"] > part * 0.9, times
    assert times["y"] > part * 0.9, times
    assert max(save.waited for save in others if save.granted >= 0) <= 5 * others[0].alone()
    assert others[-1].granted >= 0


# ---- Boosts by the costs of waiting --------------------------------------------------------------

#: boosts beyond all bounds
LOUD, QUIET = 10**9, -(10**9)


@pytest.mark.slow
@pytest.mark.parametrize("loud_jobs", [1, 3])
def test_a_boost_is_worth_ten_minutes_of_each_other_job_at_most(loud_jobs: int) -> None:
    simulation = Simulation(2)
    for number in range(loud_jobs):
        for who in ranks(f"loud{number}", 8):
            simulation.keep_saving(who, GIB, boost=LOUD)
    quiet: list[Save] = []
    who = Identity("q", "node", "quiet")
    for minute in (1, 30 * loud_jobs):
        later = partial(simulation.save, who, 64 * GIB, boost=QUIET)
        simulation.at(minute * 60_000.0, lambda later=later: quiet.append(later()))  # type: ignore[misc]
    simulation.run(60 * loud_jobs * 60_000)
    for save in quiet:
        assert save.granted > 0
        assert save.waited <= 2 * BOOST * loud_jobs + 8 * quiet[0].alone()
    # A shorter wait would mean that the boost has no effect.
    assert max(save.waited for save in quiet) >= BOOST


@pytest.mark.long
def test_in_the_long_run_jobs_have_their_shares_whatever_they_say() -> None:
    simulation = Simulation(3)
    jobs = {"loud": (1, LOUD), "plain": (2, 0), "quiet": (4, QUIET)}
    for job, (share, boost) in jobs.items():
        for who in ranks(job, 16, share):
            simulation.keep_saving(who, GIB, boost=boost)
    end = 10 * 3_600_000
    simulation.run(end)
    times = simulation.slot_time(end / 2, end)
    part = sum(times.values()) / 7
    for job, (share, _) in jobs.items():
        assert times[job] / share == pytest.approx(part, rel=0.1), times


def test_a_job_that_stands_still_is_saved_before_those_in_the_background() -> None:
    """Check three jobs that save at one moment, as tests/bench.sh measures them."""
    simulation = Simulation(8)
    still: list[Save] = []
    for who in ranks("background", 8):
        simulation.save(who, 32 * MIB, boost=-60_000)
    for who in ranks("large", 4):
        simulation.save(who, 64 * MIB, boost=-BOOST)
    for who in ranks("still", 8):
        still.append(simulation.save(who, 17 * MIB, boost=BOOST))
    simulation.run_all()
    others = [save for save in simulation.saves.values() if save not in still and save.waited]
    assert max(save.granted for save in still) <= min(save.granted for save in others)
