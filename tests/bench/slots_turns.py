# SPDX-License-Identifier: Apache-2.0
"""Measure the cost of a turn, and the time from a release until the next holder runs."""

import json
from functools import partial
from pathlib import Path

from coordinators import Connection

from .rounds import Sample
from .setting import Figure, Outcome, Setting, time_figure
from .worker import Worker

ROUNDS_PER_ROUND = 8  # each is short
REDIS_TURNS, LOCAL_TURNS = 200, 5000  # turns in one round
COUNTED_TURNS = 100
CROWD = 4000
HANDOVERS = 1500


def programs(setting: Setting) -> Path:
    """Return the folder of the benchmark programs."""
    return Path(str(setting.worker.process.args[0])).parent  # type: ignore[index]


def socket_of(address: str) -> Path:
    return Path(address.removeprefix("unix://").partition("?")[0])


def port_of(address: str) -> int:
    """Return the TCP port of the server behind a socket's address."""
    found = Connection(socket_of(address)).call("CONFIG", "GET", "port")
    assert isinstance(found, list)
    return int(str(found[1]))


def context(address: str, pool: str, **settings: str | int) -> dict[str, str | int]:
    """Return the keys for the command `context`: settings, and the lease in milliseconds."""
    given = {
        name if name == "lease_ms" else f"IOSHAPE_{name.upper()}": value
        for name, value in settings.items()
    }
    return {"IOSHAPE_COORDINATOR": address, "IOSHAPE_POOL": pool, **given}


def new_worker(setting: Setting, address: str, pool: str, **settings: str | int) -> Worker:
    """Start one more process with a context that has these settings."""
    worker = Worker(programs(setting) / "bench-worker")
    worker.ask("context", **context(address, pool, **settings))
    return worker


def sample(worker: Worker, verb: str, count: int, **values: str | Path | int) -> Sample:
    answer = worker.ask(verb, count=count, **values)
    return Sample(float(answer["seconds"]) / count, 1, answer)


def compare_turns(
    setting: Setting,
    outcome: Outcome,
    name: str,
    address: str,
    count: int,
    verb: str,
    values: dict[str, str | Path | int],
) -> None:
    """Compare an uncontended turn with two operations of a baseline."""
    with new_worker(setting, address, "alone") as worker:
        # The first turn connects, or makes the pool.
        sample(worker, "turns", 1)
        samples = setting.compare(
            {
                "turn": partial(sample, worker, "turns", count),
                verb: partial(sample, worker, verb, count, **values),
            },
            setting.rounds * ROUNDS_PER_ROUND,
            lambda: None,
        )
    outcome.samples[name] = samples
    outcome.figures.append(time_figure(name, 3, samples, "turn", verb, ", two for each turn"))


# ---- Commands ------------------------------------------------------------------------------------


def sent(monitor: Connection, end: str) -> list[str]:
    """Return the names of commands that clients sent before the command `end`."""
    names: list[str] = []
    while True:
        # 1700000000.123456 [0 lua] "HGET" "..."
        origin, _, command = str(monitor.receive()).partition("[")[2].partition("] ")
        name = command.split(" ")[0].strip('"').lower()
        if name == end:
            return names
        # Skip commands that the script itself calls.
        if not origin.endswith("lua"):
            names.append(name)


def measure_commands(setting: Setting, outcome: Outcome, redis: str) -> None:
    setting.say(f"commands of {COUNTED_TURNS} turns")
    monitor, other = Connection(socket_of(redis)), Connection(socket_of(redis))
    monitor.call("MONITOR")
    with new_worker(setting, redis, "counted") as worker:
        names = []
        for turns in (1, COUNTED_TURNS):
            worker.ask("turns", count=turns)
            other.call("ECHO", "")
            names.append(sent(monitor, "echo"))
    monitor.close()
    other.close()
    first, rest = names
    outcome.facts["commands"] = {
        "counted": "by MONITOR: all that clients send; what the script itself calls is not sent",
        "of_the_first_turn": first,
        "of_the_others": {name: rest.count(name) for name in set(rest)},
    }
    outcome.figures.append(
        Figure(
            "commands_per_turn",
            len(rest) / COUNTED_TURNS,
            "<=",
            4,
            f"{COUNTED_TURNS} turns; the first of a process, connecting, sends {len(first)}",
        )
    )


# ---- Handing over --------------------------------------------------------------------------------


def measure_handover(setting: Setting, outcome: Outcome, redis: str) -> None:
    setting.say(f"{HANDOVERS} handovers before {CROWD} waiting clients")
    pair: dict[str, str | int] = {"job": "pair", "share": 1000, "lease_ms": 15000, "slots": 1}
    pool = "handed"
    with new_worker(setting, redis, pool, **pair) as first:
        # The slot is held while the crowd queues.
        first.ask("acquire")
        # One process with thousands of waiting clients (crowd.c).
        crowd = Worker(programs(setting) / "bench-crowd", socket_of(redis), pool, str(CROWD))
        crowd.hear("the crowd")
        first.ask("release")
        found = first.ask("handovers", count=HANDOVERS, **context(redis, pool, **pair))
        did, _ = crowd.process.communicate()
    outcome.facts["handover"] = {
        **found,
        "handovers": HANDOVERS,
        "crowd": json.loads(did),
        "method": (
            "two contexts of the public API hand one slot to each other; behind them clients of a "
            "job with less share queue, each with a connection in BLPOP and one for its signs of "
            "life, which the library's own code sends in its own time; they share a thread"
        ),
    }
    outcome.figures.append(
        Figure(
            "handover_p99_ms",
            float(found["p99_ms"]),
            "<=",
            5,
            f"half of {HANDOVERS} within {float(found['p50_ms']):.2f} ms, "
            f"all within {float(found['max_ms']):.2f}",
        )
    )


def measure(setting: Setting, outcome: Outcome, redis: str, local: str) -> None:
    setting.say("turns that nobody else wants")
    # Once over TCP, as in a cluster, and once through a socket, where a round trip costs less.
    port = port_of(redis)
    compare_turns(
        setting,
        outcome,
        "redis_turn_vs_ping",
        f"redis://127.0.0.1:{port}",
        REDIS_TURNS,
        "pings",
        {"port": port},
    )
    compare_turns(
        setting,
        outcome,
        "redis_turn_vs_ping_on_a_socket",
        redis,
        REDIS_TURNS,
        "pings",
        {"socket": socket_of(redis)},
    )
    compare_turns(
        setting,
        outcome,
        "local_turn_vs_flock",
        local,
        LOCAL_TURNS,
        "flocks",
        # The file is in the same folder as the pool's files.
        {"path": Path(local.removeprefix("local:")) / "flock"},
    )
    measure_commands(setting, outcome, redis)
    measure_handover(setting, outcome, redis)
