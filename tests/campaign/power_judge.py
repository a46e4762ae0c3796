# SPDX-License-Identifier: Apache-2.0
"""Judge a disk after a power failure by the history of its saves."""

import warnings
from pathlib import Path

import ioshape

from .power_saves import FILES, N_SAVES, RANKS, History, contents, is_equal, part


def judge_file(path: Path, versions: range) -> str:
    """Return what is wrong with the file, or ""."""
    if not path.exists():
        return f"is lost: version {versions[0]} was acknowledged" if versions[0] else ""
    try:
        ioshape.verify(path)
        found = ioshape.load(path)
    except Exception as error:
        return f"is torn: {error}"
    version = found.get("version", 0) if isinstance(found, dict) else 0
    if not is_equal(found, contents(path.name, version)):
        return "has contents that nobody saved"
    if version not in versions:
        return f"has version {version}, not one of {versions[0]} to {versions[-1]}"
    return ""


def _name(checkpoint: ioshape.types.Checkpoint) -> str:
    """Return the name under which the checkpoint was saved.

    A checkpoint that is being removed has another name, and exists until it is removed.
    """
    return f"step-{checkpoint.step:010}"


def _judge_checkpoint(checkpoint: ioshape.types.Checkpoint, versions: range) -> str:
    try:
        checkpoint.verify()
        parts = [checkpoint.load(rank) for rank in range(RANKS)]
    except Exception as error:
        return f"is torn: {error}"
    name = _name(checkpoint)
    version = parts[0].get("version", 0)
    if not all(is_equal(found, part(name, version, rank)) for rank, found in enumerate(parts)):
        return "has contents that nobody saved together"
    if not version or version not in versions:
        return f"has version {version}, not one of {versions[0]} to {versions[-1]}"
    return ""


def _judge_newest(folder: Path, history: History, at: int) -> str:
    """Judge the checkpoint that a resuming program would load."""
    acknowledged = [name for name in history.checkpoints(at) if history.versions(name, at)[0]]
    newest = ioshape.latest(folder)
    if newest is None:
        return "is lost" if acknowledged else ""
    name = _name(newest)
    if acknowledged and name < acknowledged[-1]:
        return f"is {name}, not {acknowledged[-1]}"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", ioshape.FallbackWarning)
            found = ioshape.load_group(folder, rank=RANKS - 1, fallback=True)
    except Exception as error:
        return f"does not load: {error}"
    is_right = any(is_equal(found, part(name, v, RANKS - 1)) for v in history.versions(name, at))
    return "" if is_right else "is not what load_group() loads"


def _judge_pruning(folder: Path) -> str:
    """Prune checkpoints and leftovers of dead savers. The newest checkpoint must stay."""
    newest = ioshape.latest(folder)
    if newest is None:
        return ""
    try:
        ioshape.prune(folder, keep_last=1)
        newest.verify()
    except Exception as error:
        return f"did not survive: {error}"
    left = [one.step for one in ioshape.checkpoints(folder)]
    return "" if left == [newest.step] else f"left steps {left}"


def _judge_next_save(path: Path, version: int) -> str:
    try:
        ioshape.save(contents(path.name, version), path)
    except Exception as error:
        return f"cannot be saved again: {error}"
    return judge_file(path, range(version, version + 1))


def judge(disk: Path, history: History, at: int) -> list[str]:
    """Return all findings on a disk that holds this prefix of the log, or may hold it."""
    wrong: dict[str, str] = {}
    for name in FILES:
        wrong[name] = judge_file(disk / "files" / name, history.versions(name, at))
    found = {_name(one): one for one in ioshape.checkpoints(disk / "run")}
    for name in sorted({*history.kept(at), *found}):
        wrong[name] = (
            _judge_checkpoint(found[name], history.versions(name, at))
            if name in found
            else "is lost: it was acknowledged, and is not old"
        )
    wrong["the newest checkpoint"] = _judge_newest(disk / "run", history, at)
    wrong["pruning"] = _judge_pruning(disk / "run")
    next_version = N_SAVES + 1
    wrong["the file " + FILES[0]] = _judge_next_save(disk / "files" / FILES[0], next_version)
    return [f"{name} {what}" for name, what in wrong.items() if what]
