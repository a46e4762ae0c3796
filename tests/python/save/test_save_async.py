# SPDX-License-Identifier: Apache-2.0
"""save_async: what the caller may do right after the call, and what the handle reports."""

import asyncio
import errno
import gc
import inspect
import os
import pickle
import struct
import sys
import textwrap
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ioshape
import pytest
import torch
from checkpoints import (
    LONGEST_WAIT_S,
    Gate,
    checkpoint,
    left_clean,
    names_in,
    number_in,
    wait_until,
)
from ioshape._core import config, context
from processes import run_program
from torch.serialization import skip_data

MIB = 1 << 20
POSITIONAL = inspect.Parameter.POSITIONAL_OR_KEYWORD


@pytest.fixture(autouse=True)
def _left_clean() -> Iterator[None]:
    with left_clean():
        yield


@pytest.fixture
def gate() -> Iterator[Gate]:
    """Yield a gate that opens in the end, so that a failed test leaves no save in flight."""
    held = Gate()
    yield held
    held.open()


# ---- The object may change -----------------------------------------------------------------------


@pytest.mark.parametrize("n_bytes", [100, MIB, 40 * MIB])
def test_the_object_may_change_when_the_call_returns(
    tmp_path: Path, gate: Gate, n_bytes: int
) -> None:
    path = tmp_path / "model.pt"
    data = torch.full((n_bytes,), 1, dtype=torch.uint8)
    state: dict[str, Any] = {"data": data, "view": data[n_bytes // 2 :], "list": [1, 2]}
    handle = ioshape.save_async(state, path, progress=gate)
    gate.await_save()  # the file has no byte yet
    data.fill_(2)
    state["list"].append(3)
    state["data"] = None
    gate.open()
    handle.wait()
    loaded = torch.load(path)
    assert bool((loaded["data"] == 1).all())
    assert loaded["view"].data_ptr() == loaded["data"].data_ptr() + n_bytes // 2
    assert loaded["list"] == [1, 2]


def test_the_memory_may_go_when_the_call_returns(tmp_path: Path, gate: Gate) -> None:
    """Check large tensors, which are memory maps: later reads would raise SIGSEGV."""
    state = checkpoint(7, 40 * MIB)
    handle = ioshape.save_async(state, tmp_path / "model.pt", progress=gate)
    gate.await_save()
    del state
    gc.collect()
    gate.open()
    handle.wait()
    assert number_in(tmp_path / "model.pt") == 7


# ---- Several saves -------------------------------------------------------------------------------


def test_several_are_in_flight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IOSHAPE_SLOTS", "5")
    config.reset()  # the next call opens a new context
    gates = [Gate() for _ in range(5)]
    handles = [
        ioshape.save_async(checkpoint(i), tmp_path / f"{i}.pt", progress=gate)
        for i, gate in enumerate(gates)
    ]
    for gate in gates:
        gate.await_save()  # all saves are in flight together
    assert not any(handle.done() for handle in handles)
    for i in reversed(range(5)):
        gates[i].open()
        handles[i].wait()
        assert number_in(tmp_path / f"{i}.pt") == i
    assert names_in(tmp_path) == [f"{i}.pt" for i in range(5)]


Save = Callable[[dict[str, Any], Path], object]


def _by_torch(state: dict[str, Any], path: Path) -> object:
    return ioshape.save(state, path, _use_new_zipfile_serialization=False)


@pytest.mark.parametrize("save", [ioshape.save, _by_torch], ids=["save", "written by torch"])
def test_a_blocking_save_comes_after_those_in_the_background(
    tmp_path: Path, gate: Gate, save: Save
) -> None:
    path = tmp_path / "model.pt"
    ioshape.save_async(checkpoint(1, 8 * MIB), path, progress=gate)
    gate.await_save()
    thread = threading.Thread(target=save, args=(checkpoint(2), path))
    thread.start()
    thread.join(0.2)
    assert thread.is_alive()
    gate.open()
    thread.join(LONGEST_WAIT_S)
    ioshape.wait_all()
    assert number_in(path) == 2


@pytest.mark.parametrize("save", [ioshape.save, _by_torch], ids=["save", "written by torch"])
def test_order_is_kept_when_settings_change(tmp_path: Path, gate: Gate, save: Save) -> None:
    path = tmp_path / "model.pt"
    first = ioshape.save_async(checkpoint(1, 8 * MIB), path, progress=gate)
    gate.await_save()
    ioshape.configure(engine="threads")
    thread = threading.Thread(target=save, args=(checkpoint(2), path))
    thread.start()
    thread.join(0.3)
    gate.open()
    thread.join(LONGEST_WAIT_S)
    first.wait()
    assert number_in(path) == 2, "the older checkpoint has replaced the newer"


def test_all_are_waited_for(tmp_path: Path, gate: Gate) -> None:
    handles = [
        ioshape.save_async(checkpoint(i), tmp_path / f"{i}.pt", progress=gate) for i in range(3)
    ]
    assert not ioshape.wait_all(0)
    assert not ioshape.wait_all(0.05)
    gate.open()
    assert ioshape.wait_all()
    assert all(handle.done() for handle in handles)
    assert ioshape.wait_all(0)  # no save is left


@pytest.mark.slow
def test_threads_save_at_once(tmp_path: Path) -> None:
    failures: list[BaseException] = []

    def work(thread: int) -> None:
        try:
            for i in range(6):
                state = checkpoint(100 * thread + i, 2 * MIB + 4097 * thread)
                handle = ioshape.save_async(state, tmp_path / f"{thread}.pt")
                shared = ioshape.save_async(state, tmp_path / "shared.pt")
                state["data"].fill_(255)
                if i % 2:
                    handle.wait()
                    assert shared.result().path == str(tmp_path / "shared.pt")
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ioshape.wait_all(LONGEST_WAIT_S)
    assert failures == []
    assert [number_in(tmp_path / f"{i}.pt") for i in range(8)] == [100 * i + 5 for i in range(8)]
    number_in(tmp_path / "shared.pt")
    assert len(names_in(tmp_path)) == 9


def test_a_dropped_handle_drops_no_save(tmp_path: Path, gate: Gate) -> None:
    path = tmp_path / "model.pt"
    ioshape.save_async(checkpoint(3), path, progress=gate)
    gate.await_save()
    gc.collect()
    gate.open()
    wait_until(path.exists, "the file of a save whose handle went")
    assert number_in(path) == 3


# ---- The handle ----------------------------------------------------------------------------------


def test_the_handle_tells_how_far_the_save_is(tmp_path: Path, gate: Gate) -> None:
    path = tmp_path / "model.pt"
    handle = ioshape.save_async(checkpoint(1, MIB), path, progress=gate)
    gate.await_save()
    assert not handle.done()
    assert not handle.wait(0)
    assert not handle.wait(-1)
    begin = time.monotonic()
    assert not handle.wait(0.12)
    assert time.monotonic() - begin >= 0.12
    for ask in (handle.result, handle.exception):
        with pytest.raises(TimeoutError, match=r"still under way after 0\.01 s") as caught:
            ask(0.01)
        assert str(path) in str(caught.value)
    assert handle.report is None
    assert handle.path == str(path)
    assert handle.progress.phase == "plan"
    assert handle.progress.total_bytes >= MIB
    assert handle.progress.done_bytes == 0
    assert repr(handle) == f"<ioshape.SaveHandle {str(path)!r}: under way>"

    gate.open()
    assert handle.wait()
    assert handle.wait(0)
    assert handle.done()
    assert handle.exception() is None
    assert repr(handle) == f"<ioshape.SaveHandle {str(path)!r}: done>"
    assert handle.progress.phase == "done"
    assert handle.progress.done_bytes == handle.progress.total_bytes >= MIB
    report = handle.result()
    assert handle.report is report
    assert report.path == str(path)
    assert report.file_bytes == path.stat().st_size
    assert report.written_by == "ioshape"
    assert report.engine
    assert report.stage_s > 0
    assert report.pickle_s > 0
    assert report.total_s >= report.stage_s + report.pickle_s
    assert not handle.cancel()  # too late
    assert number_in(path) == 1


def test_the_report_comes_without_waiting(tmp_path: Path) -> None:
    handle = ioshape.save_async(checkpoint(1), tmp_path / "model.pt")
    wait_until(handle.done, "the save")
    assert handle.report is not None
    assert handle.report.file_bytes == (tmp_path / "model.pt").stat().st_size


def test_a_failed_save_says_so(tmp_path: Path) -> None:
    path = tmp_path / "missing" / "model.pt"
    handle = ioshape.save_async(checkpoint(1), path)
    wait_until(handle.done, "the failure")
    assert repr(handle) == f"<ioshape.SaveHandle {str(path)!r}: failed>"
    assert handle.report is not None
    error = handle.exception()
    assert isinstance(error, FileNotFoundError)
    assert isinstance(error, ioshape.StorageError)
    assert error.report is handle.report
    for ask in (handle.wait, handle.result):
        with pytest.raises(FileNotFoundError) as caught:
            ask()
        assert caught.value is error
    assert handle.cancel()  # there is no file, and there will be none


def test_a_save_can_be_canceled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.pt"
    ioshape.save(checkpoint(1), path)
    monkeypatch.setitem(context.test_options, "block_bytes", 64 << 10)
    ioshape.configure(engine="buffered")
    slow = Gate("plan", then_s=0.01)  # ten seconds, unless the save is stopped
    handle = ioshape.save_async(checkpoint(2, 64 * MIB), path, progress=slow)
    slow.open()
    assert handle.cancel()
    assert handle.done()
    assert number_in(path) == 1
    assert names_in(tmp_path) == ["model.pt"]
    with pytest.raises(ioshape.errors.CanceledError) as caught:
        handle.wait()
    assert caught.value.filename == str(path)
    assert caught.value.errno == errno.ECANCELED
    assert "failed" in repr(handle)
    assert handle.cancel()  # the second call has no effect
    ioshape.save(checkpoint(3), path)  # does not raise the cancellation, which the caller knows of
    assert number_in(path) == 3


def test_handles_stay_in_their_process(tmp_path: Path, gate: Gate) -> None:
    handle = ioshape.save_async(checkpoint(1), tmp_path / "model.pt", progress=gate)
    with pytest.raises(TypeError):
        pickle.dumps(handle)


# ---- Callbacks -----------------------------------------------------------------------------------


def test_callbacks_are_called_once_after_the_end(tmp_path: Path, gate: Gate) -> None:
    calls: list[tuple[str, ioshape.SaveHandle, bool]] = []
    handle = ioshape.save_async(checkpoint(1), tmp_path / "model.pt", progress=gate)
    handle.add_done_callback(lambda ended: calls.append(("before", ended, ended.done())))
    gate.await_save()
    time.sleep(0.05)
    assert calls == []
    gate.open()
    wait_until(lambda: calls, "the callback, though nobody asks the handle")
    handle.wait()
    handle.add_done_callback(lambda ended: calls.append(("after", ended, ended.done())))
    assert calls == [("before", handle, True), ("after", handle, True)]


@pytest.fixture
def hooked(monkeypatch: pytest.MonkeyPatch) -> list[BaseException]:
    """Collect the exceptions that reach sys.excepthook."""
    arrived: list[BaseException] = []
    monkeypatch.setattr(sys, "excepthook", lambda _kind, error, _traceback: arrived.append(error))
    return arrived


def _fail(_handle: ioshape.SaveHandle) -> None:
    raise ValueError("a callback's own mistake")


def test_exceptions_of_callbacks_harm_nobody(
    tmp_path: Path, gate: Gate, hooked: list[BaseException]
) -> None:
    called = threading.Event()
    handle = ioshape.save_async(checkpoint(1), tmp_path / "model.pt", progress=gate)
    handle.add_done_callback(_fail)
    handle.add_done_callback(lambda _: called.set())
    gate.open()
    handle.wait()
    assert called.wait(LONGEST_WAIT_S), "the second callback was not called"
    assert [str(error) for error in hooked] == ["a callback's own mistake"]
    handle.add_done_callback(_fail)  # after the end of the save, too
    assert len(hooked) == 2
    assert handle.exception() is None
    assert number_in(tmp_path / "model.pt") == 1


def test_callbacks_are_told_of_failures(tmp_path: Path) -> None:
    seen: list[BaseException | None] = []
    handle = ioshape.save_async(checkpoint(1), tmp_path / "missing" / "model.pt")
    handle.add_done_callback(lambda ended: seen.append(ended.exception()))
    wait_until(lambda: seen, "the callback")
    assert isinstance(seen[0], FileNotFoundError)


def test_callbacks_may_save(tmp_path: Path) -> None:
    """Check a callback that saves a second copy."""
    seconds: list[ioshape.SaveHandle] = []

    def save_again(_: ioshape.SaveHandle) -> None:
        seconds.append(ioshape.save_async(checkpoint(2), tmp_path / "second.pt"))

    first = ioshape.save_async(checkpoint(1), tmp_path / "first.pt")
    first.add_done_callback(save_again)
    wait_until(lambda: seconds, "the callback")
    seconds[0].wait()
    assert number_in(tmp_path / "second.pt") == 2


# ---- asyncio -------------------------------------------------------------------------------------


def test_saves_are_awaited_while_the_loop_runs(tmp_path: Path) -> None:
    gates = [Gate() for _ in range(4)]

    async def wait_for(handle: ioshape.SaveHandle) -> ioshape.Report:
        return await handle

    async def main() -> list[ioshape.Report]:
        handles = [
            ioshape.save_async(checkpoint(i), tmp_path / f"{i}.pt", progress=gates[i])
            for i in range(4)
        ]
        tasks = [asyncio.create_task(wait_for(handle)) for handle in handles]
        # Two tasks may wait for one save.
        tasks.append(asyncio.create_task(wait_for(handles[0])))
        for _ in range(5):
            await asyncio.sleep(0.01)  # the loop runs while the saves are held
        assert not any(task.done() for task in tasks)
        for gate in gates:
            gate.open()
        reports = await asyncio.gather(*tasks)
        assert await handles[1] is reports[1]  # awaiting again after the end
        return reports

    reports = asyncio.run(main())
    assert [Path(report.path).name for report in reports] == [
        "0.pt",
        "1.pt",
        "2.pt",
        "3.pt",
        "0.pt",
    ]
    assert [number_in(tmp_path / f"{i}.pt") for i in range(4)] == [0, 1, 2, 3]


def test_awaiting_raises_what_the_save_failed_with(tmp_path: Path) -> None:
    async def main() -> None:
        handle = ioshape.save_async(checkpoint(1), tmp_path / "missing" / "model.pt")
        for _ in range(2):
            with pytest.raises(FileNotFoundError) as caught:
                await handle
            assert caught.value.filename == str(tmp_path / "missing" / "model.pt")

    asyncio.run(main())
    # Awaiting has reported the failure, so this save does not raise it.
    ioshape.save(checkpoint(2), tmp_path / "model.pt")


def test_a_task_that_is_canceled_cancels_no_save(tmp_path: Path, gate: Gate) -> None:
    path = tmp_path / "model.pt"
    complaints: list[object] = []

    async def main() -> ioshape.SaveHandle:
        asyncio.get_running_loop().set_exception_handler(lambda _, what: complaints.append(what))
        handle = ioshape.save_async(checkpoint(1), path, progress=gate)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(_awaited(handle), 0.05)
        assert not handle.done()
        gate.open()
        assert (await handle).path == str(path)
        await asyncio.sleep(0.01)
        return handle

    assert asyncio.run(main()).exception() is None
    assert number_in(path) == 1
    assert complaints == []


async def _awaited(handle: ioshape.SaveHandle) -> ioshape.Report:
    return await handle


@pytest.mark.parametrize("when", ["while the loop runs", "after its end"])
def test_a_failure_that_a_canceled_task_missed_is_told(
    tmp_path: Path, gate: Gate, when: str
) -> None:
    ioshape.save(checkpoint(1), tmp_path / "model.pt")
    handles: list[ioshape.SaveHandle] = []

    async def main() -> None:
        handles.append(
            ioshape.save_async(checkpoint(2), tmp_path / "model.pt", replace=False, progress=gate)
        )
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(_awaited(handles[0]), 0.05)
        if when == "while the loop runs":
            gate.open()
            while not handles[0].done():
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.2)

    asyncio.run(main())
    gate.open()
    wait_until(handles[0].done, "the failure")
    with pytest.raises(FileExistsError):
        ioshape.save(checkpoint(3), tmp_path / "other.pt")
    assert number_in(tmp_path / "other.pt") == 3


def test_a_loop_may_be_closed_meanwhile(
    tmp_path: Path, gate: Gate, hooked: list[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    in_threads: list[object] = []
    monkeypatch.setattr(threading, "excepthook", in_threads.append)

    async def main() -> ioshape.SaveHandle:
        handle = ioshape.save_async(checkpoint(1), tmp_path / "model.pt", progress=gate)
        task = asyncio.create_task(_awaited(handle))
        await asyncio.sleep(0)
        task.cancel()
        return handle

    handle = asyncio.run(main())
    others = threading.Event()
    handle.add_done_callback(lambda _: others.set())
    gate.open()
    assert handle.wait()
    assert others.wait(LONGEST_WAIT_S)
    assert hooked == []
    assert in_threads == []
    assert number_in(tmp_path / "model.pt") == 1


# ---- Staging memory ------------------------------------------------------------------------------


def test_staging_memory_is_used_again_and_given_back(tmp_path: Path) -> None:
    finished = run_program(
        tmp_path,
        """
        import resource

        import ioshape
        from checkpoints import checkpoint
        from ioshape._core import context

        MIB = 1 << 20
        context.test_options["block_bytes"] = MIB


        def resident_mib():
            with open("/proc/self/statm") as statm:
                return int(statm.read().split()[1]) * resource.getpagesize() // MIB


        state = checkpoint(1, 128 * MIB)
        ioshape.save(checkpoint(2, 16 * MIB), "model.pt")
        sizes = [resident_mib()]
        for _ in range(4):
            ioshape.save_async(state, "model.pt", durable=False).wait()
            sizes.append(resident_mib())
        ioshape.staging.trim()
        sizes.append(resident_mib())
        ioshape.staging.reserve(128 * MIB)
        sizes.append(resident_mib())
        print(*sizes)
        """,
        variables={"IOSHAPE_STAGING_BYTES": "1G"},
    )
    before, first, _, _, last, trimmed, reserved = map(int, finished.stdout.split())
    assert first - before >= 120
    assert last - first < 32
    assert last - trimmed >= 120
    assert reserved - trimmed >= 120


# ---- The GIL -------------------------------------------------------------------------------------


class Counter:
    """A thread that counts while it has the GIL."""

    def __init__(self) -> None:
        self.count = 0
        self._stop = False
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        while not self._stop:
            self.count += 1

    def __enter__(self) -> "Counter":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop = True
        self._thread.join()

    def rate_during(self, action: Callable[[], object]) -> float:
        """Return the counts per second during an action."""
        begin, count = time.perf_counter(), self.count
        action()
        return (self.count - count) / (time.perf_counter() - begin)


@pytest.mark.parametrize("what", ["save", "save_async", "load"])
@pytest.mark.slow
def test_the_gil_is_free_while_bytes_move(tmp_path: Path, what: str) -> None:
    path = tmp_path / "model.pt"
    ioshape.configure(direct="off")
    state = checkpoint(1, 256 * MIB)
    ioshape.save(state, path, durable=False)
    actions: dict[str, Callable[[], object]] = {
        "save": lambda: ioshape.save(state, path, durable=False),
        "save_async": lambda: ioshape.save_async(state, path, durable=False).wait(),
        "load": lambda: ioshape.load(path),
    }
    with Counter() as counter:
        alone = counter.rate_during(lambda: time.sleep(0.3))
        # Other load on the machine lowers the rate, so the best of three counts.
        during = max(counter.rate_during(actions[what]) for _ in range(3))
    assert during > alone / 10


# ---- Objects that torch writes itself ------------------------------------------------------------


def test_what_torch_must_write_is_written_before_the_call_returns(tmp_path: Path) -> None:
    with skip_data():
        handle = ioshape.save_async(checkpoint(1), tmp_path / "model.pt")
    assert handle.done()
    assert handle.wait(0)
    report = handle.result()
    assert report.written_by == "torch"
    assert any("not in the background" in text for text in report.downgrades)
    assert handle.progress.phase == "done"
    assert not handle.cancel()
    called: list[ioshape.SaveHandle] = []
    handle.add_done_callback(called.append)
    assert called == [handle]
    assert (tmp_path / "model.pt").stat().st_size == report.file_bytes


def test_failures_of_what_torch_writes_are_the_handles_too(tmp_path: Path) -> None:
    with skip_data():
        handle = ioshape.save_async(checkpoint(1), tmp_path / "missing" / "model.pt")
    with pytest.raises(FileNotFoundError) as caught:
        handle.wait()
    assert caught.value.filename == str(tmp_path / "missing" / "model.pt")


def test_file_objects_are_refused_with_advice(tmp_path: Path) -> None:
    with (
        (tmp_path / "model.pt").open("wb") as file,
        pytest.raises(TypeError, match=r"use save\(\)"),
    ):
        ioshape.save_async(checkpoint(1), file)  # type: ignore[arg-type]


def test_objects_that_cannot_be_pickled_raise_as_in_torch(tmp_path: Path) -> None:
    with pytest.raises((pickle.PicklingError, AttributeError, TypeError)) as theirs:
        torch.save({"lock": threading.Lock()}, tmp_path / "theirs.pt")
    with pytest.raises(type(theirs.value)):
        ioshape.save_async({"lock": threading.Lock()}, tmp_path / "ours.pt")
    assert "ours.pt" not in names_in(tmp_path)


@pytest.mark.slow
def test_descriptors_and_threads_do_not_pile_up(tmp_path: Path) -> None:
    def held() -> list[int]:
        return [len(list(Path("/proc/self", kind).iterdir())) for kind in ("fd", "task")]

    def save_some() -> None:
        for i in range(20):
            handle = ioshape.save_async(checkpoint(i), tmp_path / "model.pt")
            handle.add_done_callback(ioshape.SaveHandle.done)
        ioshape.wait_all()

    others = _watchers()  # threads of earlier tests for a tier that is gone
    most = [0, 0]
    for _ in range(3):  # contexts keep some for the next save
        save_some()
        most = [max(pair) for pair in zip(most, held(), strict=True)]
    for _ in range(6):
        save_some()
    wait_until(lambda: not _watchers() - others, "the end of the threads that call callbacks")
    # Six rounds of 20 saves, 120 in all, must not add up.
    assert all(now < then + 40 for now, then in zip(held(), most, strict=True))


def _watchers() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "ioshape"}


def test_threads_of_the_library_are_not_kept(tmp_path: Path) -> None:
    source = """
    import logging

    logging.basicConfig(level=logging.DEBUG, filename="log")
    for _ in range(20):
        assert ioshape.save_async(checkpoint(1), "missing/model.pt").exception() is not None
    ioshape.save(checkpoint(1), "model.pt", progress=lambda now: logging.info("%s", now))
    print(threading.enumerate() == [threading.main_thread()])
    """
    program = "import threading\nimport ioshape\nfrom checkpoints import checkpoint\n"
    assert run_program(tmp_path, program + textwrap.dedent(source)).stdout == "True\n"


# The ACL "user::rw-,group::r--,other::---" in the format of os.setxattr().
DEFAULT_ACL = struct.pack("<I" + 3 * "HHI", 2, 1, 6, 2**32 - 1, 4, 4, 2**32 - 1, 32, 0, 2**32 - 1)


@pytest.mark.parametrize(
    ("then", "now", "acl", "mode"),
    [
        (0o077, 0o022, None, 0o600),
        (0o022, 0o077, None, 0o644),
        (0, 0o077, None, 0o666),
        (0o022, 0o077, DEFAULT_ACL, 0o640),
    ],
    ids=["stricter", "more open", "none", "default ACL"],
)
def test_the_umask_of_the_call_counts(
    then: int, now: int, acl: bytes | None, mode: int, tmp_path: Path
) -> None:
    """Check that a later umask, at the time of the write, has no effect."""
    path = tmp_path / "model.pt"
    if acl is not None:
        os.setxattr(tmp_path, "system.posix_acl_default", acl)
    ioshape.configure(pool="umask")
    before = os.umask(then)
    try:
        # The pool admits two writers, so the save waits until these slots are released.
        with ioshape.slot(path, nbytes=1 << 30), ioshape.slot(path, nbytes=1 << 30):
            handle = ioshape.save_async(checkpoint(1, 64 << 20), path)
            wait_until(lambda: handle.progress.phase == "wait", "the save waits for a slot")
            os.umask(now)
        handle.wait()
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == mode


def test_positional_arguments_are_those_of_torch_save() -> None:
    """Check that renaming a call from one function to another keeps its positional arguments."""
    theirs, blocking, background = (
        [
            name
            for name, one in inspect.signature(function).parameters.items()
            if one.kind is POSITIONAL
        ]
        for function in (torch.save, ioshape.save, ioshape.save_async)
    )
    assert theirs == blocking == background


def test_the_old_format_is_written_where_it_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "old.pt"
    ioshape.save_async(checkpoint(1), path, pickle, 2, False).result()
    assert not zipfile.is_zipfile(path)
    assert torch.load(path)["number"] == 1
