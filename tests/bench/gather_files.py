# SPDX-License-Identifier: Apache-2.0
"""Count the files and directories that a checkpoint creates on the metadata servers."""

import ctypes
import os
import select
import struct
import threading
from pathlib import Path
from types import TracebackType

from coordinators import coordinator

from .gather_node import settle, steps
from .gather_ranks import c_ranks, open_groups
from .setting import Figure, Outcome, Setting
from .slots_turns import programs
from .torch_worker import clear

RANKS, NODES = 64, 8
BYTES_EACH = 64 << 10

MOST = {"rank0": 3, "node": 10, "each": 66}

IN_MOVED_FROM, IN_MOVED_TO, IN_CREATE = 0x40, 0x80, 0x100
IN_Q_OVERFLOW, IN_ISDIR = 0x4000, 0x40000000
EVENT = struct.Struct("iIII")
QUIET_MS = 200


class Creations:
    """A counter of names created in a directory and below while the block runs.

    A file that is later renamed within the directory counts once. A file moved in from elsewhere
    counts, too.
    """

    def __init__(self, directory: Path) -> None:
        self.names: list[str] = []
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._inotify = self._libc.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK)
        self._paths: dict[int, Path] = {}
        # Entries that a directory already had when its watch began. Depending on timing, the kernel
        # may or may not report an event for them as well.
        self._found: set[tuple[int, str]] = set()
        self._moving: set[int] = set()
        self._end, self._ended = os.pipe2(os.O_CLOEXEC)
        self._watch(directory, is_new=False)
        self._thread = threading.Thread(target=self._listen)

    def __enter__(self) -> "Creations":
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        os.close(self._ended)
        self._thread.join()
        os.close(self._end)
        os.close(self._inotify)

    def _watch(self, path: Path, *, is_new: bool) -> None:
        mask = IN_MOVED_FROM | IN_MOVED_TO | IN_CREATE
        number = self._libc.inotify_add_watch(self._inotify, os.fsencode(path), mask)
        if number < 0:
            raise OSError(ctypes.get_errno(), "inotify_add_watch", str(path))
        self._paths[number] = path
        for entry in os.scandir(path):
            if is_new:
                self._found.add((number, entry.name))
                self._count(number, entry.name, is_folder=entry.is_dir())
            elif entry.is_dir():
                self._watch(path / entry.name, is_new=False)

    def _count(self, number: int, name: str, *, is_folder: bool) -> None:
        path = self._paths[number] / name
        self.names.append(str(path))
        if is_folder:
            self._watch(path, is_new=True)

    def _take(self, number: int, mask: int, cookie: int, name: str) -> None:
        if mask & IN_Q_OVERFLOW:
            raise OverflowError("more was created than the kernel could tell of")
        if mask & IN_MOVED_FROM:
            self._moving.add(cookie)
        elif mask & IN_MOVED_TO and cookie in self._moving:
            self._moving.remove(cookie)
        elif (number, name) in self._found:
            self._found.remove((number, name))
        else:
            self._count(number, name, is_folder=bool(mask & IN_ISDIR))

    def _listen(self) -> None:
        """Read events until none has come for QUIET_MS after the end."""
        while True:
            ready, _, _ = select.select([self._inotify, self._end], [], [])
            patience_s = QUIET_MS / 1000 if self._end in ready else 0
            while select.select([self._inotify], [], [], patience_s)[0]:
                data, at = os.read(self._inotify, 1 << 16), 0
                while at < len(data):
                    number, mask, cookie, length = EVENT.unpack_from(data, at)
                    at += EVENT.size
                    self._take(number, mask, cookie, data[at : at + length].rstrip(b"\0").decode())
                    at += length
            if self._end in ready:
                return


def created(setting: Setting, address: str, mode: str, store: str) -> list[str]:
    """Return the names created by the second of two saves. Some names are created only once."""
    directory = setting.folder / "checkpoints"
    clear(setting)
    directory.mkdir()
    with c_ranks(programs(setting) / "bench-worker", RANKS, NODES) as ranks:
        ranks.make_tensors(kind="equal", count=1, each=BYTES_EACH)
        ranks.each("context", IOSHAPE_COORDINATOR=address)
        open_groups(ranks, directory, mode, nodes=NODES, store=store)
        ranks.each("group_save", step=next(steps))
        settle(setting, directory)
        with Creations(directory) as creations:
            ranks.each("group_save", step=next(steps))
        ranks.each("group_end")
    return [name.removeprefix(f"{directory}/") for name in creations.names]


def measure(setting: Setting, outcome: Outcome) -> None:
    facts: dict[str, object] = {"ranks": RANKS, "nodes": NODES}
    with coordinator("redis") as redis:
        for mode, most in MOST.items():
            setting.say(f"{RANKS} ranks on {NODES} nodes, {mode}: files of a checkpoint")
            names = created(setting, redis, mode, "redis")
            # The slots use the same coordinator. Only the messages between ranks move to files.
            with_notes = created(setting, redis, mode, "files")
            facts[mode] = {"redis": names, "files": with_notes}
            outcome.figures.append(
                Figure(
                    f"files_{mode}",
                    len(names),
                    "<=",
                    most,
                    f"files and directories; {len(with_notes)} where notes are files",
                )
            )
    outcome.facts["files"] = facts
    clear(setting)
