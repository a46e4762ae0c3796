# SPDX-License-Identifier: Apache-2.0
"""Processes of one host that load one file at the same time read it once from the disk.

The kernel counts the bytes that it reads from the device, a loop device for this test alone.
"""

from pathlib import Path

import pytest
from mounts import small_disk
from processes import run_where_mounted

MIB = 1 << 20

PROGRAM = """
    import os
    import sys
    import traceback
    from pathlib import Path

    import ioshape
    import torch

    MIB = 1 << 20
    how, n_bytes = sys.argv[1], int(sys.argv[2])
    path = Path("disk/model.pt")


    def children(functions):
        '''Call each function in a child, all at the same time.'''
        hold, go = os.pipe()
        started = []
        for function in functions:
            child = os.fork()
            if not child:
                try:
                    os.close(go)
                    os.read(hold, 1)  # until the parent has started all
                    function()
                except BaseException:
                    traceback.print_exc()
                    os._exit(1)
                os._exit(0)
            started.append(child)
        os.close(go)
        os.close(hold)
        for child in started:
            assert os.waitpid(child, 0)[1] == 0


    def save():
        ioshape.save({"weight": torch.arange(n_bytes // 8)}, path)


    def load(rank):
        if how == "launched":
            of_rank = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 4, "LOCAL_WORLD_SIZE": 4}
            os.environ.update({name: str(value) for name, value in of_rank.items()})
        weight = ioshape.load(path)["weight"]
        assert weight[-1] == len(weight) - 1  # load() has verified the rest


    def load_beside_others():
        # The file is open before the others begin, and is not read before they have ended.
        with ioshape.open(path, "rb") as file:
            children([lambda rank=rank: load(rank) for rank in range(3)])
            torch.load(file)


    def read_bytes():
        device = path.stat().st_dev
        stat = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}/stat")
        return int(stat.read_text().split()[2]) * 512


    children([save])
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    before = read_bytes()
    if how == "beside":
        children([load_beside_others])
    elif how == "in turn":
        for rank in range(4):
            children([lambda: load(rank)])
    else:
        children([lambda rank=rank: load(rank) for rank in range(4)])
    print((read_bytes() - before) / path.stat().st_size)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "n_bytes"),
    [
        ("alone", 152 * MIB),
        ("in turn", 152 * MIB),
        ("launched", 152 * MIB),
        ("launched", 260 * MIB),
        ("beside", 260 * MIB),
    ],
)
def test_the_disk_is_read_once(how: str, n_bytes: int, tmp_path: Path) -> None:
    disk = small_disk("ext4", tmp_path, n_bytes=360 * MIB)
    finished = run_where_mounted(disk, tmp_path, PROGRAM, how, str(n_bytes))
    # Blocks of metadata add to the file's bytes.
    assert 0.9 < float(finished.stdout) < 1.1
