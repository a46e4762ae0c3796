# SPDX-License-Identifier: Apache-2.0
"""Ranks that load one file together, for test_shared.py."""

import os
import pickle
import signal
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import ioshape
import ranks
import torch
import torch.distributed as dist
from ioshape._device import incoming, stream
from ioshape._load import reader, together
from simulated_device import SimulatedDevice

#: bytes that a rank reads at once, fewer than outside tests, so that small files have many pieces
PIECE = together.PIECE_BYTES = stream.PIECE_BYTES = 4 << 20
# time-out between ranks whose devices exchange data
PATIENCE = timedelta(seconds=5)

# Methods of these are replaced.
READER: Any = reader.Reader
INCOMING: Any = incoming


def state() -> dict[str, Any]:
    """Return a state larger than a round of pieces, with views and tensors of unaligned sizes."""
    large = torch.arange(3 << 20).view(torch.uint8)[: (18 << 20) + 4321].clone()
    many = {f"{n}": torch.arange(n * 100_000, n * 100_001 + 5_000) for n in range(100)}
    return {"large": large, "view": large[1000:5000:3], "many": many, "empty": torch.empty(0)}


def is_right(found: Any) -> bool:
    expected = state()
    return (
        torch.equal(found["large"], expected["large"])
        and torch.equal(found["view"], expected["view"])
        and found["view"].data_ptr() == found["large"].data_ptr() + 1000
        and all(torch.equal(found["many"][key], one) for key, one in expected["many"].items())
    )


class Counted:
    """A counter of the bytes that this rank reads from the file in large calls."""

    def __init__(self) -> None:
        self.n_bytes = 0
        one_by_one, at_once = READER.read_file, READER.read_records

        def read_file(opened: Any, offset: int, into: memoryview) -> None:
            self.n_bytes += into.nbytes
            one_by_one(opened, offset, into)

        def read_records(opened: Any, requests: Any, told: Any = None) -> None:
            self.n_bytes += sum(request.n_bytes for request in requests)
            at_once(opened, requests, told)

        READER.read_file = read_file
        READER.read_records = read_records


def zeroed() -> dict[str, Any]:
    target = state()
    for tensor in (target["large"], *target["many"].values()):
        tensor.zero_()
    return target


def simulate_device(rank: int, *, is_connected: bool = True) -> SimulatedDevice:
    """Simulate a device whose memory is the CPU's. It broadcasts to those of the other ranks."""
    simulated = SimulatedDevice(rank)
    simulated.group, simulated.rank = dist.new_group(backend="gloo", timeout=PATIENCE), rank
    INCOMING.open_stream = simulated.open
    INCOMING.ranks_exchange = lambda _device: is_connected
    return simulated


# ---- Scenes --------------------------------------------------------------------------------------


def load_new(folder: Path, _rank: int, _size: int) -> Any:
    counted = Counted()
    told: list[int] = []
    found = ioshape.load(
        folder / "x.pt", shared=True, progress=lambda now: told.append(now.done_bytes)
    )
    return is_right(found), counted.n_bytes, told == sorted(told) and told[-1] >= PIECE


def load_into(folder: Path, _rank: int, _size: int) -> Any:
    counted = Counted()
    target = zeroed()
    found = ioshape.load(folder / "x.pt", into=target, shared=True)
    return is_right(found) and found["large"] is target["large"], counted.n_bytes


def load_damaged(folder: Path, _rank: int, _size: int) -> Any:
    try:
        ioshape.load(folder / "x.pt", shared=True)
    except ioshape.DamagedError as error:
        return error.record
    return None


def load_what_differs(folder: Path, rank: int, _size: int) -> Any:
    """Let ranks disagree: rank 1 has another file, rank 2 wants a part; then rank 3 has none.

    The other ranks load successfully.
    """
    counted = Counted()
    name = "y.pt" if rank == 1 else "x.pt"
    found = ioshape.load(folder / name, shared=True, only=["many.*"] if rank == 2 else None)
    first = "large" in found and is_right(found)
    try:
        found = ioshape.load(folder / ("none.pt" if rank == 3 else "x.pt"), shared=True)
    except FileNotFoundError:
        return first, "none", counted.n_bytes
    return first, is_right(found), counted.n_bytes


def load_with_an_end(folder: Path, rank: int, _size: int) -> Any:
    """Let rank 2 fail to read one of its pieces, and report it.

    Other ranks read that piece themselves.
    """
    read_file = READER.read_file

    def failing(opened: Any, offset: int, into: memoryview) -> None:
        if rank == 2 and into.nbytes > PIECE // 2:
            raise OSError("no such luck")
        read_file(opened, offset, into)

    READER.read_file = failing
    try:
        return is_right(ioshape.load(folder / "x.pt", shared=True))
    except OSError as error:
        return str(error)


def load_with_a_death(folder: Path, rank: int, _size: int) -> Any:
    """Kill rank 2 at its first piece. The remaining ranks cannot meet at the end."""

    together._MOST_WAIT_S = 5.0

    read_file = READER.read_file

    def dying(opened: Any, offset: int, into: memoryview) -> None:
        if rank == 2 and into.nbytes > PIECE // 2:
            os.kill(os.getpid(), signal.SIGKILL)
        read_file(opened, offset, into)

    READER.read_file = dying
    outcomes = folder / f"{sys.argv[1]}.{rank}.outcomes"
    outcomes.write_bytes(pickle.dumps("killed"))
    outcomes.write_bytes(pickle.dumps(is_right(ioshape.load(folder / "x.pt", shared=True))))
    os._exit(0)


def load_to_devices(folder: Path, rank: int, size: int) -> Any:
    """Run load_new and load_into. Each byte passes this rank's pinned memory at most once."""
    simulated = simulate_device(rank)
    first = load_new(folder, rank, size)
    second = load_into(folder, rank, size)
    return (
        first[0] and second[0] and simulated.is_idle,
        second[1],
        first[2],
        simulated.most_pinned_bytes,
    )


def load_damaged_to_devices(folder: Path, rank: int, _size: int) -> Any:
    simulated = simulate_device(rank)
    target = zeroed()
    try:
        ioshape.load(folder / "x.pt", into=target, shared=True)
    except ioshape.DamagedError as error:
        return error.record, set(error.changed) <= {"large"}, simulated.is_idle
    return None


def load_with_one_device_apart(folder: Path, rank: int, _size: int) -> Any:
    """Let the device of rank 1 be unconnected to the others."""
    simulated = simulate_device(rank, is_connected=rank != 1)
    counted = Counted()
    return is_right(ioshape.load(folder / "x.pt", shared=True)), counted.n_bytes, simulated.is_idle


def load_to_devices_with_an_end(folder: Path, rank: int, size: int) -> Any:
    simulated = simulate_device(rank)
    return load_with_an_end(folder, rank, size), simulated.is_idle


def load_to_devices_with_a_failure(folder: Path, rank: int, _size: int) -> Any:
    """Let the progress callback of rank 1 raise an exception."""
    simulated = simulate_device(rank)

    def told(_now: Any) -> None:
        if rank == 1:
            raise KeyError("enough")

    try:
        return is_right(
            ioshape.load(folder / "x.pt", shared=True, progress=told)
        ), simulated.is_idle
    except KeyError as error:
        return error.args[0], simulated.is_idle


def load_to_devices_with_a_death(folder: Path, rank: int, size: int) -> Any:
    simulate_device(rank)
    return load_with_a_death(folder, rank, size)


def load_to_gpus(folder: Path, rank: int, _size: int) -> Any:
    """Load to a GPU for each rank, connected by NCCL."""
    torch.cuda.set_device(rank)
    counted = Counted()
    found = ioshape.load(folder / "x.pt", map_location=f"cuda:{rank}", shared=True)
    on_gpu = found["large"].device.index == rank
    here = {name: one.cpu() for name, one in found["many"].items()}
    large = found["large"].cpu()
    same = is_right({"large": large, "view": large[1000:5000:3], "many": here})
    return on_gpu and same, counted.n_bytes


if __name__ == "__main__":
    ranks.serve(
        {
            one.__name__: one
            for one in (
                load_new,
                load_into,
                load_to_devices,
                load_damaged_to_devices,
                load_with_one_device_apart,
                load_to_devices_with_an_end,
                load_to_devices_with_a_failure,
                load_to_devices_with_a_death,
                load_to_gpus,
                load_damaged,
                load_what_differs,
                load_with_an_end,
                load_with_a_death,
            )
        }
    )
