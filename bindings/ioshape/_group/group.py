# SPDX-License-Identifier: Apache-2.0
"""save_group() and save_group_async(): one checkpoint of all ranks of a job."""

from __future__ import annotations

import errno
import os
import pickle
import threading
import time
from dataclasses import dataclass
from dataclasses import replace as changed
from typing import TYPE_CHECKING, Any, NamedTuple

from ioshape._core import comm as _comm
from ioshape._core import config
from ioshape._core.config import tier_folder
from ioshape._core.context import Context, current, encoded
from ioshape._core.errors import NoUsableCheckpointError, PassedOver, failure, last_failure
from ioshape._core.job import Job, job
from ioshape._core.locks import ForkedLock
from ioshape._core.structs import called_from_c, keep_failure, owned, said, sized
from ioshape._core.under_way import after_saves, begun, completed, raise_unheard
from ioshape._group.tier import GroupTier
from ioshape._native import ffi, lib
from ioshape._save import pickling
from ioshape._save.begin import records_of, start
from ioshape._save.request import SaveRequest
from ioshape._tier.route import Route

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Literal, TypeVar

    from ioshape._core.report import Progress, Report
    from ioshape._save.handle import SaveHandle

    T = TypeVar("T")

_PROTOCOL = 2  # torch's default
_DEADLINE_MS = 120_000  # the library's default
_MOST_STEP = (1 << 63) - 1


_MODES = {
    "auto": lib.IOSHAPE_MODE_AUTO,
    "each": lib.IOSHAPE_MODE_EACH,
    "node": lib.IOSHAPE_MODE_NODE,
    "rank0": lib.IOSHAPE_MODE_RANK0,
}


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
    """Saves the objects of all ranks as one checkpoint, which exists as a whole or not at all.

    All ranks of the job (see ioshape.job()) call it, with the same arguments but for their object,
    in the same order of steps. When it returns, on any rank, the generation "step-0000001000" is in
    the directory, complete and on stable storage, with every rank's part in it. If a rank fails or
    dies, it raises on all others, with a sentence that names that rank, and what was there before
    is as it was.

    Each part is an ordinary file of torch.save: by itself, or in a zip of several, which unzip
    takes apart.

    Args:
        obj: this rank's object.
        directory: where the generations are; it is made if it is not there.
        step: which generation this is; a complete one of the same step is replaced.
        mode: who writes: "each" rank, one for each "node", "rank0", or "auto". Default: the setting
            "mode". The report says which it was, and why.
        keep_last: complete generations to keep, newest first; older ones are removed when this one
            is complete. Default: all.
        keep_every: besides, those whose step is a multiple of this are kept.
        pickle_module: as in torch.save.
        pickle_protocol: as in torch.save.
        replace: False raises FileExistsError if there is a complete generation of this step.
        progress: is called with a Progress of this rank's part now and then; an exception in it
            stops the save, on all ranks.
        deadline: as in save(), the same on all ranks; old generations are then removed by the next
            save.
        durable: "destination" waits until a save over a tier is drained, on this rank.
        tier: as in save(), a folder on each node: the generation is durable there, and appears in
            the directory once all nodes have drained it. keep_last and keep_every count what is in
            the directory. With the setting "parity" nodes make up for one that is lost.

    Returns:
        A Report of this rank's part. On all ranks its `skipped` is set if the generation did not
        fit into the free space and the setting "full" is "skip": then there is none of this step.

    Raises:
        StorageError: the generation could not be saved. It is an OSError with errno and path.

    What torch.save raises for objects that cannot be pickled, this raises, on the rank that has
    such an object; on the others it is a StorageError that names that rank.
    """
    request = _request(replace, progress, deadline, durable)
    save = _GroupSave(obj, pickle_module, pickle_protocol, step, request)
    report = save.save(_opened(directory, mode, keep_last, keep_every, tier))
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
    """Begins to save the objects of all ranks, and returns as soon as this rank's may change again.

    Arguments and files are those of save_group(). All ranks call it; at the first call for a
    directory they wait for each other, later ones wait for nobody. Generations are written one
    after the other.

    Returns:
        A SaveHandle, as save_async() gives it. It is done when the whole generation is.

    Raises:
        What torch.save raises for objects that cannot be pickled. Other failures are raised by the
        handle.
    """
    request = _request(replace, progress, deadline, durable)
    save = _GroupSave(obj, pickle_module, pickle_protocol, step, request)
    handle = save.begin(_opened(directory, mode, keep_last, keep_every, tier))
    raise_unheard(but=handle)
    return handle


# ---- Groups -------------------------------------------------------------------------------------


class Key(NamedTuple):
    """What a group was opened with. Ranks that differ in it do not find each other."""

    job: Job
    mode: str
    keep_last: int
    keep_every: int
    #: its folder; "": none
    tier: str
    #: of the process
    settings: tuple[tuple[str, Any], ...]


class Group:
    """An open group, and the context that it lives in."""

    def __init__(self, directory: str, key: Key) -> None:
        self.directory = directory
        self.key = key
        self.context: Context = current()
        # Python looks for signals while it waits for a thread, not while C waits for other ranks.
        self.comm = in_thread(self._connect)
        self.tier = GroupTier(directory, key.tier)
        self._owner = os.getpid()
        self._texts: list[Any] = []
        self._saves: list[SaveHandle] = []
        self._out: Any = None
        self._out = in_thread(self._open, ffi.release)

    def _connect(self) -> _comm.Comm | None:
        """Where bytes may have to go from node to node."""
        key, settings = self.key, dict(self.key.settings)
        is_played = key.job.node != os.uname().nodename
        several_nodes = key.job.world_size > key.job.local_world_size or is_played
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
                remedy="look whether all are alive, and set GLOO_SOCKET_IFNAME to the network "
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
        # The context, the functions that it sends by and the tier outlive it.
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
        """Not the parent's."""
        return self._owner == os.getpid()

    def path_of(self, step: int) -> str:
        """Of a generation, as the library names it."""
        return os.path.join(self.directory, f"step-{step:010d}")  # noqa: PTH118

    def add(self, handle: SaveHandle) -> None:
        """Notes a save."""
        self._saves = [one for one in self._saves if not one.done()] + [handle]

    def wait(self) -> None:
        """For its saves, however they end."""
        for handle in self._saves:
            handle._wait(None)
        self._saves = []

    def fail(self, step: int, error: BaseException) -> None:
        """Has the others know that this rank has nothing to bring."""
        why = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        lib.ioshape_group_fail(self.pointer, step, why[:500].encode(errors="replace"))

    def latest(self, *, intact: bool = False) -> tuple[str, int, list[PassedOver]]:
        """Where the newest generation lies, and its step, the same on all ranks, which all ask.

        A complete one, or one of which every byte is intact; and what newer ones are not. It lies
        in the group's directory, or in that on its tier.
        """
        search = _Search()

        def ask() -> int:
            step, user = ffi.new("uint64_t *"), ffi.new_handle(search)
            options = sized("ioshape_search_options")
            options.intact = intact
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
        """As its end does; after its saves."""
        if self.is_mine and self._out is not None:
            out, self._out = self._out, None
            ffi.release(out)

    @property
    def pointer(self) -> Any:
        """As C takes it; NULL once it is closed."""
        return ffi.NULL if self._out is None else self._out[0]


class _Search:
    """For the newest intact generation."""

    def __init__(self) -> None:
        #: C puts the directory there, which is the group's
        self.where = ffi.new("char const **")
        self.passed_over: list[PassedOver] = []
        self.failure: BaseException | None = None

    @property
    def directory(self) -> str:
        """Of what is found or passed over."""
        return os.fsdecode(ffi.string(self.where[0]))


@called_from_c(onerror=keep_failure)
def ioshape_py_passed_over(search: _Search, step: int) -> None:
    path = os.path.join(search.directory, f"step-{step:010}")  # noqa: PTH118
    about = said(lib.ioshape_last_error().path)
    search.passed_over.append(PassedOver(path, last_failure(about or path, "load")))


def in_thread(
    function: Callable[[], T], unwanted: Callable[[T], object] = lambda _result: None
) -> T:
    """What it returns or raises. Ctrl-C gets through; what it still returns then is `unwanted`."""
    results: list[T] = []
    errors: list[BaseException] = []
    lock = threading.Lock()
    gone = False
    ended = threading.Event()

    def run() -> None:
        try:
            result = function()
        except BaseException as error:
            errors.append(error)
        else:
            with lock:
                results.append(result)
                left = gone
            if left:
                unwanted(result)
        ended.set()

    threading.Thread(target=run, name="ioshape-group", daemon=True).start()
    try:
        ended.wait()
    except BaseException:  # Ctrl-C
        with lock:
            gone = True
        if results:
            unwanted(results[0])
        raise
    if errors:
        raise errors[0]
    return results[0]


def _local_ranks(place: Job) -> int:
    """0 if nobody says."""
    return place.local_world_size if place.local_world_size > 1 or place.world_size == 1 else 0


def _token(place: Job, configured: str | None) -> str:
    """What the ranks of the job have in common, and no other job; "" if the library knows best."""
    name = configured or place.id
    # Of several torchruns in one job of Slurm's each has a port of its own. A port alone is no
    # name: most use the same one.
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
            raise ValueError(f"{name} cannot be {number!r}; it takes a number from 1 on")
    return Key(job(), chosen, keep_last or 0, keep_every or 0, tier, settings)


# Held while ranks find each other: all of them open their groups in the same order.
_lock = ForkedLock()
_groups: dict[str, Group] = {}


def _opened(
    directory: str | os.PathLike[str],
    mode: str | None,
    keep_last: int | None,
    keep_every: int | None,
    tier: str | os.PathLike[str] | Literal[False] | None,
) -> Group:
    """The group of this directory; made anew when what it was opened with has changed."""
    where = os.path.abspath(os.fspath(directory))  # noqa: PTH100 - links are the user's business
    key = _key(mode, keep_last, keep_every, tier_folder(tier))
    with _lock:
        group = _groups.get(where)
        if group is not None and group.key == key:
            return group
        return _replace(where, key)


def opened_for_reading(directory: str, folder: str) -> Group:
    """The group of this directory and tier, whatever else it is opened with; made if there is none.

    Args:
        directory: of the generations.
        folder: of the tier; "": none.
    """
    where = os.path.abspath(directory)  # noqa: PTH100
    key = _key(None, None, None, folder)
    with _lock:
        group = _groups.get(where)
        if group is not None and (group.key.job, group.key.tier, group.key.settings) == (
            key.job,
            key.tier,
            key.settings,
        ):
            return group
        return _replace(where, key)


def _replace(where: str, key: Key) -> Group:
    before = _groups.pop(where, None)
    if before is not None:
        # Generations of a directory come one after the other.
        before.wait()
        before.close()
    group = Group(where, key)
    _groups[where] = group
    return group


def close() -> None:
    """Closes all groups, when their saves have ended. The end of the process does it."""
    with _lock:
        groups = list(_groups.values())
        _groups.clear()
    for group in groups:
        group.wait()
        group.close()


after_saves(close)


def _forget_in_child() -> None:
    # The groups are the parent's, and closing them here does nothing.
    _groups.clear()


os.register_at_fork(after_in_child=_forget_in_child)


# ---- Saves --------------------------------------------------------------------------------------


def _request(
    replace: bool,
    progress: Callable[[Progress], object] | None,
    deadline: float | None,
    durable: str | None,
) -> SaveRequest:
    """Checkpoints of groups are durable whatever the setting says."""
    if durable not in (None, "destination"):
        raise ValueError(f'durable cannot be {durable!r}; it takes "destination"')
    request = SaveRequest.of(True, replace, progress, deadline)
    return changed(request, to_destination=durable == "destination")


@dataclass
class _GroupSave:
    """This rank's object and the step that it belongs to."""

    obj: object
    pickle_module: Any
    protocol: int
    step: int
    request: SaveRequest

    def __post_init__(self) -> None:
        if isinstance(self.step, bool) or not isinstance(self.step, int):
            raise TypeError(f"step is a number, not {type(self.step).__name__}")
        if not 0 <= self.step <= _MOST_STEP:
            raise ValueError(f"step cannot be {self.step}; it is from 0 to 2^63 - 1")

    def save(self, group: Group) -> Report:
        """Saves, and waits."""
        return completed(lambda: self._start(group, borrow=True))

    def begin(self, group: Group) -> SaveHandle:
        """Saves in the background."""
        return begun(lambda: self._start(group, borrow=False))

    def _start(self, group: Group, *, borrow: bool) -> SaveHandle:
        path = group.path_of(self.step)
        begin = time.perf_counter()
        try:
            pickled, notes = self._pickle(path)
        except BaseException as error:
            # The others must not wait for this rank until it seems to be dead.
            group.fail(self.step, error)
            raise
        pickle_s = time.perf_counter() - begin

        has_begun = False
        name = os.path.basename(path)  # noqa: PTH119
        passage = group.tier.passage(name, to_the_end=self.request.to_destination)

        def begin_in_c(records: Any, count: int, options: Any, out: Any) -> int:
            nonlocal has_begun
            has_begun = True
            if passage is not None:
                passage.save = out
            return lib.ioshape_group_save_records(  # type: ignore[no-any-return]
                group.pointer, self.step, records, count, options, out
            )

        causes = (group.comm,) if group.comm is not None else ()
        try:
            handle = start(
                begin_in_c,
                group.context,
                Route(path, path, passage, group.tier.steps),
                records_of(pickled),
                self.request,
                borrow=borrow,
                pickle_s=pickle_s,
                notes=notes,
                owner=group,
                causes=causes,
            )
        except BaseException as error:
            if not has_begun:  # otherwise the library has told them
                group.fail(self.step, error)
            raise
        group.add(handle)
        return handle

    def _pickle(self, path: str) -> tuple[pickling.Pickled, tuple[str, ...]]:
        pickling.check_arguments(path, self.pickle_module)
        try:
            return pickling.collect(self.obj, self.pickle_module, self.protocol), ()
        except pickling.Unsupported as reason:
            pickled = pickling.by_torch(self.obj, self.pickle_module, self.protocol)
            return pickled, (f"pickled by torch itself, to memory: {reason}",)
