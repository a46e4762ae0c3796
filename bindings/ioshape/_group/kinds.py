# SPDX-License-Identifier: Apache-2.0
"""Distinguish a directory without checkpoints from one whose checkpoints a call cannot load.

Only the directory without checkpoints means the first start of a job. A job that begins again in
the other one would overwrite what it should have loaded.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Literal

from ioshape._core.errors import failure
from ioshape._core.names import numbered
from ioshape._group import dcp_contents as families
from ioshape._group.dcp_contents import DATA, DESCRIPTION
from ioshape._native import lib

if TYPE_CHECKING:
    from ioshape._core.errors import StorageError

Operation = Literal["load", "prune"]

#: The name of a group checkpoint's directory.
CHECKPOINT = re.compile(r"step-(\d{10,20})")
_MANIFEST = "manifest.json"
# "step-100.pt", "checkpoint_10.pth.tar". Files without a number, such as "pretrained.pt", may be
# inputs of the job.
_SUFFIX = re.compile(r".*\.(pt|pth|ckpt)(\.tar)?")


def refuse_others(directory: str, wanted: str, operation: Operation = "load") -> None:
    """Raise if a directory holds checkpoints, but none of the kind that the caller looks for.

    Args:
        directory: The directory in which the caller has found nothing.
        wanted: The kind that the caller has looked for: "group", "dcp" or "both".
        operation: What the caller does.

    Raises:
        NoUsableCheckpointError: There are such checkpoints. The message names one, and what to call
            instead.
        StorageError: The directory cannot be read.
    """
    names = families.listed(directory)
    if DESCRIPTION in names or _MANIFEST in names:
        above = os.path.dirname(os.path.abspath(directory))  # noqa: PTH100, PTH120
        why, remedy = "it is a checkpoint itself", f'give the directory "{above}"'
        raise _unusable(operation, directory, why, remedy)
    for name in names:
        found = _found(directory, name, wanted, operation)
        if found is not None:
            raise _unusable(operation, directory, *found)


def _found(directory: str, name: str, wanted: str, operation: Operation) -> tuple[str, str] | None:
    """Return why this name is another kind of checkpoint, and a remedy; None if it is none."""
    path = os.path.join(directory, name)  # noqa: PTH118
    parts = numbered(name)
    if parts is None:
        return None
    if not parts.suffix:
        return _found_in(path, name, wanted)
    if not _SUFFIX.fullmatch(parts.suffix) or not os.path.isfile(path):  # noqa: PTH113
        return None
    pattern = os.path.join(directory, f"{parts.prefix}*{parts.suffix}")  # noqa: PTH118
    why = f'it has files such as "{name}", and no checkpoint of several files'
    if operation == "prune":
        return why, f'give a pattern: ioshape prune "{pattern}" --keep-last N'
    return why, f'give a pattern: ioshape.load_latest("{pattern}")'


def _found_in(path: str, name: str, wanted: str) -> tuple[str, str] | None:
    """Return why this directory is another kind of checkpoint, and a remedy; None if it is none."""
    try:
        within = os.listdir(path)  # noqa: PTH208
    except PermissionError as error:
        if families.may_be_checkpoint(name):
            raise families.cannot_look(os.path.dirname(path), path, error) from None  # noqa: PTH120
        return None
    except OSError:  # not a directory, or removed just now
        return None
    if DESCRIPTION in within and wanted == "group":
        why = f'it has checkpoints of torch.distributed.checkpoint, such as "{name}"'
        return why, "load them with ioshape.dcp.load_latest()"
    if DESCRIPTION not in within and any(map(DATA.fullmatch, within)):
        return f'"{name}" has no {DESCRIPTION}: it is not complete', "complete it, or move it away"
    if wanted == "dcp" and CHECKPOINT.fullmatch(name) and within:
        why = f'it has checkpoints of save_group(), such as "{name}"'
        return why, "load them with ioshape.load_group()"
    return None


def _unusable(operation: Operation, directory: str, why: str, remedy: str) -> StorageError:
    sentence = f'cannot {operation} "{directory}": {why}'
    return failure(lib.IOSHAPE_E_UNUSABLE, sentence, directory, operation, remedy=remedy)
