# SPDX-License-Identifier: Apache-2.0
"""The metadata operations of a save, counted: any additional operation fails with its name."""

from collections import Counter
from collections.abc import Callable, Iterator

import ioshape
import pytest
import torch
from striped import INSTANT, Mount, striped

pytestmark = pytest.mark.usefixtures("_mounts_of_stripefs")

#: Operations for every new file. The kernel looks the name up before it creates the file. It asks
#: for capabilities (getxattr) before the first write.
FILE = Counter(lookup=1, create=1, close=1, getxattr=1, fsync=1)
#: Operations for the name: a rename, and a sync of the directory. FILE counts the sync of the file.
NAME = Counter(rename=1, fsync=1)
#: Operations for a large file: the check of free space and the reservation.
SPACE = Counter(statfs=1, fallocate=1)
#: Operations for a new name: lookups before and after the wait, and by the kernel for the rename.
NEW = Counter(lookup=3)

MOST = {
    "small": FILE + NAME,
    "replacing": FILE + NAME + SPACE,
    "new": FILE + NAME + SPACE + NEW,
    # A rank's file and the manifest are created in a directory of their own. The rename of that
    # directory names both, and one sync makes all its names durable. The directory of checkpoints
    # is listed once, for leftovers of dead jobs and for the previous checkpoint, whose manifest is
    # read. The layout of the directory decides who writes.
    "group": FILE
    + FILE
    + SPACE
    + Counter(lookup=2, mkdir=1, rename=1, readdir=2, fsync=2, open=1, close=1, getxattr=1),
}


#: Concurrent writers on Lustre get targets of their own. The result is checked, because Lustre may
#: report success and do nothing.
PLACED = Counter(getxattr=1)


@pytest.fixture
def more(request: pytest.FixtureRequest) -> Counter[str]:
    return PLACED if "lustre" in request.node.name else Counter()


@pytest.fixture(params=["lustre", "beegfs", "ceph", "nfs"])
def mount(request: pytest.FixtureRequest) -> Iterator[Mount]:
    """Yield a mount of each kind. Each kind answers other requests for layouts."""
    with striped("ssd", **INSTANT, play=request.param) as mounted:
        yield mounted


def tensors(n_bytes: int) -> dict[str, torch.Tensor]:
    return {"weight": torch.randint(0, 100, (n_bytes // 8,))}


def operations(mount: Mount, call: Callable[[int], object]) -> Counter[str]:
    """Return the operations that three calls have in common.

    A context may serve one of the calls with a queue that does not know the mount yet.
    """
    least: Counter[str] = Counter()
    for turn in range(3):
        mount.reset()
        call(turn)
        counted = mount.statistics()["metadata"]
        del counted["total"]
        least = least & Counter(counted) if turn else Counter(counted)
    return least


def refuse_more(found: Counter[str], what: str, more: Counter[str]) -> None:
    assert not found - more - MOST[what], f"{what}: {dict(found)}"


def test_a_save_asks_for_no_more_than_this(mount: Mount, more: Counter[str]) -> None:
    folder = mount.path / "run"
    folder.mkdir()
    large, small = tensors(8 << 20), tensors(1000)
    ioshape.save(large, folder / "large.pt")
    ioshape.save(small, folder / "small.pt")

    def save_anew(turn: int) -> None:
        ioshape.save(large, folder / f"new-{turn}.pt")

    def replace_in_the_background() -> None:
        ioshape.save_async(large, folder / "large.pt").wait()

    refuse_more(operations(mount, save_anew), "new", more)
    found = operations(mount, lambda _: ioshape.save(large, folder / "large.pt"))
    refuse_more(found, "replacing", more)
    found = operations(mount, lambda _: ioshape.save(small, folder / "small.pt"))
    refuse_more(found, "small", Counter())
    refuse_more(operations(mount, lambda _: replace_in_the_background()), "replacing", more)
    assert (MOST["replacing"] + PLACED).total() <= 10


def test_a_checkpoint_asks_for_no_more_than_this(mount: Mount, more: Counter[str]) -> None:
    folder = mount.path / "run"
    large = tensors(8 << 20)
    ioshape.save_group(large, folder, step=0)
    found = operations(mount, lambda turn: ioshape.save_group(large, folder, step=turn + 1))
    refuse_more(found, "group", more)
