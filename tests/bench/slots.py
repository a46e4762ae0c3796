# SPDX-License-Identifier: Apache-2.0
"""Measure slots, through Redis and on one host."""

from tempfile import TemporaryDirectory

from coordinators import coordinator

from . import slots_death, slots_script, slots_sharing, slots_turns
from .setting import Figure, Outcome, Setting

# Bytes of the tensors of all writers in the bandwidth benchmark, together.
TENSOR_BYTES = slots_sharing.MOST_TENSOR_BYTES


def measure_script(setting: Setting, outcome: Outcome) -> None:
    setting.say("the script, with 100 to 100,000 waiters")
    us = slots_script.measure_all()
    found = slots_script.figures(us)
    outcome.facts["script_us"] = us
    worst = max((time, call, n) for n, calls in us.items() for call, time in calls.items())
    outcome.figures += [
        Figure(
            "script_us_max",
            found["script_us_max"],
            "<=",
            60,
            f"us of server time; the most was {worst[1]} with {worst[2]} waiters",
        ),
        Figure(
            "script_us_growth",
            found["script_us_growth"],
            "<=",
            1.3,
            "the same call with 100 to 100,000 waiters, slowest to quickest",
        ),
    ]


def measure(setting: Setting) -> Outcome:
    outcome = Outcome()
    outcome.facts["method"] = (
        "A redis-server of its own, on a Unix socket, for turns that nobody else wants on TCP as "
        "well. Turns and what they are compared with run in "
        "one process, in turns. Everything else happens between processes of this machine."
    )
    # The folder is in /dev/shm, where the library keeps local slots by default.
    folder = TemporaryDirectory(prefix="ioshape-bench-", dir="/dev/shm")
    with coordinator("redis") as redis, folder as shared:
        local = f"local:{shared}"
        slots_turns.measure(setting, outcome, redis, local)
        slots_death.measure(setting, outcome, redis, local)
        slots_sharing.measure(setting, outcome, redis, local)
    measure_script(setting, outcome)
    return outcome
