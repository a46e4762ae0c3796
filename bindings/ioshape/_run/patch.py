# SPDX-License-Identifier: Apache-2.0
"""patch(): replaces torch.save and torch.load, for code that cannot be edited."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import pickle
import stat
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ioshape import _torch as original
from ioshape._core import terminal as _terminal
from ioshape._core.descriptors import is_pythons, open_file
from ioshape._core.locks import module_lock
from ioshape._core.replacing import replace
from ioshape._core.under_way import after_saves
from ioshape._load.load import load as our_load
from ioshape._run.startup import _ioshape_hook as hook
from ioshape._save import collected, small
from ioshape._save.save import is_ours, save_async
from ioshape._save.save import save as our_save

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType


@functools.wraps(original.save)
def _save(
    obj: object,
    f: Any,
    pickle_module: Any = pickle,
    pickle_protocol: int = 2,
    _use_new_zipfile_serialization: bool = True,
    _disable_byteorder_record: bool = False,
) -> None:
    how = (
        pickle_module,
        pickle_protocol,
        _use_new_zipfile_serialization,
        _disable_byteorder_record,
    )
    if isinstance(f, (str, os.PathLike)):
        if _use_new_zipfile_serialization and collected.begins(lambda: save_async(obj, f, *how)):
            return
        if not (_is_run() and small.save(obj, os.fspath(f), how)):
            our_save(obj, f, *how)
        return
    path = path_of(f)
    if path is not None:
        with moved_to(f, path):
            if not (_is_run() and small.save(obj, path, how, replaces=True)):
                # Without a tier: the program may write more to the file itself.
                our_save(obj, path, *how, tier=False)
        return
    goes_past = hasattr(f, "write") and not is_ours(f)
    with counted(f) if goes_past else contextlib.nullcontext():
        our_save(obj, f, *how)


@functools.wraps(original.load)
def _load(f: Any, map_location: Any = None, pickle_module: Any = None, **named: Any) -> Any:
    return our_load(f, map_location, pickle_module, **named)


def _is_run() -> bool:
    """Return whether this is below "ioshape run", so that the script does not know ioshape."""
    return os.environ.get("IOSHAPE_RUN", "0") != "0"


_lock = module_lock()
_loads: list[bool] = []  # for each patch() in force, whether it also replaced torch.load
_others: list[tuple[str, ...]] = []  # for each, the modules of ioshape that patched other packages


def patch(*, load: bool = True, safetensors: bool = False, dcp: bool = False) -> None:
    """Replace torch.save and torch.load by those of ioshape, also in modules that imported them.

    References that a class, an instance or a functools.partial holds are not replaced. Each call
    needs one call of unpatch() to undo it.

    Args:
        load: whether torch.load is replaced, too.
        safetensors: True makes the package safetensors write its files through ioshape, and with it
            transformers, accelerate, diffusers and PEFT. Directories that transformers, accelerate
            and huggingface_hub fill then appear atomically.
        dcp: True makes torch.distributed.checkpoint use the writer and reader of ioshape.dcp for
            paths. Classes that derive from DCP's writer or reader stay as they are.
    """
    with _lock:
        # The packages are imported first: "ioshape run" patches as soon as one is imported, and its
        # hook must not find a half-imported module of ioshape.
        packages = {"safetensors": safetensors, "torch.distributed.checkpoint": dcp}
        for name in (name for name, is_wanted in packages.items() if is_wanted):
            with contextlib.suppress(ImportError):
                import_module(name)
        if safetensors:
            directories = import_module("ioshape._integrations.huggingface.patching")
        # All imports come before the first replacement, because a package may be missing.
        wanted = {
            "ioshape._integrations.safetensors.patching": safetensors,
            "ioshape._integrations.dcp.patching": dcp,
        }
        others = tuple(name for name, is_wanted in wanted.items() if is_wanted)
        for name in others:
            import_module(name)
        for name in others:
            sys.modules[name].patch(load=load)
        if safetensors and not _is_run():
            hook.follow(dict.fromkeys(directories.MODULES, directories.follow))
        _loads.append(load)
        _others.append(others)
        # A repeated patch() replaces again: a module imported since then may have taken the
        # originals from a module that had kept them.
        pairs: list[tuple[Any, Any]] = [(original.save, _save)]
        if load:
            pairs.append((original.load, _load))
        replace(pairs)


def unpatch() -> None:
    """Undo the last patch()."""
    with _lock:
        if not _loads:
            raise RuntimeError("unpatch() without patch()")
        _loads.pop()
        for name in _others.pop():
            sys.modules[name].unpatch()
        pairs: list[tuple[Any, Any]] = []
        if not _loads:
            pairs.append((_save, original.save))
        if not any(_loads):
            pairs.append((_load, original.load))
        replace(pairs)


@contextlib.contextmanager
def patched(*, load: bool = True, safetensors: bool = False, dcp: bool = False) -> Iterator[None]:
    """Call patch() at the beginning of a with block and unpatch() at its end."""
    patch(load=load, safetensors=safetensors, dcp=dcp)
    try:
        yield
    finally:
        unpatch()


# ---- File objects --------------------------------------------------------------------------------


# Programs write to memory for many reasons. If they wrote less than this, it is no checkpoint.
_LITTLE_BYTES = 1 << 20

#: for each calling package: number of saves, bytes, bytes written to files
_counts: dict[str, tuple[int, int, int]] = {}


def count(who: str, n_bytes: int, *, to_file: bool) -> None:
    """Count a save that ioshape did not write.

    Args:
        who: the package that saved, as the report at exit names it.
        n_bytes: its size.
        to_file: whether it went to a file.
    """
    saves, all_bytes, file_bytes = _counts.get(who, (0, 0, 0))
    _counts[who] = (saves + 1, all_bytes + n_bytes, file_bytes + n_bytes * to_file)


@contextlib.contextmanager
def counted(file: Any) -> Iterator[None]:
    """Count the bytes that the block writes to a file object of the program."""
    before = _position(file)
    yield
    written = _position(file) - before
    count(_caller(), max(0, written), to_file=_is_file(file))


def _position(file: Any) -> int:
    try:
        return int(file.tell()) if is_pythons(file) else 0
    except Exception:
        return 0


def _is_file(file: Any) -> bool:
    try:
        return is_pythons(file) and int(file.fileno()) >= 0
    except Exception:
        return False


def _caller() -> str:
    """Return the name of the top-level package that called torch.save."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if name not in ("ioshape", "torch", "contextlib"):
            return name
        frame = frame.f_back
    return "torch"


def _tell() -> None:
    worth = {
        who: (saves, all_bytes)
        for who, (saves, all_bytes, file_bytes) in _counts.items()
        if file_bytes or all_bytes >= _LITTLE_BYTES
    }
    _counts.clear()  # exit handlers may run twice: multiprocessing runs its own
    if not worth:
        return
    of_each = ", ".join(
        f"{who} {saves} ({n_bytes / (1 << 20):.1f} MiB)"
        for who, (saves, n_bytes) in sorted(worth.items())
    )
    _terminal.say(
        f"torch itself wrote saves to file objects, neither atomic nor durable: {of_each}; "
        'give torch.save a path, or a file of ioshape.open(path, "wb")'
    )


after_saves(_tell)
# The parent reports its own saves; a child must not report them again.
os.register_at_fork(after_in_child=_counts.clear)


# ---- Files that were just opened -----------------------------------------------------------------


def path_of(file: Any) -> str | None:
    """Return the path of a file object that was opened for writing and is still empty, else None.

    Such a file can be replaced by another one: readers expect no content in it yet. The result is
    also None if the path now names another file, or the file has other hard links.
    """
    if type(file) is not io.BufferedWriter or type(file.raw) is not io.FileIO or file.closed:
        return None
    path = file.name
    if file.raw.mode not in ("wb", "xb") or not isinstance(path, str):
        return None
    try:
        opened, named = os.fstat(file.fileno()), os.lstat(path)
        is_new = stat.S_ISREG(opened.st_mode) and not file.tell() and not opened.st_size
    except OSError:
        return None
    is_there = os.path.samestat(opened, named) and opened.st_nlink == 1
    return path if is_new and is_there else None


@contextlib.contextmanager
def moved_to(file: Any, path: str) -> Iterator[None]:
    """Make a file object refer to the file that the block saves to its path.

    Afterwards the program's descriptor refers to the new file, positioned at its end.

    Args:
        file: the program's file object.
        path: its path, from path_of().
    """
    yield
    descriptor = file.fileno()
    new = open_file(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.dup2(new, descriptor, inheritable=os.get_inheritable(descriptor))
    finally:
        os.close(new)
    file.seek(0, os.SEEK_END)
