# SPDX-License-Identifier: Apache-2.0
"""The end of a process with saves in flight, and its children: fork, spawn, DataLoader."""

import os
import re
import signal
import threading
import time
from pathlib import Path

import ioshape
import pytest
import torch
from checkpoints import checkpoint, names_in, number_in, wait_until
from coordinators import running_redis
from processes import Finished, run_interpreter, run_program, started_program

MIB = 1 << 20

#: The exit status of a program that lost a checkpoint and would have ended with 0.
LOST = os.EX_IOERR

# What programs begin with. A save with `progress=slow` takes half a second or longer.
BEGINNING = """
import sys
import threading
import time

import ioshape
from checkpoints import Gate, checkpoint

MIB = 1 << 20


def slow(progress):
    if progress.phase == "write":
        time.sleep(0.05)


ioshape.configure(engine="buffered", block_bytes="256K")
"""


def _program(end: str) -> str:
    return BEGINNING + "\n".join(line.removeprefix("    ") for line in end.splitlines())


def _with_old(tmp_path: Path) -> Path:
    """A file that is replaced, in a folder of its own."""
    path = tmp_path / "files" / "model.pt"
    path.parent.mkdir()
    torch.save(checkpoint(1), path)
    return path


# ---- Saves in flight are finished ---------------------------------------------------------------

ENDS = {
    "the end of the script": ("", 0, ""),
    "sys.exit": ("sys.exit(3)", 3, ""),
    "an exception": ("raise ValueError('a bug')", 1, "ValueError: a bug"),
    "KeyboardInterrupt": ("raise KeyboardInterrupt", -signal.SIGINT, "KeyboardInterrupt"),
    "sys.exit with a message": ("sys.exit('that is all')", 1, "that is all"),
}


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.slow
def test_saves_in_flight_are_finished(tmp_path: Path, end: str) -> None:
    path = _with_old(tmp_path)
    statement, status, said = ENDS[end]
    source = _program(
        f"""
    ioshape.save_async(checkpoint(2, 3 * MIB), "files/model.pt", progress=slow)
    kept = ioshape.save_async(checkpoint(3, 3 * MIB), "files/other.pt", progress=slow)
    assert not kept.done()
    {statement}
    """
    )
    run = run_interpreter if end == "the end of the script" else run_program
    finished = run(tmp_path, source, status=status)
    assert number_in(path) == 2
    assert number_in(path.with_name("other.pt")) == 3
    assert names_in(path.parent) == ["model.pt", "other.pt"]
    assert said in finished.stderr
    if not said:
        assert finished.stderr == ""  # it was over in less than a second


def test_order_is_kept_at_the_end(tmp_path: Path) -> None:
    path = _with_old(tmp_path)
    source = """
    ioshape.save_async(checkpoint(2, 3 * MIB), "files/model.pt", progress=slow)
    for number in range(3, 9):
        ioshape.save_async(checkpoint(number), "files/model.pt")
    """
    run_program(tmp_path, _program(source))
    assert number_in(path) == 8


def test_callbacks_and_what_they_begin_are_finished(tmp_path: Path) -> None:
    """A callback may copy the checkpoint elsewhere when it is safe."""
    path = _with_old(tmp_path)
    source = """
    def save_again(handle):
        ioshape.save_async(checkpoint(3, 3 * MIB), "files/second.pt", progress=slow)


    handle = ioshape.save_async(checkpoint(2, 3 * MIB), "files/model.pt", progress=slow)
    handle.add_done_callback(save_again)
    """
    run_program(tmp_path, _program(source))
    assert number_in(path) == 2
    assert number_in(path.with_name("second.pt")) == 3


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("how", ["save", "save_async"])
@pytest.mark.slow
def test_exit_handlers_may_save(tmp_path: Path, when: str, how: str) -> None:
    """Those that were registered before we were imported run after ours."""
    path = _with_old(tmp_path)
    register = f"""
import atexit


def last_words():
    import ioshape
    from checkpoints import checkpoint

    ioshape.{how}(checkpoint(7, 3 << 20), "files/model.pt")


atexit.register(last_words)
"""
    use = 'ioshape.save(checkpoint(2), "files/model.pt")\n'
    source = register + BEGINNING + use if when == "before" else BEGINNING + use + register
    finished = run_program(tmp_path, source)
    assert number_in(path) == 7
    assert names_in(path.parent) == ["model.pt"]
    assert finished.stderr == ""


def test_threads_that_still_save_are_waited_for(tmp_path: Path) -> None:
    path = _with_old(tmp_path)
    source = """
    def work():
        time.sleep(0.3)
        ioshape.save_async(checkpoint(2, 3 * MIB), "files/model.pt", progress=slow)


    threading.Thread(target=work).start()
    """
    run_program(tmp_path, _program(source))
    assert number_in(path) == 2


@pytest.mark.slow
def test_daemon_threads_may_save_to_the_last_moment(tmp_path: Path) -> None:
    """Which of their saves are finished is open; that each file is whole is not.

    They save what is none of torch's: with Python before 3.14 its own functions abort a process
    that ends under them.
    """
    (tmp_path / "files").mkdir()
    source = """
    import itertools
    import logging

    logging.basicConfig(level=logging.DEBUG, filename="log")
    ioshape.configure(durable=False)


    def work(thread):
        path = f"files/{thread}.pt"
        for number in itertools.count():
            state = {"text": str(number) * 100000}
            if thread % 2:
                ioshape.save(state, path, progress=print)
            else:
                ioshape.save_async(state, path, progress=print)


    for i in range(4):
        threading.Thread(target=work, args=(i,), daemon=True).start()
    time.sleep(float(sys.argv[1]))
    """
    for i in range(8):
        run_program(tmp_path, _program(source), str(0.02 + 0.04 * i))
    for file in (tmp_path / "files").glob("?.pt"):
        text = torch.load(file)["text"]
        assert text == text[: len(text) // 100000] * 100000
    ioshape.save(checkpoint(5), tmp_path / "files" / "last.pt")
    assert not [name for name in names_in(tmp_path / "files") if name.startswith(".")]


def test_logging_goes_on_to_the_end(tmp_path: Path) -> None:
    _with_old(tmp_path)
    source = """
    import logging

    logging.basicConfig(level=logging.DEBUG)
    handles = [
        ioshape.save_async(checkpoint(i, 2 * MIB), f"files/{i}.pt", progress=slow)
        for i in range(5)
    ]
    for handle in handles:
        handle.add_done_callback(lambda ended: sys.stdout.write(f"{ended.path}\\n"))
    """
    finished = run_program(tmp_path, _program(source))
    assert sorted(finished.stdout.split()) == [f"files/{i}.pt" for i in range(5)]
    for i in range(5):
        assert re.search(rf"DEBUG:ioshape:.*files/{i}\.pt", finished.stderr)


@pytest.mark.parametrize("end", ["", "sys.exit(3)", "raise ValueError('a bug')"])
@pytest.mark.slow
def test_threads_of_the_library_may_log_while_python_ends(tmp_path: Path, end: str) -> None:
    """The slot's thread finds the coordinator gone, and says so with the pool's lock held."""
    source = f"""
    import os
    import signal
    import sys
    import time

    import ioshape

    ioshape.configure(lease_ms=300)


    class Late:
        def __del__(self, kill=os.kill, killed=(int(sys.argv[1]), signal.SIGKILL), rest=time.sleep):
            kill(*killed)
            rest(1.5)  # a heartbeat is answered no more, nor when it is sent again


    first = Late()  # torn down before the slot is freed
    held = ioshape.slot("file", nbytes=1 << 30)
    {end}
    """
    with running_redis() as redis:
        status = 1 if "raise" in end else 3 if end else 0
        variables = {"IOSHAPE_COORDINATOR": redis.address}
        run_interpreter(tmp_path, source, str(redis.pid), status=status, variables=variables)


def test_an_event_loop_may_end_before_its_saves(tmp_path: Path) -> None:
    path = _with_old(tmp_path)
    source = """
    import asyncio


    async def main():
        handle = ioshape.save_async(checkpoint(2, 3 * MIB), "files/model.pt", progress=slow)
        task = asyncio.create_task(wait_for(handle))
        await asyncio.sleep(0.05)


    async def wait_for(handle):
        await handle


    asyncio.run(main())
    """
    finished = run_program(tmp_path, _program(source))
    assert number_in(path) == 2
    assert finished.stderr == ""


# ---- What it says meanwhile ---------------------------------------------------------------------

# Into a pipe that somebody reads slowly: not a line of Python is in the save.
SLOW = """
ioshape.save_async(checkpoint(2, 8 * MIB), "pipe")
"""


class SlowReader:
    """Reads a pipe in so many seconds, or in no time once it is told to hurry."""

    def __init__(self, path: Path, n_bytes: int, seconds: float) -> None:
        os.mkfifo(path)
        self._path = path
        self._pause = seconds / (n_bytes / 65536)
        self._hurry = False
        self.data = bytearray()
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        with self._path.open("rb", buffering=0) as pipe:
            while piece := pipe.read(65536):
                self.data += piece
                if not self._hurry:
                    time.sleep(self._pause)

    def end(self) -> None:
        """All of it has been read."""
        self._hurry = True
        self._thread.join()


def _slowly(
    tmp_path: Path, seconds: float, variables: dict[str, str] | None = None, status: int = 0
) -> tuple[Finished, bytearray]:
    reader = SlowReader(tmp_path / "pipe", 8 * MIB, seconds)
    try:
        finished = run_program(tmp_path, BEGINNING + SLOW, variables=variables or {}, status=status)
    finally:
        reader.end()
    return finished, reader.data


@pytest.mark.slow
def test_it_says_what_the_end_waits_for(tmp_path: Path) -> None:
    finished, data = _slowly(tmp_path, 2.6)
    lines = finished.stderr.splitlines()
    assert 1 <= len(lines) <= 5
    shares = []
    for line in lines:
        found = re.fullmatch(
            r"ioshape: finishing before the program ends: pipe \(write (\d+) %\)", line
        )
        assert found, line
        shares.append(int(found[1]))
    assert shares == sorted(shares)
    assert shares[-1] <= 100
    (tmp_path / "read.pt").write_bytes(data)
    assert number_in(tmp_path / "read.pt") == 2


@pytest.mark.parametrize("how", ["sys.stderr.close()", "sys.stderr = None", "os.close(2)"])
@pytest.mark.slow
def test_nobody_need_listen(tmp_path: Path, how: str) -> None:
    """A daemon has closed its stderr. That costs no checkpoint."""
    path = _with_old(tmp_path)
    source = _program(
        f"""
    import os

    ioshape.save_async(checkpoint(2, 8 * MIB), "files/model.pt", progress=slow)
    ioshape.save_async(checkpoint(1), "missing/model.pt")
    {how}
    """
    )
    # Python itself may find something wrong with the closed descriptor when it ends: 120.
    with started_program(tmp_path, source) as program:
        assert program.wait() in (LOST, 120)
    assert number_in(path) == 2


@pytest.mark.slow
@pytest.mark.wording
def test_a_failure_that_nobody_heard_of_is_told_in_the_end(tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    source = """
    import logging

    logging.getLogger("ioshape").addHandler(logging.NullHandler())
    heard_of = ioshape.save_async(checkpoint(2), "files/good.pt")
    heard_of.wait()
    late = Gate()


    def stop(progress):
        if progress.phase == "plan":
            late(progress)
            raise ValueError("enough")


    ioshape.save_async(checkpoint(2), "files/model.pt", replace=False, progress=late)
    ioshape.save_async(checkpoint(2), "files/stopped.pt", progress=stop)
    ioshape.save_async(checkpoint(1), "missing/model.pt")
    open("files/model.pt", "w").close()
    late.open()
    """
    finished = run_program(tmp_path, _program(source), status=LOST)
    for path in ("files/model.pt", "files/stopped.pt", "missing/model.pt"):
        assert finished.stderr.count(path) == 1
    assert "files/good.pt" not in finished.stderr
    assert "create it first" in finished.stderr
    assert "ValueError('enough')" in finished.stderr


@pytest.mark.parametrize("ask", ["wait()", "exception()", "cancel()"])
@pytest.mark.slow
def test_a_failure_that_somebody_heard_of_is_not_told(tmp_path: Path, ask: str) -> None:
    source = f"""
    import contextlib
    import logging

    logging.getLogger("ioshape").addHandler(logging.NullHandler())
    handle = ioshape.save_async(checkpoint(1), "missing/model.pt")
    with contextlib.suppress(FileNotFoundError):
        handle.{ask}
    """
    assert run_program(tmp_path, _program(source)).stderr == ""


# ---- When it must not take so long --------------------------------------------------------------


@pytest.mark.parametrize("how", ["variable", "configure"])
@pytest.mark.slow
def test_the_end_can_be_given_a_time_limit(tmp_path: Path, how: str) -> None:
    path = _with_old(tmp_path)
    source = """
    ioshape.configure(exit_timeout_s=600 if "variable" in sys.argv else 0.3)
    ioshape.save_async(checkpoint(2, 100 * MIB), "files/model.pt", progress=slow)
    ioshape.save_async(checkpoint(3, 100 * MIB), "files/other.pt", progress=slow)
    """
    variables = {"IOSHAPE_EXIT_TIMEOUT_S": "0.3"} if how == "variable" else {}
    finished = run_program(tmp_path, _program(source), how, variables=variables, status=LOST)
    for name in ("model.pt", "other.pt"):
        assert finished.stderr.count(f'"files/{name}"') == 1
    assert "exit_timeout_s" in finished.stderr
    assert number_in(path) == 1
    assert names_in(path.parent) == ["model.pt"]


@pytest.mark.slow
def test_no_time_at_all(tmp_path: Path) -> None:
    path = _with_old(tmp_path)
    source = """
    ioshape.save_async(checkpoint(2, 100 * MIB), "files/model.pt", progress=slow)
    done = ioshape.save_async(checkpoint(3), "files/done.pt")
    while not done.done():
        time.sleep(0.01)
    """
    variables = {"IOSHAPE_EXIT_TIMEOUT_S": "0"}
    finished = run_program(tmp_path, _program(source), variables=variables, status=LOST)
    assert finished.stderr.count('"files/model.pt"') == 1
    assert "done.pt" not in finished.stderr
    assert number_in(path) == 1
    assert names_in(path.parent) == ["done.pt", "model.pt"]


@pytest.mark.slow
def test_ctrl_c_ends_the_waiting(tmp_path: Path) -> None:
    path = _with_old(tmp_path)
    source = """
    ioshape.save_async(checkpoint(2, 100 * MIB), "files/model.pt", progress=slow)
    print("ready", flush=True)
    """
    with started_program(tmp_path, _program(source)) as program:
        program.expect("ready")
        wait_until(lambda: "finishing before the program ends" in program.errors(), "its waiting")
        os.kill(program.pid, signal.SIGINT)
        finished = program.end(LOST)
    assert finished.stderr.count('"files/model.pt"') == 1
    assert "Traceback" not in finished.stderr
    assert number_in(path) == 1
    assert names_in(path.parent) == ["model.pt"]


@pytest.mark.parametrize("how", ["os._exit(4)", "os.kill(os.getpid(), 9)", "os.abort()"])
@pytest.mark.slow
def test_an_end_without_an_end_leaves_the_old_file(tmp_path: Path, how: str) -> None:
    path = _with_old(tmp_path)
    status = {"_": 4, "k": -signal.SIGKILL, "a": -signal.SIGABRT}[how[3]]
    source = _program(
        f"""
    import faulthandler
    import os

    faulthandler.disable()
    gate = Gate("write")
    ioshape.save_async(checkpoint(2, 8 * MIB), "files/model.pt", progress=gate)
    gate.await_save()
    {how}
    """
    )
    run_program(tmp_path, source, status=status)
    assert number_in(path) == 1
    assert len(names_in(path.parent)) == 2
    # The next process to save there tidies up.
    run_program(tmp_path, _program('ioshape.save(checkpoint(3), "files/other.pt")'))
    assert names_in(path.parent) == ["model.pt", "other.pt"]


# ---- The exit status ----------------------------------------------------------------------------

# A save that fails and that nobody asks about.
LOSING = """
ioshape.save_async(checkpoint(1), "missing/model.pt")
"""


@pytest.mark.parametrize(
    ("end", "status"),
    [
        ("", LOST),
        ("sys.exit(0)", LOST),
        ("sys.exit(3)", 3),
        ("raise ValueError", 1),
        ("raise KeyboardInterrupt", -signal.SIGINT),
    ],
)
@pytest.mark.slow
def test_a_lost_checkpoint_shows_in_the_exit_status(tmp_path: Path, end: str, status: int) -> None:
    """Unless the program had its own reason to end with another one."""
    run_program(tmp_path, BEGINNING + LOSING + end, status=status)


def test_handlers_of_others_run_all_the_same(tmp_path: Path) -> None:
    """Those of Python and of C.

    dprintf() is a handler that C's exit() calls with the status, which it takes for a descriptor.
    """
    source = f"""
import atexit
import ctypes
import os

libc = ctypes.CDLL(None)
os.dup2(1, {LOST})
libc.on_exit(libc.dprintf, b"C before, ")
atexit.register(print, "Python before", end=", ", flush=True)
{BEGINNING}
{LOSING}
atexit.register(print, "Python after", end=", ", flush=True)
"""
    said = run_program(tmp_path, source, status=LOST).stdout
    assert said == "Python after, Python before, C before, "


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.slow
def test_a_checkpoint_lost_in_an_exit_handler_shows_too(tmp_path: Path, when: str) -> None:
    register = """
import atexit


def last_words():
    import ioshape
    from checkpoints import checkpoint

    ioshape.save_async(checkpoint(7), "missing/model.pt")


atexit.register(last_words)
"""
    use = "ioshape.save_async(checkpoint(2), 'model.pt')\n"
    source = register + BEGINNING + use if when == "before" else BEGINNING + use + register
    finished = run_program(tmp_path, source, status=LOST)
    assert "ioshape: a save in the background failed: " in finished.stderr


@pytest.mark.slow
def test_another_ctrl_c_is_no_success(tmp_path: Path) -> None:
    """A save is at a step that takes no notice of the first one."""
    path = _with_old(tmp_path)
    source = """
    begun = threading.Event()


    def stuck(progress):
        if progress.phase == "write" and not begun.is_set():
            begun.set()
            time.sleep(10)


    ioshape.save_async(checkpoint(2, 3 * MIB), "files/model.pt", progress=stuck)
    begun.wait()
    print("ready", flush=True)
    """
    with started_program(tmp_path, _program(source)) as program:
        program.expect("ready")
        wait_until(lambda: "finishing before the program ends" in program.errors(), "its waiting")
        os.kill(program.pid, signal.SIGINT)
        time.sleep(0.3)
        os.kill(program.pid, signal.SIGINT)
        program.end(LOST)
    assert number_in(path) == 1


CHILDREN_THAT_LOSE = """
import multiprocessing
import os
import sys

import ioshape
from checkpoints import checkpoint


def lose(end):
    ioshape.save_async(checkpoint(1), "missing/model.pt")
    exec(end)


def save(end):
    ioshape.save_async(checkpoint(1), "good.pt")
    exec(end)


def status_of(method, target, end):
    process = multiprocessing.get_context(method).Process(target=target, args=(end,))
    process.start()
    process.join()
    return process.exitcode


if __name__ == "__main__":
    method = sys.argv[1]
    print(status_of(method, lose, ""), status_of(method, lose, "sys.exit(0)"))
    print(status_of(method, lose, "sys.exit(3)"), status_of(method, lose, "raise ValueError"))
    print(status_of(method, save, ""))
    try:
        raise ValueError("while this is handled")
    except ValueError:
        print(status_of(method, lose, ""))
"""


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.long)])
@pytest.mark.slow
def test_a_checkpoint_lost_by_a_child_shows_in_its_status(tmp_path: Path, method: str) -> None:
    finished = run_interpreter(tmp_path, CHILDREN_THAT_LOSE, method)
    assert finished.stdout.split() == [str(LOST)] * 2 + ["3", "1", "0", str(LOST)]


def test_what_the_parent_lost_is_not_its_childrens(tmp_path: Path) -> None:
    source = f"""
import atexit
import os


def fork_off():
    if os.fork():
        print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)


atexit.register(fork_off)
{BEGINNING}
{LOSING}
"""
    assert run_program(tmp_path, source, status=LOST).stdout == "0\n"


# ---- Children -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_children_do_not_disturb_their_parents_saves(tmp_path: Path) -> None:
    """One fork for each way in which a child can end; all while the parent's save is held."""
    path = _with_old(tmp_path)
    source = """
    import asyncio
    import os


    def refused(action):
        try:
            action()
        except PermissionError as error:
            assert "another process" in str(error), error
            assert error.filename == "files/model.pt", error
        else:
            raise AssertionError("it was permitted")


    async def awaited():
        await handle


    def child(end):
        # It has nothing to do with the parent's saves...
        refused(handle.wait)
        refused(lambda: handle.wait(0))
        refused(handle.result)
        refused(handle.exception)
        refused(handle.cancel)
        refused(lambda: handle.progress)
        refused(lambda: handle.add_done_callback(print))
        refused(lambda: asyncio.run(asyncio.wait_for(awaited(), 10)))
        assert not handle.done()
        assert handle.report is None
        assert "under way" in repr(handle)
        # ... and saves itself, also to the same file.
        ioshape.save(checkpoint(10), f"files/child {end}.pt")
        ioshape.save_async(checkpoint(11, 3 * MIB), f"files/child {end}.pt", progress=slow)
        assert ioshape.load(f"files/child {end}.pt")["number"] >= 10
        if end == "_exit":
            ioshape.wait_all()
            os._exit(0)
        if end == "exception":
            sys.stderr = None
            raise ValueError
        # Otherwise it ends like any other program, and waits for its own save.


    gate = Gate()
    handle = ioshape.save_async(checkpoint(2), "files/model.pt", progress=gate)
    gate.await_save()
    in_child = False
    for end in ("normal", "_exit", "exception"):
        pid = os.fork()
        if not pid:
            in_child = True
            child(end)
            break
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert status == (end == "exception"), (end, status)
    if not in_child:
        assert not handle.done()
        gate.open()
        assert handle.wait()
        ioshape.save(checkpoint(3), "files/after.pt")
    """
    finished = run_program(tmp_path, _program(source))
    assert finished.stderr == ""
    assert number_in(path) == 2
    assert number_in(path.with_name("after.pt")) == 3
    for end in ("normal", "_exit", "exception"):
        assert number_in(path.with_name(f"child {end}.pt")) == 11
    assert len(names_in(path.parent)) == 5


def test_failures_of_the_parent_are_not_the_childs(tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    source = """
    import logging
    import os

    logging.getLogger("ioshape").addHandler(logging.NullHandler())
    failed = ioshape.save_async(checkpoint(1), "missing/model.pt")
    while failed.report is None:  # to look is not to ask
        time.sleep(0.01)
    pid = os.fork()
    if not pid:
        ioshape.save(checkpoint(2), "files/child.pt")
        sys.exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    try:
        ioshape.save(checkpoint(3), "files/parent.pt")
    except FileNotFoundError:
        print("heard")
    """
    # What this one has heard of is not lost without a word.
    assert run_program(tmp_path, _program(source)).stdout == "heard\n"
    assert names_in(tmp_path / "files") == ["child.pt", "parent.pt"]


def test_forks_at_any_moment(tmp_path: Path) -> None:
    """Threads save while others fork: whatever was locked then must not stay so in the child."""
    (tmp_path / "files").mkdir()
    source = """
    import faulthandler
    import os

    stop = threading.Event()
    # Made before: children of threads that compute with torch may find its locks taken.
    states = [checkpoint(number) for number in range(5)]


    def save_on(thread):
        number = 0
        while not stop.is_set():
            number += 1
            handle = ioshape.save_async(
                states[number % 5], f"files/{thread}.pt", durable=False
            )
            ioshape.configure(queue_depth=1 + number % 5)
            if number % 3 == 0:
                handle.wait()


    def fork_off(i):
        time.sleep(0.01)
        pid = os.fork()
        if not pid:
            faulthandler.dump_traceback_later(60, exit=True)
            ioshape.configure(durable=False)
            ioshape.save(states[i % 5], "files/child.pt")
            ioshape.save_async(states[i % 5], "files/child.pt").wait()
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert status == 0, (i, status)


    threads = [threading.Thread(target=save_on, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    try:
        for i in range(25):
            fork_off(i)
    finally:
        stop.set()
    for thread in threads:
        thread.join()
    """
    run_program(tmp_path, _program(source))
    for name in ("0.pt", "1.pt", "2.pt", "child.pt"):
        number_in(tmp_path / "files" / name)
    assert len(names_in(tmp_path / "files")) == 4


FIRST_USE = """
import faulthandler
import os
import random
import threading
import time

import ioshape

state = {"number": 5}


def use(thread):
    ioshape.save_async(state, f"{thread}.pt", durable=False).wait()


def fork_off():
    pid = os.fork()
    if not pid:
        faulthandler.dump_traceback_later(60, exit=True)
        ioshape.configure(durable=False)
        ioshape.save(state, "child.pt")
        os._exit(0)
    return pid


threads = [threading.Thread(target=use, args=(i,)) for i in range(2)]
for thread in threads:
    thread.start()
children = []
for _ in range(8):
    time.sleep(random.uniform(0, 0.02))
    children.append(fork_off())
statuses = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
assert not any(statuses), statuses
for thread in threads:
    thread.join()
"""


@pytest.mark.long  # once, on a machine with a load of 8, glibc ended a child: "double free"
def test_forks_while_others_use_the_package_for_the_first_time(tmp_path: Path) -> None:
    for _ in range(5):
        run_program(tmp_path, FIRST_USE)


def test_a_child_that_was_forked_too_early_says_so(tmp_path: Path) -> None:
    """The thread that imports waits for the one that forks, which could wait for ever."""
    source = """
import os
import threading

import ioshape

ioshape._PATIENCE_S = 0.01
forked, importing = threading.Event(), threading.Event()


def import_slowly(name):
    importing.set()
    forked.wait()
    raise ImportError(name)


def use():
    try:
        ioshape.save
    except ImportError:
        pass


ioshape.import_module = import_slowly
thread = threading.Thread(target=use)
thread.start()
importing.wait()
pid = os.fork()
if not pid:
    try:
        ioshape.save
    except RuntimeError as error:
        print(error, flush=True)
        os._exit(0)
    os._exit(1)
forked.set()
thread.join()
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
"""
    assert "forked while another thread" in run_program(tmp_path, source).stdout


# A script as its own module, because the children of "spawn" import it.
WITH_CHILDREN = """
import multiprocessing
import sys

import torch
from torch.utils.data import DataLoader, Dataset

import ioshape
from checkpoints import Gate, checkpoint


class Squares(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, i):
        if i % 16 == 0 and "saving" in sys.argv:
            # Workers save too: what they have cached, say.
            ioshape.save_async({"number": i, "data": torch.ones(1000)}, f"files/item {i}.pt").wait()
        return torch.tensor(i * i)


def save_there(number):
    ioshape.save(checkpoint(number), f"files/{number}.pt")
    ioshape.save_async(checkpoint(number + 1), f"files/{number}.pt")
    return ioshape.load(f"files/{number}.pt")["number"]


def main(method):
    workers = 2 if method == "fork" else 1  # the others take their time to start
    gate = Gate()
    handle = ioshape.save_async(checkpoint(2), "files/model.pt", progress=gate)
    gate.await_save()
    loader = DataLoader(Squares(), 4, num_workers=workers, multiprocessing_context=method)
    for _ in range(workers):
        squares = torch.cat(list(loader))
        assert squares.tolist() == [i * i for i in range(64)]
    with multiprocessing.get_context(method).Pool(workers) as pool:
        assert min(pool.map(save_there, [100, 200, 300])) >= 100
        pool.close()
        pool.join()
    assert not handle.done()
    gate.open()
    assert handle.wait()


if __name__ == "__main__":
    main(sys.argv[1])
"""


@pytest.mark.parametrize(
    "method",
    # What "spawn" and "forkserver" start imports torch: that takes its time.
    ["fork", "spawn", pytest.param("forkserver", marks=pytest.mark.long)],
)
@pytest.mark.slow
def test_data_loaders_and_pools_work_during_a_save(tmp_path: Path, method: str) -> None:
    path = _with_old(tmp_path)
    finished = run_interpreter(tmp_path, WITH_CHILDREN, method, "saving")
    assert finished.stderr == ""
    assert number_in(path) == 2
    for number in (100, 200, 300):
        # Pools end their processes with os._exit(), after exit handlers of multiprocessing alone.
        assert number_in(path.with_name(f"{number}.pt")) == number + 1
    assert {f"item {i}.pt" for i in (0, 16, 32, 48)} <= set(names_in(path.parent))
