# SPDX-License-Identifier: Apache-2.0
"""Command "ioshape inspect": lists the tensors in files and in checkpoints of DCP."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ioshape._cli.output import (
    Table,
    columns,
    human_size,
    json_option,
    plural,
    remark,
    say,
    say_json,
)
from ioshape._cli.paths import files_argument, reason
from ioshape._load.pickled import item_bytes

if TYPE_CHECKING:
    from ioshape._group.dcp_contents import Item
    from ioshape._load.contents import Contents
    from ioshape._load.pickled import Tensor
    from ioshape._load.reader import Statistics


def tensor_bytes(tensor: Tensor | Item) -> int | None:
    """Return the bytes of all elements of a tensor; None if its item size is not known."""
    each = item_bytes(tensor.dtype)
    n_bytes = None if each is None else math.prod(tensor.shape) * each
    return None if n_bytes is None or n_bytes >> 63 else n_bytes


def describe(contents: Contents, with_statistics: bool = False) -> dict[str, Any]:
    """Return the description of a file, for JSON."""
    statistics = _statistics(contents) if with_statistics else []
    offsets = {record.name: record.file_offset for record in contents.records}
    tensors = []
    for number, tensor in enumerate(contents.tensors):
        base = offsets.get(tensor.record)
        told = asdict(tensor)
        within = told.pop("storage_offset")
        del told["is_plain"]
        offset = None if base is None else base + within
        told |= {"bytes": tensor_bytes(tensor), "file_offset": offset}
        if with_statistics:
            told["statistics"] = statistics[number]
        tensors.append(told)
    records = [
        {
            "name": record.name,
            "bytes": record.n_bytes,
            "file_offset": record.file_offset,
            "alignment": record.alignment,
            "crc32": f"{record.crc32:08x}",
        }
        for record in contents.records
    ]
    return {
        "path": contents.path,
        "file_bytes": contents.file_bytes,
        "record_bytes": sum(record["bytes"] for record in records),
        "tensor_bytes": sum(tensor["bytes"] or 0 for tensor in tensors),
        "problem": contents.problem or None,
        "tensors": tensors,
        "records": records,
    }


def _statistics(contents: Contents) -> list[dict[str, Any] | None]:
    """Return the statistics of each tensor's storage; None if it was not examined."""
    from ioshape._load.contents import is_safetensors  # noqa: PLC0415
    from ioshape._load.reader import Reader  # noqa: PLC0415

    with Reader(contents.path, any_format=True, operation="inspect") as reader:
        if is_safetensors(contents.path):
            return [_for_json(reader.statistics(i)) for i in range(len(contents.tensors))]
        found = {one.name: reader.statistics(i) for i, one in enumerate(reader.records())}
    return [_for_json(found.get(tensor.record)) for tensor in contents.tensors]


def _for_json(found: Statistics | None) -> dict[str, Any] | None:
    """Replace the bounds of a record without finite numbers, because JSON has no infinity."""
    if found is None:
        return None
    told = found._asdict()
    del told["dtype"]  # the tensors have it
    if told["minimum"] > told["maximum"]:
        told["minimum"] = told["maximum"] = None
    return told


def _or_dash(value: object) -> str:
    return "-" if value is None else str(value)


def _tensor_table(tensors: list[dict[str, Any]]) -> Table:
    elsewhere = any(tensor["location"] != "cpu" for tensor in tensors)
    titles = ["<tensor", "<dtype", "<shape", ">bytes", "<record", ">offset"]
    table = Table(*columns(*titles, *(["<from"] if elsewhere else [])))
    for tensor in tensors:
        # A shape has no spaces, so that it is one column for awk.
        shape = "x".join(map(str, tensor["shape"])) or "scalar"
        table.add(
            tensor["name"] or ".",
            tensor["dtype"],
            shape,
            _or_dash(tensor["bytes"]),
            tensor["record"],
            _or_dash(tensor["file_offset"]),
            *([tensor["location"]] if elsewhere else []),
        )
    return table


def _statistics_table(tensors: list[dict[str, Any]]) -> Table:
    titles = ["<tensor", "<dtype", ">nan", ">inf", ">zeros", ">min", ">max", ">norm", "<alarms"]
    table = Table(*columns(*titles))
    for tensor in tensors:
        found = tensor["statistics"]
        cells = ["-"] * (len(titles) - 2)
        if found:
            bounds = (found["minimum"], found["maximum"], math.sqrt(found["sum_squares"]))
            cells = [
                *(str(found[name]) for name in ("nans", "infinities")),
                f"{found['zeros'] / found['numbers']:.1%}" if found["numbers"] else "-",
                *("-" if number is None else f"{number:.4g}" for number in bounds),
                ",".join(found["alarms"]) or "-",
            ]
        style = "red" if found and found["alarms"] else ""
        table.add(tensor["name"] or ".", _or_dash(tensor["dtype"]), *cells, style=style)
    return table


def _show(found: dict[str, Any]) -> None:
    tensors, records = found["tensors"], found["records"]
    say(f"{found['path']}: {human_size(found['file_bytes'])}")
    if tensors:
        say()
        table = _statistics_table if "statistics" in tensors[0] else _tensor_table
        table(tensors).show()
    if found["problem"]:
        say()
        say(f"Its tensors cannot be listed: {found['problem']}.")
    say()
    say(
        f"{plural(len(tensors), 'tensor')} of {human_size(found['tensor_bytes'])} in "
        f"{plural(len(records), 'record')} of {human_size(found['record_bytes'])}; "
        f"the file has {found['file_bytes']:,} bytes"
    )


# ---- Checkpoints of DCP --------------------------------------------------------------------------


def _statistics_of_item(
    path: str, item: Item, alarms: dict[str, frozenset[str]]
) -> dict[str, Any] | None:
    """Return the statistics of all shards of an item; None if one was not examined."""
    from ioshape._load.reader import Statistics  # noqa: PLC0415

    found: list[Statistics] = []
    for chunk in item.chunks if item.dtype else ():
        if chunk.is_transformed:
            return None
        with chunk.open(path, "inspect") as reader:
            each = [reader.statistics(i) for i in range(reader.n_records)]
        examined = [one for one in each if one is not None]
        if len(examined) != 1:
            return None
        found += examined
    if not found:
        return None
    raised = [rule for rule, names in alarms.items() if item.name in names]
    return _for_json(Statistics.of_all(found)._replace(alarms=tuple(raised)))


def describe_checkpoint(path: str, with_statistics: bool = False) -> dict[str, Any]:
    """Return the description of a DCP checkpoint, for JSON."""
    from ioshape._group.dcp_contents import contents  # noqa: PLC0415

    listed: list[dict[str, Any]] = []
    described = contents(path)
    # The name of a shard is that of its item, and its offset in brackets.
    alarms = {
        rule: names | {name.rpartition("[")[0] for name in names}
        for rule, names in described.alarms.items()
    }
    for item in described.items:
        chunks = [
            {"file": chunk.file, "offset": chunk.offset, "bytes": chunk.n_bytes}
            for chunk in item.chunks
        ]
        told: dict[str, Any]
        told = {"name": item.name, "dtype": item.dtype or None, "shape": item.shape}
        if with_statistics:
            told["statistics"] = _statistics_of_item(path, item, alarms)
        listed.append({**told, "bytes": tensor_bytes(item), "chunks": chunks})
    files = sorted({chunk["file"] for item in listed for chunk in item["chunks"]})
    return {
        "path": path,
        "file_bytes": sum((Path(path) / file).stat().st_size for file in files),
        "tensor_bytes": sum(item["bytes"] or 0 for item in listed),
        "files": files,
        "items": listed,
    }


def _show_checkpoint(found: dict[str, Any]) -> None:
    say(f"{found['path']}: {human_size(found['file_bytes'])}, a DCP checkpoint")
    say()
    if any("statistics" in item for item in found["items"]):
        _statistics_table(found["items"]).show()
    else:
        _item_table(found["items"]).show()
    say()
    say(
        f"{plural(len(found['items']), 'item')}, tensors of {human_size(found['tensor_bytes'])}, "
        f"in {plural(len(found['files']), 'file')} of {human_size(found['file_bytes'])}"
    )


def _item_table(items: list[dict[str, Any]]) -> Table:
    table = Table(*columns("<item", "<dtype", "<shape", ">bytes", ">chunks", "<first in"))
    for item in items:
        table.add(
            item["name"],
            _or_dash(item["dtype"]),
            "x".join(map(str, item["shape"])) or ("scalar" if item["dtype"] else "-"),
            _or_dash(item["bytes"]),
            str(len(item["chunks"])),
            item["chunks"][0]["file"] if item["chunks"] else "-",
        )
    return table


@click.command(short_help="List the tensors in files with their offsets.")
@files_argument
@click.option("--stats", "statistics", is_flag=True, help="Show the statistics of each tensor.")
@json_option
def command(files: tuple[str, ...], statistics: bool, as_json: bool) -> int:
    """List the tensors in files of torch.save or ioshape: type, shape, size and offset.

    A file whose name ends in .safetensors is read as safetensors. If a path is a checkpoint
    directory of torch.distributed.checkpoint, the items of its state dict are listed, with the
    number of chunks of each.

    Only the zip directory and the pickle are read, and the pickle is not executed. So the command
    is safe for untrusted files and fast for large ones. Views of one storage have the same record.

    With --stats, the table has numbers that the save took of each storage: NaN, infinities, the
    share of zeros, the finite bounds and the norm of the finite numbers, and what looked wrong.
    Files of torch.save and of earlier versions have no such numbers. Files of safetensors have them
    if they were saved with checksums.

    Examples:

    \b
    ioshape inspect model.pt | grep attention
    ioshape inspect --stats model.pt
    ioshape inspect --json model.pt | jq '.[0].tensors[].name'

    Exit code: 0; 1 if a file could not be read.
    """
    import ioshape  # noqa: PLC0415
    from ioshape._group.dcp_contents import is_checkpoint  # noqa: PLC0415

    listed: list[dict[str, Any]] = []
    failed = False
    for number, path in enumerate(files):
        try:
            is_directory = is_checkpoint(path)
            found = (
                describe_checkpoint(path, statistics)
                if is_directory
                else describe(ioshape.inspect(path), statistics)
            )
        except OSError as error:
            failed = True
            if as_json:
                listed.append({"path": path, "error": reason(path, error)})
            else:
                remark(f"ioshape: {reason(path, error)}")
            continue
        listed.append(found)
        if not as_json:
            if number:
                say()
            if is_directory:
                _show_checkpoint(found)
            else:
                _show(found)
    if as_json:
        say_json(listed)
    return int(failed)
