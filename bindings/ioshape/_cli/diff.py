# SPDX-License-Identifier: Apache-2.0
"""Command "ioshape diff": compares the tensors of two files or checkpoints."""

from __future__ import annotations

import math
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from ioshape._cli.output import Table, columns, json_option, plural, remark, say, say_json
from ioshape._cli.paths import reason
from ioshape._group.kinds import CHECKPOINT
from ioshape._load.compare import Comparison, Difference

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ioshape._load.reader import Reader

_EQUAL, _DIFFERENT, _TROUBLE = range(3)  # exit codes, as of diff(1)
_VALUES = "(values)"  # stands for everything in a file but the data of tensors


# ---- The files of a checkpoint -------------------------------------------------------------------


class _File(NamedTuple):
    """A file of a checkpoint, or a shard in a file."""

    open: Callable[[], Reader]
    #: files with one content have one identity
    identity: object


def _file(path: str) -> _File:
    from ioshape._load.reader import Reader  # noqa: PLC0415

    return _File(partial(Reader, path, any_format=True, fresh=False), path)


def _files(path: str, keep: ExitStack) -> dict[str, _File]:
    """Return the files of a checkpoint. Each key precedes the names of the file's tensors."""
    from ioshape._group.dcp_contents import contents, is_checkpoint  # noqa: PLC0415

    if is_checkpoint(path):
        return {
            f"{item.name}[{number}]: " if len(item.chunks) > 1 else f"{item.name}: ": _File(
                partial(chunk.open, path, "load"), (path, chunk.file, chunk.offset)
            )
            for item in contents(path).items
            for number, chunk in enumerate(item.chunks)
        }
    if not Path(path).is_dir():
        return {"": _file(path)}
    shards = sorted(Path(path).glob("*.safetensors"))
    return {f"{one.name}: ": _file(str(one)) for one in shards} or _of_group(path, keep)


def _of_group(path: str, keep: ExitStack) -> dict[str, _File]:
    from ioshape._group.checkpoints import Handle  # noqa: PLC0415

    absolute = Path(path).absolute()
    match = CHECKPOINT.fullmatch(absolute.name)
    directory = os.path.dirname(absolute) if match else path  # noqa: PTH120
    handle = keep.enter_context(Handle(directory, int(match[1]) if match else None, "load"))
    shards = [handle.shard(rank) for rank in range(handle.describe().ranks)]
    return {
        f"rank {shard.rank}: ": _File(partial(handle.reader, shard), shard.same_as)
        for shard in shards
    }


# ---- Comparison ----------------------------------------------------------------------------------


def _differences(a: str, b: str, exact: bool) -> Iterator[Difference]:
    """Yield the result for each tensor, and one for all other values of a file that differ."""
    seen = set()
    with ExitStack() as keep, ThreadPoolExecutor(1) as executor:
        in_a, in_b = _files(a, keep), _files(b, keep)
        for key in (*in_a, *(key for key in in_b if key not in in_a)):
            if key not in in_a or key not in in_b:
                yield Difference(key.rstrip(": "), "only in A" if key in in_a else "only in B")
                continue
            identities = in_a[key].identity, in_b[key].identity
            if identities in seen:
                continue
            seen.add(identities)
            with in_a[key].open() as first, in_b[key].open() as other:
                comparison = Comparison(first, other, exact=exact, executor=executor)
                for found in comparison.differences():
                    yield replace(found, name=(key + found.name).removesuffix(": "))
                if not comparison.has_equal_values():
                    yield Difference(key + _VALUES, "changed")


def _size_of_change(found: Difference) -> tuple[float, float]:
    """Return a key for sorting. Tensors that have no number come first."""
    known = (found.relative, found.relative_at_least, math.inf)
    relative = next(one for one in known if one is not None)
    changed = math.inf if found.changed is None else found.changed
    return -relative, -changed


def _json(found: Difference) -> dict[str, Any]:
    told = asdict(found)
    for side in ("a", "b"):
        if told[side] is not None:
            told[side] = dict(zip(("dtype", "shape"), told[side], strict=True))
    for name in ("relative", "relative_at_least"):
        if told[name] is not None and not math.isfinite(told[name]):
            told[name] = str(told[name])  # JSON has no infinity
    return told


# ---- Output --------------------------------------------------------------------------------------


def _shown(tensor: tuple[str, tuple[int, ...]] | None) -> str:
    if tensor is None:
        return "-"
    return f"{tensor[0]}:{'x'.join(map(str, tensor[1])) or 'scalar'}"


def _relative(found: Difference) -> str:
    if found.relative is not None:
        return f"{found.relative:.2g}"
    least = found.relative_at_least
    return "-" if least is None else f"at least {least:.2g}"


def _show(differences: list[Difference], equal: int) -> None:
    table = Table(*columns("<tensor", "<state", "<in A", "<in B", ">changed", ">relative"))
    for found in differences:
        table.add(
            found.name or ".",
            found.state,
            _shown(found.a),
            _shown(found.b) if found.a != found.b else "same",
            "-" if found.changed is None else f"{found.changed:.1%}",
            _relative(found),
            style="yellow" if found.state == "changed" else "red",
        )
    if differences:
        table.show()
        say()
    say(f"{plural(equal, 'tensor')} equal, {plural(len(differences), 'difference')}")


@click.command(short_help="Compare the tensors of two checkpoints.")
@click.argument("a", metavar="A", type=click.Path())
@click.argument("b", metavar="B", type=click.Path())
@click.option("--exact", is_flag=True, help="Read all data, and compute how much it differs.")
@json_option
def command(a: str, b: str, exact: bool, as_json: bool) -> int:
    """Compare the tensors of two files of torch.save or ioshape, or of two checkpoints.

    A file whose name ends in .safetensors is read as safetensors. A directory is a checkpoint of
    torch.distributed.checkpoint or of save_group(), a directory of those of save_group(), whose
    newest counts, or a directory with files of safetensors.

    Where both files have checksums, the command compares these, and reads no data. "changed" is the
    share of 1 MiB blocks that differ. With --exact it is the share of elements, and "relative" is
    the norm of the difference divided by the norm in A. Without --exact, "relative" says how large
    it is at least, if both saves took the norm of the tensor (see ioshape inspect --stats) and the
    norms differ. The largest changes come first.

    A row "(values)" means that the files differ in values that are not tensors, or in the names or
    the order of tensors.

    Examples:

    \b
    ioshape diff step-100.pt step-200.pt
    ioshape diff --exact model.pt exported.safetensors
    ioshape diff --json run/step-0000000100 run | jq .equal

    Exit code: 0 if all is equal; 1 if something differs; 2 if a file could not be read.
    """
    found: list[Difference] = []
    equal = 0
    try:
        for each in _differences(a, b, exact):
            if each.state == "equal":
                equal += 1
            else:
                found.append(each)
    except OSError as error:
        remark(f"ioshape: {reason(str(error.filename or a), error)}")
        return _TROUBLE
    except ImportError:
        remark('ioshape: cannot compare elements: torch is not installed; "pip install torch"')
        return _TROUBLE
    found.sort(key=_size_of_change)
    if as_json:
        say_json({"a": a, "b": b, "equal": equal, "differences": [_json(each) for each in found]})
    else:
        _show(found, equal)
    return _DIFFERENT if found else _EQUAL
