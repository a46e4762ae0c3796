# SPDX-License-Identifier: Apache-2.0
"""A simple model of the slot rules (docs/slots.md).

It is the reference for slots.lua: it sorts lists and computes sums again each time, and stores
nothing twice. Each operation answers like the script. Costs are in slot-milliseconds, times in
milliseconds.
"""

import math
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field, replace

WAITING, HOLDING = 1, 2

MOST_REAPED = 16
MOST_GRANTED = 32
MOST_JOBS = 1000
TIDIED = 60_000
MOST_SET = 128
LISTED = 256
NEAR = 10
SMALL_BYTES = 16 << 20
LEARNING = 1 / 8
BELIEVED = 300_000
MOST_TARGETS = 64
#: milliseconds within which requests of a job belong to one checkpoint
TOGETHER = 1000
#: length of a job's turn, in milliseconds of the whole pool
TURN = 20_000
#: furthest that a boost moves a request in either direction, in milliseconds of the whole pool
BOOST = 300_000
URGENT = -math.inf

Answer = dict[str, int | str]


@dataclass
class Identity:
    """The client that makes a request."""

    client: str = "c"
    node: str = "n"
    job: str = "j"
    rank: int = 0
    share: int = 1
    user: str = "u"


@dataclass
class Member:
    """A request that holds a slot or waits for one."""

    id: str
    who: Identity
    weight: int
    bytes: int
    lease: int
    since: int
    deadline: int
    state: int = WAITING
    cost: float = 0
    floor: float = 0  # least virtual time of the pool after its grant
    score: float = 0  # the queue is sorted by this ...
    seq: int = 0  # ... and then by this
    small_start: float | None = None  # start tag if it may use the small-file bypass
    urgent: bool = False  # has a deadline
    given: int = 0
    fence: int = 0
    passed: int = 0
    waited: int = 0
    targets: int = 0  # number of disjoint groups of storage targets
    target: int = 0  # its own group, from 1

    def describe(self) -> str:
        return f"job {self.who.job}, rank {self.who.rank} on {self.who.node}"


@dataclass
class Use:
    """Usage of a pool or by a job."""

    writes: int = 0
    written: int = 0
    held: int = 0
    waited: int = 0

    def add(self, other: "Use") -> None:
        self.writes += other.writes
        self.written += other.written
        self.held += other.held
        self.waited += other.waited

    def row(self) -> Answer:
        return {"written": self.written, "held": self.held, "waited": self.waited}


#: rules that judge saves, by the bits of enum ioshape_alarm
ALARMS = ("nonfinite", "unchanged", "constant", "jump")


@dataclass
class Job:
    """The state that a pool keeps of a job."""

    ms: float
    bytes: float
    share: int = 0  # while it has members
    finish: float = 0
    latest: float = 0
    turn: float = 0
    turn_began: int = 0
    small_finish: float = 0
    usual: float = 1000
    user: str = ""
    use: Use = field(default_factory=Use)
    alarms: dict[str, int] = field(default_factory=lambda: dict.fromkeys(ALARMS, 0))


#: settings of the operator, by name: for the pool these, and `job:NAME:share` and so on
Settings = dict[str, int]
OF_POOL = ("capacity", "pool_rate", "job_rate", "small", "express")


@dataclass
class Grant:
    """The state just before a slot was granted."""

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
    """The state that is lost with the pool's main key."""

    run: str = ""
    epoch: int = 0
    opened: int = 0
    grace: int = 0
    hw: int = 0
    ahead: int = 0  # milliseconds by which the pool's time is ahead of the server's clock
    lease: int = 0  # of the latest request
    fence: int = 0
    vt: float = 0
    served: float = 0
    small_vt: float = 0
    writers: list[int] = field(default_factory=list)  # number of writers in each group of targets
    turn: int = 0  # group that was assigned last
    seq: int = 0
    cap: int = 0
    by: int = 0
    ms: float = 16
    bytes: float = 16e6
    grants: int = 0
    tidied: int = 0
    free: dict[str, float] = field(default_factory=dict)  # when each bandwidth is free again ...
    paced: int = 0  # ... by the settings of this time
    use: Use = field(default_factory=Use)


@dataclass
class Snapshot:
    """All data that a server has of a pool."""

    numbers: Numbers
    members: dict[str, Member]
    jobs: dict[str, Job]
    settings: Settings
    changed: int


class Pool:
    """A pool. `clock` and `server` (its run ID and uptime in seconds) replace the outside world."""

    def __init__(self, clock: Callable[[], int], server: Callable[[], tuple[str, int]]) -> None:
        self.clock = clock
        self.server = server
        self.numbers = Numbers()
        self.members: dict[str, Member] = {}
        self.jobs: dict[str, Job] = {}
        self.settings: Settings = {}
        self.changed = 0  # time of the operator's last change
        self.evicted: set[str] = set()  # lost keys without which the others are useless
        self.granted: list[Grant] = []  # all grants, for tests
        self.woken: list[str] = []
        self.now = 0

    # -- What follows from the members

    def holders(self) -> list[Member]:
        """Return the holders, sorted by the end of their leases."""
        held = [member for member in self.members.values() if member.state == HOLDING]
        return sorted(held, key=lambda member: (member.deadline, member.id))

    def queue(self) -> list[Member]:
        """Return the waiters, next one first."""
        waiting = [member for member in self.members.values() if member.state == WAITING]
        return sorted(waiting, key=lambda one: (one.score, one.seq))

    def small_queue(self) -> list[Member]:
        waiting = [member for member in self.queue() if member.small_start is not None]
        return sorted(waiting, key=lambda member: (member.small_start, member.seq))

    def used(self) -> int:
        return sum(member.given for member in self.members.values())

    def express_used(self) -> int:
        return sum(not member.given for member in self.holders())

    def shares(self) -> int:
        """Return the sum of the shares of all jobs that have members."""
        present = {member.who.job for member in self.members.values()}
        return sum(self.jobs[name].share for name in present)

    def capacity(self) -> int:
        return max(self.setting("capacity") or self.numbers.cap, 1)

    def small_bytes(self) -> int:
        return self.setting("small") or SMALL_BYTES

    def express(self) -> int:
        return self.setting("express") or 1

    def setting(self, *name: str) -> int:
        return self.settings.get(":".join(name), 0)

    def has_members(self, job: str) -> bool:
        return any(member.who.job == job for member in self.members.values())

    # -- Lost data

    def lose_all(self) -> None:
        """Simulate FLUSHALL."""
        self.numbers = Numbers()
        self.lose_settings()
        self.lose_members()

    def lose_settings(self) -> None:
        self.settings, self.changed = {}, 0

    def evict(self, key: str) -> None:
        """Lose one key, given by the last letter of its name."""
        if key == "m":
            self.numbers = Numbers()
        if key == "o":
            self.lose_settings()
        elif self.members and key in self.keys():
            self.evicted.add(key)
        elif key == "j":
            self.jobs.clear()

    def keys(self) -> set[str]:
        """Return the keys that should exist, by the last letters of their names."""
        present: dict[str, object] = {"m": self.numbers.run, "j": self.jobs}
        present |= {"h": self.holders(), "q": self.queue(), "l": self.queue()}
        present |= {"s": self.small_queue(), "o": self.changed}
        return {key for key, content in present.items() if content}

    def snapshot(self) -> "Snapshot":
        now = Snapshot(self.numbers, self.members, self.jobs, self.settings, self.changed)
        return deepcopy(now)

    def restore(self, earlier: "Snapshot") -> None:
        """Simulate a server that takes over with this earlier state."""
        copy = deepcopy(earlier)
        self.numbers, self.members, self.jobs = copy.numbers, copy.members, copy.jobs
        self.settings, self.changed = copy.settings, copy.changed
        self.evicted.clear()

    def lose_members(self) -> None:
        self.members.clear()
        self.numbers.writers = []
        self.jobs.clear()
        self.evicted.clear()

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
            left = bool((self.keys() - self.evicted) & set("hqsl"))
            somebody = known_epoch > 0 or left or (not lost and bool(self.holders()))
            self.lose_members()
            numbers.fence = max(numbers.fence, (self.clock() + 1) * 1024)
            numbers.free = {}
        numbers.epoch = max(numbers.epoch, known_epoch, self.clock() - 1) + 1
        numbers.opened = self.now
        began = self.now if somebody else self.now - uptime_s * 1000
        numbers.grace = began + math.ceil(lease / 2)
        numbers.run = run

    # -- Coming and going

    def job_of(self, name: str) -> Job:
        if name not in self.jobs:
            self.forget_absent_jobs()
            self.jobs[name] = Job(self.numbers.ms, self.numbers.bytes)
        return self.jobs[name]

    def expected_cost(self, job: Job, size: int, weight: int) -> float:
        time = job.usual
        if size > 0:
            time = min(1 + size * job.ms / job.bytes, max(BELIEVED, 8 * job.usual))
        return time * weight

    def settle(self, member: Member, passed: int | None) -> None:
        """Replace the expected cost of a slot by its real use."""
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
        """Remove a request. `passed` is given if the holder itself releases the slot."""
        job = self.jobs[member.who.job]
        if member.state == WAITING:
            job.finish = max(job.finish - member.cost / member.who.share, 0)
        elif member.cost > 0:
            self.settle(member, passed)
        if member.state == HOLDING:
            size = member.passed if passed is None else passed
            used = Use(1, size, self.now - member.since, member.waited)
            for use in (job.use, self.numbers.use):
                use.add(used)
            if member.target and len(self.numbers.writers) == member.targets:
                group = member.target - 1
                self.numbers.writers[group] = max(self.numbers.writers[group] - 1, 0)
        del self.members[member.id]

    def forget_absent_jobs(self) -> None:
        if self.now - self.numbers.tidied <= TIDIED or len(self.jobs) < MOST_JOBS:
            return
        self.numbers.tidied = self.now
        self.jobs = {name: job for name, job in self.jobs.items() if self.has_members(name)}

    def take_target(self, member: Member) -> None:
        """Take the next group of storage targets, of those with the fewest writers."""
        numbers, groups = self.numbers, member.targets
        if len(numbers.writers) != groups:
            numbers.writers, numbers.turn = [0] * groups, 0
        after = [(numbers.turn + n) % groups for n in range(groups)]
        best = min(after, key=lambda group: numbers.writers[group])
        numbers.writers[best] += 1
        member.target = numbers.turn = best + 1

    def admit(self, member: Member, given: int, lease: int) -> None:
        numbers = self.numbers
        if member.targets > 1:
            self.take_target(member)
        numbers.fence = max(numbers.fence + 1, self.clock() * 1024)
        numbers.grants += 1
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
            numbers.served = max(numbers.served, member.floor)
            numbers.vt = max(numbers.vt + member.cost / self.shares(), numbers.served)
        elif member.small_start is not None:
            passed = numbers.small_vt + member.cost / self.shares()
            numbers.small_vt = max(passed, member.small_start)
        member.waited = self.now - member.since
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

    def answer(self, member: Member | None, lease: int = 0) -> Answer:
        epoch, capacity = self.numbers.epoch, self.capacity()
        told: Answer = {"state": member.state if member else 0, "epoch": epoch}
        told["capacity"] = capacity
        if member is None:
            return told
        beat = math.ceil(lease / 3)
        if member.state == HOLDING:
            given: Answer = {"fence": member.fence, "weight": member.given}
            return {**told, **given, "beat": beat, "target": member.target}
        queue, held = self.queue(), self.holders()
        position = [waiter.id for waiter in queue].index(member.id)
        before = queue[position - 1] if 0 < position <= NEAR else None
        if position == 0:
            before = held[0] if held else None
            change = max(before.deadline if before else 0, self.numbers.grace) - self.now
            beat = max(1, min(beat, change))
        ahead = before.describe() if before else ""
        told |= {"beat": beat, "position": position, "ahead": ahead}
        return told

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
        urgent: bool = False,
        boost: int = 0,
    ) -> Answer:
        self.tick(known_epoch, lease)
        numbers = self.numbers
        numbers.lease = lease
        if id in self.members:
            self.members[id].deadline = self.now + lease
            return self.answer(self.members[id], lease)
        if not self.members or numbers.cap == 0:
            numbers.cap, numbers.by = asked or usual, int(asked > 0)
        if not self.members:
            numbers.vt = numbers.served = numbers.small_vt = 0
            for other in self.jobs.values():
                other.finish = other.latest = other.turn = other.small_finish = 0
        job = self.job_of(who.job)
        job.user = who.user
        share = self.setting("job", who.job, "share") or self.setting("user", who.user, "share")
        who = replace(who, share=share or who.share)
        if not self.has_members(who.job):
            job.share = who.share
        cost = self.expected_cost(job, size, weight)
        whole, boost = self.capacity() / who.share, max(min(boost, BOOST), -BOOST)
        credit = TURN - min(boost, 0) if self.has_members(who.job) else 0
        present = numbers.vt - credit * whole
        start = max(present, job.finish, job.latest)
        is_apart = self.now - job.turn_began > TOGETHER
        if start <= numbers.vt or is_apart or start - job.turn > TURN * whole:
            job.turn, job.turn_began = start, self.now
        job.finish, job.latest = start + cost / who.share, start
        member = Member(id, who, weight, size, lease, self.now, self.now + lease)
        member.cost, member.urgent = cost, urgent
        member.targets = min(usual, MOST_TARGETS)
        member.score = URGENT if urgent else job.turn - boost * whole
        member.floor = min(job.turn, member.score)
        at_once = self.now >= numbers.grace and not self.queue() and self.fits(member)
        self.members[id] = member
        if at_once:
            self.admit(member, weight, lease)
            return self.answer(member, lease)
        numbers.seq += 1
        member.seq = numbers.seq
        if 0 < size <= self.small_bytes() and weight == 1:
            member.small_start = max(numbers.small_vt, job.small_finish)
            job.small_finish = member.small_start + cost / who.share
        self.grant_those_that_fit()
        member.deadline = self.now + lease
        return self.answer(member, lease)

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
        return self.answer(member, lease)

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

    def kick(self, id: str, lease: int = 15000) -> int:  # noqa: A002
        self.tick(0, lease)
        if id not in self.members:
            return 0
        self.forget(self.members[id])
        self.grant_those_that_fit()
        return 1

    def set(self, changes: Settings) -> int:
        self.tick(0, 15000)
        for name, value in changes.items():
            if not value:
                self.settings.pop(name, None)
            elif name in self.settings or len(self.settings) + (self.changed > 0) < MOST_SET:
                self.settings[name] = value
            else:
                return 0
        self.changed = max(self.clock(), self.changed + 1)
        self.grant_those_that_fit()
        return 1

    def pace(
        self,
        job: str,
        size: int,
        most: int,
        job_rate: int,
        user: str = "u",
        lease: int = 15000,
        known_epoch: int = 0,
    ) -> Answer:
        self.tick(known_epoch, lease)
        numbers = self.numbers

        def lowest(*rates: int) -> int:
            return min((rate for rate in rates if rate > 0), default=0)

        limits = {
            "pool": self.setting("pool_rate"),
            f"job:{job}": lowest(
                job_rate, self.setting("job_rate"), self.setting("job", job, "rate")
            ),
            f"user:{user}": self.setting("user", user, "rate"),
        }
        limits = {name: rate for name, rate in limits.items() if rate}
        if not limits:
            return {"bytes": 0, "start": 0, "end": 10000}
        rate = min(limits.values())
        # Bandwidth that was granted in advance at earlier rates is forgotten.
        if numbers.paced != self.changed:
            numbers.paced, numbers.free = self.changed, {}
        turns = min(max(len(self.holders()), 1), 8)
        size = max(size, min(most, math.floor(rate * 250 / 1000 / turns)))
        start = max(self.now, *(numbers.free.get(name, 0) for name in limits))
        for name, limit in limits.items():
            numbers.free[name] = start + size * 1000 / limit
        end = start - self.now + size * 1000 / rate
        return {"bytes": size, "start": math.floor(start - self.now), "end": math.ceil(end)}

    def alarm(self, job: str, bits: int, user: str = "u", lease: int = 15000) -> int:
        self.tick(0, lease)
        found = self.job_of(job)
        found.user = user
        for i, rule in enumerate(ALARMS):
            found.alarms[rule] += bits >> i & 1
        return 1

    def row(self, member: Member) -> Answer:
        who = member.who
        return {
            **{"id": member.id, "job": who.job, "node": who.node, "rank": str(who.rank)},
            **{"weight": member.weight, "bytes": member.bytes, "passed": member.passed},
            **{"state": member.state, "given": member.given, "fence": member.fence},
            **{"since": member.since, "until": str(member.deadline)},
            "is_urgent": int(member.urgent),
        }

    def job_rows(self) -> list[Answer]:
        return [
            {
                **{"job": name, "user": job.user, "writes": job.use.writes},
                **job.use.row(),
                **job.alarms,
            }
            for name, job in self.jobs.items()
        ]

    def status(self, lease: int = 15000) -> dict[str, int | list[Answer]]:
        changed = {"changed": str(self.changed)} if self.changed else {}
        settings: list[Answer] = [
            {**{name: str(value) for name, value in self.settings.items()}, **changed}
        ]
        if not self.numbers.run:
            return {"now": self.clock(), "set": settings}
        self.tick(0, lease)
        held, queue = self.holders(), self.queue()
        numbers = self.numbers
        pool: Answer = {"capacity": numbers.cap, "by_job": numbers.by, "grants": numbers.grants}
        pool |= {"used": sum(member.given for member in held), "waiters": len(queue)}
        return {
            "now": self.now,
            "set": settings,
            "pool": [pool | numbers.use.row()],
            "holders": [self.row(member) for member in held],
            "waiters": [self.row(member) for member in queue[:LISTED]],
            "jobs": self.job_rows(),
        }
