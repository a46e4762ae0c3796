# SPDX-License-Identifier: Apache-2.0
"""Write a set of safetensors files on all ranks that hold parts of its tensors.

Each file is cut into windows at whole MiB, so no two ranks write to one page. One of the ranks that
hold a part of a window writes it, and receives the other parts of the window. If ranks hold rows,
hardly any bytes travel; if they hold columns, most bytes travel once. Besides its tensors a rank
keeps one window that it writes, what it receives for that, and one message that it sends.

No rank holds a slot while it waits for another rank, which might be waiting for the slot.
"""

from __future__ import annotations

import json
import math
import os
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.checkpoint.utils import find_state_dict_object

from ioshape._core.config import is_durable
from ioshape._formats import safetensors as header
from ioshape._formats.dtypes import DTYPES
from ioshape._formats.safetensors import Entry
from ioshape._integrations.dcp.files import Files
from ioshape._integrations.huggingface.whole import Whole
from ioshape._load import sums
from ioshape._save.atomic import PART_UNIT, Part

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from ioshape._core.report import Report

#: bytes of a window; a multiple of PART_UNIT
WINDOW_BYTES = 32 * PART_UNIT

_FORMATS = {torch_name: name for name, (torch_name, _bits) in DTYPES.items()}
# Tensors are copied as integers of equal width, because not all dtypes support all operations.
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class _Box(NamedTuple):
    """A part of a tensor: where it begins and ends in each dimension."""

    begin: tuple[int, ...]
    end: tuple[int, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(end - begin for begin, end in zip(self.begin, self.end, strict=True))

    def of(self, tensor: torch.Tensor, origin: tuple[int, ...]) -> torch.Tensor:
        """Return this part of a tensor whose first element is at `origin`."""
        return tensor[
            tuple(
                slice(begin - zero, end - zero)
                for begin, end, zero in zip(self.begin, self.end, origin, strict=True)
            )
        ]


def _overlap(one: _Box, other: _Box) -> _Box | None:
    begins, ends = [], []
    for begin, end, also_begin, also_end in zip(*one, *other, strict=True):
        begins.append(max(begin, also_begin))
        ends.append(min(end, also_end))
        if begins[-1] >= ends[-1]:
            return None
    return _Box(tuple(begins), tuple(ends))


def _boxes(shape: tuple[int, ...], begin: int, end: int) -> Iterator[_Box]:
    """Yield the elements from `begin` to `end` in their order, as boxes that are contiguous."""
    if begin == 0 and end == math.prod(shape):
        yield _Box((0,) * len(shape), shape)
        return
    row = math.prod(shape[1:])
    while begin < end:
        first, offset = divmod(begin, row)
        if offset or end - begin < row:
            stop = min(end, (first + 1) * row)
            for box in _boxes(shape[1:], offset, stop - first * row):
                yield _Box((first, *box.begin), (first + 1, *box.end))
        else:
            stop = end // row * row
            yield _Box((first, *(0 for _ in shape[1:])), (stop // row, *shape[1:]))
        begin = stop


class _Told(NamedTuple):
    """The description of a tensor that a rank sends."""

    dtype: str
    shape: tuple[int, ...]
    #: the parts that the rank holds
    boxes: tuple[_Box, ...]


class _Tensor(NamedTuple):
    """A tensor of the set."""

    dtype: str
    shape: tuple[int, ...]
    #: the ranks that hold each part
    holders: dict[_Box, list[int]]

    @property
    def width(self) -> int:
        """The bytes of an element, as torch counts them."""
        return max(DTYPES[_FORMATS[self.dtype]][1] // 8, 1)


class _File(NamedTuple):
    name: str
    header: bytes
    entries: tuple[Entry, ...]

    @property
    def n_bytes(self) -> int:
        return self.entries[-1].end if self.entries else len(self.header)


class _Stretch(NamedTuple):
    """Contiguous elements of one tensor in a file."""

    name: str
    box: _Box
    #: position in its window
    offset: int
    n_bytes: int


class _Window(NamedTuple):
    """A range of bytes of a file."""

    file: _File
    begin: int
    end: int
    stretches: list[_Stretch]


# ---- Parts that ranks hold ----------------------------------------------------------------------


class _Own:
    """The tensors and parts that this rank holds."""

    def __init__(self, tensors: Mapping[str, Any]) -> None:
        self.told: dict[str, _Told] = {}
        #: tensors by name and part
        self.parts: dict[str, dict[_Box, torch.Tensor]] = {}
        for name, tensor in tensors.items():
            _check(name, tensor)
        for item in create_default_local_save_plan(dict(tensors), is_coordinator=True).items:
            data, name = item.tensor_data, item.index.fqn
            assert data is not None
            begin, sizes = tuple(data.chunk.offsets), tuple(data.chunk.sizes)
            parts = self.parts.setdefault(name, {})
            if 0 not in sizes:
                end = tuple(one + size for one, size in zip(begin, sizes, strict=True))
                part = find_state_dict_object(dict(tensors), item.index).detach()
                part = part.resolve_conj().resolve_neg()
                parts[_Box(begin, end)] = part.view(_INTEGERS[part.element_size()])
            dtype = str(data.properties.dtype).rpartition(".")[2]
            self.told[name] = _Told(dtype, tuple(data.size), tuple(parts))


def _check(name: str, tensor: Any) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"'{name}' is not a tensor, but {type(tensor).__name__}: leave it out")
    dtype = str(tensor.dtype).rpartition(".")[2]
    _, bits = DTYPES.get(_FORMATS.get(dtype, ""), ("", 0))
    if tensor.layout is not torch.strided or not bits or (bits % 8 and not tensor.dim()):
        raise ValueError(
            f"tensor '{name}' is {tensor.layout} and {tensor.dtype}, which safetensors files "
            "cannot hold"
        )
    if any(placement.is_partial() for placement in getattr(tensor, "placements", ())):
        raise ValueError(f"tensor '{name}' is not summed over the ranks yet: redistribute it")


def _merged(told: list[Mapping[str, _Told]]) -> dict[str, _Tensor]:
    """Return the tensors of all ranks, after a check that they fit together."""
    found: dict[str, _Tensor] = {}
    for rank, of_rank in enumerate(told):
        for name, (dtype, shape, boxes) in of_rank.items():
            tensor = found.setdefault(name, _Tensor(dtype, shape, {}))
            if (dtype, shape) != (tensor.dtype, tensor.shape):
                raise ValueError(f"ranks have different tensors '{name}'")
            for box in boxes:
                tensor.holders.setdefault(box, []).append(rank)
    for name, tensor in found.items():
        held, n_elements = sum(map(_elements, tensor.holders)), math.prod(tensor.shape)
        if held != n_elements:
            raise ValueError(f"ranks hold {held} of the {n_elements} elements of tensor '{name}'")
    return found


def _elements(box: _Box) -> int:
    return math.prod(box.sizes)


# ---- Layout of the files ------------------------------------------------------------------------


def _entry(name: str, tensor: _Tensor) -> Entry:
    """Return the header entry of a tensor, as if it were the first in its file."""
    format_ = _FORMATS[tensor.dtype]
    shape, bits = tensor.shape, DTYPES[format_][1]
    n_bytes = math.prod(shape) * tensor.width
    if bits < 8:  # F4 counts values, but torch counts bytes of two values
        shape = (*shape[:-1], shape[-1] * 2)
    return Entry(name, format_, shape, 0, n_bytes)


def _shards(entries: list[Entry], max_bytes: int) -> list[list[Entry]]:
    """Distribute entries over files, as huggingface_hub does."""
    shards: list[list[Entry]] = []
    shard: list[Entry] = []
    n_bytes = 0
    for entry in entries:
        if entry.end > max_bytes:
            shards.append([entry])
            continue
        if n_bytes + entry.end > max_bytes:
            shards.append(shard)
            shard, n_bytes = [], 0
        shard.append(entry)
        n_bytes += entry.end
    return [*shards, shard] if shard or not shards else shards


def _files(tensors: dict[str, _Tensor], max_bytes: int) -> tuple[list[_File], bytes]:
    """Return the files, and the index if there are several."""
    entries = [_entry(name, tensor) for name, tensor in tensors.items()]
    shards = _shards(entries, max_bytes)
    names = [f"model-{n:05d}-of-{len(shards):05d}.safetensors" for n in range(1, len(shards) + 1)]
    if len(shards) == 1:
        names = ["model.safetensors"]
    files = [
        _File(name, *header.made(shard, {"format": "pt"}))
        for name, shard in zip(names, shards, strict=True)
    ]
    index = {
        "metadata": {"total_size": sum(entry.end for entry in entries)},
        "weight_map": {
            entry.name: name for name, shard in zip(names, shards, strict=True) for entry in shard
        },
    }
    return files, json.dumps(index, indent=2).encode() if len(shards) > 1 else b""


def _stretches(
    file: _File, begin: int, end: int, tensors: dict[str, _Tensor]
) -> Iterator[_Stretch]:
    for entry in file.entries:
        here, stop = max(begin, entry.begin), min(end, entry.end)
        if here >= stop:
            continue
        tensor = tensors[entry.name]
        first, last = ((place - entry.begin) // tensor.width for place in (here, stop))
        for box in _boxes(tensor.shape, first, last):
            n_bytes = _elements(box) * tensor.width
            yield _Stretch(entry.name, box, here - begin, n_bytes)
            here += n_bytes


def _windows(files: list[_File], tensors: dict[str, _Tensor], n_ranks: int) -> list[list[_Window]]:
    """Return the windows that each rank writes.

    The writer of a window is the rank with the least to write among those that hold a part of its
    largest stretch.
    """
    found: list[list[_Window]] = [[] for _ in range(n_ranks)]
    loads = [0] * n_ranks
    for file in files:
        for begin in range(0, file.n_bytes, WINDOW_BYTES):
            end = min(begin + WINDOW_BYTES, file.n_bytes)
            stretches = list(_stretches(file, begin, end, tensors))
            writers = set(range(n_ranks))
            if stretches:
                largest = max(stretches, key=lambda stretch: stretch.n_bytes)
                holders = tensors[largest.name].holders.items()
                writers = {
                    rank for box, ranks in holders if _overlap(box, largest.box) for rank in ranks
                }
            writer = min(writers, key=loads.__getitem__)
            found[writer].append(_Window(file, begin, end, stretches))
            loads[writer] += end - begin
    return found


class _Piece(NamedTuple):
    """The part of a stretch that one rank holds."""

    stretch: _Stretch
    #: the part of the tensor that the rank holds, and the part of that which is wanted
    held: _Box
    box: _Box


class _Coming(NamedTuple):
    """The parts of a window that one sender provides."""

    pieces: list[_Piece]
    #: memory for the message, and the request to wait for; None for this rank's own parts
    memory: torch.Tensor | None = None
    work: Any = None


def _sender(ranks: list[int], writer: int) -> int:
    """Return the rank that sends a part, of the ranks that hold it."""
    return writer if writer in ranks else ranks[writer % len(ranks)]


def _at(memory: torch.Tensor, offset: int, box: _Box, width: int) -> torch.Tensor:
    """Return bytes of the memory as a tensor."""
    taken = memory[offset : offset + _elements(box) * width]
    return taken.view(_INTEGERS[width]).view(box.sizes)


# ---- Exchange and write -------------------------------------------------------------------------


class _Rank:
    """The work of one rank."""

    def __init__(self, tensors: dict[str, _Tensor], own: _Own, rank: int, group: Any) -> None:
        self._tensors, self._parts, self._rank, self._group = tensors, own.parts, rank, group
        self._everything = {name: tensor.holders for name, tensor in tensors.items()}
        self._memory = torch.empty(WINDOW_BYTES, dtype=torch.uint8)

    def write(
        self, windows: list[list[_Window]], put: Callable[[_Window, memoryview], None]
    ) -> None:
        """Exchange the parts of all windows, and call `put` for each window of this rank.

        A failure of `put` is raised at the end, because other ranks wait for what this rank holds.
        """
        failed: Exception | None = None
        for number in range(max(map(len, windows))):
            now = [of_rank[number] if number < len(of_rank) else None for of_rank in windows]
            mine = now[self._rank]
            # All receives begin before anything is sent, so each send can complete.
            coming = self._expect(mine) if mine else {}
            for step in range(1, len(now)):  # each rank begins with another receiver
                writer = (self._rank + step) % len(now)
                self._send(now[writer], writer)
            if mine is None:
                continue
            content = self._filled(mine, coming)
            try:
                if failed is None:
                    put(mine, content)
            except Exception as error:
                failed = error
        if failed is not None:
            raise failed

    def _pieces(
        self, window: _Window, writer: int, held: Mapping[str, Iterable[_Box]]
    ) -> Iterator[tuple[int, _Piece]]:
        """Yield the parts of a window that are held, each with its sender.

        The parts of a sender come in one order on both sides.
        """
        for stretch in window.stretches:
            for box in held.get(stretch.name, ()):
                overlap = _overlap(box, stretch.box)
                if overlap is not None:
                    holders = self._tensors[stretch.name].holders[box]
                    yield _sender(holders, writer), _Piece(stretch, box, overlap)

    def _n_bytes(self, piece: _Piece) -> int:
        return _elements(piece.box) * self._tensors[piece.stretch.name].width

    def _expect(self, window: _Window) -> dict[int, _Coming]:
        """Begin to receive a window's parts; return them by sender."""
        coming: dict[int, _Coming] = {}
        for sender, piece in self._pieces(window, self._rank, self._everything):
            coming.setdefault(sender, _Coming([])).pieces.append(piece)
        for sender in set(coming) - {self._rank}:
            pieces = coming[sender].pieces
            memory = torch.empty(sum(map(self._n_bytes, pieces)), dtype=torch.uint8)
            work = dist.irecv(memory, sender, group=self._group)
            coming[sender] = _Coming(pieces, memory, work)
        return coming

    def _send(self, window: _Window | None, writer: int) -> None:
        if window is None:
            return
        pieces = self._pieces(window, writer, self._parts)
        given = [piece for sender, piece in pieces if sender == self._rank]
        if not given:
            return
        memory = torch.empty(sum(map(self._n_bytes, given)), dtype=torch.uint8)
        for piece, place in self._in_order(given, memory):
            place.copy_(self._own(piece))
        dist.send(memory, writer, group=self._group)

    def _own(self, piece: _Piece) -> torch.Tensor:
        return piece.box.of(self._parts[piece.stretch.name][piece.held], piece.held.begin)

    def _in_order(
        self, pieces: list[_Piece], memory: torch.Tensor
    ) -> Iterator[tuple[_Piece, torch.Tensor]]:
        """Yield each piece with its memory in a message."""
        offset = 0
        for piece in pieces:
            yield piece, _at(memory, offset, piece.box, self._tensors[piece.stretch.name].width)
            offset += self._n_bytes(piece)

    def _filled(self, window: _Window, coming: dict[int, _Coming]) -> memoryview:
        """Wait for the parts of a window, and return its content."""
        for pieces, memory, work in coming.values():
            if memory is None:
                for piece in pieces:
                    self._place(piece).copy_(self._own(piece))
                continue
            work.wait()
            for piece, received in self._in_order(pieces, memory):
                self._place(piece).copy_(received)
        content = memoryview(self._memory.numpy())[: window.end - window.begin]  # type: ignore[arg-type]
        head = window.file.header[window.begin : window.end]
        content[: len(head)] = head
        return content

    def _place(self, piece: _Piece) -> torch.Tensor:
        """Return the memory of a piece in the window."""
        stretch = piece.stretch
        whole = _at(self._memory, stretch.offset, stretch.box, self._tensors[stretch.name].width)
        return piece.box.of(whole, stretch.box.begin)


def save(
    tensors: Mapping[str, Any], directory: str, max_shard_bytes: int, *, checksums: bool
) -> list[Report]:
    """Save tensors of all ranks as ioshape.safetensors.save_sharded() describes."""
    is_alone = not (dist.is_available() and dist.is_initialized())
    rank, n_ranks = (0, 1) if is_alone else (dist.get_rank(), dist.get_world_size())
    with Whole(directory) as whole:
        group = None if is_alone else dist.new_group(backend="gloo")
        try:
            own, merged = _agreed(tensors, whole, n_ranks, group)
            files, index = _files(merged, max_shard_bytes)
            out = Files(durable=is_durable(None))
            out.folder = whole.folder
            mine = bytearray()

            def put(window: _Window, content: memoryview) -> None:
                part_bytes = -(-len(content) // PART_UNIT) * PART_UNIT
                part = Part(window.begin, part_bytes, window.file.n_bytes)
                out.expected_bytes = len(content)
                with out.create(os.path.join(directory, window.file.name), part) as file:  # noqa: PTH118
                    file.write(content)
                if checksums:
                    mine.extend(sums.of(content))
                if window.end == window.file.n_bytes:
                    # Direct I/O pads the end of a part. Cut the padding off; finish() syncs the
                    # file.
                    os.truncate(os.path.join(whole.folder, window.file.name), window.end)  # noqa: PTH118

            windows = _windows(files, merged, n_ranks)
            _Rank(merged, own, rank, group).write(windows, put)
        finally:
            if group is not None:
                dist.destroy_process_group(group)
        if rank == 0 and index:
            with out.create(os.path.join(directory, "model.safetensors.index.json")) as file:  # noqa: PTH118
                file.write(index)
        whole.finish(mine.hex(), partial(_put_sums, whole.folder, windows) if checksums else None)
    return out.reports


def _put_sums(folder: str, windows: list[list[_Window]], told: list[str]) -> None:
    """Write the checksums beside each file.

    Each rank has sent those of its windows, in the order of the windows.
    """
    found: dict[str, bytearray] = {}
    for of_rank, text in zip(windows, told, strict=True):
        left = memoryview(bytes.fromhex(text))
        for window in of_rank:
            first, end = (
                -(-place // PART_UNIT) * sums.BYTES for place in (window.begin, window.end)
            )
            whole = bytes(-(-window.file.n_bytes // PART_UNIT) * sums.BYTES)
            found.setdefault(window.file.name, bytearray(whole))[first:end] = left[: end - first]
            left = left[end - first :]
    for name, whole_file in found.items():
        sums.put_beside(os.path.join(folder, name), bytes(whole_file))  # noqa: PTH118


def _agreed(
    tensors: Mapping[str, Any], whole: Whole, n_ranks: int, group: Any
) -> tuple[_Own, dict[str, _Tensor]]:
    """Return what this rank holds, and the tensors of all ranks.

    If one rank cannot take part, all ranks raise.
    """
    own, error = None, None
    try:
        if whole.folder == whole.path:
            raise ValueError("this rank does not see the directory; all nodes must share it")
        own = _Own(tensors)
    except Exception as problem:
        error = problem
    told: list[Any] = [own.told if own is not None else str(error)]
    if group is not None:
        told = [None] * n_ranks
        dist.all_gather_object(told, own.told if own is not None else str(error), group=group)
    if error is not None:
        raise error
    for other, of_rank in enumerate(told):
        if isinstance(of_rank, str):
            raise ValueError(f'cannot save "{whole.path}": rank {other}: {of_rank}')
    assert own is not None
    return own, _merged(told)
