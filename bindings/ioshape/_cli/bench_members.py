# SPDX-License-Identifier: Apache-2.0
"""Work of the worker processes of "ioshape bench": ranks, which save, and neighbours.

A neighbour reads or writes small files, and times each operation. A reader opens a small uncached
file, reads it, closes it, and pauses. A writer creates a small file, syncs it, and pauses.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import math
import mmap
import multiprocessing
import os
import random
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cache
from multiprocessing import connection as connections
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

import ioshape
from ioshape import _torch as original
from ioshape._core import context

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from multiprocessing.connection import Connection
    from multiprocessing.context import ForkProcess

    from ioshape import Report


# ---- Neighbours ----------------------------------------------------------------------------------

READ = "read"
WRITE = "write"

# Many neighbours with long pauses. A single one without pauses would wait for each slow operation,
# and so hardly ever sample one.
READERS = 8
WRITERS = 2
#: mean pause of a neighbour between two operations
REST_S = 0.1
_FILES = 256
_FILE_BYTES = 16 << 10
_KEPT = 64


class Operation(NamedTuple):
    """An operation of a neighbour. Its times are those of time.monotonic_ns()."""

    kind: str
    at_ns: int
    took_ns: int


def prepare(folder: Path) -> None:
    """Create the files that readers read."""
    content = random.randbytes(_FILE_BYTES)
    for number in range(_FILES):
        _small(folder, number).write_bytes(content)
    sync_filesystem(folder)


def sync_filesystem(folder: Path) -> None:
    """Sync the filesystem of a folder, and no other."""
    file = os.open(folder, os.O_RDONLY)
    try:
        ctypes.CDLL(None).syncfs(file)
    finally:
        os.close(file)


def _small(folder: Path, number: int) -> Path:
    return folder / f"small-{number:05d}"


def reader(folder: Path, number: int) -> Callable[[Connection], None]:
    """Return the work of a process that reads small files."""

    def work(connection: Connection) -> None:
        chance = random.Random(number)
        with mmap.mmap(-1, _FILE_BYTES) as buffer:
            _live(
                connection,
                READ,
                chance,
                lambda: _read(_small(folder, chance.randrange(_FILES)), buffer),
            )

    return work


def _read(path: Path, buffer: mmap.mmap) -> None:
    for flags in (os.O_DIRECT, 0):  # some filesystems refuse direct reads
        try:
            _read_with(path, buffer, flags)
            return
        except OSError:
            if not flags:
                raise


def _read_with(path: Path, buffer: mmap.mmap, flags: int) -> None:
    file = os.open(path, os.O_RDONLY | flags)
    try:
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.preadv(file, [buffer], 0)
    finally:
        os.close(file)


def writer(folder: Path, number: int) -> Callable[[Connection], None]:
    """Return the work of a process that creates small files, and removes older ones."""

    def work(connection: Connection) -> None:
        chance = random.Random(number)
        content = random.randbytes(_FILE_BYTES)

        def write() -> None:
            path = folder / f"note-{number}-{chance.randrange(_KEPT):02d}"
            path.unlink(missing_ok=True)
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                os.write(file, content)
                os.fsync(file)
            finally:
                os.close(file)

        _live(connection, WRITE, chance, write)

    return work


def _live(
    connection: Connection, kind: str, chance: random.Random, operate: Callable[[], None]
) -> None:
    """Repeat an operation from one message to the next. Then send the list of operations."""
    operate()
    connection.send("ready")
    while True:
        connection.recv()
        operations: list[Operation] = []
        while True:
            begin = time.monotonic_ns()
            operate()
            operations.append(Operation(kind, begin, time.monotonic_ns() - begin))
            # Random pauses keep the neighbours from operating in step.
            if connection.poll(REST_S * chance.uniform(0.5, 1.5)):
                break
        connection.recv()
        connection.send(operations)


# ---- The ceiling: throughput of a program that only writes ---------------------------------------

_BLOCK_BYTES = 4 << 20
_PAGE_BYTES = 4096


class Writer(NamedTuple):
    """A number of threads that write blocks from one buffer, directly or buffered."""

    threads: int
    #: whether writes bypass the page cache
    direct: bool = True

    def write(self, path: Path, n_bytes: int) -> float:
        """Write a file of whole blocks and sync it. Return the seconds without preallocation."""
        block = min(_BLOCK_BYTES, -(-n_bytes // _PAGE_BYTES) * _PAGE_BYTES)
        count = -(-n_bytes // block)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | (os.O_DIRECT if self.direct else 0)
        file = os.open(path, flags, 0o600)
        try:
            if self.direct:
                _preallocate(file, count * block)
            # mmap aligns the buffer to a page, which direct writes need. It outlives the threads.
            with mmap.mmap(-1, block) as buffer, ThreadPoolExecutor(self.threads) as pool:
                buffer.write(os.urandom(block))
                begin = time.perf_counter()
                offsets = range(0, count * block, block)
                for written in pool.map(lambda offset: os.pwrite(file, buffer, offset), offsets):
                    if written != block:
                        raise OSError(f"only {written} bytes of {block} were written")
                os.fsync(file)
                return time.perf_counter() - begin
        finally:
            os.close(file)


def _preallocate(file: int, n_bytes: int) -> None:
    # ioshape preallocates, too. If the filesystem cannot, the C library would write to every block
    # instead. On a direct file these writes fail at once.
    try:
        os.posix_fallocate(file, 0, n_bytes)
    except OSError:
        os.ftruncate(file, n_bytes)


def _fastest_writer(path: Path, n_bytes: int) -> Writer:
    """Return the fastest writer for a file of this size at this path.

    Raises:
        OSError: no writer works.
    """
    try:
        return min((Writer(4), Writer(16)), key=lambda writer: writer.write(path, n_bytes))
    except OSError:
        buffered = Writer(4, direct=False)
        buffered.write(path, n_bytes)
        return buffered


# ---- Ranks ---------------------------------------------------------------------------------------

_LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_", "OMPI_", "PMI", "SLURM_", "MPI_", "TORCHELASTIC_")
_DEFAULT_STAGING_BYTES = 64 << 20
_RANDOM_ITEMS = 4 << 20

#: Environment variables that would falsify the results. Recording takes time, and a skipped save
#: measures nothing.
_FALSIFYING = ("IOSHAPE_TRACE", "IOSHAPE_FULL")


class Order(NamedTuple):
    """The message to all ranks that makes them save."""

    way: str
    step: int
    #: when to begin, by time.monotonic_ns()
    at_ns: int


@dataclass
class Saved:
    """The result of one rank's save. Its times are those of time.monotonic_ns()."""

    begin_ns: int
    #: when the call returned, so that training could go on
    returned_ns: int
    #: when the file was durable
    end_ns: int
    #: the report as a dictionary; None if ioshape did not save
    report: dict[str, Any] | None = None
    #: (phase, begin, end) of saves without a report
    spans: list[tuple[str, int, int]] = field(default_factory=list)
    #: CPU seconds of the rank's process
    cpu_s: float = 0.0


@dataclass(frozen=True)
class RankSetup:
    """The position of a rank in its job, and the parameters of its saves."""

    rank: int
    #: environment variables that a launcher sets for the rank
    variables: dict[str, str]
    #: bytes that the rank saves
    n_bytes: int
    #: folder of the job, with a folder for each way
    folder: Path


def launcher_variables(rank: int, ranks: int, token: str) -> dict[str, str]:
    """Return the variables that torchrun sets for a rank of a job on one host.

    The token is a unique name of the job.
    """
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(ranks),
        "TORCHELASTIC_RUN_ID": token,
    }


State = dict[str, torch.Tensor]


def make_state(n_bytes: int) -> State:
    """Return the parameters of a transformer with `n_bytes` in all.

    It has as many layers as fit; an embedding takes the rest. The values do not compress.
    """
    items = n_bytes // 4
    hidden = 16
    while 12 * (2 * hidden) ** 2 * 4 <= items and hidden < 4096:
        hidden *= 2
    shapes = {
        "attention.qkv.weight": (3 * hidden, hidden),
        "attention.out.weight": (hidden, hidden),
        "norm.weight": (hidden,),
        "mlp.up.weight": (4 * hidden, hidden),
        "mlp.down.weight": (hidden, 4 * hidden),
    }
    values = torch.empty(min(items, _RANDOM_ITEMS)).uniform_(-1, 1)
    layers, left = divmod(items, sum(math.prod(shape) for shape in shapes.values()))
    state = {
        f"layers.{layer}.{name}": _filled(shape, values)
        for layer in range(layers)
        for name, shape in shapes.items()
    }
    if left:
        state["embedding.weight"] = _filled((left,), values)
    return state


def _filled(shape: tuple[int, ...], values: torch.Tensor) -> torch.Tensor:
    tensor = torch.empty(shape)
    for part in torch.split(tensor.view(-1), len(values)):
        part.copy_(values[: len(part)])
    return tensor


def rank(setup: RankSetup) -> Callable[[Connection], None]:
    """Return the work of a process that is a rank of a job."""

    def work(connection: Connection) -> None:
        _become(setup)
        torch.manual_seed(setup.rank)
        state = make_state(setup.n_bytes)
        connection.send("ready")
        while True:
            order: Order = connection.recv()
            context.live = _context(_COORDINATORS.get(order.way))
            time.sleep(max(0, order.at_ns - time.monotonic_ns()) / 1e9)
            cpu_s = time.process_time()
            saved = WAYS[order.way](state, setup, order)
            saved.cpu_s = time.process_time() - cpu_s
            connection.send(saved)

    return work


def _become(setup: RankSetup) -> None:
    """Set up this process as a launcher would have started the rank."""
    if setup.variables["WORLD_SIZE"] != "1":
        torch.set_num_threads(1)
    for name in list(os.environ):
        if name.startswith(_LAUNCHERS) or name in ("MASTER_ADDR", "MASTER_PORT", *_FALSIFYING):
            del os.environ[name]
    os.environ.update(setup.variables)
    os.environ["IOSHAPE_EXAMINE"] = "off"  # every save has an unchanged state
    # Waits for slots are part of the result. Log lines about them would hide it.
    logging.getLogger("ioshape").addHandler(logging.NullHandler())
    # The default staging memory assumes a usual number of ranks per host. There may be more here.
    if not os.environ.get("IOSHAPE_STAGING_BYTES"):
        ioshape.configure(staging_bytes=2 * setup.n_bytes + _DEFAULT_STAGING_BYTES)


def _file(setup: RankSetup, order: Order) -> Path:
    return setup.folder / order.way / f"step-{order.step}-rank-{setup.rank:05d}.pt"


def _by_torch(sync: bool) -> Callable[[State, RankSetup, Order], Saved]:
    def save(state: State, setup: RankSetup, order: Order) -> Saved:
        path = _file(setup, order)
        begin = time.monotonic_ns()
        original.save(state, path)
        written = time.monotonic_ns()
        if sync:
            with path.open("rb") as file:
                os.fsync(file.fileno())
        end = time.monotonic_ns()
        return Saved(begin, end, end, None, [("write", begin, written), ("sync", written, end)])

    return save


def _by_save(state: State, setup: RankSetup, order: Order) -> Saved:
    begin = time.monotonic_ns()
    report = ioshape.save(state, _file(setup, order), durable=True)
    end = time.monotonic_ns()
    return Saved(begin, end, end, _told(report))


@cache
def _context(coordinator: str | None) -> context.Context:
    """Return the context for saves with this coordinator, or with that of the settings."""
    return context.Context(coordinator=coordinator)


def _by_save_async(state: State, setup: RankSetup, order: Order) -> Saved:
    begin = time.monotonic_ns()
    handle = ioshape.save_async(state, _file(setup, order), durable=True)
    returned = time.monotonic_ns()
    report = handle.result()
    return Saved(begin, returned, time.monotonic_ns(), _told(report))


def _by_group(mode: str) -> Callable[[State, RankSetup, Order], Saved]:
    def save(state: State, setup: RankSetup, order: Order) -> Saved:
        begin = time.monotonic_ns()
        report = ioshape.save_group(state, setup.folder / order.way, order.step, mode=mode)
        end = time.monotonic_ns()
        return Saved(begin, end, end, _told(report))

    return save


def _told(report: Report) -> dict[str, Any]:
    if report.skipped:
        raise RuntimeError(f"the save to {report.path} was skipped")
    return asdict(report)


#: The writer for the ceiling, chosen in the warm-up round. It is empty before.
_writers: list[Writer] = []


def _by_ceiling(_state: State, setup: RankSetup, order: Order) -> Saved:
    path = _file(setup, order)
    if not _writers:
        _writers.append(_fastest_writer(path, setup.n_bytes))
    begin = time.monotonic_ns()
    end = begin + round(_writers[0].write(path, setup.n_bytes) * 1e9)  # without preallocation
    return Saved(begin, end, end, None, [("write", begin, end)])


WAYS = {
    "torch": _by_torch(sync=True),
    "buffered": _by_torch(sync=False),
    "save": _by_save,
    "async": _by_save_async,
    "open": _by_save_async,
    "node": _by_group("node"),
    "rank0": _by_group("rank0"),
    "ceiling": _by_ceiling,
}

#: coordinators of the ways that do not use the one of the settings
_COORDINATORS = {"open": "open"}


# ---- The worker processes ------------------------------------------------------------------------


_PR_SET_PDEATHSIG = 1
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_CONTEXT = multiprocessing.get_context("fork")


class MemberError(Exception):
    """A worker process failed. The message names it."""


class _Failed(str):
    """The last answer of a worker process that raised: its error message."""

    __slots__ = ()


@dataclass
class Member:
    """A worker process, as its parent sees it."""

    process: ForkProcess
    connection: Connection

    @property
    def name(self) -> str:
        return self.process.name

    def tell(self, message: object) -> None:
        """Send a message. If the process has ended, waiting for its answer will report it."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.connection.send(message)


@contextmanager
def _signals_wait() -> Iterator[None]:
    """Delay the signals that end the program until the end of the block.

    Python drops an exception that a signal handler raises in a function called at a fork.
    """
    came: list[int] = []
    before = {
        number: signal.signal(number, lambda given, _frame: came.append(given))
        for number in _ENDING
        if callable(signal.getsignal(number))
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    for given in came:
        signal.raise_signal(given)


class Crowd:
    """The set of worker processes. Leaving the with block kills all of them."""

    def __init__(self) -> None:
        self._members: list[Member] = []

    def __enter__(self) -> Crowd:
        gc.collect()
        gc.freeze()  # otherwise the collector of each child would copy all pages of the parent
        return self

    def __exit__(self, *_what: object) -> None:
        for member in self._members:
            member.process.kill()
        for member in self._members:
            member.process.join()
            member.connection.close()
        self._members.clear()
        gc.unfreeze()

    def start(self, name: str, work: Callable[[Connection], object]) -> Member:
        """Fork a process that does this work and ends. An exception becomes its last answer."""
        with _signals_wait():  # a signal must not leave a started process that is not listed
            ours, theirs = _CONTEXT.Pipe()
            process = _CONTEXT.Process(target=_serve, args=(theirs, work, os.getpid()), name=name)
            process.start()
            theirs.close()
            member = Member(process, ours)
            self._members.append(member)
        return member

    def ask(self, asked: Sequence[Member], timeout_s: float, message: object) -> list[Any]:
        """Send a message to these processes. Return their answers in the same order."""
        for member in asked:
            member.tell(message)
        return self.hear(asked, timeout_s)

    def hear(self, asked: Sequence[Member], timeout_s: float) -> list[Any]:
        """Wait for an answer from each of these processes. Return them in the same order.

        Raises:
            MemberError: a process failed or ended, or did not answer in time. It may be one that is
                not among `asked`.
        """
        answers: dict[str, Any] = {}
        end = time.monotonic() + timeout_s
        while len(answers) < len(asked):
            missing = [member for member in asked if member.name not in answers]
            left_s = end - time.monotonic()
            if left_s <= 0:
                raise MemberError(f"{missing[0].name} did not answer within {timeout_s:.0f} s")
            ready = connections.wait(
                [one.connection for one in missing]
                + [one.process.sentinel for one in self._members],
                left_s,
            )
            for member in missing:
                if member.connection in ready:
                    answers[member.name] = _answer_of(member)
            self._check()
        return [answers[member.name] for member in asked]

    def rest(self, seconds: float) -> None:
        """Sleep. Raise MemberError if a process ends meanwhile."""
        connections.wait([one.process.sentinel for one in self._members], seconds)
        self._check()

    def _check(self) -> None:
        for member in self._members:
            if member.process.exitcode is not None:
                _answer_of(member)


def _answer_of(member: Member) -> Any:
    try:
        answer = member.connection.recv()
    except (EOFError, ConnectionResetError):
        member.process.join()
        code = member.process.exitcode or 0
        how = (
            f"was ended by {signal.Signals(-code).name}"
            if code < 0
            else f"ended with exit code {code}"
        )
        raise MemberError(f"{member.name} {how}") from None
    if isinstance(answer, _Failed):
        raise MemberError(f"{member.name}: {answer}")
    return answer


def _serve(connection: Connection, work: Callable[[Connection], object], parent: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and kills the workers
    for number in _ENDING[1:]:
        signal.signal(number, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # the parent ended before the prctl()
        os._exit(1)
    try:
        work(connection)
    except BaseException as error:
        with contextlib.suppress(OSError):
            connection.send(_Failed(f"{type(error).__name__}: {error}"))
        os._exit(1)
