# SPDX-License-Identifier: Apache-2.0
"""ioshape bench storm, ioshape trace, and what both draw."""

import json
import os
import re
import signal
import statistics
import subprocess
import sys
import sysconfig
import threading
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import ioshape
import pytest
import torch
from ioshape import _trace
from ioshape.cli import _chrome, _metadata, _reports, _storm_rank
from ioshape.cli._children import ChildError, Children, Line
from ioshape.cli._neighbours import READ, Operation
from ioshape.cli._storm_figures import Latency, RankSave, Ratios, Round, Summary, percentile
from ioshape.cli._svg import draw
from ioshape.cli._timeline import Panel, Row, Save, Timeline, spans_of
from ioshape.cli._ways import WAYS as LABELS
from processes import SLOTS
from tree import ROOT

IOSHAPE = Path(sysconfig.get_path("scripts")) / "ioshape"
ROUNDS = 2
QUARTER_NS = 7_889_238 * 10**9

Done = subprocess.CompletedProcess[str]


def variables(**more: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHONW", "IOSHAPE_"))}
    return {**kept, "IOSHAPE_COORDINATOR": SLOTS, **more}


def call(*arguments: str | Path | int, folder: Path | None = None, **more: str) -> Done:
    return subprocess.run(
        [IOSHAPE, *map(str, arguments)],
        env=variables(**more),
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def slices(trace: dict[str, Any]) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event["ph"] == "X"]


def elements(svg: ElementTree.Element, name: str) -> list[ElementTree.Element]:
    return svg.findall(f".//{{http://www.w3.org/2000/svg}}{name}")


# ---- The storm ---------------------------------------------------------------------------------


@dataclass
class Measured:
    ways: tuple[str, ...]
    ranks: int
    output: str
    numbers: dict[str, Any]
    picture: ElementTree.Element
    trace: dict[str, Any]


def measure(folder: Path, ranks: int, nodes: int, ways: tuple[str, ...]) -> Measured:
    """A storm, and that nothing else is left of it."""
    scratch = folder / "storm"
    scratch.mkdir()
    files = [folder / name for name in ("numbers.json", "picture.svg", "trace.json")]
    done = call(
        *("bench", "storm", "./storm", "--ranks", ranks, "--size", "256K", "--rounds", ROUNDS),
        *("--ways", ",".join(ways), "--nodes", nodes),
        *("--json", files[0], "--svg", files[1], "--trace", files[2]),
        folder=folder,
        # What would make it another storm is not listened to.
        **{"IOSHAPE_NODE": "one", "IOSHAPE_TRACE": str(folder / "reports"), "IOSHAPE_FULL": "skip"},
    )
    assert done.returncode == 0, done.stderr
    words = f"ioshape: {ranks} ranks save 256 KiB each to storm/.ioshape-bench-"
    assert done.stderr.startswith(words)
    assert done.stderr.count("\n") == 1, done.stderr
    assert not list(scratch.iterdir())
    assert not (folder / "reports").exists()
    return Measured(
        ways,
        ranks,
        done.stdout,
        json.loads(files[0].read_text()),
        ElementTree.parse(files[1]).getroot(),
        json.loads(files[2].read_text()),
    )


@pytest.mark.parametrize(
    ("ranks", "nodes", "ways"),
    [
        (3, 1, ("torch", "save", "node")),
        pytest.param(4, 2, ("torch", "async", "node", "rank0-async"), marks=pytest.mark.long),
    ],
)
def test_a_storm_is_measured_and_drawn_and_traced(
    ranks: int, nodes: int, ways: tuple[str, ...], tmp_path: Path
) -> None:
    """All of it in one test: what is measured once must not be measured by each worker."""
    measured = measure(tmp_path, ranks, nodes, ways)
    every_way_is_measured(measured)
    the_picture_has_a_row_for_each_rank(measured)
    the_trace_has_a_slice_for_each_save(measured)


def every_way_is_measured(measured: Measured) -> None:
    found = measured.numbers
    assert (found["ranks"], found["bytes"], found["rounds"]) == (measured.ranks, 256 << 10, ROUNDS)
    assert found["alone"]["reads"]["count"] > 20
    assert found["alone"]["writes"]["count"] > 10
    assert tuple(found["ways"]) == measured.ways
    for way, one in found["ways"].items():
        assert len(one["rounds"]) == ROUNDS
        for turn in one["rounds"]:
            assert len(turn["completions_s"]) == len(turn["stalls_s"]) == measured.ranks
            assert turn["makespan_s"] == max(turn["completions_s"])
            # What began late ended later than it held its thread.
            pairs = zip(turn["stalls_s"], turn["completions_s"], strict=True)
            assert all(0 < stall <= end < 60 for stall, end in pairs)
        ends = [turn["makespan_s"] for turn in one["rounds"]]
        assert one["makespan_s"] == statistics.median(ends)
        assert one["mean_completion_s"] <= one["p99_completion_s"]
        assert (one["report"] is None) == (way == "torch")
        assert measured.ranks * (256 << 10) < one["checked_bytes"] < measured.ranks * (320 << 10)
    second = measured.ways[1]
    ours, theirs = found["ways"][second], found["ways"]["torch"]
    assert found["ratios"][second]["makespan"] == theirs["makespan_s"] / ours["makespan_s"]
    assert found["against"] == "torch"
    assert found["ways"]["node"]["report"]["layout"] == "node"
    assert found["ways"]["node"]["report"]["ranks"] == measured.ranks
    for label in ("nobody", "torch.save + fsync", LABELS[second], "save_group, node"):
        assert label in measured.output


def the_picture_has_a_row_for_each_rank(measured: Measured) -> None:
    rows = [g for g in elements(measured.picture, "g") if elements(g, "title")]
    assert len(rows) == measured.ranks * len(measured.ways)
    names = [row[0].text or "" for row in rows]
    assert sorted(name.partition(":")[0] for name in names) == sorted(
        f"rank {rank}" for rank in range(measured.ranks) for _ in measured.ways
    )
    phases = {rect.get("class") for row in rows for rect in elements(row, "rect")}
    assert {"write", "sync", "stage"} <= phases
    width = float(measured.picture.get("width") or 0)
    for rect in elements(measured.picture, "rect"):
        assert float(rect.get("x") or 0) + float(rect.get("width") or 0) <= width
    texts = " ".join("".join(one.itertext()) for one in elements(measured.picture, "text"))
    assert f"{measured.ranks} ranks save 256 KiB each" in texts
    assert "torch.save + fsync" in texts


def the_trace_has_a_slice_for_each_save(measured: Measured) -> None:
    found = slices(measured.trace)
    saves = [one for one in found if ", round " in one["name"]]
    assert len(saves) == measured.ranks * ROUNDS * len(measured.ways)
    assert len({one["pid"] for one in saves}) == measured.ranks
    assert measured.trace["baseTimeNanoseconds"] % QUARTER_NS == 0
    began_s = measured.trace["baseTimeNanoseconds"] / 1e9 + min(one["ts"] for one in saves) / 1e6
    assert abs(began_s - time.time()) < 600
    for save in saves:
        inner = [
            one
            for one in found
            if one["tid"] == save["tid"]
            and one["pid"] == save["pid"]
            and one is not save
            and save["ts"] - 1 <= one["ts"] < save["ts"] + save["dur"]
        ]
        # Of a group, not all ranks write.
        of_group = save["args"].get("layout") in ("node", "rank0")
        assert {"write"} <= {one["name"] for one in inner} or of_group
        assert sum(one["dur"] for one in inner) <= save["dur"] + 10
    assert any(one["cat"] == "neighbour" for one in found)


def test_a_directory_called_storm_is_still_one(tmp_path: Path) -> None:
    (tmp_path / "storm").mkdir()
    for name in ("./storm", tmp_path / "storm"):
        done = call("bench", name, "--size", "1K", folder=tmp_path)
        assert 'at least 1.00 MiB (see "ioshape bench --help")' in done.stderr


def test_help_names_both_benches() -> None:
    assert "ioshape bench storm /scratch" in call("bench", "--help").stdout
    text = call("bench", "storm", "--help").stdout
    assert text.startswith("Usage: ioshape bench storm [OPTIONS] [PATH]\n")
    assert max(map(len, text.splitlines())) <= 80
    page = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    section = page.partition("\n## ioshape bench storm\n")[2].partition("\n## ")[0]
    options = set(re.findall(r"^  (--[a-z]+)", text, re.MULTILINE)) - {"--help"}
    assert set(re.findall(r"`(--[a-z]+)", section)) == options


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--ways", "torch,fast"], "'fast' is not one of torch, save, async, node, rank0"),
        (["--ways", "save,save"], "save is named twice"),
        (["--ranks", "6", "--nodes", "4"], "6 ranks cannot be spread evenly over 4 nodes"),
        (["--size", "1K"], "at least 64.0 KiB"),
    ],
)
def test_what_cannot_be_is_refused(arguments: list[str], sentence: str, tmp_path: Path) -> None:
    done = call("bench", "storm", tmp_path, *arguments)
    assert done.returncode == 2
    assert sentence in done.stderr
    assert not list(tmp_path.iterdir())


def test_files_that_cannot_be_written_are_told_in_time(tmp_path: Path) -> None:
    reports = tmp_path / "reports"
    reports.mkdir()
    (reports / "h.jsonl").write_text(line_of() + "\n" + line_of(skipped=True) + "\n")
    before = sorted(tmp_path.iterdir())
    for words in (("bench", "storm", tmp_path, "--svg"), ("trace", reports, "--chrome")):
        done = call(*words, "/proc/drawn")
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr.startswith("ioshape: cannot write /proc/drawn: ")
        assert done.stderr.endswith("; name a file in a directory that you may write\n")
    # What has failed in the meantime costs nothing but that file; nor is one there before.
    done = call(
        "bench", "storm", tmp_path, "--json", tmp_path / "new", "--svg", tmp_path / "none/a"
    )
    assert f"there is no directory for {tmp_path}/none/a" in done.stderr
    assert sorted(tmp_path.iterdir()) == before
    done = call("trace", reports, "--svg", "/dev/full")
    assert "Storm 1, by host:" in done.stdout
    assert re.search(r" 0 +1$", done.stdout, re.MULTILINE)  # failed, skipped
    assert "cannot write /dev/full: No space left on device" in done.stderr


def ranks_of(parent: int) -> list[int]:
    """The processes that are called so."""
    found = []
    for task in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, _, rest = task.read_text().rpartition(") ")
        except OSError:
            continue
        if int(rest.split()[1]) == parent and "(rank-" in name:
            found.append(int(name.split()[0]))
    return found


@pytest.fixture
def endless(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A storm that has begun, and would last for long."""
    with subprocess.Popen(
        [IOSHAPE, "bench", "storm", tmp_path, "--ranks", "3", "--size", "1M", "--rounds", "999"],
        env=variables(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        end = time.monotonic() + 60
        while not list(tmp_path.glob(".ioshape-bench-*/torch")):
            assert time.monotonic() < end
            assert process.poll() is None
            time.sleep(0.01)
        yield process
        process.kill()


def is_over(process: "subprocess.Popen[str]", ranks: list[int], folder: Path) -> str:
    """What it said; nothing of it is left."""
    out, err = process.communicate(timeout=60)
    assert not out
    assert len(ranks) == 3
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
    assert re.search(r"^ioshape: the storm has failed: rank \d was ended by SIGKILL$", err, re.M)


def test_ctrl_c_leaves_nothing(endless: "subprocess.Popen[str]", tmp_path: Path) -> None:
    ranks = ranks_of(endless.pid)
    endless.send_signal(signal.SIGINT)
    is_over(endless, ranks, tmp_path)
    assert endless.returncode == 130


def test_children_that_fail_are_named() -> None:
    def refuse(_line: Line) -> None:
        raise FileNotFoundError(2, "No such file or directory", "/none")

    def answer(line: Line) -> None:
        for request in line.requests():
            line.say(twice=2 * request["number"])

    def sleep(_line: Line) -> None:
        time.sleep(60)

    begin = time.monotonic()
    cases = (
        (refuse, r"^rank 1: FileNotFoundError: \[Errno 2\] No such file or directory: '/none'$"),
        (lambda _line: os._exit(3), "^rank 1 ended with exit code 3$"),
        (lambda _line: os.kill(os.getpid(), 15), "^rank 1 was ended by SIGTERM$"),
        (sleep, "^rank 1 has given no answer for 0 s$"),
    )
    for work, sentence in cases:
        with Children() as children:
            good = children.start("rank 0", answer)
            assert children.ask([good], 60, number=21) == [{"twice": 42}]
            bad = children.start("rank 1", work)
            with pytest.raises(ChildError, match=sentence):
                children.ask([good, bad], 0.3, number=1)
        for child in (good, bad):
            assert not Path(f"/proc/{child.pid}").exists()
    assert time.monotonic() - begin < 50  # whoever sleeps was not waited for


def test_a_storm_that_wrote_rubbish_fails(tmp_path: Path) -> None:
    place = _storm_rank.Place(rank=1, ranks=2, nodes=1, token="", n_bytes=1 << 20)
    rank = _storm_rank._Rank(place)
    path = Path(rank._file(str(tmp_path), 7))
    torch.save(rank.state, path)
    assert rank.check("torch", str(tmp_path), 7) == {"bytes": path.stat().st_size}
    torch.save({**rank.state, "rank": torch.tensor(0)}, path)
    with pytest.raises(ValueError, match="does not hold what was saved"):
        rank.check("torch", str(tmp_path), 7)
    (tmp_path / "group").mkdir()
    with pytest.raises(ValueError, match="no complete generation of step 7"):
        rank.check("node", str(tmp_path / "group"), 7)


# ---- Figures -----------------------------------------------------------------------------------


def test_percentiles() -> None:
    assert percentile([5.0], 99) == 5.0
    assert percentile([3.0, 1.0, 2.0], 50) == 2.0
    assert percentile([4.0, 1.0, 3.0, 2.0], 50) == 2.0
    hundred = [float(i) for i in range(1, 101)]
    assert (percentile(hundred, 99), percentile(hundred, 100)) == (99.0, 100.0)
    assert percentile([*hundred, 1000.0], 99) == 100.0
    with pytest.raises(ValueError, match="no values"):
        percentile([], 50)


def turn(number: int, ends: list[float], held: float, reads_ms: list[int]) -> Round:
    return Round(
        "torch",
        number,
        0,
        [RankSave(0.5, 0.5 + held, end, None) for end in ends],
        [Operation(READ, 0, ms * 10**6) for ms in reads_ms],
    )


def test_summaries() -> None:
    slow = Summary([turn(1, [2.0, 4.0], 1.5, [10, 20]), turn(2, [1.0, 9.0], 2.5, [400])])
    assert slow.makespan_s == 6.5
    assert slow.mean_completion_s == 4.0
    assert slow.p99_completion_s == 9.0
    assert (slow.stall_s, slow.most_stall_s) == (2.0, 2.0)
    assert slow.neighbours.reads == Latency(3, 20.0, 400.0, 400.0)
    assert slow.neighbours.writes is None
    assert slow.typical.number == 2
    slow.metadata = {"create": 60, "open": 40}
    quick = Summary([turn(1, [1.0, 2.0], 0.5, [5])], {"create": 10})
    ratios = Ratios.of(quick, slow)
    assert (ratios.makespan, ratios.stall, ratios.reads_p99) == (3.25, 4.0, 80.0)
    assert (ratios.metadata, ratios.writes_p99) == (10.0, None)


def test_counts_of_metadata() -> None:
    lustre = (
        "snapshot_time             1700000000.123 secs.nsecs\n"
        "close                     34 samples [usec] 12 500 9000\n"
        "create                    2 samples [reqs]\n"
        "nonsense\n"
    )
    assert _metadata.of_md_stats(lustre) == {"close": 34, "create": 2}
    assert _metadata.of_stripefs('{"metadata": {"total": 3, "open": 3}}') == {"open": 3}
    for text in ("", "{}", '{"metadata": 7}', '{"metadata": {"open": "x"}}'):
        assert _metadata.of_stripefs(text) is None
    assert _metadata.difference({"a": 1, "b": 2}, {"a": 4, "b": 2, "c": 1}) == {"a": 3, "c": 1}


def test_metadata_is_counted_of_one_lustre_only(tmp_path: Path) -> None:
    mounts = (
        r"36 25 0:40 / /mnt/my\040scratch rw,relatime shared:1 - lustre 10.0.0.1@tcp:/s[1]/team rw"
        "\n37 25 0:41 / /home rw shared:2 master:3 - lustre 10.0.0.1@o2ib:10.0.0.2@o2ib:/home rw\n"
        "38 25 0:42 / /local rw - xfs /dev/sda1 rw\n"
    )
    scratch = _metadata.lustre_name(mounts, Path("/mnt/my scratch"))
    assert scratch == "s[1]"
    assert _metadata.lustre_name(mounts, Path("/home")) == "home"
    assert _metadata.lustre_name(mounts, Path("/local")) == ""
    assert _metadata.lustre_name(mounts, Path("/mnt")) == ""
    for client, count in (("s[1]-MDT0000-mdc-a", 3), ("s[1]-MDT0001-mdc-a", 4), ("home-MDT0", 50)):
        folder = tmp_path / "sys/fs/lustre/mdc" / client
        folder.mkdir(parents=True)
        (folder / "md_stats").write_text(f"create {count} samples [reqs]\n")
    assert _metadata.of_lustre(scratch, tmp_path) == {"create": 7}
    assert _metadata.of_lustre("none", tmp_path) is None


def test_parts_lie_behind_each_other() -> None:
    report = {"pickle_s": 0.1, "stage_s": 0.2, "slot_s": 1.0, "write_s": 2.0, "group_s": 9.0}
    spans = spans_of(report, 10.0, 14.0)
    assert [span.phase for span in spans] == ["stage", "wait", "write", "others"]
    begins = [span.begin_s for span in spans]
    assert begins == pytest.approx([10.0, 10.3, 11.3, 13.3])
    assert spans[-1].end_s == 14.0  # no longer than the save


def test_a_picture_of_many_ranks_with_odd_names_is_xml() -> None:
    rows = [
        Row(
            f"rank {i}, <&\x1b\x00\u202e>", i, [Save("s", 0, 1 + i, spans_of({"write_s": 1}, 0, 1))]
        )
        for i in range(700)
    ]
    root = ElementTree.fromstring(draw(Timeline("a & b \x07", [Panel("<p>", rows)])))
    assert len(elements(root, "g")) == 512
    assert "and 188 more" in "".join(root.itertext())


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


def test_saves_leave_reports_that_are_told_and_drawn(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    reports = run / "reports" / "here"
    subprocess.run(
        [sys.executable, "-c", TRAINING, run],
        env=variables(IOSHAPE_TRACE=str(reports)),
        check=True,
        timeout=60,
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
        assert "/none" in failed["error"]
        assert found["b.pt"]["background"]
        assert not found["old.pt"]["background"]
        for line in lines:
            assert time.time() - 600 < line["started_s"] < time.time()


def trace_tells_and_draws(recorded: Path, tmp_path: Path) -> None:
    picture, trace, numbers = (tmp_path / name for name in ("a.svg", "a.json", "n.json"))
    done = call("trace", recorded, "--svg", picture, "--chrome", trace, "--json", numbers)
    assert (done.returncode, done.stderr) == (0, "")
    assert "Storm 1, by host:" in done.stdout
    found = json.loads(numbers.read_text())
    assert found["saves"] == sum(storm["saves"] for storm in found["storms"]) == 7
    assert sum(storm["failed"] for storm in found["storms"]) == 1
    for storm in found["storms"]:
        assert storm["makespan_s"] >= storm["p99_s"] >= storm["mean_s"] > 0
        assert list(storm["hosts"]) == [ioshape.job().node]
    assert len(elements(ElementTree.parse(picture).getroot(), "g")) == 1
    saves = [one for one in slices(json.loads(trace.read_text())) if "path" in one["args"]]
    assert len(saves) == 7
    assert call("trace", recorded, "--json", "-").stdout == numbers.read_text()
    assert "and no 99;" in call("trace", recorded, "--storm", 99).stderr


def line_of(**changes: object) -> str:
    fields = {"ioshape": "save", "host": "h", "rank": 0, "pid": 1, "started_s": 1e9, "total_s": 1}
    return json.dumps({**fields, **changes})


def test_lines_that_are_no_reports_are_named(tmp_path: Path) -> None:
    wrong = {
        "{": "it is not JSON",
        "[" * 30_000: "it is not JSON",
        "[1]": 'it has no "ioshape": "save"',
        '{"a": 1}': 'it has no "ioshape": "save"',
        line_of(total_s="1"): 'its "total_s" is not a number of seconds',
        line_of(total_s=-1): 'its "total_s" is not a number of seconds',
        line_of(started_s=float("nan")): 'its "started_s" is not a number of seconds',
        line_of(slot_s=True): 'its "slot_s" is not a number of seconds',
        line_of(rank=-1): 'its "rank" is not a whole number',
        line_of(pid=None): 'its "pid" is not a whole number',
        line_of(host=7): 'its "host" is not a text',
        line_of(path="x" * 70_000): "it has more than 65,536 bytes",
    }
    lines = [line_of(), *wrong, line_of(path="/b\x1b[31m", started_s=1e9 + 9)]
    (tmp_path / "h.jsonl").write_text("\n".join(lines))
    (tmp_path / "notes.txt").write_text("not looked at")
    done = call("trace", tmp_path, "--json", "-")
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        f"ioshape: {tmp_path}/h.jsonl, line {number}: {reason}"
        for number, reason in enumerate(wrong.values(), start=2)
    ]
    found = json.loads(done.stdout)
    assert (found["saves"], len(found["storms"]), len(found["problems"])) == (2, 2, len(wrong))
    empty = tmp_path / "empty"
    empty.mkdir()
    assert f"IOSHAPE_TRACE={empty}" in call("trace", empty).stderr
    assert call("trace", "nothere", folder=tmp_path).stderr == (
        "ioshape: cannot read the reports in nothere: No such file or directory; name the folder "
        "that IOSHAPE_TRACE named\n"
    )


def test_the_line_of_the_page_is_one() -> None:
    page = (ROOT / "docs" / "timeline.md").read_text(encoding="utf-8")
    (line,) = re.findall(r"^```json\n(.*)\n```$", page, re.MULTILINE)
    save = _reports.parse(line.encode())
    assert (save.host, save.rank, save.total_s, save.held_s) == ("n03", 7, 1.204, 0.031)


def test_processes_of_several_hosts_stay_apart() -> None:
    saves = [
        _reports.parse(line_of(host=host, rank=rank, started_s=1e9 + rank / 10).encode())
        for rank, host in enumerate(["a", "b"])
    ]
    (gust,) = _reports.gusts(saves)
    panel = _reports.panel_of(gust, "t")
    assert [row.label for row in panel.rows] == ["rank 0, a", "rank 1, b"]
    found = slices(json.loads(_chrome.write(Timeline("t", [panel]))))
    assert len({one["pid"] for one in found}) == 2
    assert gust.makespan_s == pytest.approx(1.1)


def test_no_save_fails_because_it_cannot_be_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("IOSHAPE_TRACE", str(tmp_path / "file" / "x"))
    for action in ("always", "error"):
        monkeypatch.setattr(_trace, "_warned", threading.Event())
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
    monkeypatch.setattr(_trace, "job", unknown)
    monkeypatch.setattr(_trace, "_warned", threading.Event())
    with pytest.warns(RuntimeWarning, match="not recorded .*: the process group is gone"):
        ioshape.save([1], tmp_path / "a.pt")
    assert torch.load(tmp_path / "a.pt") == [1]


def test_the_clock_is_that_of_torchs_profiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Our slice lies in the one that the profiler has around it."""
    monkeypatch.setenv("IOSHAPE_TRACE", str(tmp_path / "reports"))
    with (
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler,
        torch.profiler.record_function("checkpoint"),
    ):
        ioshape.save({"a": torch.zeros(1000)}, tmp_path / "a.pt")
    profiler.export_chrome_trace(str(tmp_path / "torch.json"))
    theirs = json.loads((tmp_path / "torch.json").read_text())
    gusts = _reports.gusts(_reports.read(tmp_path / "reports").saves)
    panels = [_reports.panel_of(gust, "storm") for gust in gusts]
    ours = json.loads(_chrome.write(Timeline("run", panels)))
    if "baseTimeNanoseconds" in theirs:  # not in torch before 2.4
        assert theirs["baseTimeNanoseconds"] == ours["baseTimeNanoseconds"]
        (outer,) = [one for one in slices(theirs) if one["name"] == "checkpoint"]
        (inner,) = [one for one in slices(ours) if one["name"] == "a.pt"]
        assert inner["pid"] == outer["pid"]
        slack_us = 2000.0
        assert outer["ts"] - slack_us <= inner["ts"]
        assert inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"] + slack_us
