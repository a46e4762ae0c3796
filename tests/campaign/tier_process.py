# SPDX-License-Identifier: Apache-2.0
"""Run one trial of the kind "tier".

For each path one saver at a time writes version after version, over the tier or directly. Drains
copy them to the destinations. All these processes are killed one after another and replaced.
Meanwhile the judge looks at the destinations. No version may be incomplete, and none may follow a
later one. At the end of a round no saver runs, and drains are killed while they copy the last
versions. Then each version that a saver reported as safe must be there, or a later one.

    tier_process.py SEED WORK
"""

import contextlib
import json
import mmap
import os
import random
import shutil
import signal
import struct
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import ioshape
from ioshape._core.context import Context
from ioshape._tier.tier import Tier

ROUNDS = 6
KILLS_AMID = 4
#: The last one is a directory.
PATHS = ("a.bin", "b.bin", "folder")
FILES = ("one", *(f"inner/{number}" for number in range(8)))  # of the directory
DRAINS = ("a drain", "another drain")
ROLES = (*PATHS, *DRAINS)
MOST_BYTES = 2 << 20
#: Files that are written within this time may have equal timestamps.
TICK_S = 0.012
MOST_PAUSE_S = 0.1
LOOK_S = 0.002
MEMORY = "/dev/shm"  # not the filesystem of the destinations


class Noted:
    """State of a path in shared memory: the latest begun version and the latest safe version."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, mmap.PAGESIZE)

    def _at(self, index: int) -> int:
        return int(struct.unpack_from("<q", self._memory, 8 * index)[0])

    def _set(self, index: int, version: int) -> None:
        struct.pack_into("<q", self._memory, 8 * index, version)

    @property
    def begun(self) -> int:
        return self._at(0)

    @property
    def safe(self) -> int:
        return self._at(1)

    def begin(self) -> int:
        self._set(0, self.begun + 1)
        return self.begun

    def end(self, version: int) -> None:
        self._set(1, version)


class Torn(Exception):
    """The bytes belong to no single version."""


def content(version: int, n_bytes: int) -> bytes:
    return struct.pack("<q", version) * (n_bytes // 8)


def version_of(data: bytes) -> int:
    if len(data) < 8:
        raise Torn(f"it has {len(data)} bytes")
    version: int = struct.unpack_from("<q", data)[0]
    if data != content(version, len(data)) or len(data) % 8:
        raise Torn(f"not all of it is version {version}")
    return version


def version_at(path: str) -> int | None:
    """Return the version at a path, or None if it does not exist."""
    try:
        above = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        if not path.endswith("folder"):
            with open(above, "rb", closefd=False) as file:
                return version_of(file.read())
        # Read all files of one directory, even if another one replaces it meanwhile.
        versions = set()
        for name in FILES:
            inner = os.open(name, os.O_RDONLY, dir_fd=above)
            with open(inner, "rb") as file:  # noqa: PTH123
                versions.add(version_of(file.read()))
    except FileNotFoundError:
        if os.fstat(above).st_nlink:  # true if the directory was not replaced
            try:
                if os.path.samestat(os.stat(path), os.fstat(above)):  # noqa: PTH116
                    raise Torn("a file of it is missing") from None
            except FileNotFoundError:
                pass
        return version_at(path)
    finally:
        os.close(above)
    if len(versions) > 1:
        raise Torn(f"it has versions {versions}")
    return versions.pop()


class Work:
    """The folders of a trial, and the work of its processes."""

    def __init__(self, seed: int, folder: Path, near: Path) -> None:
        self.seed = seed
        self._near = str(near)
        self.paths = {name: str(folder / name) for name in PATHS}
        self.noted = {name: Noted() for name in PATHS}
        self._begun = 0

    def tier(self) -> Tier:
        return Tier(Context(), self._near)

    def start(self, role: str) -> int:
        """Start a process that saves to the path of this name, or drains."""
        self._begun += 1
        dice = random.Random(f"{self.seed}/{role}/{self._begun}")
        if role in self.paths:
            return forked(lambda: self._save(role, dice))
        return forked(lambda: self._drain(dice))

    def _save(self, name: str, dice: random.Random) -> None:
        tier, path, noted = self.tier(), self.paths[name], self.noted[name]
        while True:
            time.sleep(TICK_S)
            version = noted.begin()
            data = content(version, dice.randrange(8, MOST_BYTES, 8))
            direct = dice.random() < 0.25
            place = path if direct else tier.place(path, len(data))
            if name == "folder":
                with ioshape.directory(place) as made:
                    Path(made, "inner").mkdir()
                    for file_name in FILES:
                        Path(made, file_name).write_bytes(data[: len(data) // 64 * 8 + 8])
            else:
                with ioshape.open(place, "wb") as file:
                    file.write(data)
            if not direct:
                tier.keep(path)
            noted.end(version)

    def _drain(self, dice: random.Random) -> None:
        tier = self.tier()
        while True:
            tier.drain()
            time.sleep(dice.random() * TICK_S)


def forked(call: Callable[[], object]) -> int:
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        call()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


class Judge:
    """Findings, counted by the names in the ledger."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._seen = dict.fromkeys(PATHS, 0)
        self.counts: Counter[str] = Counter(
            tier_kills=0, tier_lost=0, tier_torn=0, tier_older_over_newer=0
        )
        self.findings: list[str] = []

    def _find(self, what: str, name: str, sentence: str) -> None:
        self.counts[what] += 1
        self.findings.append(f"{what}, {name}, after {self.counts['tier_kills']} kills: {sentence}")

    def look(self, name: str, path: str = "") -> int:
        """Return the version at a path, or 0 if there is none."""
        try:
            return version_at(path or self._work.paths[name]) or 0
        except Torn as torn:
            self._find("tier_torn", name, str(torn))
            return self._work.noted[name].begun

    def look_at_all(self) -> None:
        """Look at all destinations while the trial runs."""
        for name, before in self._seen.items():
            now = self.look(name)
            if now < before:
                self._find("tier_older_over_newer", name, f"{now} comes after {before}")
            self._seen[name] = now

    def look_at_the_nearest(self) -> None:
        """Look at the nearest copies, as a load does, when no process runs."""
        for name, noted in self._work.noted.items():
            with contextlib.closing(self._work.tier()) as tier:
                place = tier.find(self._work.paths[name])
            found = self.look(name, place or "")
            if found < noted.safe:
                self._find("tier_lost", name, f"{found} is the nearest, {noted.safe} was safe")

    def drain(self) -> None:
        """Drain what is left, as a later process would, and judge the destinations."""
        with contextlib.closing(self._work.tier()) as tier:
            tier.drain()
        for name, noted in self._work.noted.items():
            found = self.look(name)
            if found < noted.safe:
                self._find("tier_lost", name, f"{found} is there, {noted.safe} was safe")
        self.look_at_all()


class Players:
    """The running processes of a trial, by role."""

    def __init__(self, work: Work, judge: Judge) -> None:
        self._work = work
        self._judge = judge
        self._running = {role: work.start(role) for role in ROLES}

    def kill(self, role: str, within_s: float, *, replaced: bool) -> None:
        """Kill a process after this time, in which the judge looks at the destinations."""
        end = time.monotonic() + within_s
        while time.monotonic() < end:
            self._judge.look_at_all()
            time.sleep(LOOK_S)
        kill(self._running.pop(role))
        self._judge.counts["tier_kills"] += 1
        if replaced:
            self._running[role] = self._work.start(role)

    def end(self) -> None:
        """Kill the processes that are left."""
        while self._running:
            kill(self._running.popitem()[1])


def play(work: Work, judge: Judge, dice: random.Random) -> None:
    """Kill savers and drains, then all savers, then drains that copy the rest. Then judge."""
    players = Players(work, judge)
    try:
        for _ in range(KILLS_AMID):
            players.kill(dice.choice(ROLES), dice.random() * MOST_PAUSE_S, replaced=True)
        for name in PATHS:
            players.kill(name, 0, replaced=False)
        for role in DRAINS:
            players.kill(role, dice.random() * TICK_S, replaced=True)
    finally:
        players.end()
    judge.look_at_the_nearest()
    judge.drain()


def kill(child: int) -> None:
    os.kill(child, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status != -signal.SIGKILL:
        raise RuntimeError(f"a process ended by itself, with {status}")


def main() -> None:
    seed, folder = int(sys.argv[1]), Path(sys.argv[2], f"seed-{sys.argv[1]}")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    near = MEMORY if os.access(MEMORY, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="ioshape-tier-", dir=near) as tier:
        work = Work(seed, folder, Path(tier))
        judge = Judge(work)
        dice = random.Random(seed)
        for _ in range(ROUNDS):
            play(work, judge, dice)
    if not judge.findings:
        shutil.rmtree(folder)
    print(json.dumps({"counts": judge.counts, "findings": judge.findings}))


if __name__ == "__main__":
    main()
