# SPDX-License-Identifier: Apache-2.0
"""Mounts of stripefs, which simulates a parallel filesystem; its README.md describes the model."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tree import build_folder

TIMEOUT_S = 60.0

#: folder for contents while it is mounted: memory, so that no disk affects the model
MEMORY = Path("/dev/shm")


#: parameters of a metadata server that takes no time
INSTANT = {"mds_latency_ms": 0, "mds_rate": 0}


class StripefsError(RuntimeError):
    """A request to stripefs failed."""


def stripefs() -> Path:
    """Return the path of the program."""
    return build_folder() / "tests" / "c" / "support" / "stripefs" / "stripefs"


def unavailable() -> str:
    """Return why stripefs cannot be mounted here; "" if it can."""
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        return "stripefs needs /dev/fuse, and the right to use it"
    return ""


def ask(backing: Path, sentence: str) -> str:
    """Send an order to the stripefs with this backing folder.

    Return the answer, even if it is frozen.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(TIMEOUT_S)
        connection.connect(str(backing / "control"))
        connection.send(sentence.encode())
        return connection.recv(1 << 20).decode()


class Mount:
    """A mounted stripefs.

    Attributes:
        path: Its mount point.
        paths: The mount point of each client of the storage, `path` first.
        backing: Its backing folder, with the files that show the storage's state.
    """

    def __init__(self, paths: list[Path], backing: Path, process: "subprocess.Popen[str]") -> None:
        self.path = paths[0]
        self.paths = paths
        self.backing = backing
        self._process = process
        self._killed = False

    @property
    def pid(self) -> int:
        """The ID of the serving process."""
        return self._process.pid

    def order(self, sentence: str) -> None:
        """Give an order to stripefs/control.c, for example ``target 3 full``.

        Raises:
            StripefsError: The order is invalid.
        """
        result = int(ask(self.backing, sentence))
        if result:
            raise StripefsError(f"{sentence!r}: {os.strerror(result)}")

    def statistics(self) -> dict[str, Any]:
        """Return the statistics since the mount, or since `reset`."""
        result: dict[str, Any] = json.loads(ask(self.backing, "statistics"))
        return result

    def reset(self) -> None:
        """Reset the statistics."""
        self.order("reset")

    def kill(self) -> None:
        """Kill the process, as a crash would: the mount stays, and answers ENOTCONN."""
        self._killed = True
        self._process.kill()
        self._process.wait()

    def end(self) -> None:
        """Unmount it, whatever its state is. May be called again.

        Raises:
            StripefsError: It did not end normally.
        """
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(5)
            if self._process.poll() is None:
                self._process.kill()
                self._process.wait()
        for path in self.paths:
            unmount(path)
        if self._process.returncode and not self._killed:
            raise StripefsError(f"stripefs ended with {self._process.returncode}")


@contextmanager
def opened(path: Path, flags: int = os.O_RDWR | os.O_CREAT) -> Iterator[int]:
    """Open a file of a mount."""
    file = os.open(path, flags, 0o644)
    try:
        yield file
    finally:
        os.close(file)


def unmount(path: Path) -> None:
    """Unmount, also after a crash. Do nothing if nothing is mounted."""
    command = ["umount", "-l"] if os.geteuid() == 0 else ["fusermount3", "-u", "-z"]
    subprocess.run([*command, path], stderr=subprocess.DEVNULL, check=False, timeout=TIMEOUT_S)


def arguments(parameters: dict[str, object]) -> list[str]:
    """Return options: ``seek_ms=8`` is ``--seek-ms 8``, a list repeats it."""
    result = []
    for name, value in parameters.items():
        for one in value if isinstance(value, list | tuple) else [value]:
            result += ["--" + name.replace("_", "-"), str(one)]
    return result


@contextmanager
def striped(profile: str = "hdd", **parameters: object) -> Iterator[Mount]:
    """Mount a stripefs while the context lasts.

    Args:
        profile: ``hdd``, ``ssd`` or ``nfs``.
        parameters: What ``stripefs --help`` lists, with underscores: ``stripe_count=8``,
            ``trap=["setstripe-ignored"]``. ``clients`` is the number of mounts of the storage,
            each with a cache of its own. Without ``fsname`` each call makes a filesystem with a
            unique name, and so with a pool of its own.

    Raises:
        StripefsError: It could not be mounted.
    """
    folder = Path(tempfile.mkdtemp(prefix="stripefs-"))
    backing = Path(tempfile.mkdtemp(prefix="stripefs-", dir=MEMORY if MEMORY.is_dir() else None))
    clients = parameters.pop("clients", 1)
    assert isinstance(clients, int)
    parameters.setdefault("fsname", folder.name)
    paths = [folder / f"mount{number or ''}" for number in range(clients)]
    for path in paths:
        path.mkdir()
    command: list[str | Path] = [stripefs(), "--profile", profile, *arguments(parameters)]
    command += ["--backing", backing, *paths]
    # stripefs ends when the other end of its input is closed, also if this process is killed.
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    mount = Mount(paths, backing, process)
    try:
        assert process.stdout is not None
        if process.stdout.readline() != "mounted\n":
            raise StripefsError(f"it ended with {process.wait(TIMEOUT_S)}: {command}")
        yield mount
    finally:
        try:
            mount.end()
        finally:
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                pipe.close()
            shutil.rmtree(backing)
            for path in paths:
                path.rmdir()
            folder.rmdir()
