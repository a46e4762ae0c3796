# SPDX-License-Identifier: Apache-2.0
"""Simulate a cluster of 100,000 nodes: what storms cost training, and the load on Redis."""

from dataclasses import replace

from tests.simulate import redis_load
from tests.simulate.report import AT_ONCE, Case, as_json, compare, storm
from tests.simulate.storage import HDD, SSD
from tests.simulate.workload import jobs

from .setting import Figure, Outcome, Setting

JOBS, NODES = 200, 100_000
#: Name of the order that slots.lua implements.
OURS = "ours"
STORM_S = 15.0
REDIS_S = 150.0  # seconds of the model's clock; the first third only fills the queue

CASE = Case("saves in the background", HDD)
#: Variants of CASE that differ in one thing each.
OTHERS = [
    replace(CASE, name="saves that block", background=False),
    replace(CASE, name="storage of 2 TB/s", storage=replace(HDD, bandwidth=2e12)),
    replace(CASE, name="storage of 4 TB/s", storage=replace(HDD, bandwidth=4e12)),
    replace(CASE, name="intervals twice as long", stretch=2.0),
    replace(CASE, name="intervals four times as long", stretch=4.0),
    replace(CASE, name="flash", storage=SSD),
    replace(CASE, name="files on one target each", storage=replace(HDD, stripes=1)),
    replace(CASE, name="a lone writer gets 70 %", storage=replace(HDD, alone=0.7)),
]


def measure_lost(setting: Setting, outcome: Outcome) -> None:
    setting.say(f"{JOBS} jobs on {NODES:,} nodes, in all orders")
    main = compare(CASE)
    outcome.facts["cases"] = [as_json(main)]
    io = main.io
    shares = ", ".join(f"{order} {share:.2%}" for order, share in io.items())
    outcome.figures += [
        Figure("sim_lost_ratio", main.ratio(AT_ONCE, OURS), ">=", 1.5, f"lost to I/O: {shares}"),
        Figure(
            "sim_lost_vs_set10",
            main.ratio("set10", OURS),
            ">=",
            1.0,
            f"with fair shares {main.ratio('set10', 'fair'):.2f}, and "
            f"{main.ratio(AT_ONCE, 'fair'):.2f} to at once",
        ),
    ]
    told = []
    for case in OTHERS:
        setting.say(case.name)
        found = compare(case)
        told.append(as_json(found))
        ratios = ", ".join(
            f"{order} {found.ratio(AT_ONCE, order):.2f}" for order in found.io if order != AT_ONCE
        )
        outcome.ceilings.append(f"{case.name} (load {found.load:.2f}), at once to: {ratios}")
    outcome.facts["sensitivity"] = told
    work = jobs(JOBS, NODES, HDD.bandwidth, 1)
    outcome.facts["storm"] = {order: storm(work, HDD, order) for order in io}


def measure_redis(setting: Setting, outcome: Outcome) -> None:
    setting.say(f"slots.lua, {REDIS_S:.0f} s of these jobs")
    found = redis_load.measure(HDD, JOBS, NODES, REDIS_S)
    outcome.facts["redis"] = found
    setting.say(f"all nodes ask at once, {STORM_S:.0f} s")
    outcome.facts["redis_storm"] = redis_load.measure_storm(HDD, JOBS, NODES, STORM_S)
    outcome.figures += [
        Figure(
            "sim_redis_cpu",
            found["cpu"],
            "<=",
            0.5,
            f"{found['calls_per_s']:.0f} calls/s of {found['us_per_call']:.0f} us, "
            f"at most {found['most_waiting']:.0f} waiting",
        ),
        Figure(
            "sim_redis_mib",
            found["mib"],
            "<=",
            256,
            f"{found['data_mib']:.0f} MiB of data; {found['connections']:.0f} connections of "
            f"{found['connection_kib']:.1f} KiB",
        ),
    ]


def measure(setting: Setting) -> Outcome:
    outcome = Outcome()
    outcome.facts["method"] = (
        "discrete events on a model of the storage; medians of three clusters drawn; the script's "
        "load by the real script in a real Redis on the model's clock, a round trip for each call"
    )
    measure_lost(setting, outcome)
    measure_redis(setting, outcome)
    return outcome
