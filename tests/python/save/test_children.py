# SPDX-License-Identifier: Apache-2.0
"""Children of a process with saves in flight: fork, spawn, DataLoader."""

from pathlib import Path

import pytest
from checkpoints import names_in, number_in
from processes import run_interpreter, run_program
from saving_programs import file_to_replace, saving_program


@pytest.mark.slow
def test_children_do_not_disturb_their_parents_saves(tmp_path: Path) -> None:
    """Fork one child for each way to end, while a gate holds the parent's save."""
    path = file_to_replace(tmp_path)
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
    finished = run_program(tmp_path, saving_program(source))
    # On a busy machine the wait of "normal" for its slow save may be long enough to be told.
    for line in finished.stderr.splitlines():
        assert line.startswith("ioshape: finishing before the program ends: files/child normal")
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
    # The failure is not reported a second time when the parent ends.
    assert run_program(tmp_path, saving_program(source)).stdout == "heard\n"
    assert names_in(tmp_path / "files") == ["child.pt", "parent.pt"]


@pytest.mark.slow
def test_forks_at_any_moment(tmp_path: Path) -> None:
    """Check forks while threads save: no lock may stay locked in the child."""
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
            ioshape.configure(slots=1 + number % 5)
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
    run_program(tmp_path, saving_program(source))
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


@pytest.mark.long  # 40 children import the package
def test_forks_while_others_use_the_package_for_the_first_time(tmp_path: Path) -> None:
    for _ in range(5):
        run_program(tmp_path, FIRST_USE)


INTERRUPTED = """
import ctypes
import os
import signal
import threading
from functools import partial

# Called before the package's own. It does not look at signals itself, as os.kill() does.
send = partial(ctypes.CDLL(None).kill, os.getpid(), signal.SIGINT)
os.register_at_fork(after_in_parent=send)

import ioshape

try:
    child = os.fork()
    if not child:
        os._exit(0)
except KeyboardInterrupt:
    pass
os.wait()
thread = threading.Thread(target=lambda: print(ioshape.open), daemon=True)
thread.start()
thread.join(60)
"""


def test_ctrl_c_during_a_fork_blocks_no_other_thread(tmp_path: Path) -> None:
    assert "function open" in run_interpreter(tmp_path, INTERRUPTED).stdout


def test_a_child_that_was_forked_too_early_says_so(tmp_path: Path) -> None:
    """Check that the child fails instead of waiting for ever for the thread that was importing."""
    source = """
import os
import threading

import ioshape

ioshape._MOST_WAIT_S = 0.01
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


# A script is its own module here, because the children of "spawn" import it.
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
    # "spawn" and "forkserver" start processes that import torch, which takes time.
    ["fork", "spawn", pytest.param("forkserver", marks=pytest.mark.long)],
)
@pytest.mark.slow
def test_data_loaders_and_pools_work_during_a_save(tmp_path: Path, method: str) -> None:
    path = file_to_replace(tmp_path)
    finished = run_program(tmp_path, WITH_CHILDREN, method, "saving")
    assert finished.stderr == ""
    assert number_in(path) == 2
    for number in (100, 200, 300):
        # Pools end their processes by os._exit(), which runs only the exit handlers of
        # multiprocessing.
        assert number_in(path.with_name(f"{number}.pt")) == number + 1
    assert {f"item {i}.pt" for i in (0, 16, 32, 48)} <= set(names_in(path.parent))
