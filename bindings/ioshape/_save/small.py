# SPDX-License-Identifier: Apache-2.0
"""Small new files of scripts under "ioshape run": whole at once, on stable storage a moment later.

A script that was written for torch.save may save thousands of small files, and would wait at each
for a slot and for the disk. So torch writes these in memory; one write brings the bytes to a file
that has no name until it is complete; and all are synced together. What replaces a file goes the
usual way, and is durable when the call returns: nobody loses what was there before.
"""

from __future__ import annotations

import io
import os
import time
from contextlib import suppress
from typing import Any

import torch

from ioshape import _torch as original
from ioshape._core import trace, under_way
from ioshape._core.config import is_durable, value_of
from ioshape._core.descriptors import open_file
from ioshape._core.report import Report, Step
from ioshape._save import together

#: Checkpoints are larger.
MOST_BYTES = 64 << 10

#: More objects than that are not looked at: then it is not small, or not simple.
_MOST_OBJECTS = 64


def save(obj: object, path: str, how: tuple[Any, ...], *, replaces: bool = False) -> bool:
    """Saves a small object to a new file. False, and nothing is done, if either is not the case.

    `how`: the rest of torch.save's arguments. `replaces`: an empty file is there, which goes.
    Raises what torch.save raises for objects that cannot be pickled.
    """
    if not _is_small(obj) or os.path.lexists(path) != replaces or not _may_wait(path):
        return False
    begin = time.perf_counter()
    content = io.BytesIO()
    original.save(obj, content, *how)
    # Whatever the reason is, the usual way gets along, or has the sentence for it.
    with suppress(OSError):
        is_synced = is_durable(None)
        _create(path, content.getbuffer(), replaces=replaces, is_synced=is_synced)
        if value_of("trace"):
            _record(path, content.tell(), time.perf_counter() - begin, is_synced=is_synced)
        return True
    return False


def _record(path: str, n_bytes: int, total_s: float, *, is_synced: bool) -> None:
    steps = (Step("small: synced with others, a moment later", "sync"),) if is_synced else ()
    trace.record(Report(path, "ioshape", n_bytes, total_s=total_s, fallbacks=steps))


def _may_wait(path: str) -> bool:
    """Return whether the file need not be durable at once, nor wait for another save."""
    return (
        value_of("durable") is not True
        and not under_way.is_ending()
        and under_way.context_of_saves_to(path) is None
    )


def _is_small(obj: object) -> bool:
    """Whether all of it fits. Of what cannot be told at a glance: no."""
    left = MOST_BYTES
    objects: list[Any] = [obj]
    for _ in range(_MOST_OBJECTS):
        if not objects:
            return True
        one = objects.pop()
        kind = type(one)
        if kind is torch.Tensor or kind is torch.nn.Parameter:
            # Others have more than one storage, or none.
            left -= one.untyped_storage().nbytes() if one.layout is torch.strided else MOST_BYTES
        elif kind is dict:
            objects += one.values()
            objects += one
        elif kind is list or kind is tuple:
            objects += one
        elif kind is str or kind is bytes:
            left -= len(one)
        elif one is not None and kind not in (bool, int, float):
            return False
        if left <= 0 or len(objects) > _MOST_OBJECTS:
            return False
    return not objects


def _create(path: str, content: memoryview, *, replaces: bool, is_synced: bool) -> None:
    """Create a file with this content, which readers see as a whole or not at all."""
    directory = os.path.dirname(path) or "."  # noqa: PTH120 - a Path takes longer than all of this
    file = open_file(directory, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o666)
    try:
        if os.write(file, content) != len(content):
            raise OSError("there is no room for all of it")
        name = path
        if replaces:
            _check_rights(os.fstat(file), os.lstat(path))
            name = f"{directory}/.{os.path.basename(path)}.ioshape-tmp-{os.getpid()}-{file}"  # noqa: PTH119
        # With a directory's descriptor, though it does not count: else Python links the link.
        os.link(f"/proc/self/fd/{file}", name, src_dir_fd=file)
        if replaces:
            os.replace(name, path)  # noqa: PTH105
        if is_synced:
            together.add(path, file)
    finally:
        os.close(file)


def _check_rights(new: os.stat_result, old: os.stat_result) -> None:
    """What takes a file's place has its owner and its mode."""
    if (new.st_mode, new.st_uid, new.st_gid) != (old.st_mode, old.st_uid, old.st_gid):
        raise OSError("the usual way keeps these")
