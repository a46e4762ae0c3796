# SPDX-License-Identifier: Apache-2.0
"""Test ioshape bench and ioshape trace."""

import json
import os
import re
import signal
import statistics
import subprocess
import sys
import textwrap
import time
import warnings
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import ioshape
import pytest
import torch
from command import IOSHAPE, call
from coordinators import coordinator
from ioshape._cli import bench_members
from ioshape._cli import trace as reports
from ioshape._cli.bench_measure import Latency, Ratios, Round, Summary
from ioshape._cli.bench_members import (
    READ,
    READERS,
    REST_S,
    WRITERS,
    Crowd,
    MemberError,
    Operation,
    Saved,
)
from ioshape._cli.trace import Span, chrome, percentile, spans_of
from ioshape._core import trace
from mounts import seen_alone
from processes import TIMEOUT_S, environment, run_interpreter
from striped import INSTANT, striped
from tree import PYTHONPATH, ROOT

ROUNDS = 2


def slices(trace: dict[str, Any]) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event["ph"] == "X"]


# ---- The bench ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "ways"),
    [
        (3, ("torch", "save", "node")),
        pytest.param(1, ("buffered", "async", "ceiling"), marks=pytest.mark.slow),
        pytest.param(4, ("async", "rank0", "torch"), marks=pytest.mark.long),
    ],
)
def test_a_bench_measures_every_way(ranks: int, ways: tuple[str, ...], tmp_path: Path) -> None:
    """Check one bench in a single test, so that test workers do not measure it repeatedly."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    done = call(
        *("bench", "scratch", "--ranks", ranks, "--size", "256K", "--rounds", ROUNDS),
        *("--ways", ",".join(ways), "--json"),
        folder=tmp_path,
        # These settings would change the bench, and must have no effect.
        env={
            "IOSHAPE_TRACE": str(tmp_path / "reports"),
            "IOSHAPE_FULL": "skip",
        },
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    assert not list(scratch.iterdir())
    assert not (tmp_path / "reports").exists()
    every_way_is_measured(json.loads(done.stdout), ranks, ways)


def every_way_is_measured(found: dict[str, Any], ranks: int, ways: tuple[str, ...]) -> None:
    assert (found["ranks"], found["bytes"], found["against"]) == (ranks, 256 << 10, ways[0])
    assert found["alone"]["reads"]["count"] > 20
    assert found["alone"]["writes"]["count"] > 10
    assert tuple(found["ways"]) == ways
    for way, one in found["ways"].items():
        assert len(one["rounds"]) == ROUNDS
        for turn in one["rounds"]:
            assert len(turn["completions_s"]) == len(turn["stalls_s"]) == ranks
            assert turn["makespan_s"] == max(turn["completions_s"])
            # A background save ends later than its call returns.
            pairs = zip(turn["stalls_s"], turn["completions_s"], strict=True)
            assert all(0 < stall <= end for stall, end in pairs)
        ends = [turn["makespan_s"] for turn in one["rounds"]]
        assert one["makespan_s"] == statistics.median(ends)
        assert one["gb_per_s"] == pytest.approx(ranks * 262_144e-9 / one["makespan_s"])
        assert (one["report"] is None) == (way in ("torch", "buffered", "ceiling"))
        if way in ("node", "rank0"):
            assert one["report"]["mode"] == way
    ours, theirs = (found["ways"][way] for way in (ways[1], ways[0]))
    assert found["ratios"][ways[1]]["makespan"] == theirs["makespan_s"] / ours["makespan_s"]


@pytest.mark.parametrize(
    ("code", "arguments"),
    [
        (2, [".", "--ways", "torch,fast"]),
        (2, [".", "--ways", "save,save"]),
        (2, [".", "--size", "1K"]),
        (2, [".", "--ranks", "0"]),
        (2, ["file"]),
        (1, ["none"]),
        (1, [".", "--size", "1000T"]),
        (1, ["/proc", "--size", "1M"]),
    ],
)
def test_what_cannot_be_is_refused_before_it_begins(
    code: int, arguments: list[str], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    done = call("bench", *arguments, folder=tmp_path)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (code, "", 1)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.long
def test_ranks_save_without_slots_and_with_them(tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    # Redis knows which jobs have written.
    with coordinator("redis") as address:
        env = {"IOSHAPE_COORDINATOR": address}
        done = call(
            *("bench", scratch, "--ranks", 3, "--ways", "open,async", "--size", "256K"),
            *("--rounds", ROUNDS, "--json"),
            env=env,
        )
        status = json.loads(call("slots", "status", "--path", scratch, "--json", env=env).stdout)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    coordinators = {way: one["report"]["coordinator"] for way, one in found["ways"].items()}
    assert coordinators == {"open": "open", "async": "redis"}
    # The ranks take slots for their saves in one of the two ways only.
    (one,) = status
    assert [job["writes"] for job in one["jobs"]] == [3 * (ROUNDS + 1)]


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("n_bytes", [4096, 5 << 20, (4 << 20) + 4096])
def test_the_ceiling_writes_all(tmp_path: Path, n_bytes: int, direct: bool) -> None:
    path = tmp_path / "ceiling"
    assert bench_members.Writer(3, direct).write(path, n_bytes) > 0
    content = path.read_bytes()
    block = min(4 << 20, n_bytes)
    assert n_bytes <= len(content) < n_bytes + block
    # All blocks were written: none is empty.
    parts = {content[at : at + block] for at in range(0, len(content), block)}
    assert len(parts) == 1
    assert any(parts.pop())


def ranks_of(parent: int) -> list[int]:
    """Return the pids of the children. Ranks were started first."""
    found = []
    for task in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, _, rest = task.read_text().rpartition(") ")
        except OSError:
            continue
        if int(rest.split()[1]) == parent:
            found.append(int(name.split()[0]))
    return sorted(found)


@pytest.fixture
def endless(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Start a bench that would last for long, and yield it once it measures."""
    with subprocess.Popen(
        [IOSHAPE, "bench", tmp_path, "--ranks", "3", "--size", "1M", "--rounds", "999"],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        end = time.monotonic() + 60
        while not list(tmp_path.glob(".ioshape-bench-*/neighbours/note-*")):
            assert time.monotonic() < end
            assert process.poll() is None
            time.sleep(0.01)
        yield process
        process.kill()


def is_over(process: "subprocess.Popen[str]", ranks: list[int], folder: Path) -> str:
    """Wait for the end, check that nothing is left, and return the error output."""
    out, err = process.communicate(timeout=TIMEOUT_S)
    assert not out
    assert len(ranks) > 3
    assert not [pid for pid in ranks if Path(f"/proc/{pid}").exists()]
    assert not list(folder.iterdir())
    return err


@pytest.mark.long
def test_a_rank_that_crashes_ends_the_storm(
    endless: "subprocess.Popen[str]", tmp_path: Path
) -> None:
    ranks = ranks_of(endless.pid)
    os.kill(ranks[1], signal.SIGKILL)
    err = is_over(endless, ranks, tmp_path)
    assert endless.returncode == 1
    assert re.search(r"rank 1 was ended by SIGKILL$", err, re.M)


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGINT, 130),
        (signal.SIGTERM, 143),
        pytest.param(signal.SIGHUP, 129, marks=pytest.mark.long),
    ],
)
@pytest.mark.slow
def test_a_signal_leaves_nothing(
    endless: "subprocess.Popen[str]", number: signal.Signals, code: int, tmp_path: Path
) -> None:
    ranks = ranks_of(endless.pid)
    endless.send_signal(number)
    is_over(endless, ranks, tmp_path)
    assert endless.returncode == code


def test_members_that_fail_are_named() -> None:
    def refuse(_connection: Connection) -> None:
        raise FileNotFoundError(2, "No such file or directory", "/none")

    def answer(connection: Connection) -> None:
        while True:
            connection.send(2 * connection.recv())

    def sleep(_connection: Connection) -> None:
        time.sleep(600)

    cases = (
        (refuse, "^rank 1: FileNotFoundError: .*'/none'$"),
        (lambda _connection: os._exit(3), "^rank 1 ended with exit code 3$"),
        (lambda _connection: os.kill(os.getpid(), 15), "^rank 1 was ended by SIGTERM$"),
        (sleep, "^rank 1 did not answer within 1 s$"),
    )
    for work, sentence in cases:
        with Crowd() as crowd:
            good = crowd.start("rank 0", answer)
            assert crowd.ask([good], 60, 21) == [42]
            bad = crowd.start("rank 1", work)
            with pytest.raises(MemberError, match=sentence):
                crowd.ask([good, bad], 1, 1)
            pids = [member.process.pid for member in (good, bad)]
        assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


INTERRUPTED = """
    import os, signal, sys
    from functools import partial

    from ioshape._cli.bench_members import Crowd

    def interrupt():
        signal.raise_signal(signal.SIGINT)

    os.register_at_fork(before=interrupt)
    try:
        with Crowd() as crowd:
            crowd.start("rank 0", lambda connection: connection.recv())
            print("went on")
    except KeyboardInterrupt:
        print("interrupted")
"""


def test_ctrl_c_during_a_fork_ends_the_storm(tmp_path: Path) -> None:
    assert run_interpreter(tmp_path, textwrap.dedent(INTERRUPTED)).stdout == "interrupted\n"


# ---- Nodes, and time that is slow ----------------------------------------------------------------

NODES = """
    import json, os, sys
    from collections import Counter
    from pathlib import Path
    from tests.bench import storm_process
    from tests.bench.storm_process import NodeStorm, Plan, convert_times, slow_down

    folder, seen = Path(sys.argv[1]), Path(sys.argv[2])
    plan = Plan(4, n_bytes=1 << 16, ways=("save",), rounds=1)
    mounts = [folder, folder / "1", folder / "2"]

    def see_instead(here, there):
        (seen / f"{mounts.index(there)}-{os.getpid()}").touch()

    storm_process.see_instead = see_instead
    slow_down(2)
    with NodeStorm(plan, folder, mounts) as storm:
        ranks = [storm.setup_of(rank).variables for rank in range(4)]
        storm.measure()
    summary = storm.summaries["save"]
    (turn,) = summary.rounds
    turn.operations = storm.alone

    def times():
        return [summary.makespan_s, summary.stall_s, turn.ranks[0].report["total_s"]]

    clock = times()
    convert_times(storm, 2)
    begins = [one.at_ns for one in storm.alone]
    print(json.dumps({
        "nodes": Counter(path.name.split("-")[0] for path in seen.iterdir()),
        "ranks": [[one["IOSHAPE_TEST_NODE"], one["LOCAL_RANK"]] for one in ranks],
        "ratios": [clock / model for clock, model in zip(clock, times())],
        "alone_s": (max(begins) - min(begins)) / 1e9,
        "alone_count": len(begins),
        "operations_are_alike": turn.operations == storm.alone,
        "left": [path.name for path in folder.glob("save/*")],
    }))
"""


@pytest.mark.slow
def test_ranks_are_on_nodes_and_a_simulated_storage_has_its_own_time(tmp_path: Path) -> None:
    folder, seen = tmp_path / "folder", tmp_path / "seen"
    folder.mkdir()
    seen.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(NODES), folder, seen],
        cwd=ROOT,
        env=environment(PYTHONPATH=PYTHONPATH),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["nodes"] == {"0": 2, "1": 2, "2": READERS + WRITERS}
    assert found["ranks"] == [[f"node-{rank // 2}", str(rank % 2)] for rank in range(4)]
    assert found["left"] == []
    # In the time of the model, neighbours are alone as long, and pause as long, as in any bench.
    assert 1.5 < found["alone_s"] < 6
    assert found["alone_count"] < 1.25 * (READERS + WRITERS) * found["alone_s"] / REST_S
    assert found["ratios"] == pytest.approx([2, 2, 2])
    assert found["operations_are_alike"]


@pytest.mark.slow
@pytest.mark.usefixtures("_mounts_of_stripefs")
def test_the_storm_of_the_benchmark_has_mounts_of_their_own_in_one_place(tmp_path: Path) -> None:
    """Check that groups meet across mounts, and that the processes of a node see its own mount."""
    given = {
        "picture": "",
        "first": False,
        "plan": {
            **{"ranks": 4, "n_bytes": 1 << 16, "rounds": 0},
            "ways": ["torch", "node"],
        },
        "slow": 1,
    }
    apart = seen_alone('exec "$@"')
    python = [sys.executable, "-m", "tests.bench.storm_process"]
    variables = environment(PYTHONPATH=PYTHONPATH)
    with striped("ssd", clients=3, **INSTANT) as mount:
        given["mounts"] = [str(path) for path in mount.paths]
        given["counter"] = str(mount.backing)
        done = subprocess.run(
            [*apart, *python, json.dumps(given)],
            cwd=ROOT,
            env={**variables, "IOSHAPE_COORDINATOR": f"local:{tmp_path}"},
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    ways = json.loads(done.stdout)["ways"]
    assert ways["torch"]["metadata"]["create"] == 4
    assert ways["node"]["metadata"]["fsync"] > 0
    look = (
        "import os, sys; from pathlib import Path; from tests.bench.storm_process import *;"
        "here, there = map(Path, sys.argv[1:]); see_instead(here, there); print(os.listdir(here))"
    )
    for name in ("here", "there"):
        (tmp_path / name / name).mkdir(parents=True)
    done = subprocess.run(
        [*apart, sys.executable, "-c", look, tmp_path / "here", tmp_path / "there"],
        cwd=ROOT,
        env=variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "['there']\n", done.stderr
    assert [path.name for path in (tmp_path / "here").iterdir()] == ["here"]


# ---- Figures -----------------------------------------------------------------------------------


def test_percentiles() -> None:
    assert percentile([5.0], 99) == 5.0
    assert percentile([4.0, 1.0, 3.0, 2.0], 50) == 2.0
    hundred = [float(i) for i in range(1, 101)]
    assert (percentile(hundred, 99), percentile(hundred, 100)) == (99.0, 100.0)
    assert percentile([*hundred, 1000.0], 99) == 100.0


def turn(ends_s: list[float], held_s: float, reads_ms: list[int]) -> Round:
    def ns(seconds: float) -> int:
        return round(seconds * 1e9)

    return Round(
        "torch",
        0,
        [Saved(ns(0.5), ns(0.5 + held_s), ns(end)) for end in ends_s],
        [Operation(READ, 0, ms * 10**6) for ms in reads_ms],
    )


def test_summaries() -> None:
    slow = Summary([turn([2.0, 4.0], 1.5, [10, 20]), turn([1.0, 9.0], 2.5, [400])])
    assert (slow.makespan_s, slow.mean_completion_s) == (6.5, 4.0)
    assert (slow.stall_s, slow.most_stall_s) == (2.0, 2.0)
    assert slow.neighbours.reads == Latency(3, 20.0, 400.0, 400.0)
    assert slow.neighbours.writes is None
    assert slow.typical is slow.rounds[1]
    quick = Summary([turn([1.0, 2.0], 0.5, [5])])
    assert Ratios.of(quick, slow) == Ratios(3.25, 4.0 / 1.5, 80.0)


def test_parts_lie_behind_each_other() -> None:
    report = {"pickle_s": 0.1, "stage_s": 0.2, "slot_s": 1.0, "write_s": 2.0, "group_s": 9.0}
    spans = spans_of(report, 10.0, 14.0)
    assert [span.phase for span in spans] == ["stage", "wait", "write", "others"]
    drained = spans_of({"write_s": 1.0, "drain_s": 5.0}, 0.0, 6.0)
    assert drained == [Span("write", 0.0, 1.0), Span("drain", 1.0, 6.0)]
    # Unaccounted time is a part of its own, so that a picture's bar ends where the save does.
    assert spans_of({"write_s": 1.0}, 0.0, 1.2)[1:] == [Span("rest", 1.0, 1.2)]
    assert len(spans_of({"write_s": 1.0}, 0.0, 1.001)) == 1
    begins = [span.begin_s for span in spans]
    assert begins == pytest.approx([10.0, 10.3, 11.3, 13.3])
    assert spans[-1].end_s == 14.0  # not longer than the save


# ---- Reports of a run --------------------------------------------------------------------------

TRAINING = """
import ioshape, os, sys, torch
state = {"a": torch.arange(50_000)}
folder = sys.argv[1]
ioshape.save(state, folder + "/a.pt")
ioshape.save_async(state, folder + "/b.pt").wait()
ioshape.save_async(state, folder + "/left.pt")
ioshape.save_group(state, folder + "/group", 5)
ioshape.save(state, folder + "/old.pt", _use_new_zipfile_serialization=False)
try:
    ioshape.save(state, folder + "/none/a.pt")
except FileNotFoundError:
    pass
with open(folder + "/object.pt", "wb") as file:
    ioshape.save(state, file)
"""


@pytest.mark.slow
def test_saves_leave_reports_that_are_told_and_drawn(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    reports = run / "reports" / "here"
    subprocess.run(
        [sys.executable, "-c", TRAINING, run],
        env=environment(IOSHAPE_TRACE=str(reports)),
        check=True,
        timeout=TIMEOUT_S,
    )
    reports_are_of_all_saves(reports)
    trace_tells_and_draws(reports, tmp_path)


def reports_are_of_all_saves(recorded: Path) -> None:
    host = ioshape.job().node
    for path in recorded.iterdir():
        assert re.fullmatch(rf"{re.escape(host)}-00000-\d+\.jsonl", path.name)
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        found = {Path(line["path"]).name: line for line in lines if not line["error"]}
        assert sorted(found) == [
            "a.pt",
            "b.pt",
            "left.pt",
            "object.pt",
            "old.pt",
            "step-0000000005",
        ]
        (failed,) = [line for line in lines if line["error"]]
        assert failed["path"].endswith("/none/a.pt")
        assert found["b.pt"]["background"]
        assert not found["old.pt"]["background"]
        for line in lines:
            assert time.time() - 600 < line["started_s"] < time.time()


def trace_tells_and_draws(recorded: Path, tmp_path: Path) -> None:
    trace = tmp_path / "a.json"
    done = call("trace", recorded, "--chrome", trace)
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(call("trace", recorded, "--json").stdout)
    assert found["saves"] == sum(storm["saves"] for storm in found["storms"]) == 7
    assert sum(storm["failed"] for storm in found["storms"]) == 1
    for storm in found["storms"]:
        assert storm["makespan_s"] >= storm["p99_s"] >= storm["mean_s"] > 0
    saves = [one for one in slices(json.loads(trace.read_text())) if "path" in one["args"]]
    assert len(saves) == 7
    assert call("trace", recorded, "--chrome", "/proc/a").returncode == 1


def line_of(**changes: object) -> str:
    fields = {"ioshape": "save", "host": "h", "rank": 0, "pid": 1, "started_s": 1e9, "total_s": 1}
    return json.dumps({**fields, **changes})


def test_lines_that_are_no_reports_are_counted(tmp_path: Path) -> None:
    wrong = [
        "{",
        "[" * 30_000,
        "[1]",
        '{"a": 1}',
        line_of(total_s="one"),
        line_of(total_s=-1),
        line_of(total_s=1e300),
        line_of(started_s=float("nan")),
        line_of(slot_s=[1]),
        line_of(pid=None),
        line_of(rank=float("inf")),
        line_of(path="x" * 70_000),
    ]
    lines = [line_of(), *wrong, line_of(path="/b\x1b[31m", started_s=1e9 + 9)]
    (tmp_path / "h.jsonl").write_text("\n".join(lines))
    (tmp_path / "notes.txt").write_text("not looked at")
    done = call("trace", tmp_path, "--json")
    assert done.returncode == 1
    said = f"{tmp_path}/h.jsonl: {len(wrong)} lines without a report of a save"
    assert done.stderr == f"ioshape: {said}\n"
    found = json.loads(done.stdout)
    assert (found["saves"], len(found["storms"]), found["problems"]) == (2, 2, [said])
    empty = tmp_path / "empty"
    empty.mkdir()
    assert f"IOSHAPE_TRACE={empty}" in call("trace", empty).stderr
    assert call("trace", "nothere", folder=tmp_path).returncode == 1


def test_the_line_of_the_page_is_one() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    (line,) = re.findall(r"^```json\n(.*)\n```$", page, re.MULTILINE)
    save = reports.parse(line.encode())
    assert save is not None
    assert (save.host, save.rank, save.total_s, save.held_s) == ("n03", 7, 1.204, 0.031)


def test_processes_of_several_hosts_stay_apart() -> None:
    lines = [line_of(host=host, rank=i, started_s=1e9 + i / 10) for i, host in enumerate("ab")]
    saves = [save for line in lines if (save := reports.parse(line.encode()))]
    (storm,) = reports.storms(saves)
    trace = json.loads(chrome(saves))
    names = {one["args"]["name"] for one in trace["traceEvents"] if one["name"] == "process_name"}
    assert names == {"rank 0, a", "rank 1, b"}
    assert len({one["pid"] for one in slices(trace)}) == 2
    assert storm.makespan_s == pytest.approx(1.1)


def test_no_save_fails_because_it_cannot_be_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("IOSHAPE_TRACE", str(tmp_path / "file" / "x"))
    for action in ("always", "error"):
        monkeypatch.setattr(trace, "_warned", False)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter(action)
            for i in range(2):
                ioshape.save([i], tmp_path / "a.pt")
        assert torch.load(tmp_path / "a.pt") == [1]
        told = [str(one.message) for one in caught]
        assert len(told) == (1 if action == "always" else 0)
        assert all("not recorded (setting trace): [Errno 20]" in text for text in told)


def test_no_save_fails_because_nobody_knows_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown() -> None:
        raise RuntimeError("the process group is gone")

    monkeypatch.setenv("IOSHAPE_TRACE", str(tmp_path / "reports"))
    monkeypatch.setattr(trace, "job", unknown)
    monkeypatch.setattr(trace, "_warned", False)
    with pytest.warns(RuntimeWarning, match="not recorded .*: the process group is gone"):
        ioshape.save([1], tmp_path / "a.pt")
    assert torch.load(tmp_path / "a.pt") == [1]


def test_the_clock_is_that_of_torchs_profiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that a save's slice is within the slice that the profiler records around it."""
    monkeypatch.setenv("IOSHAPE_TRACE", str(tmp_path / "reports"))
    with (
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler,
        torch.profiler.record_function("checkpoint"),
    ):
        ioshape.save({"a": torch.zeros(1000)}, tmp_path / "a.pt")
    profiler.export_chrome_trace(str(tmp_path / "torch.json"))
    theirs = json.loads((tmp_path / "torch.json").read_text())
    ours = json.loads(chrome(reports.read(tmp_path / "reports").saves))
    if "baseTimeNanoseconds" in theirs:  # not in torch before 2.4
        assert theirs["baseTimeNanoseconds"] == ours["baseTimeNanoseconds"]
        (outer,) = [one for one in slices(theirs) if one["name"] == "checkpoint"]
        (inner,) = [one for one in slices(ours) if one["name"] == "a.pt"]
        assert inner["pid"] == outer["pid"]
        slack_us = 2000.0
        assert outer["ts"] - slack_us <= inner["ts"]
        assert inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"] + slack_us
