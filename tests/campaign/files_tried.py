# SPDX-License-Identifier: Apache-2.0
"""Make the files of the kind "files", and define the ways to read one.

torch unpickles without the library's control. So a pickle that was changed deliberately, with a
correct checksum, is listed and verified but not loaded.
"""

import contextlib
import errno
import io
import os
import shutil
import sys
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import ioshape
import torch
import zoo
from hostile import MANIFESTS, PICKLES, with_pickle, write_checkpoint, write_part
from ioshape._cli import main
from same import describe

from .damage import BLIND, KNOWING, TEXT, flipped, other_pickle, with_other_pickle
from .files_beside import BESIDE, rng_of
from .files_store import HOSTILE_PART


@dataclass(frozen=True)
class Base:
    """A valid file."""

    name: str
    data: bytes
    means: Any  # describe() of the loaded object


@dataclass(frozen=True)
class Damaged:
    """A file made from a base."""

    of: str
    how: str
    data: bytes
    #: Bytes of the base; of a deliberate change, its own bytes.
    valid: bytes
    #: Allowed results of a load; None: any, because the checksums are correct.
    means: list[Any] | None
    #: Whether torch may unpickle it: its pickle is valid, or its checksum is wrong.
    load: bool = True


class Wrong(Exception):
    """A promise of the library does not hold."""


class Silent(Wrong):
    """Data that was never saved was returned as if it had been."""


# ---- Files --------------------------------------------------------------------------------------


def bases(folder: Path) -> list[Base]:
    """Return files by ioshape.save and torch.save, and some that a zip tool has compressed."""
    many = {f"layer.{i}.weight": torch.full((i % 7, 3), float(i)) for i in range(120)}
    base = torch.arange(400.0)
    objects = {
        "small": {"a": torch.arange(50.0), "b": torch.ones(3, dtype=torch.int8), "n": [1, "x"]},
        "views": {"rows": base[10:50], "step": base[::7], "same": base, "t": base.view(20, 20).t()},
        "dtypes": [zoo.filled(kind, 5, 3) for kind in (torch.bfloat16, torch.bool, torch.uint16)],
        "many": many,
        "large": {"w": zoo.filled(torch.float32, 200_000), "step": 7},
        "one": torch.ones(5),
        "nothing": {},
    }
    made = []
    for name, value in objects.items():
        for writer in (ioshape.save, torch.save):
            path = folder / "base.pt"
            writer(value, path)
            made.append(
                Base(
                    f"{name} by {writer.__module__.partition('.')[0]}",
                    path.read_bytes(),
                    describe(value),
                )
            )
    return [*made, *map(packed, made[:6])]


def packed(base: Base) -> Base:
    """Return the file as a zip tool would compress it. torch reads compressed records."""
    stream = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(base.data)) as source,
        zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as made,
    ):
        for name in source.namelist():
            made.writestr(name, source.read(name))
    return Base(f"{base.name}, compressed", stream.getvalue(), base.means)


def damaged(rng: Random, valid: list[Base]) -> Damaged:
    base = rng.choice(valid)
    chance = rng.random()
    if chance < 0.005:
        name = rng.choice(list(PICKLES))
        pickled = PICKLES[name]
        data = with_pickle(other_pickle(rng, pickled) if len(pickled) < 10_000 else pickled)
        return Damaged(name, "hostile", data, data, None, load=False)
    if chance < 0.3:
        make = rng.choice(KNOWING)
        data = make(rng, base.data)
        if rng.random() < 0.1:
            data = flipped(rng, data, ())
        load = make is not with_other_pickle
        return Damaged(base.name, make.__name__, data, data, None, load)
    how = rng.choice(BLIND)
    other = rng.choice(valid)
    data = how(rng, base.data, [other.data])
    return Damaged(base.name, how.__name__, data, base.data, [base.means, other.means])


# ---- Ways to read a file ------------------------------------------------------------------------


def refused(error: Exception) -> None:
    """Check that an exception is a refusal, and not a shortage of memory or an internal error."""
    if isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM:
        raise Wrong("asks for too much memory")
    if isinstance(error, (SystemError, RecursionError)):
        raise Wrong(f"raises {type(error).__name__}: {error}")


def inspect(path: Path, _file: Damaged) -> None:
    try:
        ioshape.inspect(path)
    except ioshape.StorageError as error:
        refused(error)


def verify(path: Path, _file: Damaged) -> None:
    try:
        ioshape.verify(path)
    except ioshape.StorageError as error:
        refused(error)


def load(path: Path, file: Damaged) -> None:
    if not file.load:
        return
    try:
        loaded = ioshape.load(path, weights_only=True)
    except Exception as error:  # torch.load may raise anything
        refused(error)
        return
    if file.means is not None and describe(loaded) not in file.means:
        raise Silent("is loaded, and is not what was saved")


def extract(path: Path, file: Damaged) -> None:
    """Extract the file as a rank's share of a checkpoint. Its manifest describes the valid file."""
    folder, output = path.with_name("checkpoints"), path.with_name("extracted.pt")
    shutil.rmtree(folder, ignore_errors=True)
    output.unlink(missing_ok=True)
    write_part(folder, file.valid)
    (folder / "step-0000000007/rank-00000.pt").write_bytes(file.data)
    sys.argv = ["ioshape", "extract", str(folder), "--rank", "0", "-o", str(output)]
    with (
        Path(os.devnull).open("w") as nowhere,
        contextlib.redirect_stdout(nowhere),
        contextlib.redirect_stderr(nowhere),
    ):
        try:
            main()
            status: object = 0
        except SystemExit as end:
            status = end.code
    if not status and output.read_bytes() != file.valid:
        raise Silent("is extracted, and is not what the manifest says")
    if status not in (None, 0, 1):
        raise Wrong(f"ends extract with {status}")


def read_checkpoints(folder: Path, expected: Any = None) -> None:
    try:
        for found in ioshape.checkpoints(folder):
            if expected is not None and found.shards() != expected:
                raise Silent("is beside a damaged manifest, which is believed")
            found.verify()
    except ioshape.StorageError as error:
        refused(error)


def checkpoint(path: Path, file: Damaged) -> None:
    """Read a checkpoint with a damaged manifest and a valid file, or with a hostile manifest."""
    folder = path.with_name("checkpoints")
    shutil.rmtree(folder, ignore_errors=True)
    rng = Random(zlib.crc32(file.data))
    if rng.random() < HOSTILE_PART:
        write_checkpoint(folder, rng.choice([*MANIFESTS]))
        read_checkpoints(folder)
        return
    write_part(folder, file.valid)
    expected = ioshape.checkpoints(folder)[0].shards()
    manifest = folder / "step-0000000007/manifest.json"
    text = manifest.read_bytes()
    manifest.write_bytes(rng.choice(TEXT)(rng, text, [text]))
    read_checkpoints(folder, expected)


def _beside(name: str) -> Callable[[Path, Damaged], None]:
    return lambda path, file: BESIDE[name](path, rng_of(file.data), refused, Silent)


WAYS: dict[str, Callable[[Path, Damaged], None]] = {
    "inspect": inspect,
    "verify": verify,
    "load": load,
    "extract": extract,
    "checkpoint": checkpoint,
    **{name: _beside(name) for name in BESIDE},
}
