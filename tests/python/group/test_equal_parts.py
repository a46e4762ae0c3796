# SPDX-License-Identifier: Apache-2.0
"""Equal shards of several ranks: a checkpoint stores one copy, which any rank loads."""

import json
import zlib
from pathlib import Path
from typing import Any

import ioshape
import pytest
import torch
from command import call
from nodes import run_ranks

#: SIZE: bytes of the large tensor. SAMPLE: the most bytes that a sample reads, as SAVE_SAMPLE_BYTES
#: in libioshape/save/save.h.
SIZE = 4 << 20
SAMPLE = 512 << 10

BEGIN = (
    "from group_program import *\n"
    f"SIZE = {SIZE}\n"
    """
def state_of(which, step):
    generator = torch.Generator().manual_seed(1000 * step + which)
    data = torch.randint(0, 256, (SIZE,), dtype=torch.uint8, generator=generator)
    return {"data": data, "step": step}

logged = log_lines()

# How much of this rank's part was read, in the newest save, to find parts that are equal.
def hashed():
    lines = [line for line in logged if "bytes read to find identical shards" in line]
    return int(lines[-1].split(": ")[1].split()[0])

def save(state, step, **options):
    report = ioshape.save_group(state, directory, step, **options)
    say("saved", step=step, bytes=report.file_bytes, all=report.checkpoint_bytes,
        repeated=report.repeated_bytes, hashed=hashed(), text=str(report))
"""
)


def told(said: list[list[dict[str, Any]]], event: str) -> list[dict[str, Any]]:
    return [line for lines in said for line in lines if line["event"] == event]


def names_in(place: Path) -> set[str]:
    return {path.name for path in place.iterdir()}


ALL_WAYS = (
    BEGIN
    + """
set_up_distributed()
directory, mode = arguments
# What all save, in this thread and in the background; what each has alone; what two have.
save(state_of(0, 1), 1, mode=mode)
state = state_of(0, 2)
handle = ioshape.save_group_async(state, directory, 2, mode=mode)
state["data"].fill_(rank)
report = handle.result()
say("saved", step=2, bytes=report.file_bytes, all=report.checkpoint_bytes,
    repeated=report.repeated_bytes, hashed=hashed(), text=str(report))
save(state_of(rank, 3), 3, mode=mode)
save(state_of(rank % 2, 4), 4, mode=mode)
for step, which in ((1, 0), (2, 0), (3, rank), (4, rank % 2)):
    found = ioshape.load_group(directory, step=step)
    say("loaded", right=torch.equal(found["data"], state_of(which, step)["data"]))
"""
)


@pytest.mark.parametrize("mode", ["each", "node", "rank0"])
@pytest.mark.slow
def test_equal_parts_are_stored_once_and_no_others(tmp_path: Path, mode: str) -> None:
    runs = tmp_path / "run"
    said = run_ranks(tmp_path, ALL_WAYS, runs, mode, ranks=4, nodes=2)
    assert [line["right"] for line in told(said, "loaded")] == [True] * 16
    for step, copies in ((1, 1), (2, 1), (3, 4), (4, 2)):
        lines = [line for line in told(said, "saved") if line["step"] == step]
        assert {line["all"] // SIZE for line in lines} == {copies}
        assert {line["repeated"] // SIZE for line in lines} == {4 - copies}
        assert sum(line["bytes"] > 0 for line in lines) == copies
        for line in lines:
            assert ("stored once" in line["text"]) == (copies < 4)
            # A rank whose shard equals no other reads only a sample of it.
            assert line["hashed"] <= SAMPLE if step == 3 else line["hashed"] > SIZE
    files = {
        "each": ["rank-00000.pt"],
        "node": ["node-00000.zip"],
        "rank0": ["ranks.zip"],
    }
    assert names_in(runs / "step-0000000001") == {"manifest.json", *files[mode]}
    one, _two, three, four = ioshape.checkpoints(runs)
    assert [each.distinct for each in ioshape.checkpoints(runs)] == [1, 1, 4, 2]
    assert [part.same_as for part in four.shards()] == [0, 1, 0, 1]
    assert len({(part.file, part.offset) for part in one.shards()}) == 1
    # This process is a job of one rank: all ranks share step 1, but step 3 has a shard for each.
    assert torch.equal(ioshape.load_group(runs, step=1)["data"], one.load(3)["data"])
    with pytest.raises(ValueError, match="rank=k"):
        ioshape.load_group(runs, step=3)
    for each in (one, three, four):
        each.verify()
    for command in (
        ("ls", runs),
        ("verify", "--all", runs),
        ("extract", runs, "--step", 1, "--all", "-o", tmp_path / "out"),
    ):
        assert call(*command).returncode == 0
    assert names_in(tmp_path / "out") == {f"rank-0000{rank}.pt" for rank in range(4)}
    assert torch.equal(torch.load(tmp_path / "out" / "rank-00003.pt")["data"], one.load(0)["data"])
    assert ioshape.prune(runs, keep_last=1) == [1, 2, 3]


def test_a_checkpoint_with_equal_parts_has_a_version_that_earlier_releases_refuse(
    tmp_path: Path,
) -> None:
    program = (
        BEGIN + "directory = arguments[0]\nsave(state_of(0, 1), 1)\nsave(state_of(rank, 2), 2)\n"
    )
    run_ranks(tmp_path, program, tmp_path / "run", ranks=2)
    manifests = [
        json.loads((tmp_path / "run" / f"step-000000000{step}" / "manifest.json").read_text())
        for step in (1, 2)
    ]
    assert [manifest["version"] for manifest in manifests] == [2, 1]
    assert [part.get("same") for part in manifests[0]["parts"]] == [None, 0]


# ---- Parts that differ although they look equal --------------------------------------------------

#: The generator polynomial of CRC-32: adding it anywhere to a message keeps the checksum.
GENERATOR = (1 | 0xEDB88320 << 1).to_bytes(5, "little")

LOOK_EQUAL = (
    BEGIN
    + """
directory = arguments[0]
ioshape.configure(examine="off")  # statistics would differ, and so the checksums
state = state_of(0, 1)
if rank:
    # Where no sample is taken.
    at = 1000 + 37 * SIZE // 64 + 20_000
    state["data"][at : at + 5] ^= torch.tensor(list(bytes.fromhex(arguments[1])), dtype=torch.uint8)
save(state, 1)
found = ioshape.load_group(directory)
say("loaded", right=torch.equal(found["data"], state["data"]))
"""
)


def test_parts_with_one_checksum_and_other_bytes_are_stored_each(tmp_path: Path) -> None:
    message = bytearray(range(20))
    before = zlib.crc32(message)
    for at, byte in enumerate(GENERATOR):
        message[5 + at] ^= byte
    assert zlib.crc32(message) == before
    said = run_ranks(tmp_path, LOOK_EQUAL, tmp_path / "run", GENERATOR.hex(), ranks=2)
    assert [line["right"] for line in told(said, "loaded")] == [True, True]
    one, other = ioshape.checkpoints(tmp_path / "run")[0].shards()
    assert one.crc32 == other.crc32
    assert one.offset != other.offset
    for line in told(said, "saved"):
        assert line["hashed"] > SIZE, "the samples were to be equal"
        assert line["repeated"] == 0


CHANGES = (
    BEGIN
    + """
directory, mode = arguments
state = state_of(0, 1)
state["data"] = state["data"].repeat(8)

def change(now):
    if now.phase == "write" and rank == 0:
        state["data"][-1] += 1

def attempt(step, **options):
    try:
        ioshape.save_group(state, directory, step, mode=mode, **options)
    except ioshape.StorageError as error:
        say("failed", step=step, sentence=str(error))
    else:
        say("saved", step=step)

attempt(1, progress=change)
attempt(2)
ioshape.configure(examine="unchanged=fail")
attempt(3)
attempt(4)
"""
)


@pytest.mark.parametrize("mode", ["each", "node"])
@pytest.mark.slow
def test_what_changes_while_it_is_saved_stands_for_no_other_rank(tmp_path: Path, mode: str) -> None:
    said = run_ranks(tmp_path, CHANGES, tmp_path / "run", mode, ranks=2)
    for lines in said:
        assert [(line["event"], line["step"]) for line in lines] == [
            ("failed", 1),
            ("saved", 2),
            ("saved", 3),
            ("failed", 4),
        ]
        assert "has changed since the save began" in lines[0]["sentence"]
        # A rank whose shard is not written also compares it with its previous save.
        assert "identical to" in lines[3]["sentence"]
