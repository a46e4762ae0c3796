# SPDX-License-Identifier: Apache-2.0
"""Block devices for trials of power loss: one that logs what is written to it, and may refuse it.

A qemu-storage-daemon shows the device as a file (by FUSE), and a loop device is on that file. To be
used where mounts and processes are nobody else's: see power_machine.py.
"""

import contextlib
import json
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PATH = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
PATIENCE_S = 60.0
MIB = 1 << 20

#: The smallest that mkfs makes, or a little more: images are copied all the time.
SIZES = {"ext4": 128 * MIB, "xfs": 300 * MIB, "btrfs": 192 * MIB}
_MAKE = {
    "ext4": ("mkfs.ext4", "-q", "-F", "-b", "4096"),
    "xfs": ("mkfs.xfs", "-q", "-f"),
    "btrfs": ("mkfs.btrfs", "-q", "-f"),
}


def call(*command: str | Path) -> None:
    """With what it said, if it fails."""
    done = subprocess.run(
        [str(word) for word in command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"PATH": PATH},
        check=False,
    )
    if done.returncode:
        raise OSError(f"{' '.join(map(str, command))}: {done.stdout.strip()}")


def make_filesystem(kind: str, image: Path) -> None:
    """In a sparse file."""
    with image.open("wb") as file:
        file.truncate(SIZES[kind])
    call(*_MAKE[kind], image)
    call("fallocate", "--dig-holes", image)


def mount(image: Path, at: Path, *options: str) -> None:
    """On a loop device that goes when the filesystem is unmounted."""
    at.mkdir(exist_ok=True)
    call("mount", "-o", ",".join(("loop", "noatime", *options)), image, at)


def unmount(at: Path) -> None:
    call("umount", at)


@contextlib.contextmanager
def small_requests(at: Path) -> Iterator[None]:
    """To the loop device below a mount; each goes to FUSE as one.

    Of a large request FUSE may do the first part and refuse the rest, and the loop device says that
    all is done: that error nobody hears of.
    """
    mounts = [line.split(" ") for line in Path("/proc/self/mounts").read_text().splitlines()]
    loop = next(Path(source).name for source, where, *_ in mounts if where == str(at))
    queue = Path("/sys/block") / loop / "queue"
    (queue / "max_sectors_kb").write_text("64")
    try:
        yield
    finally:
        # It stays with the device. What was there before may be ours, of a trial that was killed.
        (queue / "max_sectors_kb").write_text((queue / "max_hw_sectors_kb").read_text())


class Device:
    """What is written to it goes to an image."""

    def __init__(self, folder: Path, image: Path, log: Path | None = None) -> None:
        #: where it is seen
        self.file = folder / "device"
        self.file.touch()
        monitor = folder / "monitor"
        nodes = [f"driver=file,node-name=image,filename={image},discard=unmap"]
        if log is not None:
            log.touch()
            nodes += [
                f"driver=file,node-name=log-file,filename={log}",
                # Its count of entries is right at any time.
                "driver=blklogwrites,node-name=log,file=image,log=log-file,discard=unmap,"
                "log-super-update-interval=1",
            ]
        self._below = "image" if log is None else "log"
        nodes.append(f"driver=raw,node-name=top,file={self._below},discard=unmap")
        self._process = subprocess.Popen(
            [
                "qemu-storage-daemon",
                f"--chardev=socket,id=monitor,path={monitor},server=on,wait=off",
                "--monitor=chardev=monitor",
                *(f"--blockdev={node}" for node in nodes),
                f"--export=fuse,id=device,node-name=top,mountpoint={self.file},writable=on",
            ],
            stdin=subprocess.DEVNULL,
        )
        self._connect(monitor)

    def _connect(self, monitor: Path) -> None:
        """It answers when all that it was asked for is there."""
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(PATIENCE_S)
        end = time.monotonic() + PATIENCE_S
        while True:
            try:
                connection.connect(str(monitor))
                break
            except (FileNotFoundError, ConnectionRefusedError):
                if self._process.poll() is not None or time.monotonic() > end:
                    raise OSError("qemu-storage-daemon does not begin") from None
                time.sleep(0.01)
        self._monitor = connection.makefile("rw", encoding="utf-8")
        self._monitor.readline()
        self._tell("qmp_capabilities")

    def _tell(self, command: str, **arguments: Any) -> None:
        self._monitor.write(json.dumps({"execute": command, "arguments": arguments}) + "\n")
        self._monitor.flush()
        while True:
            answer = json.loads(self._monitor.readline())
            if "error" in answer:
                raise OSError(f"{command}: {answer['error']['desc']}")
            if "return" in answer:
                return

    def _put_top_on(self, node: str) -> None:
        """Flushes first. That may meet an error that was meant for others, which then is gone."""
        top = {"driver": "raw", "node-name": "top", "file": node, "discard": "unmap"}
        for tries_left in reversed(range(8)):
            try:
                self._tell("blockdev-reopen", options=[top])
                return
            except OSError:
                if not tries_left:
                    raise

    def refuse(self, rules: dict[str, Any]) -> None:
        """Has requests fail from here on: rules of qemu's driver "blkdebug"."""
        node = {"driver": "blkdebug", "node-name": "refusing", "image": self._below}
        self._tell("blockdev-add", **node, **rules)
        self._put_top_on("refusing")

    def accept(self) -> None:
        """As before refuse()."""
        self._put_top_on(self._below)
        self._tell("blockdev-del", **{"node-name": "refusing"})

    def stop(self) -> None:
        """When it is not mounted any more. Its image and log are complete then."""
        self._process.terminate()
        self._process.wait(PATIENCE_S)
        self.file.unlink()
