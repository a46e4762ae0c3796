# SPDX-License-Identifier: Apache-2.0
"""Make block devices for trials of power failures: they log writes, and can refuse them.

A qemu-storage-daemon exports the device as a file by FUSE, and a loop device uses that file. Mounts
and processes must be in namespaces of their own: see power_machine.py.
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

#: Sizes close to the minimum of mkfs, because images are copied often.
SIZES = {"ext4": 128 * MIB, "xfs": 300 * MIB, "btrfs": 192 * MIB}
_MAKE = {
    "ext4": ("mkfs.ext4", "-q", "-F", "-b", "4096"),
    "xfs": ("mkfs.xfs", "-q", "-f"),
    "btrfs": ("mkfs.btrfs", "-q", "-f"),
}


def call(*command: str | Path) -> None:
    """Run a command, and raise its output as an OSError if it fails."""
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
    """Make a filesystem in a sparse file."""
    with image.open("wb") as file:
        file.truncate(SIZES[kind])
    call(*_MAKE[kind], image)
    call("fallocate", "--dig-holes", image)


def mount(image: Path, at: Path, *options: str) -> None:
    """Mount an image on a loop device, which goes away when the filesystem is unmounted."""
    at.mkdir(exist_ok=True)
    call("mount", "-o", ",".join(("loop", "noatime", *options)), image, at)


def unmount(at: Path) -> None:
    call("umount", at)


@contextlib.contextmanager
def small_requests(at: Path) -> Iterator[None]:
    """Limit requests to the loop device below a mount, so that each becomes one FUSE request.

    FUSE may do the first part of a large request and refuse the rest. The loop device then reports
    success for all of it, and the error is lost.
    """
    mounts = [line.split(" ") for line in Path("/proc/self/mounts").read_text().splitlines()]
    loop = next(Path(source).name for source, where, *_ in mounts if where == str(at))
    queue = Path("/sys/block") / loop / "queue"
    (queue / "max_sectors_kb").write_text("64")
    try:
        yield
    finally:
        # Reset the limit to the maximum. The former value may come from a killed trial.
        (queue / "max_sectors_kb").write_text((queue / "max_hw_sectors_kb").read_text())


class Device:
    """A device whose writes go to an image."""

    def __init__(self, folder: Path, image: Path, log: Path | None = None) -> None:
        #: Path of the device.
        self.file = folder / "device"
        self.file.touch()
        monitor = folder / "monitor"
        nodes = [f"driver=file,node-name=image,filename={image},discard=unmap"]
        if log is not None:
            log.touch()
            nodes += [
                f"driver=file,node-name=log-file,filename={log}",
                # Updates the number of entries in the log after each write.
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
        """Connect to the daemon, which answers when all its nodes are there."""
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
        """Put the top node on another one. The daemon flushes first.

        The flush may report an error of an earlier request. Such an error is reported once, so a
        retry succeeds.
        """
        top = {"driver": "raw", "node-name": "top", "file": node, "discard": "unmap"}
        for tries_left in reversed(range(8)):
            try:
                self._tell("blockdev-reopen", options=[top])
                return
            except OSError:
                if not tries_left:
                    raise

    def refuse(self, rules: dict[str, Any]) -> None:
        """Make requests fail from now on, by rules of qemu's driver "blkdebug"."""
        node = {"driver": "blkdebug", "node-name": "refusing", "image": self._below}
        self._tell("blockdev-add", **node, **rules)
        self._put_top_on("refusing")

    def accept(self) -> None:
        """End the effect of refuse()."""
        self._put_top_on(self._below)
        self._tell("blockdev-del", **{"node-name": "refusing"})

    def stop(self) -> None:
        """Stop an unmounted device. Its image and log are complete then."""
        self._process.terminate()
        self._process.wait(PATIENCE_S)
        self.file.unlink()
