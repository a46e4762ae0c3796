# SPDX-License-Identifier: Apache-2.0
"""The end of a process with saves in flight."""

import os
import re
import signal
import sys
import threading
import time
from pathlib import Path

import ioshape
import pytest
import torch
from checkpoints import checkpoint, names_in, number_in, wait_until
from coordinators import running_redis
from processes import Finished, run_interpreter, run_program, started_program
from saving_programs import BEGINNING, file_to_replace, saving_program

MIB = 1 << 20

#: The exit status of a program that lost a checkpoint and would have ended with 0.
LOST = os.EX_IOERR

# ---- Saves in flight are finished ----------------------------------------------------------------

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
    path = file_to_replace(tmp_path)
    statement, status, said = ENDS[end]
    source = saving_program(
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
        assert finished.stderr == ""  # the saves took less than a second


def test_order_is_kept_at_the_end(tmp_path: Path) -> None:
    path = file_to_replace(tmp_path)
    source = """
    ioshape.save_async(checkpoint(2, 3 * MIB), "files/model.pt", progress=slow)
    for number in range(3, 9):
        ioshape.save_async(checkpoint(number), "files/model.pt")
    """
    run_program(tmp_path, saving_program(source))
    assert number_in(path) == 8


def test_callbacks_and_what_they_begin_are_finished(tmp_path: Path) -> None:
    """Check saves that a callback begins, such as a copy of the checkpoint to another path."""
    path = file_to_replace(tmp_path)
    source = """
    def save_again(handle):
        ioshape.save_async(checkpoint(3, 3 * MIB), "files/second.pt", progress=slow)


    handle = ioshape.save_async(checkpoint(2, 3 * MIB), "files/model.pt", progress=slow)
    handle.add_done_callback(save_again)
    """
    run_program(tmp_path, saving_program(source))
    assert number_in(path) == 2
    assert number_in(path.with_name("second.pt")) == 3


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("how", ["save", "save_async"])
@pytest.mark.slow
def test_exit_handlers_may_save(tmp_path: Path, when: str, how: str) -> None:
    """Check handlers that run before ioshape's own, and those that were registered earlier.

    Python calls exit handlers in the reverse order of their registration.
    """
    path = file_to_replace(tmp_path)
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
    path = file_to_replace(tmp_path)
    source = """
    def work():
        time.sleep(0.3)
        ioshape.save_async(checkpoint(2, 3 * MIB), "files/model.pt", progress=slow)


    threading.Thread(target=work).start()
    """
    run_program(tmp_path, saving_program(source))
    assert number_in(path) == 2


@pytest.mark.long
def test_daemon_threads_may_save_to_the_last_moment(tmp_path: Path) -> None:
    """Check that each file is whole. Which of the saves finish is open.

    The threads save no tensors: before Python 3.14, torch's own functions abort a process that ends
    under them. On a busy machine an abort still happens in one of ten runs.
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
        with started_program(tmp_path, saving_program(source), str(0.02 + 0.04 * i)) as program:
            if program.wait() != 0:
                assert sys.version_info < (3, 14)
                assert "terminate called without an active exception" in program.errors()
    for file in (tmp_path / "files").glob("?.pt"):
        text = torch.load(file)["text"]
        assert text == text[: len(text) // 100000] * 100000
    ioshape.save(checkpoint(5), tmp_path / "files" / "last.pt")
    assert not [name for name in names_in(tmp_path / "files") if name.startswith(".")]


def test_logging_goes_on_to_the_end(tmp_path: Path) -> None:
    file_to_replace(tmp_path)
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
    finished = run_program(tmp_path, saving_program(source))
    assert sorted(finished.stdout.split()) == [f"files/{i}.pt" for i in range(5)]
    for i in range(5):
        assert re.search(rf"DEBUG:ioshape:.*files/{i}\.pt", finished.stderr)


@pytest.mark.parametrize("end", ["", "sys.exit(3)", "raise ValueError('a bug')"])
@pytest.mark.slow
def test_threads_of_the_library_may_log_while_python_ends(tmp_path: Path, end: str) -> None:
    """Check a heartbeat that fails and logs, with the pool's lock held, while Python ends."""
    source = f"""
    import os
    import signal
    import sys
    import time

    import ioshape
    from ioshape._core import context

    context.test_options["lease_ms"] = 300


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
    path = file_to_replace(tmp_path)
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
    finished = run_program(tmp_path, saving_program(source))
    assert number_in(path) == 2
    assert finished.stderr == ""


# ---- Messages while the end waits ----------------------------------------------------------------

# A slow pipe receives the file, so the save runs no Python.
SLOW = """
ioshape.save_async(checkpoint(2, 8 * MIB), "pipe")
"""


class SlowReader:
    """A reader that takes a number of seconds for a pipe, or no time when it must hurry."""

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
        """Wait until everything has been read."""
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
    """Check a daemon that has closed its stderr: its saves must not suffer."""
    path = file_to_replace(tmp_path)
    source = saving_program(
        f"""
    import os

    ioshape.save_async(checkpoint(2, 8 * MIB), "files/model.pt", progress=slow)
    ioshape.save_async(checkpoint(1), "missing/model.pt")
    {how}
    """
    )
    # Python exits with 120 if it cannot flush the closed stream.
    with started_program(tmp_path, source) as program:
        assert program.wait() in (LOST, 120)
    assert number_in(path) == 2


@pytest.mark.slow
def test_a_message_to_a_closed_stream_never_lands_in_a_checkpoint(tmp_path: Path) -> None:
    """Check that no file of ioshape gets the descriptors 0 to 2, which daemons close."""
    path = file_to_replace(tmp_path)
    source = saving_program(
        """
    import os

    taken = set()


    def write_messages(progress):
        for stream in range(3):
            try:
                os.write(stream, b"a message")
                taken.add(stream)
            except OSError:
                pass


    os.closerange(0, 3)
    ioshape.save(checkpoint(1, 8 * MIB), "files/model.pt", progress=write_messages)
    handle = ioshape.save_async(checkpoint(2, 8 * MIB), "files/model.pt", progress=write_messages)
    handle.wait()
    os._exit(10 + len(taken))
    """
    )
    with running_redis() as redis:
        for variables in {}, {"IOSHAPE_COORDINATOR": redis.address}:
            run_program(tmp_path, source, variables=variables, status=10)
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
    finished = run_program(tmp_path, saving_program(source), status=LOST)
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
    assert run_program(tmp_path, saving_program(source)).stderr == ""


# ---- Ends that do not wait -----------------------------------------------------------------------


@pytest.mark.slow
def test_ctrl_c_ends_the_waiting(tmp_path: Path) -> None:
    path = file_to_replace(tmp_path)
    source = """
    ioshape.save_async(checkpoint(2, 100 * MIB), "files/model.pt", progress=slow)
    print("ready", flush=True)
    """
    with started_program(tmp_path, saving_program(source)) as program:
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
    path = file_to_replace(tmp_path)
    status = {"_": 4, "k": -signal.SIGKILL, "a": -signal.SIGABRT}[how[3]]
    source = saving_program(
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
    # The next process that saves there removes the temporary file.
    run_program(tmp_path, saving_program('ioshape.save(checkpoint(3), "files/other.pt")'))
    assert names_in(path.parent) == ["model.pt", "other.pt"]


# ---- The exit status -----------------------------------------------------------------------------

# A save that fails and whose result the program never asks for.
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
    """Check that a status of the program's own is kept."""
    run_program(tmp_path, BEGINNING + LOSING + end, status=status)


def test_handlers_of_others_run_all_the_same(tmp_path: Path) -> None:
    """Check that exit handlers of Python and of C still run.

    dprintf() is registered as a handler: exit() calls it with the status, which it uses as a
    descriptor.
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
    assert "ioshape: a background save failed: " in finished.stderr


@pytest.mark.slow
def test_another_ctrl_c_is_no_success(tmp_path: Path) -> None:
    """Check a second Ctrl-C while the save does not react to the first one."""
    path = file_to_replace(tmp_path)
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
    with started_program(tmp_path, saving_program(source)) as program:
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
    finished = run_program(tmp_path, CHILDREN_THAT_LOSE, method)
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
