# SPDX-License-Identifier: Apache-2.0
"""Saves over a tier: durable on this node's disk, then drained. Loads use the nearest copy."""

import logging
import os
import pickle
import shutil
import signal
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ioshape
import pytest
import torch
from checkpoints import Gate, checkpoint, names_in, number_in, wait_until
from mounts import small_disk
from processes import SLOTS, run_program, run_where_mounted, started_program
from striped import INSTANT, striped
from tiers import canonical, undrained

MIB = 1 << 20


@pytest.fixture
def fast(tmp_path: Path) -> Path:
    """Return the tier's folder."""
    (tmp_path / "fast").mkdir()
    return tmp_path / "fast"


@pytest.fixture
def slow(tmp_path: Path) -> Path:
    """Return the folder of the destinations."""
    (tmp_path / "slow").mkdir()
    return tmp_path / "slow"


def number_of(loaded: Any) -> int:
    number = loaded["number"]
    assert bool((loaded["data"] == number % 250 + 1).all())
    assert isinstance(number, int)
    return number


def codes(report: ioshape.Report | None) -> list[str]:
    assert report is not None
    return [step.code for step in report.downgrades]


# ---- Saves ---------------------------------------------------------------------------------------


def test_a_save_returns_when_it_is_durable_on_the_tier(fast: Path, slow: Path) -> None:
    path = slow / "model.pt"
    with undrained(fast):
        report = ioshape.save(checkpoint(1), path, tier=fast)
        assert number_in(canonical(fast, path)) == 1
        assert names_in(slow) == []
    assert (report.path, report.tier, report.drain_s) == (str(path), str(fast), 0.0)
    assert codes(report) == []
    assert f"on the tier {fast}" in str(report)
    wait_until(path.exists, "it is drained")
    assert number_in(path) == 1


def test_a_save_that_is_to_be_at_its_destination_returns_when_it_is(fast: Path, slow: Path) -> None:
    report = ioshape.save(checkpoint(1), slow / "model.pt", tier=fast, durable="destination")
    assert number_in(slow / "model.pt") == 1
    assert report.drain_s > 0
    assert report.total_s > report.drain_s


def test_without_a_tier_the_destination_is_where_every_save_goes(slow: Path) -> None:
    report = ioshape.save(checkpoint(1), slow / "model.pt", durable="destination")
    assert number_in(slow / "model.pt") == 1
    assert (report.tier, codes(report)) == ("", [])


def test_a_save_in_the_background_says_when_it_is_drained(fast: Path, slow: Path) -> None:
    path = slow / "model.pt"
    with undrained(fast):
        handle = ioshape.save_async(checkpoint(1), path, tier=fast)
        assert handle.wait()
        assert handle.done()
        assert not handle.drained()
        assert not handle.wait_drained(0.01)
        assert not path.exists()
    assert handle.wait_drained()
    assert handle.drained()
    assert number_in(path) == 1


def test_a_save_is_not_done_before_it_is_in_the_journal(fast: Path, slow: Path) -> None:
    with undrained(fast):
        for number in range(20):
            handle = ioshape.save_async(checkpoint(number), slow / f"{number}.pt", tier=fast)
            while not handle.done():
                pass
            assert len(names_in(fast / f"ioshape-{os.geteuid()}" / "journal")) == number + 1
    assert handle.wait_drained()


def test_nobody_need_ask_for_a_save_in_the_background_to_be_drained(fast: Path, slow: Path) -> None:
    ioshape.save_async(checkpoint(1), slow / "model.pt", tier=fast)
    wait_until((slow / "model.pt").exists, "it is drained")


def test_a_save_in_the_background_that_is_to_be_at_its_destination_is_done_there(
    fast: Path, slow: Path
) -> None:
    path = slow / "model.pt"
    with undrained(fast):
        handle = ioshape.save_async(checkpoint(1), path, tier=fast, durable="destination")
        wait_until(lambda: handle.progress.phase == "drain", "it is on the tier")
        assert not handle.wait(0.1)
        assert not handle.done()
        assert handle.report is None
    assert handle.result().drain_s > 0
    assert number_in(path) == 1


def test_who_gives_up_a_save_on_its_way_from_the_tier_keeps_it_there(
    fast: Path, slow: Path
) -> None:
    with undrained(fast):
        handle = ioshape.save_async(
            checkpoint(1), slow / "model.pt", tier=fast, durable="destination"
        )
        wait_until(canonical(fast, slow / "model.pt").exists, "it is saved")
        assert not handle.cancel()  # too late: it is saved on the tier
        assert handle.done()
    assert handle.wait_drained()


def test_saves_directly_have_nothing_to_drain(slow: Path) -> None:
    handle = ioshape.save_async(checkpoint(1), slow / "model.pt")
    assert handle.wait_drained()
    assert handle.drained()
    with pytest.raises(FileNotFoundError):
        ioshape.save_async(checkpoint(1), slow / "none" / "model.pt").wait_drained()


def test_a_later_save_directly_is_not_replaced_by_an_earlier_one_on_the_tier(
    fast: Path, slow: Path
) -> None:
    path = slow / "model.pt"
    gate = Gate("plan")
    earlier = ioshape.save_async(checkpoint(1), path, tier=fast, progress=gate)
    gate.await_save()
    ioshape.save(checkpoint(2), path, tier=fast, deadline=60)
    gate.open()
    assert codes(earlier.result()) == ["overtaken"]
    assert earlier.wait_drained()
    assert earlier.drained()
    assert not canonical(fast, path).exists()
    assert number_of(ioshape.load(path, tier=fast)) == 2
    ioshape.save(checkpoint(3), slow / "other.pt", tier=fast, durable="destination")
    assert number_in(path) == 2


def test_a_later_save_on_the_tier_is_not_replaced_by_an_earlier_one_directly(
    fast: Path, slow: Path
) -> None:
    path = slow / "model.pt"
    gate = Gate("plan")
    earlier = ioshape.save_async(checkpoint(1), path, progress=gate)
    gate.await_save()
    later = ioshape.save_async(checkpoint(2), path, tier=fast)
    gate.open()
    assert earlier.wait()
    assert codes(later.result()) == ["tier"]
    assert number_in(path) == 2


def test_of_three_that_take_turns_the_last_stays(fast: Path, slow: Path) -> None:
    path = slow / "model.pt"
    gate = Gate("plan")
    with undrained(fast):
        first = ioshape.save_async(checkpoint(1), path, tier=fast, progress=gate)
        gate.await_save()
        ioshape.save(checkpoint(2), path, tier=fast, deadline=60)
        last = ioshape.save_async(checkpoint(3), path, tier=fast)
        gate.open()
        assert first.wait()
        assert last.wait()
        assert number_in(canonical(fast, path)) == 3
    assert last.wait_drained()
    assert number_in(path) == 3


def test_the_setting_is_for_all_saves_that_say_nothing(fast: Path, slow: Path) -> None:
    ioshape.configure(tier=fast)
    with undrained(fast):
        assert ioshape.save(checkpoint(1), slow / "a.pt").tier == str(fast)
        assert ioshape.save(checkpoint(1), slow / "b.pt", tier=False).tier == ""
        assert ioshape.save(checkpoint(1), slow / "c.pt", tier="").tier == ""
        assert names_in(slow) == ["b.pt", "c.pt"]
    with pytest.raises(ValueError, match="tier cannot be 7"):
        ioshape.save(checkpoint(1), slow / "d.pt", tier=7)  # type: ignore[arg-type]


def test_what_rations_the_destination_is_nothing_to_the_tier(
    fast: Path, slow: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, logger="ioshape")
    nobody = "redis://127.0.0.1:1"
    ioshape.configure(
        tier=fast, coordinator=nobody, unreachable="fail", rate="1K", pool="shared", slots=1
    )
    # The variable would override configure().
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("IOSHAPE_COORDINATOR")
        handle = ioshape.save_async(checkpoint(1), slow / "model.pt")
        report = handle.result()
        assert report.coordinator == "local"
        assert report.paced_s < 1  # the destination's rate would make it 1024 s
        assert "of pool tier-shared," in caplog.text
        with pytest.raises(ioshape.errors.CoordinatorError, match="redis"):
            handle.wait_drained()
    # The next drain uses the settings of its time.
    ioshape.configure(coordinator=SLOTS, rate="1G")
    ioshape.save(checkpoint(2), slow / "other.pt", durable="destination")
    assert handle.wait_drained()


# ---- Direct saves --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options", "why"),
    [
        ("model.pt", {"replace": False}, "whether it replaces a file"),
        ("model.pt", {"deadline": 60.0}, "a deadline"),
        ("../fast/model.pt", {}, "on the tier's disk"),
        ("/dev/null", {}, "not a regular file"),
        (".run.ioshape-tmp-1/model.pt", {}, "a directory that is committed as a whole"),
    ],
)
def test_what_no_tier_is_for_is_saved_directly_and_says_why(
    fast: Path, slow: Path, name: str, options: dict[str, Any], why: str
) -> None:
    path = slow / name
    path.parent.mkdir(exist_ok=True)
    report = ioshape.save(checkpoint(1), path, tier=fast, **options)
    assert report.tier == ""
    [step] = [step for step in report.downgrades if step.code == "tier"]
    assert step.startswith("saved directly, not on the tier: ")
    assert why in step
    if name != "/dev/null":
        assert number_in(path) == 1


def test_what_torch_writes_itself_is_saved_directly(fast: Path, slow: Path) -> None:
    path = slow / "model.pt"
    report = ioshape.save(checkpoint(1), path, pickle, 2, False, tier=fast)
    assert "tier" in codes(report)
    assert number_in(path) == 1


def test_a_save_that_could_not_be_drained_fails_at_once(fast: Path, slow: Path) -> None:
    with pytest.raises(FileNotFoundError):
        ioshape.save(checkpoint(1), slow / "none" / "model.pt", tier=fast)


# ---- Tiers that fail -----------------------------------------------------------------------------


def test_a_tier_that_is_not_there_costs_nothing_but_a_word(
    tmp_path: Path, slow: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "ioshape"):
        report = ioshape.save(checkpoint(1), slow / "model.pt", tier=tmp_path / "none")
    assert codes(report) == ["tier"]
    assert "none" in caplog.text
    assert number_in(slow / "model.pt") == 1
    assert number_of(ioshape.load(slow / "model.pt", tier=tmp_path / "none")) == 1


def test_a_tier_that_vanishes_is_left_out_and_what_was_there_is_not_called_drained(
    fast: Path, slow: Path
) -> None:
    with undrained(fast):
        handle = ioshape.save_async(checkpoint(1), slow / "a.pt", tier=fast)
        handle.wait()
        shutil.move(fast, fast.with_name("elsewhere"))
        report = ioshape.save(checkpoint(2), slow / "b.pt", tier=fast)
        assert codes(report) == ["tier"]
        assert number_in(slow / "b.pt") == 2
        assert not handle.drained()
        with pytest.raises(OSError, match="fast"):
            handle.wait_drained()
        # Another disk at this path works as a tier, but has no copy of the first save.
        fast.mkdir()
        assert ioshape.save(checkpoint(3), slow / "c.pt", tier=fast).tier == str(fast)
        assert not handle.drained()


@pytest.mark.usefixtures("_mounts_of_stripefs")
def test_a_tier_that_returns_eio_costs_no_save(slow: Path) -> None:
    path, other = slow / "a.pt", slow / "b.pt"
    ioshape.save(checkpoint(1), path)
    with striped("ssd", **INSTANT, targets=1) as disk:
        fast = disk.path / "fast"
        fast.mkdir()
        with undrained(fast):
            handle = ioshape.save_async(checkpoint(2, MIB), path, tier=fast)
            handle.wait()
            disk.order("target 0 failing")
            report = ioshape.save(checkpoint(3), other, tier=fast)
            assert (report.tier, codes(report)) == ("", ["tier"])
            assert "Input/output error" in report.downgrades[0]
        with pytest.raises(OSError, match="Input/output error"):
            handle.wait_drained()
        with pytest.warns(ioshape.FallbackWarning):
            assert number_of(ioshape.load(path, tier=fast)) == 1
        assert (number_in(path), number_in(other)) == (1, 3)
        disk.order("target 0 well")
        ioshape.save(checkpoint(4), other, tier=fast, durable="destination")
        assert handle.wait_drained()
    assert (number_in(path), number_in(other)) == (2, 4)


FULL_TIER = """
    import errno, ioshape
    from pathlib import Path
    from checkpoints import Gate, checkpoint, names_in, number_in
    from tiers import undrained

    MIB = 1 << 20
    fast, slow = Path("disk").absolute(), Path("slow").absolute()
    slow.mkdir()
    with undrained(fast):
        reports = [
            ioshape.save(checkpoint(n, 12 * MIB), slow / f"{n}.pt", tier=fast) for n in range(5)
        ]
        # Three fit into 40 MiB. The others do not wait.
        assert [bool(one.tier) for one in reports] == [True] * 3 + [False] * 2, reports
        assert all("drained first" in str(one.downgrades) for one in reports[3:]), reports
        assert names_in(slow) == ["3.pt", "4.pt"]
    # Copies that are drained make room, oldest first.
    assert ioshape.save_async(checkpoint(5, MIB), slow / "5.pt", tier=fast).wait_drained()
    for n in range(3):
        assert number_in(slow / f"{n}.pt") == n
    assert ioshape.save(checkpoint(6, 12 * MIB), slow / "6.pt", tier=fast).tier

    # It fills up between the look and the save: who waits for it saves directly.
    def fill(now):
        if now.phase == "wait" or now.phase == "plan":
            filler = fast / "filler"
            if not filler.exists():
                with filler.open("wb") as file:
                    try:
                        while True:
                            file.write(bytes(64 << 10))
                            file.flush()
                    except OSError:
                        pass

    report = ioshape.save(checkpoint(7, 12 * MIB), slow / "7.pt", tier=fast, progress=fill)
    assert not report.tier and number_in(slow / "7.pt") == 7, report
"""


@pytest.mark.slow
def test_a_full_tier_makes_no_save_fail_nor_wait(tmp_path: Path) -> None:
    run_where_mounted(small_disk("tmpfs", tmp_path), tmp_path, FULL_TIER)


FULL_DESTINATION = """
    import errno, ioshape
    from pathlib import Path
    from checkpoints import checkpoint, number_in, wait_until

    MIB = 1 << 20
    fast, slow = Path("fast").absolute(), Path("disk").absolute()
    fast.mkdir()
    (slow / "filler").write_bytes(bytes(38 * MIB))
    path = slow / "model.pt"
    try:
        ioshape.save(checkpoint(1, 4 * MIB), path, tier=fast, durable="destination")
    except OSError as error:
        assert error.errno == errno.ENOSPC, error
        assert error.report.tier == str(fast)
    else:
        raise AssertionError("it is full")
    assert not path.exists()
    handle = ioshape.save_async(checkpoint(2, 4 * MIB), path, tier=fast)
    handle.wait()
    try:
        handle.wait_drained()
    except OSError as error:
        assert error.errno == errno.ENOSPC, error
    else:
        raise AssertionError("it is full")
    assert not handle.drained()
    (slow / "filler").unlink()
    ioshape.save(checkpoint(3), slow / "other.pt", tier=fast, durable="destination")
    assert handle.wait_drained()
    assert number_in(path) == 2
"""


@pytest.mark.slow
def test_a_full_destination_keeps_the_save_on_the_tier_until_there_is_room(
    tmp_path: Path,
) -> None:
    run_where_mounted(small_disk("tmpfs", tmp_path), tmp_path, FULL_DESTINATION)


# ---- Kills, and the end of the process -----------------------------------------------------------

SAVES = """
    import ioshape, sys
    from pathlib import Path
    from checkpoints import checkpoint

    fast, slow = Path("fast").absolute(), Path("slow").absolute()
"""


def save_another(fast: Path, slow: Path) -> None:
    ioshape.save(checkpoint(3), slow / "c.pt", tier=fast, durable="destination")
    assert number_in(slow / "c.pt") == 3


def load_one(fast: Path, slow: Path) -> None:
    assert number_of(ioshape.load(slow / "b.pt", tier=fast)) == 2


def load_newest(fast: Path, slow: Path) -> None:
    assert number_of(ioshape.load_latest(slow / "*.pt", tier=fast)) == 2


@pytest.mark.parametrize("go_on", [save_another, load_one, load_newest])
def test_what_a_killed_process_left_the_next_one_carries(
    tmp_path: Path, fast: Path, slow: Path, go_on: Callable[[Path, Path], None]
) -> None:
    saves = (
        SAVES
        + """
    ioshape.save(checkpoint(1), slow / "a.pt", tier=fast)
    ioshape.save_async(checkpoint(2), slow / "b.pt", tier=fast).wait()
    print("saved", flush=True)
    sys.stdin.read()
    """
    )
    with undrained(fast):
        with started_program(tmp_path, saves) as program:
            program.expect("saved")
            os.kill(program.pid, signal.SIGKILL)
            program.end(-signal.SIGKILL)
        assert names_in(slow) == []
    go_on(fast, slow)
    wait_until(lambda: {"a.pt", "b.pt"} <= set(names_in(slow)), "they are drained")
    assert [number_in(slow / name) for name in ("a.pt", "b.pt")] == [1, 2]


@pytest.mark.slow
@pytest.mark.parametrize("ends", ["", "sys.exit(3)", "raise ValueError"])
@pytest.mark.usefixtures("fast")
def test_the_end_of_the_process_waits_for_the_drain(tmp_path: Path, slow: Path, ends: str) -> None:
    saves = (
        SAVES
        + f"""
    ioshape.save(checkpoint(1, 8 << 20), slow / "a.pt", tier=fast)
    ioshape.save_async(checkpoint(2, 8 << 20), slow / "b.pt", tier=fast)
    {ends}
    """
    )
    status = {"": 0, "sys.exit(3)": 3}.get(ends, 1)
    run_program(tmp_path, saves, status=status)
    assert number_in(slow / "a.pt") == 1
    assert number_in(slow / "b.pt") == 2


def test_an_interrupted_end_of_the_process_leaves_saves_on_the_tier(
    tmp_path: Path, fast: Path, slow: Path
) -> None:
    saves = (
        SAVES
        + """
    from ioshape._core import under_way
    under_way._interrupted = True
    ioshape.save(checkpoint(1), slow / "a.pt", tier=fast)
    """
    )
    with undrained(fast):
        finished = run_program(tmp_path, saves)
        assert names_in(slow) == []
    assert "1 save waits on the tier" in finished.stderr
    assert f"ioshape drain {fast}" in finished.stderr


def test_an_interrupt_leaves_a_save_that_waits_for_its_drain_on_the_tier(
    tmp_path: Path, fast: Path, slow: Path
) -> None:
    saves = (
        SAVES
        + """
    from ioshape._core import under_way
    under_way._interrupted = True
    ioshape.save(checkpoint(1), slow / "a.pt", tier=fast, durable="destination")
    """
    )
    journal = fast / f"ioshape-{os.geteuid()}" / "journal"
    with undrained(fast):
        with started_program(tmp_path, saves) as program:
            wait_until(lambda: journal.exists() and names_in(journal), "it is kept")
            os.kill(program.pid, signal.SIGINT)
            program.end(-signal.SIGINT)
        assert names_in(slow) == []
    ioshape.save(checkpoint(2), slow / "b.pt", tier=fast, durable="destination")
    assert number_in(slow / "a.pt") == 1


@pytest.mark.slow
def test_the_end_of_the_process_does_not_wait_for_what_cannot_be_drained(
    tmp_path: Path, fast: Path, slow: Path
) -> None:
    saves = (
        SAVES
        + """
    ioshape.save(checkpoint(1), slow / "a.pt", tier=fast)
    """
    )
    with undrained(fast) as lock, started_program(tmp_path, saves) as program:
        wait_until(canonical(fast, slow / "a.pt").exists, "it is saved")
        slow.rmdir()
        slow.touch()  # the destination's directory is a file now
        lock.close()
        finished = program.end()
    assert "1 save waits on the tier" in finished.stderr


# ---- Forks ---------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.usefixtures("fast")
def test_a_forked_child_leaves_the_drain_to_its_parent_and_has_its_own(
    tmp_path: Path, slow: Path
) -> None:
    saves = (
        SAVES
        + """
    import os, threading
    from tiers import undrained

    with undrained(fast):
        handle = ioshape.save_async(checkpoint(1), slow / "a.pt", tier=fast)
        handle.wait()
        child = os.fork()
        if not child:
            assert threading.active_count() == 1
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    child = os.fork()
    if not child:
        assert ioshape.save(
            checkpoint(2), slow / "b.pt", tier=fast, durable="destination"
        ).tier
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert handle.wait_drained()
    """
    )
    run_program(tmp_path, saves)
    assert number_in(slow / "a.pt") == 1
    assert number_in(slow / "b.pt") == 2


# ---- Loads ---------------------------------------------------------------------------------------


def damage(place: Path) -> None:
    """Overwrite bytes in the middle, where the tensor's data is. The modification time stays."""
    before = place.stat()
    with place.open("r+b") as file:
        file.seek(before.st_size // 2)
        file.write(b"damaged")
    os.utime(place, ns=(before.st_atime_ns, before.st_mtime_ns))


WAYS: dict[str, Callable[[Path, Path], object]] = {
    "load": lambda path, tier: number_of(ioshape.load(path, tier=tier)),
    "load mapped": lambda path, tier: number_of(ioshape.load(path, tier=tier, mmap=True)),
    "load_latest": lambda path, tier: number_of(
        ioshape.load_latest(path.with_name("*.pt"), tier=tier)
    ),
    "verify": lambda path, tier: ioshape.verify(path, tier=tier),
}


@pytest.mark.parametrize("way", WAYS)
def test_what_is_only_on_the_tier_is_found(fast: Path, slow: Path, way: str) -> None:
    path = slow / "model.pt"
    with undrained(fast):
        ioshape.save(checkpoint(1), path, tier=fast)
        WAYS[way](path, fast)
        with pytest.raises(FileNotFoundError):
            WAYS[way](path, fast.parent)


def test_inspect_and_open_go_by_the_setting(fast: Path, slow: Path) -> None:
    path = slow / "model.pt"
    ioshape.configure(tier=fast)
    with undrained(fast):
        ioshape.save(checkpoint(1), path)
        assert [tensor.name for tensor in ioshape.inspect(path).tensors] == ["data"]
        with ioshape.open(path) as file:
            assert "data" in file
        ioshape.patch()
        try:
            assert number_of(torch.load(path)) == 1
        finally:
            ioshape.unpatch()


@pytest.mark.parametrize("options", [{}, {"verify": "first"}, {"only": ["*"]}, {"into": True}])
def test_a_damaged_copy_is_passed_over_and_named(
    fast: Path, slow: Path, options: dict[str, Any]
) -> None:
    path = slow / "model.pt"
    ioshape.save(checkpoint(1), path)
    with undrained(fast):
        ioshape.save(checkpoint(2), path, tier=fast)
        place = canonical(fast, path)
        damage(place)
        if "into" in options:
            options = {"into": {"number": 0, "data": torch.zeros(MIB, dtype=torch.uint8)}}
        with pytest.warns(ioshape.FallbackWarning, match="damaged") as caught:
            loaded = ioshape.load(path, tier=fast, **options)
        assert number_of(loaded) == 1
        [warning] = caught
        assert isinstance(warning.message, ioshape.FallbackWarning)
        assert warning.message.path == str(path)
        assert [one.path for one in warning.message.passed_over] == [str(place)]
        assert warning.filename == __file__
        with pytest.warns(ioshape.FallbackWarning, match="damaged"):
            assert number_of(ioshape.load_latest(path, tier=fast)) == 1


def test_a_damaged_copy_without_a_destination_is_what_the_load_fails_with(
    fast: Path, slow: Path
) -> None:
    path = slow / "model.pt"
    with undrained(fast):
        ioshape.save(checkpoint(1), path, tier=fast)
        damage(canonical(fast, path))
        with pytest.raises(ioshape.DamagedError, match="ioshape-"):
            ioshape.load(path, tier=fast)


def test_the_newest_is_found_wherever_it_lies(fast: Path, slow: Path) -> None:
    with undrained(fast):
        for number in range(4):
            tier = str(fast) if number % 2 else ""
            ioshape.save(checkpoint(number), slow / f"step-{number}.pt", tier=tier)
        pattern = os.path.relpath(slow / "step-*.pt")
        assert number_of(ioshape.load_latest(pattern, tier=fast)) == 3
        canonical(fast, slow / "step-3.pt").unlink()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert number_of(ioshape.load_latest(pattern, tier=fast)) == 2
        damage(slow / "step-2.pt")
        with pytest.warns(ioshape.FallbackWarning):
            assert number_of(ioshape.load_latest(pattern, tier=fast)) == 1


# ---- Unmodified scripts --------------------------------------------------------------------------


@pytest.mark.slow
def test_a_script_below_run_saves_on_the_tier_and_finds_what_it_saved(
    tmp_path: Path, fast: Path, slow: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        """
import torch
torch.save({"step": 1, "w": torch.ones(1 << 20)}, "slow/model.pt")
assert torch.load("slow/model.pt")["step"] == 1
"""
    )
    runs = """
    import subprocess, sys
    run = [sys.executable, "-m", "ioshape", "run", "--tier", "fast", "script.py"]
    sys.exit(subprocess.call(run))
    """
    run_program(tmp_path, runs)
    assert torch.load(slow / "model.pt")["step"] == 1
    assert canonical(fast, slow / "model.pt").exists()


def test_threads_that_ask_at_the_same_time_keep_a_save_once(fast: Path, slow: Path) -> None:
    with undrained(fast):
        for number in range(10):
            handle = ioshape.save_async(checkpoint(number), slow / f"{number}.pt", tier=fast)
            threads = [threading.Thread(target=handle.wait) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        journal = names_in(fast / f"ioshape-{os.geteuid()}" / "journal")
        assert len(journal) == 10
    assert handle.wait_drained()
