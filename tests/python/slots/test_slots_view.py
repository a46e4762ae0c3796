# SPDX-License-Identifier: Apache-2.0
"""Slots as Python programs take and see them."""

import dataclasses
import gc
import json
import logging
import os
import pickle
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ioshape
import pytest
from checkpoints import checkpoint, left_clean, number_in
from coordinators import Writer, await_true, coordinator, node, running_redis, writers
from ioshape._core import config
from ioshape._core.report import Report
from ioshape._core.structs import sized
from ioshape._native import ffi
from ioshape._save.handle import report_of
from ioshape._slots.pools import Operator
from processes import run_program, started_program

SECRET = "tr0ub4dor"


@pytest.fixture(autouse=True)
def _left_clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for setting in config.SETTINGS.values():
        monkeypatch.delenv(setting.variable, raising=False)
    monkeypatch.delenv("IOSHAPE_PASSWORD", raising=False)
    with left_clean():
        yield
        monkeypatch.undo()


@pytest.fixture(params=["local", "redis"])
def address(request: pytest.FixtureRequest) -> Iterator[str]:
    """Yield the address of a coordinator that admits one writer at a time."""
    with coordinator(request.param) as value:
        ioshape.configure(coordinator=value, job="mine", slots=1)
        yield value
        ioshape.configure(coordinator="open")  # a new context drops the old connection


@pytest.fixture
def another(address: str) -> Iterator[Callable[..., Writer]]:
    """Yield a function that starts other writers in the pool "shared"."""
    with writers() as make:

        def made(job: str, rank: int = 0, **asked: Any) -> Writer:
            asked = {"pool": "shared", **asked}
            return make(address, json.dumps(asked), job=job, rank=rank, IOSHAPE_SLOTS="1")

        yield made


def kind_of(address: str) -> str:
    return "local" if address.startswith("local") else "redis"


# ---- Slots ---------------------------------------------------------------------------------------


@pytest.mark.wording
@pytest.mark.usefixtures("address")
def test_a_wait_in_vain_names_the_pool() -> None:
    with ioshape.slot(pool="shared"), pytest.raises(TimeoutError, match="shared"):
        ioshape.slot(pool="shared", timeout=0.2)


def test_a_slot_is_held_until_its_block_ends(address: str) -> None:
    with ioshape.slot(pool="shared", nbytes=1000) as slot:
        slot.pace(400)
        slot.pace(600)
        info = slot.info
        assert (info.pool, info.coordinator, info.capacity) == ("shared", kind_of(address), 1)
        assert (info.position, info.ahead, info.lost) == (0, "", False)
        assert info.fence > 0
        assert repr(slot) == f"<ioshape.types.Slot of shared ({kind_of(address)}): held>"
        with pytest.raises(TimeoutError):
            ioshape.slot(pool="shared", timeout=0.2)
    assert repr(slot).endswith("released>")
    with ioshape.slot(pool="shared", timeout=5) as second:
        assert second.info.fence > info.fence


@pytest.mark.usefixtures("address")
def test_a_released_slot_is_of_no_use_any_more() -> None:
    slot = ioshape.slot(pool="shared")
    slot.release()
    slot.release()
    assert slot.released
    assert not slot.lost
    assert slot.info.pool == "shared"
    with pytest.raises(ValueError, match="released"):
        slot.pace(1)


def pace_for_long(slot: ioshape.types.Slot) -> None:
    for _ in range(100):
        slot.pace(1_000_000)


@pytest.mark.usefixtures("address")
def test_ctrl_c_ends_waiting_for_bandwidth_and_the_slot_is_given_back() -> None:
    ioshape.configure(rate=100_000)
    asked = threading.Timer(0.7, lambda: os.kill(os.getpid(), signal.SIGINT))
    begin = time.monotonic()
    asked.start()
    with pytest.raises(KeyboardInterrupt), ioshape.slot(pool="shared") as slot:
        pace_for_long(slot)  # a quarter of an hour
    assert time.monotonic() - begin < 120
    assert slot.released


@pytest.mark.usefixtures("address")
def test_waiting_for_bandwidth_keeps_no_other_thread_from_looking_or_releasing() -> None:
    ioshape.configure(rate=100_000)
    slot = ioshape.slot(pool="shared")
    ended: list[BaseException] = []

    def pace() -> None:
        try:
            pace_for_long(slot)
        except ValueError as error:
            ended.append(error)

    thread = threading.Thread(target=pace)
    thread.start()
    time.sleep(1)
    assert not slot.lost
    assert thread.is_alive()  # the thread still waits, and slot.lost did not wait for it
    slot.release()
    thread.join(60)
    assert "released" in str(ended[0])


@pytest.mark.usefixtures("address")
def test_a_slot_that_nobody_refers_to_is_given_back() -> None:
    slot = ioshape.slot(pool="shared")
    del slot
    gc.collect()
    ioshape.slot(pool="shared", timeout=5).release()


@pytest.mark.slow
def test_a_save_that_waits_for_long_says_so(
    address: str, another: Callable[..., Writer], tmp_path: Path
) -> None:
    """Check programs without a callback and without logging."""
    holder = another("theirs", rank=7)
    assert holder.hear() == "holds"
    program = "import ioshape, torch; ioshape.save({'w': torch.ones(1 << 24)}, 'model.pt')"
    variables = {"IOSHAPE_COORDINATOR": address, "IOSHAPE_POOL": "shared", "IOSHAPE_SLOTS": "1"}
    with started_program(tmp_path, program, variables=variables) as waiting:
        await_true(lambda: "\n" in waiting.errors(), "a line on stderr")
        said = waiting.errors()
        assert "model.pt" in said, said
        assert f"job theirs, rank 7 on {node()}" in said
        holder.tell("release")
        assert waiting.end().stderr == said


def test_an_exception_in_the_callback_gives_up(
    address: str, another: Callable[..., Writer]
) -> None:
    holder = another("theirs", rank=7)
    assert holder.hear() == "holds"
    places: list[ioshape.types.Place] = []

    def impatient(place: ioshape.types.Place) -> None:
        places.append(place)
        raise LookupError("enough")

    with pytest.raises(LookupError, match="enough"):
        ioshape.slot(pool="shared", progress=impatient)
    (place,) = places
    assert (place.position, place.pool, place.coordinator) == (0, "shared", kind_of(address))
    assert (place.ahead, place.capacity) == (f"job theirs, rank 7 on {node()}", 1)
    assert Operator(address).status("shared").waiter_count == 0


def test_ctrl_c_ends_the_waiting(address: str, another: Callable[..., Writer]) -> None:
    holder = another("theirs")
    assert holder.hear() == "holds"
    timer = threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        ioshape.slot(pool="shared")
    assert Operator(address).status("shared").waiter_count == 0


def test_other_threads_go_on_while_one_waits(address: str, another: Callable[..., Writer]) -> None:
    holder = another("theirs")
    assert holder.hear() == "holds"
    waiting = threading.Thread(target=lambda: ioshape.slot(pool="shared").release())
    waiting.start()
    await_true(lambda: Operator(address).status("shared").waiter_count == 1, "one that waits")
    holder.tell("release")
    waiting.join(30)
    assert not waiting.is_alive()


@pytest.mark.parametrize("address", ["redis"], indirect=True)
@pytest.mark.slow
def test_a_kicked_slot_is_lost_and_its_owner_can_see_it(address: str) -> None:
    operator = Operator(address)
    with ioshape.slot(pool="shared") as slot:
        (holder,) = operator.status("shared").holders
        assert not slot.lost
        operator.kick("shared", holder.id)
        await_true(lambda: slot.lost, "the loss")
        assert slot.info.note
        slot.pace(100)  # a lost slot may still be used
    assert operator.status("shared").used == 0


@pytest.mark.slow
def test_in_a_forked_child_a_slot_is_the_parents(tmp_path: Path, address: str) -> None:
    run_program(
        tmp_path,
        """
        import os, sys, ioshape
        os.environ["IOSHAPE_COORDINATOR"] = sys.argv[1]
        ioshape.configure(slots=1)
        slot = ioshape.slot(pool="shared")
        child = os.fork()
        if child == 0:
            try:
                slot.pace(1)
            except PermissionError:
                del slot
                os._exit(7)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert not slot.lost
        try:
            ioshape.slot(pool="shared", timeout=0.2)
        except TimeoutError:
            print("still held")
        slot.release()
        """,
        address,
    )


@pytest.mark.parametrize(
    "arguments", [{"weight": -1}, {"nbytes": -1}, {"pool": "a\nb"}, {"path": "a\0b"}, {"pool": ""}]
)
def test_arguments_that_make_no_sense_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises((ValueError, OverflowError, OSError)):
        ioshape.slot(**arguments)


def test_pools_are_named_after_filesystems(tmp_path: Path) -> None:
    assert ioshape.probe(tmp_path / "model.pt").pool == ioshape.probe(tmp_path).pool != ""
    with pytest.raises(FileNotFoundError):
        ioshape.probe(tmp_path / "no such folder" / "model.pt")
    ioshape.configure(pool="named")
    assert ioshape.probe(tmp_path).pool == "named"


# ---- Saves ---------------------------------------------------------------------------------------


def turn_of(caplog: pytest.LogCaptureFixture) -> str:
    """Return how the log describes the slot of the newest save."""
    lines = [one.getMessage() for one in caplog.records if ", slot " in one.getMessage()]
    return re.sub(r".*, slot [1-9][0-9]* (.*), write .*", r"\1", lines[-1])


def test_a_save_tells_how_it_came_by_its_slot(
    tmp_path: Path,
    address: str,
    another: Callable[..., Writer],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG, logger="ioshape")
    ioshape.configure(pool="shared")
    alone = ioshape.save(checkpoint(1), tmp_path / "model.pt")
    assert (alone.coordinator, alone.ahead) == (kind_of(address), "")
    assert turn_of(caplog) == "of pool shared, capacity 1"
    holder = another("theirs", rank=3, weight=1)
    assert holder.hear() == "holds"
    # Saves up to 16 MiB may pass the queue.
    handle = ioshape.save_async(checkpoint(2, 20 << 20), tmp_path / "model.pt")
    await_true(lambda: handle.progress.phase == "wait", "waiting")
    await_true(lambda: handle.progress.waited_s > 0, "the time it waits")
    progress = handle.progress
    assert (progress.position, progress.ahead) == (0, f"job theirs, rank 3 on {node()}")
    assert number_in(tmp_path / "model.pt") == 1
    holder.tell("release")
    report = handle.result(timeout=60)
    assert report.slot_s >= progress.waited_s
    assert report.ahead == progress.ahead
    assert number_in(tmp_path / "model.pt") == 2
    assert pickle.loads(pickle.dumps(report)) == report


@pytest.mark.parametrize("background", [True, False])
def test_progress_callbacks_are_told_the_place(
    tmp_path: Path, another: Callable[..., Writer], background: bool
) -> None:
    ioshape.configure(pool="shared")
    holder = another("theirs", rank=3)
    assert holder.hear() == "holds"
    seen: list[ioshape.types.Progress] = []

    def told(progress: ioshape.types.Progress) -> None:
        seen.append(progress)
        if sum(one.phase == "wait" for one in seen) == 3:
            holder.tell("release")

    state = checkpoint(1, 20 << 20)
    if background:
        ioshape.save_async(state, tmp_path / "model.pt", progress=told).result(60)
    else:
        ioshape.save(state, tmp_path / "model.pt", progress=told)
    waiting = [one for one in seen if one.phase == "wait" and one.waited_s > 0]
    assert {(one.position, one.ahead) for one in waiting} == {
        (0, f"job theirs, rank 3 on {node()}")
    }
    times = [one.waited_s for one in waiting]
    assert times == sorted(times)
    # No other phase waits.
    others = [one for one in seen if one.phase != "wait"]
    assert {(one.position, one.ahead, one.waited_s) for one in others} == {(0, "", 0.0)}
    phases = [one.phase for one in seen]
    assert phases.index("wait") < phases.index("write")


def test_the_end_of_the_program_says_whom_it_waits_for(
    tmp_path: Path, address: str, another: Callable[..., Writer]
) -> None:
    holder = another("theirs", rank=3)
    assert holder.hear() == "holds"
    with started_program(
        tmp_path,
        """
        import os, sys, torch, ioshape
        os.environ["IOSHAPE_COORDINATOR"] = sys.argv[1]
        ioshape.configure(pool="shared", slots=1)
        ioshape.save_async({"w": torch.ones(20 << 18)}, "model.pt")
        print("begun", flush=True)
        """,
        address,
    ) as program:
        program.expect("begun")
        await_true(lambda: "finishing before" in program.errors(), "the line")
        assert f"model.pt (wait 0 % behind job theirs, rank 3 on {node()})" in program.errors()
        holder.tell("release")
        program.end()
    assert (tmp_path / "model.pt").exists()


@pytest.mark.parametrize("new_format", [True, False], ids=["ours", "torch's own writer"])
def test_ctrl_c_ends_a_save_that_waits(
    tmp_path: Path, address: str, another: Callable[..., Writer], new_format: bool
) -> None:
    ioshape.configure(pool="shared")
    ioshape.save(checkpoint(1), tmp_path / "model.pt")
    holder = another("theirs")
    assert holder.hear() == "holds"
    threading.Timer(0.7, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        ioshape.save(
            checkpoint(2, 20 << 20),
            tmp_path / "model.pt",
            _use_new_zipfile_serialization=new_format,
        )
    assert number_in(tmp_path / "model.pt") == 1
    await_true(lambda: Operator(address).status("shared").waiter_count == 0, "an empty queue")


@pytest.mark.slow
def test_a_coordinator_that_is_away_fails_no_save_unless_told_to(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    away = f"unix://{tmp_path}/nobody.sock"
    ioshape.configure(coordinator=away)
    report = ioshape.save(checkpoint(1), path)
    assert report.coordinator == "stagger"
    assert report.downgrades
    assert number_in(path) == 1
    ioshape.configure(unreachable="fail")
    with pytest.raises(ioshape.errors.CoordinatorError) as caught:
        ioshape.save(checkpoint(2), path)
    assert isinstance(caught.value, ConnectionError)
    assert isinstance(caught.value, ioshape.StorageError)
    assert number_in(path) == 1
    with pytest.raises(ioshape.errors.CoordinatorError):
        ioshape.slot(path)


@pytest.mark.wording
def test_reports_are_told_in_one_line() -> None:
    base: dict[str, Any] = {"path": "model.pt", "written_by": "ioshape", "slot_s": 1.204}
    ahead = "job 4711, rank 7 on n03"
    waited = Report(**base, ahead=ahead, coordinator="redis", pickle_s=0.5, file_bytes=1234567)
    assert str(waited) == (
        "model.pt: 1,234,567 bytes in 0.000 s, slot 1.204 (behind job 4711, rank 7 on n03; redis), "
        "pickle 0.500"
    )
    assert "slot" not in str(Report(path="model.pt", written_by="ioshape", coordinator="local"))


# ---- Secrets -------------------------------------------------------------------------------------

# Addresses as documented, and addresses with mistakes.
VALID = [
    f"redis://user:{SECRET}@host:6379/0",
    f"redis://:{SECRET}@host",
    f"sentinel://user:{SECRET}@one:1,two/service/0",
    f"redis://:{SECRET}%40@host",
]
ADDRESSES = [
    *VALID,
    f"rediss://user:{SECRET}@one:1,two:2/3",
    f"redis://user:{SECRET}@with:{SECRET}@signs/{SECRET}@host",
]


@pytest.mark.parametrize("address", VALID)
def test_settings_show_no_password(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    ioshape.configure(coordinator=address)
    shown, _ = ioshape.settings()["coordinator"]
    assert SECRET not in shown
    assert "***@" in shown
    assert config.value_of("coordinator") == address
    ioshape.configure(coordinator="local")
    monkeypatch.setenv("IOSHAPE_COORDINATOR", address)
    assert SECRET not in repr(ioshape.settings())
    monkeypatch.setenv("IOSHAPE_PASSWORD", SECRET)
    assert SECRET not in repr(ioshape.settings())


@pytest.mark.parametrize("address", ADDRESSES)
@pytest.mark.parametrize("spoil", ["x{}", "{}\n", " {}"])
def test_errors_show_no_password(monkeypatch: pytest.MonkeyPatch, address: str, spoil: str) -> None:
    bad = spoil.format(address)
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - its words are looked at below
        ioshape.configure(coordinator=bad)
    assert SECRET not in str(caught.value)
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None or caught.value.__suppress_context__
    monkeypatch.setenv("IOSHAPE_COORDINATOR", bad)
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        ioshape.configure()
    assert SECRET not in str(caught.value)


def test_addresses_without_a_password_are_shown_as_they_are() -> None:
    for address in (
        "redis://host:6379/0",
        "redis://user@host:6379",
        "redis://one:1,two:2,[::1]:3/0",
        "unix:///run/redis.sock?db=3",
        "local:/dev/shm/mine",
        "sentinel://one:26379,two:26379/service",
    ):
        assert config.without_password(address) == address


@pytest.mark.slow
def test_the_password_may_lie_in_a_file_or_a_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "password"
    file.write_text(f"{SECRET}\n")
    file.chmod(0o600)
    with running_redis(password=SECRET) as redis:
        ioshape.configure(coordinator=redis.address, unreachable="fail")
        with pytest.raises(ioshape.errors.CoordinatorError):
            ioshape.slot(pool="shared")
        ioshape.configure(password_file=file)
        with ioshape.slot(pool="shared") as slot:
            assert slot.info.coordinator == "redis"
        ioshape.configure(password_file=tmp_path / "none", coordinator=redis.address)
        with pytest.raises(ioshape.errors.CoordinatorError):
            ioshape.slot(pool="shared")
        config.given.pop("password_file")
        monkeypatch.setenv("IOSHAPE_PASSWORD", SECRET)
        ioshape.configure()
        ioshape.slot(pool="shared").release()


def test_fields_that_a_report_had_are_empty_and_name_their_new_place() -> None:
    report = Report(path="a", written_by="ioshape")
    with pytest.warns(FutureWarning, match=r"Report\.request_s is 0, .*: file_bytes and write_s"):
        assert report.request_s == 0  # type: ignore[attr-defined]
    with pytest.warns(FutureWarning, match=r"Report\.pool is '', .*: ioshape\.probe\(path\)\.pool"):
        assert report.pool == ""  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match="speed"):
        _ = report.speed  # type: ignore[attr-defined]
    assert pickle.loads(pickle.dumps(report)) == report


def test_a_report_takes_all_of_its_numbers_from_the_struct() -> None:
    """Check all fields by their C types, whatever the annotations: none may stay at its default."""
    struct = sized("ioshape_report")
    for name, member in ffi.typeof(struct).item.fields:
        if member.type.kind == "primitive" and name not in ("size", "downgrade_count"):
            setattr(struct, name, 1)
        elif member.type.kind == "array" and member.type.item.cname == "char":
            getattr(struct, name)[0:1] = b"x"
    report = report_of("a", struct)
    own = {"path", "written_by", "pickle_s", "hook_s", "downgrades"}
    own |= {"skipped", "tier", "drain_s", "alarms"}
    assert report.alarms == ("nonfinite",)
    for field in dataclasses.fields(report):
        if field.name not in own:
            value = getattr(report, field.name)
            assert value in (1, "x"), (field.name, value)
            assert type(value).__name__ == field.type, field.name
