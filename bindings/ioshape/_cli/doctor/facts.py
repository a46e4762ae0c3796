# SPDX-License-Identifier: Apache-2.0
"""What "ioshape doctor" knows when it judges, and what it finds: plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from ioshape._probe import Storage

#: "serious": a save would fail, be lost, or may be wrong. "warning": slow, or soon serious.
Severity = Literal["serious", "warning", "hint"]
SEVERITIES: tuple[Severity, ...] = ("serious", "warning", "hint")


@dataclass(frozen=True)
class Finding:
    """One thing that an administrator would tell."""

    #: for programs: it stays the same whatever the sentence says
    id: str
    severity: Severity
    sentence: str
    #: to be copied
    commands: tuple[str, ...] = ()


@dataclass(frozen=True)
class Leftovers:
    """What dead processes left in the directory."""

    #: temporary files, or directories of generations that were replaced or pruned
    count: int = 0
    n_bytes: int = 0
    #: the same that may be in use on another host or mount: nobody here has them
    elsewhere_count: int = 0
    elsewhere_bytes: int = 0
    #: of the first dead ones
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Folder:
    """The directory that is looked at."""

    #: absolute
    path: str
    #: what was given, absolute
    asked: str
    writable: bool = True
    #: the mount
    read_only: bool = False
    inodes: int = 0
    inodes_free: int = 0
    #: seconds that the directory was changed in the future of this host's clock
    ahead_s: float = 0.0
    leftovers: Leftovers = Leftovers()
    temporary: Leftovers = Leftovers()
    #: names of pools of storage targets that are known here
    target_pools: tuple[str, ...] = ()


@dataclass(frozen=True)
class Host:
    """What this process may do. None is no limit."""

    user: str = ""
    kernel: str = ""
    #: "docker", "podman", "kubernetes", ...; "" if it seems to be none
    container: str = ""
    #: whether system calls are filtered
    seccomp: bool = False
    #: kernel.io_uring_disabled; 0 where there is no such thing
    uring_disabled: int = 0
    memlock_bytes: int | None = None
    open_files: int | None = None
    file_bytes: int | None = None
    #: of the control group
    memory_bytes: int | None = None
    #: of it, without what can be dropped
    memory_used: int = 0
    staging_bytes: int = 0
    #: free in /dev/shm, where processes of this host meet; None if this user cannot write there
    shared_bytes: int | None = 1 << 30
    #: ranks of the job on this host
    local_ranks: int = 1


@dataclass(frozen=True)
class Installation:
    """What this Python has."""

    python: str = ""
    ioshape: str = ""
    #: packages of that name that this Python finds: versions
    found: tuple[str, ...] = ()
    #: the command of that name that a shell finds, if it has another version: path and version
    other_command: tuple[str, str] | None = None
    #: its version; "" if there is none
    torch: str = ""
    #: why torch's pickling cannot be used, or it cannot be imported (and `torch` is ""); ""
    torch_problem: str = ""
    #: the file with the coordinator's password; ""
    password_file: str = ""
    #: its permissions; None if there is no such file
    password_mode: int | None = None
    #: why this user cannot read it; ""
    password_problem: str = ""


@dataclass(frozen=True)
class Coordination:
    """Who says which saves may write now."""

    #: without a password
    address: str = "local"
    #: why it cannot be asked; ""
    error: str = ""
    #: whether the package that asks a Redis is missing
    unasked: bool = False
    #: how long it took to answer
    latency_s: float = 0.0
    capacity: int = 0
    #: "operator", "job" or "default"
    capacity_by: str = ""
    used: int = 0
    waiting: int = 0
    #: such as "job 4711, rank 7 on n03"
    holders: tuple[str, ...] = ()
    #: the setting
    unreachable: str = "stagger"

    @property
    def kind(self) -> str:
        """ "local", "redis", "open"."""
        scheme = self.address.partition(":")[0]
        return scheme if scheme in ("local", "open") else "redis"


@dataclass(frozen=True)
class Near:
    """The tier: a disk of this node that saves go to first."""

    folder: str
    exists: bool = True
    writable: bool = True
    #: this user's own folder there
    own: str = ""
    #: the user who has made it, if another user has
    owner: int | None = None
    in_memory: bool = False
    #: shared with other hosts
    remote: bool = False
    #: whether it is on the filesystem of the path
    is_destination: bool = False
    free_bytes: int = 0
    #: of copies that go when room is needed
    drained_bytes: int = 0
    #: that have yet to be drained, and since when the oldest has
    waiting: int = 0
    waiting_bytes: int = 0
    oldest_s: float = 0.0
    #: whether a process drains it now
    draining: bool = False

    @property
    def usable(self) -> bool:
        """Whether saves can go there."""
        return self.exists and self.writable and self.owner is None


@dataclass(frozen=True)
class Facts:
    """All of it."""

    storage: Storage
    folder: Folder
    host: Host
    coordination: Coordination
    installation: Installation = Installation()
    #: None: there is none
    tier: Near | None = None
    #: that save together
    ranks: int = 1
    #: that they write
    files: int = 1

    @property
    def hosts(self) -> int:
        """That the ranks are on, if all have as many as this one."""
        return -(-self.ranks // max(self.host.local_ranks, 1))

    @property
    def files_here(self) -> int:
        """Of them, those that take their space from this filesystem."""
        return self.files if self.storage.remote else self.files_near

    @property
    def files_near(self) -> int:
        """Of them, those that ranks of this host write."""
        return -(-self.files // max(self.hosts, 1))
