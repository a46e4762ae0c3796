# SPDX-License-Identifier: Apache-2.0
"""A signal handler may save, whatever it interrupts. Jobs that Slurm requeues save this way."""

import os
import stat
from pathlib import Path

import pytest
from checkpoints import names_in
from ioshape import _early
from processes import run_interpreter

# Schedules the next signal a moment after each handler returns, wherever the program is then.
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
    ioshape.configure(durable=False, staging_bytes="16M", examine="off")
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
        ioshape.configure(slots=at_random.choice([4, 8]))


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
            ioshape.configure(slots=6)
            assert ioshape.load("main.pt")["number"] == 7
    signal.setitimer(signal.ITIMER_REAL, 0)
    ioshape.wait_all()
    assert not failures, failures[:3]
    assert number_in("main.pt") == 7 and number_in("handler.pt") == 3
    assert number_in("async.pt") in (3, 7) and number_in("handler-async.pt") == 3
    assert set(calls) == {way.__name__ for way in ways}, calls
    print(handled, round_)
"""


# The number of signals, and the seconds after which a busy machine may stop earlier.
LENGTHS = [(2000, 40), pytest.param(50_000, 90, marks=pytest.mark.long)]


@pytest.mark.long
@pytest.mark.parametrize(("most", "seconds"), LENGTHS)
def test_handlers_of_signals_save_and_load_thousands_of_times(
    most: int, seconds: int, tmp_path: Path
) -> None:
    finished = run_interpreter(tmp_path, PROGRAM, str(most), str(seconds))
    assert 200 <= int(finished.stdout.split()[0]) <= most + 1
    assert not [name for name in names_in(tmp_path) if "ioshape-tmp" in name]


# ---- A signal while the main thread imports ------------------------------------------------------

AT_IMPORTS = """
    import importlib
    import sys
    from pathlib import Path

    import ioshape
    import torch
    from signals_at_imports import in_child, interrupt

    saved = []


    def state(number):
        return {"number": number, "weight": torch.full((3000,), float(number))}


    def number_in(path):
        found = torch.load(path)
        assert found["weight"][-1] == found["number"]
        return found["number"]


    def handle(name):
        path = f"handler-{len(saved)}.pt"
        assert ioshape.save(state(3), path).path == path
        assert number_in(path) == 3
        saved.append(name)


    def use():
        assert ioshape.save(state(7), "main.pt").written_by == "ioshape"
        assert number_in("main.pt") == 7
"""

FIRST_USE = """
    def at_one(number):
        names = interrupt(use, handle, only=number)
        assert saved == [names[number]], (saved, number)


    def at_all():
        names = interrupt(use, handle)
        assert saved == names
        Path("names").write_text(chr(10).join(names))


    in_child(at_all)
    names = Path("names").read_text().split()
    assert "ioshape._save.save" in names
    for number in range(0, len(names), 9):
        in_child(lambda: at_one(number))
    print(len(names))
"""

FOREIGN = """
    def count(name):
        names = interrupt(lambda: importlib.import_module(name), handle, only=-1)
        assert name in names and not saved
        Path("count").write_text(str(len(names)))


    def at_one(name, number):
        interrupt(lambda: importlib.import_module(name), handle, only=number)
        assert len(saved) == 1
        use()


    # "statistics" is one that ioshape needs, too.
    for name in ("xml.dom.minidom", "statistics"):
        in_child(lambda: count(name))
        for number in range(int(Path("count").read_text())):
            in_child(lambda: at_one(name, number))
        print(number)
"""


@pytest.mark.slow
def test_a_handler_saves_wherever_it_interrupts_the_first_use(tmp_path: Path) -> None:
    finished = run_interpreter(tmp_path, AT_IMPORTS + FIRST_USE)
    assert int(finished.stdout) > 70
    assert not [name for name in names_in(tmp_path) if "ioshape-tmp" in name]


@pytest.mark.slow
def test_a_handlers_save_is_the_first_use_within_any_other_import(tmp_path: Path) -> None:
    finished = run_interpreter(tmp_path, AT_IMPORTS + FOREIGN)
    assert min(map(int, finished.stdout.split())) >= 2


# ---- Modes and owners ----------------------------------------------------------------------------


def modes_in(folder: Path) -> list[int]:
    return [stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()]


class Witness:
    """An object that records the modes of all files in a directory while it is pickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.seen: list[int] = []

    def __reduce__(self) -> tuple[type[list[int]], tuple[()]]:
        self.seen = modes_in(self.folder)
        return list, ()


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o664])
def test_an_early_save_keeps_the_mode_of_the_file_that_it_replaces(
    mode: int, tmp_path: Path
) -> None:
    path = tmp_path / "model.pt"
    path.touch()
    path.chmod(mode)
    witness = Witness(tmp_path)
    _early.save(witness, path)
    assert witness.seen == [mode, mode]
    assert modes_in(tmp_path) == [mode]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_an_early_save_over_a_file_of_another_owner_is_for_its_user_alone(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    path.touch()
    path.chmod(0o664)
    os.chown(path, -1, 60001)
    witness = Witness(tmp_path)
    _early.save(witness, path)
    assert sorted(witness.seen) == [0o600, 0o664]
    assert modes_in(tmp_path) == [0o600]


# ---- A signal while torch is imported ------------------------------------------------------------

TORCH = """
    import importlib
    import sys
    from pathlib import Path

    import ioshape
    from signals_at_imports import interrupt

    succeeded = []


    def try_to_save(name):
        # To begin an import of torch here would break the interrupted one.
        torch = sys.modules.get("torch")
        if torch is None:
            return
        here = []
        for save in (lambda: torch.save, lambda: ioshape.save):
            try:
                save()({"number": 3}, "handler.pt")
                here.append(True)
            except (AttributeError, ImportError):
                here.append(False)
        succeeded.append(here)


    interrupt(lambda: importlib.import_module("torch"), try_to_save)
    assert succeeded.count([True, True]) > 300, succeeded
    assert all(stock == ours for stock, ours in succeeded)
    assert ioshape.save({"number": 7}, "main.pt").written_by == "ioshape"
    assert ioshape.load("main.pt") == {"number": 7} and ioshape.load("handler.pt") == {"number": 3}
"""


@pytest.mark.slow
def test_a_handler_that_interrupts_the_import_of_torch_saves_where_torch_can(
    tmp_path: Path,
) -> None:
    run_interpreter(tmp_path, TORCH)
    assert not [name for name in names_in(tmp_path) if "ioshape-tmp" in name]
