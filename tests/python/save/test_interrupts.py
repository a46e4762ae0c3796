# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C and kill -9: the old file stays, nothing is left over, and the next save works."""

import gc
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest
from checkpoints import left_clean
from ioshape._core.structs import owned
from processes import run_program


@pytest.fixture(autouse=True)
def _left_clean() -> Iterator[None]:
    with left_clean():
        yield


# ---- Ctrl-C --------------------------------------------------------------------------------------

# Sends a real SIGINT to the process, as a terminal does, during each kind of operation.
CTRL_C = """
    import json
    import os
    import signal
    import threading
    import time
    import traceback
    from pathlib import Path

    import ioshape
    from checkpoints import Gate, checkpoint, names_in, number_in, wait_until
    from ioshape._core import config
    from ioshape._core import context

    MIB = 1 << 20


    def interrupted(action, condition):
        running, ended = threading.Event(), threading.Event()

        def interrupt():
            running.wait()
            wait_until(lambda: condition() or ended.is_set(), "something to interrupt")
            os.kill(os.getpid(), signal.SIGINT)

        thread = threading.Thread(target=interrupt)
        thread.start()
        try:
            try:
                running.set()
                action()
            finally:
                ended.set()
                thread.join()
        except KeyboardInterrupt:
            return
        raise AssertionError("no KeyboardInterrupt")


    class Slow:
        # A progress callback that takes ten seconds for all of a save.
        def __init__(self):
            self.calls = 0

        def __call__(self, progress):
            if progress.phase == "write":
                self.calls += 1
                time.sleep(0.02)


    class SlowPipe:
        # A pipe that is read slowly: real I/O that takes ten seconds.
        def __init__(self, folder, n_bytes):
            self.path = folder / "pipe"
            os.mkfifo(self.path)
            self.n_bytes = n_bytes
            self.taken = 0
            self.hurry = False
            self.thread = threading.Thread(target=self.read)
            self.thread.start()

        def read(self):
            with self.path.open("rb", buffering=0) as pipe:
                while piece := pipe.read(64 << 10):
                    self.taken += len(piece)
                    if not self.hurry:
                        time.sleep(10 * len(piece) / self.n_bytes)

        def assert_prompt(self):
            assert self.taken < self.n_bytes * 0.6, "it came through only when all was over"

        def end(self):
            self.hurry = True
            self.thread.join()
            self.path.unlink()


    def blocking_save(folder, path):
        slow = Slow()
        context.test_options["block_bytes"] = 65536
        config.configure(engine="buffered")
        interrupted(
            lambda: ioshape.save(checkpoint(2, 32 * MIB), path, progress=slow),
            lambda: slow.calls > 3,
        )
        assert slow.calls < 300, slow.calls  # of 512


    def blocking_save_without_progress(folder, path):
        for number in range(4):
            interrupted(
                lambda: ioshape.save(checkpoint(1, (50 + number) * MIB), path),
                lambda: len(names_in(folder)) > 1,
            )
            assert names_in(folder) == ["model.pt"]
            number_in(path)


    def save_by_torch(folder, path):
        pipe = SlowPipe(folder, 128 * MIB)
        interrupted(
            lambda: ioshape.save(
                checkpoint(2, 128 * MIB), pipe.path, _use_new_zipfile_serialization=False
            ),
            lambda: pipe.taken > MIB,
        )
        pipe.assert_prompt()
        pipe.end()


    def staging(folder, path):
        # Larger than the staging memory: it is copied as fast as the pipe takes it.
        config.configure(staging_bytes="16M")
        pipe = SlowPipe(folder, 128 * MIB)
        interrupted(
            lambda: ioshape.save_async(checkpoint(2, 128 * MIB), pipe.path),
            lambda: pipe.taken > MIB,
        )
        pipe.assert_prompt()
        pipe.end()


    def staging_with_progress(folder, path):
        config.configure(staging_bytes="16M")
        pipe = SlowPipe(folder, 128 * MIB)
        interrupted(
            lambda: ioshape.save_async(
                checkpoint(2, 128 * MIB), pipe.path, progress=lambda progress: None
            ),
            lambda: pipe.taken > MIB,
        )
        pipe.assert_prompt()
        pipe.end()


    def waiting_for_room(folder, path):
        config.configure(staging_bytes="16M")
        pipe = SlowPipe(folder, 15 * MIB)
        first = ioshape.save_async(checkpoint(2, 15 * MIB), pipe.path)
        interrupted(
            lambda: ioshape.save_async(checkpoint(2, 15 * MIB), path),
            lambda: pipe.taken > MIB,
        )
        pipe.assert_prompt()
        pipe.end()
        assert first.wait()


    def wait_for(ask):
        def run(folder, path):
            gate = Gate()
            handle = ioshape.save_async(checkpoint(2), folder / "other.pt", progress=gate)
            interrupted(lambda: ask(handle), gate.reached.is_set)
            assert not handle.done(), "waiting in vain must not abort the save"
            gate.open()
            assert handle.wait()
            assert number_in(folder / "other.pt") == 2
            (folder / "other.pt").unlink()

        return run


    def cancel(folder, path):
        # Twice: the first Ctrl-C comes while the save is being stopped.
        gate = Gate()
        handle = ioshape.save_async(checkpoint(2), path, progress=gate)
        gate.await_save()
        interrupted(handle.cancel, lambda: True)
        assert not handle.done()
        gate.open()
        assert handle.cancel()


    def bytes_read():
        with open("/proc/self/io") as counters:
            return int(counters.readline().split()[1])


    def read(how):
        def run(folder, path):
            config.configure(engine="buffered")
            size = ioshape.save(checkpoint(1, 300 * MIB), path, durable=False).file_bytes
            # It does not go on to the end first. On a busy machine the signal may be sent late.
            shares = []
            while len(shares) < 2 or min(shares) > 0.9:
                assert len(shares) < 60, shares
                begin = bytes_read()
                interrupted(lambda: how(path), lambda: bytes_read() - begin > size // 20)
                shares.append((bytes_read() - begin) / size)

        return run


    def read_with_progress(folder, path):
        ioshape.save(checkpoint(1, 64 * MIB), path)
        calls = []

        def slow(progress):
            calls.append(progress)
            time.sleep(0.05)

        interrupted(lambda: ioshape.verify(path, progress=slow), lambda: len(calls) > 1)
        calls.clear()
        interrupted(lambda: ioshape.load(path, progress=slow), lambda: calls)


    def logged(folder, path):
        # The program logs each message on the thread that sends it.
        import logging

        class Slow(logging.Handler):
            def emit(self, record):
                time.sleep(0.05)

        logger = logging.getLogger("ioshape")
        logger.setLevel(logging.DEBUG)
        handler = Slow()
        logger.addHandler(handler)
        try:
            for _ in range(5):
                begin = time.monotonic()
                interrupted(
                    lambda: [ioshape.save(checkpoint(1), path) for _ in range(200)],
                    lambda: time.monotonic() - begin > 0.3,
                )
        finally:
            logger.removeHandler(handler)


    SCENARIOS = {
        "blocking save": blocking_save,
        "blocking save without progress": blocking_save_without_progress,
        "save by torch": save_by_torch,
        "staging": staging,
        "staging with progress": staging_with_progress,
        "waiting for room": waiting_for_room,
        "wait": wait_for(lambda handle: handle.wait()),
        "wait with a time-out": wait_for(lambda handle: handle.wait(60)),
        "result": wait_for(lambda handle: handle.result()),
        "wait_all": wait_for(lambda handle: ioshape.wait_all()),
        "cancel": cancel,
        "load": read(ioshape.load),
        "verify": read(ioshape.verify),
        "reading with progress": read_with_progress,
        "with a log": logged,
    }


    def main():
        for name, scenario in SCENARIOS.items():
            folder = Path(name)
            folder.mkdir()
            path = folder / "model.pt"
            config.reset()
            ioshape.save(checkpoint(1), path)
            problem = ""
            try:
                scenario(folder, path)
                assert number_in(path) == 1, "the old file is gone"
                assert names_in(folder) == ["model.pt"], names_in(folder)
                ioshape.save(checkpoint(3), path)
                ioshape.save_async(checkpoint(4), path).wait()
                assert number_in(path) == 4
            except BaseException:
                problem = traceback.format_exc()
            print(json.dumps([name, problem]), flush=True)


    main()
"""


@pytest.fixture(scope="module")
def ctrl_c(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the problem of each scenario, "" for none."""
    finished = run_program(tmp_path_factory.mktemp("ctrl-c"), CTRL_C)
    found = dict(json.loads(line) for line in finished.stdout.splitlines())
    return {**found, "stderr": finished.stderr}


@pytest.mark.parametrize(
    "scenario",
    [
        "blocking save",
        "blocking save without progress",
        "save by torch",
        "staging",
        "staging with progress",
        "waiting for room",
        "wait",
        "wait with a time-out",
        "result",
        "wait_all",
        "cancel",
        "load",
        "verify",
        "reading with progress",
        "with a log",
    ],
)
@pytest.mark.slow
def test_ctrl_c(ctrl_c: dict[str, str], scenario: str) -> None:
    """Check that KeyboardInterrupt comes soon, the old file stays and the next save works."""
    assert ctrl_c[scenario] == ""


def test_ctrl_c_prints_nothing(ctrl_c: dict[str, str]) -> None:
    """Check that no exception is lost: Python prints those that a callback cannot raise."""
    assert ctrl_c["stderr"] == ""


@pytest.mark.parametrize(
    "name", ["context", "save", "file", "slot", "reader", "group", "checkpoint"]
)
def test_no_python_runs_while_something_is_freed(name: str) -> None:
    """Check that destructors run no Python, where a KeyboardInterrupt would be lost."""
    owner = [owned(name)]
    functions = []
    gc.collect()  # what earlier tests left behind would be freed by Python code

    def profile(frame: FrameType, event: str, _argument: object) -> None:
        if event == "call":
            functions.append(frame.f_code.co_name)

    sys.setprofile(profile)
    try:
        owner.clear()
    finally:
        sys.setprofile(None)
    assert functions == []


# ---- kill -9 -------------------------------------------------------------------------------------

KILLED = """
    import fcntl
    import os
    import random
    import signal
    import sys
    import time
    from pathlib import Path

    import torch
    import ioshape
    from checkpoints import checkpoint, names_in, number_in, wait_until

    MIB = 1 << 20


    def save_for_ever(path, seed):
        # Numbers count up. Each is told before it is begun and after it is in place.
        chance = random.Random(seed)
        number = number_in(path)
        os.pwrite(told, number.to_bytes(8, "little"), 0)  # whoever saved it was killed before that
        while True:
            number += 1
            state = checkpoint(number, chance.choice((1000, MIB, 4 * MIB, 12 * MIB)))
            durable = chance.random() < 0.5
            if chance.random() < 0.5:
                ioshape.save(state, path, durable=durable)
            else:
                ioshape.save_async(state, path, durable=durable).wait()
            os.pwrite(told, number.to_bytes(8, "little"), 0)


    def is_free(left):
        with left.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
        return True


    rounds, seed = map(int, sys.argv[1:])
    folder = Path("files")
    folder.mkdir()
    path = folder / "model.pt"
    torch.save(checkpoint(0), path)  # by torch: this process never opens a context of ours
    told = os.open("told", os.O_RDWR | os.O_CREAT)
    chance = random.Random(seed)
    leftovers = left_behind = 0
    for i in range(rounds):
        last = int.from_bytes(os.pread(told, 8, 0), "little")
        child = os.fork()
        if not child:
            save_for_ever(path, chance.random())
        if i % 3 == 0:
            time.sleep(chance.uniform(0.02, 0.15))
        elif i % 3 == 1:  # while there is something to leave behind
            while len(names_in(folder)) == 1:
                time.sleep(0.0005)
            time.sleep(chance.uniform(0, 0.02))
        else:  # when a save has just ended, and the next begins
            while int.from_bytes(os.pread(told, 8, 0), "little") <= last:
                time.sleep(0.0005)
            time.sleep(chance.uniform(0, 0.01))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        finished = int.from_bytes(os.pread(told, 8, 0), "little")
        # The last save that the child reported, or the next one, which it could not report.
        assert number_in(path) in (finished, finished + 1), (finished, number_in(path))
        assert finished >= last
        leftovers = max(leftovers, len(names_in(folder)) - 1)
        left_behind += len(names_in(folder)) > 1
    print(leftovers, left_behind, finished)
    # The kernel drops the locks of the last one when its last request has ended.
    wait_until(lambda: all(is_free(left) for left in folder.glob(".*")), "the end of the locks")
    ioshape.save(checkpoint(1000000), path)
    assert names_in(folder) == ["model.pt"]
    assert number_in(path) == 1000000
"""


def _assert_survives_kills(tmp_path: Path, rounds: int) -> None:
    seed = random.SystemRandom().randrange(1 << 30)
    finished = run_program(tmp_path, KILLED, str(rounds), str(seed))
    leftovers, left_behind, saves = map(int, finished.stdout.split())
    assert leftovers <= 5  # each process removes the files of earlier processes
    # With fewer kills during a save, the test would prove nothing.
    assert left_behind >= rounds // 10
    assert saves >= rounds // 3


@pytest.mark.slow
def test_kills_leave_the_old_file_or_the_new(tmp_path: Path) -> None:
    _assert_survives_kills(tmp_path, 30)


@pytest.mark.long
def test_many_kills_leave_the_old_file_or_the_new(tmp_path: Path) -> None:
    _assert_survives_kills(tmp_path, 300)
