# SPDX-License-Identifier: Apache-2.0
"""Save on a device that logs its writes, and keep a history of the saves elsewhere.

The contents of a save follow from its name and version, so the history determines them. Three
processes save checkpoints together while a fourth one saves files.
"""

import atexit
import os
import random
import sys
import traceback
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ioshape
import torch

from . import power_log

RANKS = 3
KEEP_LAST = 2
FILES = ("a.pt", "b.pt", "c.pt", "d.pt")
N_SAVES = 24
N_CHECKPOINTS = 8

_KIB = 1 << 10
#: Sizes for a save by one write, and for saves through engines; some are not whole blocks.
_SIZES = (3 * _KIB, 100 * _KIB, 700 * _KIB, 1500 * _KIB + 8, 4000 * _KIB + 16)
_SIZES_OF_PARTS = (3 * _KIB, 300 * _KIB, 1200 * _KIB + 8)


def contents(name: str, version: int, sizes: tuple[int, ...] = _SIZES) -> dict[str, Any]:
    """Return the saved object."""
    seed = zlib.crc32(f"{name} {version}".encode())
    words = torch.arange(sizes[seed % len(sizes)] // 8, dtype=torch.int64)
    return {"name": name, "version": version, "data": words * (2 * seed + 1) + seed}


def part(name: str, version: int, rank: int) -> dict[str, Any]:
    return contents(f"{name}, rank {rank}", version, _SIZES_OF_PARTS) | {"version": version}


def is_equal(found: Any, wanted: dict[str, Any]) -> bool:
    return (
        isinstance(found, dict)
        and found.keys() == wanted.keys()
        and (found["name"], found["version"]) == (wanted["name"], wanted["version"])
        and torch.equal(found["data"], wanted["data"])
    )


# ---- The history ---------------------------------------------------------------------------------


class Recorder:
    """A recorder of the positions in the log at which saves began and were acknowledged."""

    def __init__(self, history: Path, log: Path) -> None:
        # line-buffered: one write for each line
        self._history = history.open("a", encoding="utf-8", buffering=1)
        self._log = os.open(log, os.O_RDONLY | os.O_CLOEXEC)

    def note(self, event: str, name: str, version: int) -> None:
        self._history.write(f"{power_log.n_entries(self._log)} {event} {name} {version}\n")


@dataclass
class Saved:
    """A version of a file or checkpoint. Positions are numbers of entries in the log."""

    name: str
    version: int
    begun: int
    acknowledged: int | None = None

    def is_begun(self, at: int) -> bool:
        return self.begun <= at

    def is_acknowledged(self, at: int) -> bool:
        return self.acknowledged is not None and self.acknowledged <= at


@dataclass
class History:
    """The saves, in the order in which they began."""

    saves: list[Saved] = field(default_factory=list)

    @classmethod
    def read(cls, path: Path) -> "History":
        found: dict[tuple[str, int], Saved] = {}
        for line in path.read_text(encoding="utf-8").splitlines():
            position, event, name, version = line.split(" ")
            key = name, int(version)
            if event == "begun":
                found[key] = Saved(*key, int(position))
            else:
                found[key].acknowledged = int(position)
        return cls(list(found.values()))

    def acknowledged(self) -> list[int]:
        return [save.acknowledged for save in self.saves if save.acknowledged is not None]

    def versions(self, name: str, at: int) -> range:
        """Return the versions that may exist at this point of the log.

        A range from 0 allows none.
        """
        of_name = [save for save in self.saves if save.name == name]
        oldest = [save.version for save in of_name if save.is_acknowledged(at)]
        newest = [save.version for save in of_name if save.is_begun(at)]
        return range(max(oldest, default=0), max(newest, default=0) + 1)

    def checkpoints(self, at: int) -> list[str]:
        """Return the checkpoints begun by then, in the order of their first saves."""
        names = [s.name for s in self.saves if s.name.startswith("step-") and s.is_begun(at)]
        return list(dict.fromkeys(names))

    def kept(self, at: int) -> list[str]:
        """Return checkpoints that retention must not have removed by then.

        Fewer than KEEP_LAST newer ones were begun since they were acknowledged.
        """
        begun = [s for s in self.saves if s.name.startswith("step-") and s.is_begun(at)]
        last = {s.name: number for number, s in enumerate(begun) if s.is_acknowledged(at)}
        return [
            name
            for name, number in last.items()
            if len({s.name for s in begun[number + 1 :]} - {name}) < KEEP_LAST
        ]


# ---- Saving processes ---------------------------------------------------------------------------


def _in_child(body: Callable[[], None], engine: str) -> int:
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        os.environ["IOSHAPE_ENGINE"] = engine
        body()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()  # the library closes groups in an exit function
        sys.stderr.flush()
        os._exit(status)


def _save_files(folder: Path, recorder: Recorder, seed: int, durable: bool) -> None:
    random_ = random.Random(f"files {seed}")
    versions = dict.fromkeys(FILES, 0)
    under_way: list[tuple[ioshape.SaveHandle, str, int]] = []

    def wait() -> None:
        handle, name, version = under_way.pop(0)
        handle.result()
        recorder.note("acknowledged", name, version)

    for _ in range(N_SAVES):
        name = random_.choice(FILES)
        versions[name] += 1
        save = name, versions[name]
        recorder.note("begun", *save)
        if random_.random() < 0.5:
            handle = ioshape.save_async(contents(*save), folder / name, durable=durable)
            under_way.append((handle, *save))
        else:
            ioshape.save(contents(*save), folder / name, durable=durable)
            recorder.note("acknowledged", *save)
        if len(under_way) > random_.randrange(3):
            wait()
    while under_way:
        wait()


def _save_checkpoints(folder: Path, recorder: Recorder, seed: int, rank: int) -> None:
    random_ = random.Random(f"checkpoints {seed}")  # equal on all ranks
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(RANKS),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(RANKS),
        MASTER_ADDR="localhost",
        MASTER_PORT="1",
        IOSHAPE_MODE=random_.choice(("each", "node", "rank0")),
    )
    step, version = 0, 0
    for _ in range(N_CHECKPOINTS):
        if version == 1 and random_.random() < 0.3:
            version += 1  # replaces the checkpoint
        else:
            step, version = step + 1, 1
        name = f"step-{step:010d}"
        if not rank:
            recorder.note("begun", name, version)
        save = part(name, version, rank), folder, step
        if random_.random() < 0.5:
            ioshape.save_group_async(*save, keep_last=KEEP_LAST).result()
        else:
            ioshape.save_group(*save, keep_last=KEEP_LAST)
        if not rank:
            recorder.note("acknowledged", name, version)


def _make_folders(*folders: Path) -> None:
    """Make durable folders before anything is saved there."""
    for folder in folders:
        folder.mkdir(exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def run(disk: Path, history: Path, log: Path, seed: int, durable: bool) -> History:
    """Save to a folder, and return the history. It is false for saves that are not durable."""
    _make_folders(disk / "files", disk / "run", disk)

    engine = random.Random(f"engine {seed}").choice(("auto", "auto", "threads", "buffered"))

    def files() -> None:
        _save_files(disk / "files", Recorder(history, log), seed, durable)

    def checkpoints(rank: int) -> Callable[[], None]:
        return lambda: _save_checkpoints(disk / "run", Recorder(history, log), seed, rank)

    bodies = (files, *map(checkpoints, range(RANKS)))
    children = [_in_child(body, engine) for body in bodies]
    statuses = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    if any(statuses):
        raise RuntimeError(f"processes that save ended with {statuses}")
    return History.read(history)
