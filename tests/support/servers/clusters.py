# SPDX-License-Identifier: Apache-2.0
"""Small clusters of real parallel filesystems on this host, which tests/testbed starts.

Tests can also use a filesystem that is mounted already, twice:
IOSHAPE_TEST_MOUNTED=KIND:PATH:OTHER.
"""

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

TESTBED = Path(__file__).parents[2] / "testbed"
#: the kinds, and a program that each one needs
PROGRAMS = {"cephfs": "ceph-fuse", "glusterfs": "glusterd", "moosefs": "mfsmount"}
#: kinds that a kernel client mounts, in a machine of their own (tests/testbed/machine.sh)
IN_MACHINE = ("ceph", "nfs3", "nfs4.1", "nfs4.2")
#: programs that these kinds need
MACHINE_PROGRAMS = ("linux.uml", "ip", "insmod", "ganesha.nfsd", "rpcbind", "ceph-mon", "mkfs.xfs")
#: limit of each call of a script of tests/testbed
ORDER_S = 600.0
MOUNTED = os.environ.get("IOSHAPE_TEST_MOUNTED", "")


class ClusterError(Exception):
    """A cluster did not start, or a client could not mount it."""


def unavailable() -> str:
    """Return why the kinds of PROGRAMS cannot be started here; "" if they can."""
    return lacking(PROGRAMS.values())


def machine_unavailable() -> str:
    """Return why the kinds of IN_MACHINE cannot be started here; "" if they can."""
    return lacking(MACHINE_PROGRAMS)


def lacking(programs: Iterable[str]) -> str:
    if os.geteuid():
        return "starting clusters takes root"
    missing = [program for program in programs if not shutil.which(program)]
    return f"not installed: {', '.join(missing)}" if missing else ""


def order(verb: str, *words: str | Path) -> str:
    """Call a script of tests/testbed. Return its output."""
    done = subprocess.run(
        [TESTBED / f"{verb}.sh", *words],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=ORDER_S,
    )
    if done.returncode:
        raise ClusterError(f"tests/testbed/{verb}.sh: {done.stderr.strip()}")
    return done.stdout


@dataclass(frozen=True)
class Cluster:
    """A running filesystem, and the mount point of its first client."""

    kind: str
    path: Path

    @property
    def prefix(self) -> list[str]:
        """The beginning of commands that use the mounts."""
        return [f"{TESTBED}/machine.sh", str(self.path)] if self.kind in IN_MACHINE else []

    @contextmanager
    def client(self) -> Iterator[Path]:
        """Mount the filesystem once more: a client with an empty cache."""
        with tempfile.TemporaryDirectory(prefix="ioshape-client-") as point:
            order("mount", self.path, point)
            try:
                yield Path(point)
            finally:
                if not self.prefix:  # a machine has ended by now
                    subprocess.run(["umount", "-l", point], check=True)


@contextmanager
def running(kind: str, **options: int) -> Iterator[Cluster]:
    """Start a cluster of this kind with these options of up.sh, and remove it at the end."""
    words = [
        word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", value)
    ]
    path = Path(order("up", kind, *map(str, words)).strip())
    try:
        yield Cluster(kind, path)
    finally:
        order("down", path)


# ---- Two clients -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mounted:
    """A filesystem with two mount points."""

    kind: str
    path: Path
    other: Path

    def harm(self, *words: str) -> None:
        """Call harm.sh, which knows only clusters that up.sh has started.

        A machine and its host share a folder, in which the host finds the words and removes them.
        """
        if not MOUNTED:
            order("harm", self.path, *words)
            return
        asked = asked_of_host(self.path)
        asked.with_suffix(".new").write_text(" ".join(words), encoding="ascii")
        asked.with_suffix(".new").rename(asked)
        end = time.monotonic() + ORDER_S
        while asked.exists():
            assert time.monotonic() < end, f"the host does not call harm.sh {words}"
            time.sleep(0.1)


def asked_of_host(path: Path) -> Path:
    """Return the file in which a machine asks its host to call harm.sh."""
    return path.parent / "machine" / "harm"


def call_harm_for_machine(path: Path) -> None:
    """Call harm.sh if the machine of this cluster has asked for it."""
    asked = asked_of_host(path)
    if asked.exists():
        order("harm", path, *asked.read_text(encoding="ascii").split())
        asked.unlink()


def kinds() -> list[str]:
    """Return the kinds of filesystems to test."""
    return [MOUNTED.partition(":")[0]] if MOUNTED else list(PROGRAMS)


@contextmanager
def mounted_twice(kind: str) -> Iterator[Mounted]:
    """Start a cluster of this kind with two clients, or use the one that is mounted already."""
    if MOUNTED:
        yield Mounted(kind, *map(Path, MOUNTED.split(":")[1:]))
        return
    with running(kind) as made, made.client() as other:
        yield Mounted(kind, made.path, other)
