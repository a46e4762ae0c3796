# SPDX-License-Identifier: Apache-2.0
"""The script for Redis follows the rules of the reference model, whatever happens to it.

Random schedules run on a scripted clock. A seed determines a schedule, and a failure names its
seed: IOSHAPE_TEST_SLOTS_SEED=seed runs that schedule alone. IOSHAPE_TEST_SLOTS_SCHEDULES is the
number of schedules.
"""

import json
import os
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

import pytest
from coordinators import RefusedByRedis, Reply, Value
from slots_model import HOLDING, OF_POOL, WAITING, Answer, Identity, Pool, Settings, Snapshot
from slots_script import Script, Server, fields, info_text, script_text, scripted_text

SCHEDULES = int(os.environ.get("IOSHAPE_TEST_SLOTS_SCHEDULES", "128"))
OPERATIONS = 1000  # in each schedule
AT_ONCE = 50  # operations that are sent together
LOOKED_AT = 5  # the keys are compared after each so many operations
STARTED = 1_700_000_000_000
KEYS = "mhqsljo"  # the last letters of the keys' names
LEASES = [3000, 10000, 15000, 600_000]
SIZES = [0, 1, 4096, 1 << 20, 16 << 20, (16 << 20) + 1, 1 << 30, 1 << 40]
JOBS = [
    Identity(f"{n:016x}", f"node{n}", f"job{n % 5}", n, 50 << n % 3, f"user{n % 2}")
    for n in range(12)
]

# Returns the content of the keys in a form that the model can produce, and the keys that never
# expire.
DUMP = """
local prefix = KEYS[1]
local packed = redis.call('HGET', prefix .. 'm', 'pool')
local pool = packed and cmsgpack.unpack(packed) or {}
local counted = {}
for i, name in ipairs({'used', 'express_used', 'holders', 'waiters', 'shares', 'urgent_waiters'}) do
	counted[i] = pool[name] or 0
end
local members = {}
for _, field in ipairs(redis.call('HKEYS', prefix .. 'm')) do
	if string.sub(field, 1, 2) == 'm:' then
		members[#members + 1] = string.sub(field, 3)
	end
end
table.sort(members)
local small = redis.call('ZRANGE', prefix .. 's', 0, -1)
local keys, lasting = {}, {}
for _, name in ipairs({'m', 'h', 'q', 's', 'l', 'j', 'o'}) do
	local left = redis.call('PTTL', prefix .. name)
	if left ~= -2 then
		keys[#keys + 1] = name
	end
	if left == -1 then
		lasting[#lasting + 1] = name
	end
end
local held = redis.call('ZRANGE', prefix .. 'h', 0, -1, 'WITHSCORES')
local alive = redis.call('ZRANGE', prefix .. 'l', 0, -1, 'WITHSCORES')
local queue = redis.call('ZRANGE', prefix .. 'q', 0, -1)
return {counted, members, held, queue, alive, small, keys, lasting}
"""


@dataclass
class Belief:
    """A client's record of its request."""

    who: Identity
    size: int
    lease: int
    holding: bool = False
    fence: int = 0
    given: int = 0
    epoch: int = 0
    passed: int = 0


def in_order(answer: dict[str, Any]) -> dict[str, Any]:
    """Sort the rows of a status that the script lists in any order."""

    def text(row: dict[str, Any]) -> str:
        return str(sorted(row.items()))

    return {
        name: sorted(value, key=text) if name in ("holders", "jobs") else value
        for name, value in answer.items()
    }


class Schedule:
    """A random schedule: the model executes each operation, and its answer is kept to compare."""

    def __init__(self, seed: int, script: Script) -> None:
        self.random = Random(seed)
        self.script = script
        self.time = STARTED
        self.run = 1
        self.uptime_s = self.random.choice([0, 3, 100_000])
        self.pool = Pool(lambda: self.time, lambda: (f"{self.run:040x}", self.uptime_s))
        self.beliefs: dict[str, Belief] = {}
        self.made = 0
        self.latest = self.time
        self.replica: Snapshot | None = None
        self.fence = 0  # the latest fence
        self.looked_at = 0  # the number of checked grants
        self.commands: list[list[Value]] = []
        self.expected: list[object] = []
        self.story: deque[str] = deque(maxlen=30)  # the latest compared operations
        # Some schedules lose no data, and in some the clock is never set back.
        self.losses = seed % 3 > 0
        self.jumps = seed % 2 > 0
        self.capacity = self.random.choice([1, 2, 3, 8])
        self.tell_world()

    def tell_world(self) -> None:
        self.plain("SET", "now", self.time)
        self.plain("SET", "info", info_text(self.run, self.uptime_s))

    def plain(self, *command: Value) -> None:
        self.commands.append(list(command))
        self.expected.append(...)

    def operation(
        self,
        answer: object,
        name: str,
        subject: str,
        *arguments: Value,
        lease: int = 15000,
        known: int = 0,
    ) -> None:
        command = self.script.command(name, subject, *arguments, lease=lease, known=known)
        self.commands.append(command)
        self.expected.append(answer)

    # -- Events

    def step(self) -> None:
        self.pass_time()
        if self.losses and self.random.random() < 0.01:
            self.misfortune()
        acts = [self.acquire, self.beat, self.release, self.again, self.kick, self.set, self.pace]
        acts += [self.status, self.limit, self.alarm]
        act = self.random.choices(acts, [30, 35, 18, 6, 1.5, 1.5, 6, 2, 1, 1])[0]
        act()
        self.check()

    def pass_time(self) -> None:
        jump = self.random.random()
        if self.jumps and jump < 0.004:
            self.time -= self.random.choice([50, 500, 30_000, 100_000])
            if self.pool.numbers.fence < self.fence:
                self.fence = 0  # the latest fence was lost just before
        elif jump < 0.01:
            self.time += self.random.choice([5000, 20_000, 100_000, 400_000])
        elif jump < 0.6:
            self.time += int(self.random.expovariate(1 / self.random.choice([3, 100, 600])))
        self.plain("SET", "now", self.time)

    def misfortune(self) -> None:
        kind = self.random.choice(
            ["flush", "run", "copy", "copy", "failover", "failover", "evict", "evict"]
        )
        if self.time < self.latest:
            self.fence = 0  # no data remembers the old fences or the later time
        if kind == "flush":
            self.plain("FLUSHALL")
            self.replica = None
            self.pool.lose_all()
        elif kind == "copy":
            self.copy_to_replica()
        elif kind == "failover" and self.replica:
            self.fail_over(self.replica)
        elif kind == "run":
            self.run += 1
            self.uptime_s = self.random.choice([0, 2, 100_000])
        else:
            key = self.random.choice(KEYS)
            self.plain("DEL", self.script.prefix + key)
            self.pool.evict(key)
        self.tell_world()

    def copy_to_replica(self) -> None:
        """Copy the keys as replication or a disk would."""
        if self.pool.evicted or not self.pool.numbers.run:
            return
        self.plain("DEL", *(f"replica:{key}" for key in KEYS))
        for key in KEYS:
            self.plain("COPY", self.script.prefix + key, f"replica:{key}", "REPLACE")
        self.replica = self.pool.snapshot()

    def fail_over(self, replica: Snapshot) -> None:
        """Replace the keys by the replica's: later changes are lost, and a second passes."""
        self.time += 1000
        self.run += 1
        self.uptime_s = self.random.choice([0, 100_000])
        for key in KEYS:
            self.plain("DEL", self.script.prefix + key)
            self.plain("COPY", f"replica:{key}", self.script.prefix + key, "REPLACE")
        self.pool.restore(replica)
        self.tell_world()
        for request, belief in list(self.beliefs.items()):
            if belief.holding and self.random.random() < 0.5:
                self.beat(request)

    def some_id(self) -> str:
        known = list(self.beliefs)
        if not known or self.random.random() < 0.02:
            return "nobody-1"
        return self.random.choice(known)

    def acquire(self) -> None:
        if len(self.pool.members) > 40:
            self.release()
            return
        self.made += 1
        who = self.random.choice(JOBS)
        size, lease = self.random.choice(SIZES), self.random.choice(LEASES)
        self.ask(f"{who.client}-{self.made}", Belief(who, size, lease))

    def again(self) -> None:
        request = self.some_id()
        if request in self.beliefs:
            self.ask(request, self.beliefs[request])

    def ask(self, request: str, belief: Belief) -> None:
        who, size, lease = belief.who, belief.size, belief.lease
        weight = self.random.choice([1, 1, 1, 2, self.capacity, self.capacity + 3])
        asked = self.random.choice([0, 0, self.capacity])
        usual = self.random.choice([2] * 20 + [1, 5, 100])
        known = self.random.choice([0, belief.epoch])
        urgent, boost = self.random.random() < 0.15, self.random.randint(-400_000, 400_000)
        answer = self.pool.acquire(
            request, who, weight, size, lease, asked, usual, known, urgent, boost
        )
        named: list[Value] = [who.client, who.node, who.job, who.rank, who.share]
        rest: list[Value] = [weight, size, asked, usual, who.user, int(urgent), boost]
        self.operation(answer, "acquire", request, *named, *rest, lease=lease, known=known)
        self.beliefs[request] = belief
        self.believe(request, answer)

    def beat(self, request: str = "") -> None:
        request = request or self.some_id()
        belief = self.beliefs.get(request) or Belief(JOBS[0], 0, 3000)
        who = belief.who
        belief.passed += self.random.choice([0, 0, 1 << 20])
        claim = belief.holding and self.random.random() < 0.95
        answer = self.pool.beat(
            request,
            who,
            belief.passed,
            belief.lease,
            belief.epoch,
            claim,
            belief.fence,
            belief.given,
            belief.size,
        )
        state: list[Value] = [belief.passed, int(claim), belief.fence, belief.given, belief.size]
        named: list[Value] = [who.client, who.node, who.job, who.rank, who.share]
        times = {"lease": belief.lease, "known": belief.epoch}
        self.operation(answer, "beat", request, *state, *named, **times)
        self.believe(request, answer)

    def release(self) -> None:
        request = self.some_id()
        if self.pool.members and self.random.random() < 0.7:
            holders = self.pool.holders() or list(self.pool.members.values())
            request = self.random.choice(holders).id
        belief = self.beliefs.get(request) or Belief(JOBS[0], 0, 3000)
        passed = self.random.choice([0, belief.size, belief.passed])
        answer = self.pool.release(request, passed, belief.lease, belief.epoch)
        times = {"lease": belief.lease, "known": belief.epoch}
        self.operation(answer, "release", request, passed, **times)
        if self.random.random() < 0.9:
            self.beliefs.pop(request, None)  # otherwise the request is released, or beats, again

    def kick(self) -> None:
        request = self.some_id()
        self.operation(self.pool.kick(request), "release", request)

    def set(self) -> None:
        draw = self.random.choice
        drawn = [draw([0, 0, 1, 5]), draw([0, 10**6]), draw([0, 10**7])]
        drawn += [draw([0, 0, 1, 1 << 31]), draw([0, 0, 3])]
        self.change(dict(zip(OF_POOL, drawn, strict=True)))

    def change(self, changes: Settings) -> None:
        """Set what is not 0, and sometimes clear the rest."""
        if self.random.random() < 0.6:
            changes = {name: value for name, value in changes.items() if value}
        given = [part for change in changes.items() for part in change]
        self.operation(self.pool.set(changes), "set", "", *given)

    def pace(self) -> None:
        who = self.random.choice(JOBS)
        size, rate = self.random.choice([1, 1 << 20, 1 << 26]), self.random.choice([0, 3 << 20])
        most = size + self.random.choice([0, 1000, 1 << 40])
        answer = self.pool.pace(who.job, size, most, rate, who.user)
        self.operation(answer, "pace", who.job, size, most, rate, who.user)

    def limit(self) -> None:
        draw, who = self.random.choice, self.random.choice(JOBS)
        kind, name = draw([("job", who.job), ("user", who.user)])
        share, rate = draw([0, 1, 150]), draw([0, 2 << 20])
        self.change({f"{kind}:{name}:share": share, f"{kind}:{name}:rate": rate})

    def alarm(self) -> None:
        who, bits = self.random.choice(JOBS), self.random.randrange(16)
        self.operation(self.pool.alarm(who.job, bits, who.user), "alarm", who.job, bits, who.user)

    def status(self) -> None:
        self.operation(self.pool.status(), "status", "")

    # -- Checks

    def believe(self, request: str, answer: Answer) -> None:
        belief = self.beliefs[request] if request in self.beliefs else Belief(JOBS[0], 0, 3000)
        belief.holding = answer["state"] == HOLDING
        belief.fence, belief.given = int(answer.get("fence", 0)), int(answer.get("weight", 0))
        belief.epoch = int(answer["epoch"])

    def check(self) -> None:
        """Check the model's promises. The script keeps them if its answers are the model's."""
        self.latest = max(self.latest, self.time)
        for grant in self.pool.granted[self.looked_at :]:
            assert grant.fence > self.fence
            self.fence = grant.fence
            if grant.given and grant.member.urgent:
                assert grant.used <= grant.capacity
            elif grant.given:
                assert grant.used == 0 or grant.used + grant.given <= grant.capacity
            else:
                assert grant.express_used < grant.express
        self.looked_at = len(self.pool.granted)

    def dump(self) -> None:
        """Compare the keys with the model."""
        pool, present = self.pool, self.pool.keys()
        if pool.evicted or not pool.numbers.run:
            return  # the script will discard what is left
        held, queue = pool.holders(), pool.queue()
        counted = [pool.used(), pool.express_used(), len(held), len(queue), pool.shares()]
        counted.append(sum(one.urgent for one in queue))
        alive = sorted(queue, key=lambda member: (member.deadline, member.id))
        self.commands.append(["EVAL", DUMP, 1, self.script.prefix])
        self.expected.append(
            [
                counted,
                sorted(pool.members),
                [part for one in held for part in (one.id, str(one.deadline))],
                [f"{one.seq:016}{one.id}" for one in queue],
                [part for one in alive for part in (one.id, str(one.deadline))],
                [f"{one.seq:016}{one.id}" for one in pool.small_queue()],
                [key for key in KEYS if key in present],
                ["o"] if pool.settings else [],
            ]
        )

    def flush(self) -> None:
        answers = self.script.connection.call_all(self.commands)
        for command, answer, expected in zip(self.commands, answers, self.expected, strict=True):
            told = command[4:] if command[0] == "EVALSHA" else command
            told = ["what lies in the keys"] if command[0] == "EVAL" else told
            self.story.append(" ".join(repr(part) for part in told)[:200])
            if expected is ...:
                continue
            if isinstance(expected, dict) and isinstance(answer, list):
                assert in_order(fields(answer)) == in_order(expected)
            else:
                assert answer == expected
        self.commands.clear()
        self.expected.clear()

    def check_wakes(self) -> None:
        """Check that waiters were woken when they got their slots.

        Real time expires the lists, so the oldest wakes may be missing.
        """
        for client in {who.client for who in JOBS}:
            woken = [name for name in self.pool.woken if name.startswith(client)]
            found = self.script.connection.call("LRANGE", f"{self.script.prefix}w:{client}", 0, -1)
            assert isinstance(found, list)
            assert found == woken[len(woken) - len(found) :]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("redis")) as server:
        yield server


def run_schedule(seed: int, server: Server) -> None:
    server.connection.call("FLUSHALL")
    schedule = Schedule(seed, Script(server, scripted_text()))
    try:
        for turn in range(OPERATIONS):
            schedule.step()
            if turn % LOOKED_AT == 0:
                schedule.dump()
            if turn % AT_ONCE == AT_ONCE - 1:
                schedule.flush()
        schedule.flush()
        if not schedule.losses:
            schedule.check_wakes()
    except Exception as error:
        story = "\n".join(schedule.story)
        raise AssertionError(f"IOSHAPE_TEST_SLOTS_SEED={seed}\n{story}") from error


def seeds(part: int, parts: int) -> list[int]:
    wanted = os.environ.get("IOSHAPE_TEST_SLOTS_SEED")
    if wanted is not None:
        return [int(wanted)] if part == 0 else []
    return list(range(part, SCHEDULES, parts))


def opened(server: Server, pool: str) -> Script:
    """Return a new pool after its grace period, which is short with a lease of a millisecond."""
    server.connection.call("FLUSHALL")
    script = Script(server, script_text(), pool)
    script("release", "nobody", 0, lease=1)
    time.sleep(0.01)
    return script


def acquire(script: Script, name: str, lease: int = 60_000) -> Reply:
    return script("acquire", name, "c", "n", "j", 0, 1, 1, 0, 1, 1, "u", 0, 0, lease=lease)


def beat(script: Script, name: str, lease: int = 60_000) -> Reply:
    return script("beat", name, 5, 0, 0, 1, 0, "c", "n", "j", 0, 1, lease=lease)


def state(answer: Reply | RefusedByRedis) -> object:
    return fields(answer)["state"] if isinstance(answer, list) else answer


def test_without_memory_those_who_are_there_can_stay_and_go(server: Server) -> None:
    script = opened(server, "full")
    assert state(acquire(script, "first")) == HOLDING
    assert state(acquire(script, "second")) == WAITING
    server.connection.call("CONFIG", "SET", "maxmemory", 1)
    try:
        before = server.connection.call("EVAL", DUMP, 1, script.prefix)
        with pytest.raises(RefusedByRedis, match="OOM"):
            acquire(script, "third")
        assert server.connection.call("EVAL", DUMP, 1, script.prefix) == before
        assert state(beat(script, "first")) == HOLDING
        assert state(beat(script, "second")) == WAITING
        assert script("release", "first", 0, lease=60_000) == 1
        assert state(beat(script, "second")) == HOLDING
        assert script("release", "first", 0, lease=60_000) == 0
        assert script("release", "second") == 1
        assert script("set", "", "capacity", 5) == 1
        status = script("status", "")
    finally:
        server.connection.call("CONFIG", "SET", "maxmemory", 0)
    found = fields(status)
    assert found["set"][0]["capacity"] == "5"
    assert found["holders"] == found["waiters"] == []
    assert state(acquire(script, "third")) == HOLDING


class Told:
    """A server whose clock and identity the test sets."""

    def __init__(self, server: Server) -> None:
        server.connection.call("FLUSHALL")
        self.server = server
        self.time = STARTED
        self.script = Script(server, scripted_text())
        self.is_run(1)

    def is_run(self, number: int) -> None:
        self.server.connection.call("SET", "info", info_text(number, 100_000))
        self.passes(0)

    def passes(self, ms: int) -> None:
        self.time += ms
        self.server.connection.call("SET", "now", self.time)


@pytest.fixture
def waiting(server: Server) -> Told:
    """Return a pool with a holder and a waiter after a failover to a replica that knows both."""
    told = Told(server)
    assert state(acquire(told.script, "first", 15_000)) == HOLDING
    assert state(acquire(told.script, "second", 15_000)) == WAITING
    told.is_run(2)
    return told


def must_be_served_in_half_a_lease(waiting: Told) -> None:
    script = waiting.script
    assert state(beat(script, "first", 15_000)) == HOLDING
    assert state(beat(script, "second", 15_000)) == WAITING
    assert script("release", "first", 0, lease=15_000) == 1
    waiting.passes(7499)
    assert state(beat(script, "second", 15_000)) == WAITING
    waiting.passes(1)
    assert state(beat(script, "second", 15_000)) == HOLDING


def test_after_a_failover_who_waits_is_served_in_half_a_lease(waiting: Told) -> None:
    must_be_served_in_half_a_lease(waiting)


def test_nor_later_if_the_other_clock_is_behind(waiting: Told) -> None:
    waiting.passes(-9000)
    must_be_served_in_half_a_lease(waiting)


def test_nor_later_if_the_other_clock_is_days_behind(waiting: Told) -> None:
    waiting.passes(-9 * 24 * 3_600_000)
    must_be_served_in_half_a_lease(waiting)


@pytest.mark.parametrize("lease", [300, 600_000])
def test_nor_at_another_time_if_one_with_another_lease_asks_first(
    lease: int, waiting: Told
) -> None:
    waiting.script("pace", "j", 1, 1, 0, "u", lease=lease)
    must_be_served_in_half_a_lease(waiting)


def test_nor_later_if_an_operator_looks_first(server: Server) -> None:
    told = Told(server)
    assert state(acquire(told.script, "first", 900)) == HOLDING
    assert state(acquire(told.script, "second", 900)) == WAITING
    told.is_run(2)
    told.script("status", "")
    assert told.script("release", "first", 0, lease=900) == 1
    told.passes(450)
    assert state(acquire(told.script, "second", 900)) == HOLDING


def test_a_clock_that_is_set_back_takes_no_slot_and_ends_every_lease(server: Server) -> None:
    told = Told(server)
    assert told.script("set", "", "capacity", 1) == 1
    assert state(acquire(told.script, "first", 15_000)) == HOLDING
    assert state(acquire(told.script, "second", 15_000)) == WAITING
    told.passes(-400_000)
    assert state(beat(told.script, "second")) == WAITING
    told.passes(14_999)
    assert state(beat(told.script, "second")) == WAITING
    told.passes(1)
    assert state(beat(told.script, "second")) == HOLDING


def lease_left(script: Script, name: str) -> int:
    status = fields(script("status", ""))
    rows = [*status["holders"], *status["waiters"]]
    return next(int(row["until"]) - int(status["now"]) for row in rows if row["id"] == name)


def test_whoever_is_told_that_it_holds_can_count_on_a_whole_lease(server: Server) -> None:
    script = opened(server, "whole")
    assert state(acquire(script, "first")) == HOLDING
    assert state(acquire(script, "second")) == WAITING
    # A small request passes the queue at once.
    small = script("acquire", "third", "c", "n", "j", 0, 1, 1, 1, 1, 1, "u", 0, 0, lease=60_000)
    assert state(small) == HOLDING
    assert lease_left(script, "third") > 50_000
    # A waiter that got a slot has half a lease until it asks again and learns of it.
    assert script("release", "first", 0, lease=60_000) == 1
    assert lease_left(script, "second") <= 30_000
    assert state(acquire(script, "second")) == HOLDING
    assert lease_left(script, "second") > 50_000


def test_a_request_made_twice_has_a_whole_lease(server: Server) -> None:
    server.connection.call("FLUSHALL")
    server.connection.call("SET", "now", STARTED)
    server.connection.call("SET", "info", info_text(1, 100_000))
    script = Script(server, scripted_text())

    def alone(name: str) -> Reply:
        return acquire(script, name, 3000)

    assert state(alone("first")) == HOLDING
    assert state(alone("second")) == WAITING
    for turn in range(1, 4):
        server.connection.call("SET", "now", STARTED + 2000 * turn)
        assert state(alone("first")) == HOLDING
        assert state(alone("second")) == WAITING
    # The lease is not longer than that.
    server.connection.call("SET", "now", STARTED + 6000 + 3000 - 1)
    status = fields(script("status", ""))
    assert [len(status[name]) for name in ("holders", "waiters")] == [1, 1]
    server.connection.call("SET", "now", STARTED + 6000 + 3000)
    status = fields(script("status", ""))
    assert status["holders"] == status["waiters"] == []


def test_looking_makes_no_pool_and_leaving_leaves_nothing_that_lasts(server: Server) -> None:
    server.connection.call("FLUSHALL")
    Script(server, script_text(), "none")("status", "")
    assert server.connection.call("KEYS", "*") == []
    script = opened(server, "gone")
    for name in ("first", "second", "third"):
        acquire(script, name)
    script("pace", "j", 1, 1, 1000, "u", lease=60_000)
    for name in ("first", "second", "third"):
        assert script("release", name, 0, lease=60_000) == 1
    left = server.connection.call("KEYS", "*")
    assert isinstance(left, list)
    assert {str(key).split(":")[2] for key in left} == {"m", "j", "w"}
    for key in left:
        expires = server.connection.call("PTTL", str(key))
        assert isinstance(expires, int)
        assert 0 < expires <= 24 * 3_600_000


def test_members_without_details_begin_anew(server: Server) -> None:
    script = opened(server, "odd")
    acquire(script, "first")
    acquire(script, "second")
    # No server loses this field by itself.
    server.connection.call("HDEL", script.prefix + "m", "m:second")
    with pytest.raises(RefusedByRedis, match="IOSHAPE-ANEW"):
        script("release", "first", 0, lease=60_000)
    assert state(beat(script, "first")) == 0
    assert state(acquire(script, "first", 1)) == WAITING


# Returns the server's id ("" if a call changed the pool and did not finish), then pairs of leases,
# then pairs of numbers. The numbers of a pair must be equal.
WHOLE = """
local prefix = KEYS[1]
local function count(key)
	return redis.call('ZCARD', prefix .. key)
end
local pool = cmsgpack.unpack(redis.call('HGET', prefix .. 'm', 'pool') or cmsgpack.pack({}))
local members, jobs = 0, 0
for _, field in ipairs(redis.call('HKEYS', prefix .. 'm')) do
	members = members + (string.sub(field, 1, 2) == 'm:' and 1 or 0)
end
for _, packed in ipairs(redis.call('HVALS', prefix .. 'j')) do
	jobs = jobs + cmsgpack.unpack(packed).members
end
local holders, waiters = pool.holders or 0, pool.waiters or 0
return cjson.encode({
	redis.call('HGET', prefix .. 'm', 'run') or '',
	{{holders, count('h')}, {waiters, count('l')}},
	{
		{waiters, count('q')}, {holders + waiters, members}, {members, jobs},
		{pool.shares or 0, math.min(members, 1)}
	}
})
"""

# The operations to break. Before each, "one" holds the only slot, and "two" and "three" wait.
NAMES = ("one", "two", "three", "four", "urgent")
OPERATIONS_BROKEN: list[list[Value]] = [
    ["acquire", "four", "c", "n", "j", 0, 1, 1, 1, 1, 1, "u", 0, 0],
    ["acquire", "urgent", "c", "n", "j", 0, 1, 1, 0, 1, 1, "u", 1, 0],
    ["beat", "one", 5, 1, 0, 1, 0, "c", "n", "j", 0, 1],
    ["beat", "two", 0, 0, 0, 1, 0, "c", "n", "j", 0, 1],
    ["release", "one", 5 << 20],
    ["release", "two", 0],
    ["release", "one"],
    ["set", "", "capacity", 2],
    ["set", "", "job:j:share", 1, "job:j:rate", 5],
    ["pace", "j", 1, 1, 1000, "u"],
    ["alarm", "j", 3, "u"],
    ["status", ""],
]


def whole(script: Script) -> tuple[str, list[list[int]], list[list[int]]]:
    """Return the server's id, pairs of expected and existing leases, and pairs of equal numbers."""
    run, leases, numbers = json.loads(str(script.connection.call("EVAL", WHOLE, 1, script.prefix)))
    return run, leases, numbers


@pytest.mark.parametrize("late", [False, True], ids=["in-time", "when-leases-end"])
@pytest.mark.parametrize(
    "operation", OPERATIONS_BROKEN, ids=lambda one: "-".join(map(str, one[:2]))
)
def test_a_call_that_is_refused_a_command_leaves_a_whole_pool_or_none(
    server: Server, operation: list[Value], late: bool
) -> None:
    """Check a command that is refused: an ACL may change, or a cluster may be moving the keys."""
    text = scripted_text().replace(
        "local call = redis.call\n",
        "local calls, last = 0, tonumber(redis.call('GET', 'last') or 1000)\n"
        "local function call(...)\n"
        "\tcalls = calls + 1\n"
        "\tif calls > last then error('REFUSED') end\n"
        "\treturn redis.call(...)\n"
        "end\n",
    )
    told = Told(server)
    script, call = told.script, server.connection.call
    breaking = Script(server, text)
    for last in range(1000):
        call("FLUSHALL")
        told.is_run(1)
        for name in NAMES[:3]:
            acquire(script, name, 15_000)
        told.passes(16_000 if late else 1)
        call("SET", "last", last)
        command = breaking.command(*map(str, operation[:2]), *operation[2:])
        (answer,) = server.connection.call_all([command])
        if not isinstance(answer, RefusedByRedis):
            break
        assert "REFUSED" in str(answer)
        run, leases, numbers = whole(script)
        if run:
            assert numbers == [[one, one] for one, _ in numbers], (last, numbers)
            # A lease without a member may be left. It expires.
            assert [one <= two for one, two in leases] == [True, True], (last, leases)
        new = script.command("acquire", "new", "c", "n", "j", 0, 1, 1, 0, 1, 1, "u", 0, 0)
        for _ in range(3):
            leave = [script.command("release", str(one), 0) for one in NAMES]
            answers = server.connection.call_all([*leave, *leave, new, new])
            if state(answers[-1]) == HOLDING:
                break
            told.passes(7500)  # unknown holders have half a lease to come back
        assert state(answers[-1]) == HOLDING, (last, answers)
        run, leases, numbers = whole(script)
        assert run
        assert [*leases, *numbers] == [[one, one] for one, _ in [*leases, *numbers]], last
    assert last > 3


@pytest.mark.parametrize(
    "part", [0, *(pytest.param(part, marks=pytest.mark.long) for part in range(1, 8))]
)
@pytest.mark.slow
def test_redis_grants_slots_as_the_model_does(part: int, server: Server) -> None:
    for seed in seeds(part, 8):
        run_schedule(seed, server)


def test_jobs_without_members_are_forgotten_when_there_are_many(server: Server) -> None:
    server.connection.call("FLUSHALL")
    server.connection.call("SET", "info", info_text(1, 100_000))
    script = Script(server, scripted_text())
    most, at = 1000, STARTED
    for number in range(most + 1):
        at += 100
        server.connection.call("SET", "now", at)
        named = ("acquire", f"r{number}", "c", "n", f"job{number:04}", 0, 1)
        assert state(script(*named, 1, 0, 5, 1, "u", 0, 0, lease=600_000)) == HOLDING
        if number not in (7, 8):
            assert script("release", f"r{number}", number, lease=600_000) == 1
    left = server.connection.call("HKEYS", script.prefix + "j")
    assert isinstance(left, list)
    # The present jobs stay, and the job that was new at that time.
    assert sorted(map(str, left)) == ["job0007", "job0008", f"job{most:04}"]


def test_a_jobs_limit_holds_whatever_the_job_asks_for(server: Server) -> None:
    told = Told(server)
    script = told.script
    assert script("set", "", "user:u:share", 50, "user:u:rate", 3_000_000) == 1
    assert script("set", "", "job:j:share", 25) == 1
    assert state(acquire(script, "first")) == HOLDING
    # The job's own rate is higher. The user's limit covers all its jobs together.
    first = fields(script("pace", "j", 1 << 20, 1 << 20, 1 << 40, "u"))
    second = fields(script("pace", "other", 1 << 20, 1 << 20, 0, "u"))
    assert (second["start"], first["end"]) == (349, 350)  # the start is rounded down, the end up
    assert script("set", "", "user:u:share", 0, "user:u:rate", 0) == 1
    assert fields(script("pace", "j", 1, 1, 0, "u")) == {
        "bytes": 0,
        "start": 0,
        "end": 10_000,
    }
    (left,) = fields(script("status", ""))["set"]
    assert left.keys() == {"job:j:share", "changed"}
    assert left["job:j:share"] == "25"


def test_there_are_only_so_many_settings(server: Server) -> None:
    script = opened(server, "limits")
    made = [script("set", "", f"job:j{number}:share", 1) for number in range(130)]
    assert made == [1] * 127 + [0] * 3  # the time of the latest change takes one place of 128
    assert script("set", "", "job:j1:share", 2) == 1
    assert script("set", "", "job:j1:share", 0) == 1
    assert script("set", "", "job:j129:share", 1) == 1


@pytest.mark.parametrize("garbage", ["", "nan", "-1", "many", "\x00"])
def test_settings_that_are_no_numbers_count_as_none(server: Server, garbage: str) -> None:
    script = opened(server, "garbage")
    names = ["capacity", "pool_rate", "job_rate", "small", "express", "changed"]
    names += ["job:j:share", "job:j:rate", "user:u:share", "user:u:rate"]
    for name in names:
        server.connection.call("HSET", script.prefix + "o", name, garbage)
    assert state(acquire(script, "first")) == HOLDING
    assert state(acquire(script, "second")) == WAITING
    assert fields(script("pace", "j", 1, 1, 0, "u")) == {
        "bytes": 0,
        "start": 0,
        "end": 10_000,
    }
    assert script("set", "", "capacity", 2) == 1
    assert state(acquire(script, "second")) == HOLDING
