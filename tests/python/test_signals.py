# SPDX-License-Identifier: Apache-2.0
"""The handler of a signal may save, whatever the program was doing: Slurm's requeue does."""

from pathlib import Path

import pytest
from checkpoints import names_in
from processes import run_interpreter

# Each time the handler has returned, the next signal comes a moment later, wherever the program is.
PROGRAM = """
    import faulthandler
    import random
    import signal
    import sys
    import time

    import ioshape
    import torch
    from checkpoints import checkpoint, number_in

    wanted, end = int(sys.argv[1]), time.monotonic() + float(sys.argv[2])
    at_random = random.Random(1)
    mine, small = checkpoint(7, 2 << 20), checkpoint(3, 5000)
    ioshape.configure(durable=False, staging_bytes="16M", unchanged="ignore")
    faulthandler.dump_traceback_later(100)
    for name in ("main.pt", "other.pt", "async.pt"):
        ioshape.save(small, name)
    handled, calls, failures = 0, {}, []


    def save():
        ioshape.save(small, "handler.pt")


    def save_to_the_same_file():
        ioshape.save(small, "async.pt")


    def save_async():
        ioshape.save_async(small, "handler-async.pt")


    def save_async_to_the_same_file():
        ioshape.save_async(small, "async.pt")


    def load():
        assert ioshape.load("other.pt")["number"] == 3


    def configure():
        ioshape.configure(queue_depth=at_random.choice([4, 8]))


    def write():
        with ioshape.open("handler.bin", "wb", checksums=True) as file:
            file.write(b"x" * 100)


    def ask():
        if handles:
            handles[-1].done()
            assert handles[-1].progress.total_bytes >= 0
        ioshape.settings()


    often = [save, save_to_the_same_file, save_async, save_async_to_the_same_file, load, write, ask]
    ways = [*often, *often, *often, configure]
    handles = []


    def again():
        signal.setitimer(signal.ITIMER_REAL, at_random.choice([1e-5, 1e-4, 1e-3, 5e-3]))


    def handle(number, frame):
        global handled
        handled += 1
        way = at_random.choice(ways)
        try:
            way()
            calls[way.__name__] = calls.get(way.__name__, 0) + 1
        except Exception as error:
            failures.append((way.__name__, repr(error)))
        if handled < wanted and time.monotonic() < end:
            again()


    signal.signal(signal.SIGALRM, handle)
    again()
    round_ = 0
    while handled < wanted and time.monotonic() < end:
        round_ += 1
        ioshape.save(mine, "main.pt")
        handles = [*handles[-2:], ioshape.save_async(mine, "async.pt")]
        handles[-1].add_done_callback(lambda handle: None)
        if round_ % 3 == 0:
            handles[-1].wait()
        if round_ % 5 == 0:
            ioshape.configure(queue_depth=6)
            assert ioshape.load("main.pt")["number"] == 7
    signal.setitimer(signal.ITIMER_REAL, 0)
    ioshape.wait_all()
    assert not failures, failures[:3]
    assert number_in("main.pt") == 7 and number_in("handler.pt") == 3
    assert number_in("async.pt") in (3, 7) and number_in("handler-async.pt") == 3
    assert set(calls) == {way.__name__ for way in ways}, calls
    print(handled, round_)
"""


# As many as come in so many seconds, where the machine is busy.
LENGTHS = [(2000, 40), pytest.param(50_000, 90, marks=pytest.mark.long)]


@pytest.mark.slow
@pytest.mark.parametrize(("most", "seconds"), LENGTHS)
def test_handlers_of_signals_save_and_load_thousands_of_times(
    most: int, seconds: int, tmp_path: Path
) -> None:
    finished = run_interpreter(tmp_path, PROGRAM, str(most), str(seconds))
    assert 200 <= int(finished.stdout.split()[0]) <= most + 1
    assert not [name for name in names_in(tmp_path) if "ioshape-tmp" in name]
