# SPDX-License-Identifier: Apache-2.0
"""Measure two jobs that save at the same time on a real cluster with slow targets.

They run without slots and with slots, as in "ioshape bench --tenants 2". Each job and the
neighbours have their own client.
"""

from .rounds import Sample
from .setting import Figure, Outcome, Setting
from .storm import Found, Part, run_on_cluster, targets

TENANTS, RANKS, ROUNDS = 2, 8, 3
WAYS = ("open", "async")


def aggregate(found: Found) -> Figure:
    """Return the ratio of both jobs' bytes per second, with slots to without."""
    verdict = found["verdict"]
    rates = [verdict[side]["bytes_per_s"] / 1e6 for side in ("without", "with_slots")]
    times = [verdict[side]["checkpoint_s"] for side in ("without", "with_slots")]
    remark = (
        f"both jobs together, without slots {rates[0]:.1f} MB/s, with slots {rates[1]:.1f} MB/s; "
        f"a checkpoint takes {times[0]:.1f} s and {times[1]:.1f} s"
    )
    return Figure("tenants_aggregate", verdict["aggregate"], ">=", 0.95, remark)


def p99(found: Found) -> Figure:
    """Return the ratio of neighbours' latencies for small files, without slots to with."""
    verdict = found["verdict"]
    waits = "; ".join(
        f"{name} {one['p50_ms']:.1f} and {one['p99_ms']:.0f} ms ({one['count']} operations)"
        for name, one in (
            ("without slots", verdict["without"]["operations"]),
            ("with slots", verdict["with_slots"]["operations"]),
            ("idle", verdict["idle"]),
        )
    )
    remark = f"p50 and p99 of a neighbour's reads and creations, {waits}"
    return Figure("tenants_p99", verdict["p99"], ">=", 3, remark)


def measure(setting: Setting) -> Outcome:
    kind = setting.on or "cephfs"
    part = Part(
        {"slow": 1, "bandwidth": targets(kind)["mb_per_s"] * 1_000_000},
        (),
        WAYS,
        ranks=RANKS,
        n_bytes=setting.size // (TENANTS * RANKS),
        tenants=TENANTS,
        nodes=TENANTS,
        rounds=min(ROUNDS, setting.rounds),
        blind=True,
    )
    setting.say(f"{kind}: {TENANTS} jobs of {RANKS} ranks x {part.n_bytes >> 20} MiB")
    found = run_on_cluster(kind, part)
    setting.say(found["verdict"]["sentence"])
    text = ", ".join(f"{name} {value}" for name, value in targets(kind).items())
    return Outcome(
        [aggregate(found), p99(found)],
        [f"{kind}: {text}"],
        {
            "method": "the engine of ioshape bench on a cluster of tests/testbed, all servers and "
            "clients on this host, storage targets slowed down by the kernel; nothing configured "
            'but, without slots, the coordinator "open"; in turns, after a round that does not '
            "count; medians of rounds, latencies of all rounds together",
            "tenants": found,
        },
        {
            "tenants": {
                way: [Sample(one["makespan_s"], setting.size) for one in told["rounds"]]
                for way, told in found["ways"].items()
            }
        },
    )
