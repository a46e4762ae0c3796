# SPDX-License-Identifier: Apache-2.0
"""Measure the load on one Redis of a simulated cluster of 100,000 nodes."""

from tests.simulate import redis_load
from tests.simulate.storage import HDD

from .setting import Figure, Outcome, Setting

JOBS, NODES = 200, 100_000
STORM_S = 15.0
REDIS_S = 150.0  # seconds of the model's clock; the first third only fills the queue


def measure(setting: Setting) -> Outcome:
    outcome = Outcome()
    outcome.facts["method"] = (
        "discrete events on a model of the storage; the script's load by the real script in a real "
        "Redis on the model's clock, a round trip for each call"
    )
    setting.say(f"slots.lua, {REDIS_S:.0f} s of {JOBS} jobs on {NODES:,} nodes")
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
    return outcome
