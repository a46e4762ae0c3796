# SPDX-License-Identifier: Apache-2.0
"""Facts for "ioshape doctor": data classes, and functions that gather them without any change."""

from __future__ import annotations

import getpass
import os
import platform
import re
import resource
import stat
import time
from contextlib import closing
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ioshape._probe import Storage

_SHARED = "/dev/shm"

# ---- Facts --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Folder:
    """The directory of the path."""

    #: absolute path
    path: str
    writable: bool = True
    #: whether the mount is read-only
    read_only: bool = False
    #: number of inodes; 0 if the filesystem has no limit
    inodes: int = 0
    inodes_free: int = 0


@dataclass(frozen=True)
class Host:
    """The limits and the memory of this process. None means no limit."""

    user: str = ""
    kernel: str = ""
    #: "docker", "podman", "kubernetes", ...; "" if this seems to be no container
    container: str = ""
    #: whether seccomp filters system calls
    seccomp: bool = False
    #: kernel.io_uring_disabled; 0 if the kernel lacks that setting
    uring_disabled: int = 0
    memlock_bytes: int | None = None
    file_bytes: int | None = None
    #: memory limit of the control group
    memory_bytes: int | None = None
    #: memory that the control group uses, without the page cache
    memory_used: int = 0
    #: most staging memory of a rank
    staging_bytes: int = 0
    #: free space in /dev/shm, where processes of this host exchange messages; None if this user
    #: cannot write there
    shared_bytes: int | None = 1 << 30
    #: ranks of the job on this host
    local_ranks: int = 1


@dataclass(frozen=True)
class Installation:
    """Versions of this Python and its packages, and the password file of the coordinator."""

    python: str = ""
    ioshape: str = ""
    #: version of torch; "" if it is not installed
    torch: str = ""
    #: file with the coordinator's password; "" if the settings name none
    password_file: str = ""
    #: permissions of that file; None if it does not exist
    password_mode: int | None = None
    #: why this user cannot read that file; "" if it can
    password_problem: str = ""


@dataclass(frozen=True)
class Coordination:
    """The coordinator, and whether it answers."""

    #: address without its password
    address: str = "local"
    #: why the coordinator is unreachable; "" if it answers
    error: str = ""
    #: whether the Python package redis is missing, so that it could not be asked
    unasked: bool = False
    #: seconds that an answer took
    latency_s: float = 0.0
    #: the setting "unreachable"
    unreachable: str = "stagger"

    @property
    def kind(self) -> str:
        """The kind of coordinator: "local", "redis" or "open"."""
        scheme = self.address.partition(":")[0]
        return scheme if scheme in ("local", "open") else "redis"


@dataclass(frozen=True)
class Near:
    """The tier: a disk of this node that saves write to first."""

    folder: str
    #: whether saves can write to the tier
    usable: bool = True
    in_memory: bool = False
    #: whether the filesystem is shared with other hosts
    remote: bool = False
    #: whether the tier is on the same filesystem as the path
    is_destination: bool = False
    free_bytes: int = 0
    #: number of checkpoints that wait to be drained
    waiting: int = 0
    #: their bytes
    waiting_bytes: int = 0
    #: seconds for which the oldest has waited
    oldest_s: float = 0.0
    #: whether a process drains the tier now
    draining: bool = False


@dataclass(frozen=True)
class Facts:
    """All facts about a path and this process."""

    storage: Storage
    folder: Folder
    host: Host
    coordination: Coordination
    installation: Installation = Installation()
    #: None if the path and the settings name no tier
    tier: Near | None = None
    #: number of ranks that save together
    ranks: int = 1
    #: number of files in a checkpoint of these ranks
    files: int = 1

    @property
    def hosts(self) -> int:
        """The number of hosts, if each has as many ranks as this one."""
        return -(-self.ranks // max(self.host.local_ranks, 1))

    @property
    def files_here(self) -> int:
        """The number of files of a checkpoint that take space on this filesystem."""
        return self.files if self.storage.remote else self.files_near

    @property
    def files_near(self) -> int:
        """The number of files of a checkpoint that ranks of this host write."""
        return -(-self.files // max(self.hosts, 1))


# ---- Gathering ----------------------------------------------------------------------------------


def look(
    path: str,
    *,
    n_bytes: int = 0,
    ranks: int = 0,
    coordinator: str | None = None,
) -> Facts:
    """Gather all facts about a path and this process.

    Args:
        path: a directory or a file.
        n_bytes: size of a file to be saved; 0 for the default.
        ranks: ranks that save together; 0 for those that the launcher reports.
        coordinator: address of the coordinator; None for that of the settings.
    """
    from ioshape import job  # noqa: PLC0415
    from ioshape._probe import probe  # noqa: PLC0415

    this_job = job()
    ranks = ranks or this_job.world_size
    files = _files(ranks, this_job.local_world_size)
    storage = probe(path, nbytes=n_bytes, files=files if ranks > 1 else 0)
    return Facts(
        storage=storage,
        folder=look_at_folder(storage),
        host=look_at_host(this_job.local_world_size),
        coordination=look_at_coordination(storage, coordinator),
        installation=look_at_installation(),
        tier=look_at_tier(storage, path),
        ranks=ranks,
        files=files,
    )


def _files(ranks: int, local_ranks: int) -> int:
    """Return the number of files of a checkpoint, by the setting "mode"."""
    from ioshape._core import config  # noqa: PLC0415

    mode = config.value_of("mode")
    if mode == "rank0":
        return 1
    return ranks if mode == "each" else -(-ranks // max(local_ranks, 1))


def _text(path: str) -> str:
    """Return the content of a small file in /proc or /sys; "" if it cannot be read."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:  # noqa: PTH123
            return file.read(1 << 16)
    except OSError:
        return ""


# ---- The directory ------------------------------------------------------------------------------


def look_at_folder(storage: Storage) -> Folder:
    """Gather the facts about a directory that probe() does not report."""
    path = storage.directory
    system = os.statvfs(path)
    return Folder(
        path=path,
        # os.access() also covers root and read-only mounts, which permissions do not show.
        writable=os.access(path, os.W_OK | os.X_OK, effective_ids=True),
        read_only=bool(system.f_flag & os.ST_RDONLY),
        # CephFS has no limit of inodes: it reports -1 as free.
        inodes=system.f_files if 0 <= system.f_favail <= system.f_files else 0,
        inodes_free=system.f_favail,
    )


# ---- The host -----------------------------------------------------------------------------------


def look_at_host(local_ranks: int = 1) -> Host:
    """Gather the limits and the memory of this process."""
    memory, used = _memory()
    return Host(
        user=_user(),
        kernel=os.uname().release,
        container=_container(),
        seccomp=_is_filtered(_text("/proc/self/status")),
        uring_disabled=_number(_text("/proc/sys/kernel/io_uring_disabled")) or 0,
        memlock_bytes=_limit(resource.RLIMIT_MEMLOCK),
        file_bytes=_limit(resource.RLIMIT_FSIZE),
        memory_bytes=memory,
        memory_used=used,
        staging_bytes=_staging_bytes(local_ranks),
        shared_bytes=_shared_bytes(),
        local_ranks=local_ranks,
    )


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a user number without a name, as in containers
        return str(os.geteuid())


def _shared_bytes() -> int | None:
    if not os.access(_SHARED, os.W_OK | os.X_OK, effective_ids=True):
        return None
    system = os.statvfs(_SHARED)
    return system.f_bavail * system.f_frsize


def _number(text: str) -> int | None:
    text = text.strip()
    return int(text) if text.isdecimal() else None


def _limit(which: int) -> int | None:
    soft = resource.getrlimit(which)[0]
    return None if soft == resource.RLIM_INFINITY else soft


def _is_filtered(status: str) -> bool:
    match = re.search(r"^Seccomp:\s*(\d+)", status, re.MULTILINE)
    return match is not None and match[1] != "0"


def _container() -> str:
    if os.environ.get("KUBERNETES_SERVICE_HOST"):
        return "kubernetes"
    if os.path.exists("/run/.containerenv"):  # noqa: PTH110
        return "podman"
    if os.path.exists("/.dockerenv"):  # noqa: PTH110
        return "docker"
    # systemd and most container runtimes set this variable.
    return os.environ.get("container", "")  # noqa: SIM112


def _memory() -> tuple[int | None, int]:
    """Return the memory limit of this process's control group, and the memory that it uses.

    The limit is None if there is none. Page cache does not count as used.
    """
    for line in _text("/proc/self/cgroup").splitlines():
        _, controllers, group = (*line.split(":", 2), "", "")[:3]
        if controllers == "":
            limit = _smallest(f"/sys/fs/cgroup{group}", "memory.max")
            if limit is not None:
                used = re.search(r"^anon (\d+)", _text(f"/sys/fs/cgroup{group}/memory.stat"), re.M)
                return limit, int(used[1]) if used else 0
        elif controllers == "memory":
            folder = f"/sys/fs/cgroup/memory{group}"
            limit = _smallest(folder, "memory.limit_in_bytes")
            # Version 1 of control groups reports "no limit" as a very large number.
            if limit is not None and limit < 1 << 60:
                used = re.search(r"^total_rss (\d+)", _text(f"{folder}/memory.stat"), re.M)
                return limit, int(used[1]) if used else 0
    return None, 0


def _smallest(folder: str, name: str) -> int | None:
    """Return the smallest limit of a control group and its visible ancestors; None without one."""
    limits = []
    while folder.startswith("/sys/fs/cgroup"):
        limits.append(_number(_text(f"{folder}/{name}")))
        folder = os.path.dirname(folder)  # noqa: PTH120
    return min((limit for limit in limits if limit is not None), default=None)


def _staging_bytes(local_ranks: int) -> int:
    """Return the most staging memory of a rank: the setting, or the library's default."""
    from ioshape._core import config  # noqa: PLC0415

    wanted = config.value_of("staging_bytes")
    if wanted:
        return int(wanted)
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    seen = _number(_text("/sys/fs/cgroup/memory.max"))  # the library reads only this file, too
    return max(min(memory, seen or memory) // 4 // max(local_ranks, 1), 64 << 20)


# ---- The tier -----------------------------------------------------------------------------------


def look_at_tier(storage: Storage, asked: str) -> Near | None:
    """Gather the facts about the tier: the path itself if it is one, else that of the settings.

    Return None if there is no tier.
    """
    from ioshape._core import config  # noqa: PLC0415
    from ioshape._tier.tier import is_tier, other_owner, own_folder  # noqa: PLC0415

    itself = is_tier(asked) or other_owner(asked) is not None
    folder = asked if itself else str(config.value_of("tier") or "")
    if not folder:
        return None
    # If an administrator has created the user's folder, only that one must be writable.
    folders = (folder, own_folder(folder))
    writable = any(os.access(one, os.W_OK | os.X_OK, effective_ids=True) for one in folders)
    if not writable or other_owner(folder) is not None:
        return Near(folder, usable=False)
    return _look_at_copies(folder, None if itself else storage)


def _look_at_copies(folder: str, destination: Storage | None) -> Near:
    from ioshape._core.context import Context  # noqa: PLC0415
    from ioshape._probe import probe  # noqa: PLC0415
    from ioshape._tier.tier import Tier, is_draining, is_tier  # noqa: PLC0415

    disk = probe(folder)
    waiting = []
    if is_tier(folder):  # otherwise Tier() would create a tier there
        with closing(Tier(Context(), folder)) as tier:
            waiting = [copy for copy in tier.copies() if copy.is_waiting]
    return Near(
        folder=folder,
        in_memory=disk.family == "tmpfs",
        remote=disk.remote,
        is_destination=destination is not None
        and os.stat(folder).st_dev == os.stat(destination.directory).st_dev,  # noqa: PTH116
        free_bytes=disk.free_bytes,
        waiting=len(waiting),
        waiting_bytes=sum(copy.n_bytes for copy in waiting),
        oldest_s=max((time.time() - copy.saved.timestamp() for copy in waiting), default=0.0),
        draining=is_draining(folder),
    )


# ---- The installation ----------------------------------------------------------------------------


def look_at_installation() -> Installation:
    """Gather versions of Python, ioshape and torch, and the state of the password file."""
    import ioshape  # noqa: PLC0415
    from ioshape._core import config  # noqa: PLC0415

    password_file = str(config.value_of("password_file") or "")
    return Installation(
        python=platform.python_version(),
        ioshape=ioshape.__version__,
        torch=_torch(),
        password_file=password_file,
        password_mode=_mode(password_file),
        password_problem=_problem_of(password_file),
    )


def _torch() -> str:
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return ""


def _mode(path: str) -> int | None:
    try:
        return stat.S_IMODE(os.stat(path).st_mode) if path else None  # noqa: PTH116
    except OSError:
        return None


def _problem_of(path: str) -> str:
    try:
        # O_NONBLOCK: opening a FIFO without a writer must not wait.
        if path:
            os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK))
    except OSError as error:
        return str(error.strerror)
    return ""


# ---- The coordinator ----------------------------------------------------------------------------


def look_at_coordination(storage: Storage, coordinator: str | None = None) -> Coordination:
    """Ask the coordinator about the path's pool, and measure its latency."""
    from ioshape import StorageError  # noqa: PLC0415
    from ioshape._core import config  # noqa: PLC0415
    from ioshape._slots.pools import Operator  # noqa: PLC0415
    from ioshape.errors import CoordinatorError  # noqa: PLC0415

    given = str(coordinator or config.value_of("coordinator") or "local")
    address = config.without_password(given)
    unreachable = str(config.value_of("unreachable") or "stagger")
    if given == "open":
        return Coordination(address=address, unreachable=unreachable)
    try:
        operator = Operator(coordinator)
        operator.status(storage.pool)  # connects, which must not count in the latency
        begin = time.monotonic()
        operator.status(storage.pool)
        took_s = time.monotonic() - begin
    except ImportError:
        return Coordination(address=address, unasked=True, unreachable=unreachable)
    except (CoordinatorError, StorageError, ValueError) as error:
        return Coordination(
            address=address, error=config.without_password(str(error)), unreachable=unreachable
        )
    return Coordination(address=address, latency_s=took_s, unreachable=unreachable)
