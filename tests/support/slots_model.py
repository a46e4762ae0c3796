# SPDX-License-Identifier: Apache-2.0
"""Who may write (docs/slots.md), as plainly as it can be written.

The reference for slots.lua: lists that are sorted anew, sums that are taken anew,
nothing kept twice. Each operation answers as the script does. Costs are slot-milliseconds, times
milliseconds.
"""

import math
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field

WAITING, HOLDING = 1, 2

MOST_REAPED = 16
MOST_GRANTED = 32
MOST_JOBS = 1000
KEPT_JOBS = 500
TIDIED = 60_000
LISTED_JOBS = 64
KEPT_ACTS = 8
LISTED = 256
NEAR = 100
OPERATORS_LEASE = 15000
SMALL_BYTES = 16 << 20
LEARNING = 1 / 8
BELIEVED = 300_000

Answer = list[int | str]


@dataclass
class Identity:
    """Who asks."""

    client: str = "c"
    node: str = "n"
    job: str = "j"
    rank: int = 0
    share: int = 1
    user: str = "u"


@dataclass
class Member:
    """One that holds a slot, or waits for one."""

    id: str
    who: Identity
    weight: int
    bytes: int
    lease: int
    since: int
    deadline: int
    state: int = WAITING
    cost: float = 0
    start: float = 0
    seq: int = 0
    small_start: float | None = None  # waits, and may be let past the queue
    urgent: bool = False  # has a deadline
    given: int = 0
    fence: int = 0
    passed: int = 0

    def describe(self) -> str:
        return f"job {self.who.job}, rank {self.who.rank} on {self.who.node}"


@dataclass
class Job:
    """What a pool remembers of a job."""

    share: int = 0  # while it has members
    finish: float = 0
    latest: float = 0
    small_finish: float = 0
    usual: float = 1000
    ms: float = 0
    bytes: float = 0
    user: str = ""
    writes: int = 0
    written: int = 0
    seen: int = 0


@dataclass
class Settings:
    """What the operator set."""

    capacity: int = 0
    pool_rate: int = 0
    job_rate: int = 0
    small: int = 0
    express: int = 0

    def any(self) -> bool:
        return any(vars(self).values())


@dataclass
class Grant:
    """What was so when a slot was given, before it was."""

    member: Member
    time: int
    fence: int
    given: int
    used: int
    capacity: int
    express_used: int
    express: int


@dataclass
class Numbers:
    """What is lost with the pool's main key."""

    run: str = ""
    epoch: int = 0
    opened: int = 0
    grace: int = 0
    hw: int = 0
    ahead: int = 0  # of the server's clock
    lease: int = 0  # of the latest request
    fence: int = 0
    vt: float = 0
    served: float = 0
    small_vt: float = 0
    seq: int = 0
    cap: int = 0
    by: int = 0
    ms: float = 16
    bytes: float = 16e6
    free: float = 0
    grants: int = 0
    granted: list[int] = field(default_factory=list)  # when, in this clock minute and the last
    tidied: int = 0
    acts: list[Answer] = field(default_factory=list)
    settings: Settings = field(default_factory=Settings)


@dataclass
class Snapshot:
    """All that a server knows of a pool."""

    numbers: Numbers
    members: dict[str, Member]
    jobs: dict[str, Job]
    job_free: dict[str, float]


class Pool:
    """One pool. `clock` and `server` (its run and its uptime in seconds) are the outer world."""

    def __init__(self, clock: Callable[[], int], server: Callable[[], tuple[str, int]]) -> None:
        self.clock = clock
        self.server = server
        self.numbers = Numbers()
        self.members: dict[str, Member] = {}
        self.jobs: dict[str, Job] = {}
        self.job_free: dict[str, float] = {}
        self.evicted = False  # a key that is needed to understand the others
        self.details_evicted = False  # the one that says who they are
        self.granted: list[Grant] = []  # all, for tests
        self.woken: list[str] = []
        self.now = 0

    # -- What follows from the members

    def holders(self) -> list[Member]:
        """By the end of their lease."""
        held = [member for member in self.members.values() if member.state == HOLDING]
        return sorted(held, key=lambda member: (member.deadline, member.id))

    def queue(self) -> list[Member]:
        """The next one first."""
        waiting = [member for member in self.members.values() if member.state == WAITING]
        return sorted(waiting, key=lambda one: (-1 if one.urgent else one.start, one.seq))

    def small_queue(self) -> list[Member]:
        waiting = [member for member in self.queue() if member.small_start is not None]
        return sorted(waiting, key=lambda member: (member.small_start, member.seq))

    def used(self) -> int:
        return sum(member.given for member in self.members.values())

    def express_used(self) -> int:
        return sum(not member.given for member in self.holders())

    def shares(self) -> int:
        """Of the jobs that have members."""
        present = {member.who.job for member in self.members.values()}
        return sum(self.jobs[name].share for name in present)

    def capacity(self) -> int:
        return max(self.numbers.settings.capacity or self.numbers.cap, 1)

    def small_bytes(self) -> int:
        return self.numbers.settings.small or SMALL_BYTES

    def express(self) -> int:
        return self.numbers.settings.express or 1

    def has_members(self, job: str) -> bool:
        return any(member.who.job == job for member in self.members.values())

    # -- Lost data

    def lose_all(self) -> None:
        """FLUSHALL."""
        self.lose_numbers()
        self.lose_members()
        self.evicted = self.details_evicted = False

    def evict(self, key: str) -> None:
        """One key is gone, by the last letter of its name."""
        if key == "m":
            self.lose_numbers()
        elif key == "p":
            self.job_free.clear()
        elif self.members and key in self.keys():
            self.evicted = True
            self.details_evicted = self.details_evicted or key == "d"
        elif key == "j":
            self.jobs.clear()

    def keys(self) -> set[str]:
        """Those that should exist, by the last letters of their names."""
        present: dict[str, object] = {
            "m": self.numbers.run,
            "p": self.job_free,
            "j": self.jobs,
            "d": self.members,
        }
        present |= {"h": self.holders(), "q": self.queue(), "l": self.queue()}
        present |= {"s": self.small_queue()}
        return {key for key, content in present.items() if content}

    def snapshot(self) -> "Snapshot":
        return deepcopy(Snapshot(self.numbers, self.members, self.jobs, self.job_free))

    def restore(self, earlier: "Snapshot") -> None:
        """A server takes over that knows what was so then."""
        copy = deepcopy(earlier)
        self.numbers, self.members = copy.numbers, copy.members
        self.jobs, self.job_free = copy.jobs, copy.job_free
        self.evicted = self.details_evicted = False

    def lose_numbers(self) -> None:
        """The main key is gone."""
        self.numbers = Numbers()

    def lose_members(self) -> None:
        self.members.clear()
        self.jobs.clear()
        self.job_free.clear()

    def look_at_data(self, known_epoch: int, lease: int) -> None:
        numbers = self.numbers
        lost = not numbers.run
        lease = numbers.lease or lease
        run, uptime_s = self.server()
        if not lost and not self.evicted:
            if run == numbers.run:
                return
            somebody = bool(self.holders()) or self.now - numbers.hw < lease
        else:
            left = bool(self.members) and not self.details_evicted
            somebody = known_epoch > 0 or left or (not lost and bool(self.holders()))
            self.lose_members()
            self.evicted = self.details_evicted = False
            numbers.fence = max(numbers.fence, (self.clock() + 1) * 1024)
            numbers.free = 0
        numbers.epoch = max(numbers.epoch, known_epoch, self.clock() - 1) + 1
        numbers.opened = self.now
        began = self.now if somebody else self.now - uptime_s * 1000
        numbers.grace = began + math.ceil(lease / 2)
        numbers.run = run

    # -- Coming and going

    def job_of(self, name: str) -> Job:
        return self.jobs.setdefault(name, Job())

    def expected_cost(self, job: Job, size: int, weight: int) -> float:
        time = job.usual
        if size > 0:
            known = job if job.bytes > 0 else self.numbers
            time = min(1 + size * known.ms / known.bytes, max(BELIEVED, 8 * job.usual))
        return time * weight

    def settle(self, member: Member, passed: int | None) -> None:
        """What a slot was really used for, instead of what was expected."""
        numbers, job = self.numbers, self.jobs[member.who.job]
        time = self.now - member.since
        more = time * member.weight - member.cost
        job.finish = max(job.finish + more / member.who.share, 0)
        if member.given > 0:
            numbers.vt = max(numbers.vt + more / self.shares(), numbers.served)
        if passed is not None:
            job.usual += (max(time, 1) - job.usual) * LEARNING
        if passed:
            for known in (job, numbers):
                known.ms = known.ms * (1 - LEARNING) + time
                known.bytes = known.bytes * (1 - LEARNING) + passed

    def forget(self, member: Member, passed: int | None = None) -> None:
        """`passed` if it is the holder that says so."""
        job = self.jobs[member.who.job]
        if member.state == WAITING:
            job.finish = max(job.finish - member.cost / member.who.share, 0)
        elif member.cost > 0:
            self.settle(member, passed)
        if member.state == HOLDING:
            job.writes += 1
            job.written += member.passed if passed is None else passed
        job.seen = self.now
        del self.members[member.id]
        if not self.has_members(member.who.job):
            self.forget_old_jobs()

    def forget_old_jobs(self) -> None:
        if self.now - self.numbers.tidied <= TIDIED or len(self.jobs) <= MOST_JOBS:
            return
        self.numbers.tidied = self.now
        absent = [name for name in self.jobs if not self.has_members(name)]
        absent.sort(key=lambda name: (self.jobs[name].seen, name))
        for name in absent[: max(len(absent) - KEPT_JOBS, 0)]:
            del self.jobs[name]

    def admit(self, member: Member, given: int, lease: int) -> None:
        numbers = self.numbers
        numbers.fence = max(numbers.fence + 1, self.clock() * 1024)
        numbers.grants += 1
        numbers.granted.append(self.now)
        self.granted.append(
            Grant(
                member,
                self.now,
                numbers.fence,
                given,
                self.used(),
                self.capacity(),
                self.express_used(),
                self.express(),
            )
        )
        if given > 0:
            if not member.urgent:
                numbers.served = max(numbers.served, member.start)
            numbers.vt = max(numbers.vt + member.cost / self.shares(), numbers.served)
        elif member.small_start is not None:
            passed = numbers.small_vt + member.cost / self.shares()
            numbers.small_vt = max(passed, member.small_start)
        member.state, member.fence, member.since = HOLDING, numbers.fence, self.now
        member.given, member.deadline = given, self.now + lease

    def fits(self, member: Member) -> bool:
        used, capacity = self.used(), self.capacity()
        beside = member.urgent and used <= capacity
        return used == 0 or used + member.weight <= capacity or beside

    def next_to_grant(self) -> tuple[Member, int] | None:
        queue, small = self.queue(), self.small_queue()
        if queue and self.fits(queue[0]):
            return queue[0], queue[0].weight
        if small and self.express_used() < self.express():
            return small[0], 0
        return None

    def grant_those_that_fit(self) -> None:
        if self.now < self.numbers.grace:
            return
        for _ in range(MOST_GRANTED):
            found = self.next_to_grant()
            if not found:
                return
            member, given = found
            self.admit(member, given, math.ceil(member.lease / 2))
            self.woken.append(member.id)

    def reap(self, state: int) -> None:
        dead = [
            member
            for member in self.members.values()
            if member.state == state and member.deadline <= self.now
        ]
        dead.sort(key=lambda member: (member.deadline, member.id))
        for member in dead[:MOST_REAPED]:
            self.forget(member)

    def tick(self, known_epoch: int, lease: int) -> None:
        clock = self.clock() + self.numbers.ahead
        self.now = max(clock, self.numbers.hw)
        self.look_at_data(known_epoch, lease)
        self.numbers.ahead += self.now - clock
        self.numbers.hw = self.now
        if self.now >= self.numbers.grace:
            self.reap(HOLDING)
            self.reap(WAITING)
        self.grant_those_that_fit()

    # -- Answers

    def answer(self, member: Member | None) -> Answer:
        epoch, capacity = str(self.numbers.epoch), self.capacity()
        if member is None:
            return [0, "0", epoch, 0, 0, capacity, 0, ""]
        beat = math.ceil(member.lease / 3)
        if member.state == HOLDING:
            fence = str(member.fence)
            return [HOLDING, fence, epoch, member.given, 0, capacity, beat, ""]
        queue, held = self.queue(), self.holders()
        position = [waiter.id for waiter in queue].index(member.id)
        before = held[0] if held else None
        if 0 < position <= NEAR:
            before = queue[position - 1]
        if position == 0:
            change = max(before.deadline if before else 0, self.numbers.grace) - self.now
            beat = max(1, min(beat, change))
        ahead = before.describe() if before else ""
        return [WAITING, "0", epoch, 0, position, capacity, beat, ahead]

    # -- Operations

    def acquire(
        self,
        id: str,  # noqa: A002
        who: Identity,
        weight: int = 1,
        size: int = 0,
        lease: int = 15000,
        asked: int = 0,
        usual: int = 1,
        known_epoch: int = 0,
        never_wait: bool = False,
        urgent: bool = False,
    ) -> Answer:
        self.tick(known_epoch, lease)
        numbers = self.numbers
        numbers.lease = lease
        if id in self.members:
            self.members[id].deadline = self.now + lease
            return self.answer(self.members[id])
        if not self.members or numbers.cap == 0:
            numbers.cap, numbers.by = asked or usual, int(asked > 0)
        if not self.members:
            numbers.vt = numbers.served = numbers.small_vt = 0
            for other in self.jobs.values():
                other.finish = other.latest = other.small_finish = 0
        job = self.job_of(who.job)
        job.user = who.user
        if not self.has_members(who.job):
            job.share = who.share
        cost = self.expected_cost(job, size, weight)
        start = max(numbers.vt, job.finish, job.latest)
        job.finish, job.latest = start + cost / who.share, start
        member = Member(id, who, weight, size, lease, self.now, self.now + lease)
        member.cost, member.start, member.urgent = cost, start, urgent
        at_once = self.now >= numbers.grace and not self.queue() and self.fits(member)
        self.members[id] = member
        if at_once:
            self.admit(member, weight, lease)
            return self.answer(member)
        numbers.seq += 1
        member.seq = numbers.seq
        if 0 < size <= self.small_bytes() and weight == 1:
            member.small_start = max(numbers.small_vt, job.small_finish)
            job.small_finish = member.small_start + cost / who.share
        self.grant_those_that_fit()
        if member.state == WAITING and never_wait:
            self.forget(member)
            return self.answer(None)
        member.deadline = self.now + lease
        return self.answer(member)

    def beat(
        self,
        id: str,  # noqa: A002
        who: Identity,
        passed: int = 0,
        lease: int = 15000,
        known_epoch: int = 0,
        holding: bool = False,
        fence: int = 0,
        given: int = 0,
        size: int = 0,
    ) -> Answer:
        self.tick(known_epoch, lease)
        numbers, member = self.numbers, self.members.get(id)
        lost = known_epoch != numbers.epoch and self.now < numbers.opened + lease
        if holding and lost and (member is None or member.state == WAITING):
            if member:
                self.forget(member)
            job = self.job_of(who.job)
            if not self.has_members(who.job):
                job.share = who.share
            numbers.fence = max(numbers.fence, fence)
            member = Member(id, who, max(given, 1), size, lease, self.now, self.now + lease)
            member.state, member.given = HOLDING, given
            member.fence, member.passed = fence, passed
            self.members[id] = member
        elif member:
            member.deadline = self.now + lease
            if member.state == HOLDING:
                member.passed = passed
        return self.answer(member)

    def release(
        self,
        id: str,  # noqa: A002
        passed: int = 0,
        lease: int = 15000,
        known_epoch: int = 0,
    ) -> int:
        self.tick(known_epoch, lease)
        if id not in self.members:
            return 0
        self.forget(self.members[id], passed)
        self.grant_those_that_fit()
        return 1

    def note_act(self, who: str, what: str) -> None:
        self.numbers.acts.append([str(self.clock()), who, what])
        del self.numbers.acts[:-KEPT_ACTS]

    def kick(self, who: str, what: str, id: str) -> int:  # noqa: A002
        self.tick(0, OPERATORS_LEASE)
        if id not in self.members:
            return 0
        self.forget(self.members[id])
        self.note_act(who, what)
        self.grant_those_that_fit()
        return 1

    def set(self, who: str, clear: bool, settings: Settings) -> int:
        self.tick(0, OPERATORS_LEASE)
        before, what = vars(self.numbers.settings), "clear" if clear else "set"
        labels = {"pool_rate": "rate", "job_rate": "job-rate"}
        for name, value in vars(settings).items():
            if value or (clear and before[name]):
                was = f" (was {before[name]})" if before[name] else ""
                what += f" {labels.get(name, name)}={value}{was}"
                before[name] = value
        self.note_act(who, what)
        if clear or settings.pool_rate or settings.job_rate:
            self.numbers.free = 0
            self.job_free.clear()
        self.grant_those_that_fit()
        return 1

    def pace(
        self, job: str, size: int, job_rate: int, lease: int = 15000, known_epoch: int = 0
    ) -> Answer:
        self.tick(known_epoch, lease)
        numbers, settings = self.numbers, self.numbers.settings
        limits = [rate for rate in (job_rate, settings.job_rate) if rate > 0]
        job_rate = min(limits) if limits else 0
        if not job_rate and not settings.pool_rate:
            return [0, 0, 10000]
        rate = min(limit for limit in (job_rate, settings.pool_rate) if limit > 0)
        of_pool = numbers.free if settings.pool_rate else 0
        of_job = self.job_free.get(job, 0) if job_rate else 0
        start: float = self.now
        if size > 0:
            turns = min(max(len(self.holders()), 1), 8)
            size = max(size, math.floor(rate * 250 / 1000 / turns))
            start = of_pool = of_job = max(self.now, of_pool, of_job)
        if settings.pool_rate:
            numbers.free = of_pool + size * 1000 / settings.pool_rate
        if job_rate:
            if job not in self.job_free and len(self.job_free) >= MOST_JOBS:
                self.job_free.clear()
            self.job_free[job] = of_job + size * 1000 / job_rate
        if size <= 0:
            return [0, 0, 0]
        end = start - self.now + size * 1000 / rate
        return [str(size), math.floor(start - self.now), math.ceil(end)]

    def row(self, member: Member) -> Answer:
        who = member.who
        express = int(member.state == HOLDING and member.given == 0)
        sizes = [str(member.bytes), str(member.passed), str(member.fence)]
        times = [str(self.now - member.since), str(member.deadline - self.now)]
        named = [member.id, who.job, who.node, str(who.rank)]
        return [*named, member.weight, express, *sizes, *times, int(member.urgent)]

    def grants_last_minute(self) -> int:
        minute, left = self.now // 60_000, 1 - self.now % 60_000 / 60_000
        present = sum(at // 60_000 == minute for at in self.numbers.granted)
        before = sum(at // 60_000 == minute - 1 for at in self.numbers.granted)
        return math.floor(present + before * left + 0.5)

    def job_rows(self) -> list[Answer]:
        written = {name: job.written for name, job in self.jobs.items()}
        for member in self.holders():
            written[member.who.job] += member.passed
        order = sorted(self.jobs, key=lambda name: (-written[name], name))
        return [
            [name, self.jobs[name].user, str(written[name]), str(self.jobs[name].writes)]
            for name in order[:LISTED_JOBS]
        ]

    def status(self, usual: int) -> list[Answer | list[Answer]]:
        held: list[Member] = []
        queue: list[Member] = []
        granted, jobs, acts = 0, list[Answer](), list[Answer]()
        if self.numbers.run:
            self.tick(0, OPERATORS_LEASE)
            granted, jobs, acts = self.grants_last_minute(), self.job_rows(), self.numbers.acts[:]
            held = sorted(self.holders(), key=lambda member: member.fence)
            queue = self.queue()
        numbers, settings = self.numbers, self.numbers.settings
        used = sum(member.given for member in held)
        capacity = self.capacity() if settings.capacity or numbers.cap else usual
        first: Answer = [capacity, 2 if settings.capacity else numbers.by, used]
        rates = [str(settings.pool_rate), str(settings.job_rate), str(self.small_bytes())]
        rest: Answer = [self.express(), str(numbers.grants), granted, len(queue), len(held)]
        return [
            [*first, *rates, *rest],
            [self.row(member) for member in held[:LISTED]],
            [self.row(member) for member in queue[:LISTED]],
            jobs,
            acts,
        ]
