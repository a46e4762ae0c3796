# SPDX-License-Identifier: Apache-2.0
"""Save the objects of all ranks of a job as one checkpoint.

This module implements save_group() and save_group_async(), and keeps the open group of each
directory.
"""

from __future__ import annotations

import errno
import os
import pickle
import threading
from concurrent.futures import Future
from dataclasses import dataclass
from dataclasses import replace as changed
from typing import TYPE_CHECKING, Any, NamedTuple

from ioshape._core import comm as _comm
from ioshape._core import config
from ioshape._core.config import tier_folder
from ioshape._core.context import Context, current, encoded
from ioshape._core.errors import NoUsableCheckpointError, PassedOver, failure, last_failure
from ioshape._core.job import Job, job
from ioshape._core.locks import module_lock
from ioshape._core.structs import called_from_c, enum_names, keep_failure, owned, said, sized
from ioshape._core.under_way import after_saves, raise_unheard, starting
from ioshape._group.tier import GroupTier
from ioshape._native import ffi, lib
from ioshape._save import pickling
from ioshape._save.request import SaveRequest, start

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Literal, TypeVar

    from ioshape._core.report import Progress, Report
    from ioshape._save.handle import SaveHandle
    from ioshape._save.pickling import Pickled

    T = TypeVar("T")

_PROTOCOL = 2  # the default of torch.save
_DEADLINE_MS = 120_000  # the library's default
_MOST_STEP = (1 << 63) - 1


_MODES = {name: number for number, name in enum_names("IOSHAPE_MODE_").items()}


def save_group(
    obj: object,
    directory: str | os.PathLike[str],
    step: int,
    *,
    mode: str | None = None,
    keep_last: int | None = None,
    keep_every: int | None = None,
    pickle_module: Any = pickle,
    pickle_protocol: int = _PROTOCOL,
    replace: bool = True,
    progress: Callable[[Progress], object] | None = None,
    deadline: float | None = None,
    durable: Literal["destination"] | None = None,
    tier: str | os.PathLike[str] | Literal[False] | None = None,
) -> Report:
    """Save the objects of all ranks as one checkpoint, which exists as a whole or not at all.

    All ranks of the job (see ioshape.job()) call this function in the same order of steps, and with
    the same arguments except for the object. When it returns on any rank, the checkpoint
    "step-0000001000" in the directory is complete, with the shards of all ranks, and on stable
    storage. If a rank fails or dies, the call raises on all other ranks. The message names the
    failed rank, and the checkpoints that existed before stay as they were.

    Each shard is an ordinary file of torch.save. It is a file of its own, or a member of a zip that
    holds several shards and that unzip can extract.

    Args:
        obj: This rank's object.
        directory: The directory of the checkpoints; it is created if it does not exist.
        step: The training step, from 0 to 2^63 - 1, which names the checkpoint. A complete
            checkpoint of the same step is replaced.
        mode: Which ranks write: "each" rank, one rank for each "node", "rank0", or "auto". Default:
            the setting "mode". The report says which mode was used, and why.
        keep_last: How many complete checkpoints stay, newest first. Older ones are removed when
            this one is complete. Default: all stay.
        keep_every: Checkpoints whose step is a multiple of this number stay, too.
        pickle_module: As in torch.save.
        pickle_protocol: As in torch.save.
        replace: False raises FileExistsError if a complete checkpoint of this step exists.
        progress: Is called with a Progress of this rank's shard at intervals. An exception in it
            stops the save on all ranks.
        deadline: Seconds until the process will end, as in save(); the same number on all ranks.
            With a deadline, the next save removes old checkpoints.
        durable: "destination" waits on this rank until a save over a tier is drained.
        tier: A folder on a fast disk of each node, as in save(). The checkpoint is durable on these
            disks when the call returns. It appears in the directory when all nodes have drained it.
            keep_last and keep_every count the checkpoints in the directory. With the setting
            "parity", the other nodes can rebuild what a lost node had saved.

    Returns:
        A Report of this rank's shard. If the checkpoint did not fit into the free space and the
        setting "full" is "skip", nothing is saved and `skipped` is set on all ranks.

    Raises:
        StorageError: The checkpoint could not be saved. It is an OSError with errno and path.

    If an object cannot be pickled, its rank raises what torch.save raises. The other ranks raise a
    StorageError that names that rank.
    """
    request = _request(directory, replace, progress, deadline, durable)
    save = _GroupSave(obj, pickle_module, pickle_protocol, step, request)
    group = _opened(directory, _key(mode, keep_last, keep_every, tier_folder(tier)))
    report = save.start(group, background=False)._complete()
    raise_unheard()
    return report


def save_group_async(
    obj: object,
    directory: str | os.PathLike[str],
    step: int,
    *,
    mode: str | None = None,
    keep_last: int | None = None,
    keep_every: int | None = None,
    pickle_module: Any = pickle,
    pickle_protocol: int = _PROTOCOL,
    replace: bool = True,
    progress: Callable[[Progress], object] | None = None,
    deadline: float | None = None,
    durable: Literal["destination"] | None = None,
    tier: str | os.PathLike[str] | Literal[False] | None = None,
) -> SaveHandle:
    """Begin to save the objects of all ranks; return when this rank's object may change again.

    Arguments and files are those of save_group(). All ranks call this function. At the first call
    for a directory the ranks wait for each other; later calls do not wait for other ranks. The
    checkpoints of a directory are written one after the other.

    Returns:
        A SaveHandle, like that of save_async(). It is done when the whole checkpoint is complete.

    Raises:
        Exception: What torch.save raises for objects that cannot be pickled. The handle raises all
            other failures.
    """
    request = _request(directory, replace, progress, deadline, durable)
    save = _GroupSave(obj, pickle_module, pickle_protocol, step, request)
    group = _opened(directory, _key(mode, keep_last, keep_every, tier_folder(tier)))
    handle = save.start(group, background=True)
    raise_unheard(but=handle)
    return handle


# ---- Groups -------------------------------------------------------------------------------------


class Key(NamedTuple):
    """The arguments and settings of a group. Ranks whose keys differ do not find each other."""

    job: Job
    mode: str
    keep_last: int
    keep_every: int
    #: the folder of the tier; "" if there is none
    tier: str
    #: the settings of this process that the library uses
    settings: tuple[tuple[str, Any], ...]


class Group:
    """An open group of ranks for one directory, with the context that it uses."""

    def __init__(self, directory: str, key: Key) -> None:
        self.directory = directory
        self.key = key
        self.context: Context = current()
        # Python handles signals while it waits for a thread, but not while C waits for other ranks.
        self.comm = in_thread(self._connect)
        self.tier = GroupTier(directory, key.tier)
        self._owner = os.getpid()
        self._texts: list[Any] = []
        self._saves: list[SaveHandle] = []
        self._out: Any = None
        self._out = in_thread(self._open, ffi.release)

    def _connect(self) -> _comm.Comm | None:
        """Return the communicator for bytes between nodes; None if the group cannot need it."""
        key, settings = self.key, dict(self.key.settings)
        is_simulated = key.job.node != os.uname().nodename
        several_nodes = key.job.world_size > key.job.local_world_size or is_simulated
        if key.job.world_size == 1 or not several_nodes:
            return None
        if key.mode not in ("auto", "rank0") and not key.tier:
            return None
        try:
            return _comm.of_torch((settings["deadline_ms"] or _DEADLINE_MS) / 1000)
        except RuntimeError as error:
            raise failure(
                -errno.ETIMEDOUT,
                f"the group of {self.directory} is not complete: torch.distributed cannot connect "
                f"its ranks by gloo: {error}",
                self.directory,
                "save",
                remedy="check that all are alive, and set GLOO_SOCKET_IFNAME to the network "
                "between the nodes",
            ) from error

    def _open(self) -> Any:
        options = sized("ioshape_group_options")
        settings = dict(self.key.settings)
        options.rank = self.key.job.rank
        options.ranks = self.key.job.world_size
        options.local_ranks = _local_ranks(self.key.job)
        options.mode = _MODES[self.key.mode]
        options.deadline_ms = settings["deadline_ms"] or 0
        options.keep_last = self.key.keep_last
        options.keep_every = self.key.keep_every
        options.token = self._in_c(_token(self.key.job, settings["job"]))
        if self.comm is not None:
            options.comm = self.comm.struct
        tier = self.tier.tier
        if tier is not None:
            options.tier = tier._pointer
        # The context, the communicator and the tier must outlive the group.
        out = owned("group", self.context, self.comm, tier)
        code = lib.ioshape_group_open(self.context.pointer, encoded(self.directory), options, out)
        if code:
            error = last_failure(self.directory, "save")
            error.__cause__ = self.comm.cause() if self.comm is not None else None
            raise error
        return out

    def _in_c(self, text: str) -> Any:
        if not text:
            return ffi.NULL
        self._texts.append(ffi.new("char[]", text.encode()))
        return self._texts[-1]

    @property
    def is_mine(self) -> bool:
        """True if this process opened the group, and did not inherit it by fork()."""
        return self._owner == os.getpid()

    def add(self, handle: SaveHandle) -> None:
        """Remember a save, and forget those that are done."""
        self._saves = [one for one in self._saves if not one.done()] + [handle]

    def wait(self) -> None:
        """Wait for the saves of this group, whether they succeed or fail."""
        for handle in self._saves:
            handle._wait(None)
        self._saves = []

    def fail(self, step: int, error: BaseException) -> None:
        """Tell the other ranks that this rank cannot contribute to the checkpoint of this step."""
        why = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        lib.ioshape_group_fail(self.pointer, step, why[:500].encode(errors="replace"))

    def latest(
        self, *, intact: bool = False, healthy: bool = False
    ) -> tuple[str, int, list[PassedOver]]:
        """Return the directory and step of the newest checkpoint, and the newer ones passed over.

        All ranks call this, and all get the same answer. Complete checkpoints count; with `intact`,
        only those of which every byte has been verified; with `healthy`, only those among them that
        raised no alarm. The directory is the group's own, or its
        counterpart on the tier.
        """
        search = _Search()

        def ask() -> int:
            step, user = ffi.new("uint64_t *"), ffi.new_handle(search)
            options = sized("ioshape_search_options")
            options.intact = intact
            options.healthy = healthy
            options.passed_over = lib.ioshape_py_passed_over
            options.passed_over_user = user
            options.directory = search.where
            code = lib.ioshape_group_get_latest(self.pointer, options, step)
            if search.failure is not None:
                raise search.failure
            if code:
                error = last_failure(self.directory, "load")
                if isinstance(error, NoUsableCheckpointError) and search.passed_over:
                    error.passed_over = tuple(search.passed_over)
                raise error from (search.passed_over[0].error if search.passed_over else None)
            return int(step[0])

        step = in_thread(ask)
        return search.directory, step, search.passed_over

    def close(self) -> None:
        """Close the group, as its garbage collection would. Its saves must have ended."""
        if self.is_mine and self._out is not None:
            out, self._out = self._out, None
            ffi.release(out)

    @property
    def pointer(self) -> Any:
        """The pointer to the group for C calls; NULL once the group is closed."""
        return ffi.NULL if self._out is None else self._out[0]


def _path_of(directory: str, step: int) -> str:
    """Return the path of the checkpoint of this step, as the library names it."""
    return os.path.join(directory, f"step-{step:010d}")  # noqa: PTH118


class _Search:
    """The state of a search for the newest checkpoint, which the C callback fills."""

    def __init__(self) -> None:
        #: C puts a pointer to the directory of the search here; the group owns the text
        self.where = ffi.new("char const **")
        self.passed_over: list[PassedOver] = []
        self.failure: BaseException | None = None

    @property
    def directory(self) -> str:
        """The directory of the checkpoint that is found or passed over."""
        return os.fsdecode(ffi.string(self.where[0]))


@called_from_c(onerror=keep_failure)
def ioshape_py_passed_over(search: _Search, step: int) -> None:
    path = _path_of(search.directory, step)
    about = said(lib.ioshape_last_error().path)
    search.passed_over.append(PassedOver(path, last_failure(about or path, "load")))


def in_thread(
    function: Callable[[], T], unwanted: Callable[[T], object] = lambda _result: None
) -> T:
    """Call a function in a thread, and return its result or raise its exception.

    Ctrl-C interrupts the wait. A result that the function still returns then goes to `unwanted`.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="ioshape-group", daemon=True).start()
    try:
        return future.result()
    except BaseException:
        future.add_done_callback(lambda done: done.exception() or unwanted(done.result()))
        raise


def _local_ranks(this_job: Job) -> int:
    """Return the number of ranks on this node; 0 if it is not known."""
    return (
        this_job.local_world_size
        if this_job.local_world_size > 1 or this_job.world_size == 1
        else 0
    )


def _token(this_job: Job, configured: str | None) -> str:
    """Return a token that only the ranks of this job share; "" to let the library choose."""
    name = configured or this_job.id
    # If one Slurm job runs several torchruns, each has a port of its own. The port alone does not
    # identify a job: most jobs use the default.
    port = os.environ.get("MASTER_PORT", "")
    return f"{name}:{port}" if name and port else name


def _key(mode: str | None, keep_last: int | None, keep_every: int | None, tier: str) -> Key:
    settings = tuple(
        (name, config.value_of(name))
        for name, setting in config.SETTINGS.items()
        if setting.owner != "package" and name != "mode"
    )
    chosen = mode if mode is not None else config.value_of("mode") or "auto"
    if chosen not in _MODES:
        raise ValueError(f"mode cannot be {mode!r}; it takes {', '.join(_MODES)}")
    for name, number in (("keep_last", keep_last), ("keep_every", keep_every)):
        if number is not None and (not isinstance(number, int) or number < 0):
            raise ValueError(f"{name} cannot be {number!r}; it takes 1 or more")
    return Key(job(), chosen, keep_last or 0, keep_every or 0, tier, settings)


# Held while ranks find each other, because all ranks must open their groups in the same order.
_lock = module_lock()
_groups: dict[str, Group] = {}


def _opened(directory: str | os.PathLike[str], key: Key, *, for_reading: bool = False) -> Group:
    """Return the group of this directory; open one if there is none with this key.

    For reading, the mode and the retention arguments of the group do not matter.
    """
    where = os.path.abspath(os.fspath(directory))  # noqa: PTH100 - the user decides about links
    with _lock:
        before = _groups.get(where)
        if before is not None:
            same = before.key._replace(job=key.job, tier=key.tier, settings=key.settings)
            if before.key == (same if for_reading else key):
                return before
            # Checkpoints of a directory are written one after the other.
            del _groups[where]
            before.wait()
            before.close()
        group = _groups[where] = Group(where, key)
        return group


def opened_for_reading(directory: str, folder: str) -> Group:
    """Return a group for this directory and the tier in this folder; "" means no tier."""
    return _opened(directory, _key(None, None, None, folder), for_reading=True)


def close() -> None:
    """Close all groups when their saves have ended. Called at the end of the process."""
    with _lock:
        groups = list(_groups.values())
        _groups.clear()
    for group in groups:
        group.wait()
        group.close()


after_saves(close)


def _forget_in_child() -> None:
    # The groups belong to the parent process; closing them here would do nothing.
    _groups.clear()


os.register_at_fork(after_in_child=_forget_in_child)


# ---- Saves --------------------------------------------------------------------------------------


def _request(
    directory: str | os.PathLike[str],
    replace: bool,
    progress: Callable[[Progress], object] | None,
    deadline: float | None,
    durable: Literal["destination"] | None,
) -> SaveRequest:
    """Return the request of a group save, which is durable whatever the setting says."""
    if durable not in (None, "destination"):
        raise ValueError(f'durable cannot be {durable!r}; it takes "destination"')
    return SaveRequest.of(os.fspath(directory), durable or True, replace, progress, deadline)


@dataclass
class _GroupSave:
    """This rank's object and the step that it is saved for."""

    obj: object
    pickle_module: Any
    protocol: int
    step: int
    request: SaveRequest

    def __post_init__(self) -> None:
        if isinstance(self.step, bool) or not isinstance(self.step, int):
            raise TypeError(f"step must be a number, not {type(self.step).__name__}")
        if not 0 <= self.step <= _MOST_STEP:
            raise ValueError(f"step cannot be {self.step}; it takes 0 to 2^63 - 1")

    def start(self, group: Group, *, background: bool) -> SaveHandle:
        """Start the save. With `background`, the object may change when this returns."""
        has_begun = False

        def begin_in_c(*arguments: Any) -> int:
            nonlocal has_begun
            has_begun = True
            return lib.ioshape_group_save_records(*arguments)  # type: ignore[no-any-return]

        with starting():
            try:
                request = self._request_for(group)
                payload = pickling.records_of(self._pickle(request.path))
                handle = start(
                    request,
                    group.context,
                    payload,
                    begin_in_c,
                    group.pointer,
                    self.step,
                    payload.array,
                    payload.length,
                    background=background,
                    owner=group,
                    causes=() if group.comm is None else (group.comm,),
                )
            except BaseException as error:
                # The other ranks must not wait until this rank seems dead.
                if not has_begun:  # otherwise the library has told the other ranks
                    group.fail(self.step, error)
                raise
        group.add(handle)
        return handle

    def _request_for(self, group: Group) -> SaveRequest:
        """Return the request with the way of this group's checkpoint."""
        path = _path_of(group.directory, self.step)
        name = os.path.basename(path)  # noqa: PTH119
        return changed(
            self.request,
            path=path,
            write_path=path,
            passage=group.tier.passage(name, to_the_end=self.request.to_destination),
            downgrades=group.tier.downgrades,
        )

    def _pickle(self, path: str) -> Pickled:
        pickling.check_arguments(path, self.pickle_module)
        try:
            return pickling.collect(self.obj, self.pickle_module, self.protocol)
        except pickling.Unsupported as reason:
            return pickling.by_torch(self.obj, self.pickle_module, self.protocol, reason)
