# SPDX-License-Identifier: Apache-2.0
"""What "ioshape doctor" judges by: plain data, and how it is gathered. That changes nothing."""

from __future__ import annotations

import errno
import fcntl
import getpass
import glob
import os
import platform
import re
import resource
import shutil
import stat
import subprocess
import sysconfig
import time
from contextlib import closing, suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from ioshape._cli.paths import ATTEMPT, lock_domain

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ioshape._probe import Storage

#: As the library, which looks at no more of a directory either.
_MOST_ENTRIES = 100_000
_MOST_HOLDERS = 3
_MOST_NAMES = 4
_DAY_S = 24 * 3600
_SHARED = "/dev/shm"
_ANSWER_S = 20

_TEMPORARY = re.compile(r"\..*\.ioshape-tmp-([0-9a-f]{8})-[0-9a-f]{16}", re.DOTALL)
_ASIDE = re.compile(r"\.(?:replaced|pruned)-step-\d{10,20}\.[0-9a-f]{16}")


# ---- Facts --------------------------------------------------------------------------------------


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

    @property
    def any(self) -> bool:
        """Whether there is something."""
        return self.count + self.elsewhere_count > 0


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

    @property
    def room_bytes(self) -> int:
        """Free bytes, if what was drained goes."""
        return self.free_bytes + self.drained_bytes


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


# ---- Looking ------------------------------------------------------------------------------------


def look(
    path: str,
    *,
    n_bytes: int = 0,
    ranks: int = 0,
    coordinator: str | None = None,
) -> Facts:
    """Everything about a path and this process."""
    from ioshape import job  # noqa: PLC0415
    from ioshape._probe import probe  # noqa: PLC0415

    place = job()
    ranks = ranks or place.world_size
    files = _files(ranks, place.local_world_size)
    storage = probe(path, nbytes=n_bytes, files=files if ranks > 1 else 0)
    return Facts(
        storage=storage,
        folder=look_at_folder(storage, path),
        host=look_at_host(place.local_world_size),
        coordination=look_at_coordination(storage, coordinator),
        installation=look_at_installation(),
        tier=look_at_tier(storage, path),
        ranks=ranks,
        files=files,
    )


def _files(ranks: int, local_ranks: int) -> int:
    """How many a checkpoint of so many ranks has, as the setting "mode" says."""
    from ioshape._core import config  # noqa: PLC0415

    mode = config.value_of("mode")
    if mode == "rank0":
        return 1
    return ranks if mode == "each" else -(-ranks // max(local_ranks, 1))


def _text(path: str) -> str:
    """Of a small file of the kernel's; "" where it is not to be had."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:  # noqa: PTH123
            return file.read(1 << 16)
    except OSError:
        return ""


# ---- The directory ------------------------------------------------------------------------------


def look_at_folder(storage: Storage, asked: str) -> Folder:
    """What the library does not tell of it."""
    path = storage.directory
    system = os.statvfs(path)
    ahead_s = os.stat(path).st_mtime - time.time()  # noqa: PTH116
    temporary, aside = _leftovers(path)
    return Folder(
        path=path,
        asked=os.path.abspath(asked),  # noqa: PTH100 - links stay as they are
        # Root may, whatever the permissions say, but not on a mount that is read-only.
        writable=os.access(path, os.W_OK | os.X_OK, effective_ids=True),
        read_only=bool(system.f_flag & os.ST_RDONLY),
        # CephFS counts its files, and has no limit: it answers -1 for those that are free.
        inodes=system.f_files if 0 <= system.f_favail <= system.f_files else 0,
        inodes_free=system.f_favail,
        ahead_s=max(0.0, ahead_s),
        temporary=temporary,
        leftovers=aside,
        target_pools=_target_pools(storage),
    )


def _target_pools(storage: Storage) -> tuple[str, ...]:
    """Names of OST pools that this client knows of."""
    if storage.family != "lustre":
        return ()
    found = {storage.target_pool} - {""}
    name = glob.escape(storage.source.rpartition("/")[2])
    for root in ("/proc/fs/lustre", "/sys/kernel/debug/lustre"):
        with suppress(OSError):
            found.update(entry.name for entry in Path(root).glob(f"lov/{name}-clilov-*/pools/*"))
    return tuple(sorted(found))


def _entries(path: str) -> Iterator[os.DirEntry[str]]:
    try:
        with os.scandir(path) as entries:
            for _ in range(_MOST_ENTRIES):
                entry = next(entries, None)
                if entry is None:
                    return
                if entry.name.startswith("."):
                    yield entry
    except OSError:  # it may be written to, and not be listed
        return


def _leftovers(path: str) -> tuple[Leftovers, Leftovers]:
    """Temporary files, and directories of generations, that nobody has locked."""
    files: list[tuple[str, int, bool]] = []
    folders: list[tuple[str, int, bool]] = []
    domain = lock_domain(path)
    for entry in _entries(path):
        match = _TEMPORARY.fullmatch(entry.name)
        attempt = ATTEMPT.fullmatch(entry.name)
        with suppress(OSError):  # it has gone by now
            status = entry.stat(follow_symlinks=False)
            old = time.time() - status.st_mtime > _DAY_S
            if match and entry.is_file(follow_symlinks=False) and _is_free(entry.path):
                files.append((entry.name, status.st_size, old or match[1] == domain))
            elif attempt and entry.is_dir(follow_symlinks=False) and _is_free(entry.path):
                folders.append((entry.name, _size_of(entry.path), old or attempt[2] == domain))
            elif _ASIDE.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
                folders.append((entry.name, _size_of(entry.path), True))
    return _sum(files), _sum(folders)


def _sum(found: list[tuple[str, int, bool]]) -> Leftovers:
    dead = [n_bytes for _, n_bytes, certain in found if certain]
    unsure = [n_bytes for _, n_bytes, certain in found if not certain]
    names = sorted(name for name, _, certain in found if certain)
    return Leftovers(len(dead), sum(dead), len(unsure), sum(unsure), tuple(names[:_MOST_NAMES]))


def _size_of(path: str) -> int:
    with os.scandir(path) as entries:
        return sum(entry.stat(follow_symlinks=False).st_size for entry in entries)


def _is_free(path: str) -> bool:
    """Whether nobody on this host has it locked, as its writer has."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        fd = os.open(path, flags)
    except PermissionError:
        return False  # another user's, who looks after it
    try:
        # Shared, and for an instant: a writer that begins right now takes another name.
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in (errno.EWOULDBLOCK, errno.EACCES)
    finally:
        os.close(fd)
    return True


# ---- The host -----------------------------------------------------------------------------------


def look_at_host(local_ranks: int = 1) -> Host:
    """What this process may do."""
    memory, used = _memory()
    return Host(
        user=_user(),
        kernel=os.uname().release,
        container=_container(),
        seccomp=_is_filtered(_text("/proc/self/status")),
        uring_disabled=_number(_text("/proc/sys/kernel/io_uring_disabled")) or 0,
        memlock_bytes=_limit(resource.RLIMIT_MEMLOCK),
        open_files=_limit(resource.RLIMIT_NOFILE),
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
    except (KeyError, OSError):  # a number without a name, as containers have
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
    # What systemd and most runtimes tell the first process.
    return os.environ.get("container", "")  # noqa: SIM112


def _memory() -> tuple[int | None, int]:
    """The limit of the control group that this process is in, and what is taken of it."""
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
            # An absurdly large number is none.
            if limit is not None and limit < 1 << 60:
                used = re.search(r"^total_rss (\d+)", _text(f"{folder}/memory.stat"), re.M)
                return limit, int(used[1]) if used else 0
    return None, 0


def _smallest(folder: str, name: str) -> int | None:
    """Of a group and those around it, as far as they are seen from here."""
    limits = []
    while folder.startswith("/sys/fs/cgroup"):
        limits.append(_number(_text(f"{folder}/{name}")))
        folder = os.path.dirname(folder)  # noqa: PTH120
    return min((limit for limit in limits if limit is not None), default=None)


def _staging_bytes(local_ranks: int) -> int:
    """The setting, or what the library takes."""
    from ioshape._core import config  # noqa: PLC0415

    wanted = config.value_of("staging_bytes")
    if wanted:
        return int(wanted)
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    seen = _number(_text("/sys/fs/cgroup/memory.max"))  # which is all that the library looks at
    return max(min(memory, seen or memory) // 4 // max(local_ranks, 1), 64 << 20)


# ---- The tier -----------------------------------------------------------------------------------


def look_at_tier(storage: Storage, asked: str) -> Near | None:
    """The path, if this user has saved there as on a tier; or that of the settings."""
    from ioshape._core import config  # noqa: PLC0415
    from ioshape._tier.tier import is_tier, other_owner, own_folder  # noqa: PLC0415

    itself = is_tier(asked) or other_owner(asked) is not None
    folder = asked if itself else str(config.value_of("tier") or "")
    if not folder:
        return None
    if not os.path.isdir(folder):  # noqa: PTH112
        return Near(folder, exists=False)
    if (owner := other_owner(folder)) is not None:
        return Near(folder, own=own_folder(folder), owner=owner)
    # The folder itself need not be writable, if the administrator has made the user's own.
    places = (folder, own_folder(folder))
    if not any(os.access(one, os.W_OK | os.X_OK, effective_ids=True) for one in places):
        return Near(folder, writable=False)
    return _look_at_copies(folder, None if itself else storage)


def _look_at_copies(folder: str, destination: Storage | None) -> Near:
    from ioshape._core.context import Context  # noqa: PLC0415
    from ioshape._probe import probe  # noqa: PLC0415
    from ioshape._tier.tier import Tier, is_draining, is_tier  # noqa: PLC0415

    disk = probe(folder)
    copies = []
    if is_tier(folder):  # else looking would make it one
        with closing(Tier(Context(), folder)) as tier:
            copies = tier.copies()
    waiting = [copy for copy in copies if copy.is_waiting]
    return Near(
        folder=folder,
        in_memory=disk.family == "tmpfs",
        remote=disk.remote,
        is_destination=destination is not None
        and os.stat(folder).st_dev == os.stat(destination.directory).st_dev,  # noqa: PTH116
        free_bytes=disk.free_bytes,
        drained_bytes=sum(copy.n_bytes for copy in copies if not copy.is_waiting),
        waiting=len(waiting),
        waiting_bytes=sum(copy.n_bytes for copy in waiting),
        oldest_s=max((time.time() - copy.saved.timestamp() for copy in waiting), default=0.0),
        draining=is_draining(folder),
    )


# ---- What is installed ---------------------------------------------------------------------------


def look_at_installation() -> Installation:
    """This Python, its ioshape and its torch, and the file with the password."""
    import ioshape  # noqa: PLC0415
    from ioshape._core import config  # noqa: PLC0415

    password_file = str(config.value_of("password_file") or "")
    version, problem = _torch()
    return Installation(
        python=platform.python_version(),
        ioshape=ioshape.__version__,
        found=_packages(),
        other_command=_other_command(ioshape.__version__),
        torch=version,
        torch_problem=problem,
        password_file=password_file,
        password_mode=_mode(password_file),
        password_problem=_problem_of(password_file),
    )


def _packages() -> tuple[str, ...]:
    return tuple(sorted(one.version for one in metadata.distributions(name="ioshape")))


def _other_command(version: str) -> tuple[str, str] | None:
    """The command on the path, if it is of another version than this."""
    path = shutil.which("ioshape")
    if not path or os.path.dirname(path) == sysconfig.get_path("scripts"):  # noqa: PTH120
        return None  # there is none, or it is this Python's
    try:
        done = subprocess.run(
            [path, "--version"], capture_output=True, text=True, timeout=_ANSWER_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return path, "of an unknown version"
    told = done.stdout.strip().rpartition(" ")[2]
    return (path, told) if told != version else None


def _torch() -> tuple[str, str]:
    """Its version, and why its pickling cannot be used. No version if it cannot be imported."""
    try:
        import torch  # noqa: PLC0415 - takes seconds
    except Exception as error:  # also of libraries that it needs
        if isinstance(error, ModuleNotFoundError) and error.name == "torch":
            return "", ""
        return "", f"{type(error).__name__}: {error}"
    from ioshape._save import pickling  # noqa: PLC0415

    return str(torch.__version__), pickling.problem()


def _mode(path: str) -> int | None:
    try:
        return stat.S_IMODE(os.stat(path).st_mode) if path else None  # noqa: PTH116
    except OSError:
        return None


def _problem_of(path: str) -> str:
    try:
        # A FIFO without a writer is not waited for.
        if path:
            os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK))
    except OSError as error:
        return str(error.strerror)
    return ""


# ---- The coordinator ----------------------------------------------------------------------------


def look_at_coordination(storage: Storage, coordinator: str | None = None) -> Coordination:
    """Asks it for the pool of the path."""
    from ioshape import StorageError  # noqa: PLC0415
    from ioshape._cli.pools import is_known, who  # noqa: PLC0415
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
        operator.status(storage.pool)  # connects
        begin = time.monotonic()
        status = operator.status(storage.pool)
        took_s = time.monotonic() - begin
    except ImportError:
        return Coordination(address=address, unasked=True, unreachable=unreachable)
    except (CoordinatorError, StorageError, ValueError) as error:
        return Coordination(
            address=address, error=config.without_password(str(error)), unreachable=unreachable
        )
    return Coordination(
        address=address,
        latency_s=took_s,
        # Of a pool that nobody has used so far, the first one says how many.
        capacity=status.capacity if is_known(status) else 0,
        capacity_by=status.capacity_by,
        used=status.used,
        waiting=status.waiter_count,
        holders=tuple(who(one) for one in status.holders[:_MOST_HOLDERS]),
        unreachable=unreachable,
    )
