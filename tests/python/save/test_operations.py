# SPDX-License-Identifier: Apache-2.0
"""What a save asks of a metadata server, operation by operation: one more fails with its name."""

from collections import Counter
from collections.abc import Callable, Iterator

import ioshape
import pytest
import torch
from striped import INSTANT, Mount, striped

pytestmark = pytest.mark.usefixtures("_mounts_of_stripefs")

#: What every new file takes. The name is looked up by the kernel before it is created, and the
#: kernel asks for capabilities (getxattr) before it is written to.
FILE = Counter(lookup=1, create=1, close=1, getxattr=1, fsync=1)
#: How it gets its name: the file and its directory are synced.
NAME = Counter(rename=1, fsync=1)
#: If it is large: whether there is space for it, and that it is kept.
SPACE = Counter(statfs=1, fallocate=1)
#: A new name: looked at before the wait and after it, and by the kernel for the rename.
NEW = Counter(lookup=3)

MOST = {
    "small": FILE + NAME,
    "replacing": FILE + NAME + SPACE,
    "new": FILE + NAME + SPACE + NEW,
    # The file of the rank and the manifest, in a directory of their own, which gets its name as a
    # whole: nothing in it is renamed, and it is synced once for all names in it. The directory of
    # generations is listed once, for what dead jobs left, and for the number of the generation
    # before, whose manifest is read. What files there will lie on decides who writes.
    "group": FILE
    + FILE
    + SPACE
    + Counter(lookup=2, mkdir=1, rename=1, readdir=2, fsync=2, open=1, close=1, getxattr=1),
}


#: Lustre: writers at a time are given targets of their own. Whether the file has got them is looked
#: at, because Lustre may answer that it has, and do nothing.
PLACED = Counter(getxattr=1)


@pytest.fixture
def more(request: pytest.FixtureRequest) -> Counter[str]:
    return PLACED if "lustre" in request.node.name else Counter()


@pytest.fixture(params=["lustre", "beegfs", "ceph", "nfs"])
def mount(request: pytest.FixtureRequest) -> Iterator[Mount]:
    """As what it plays it answers other questions about layouts."""
    with striped("ssd", **INSTANT, play=request.param) as mounted:
        yield mounted


def tensors(n_bytes: int) -> dict[str, torch.Tensor]:
    return {"weight": torch.randint(0, 100, (n_bytes // 8,))}


def operations(mount: Mount, call: Callable[[int], object]) -> Counter[str]:
    """What each of three calls asked for: a context may serve one of them with a lane that has seen
    nothing of the mount."""
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


def test_a_generation_asks_for_no_more_than_this(mount: Mount, more: Counter[str]) -> None:
    folder = mount.path / "run"
    large = tensors(8 << 20)
    ioshape.save_group(large, folder, step=0)
    found = operations(mount, lambda turn: ioshape.save_group(large, folder, step=turn + 1))
    refuse_more(found, "group", more)
