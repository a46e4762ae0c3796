# SPDX-License-Identifier: Apache-2.0
"""Files that are written at the same time get different storage targets."""

from pathlib import Path

import pytest
from coordinators import coordinator
from mounts import client_of
from processes import run_where_mounted
from striped import striped

TARGETS = 4

SAVES = """
    import os
    import sys

    import ioshape
    import torch
    from checkpoints import checkpoint

    folder, places, files = sys.argv[1], int(sys.argv[2]), 0
    MIB = 1 << 20


    def saved():
        # Where the next file lies: its targets, as Lustre tells them.
        global files
        files += 1
        path = f"{folder}/{files}.pt"
        ioshape.save(checkpoint(files, 2 * MIB), path)
        lov = os.getxattr(path, "lustre.lov")
        begin, count = 32, int.from_bytes(lov[28:30], "little")
        ends = [begin + 24 * (n + 1) for n in range(count)]
        return frozenset(int.from_bytes(lov[end - 4 : end], "little") for end in ends)


    # Without other writers, files take the targets in turn.
    parts = [saved() for _ in range(places)]
    assert len(set(parts)) == places, parts
    assert not frozenset.intersection(*parts), parts

    # All slots but one are held: the next files get the targets without a writer.
    held = [ioshape.slot(path=f"{folder}/held") for _ in range(places - 1)]
    free = {saved() for _ in range(5)}
    assert len(free) == 1, free

    # Another one is free again.
    held.pop().release()
    both = {saved() for _ in range(6)}
    assert len(both) == 2 and free < both, (free, both)
    for slot in held:
        slot.release()
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["local", "redis"])
@pytest.mark.parametrize("stripes", [1, 2])
@pytest.mark.usefixtures("_mounts_of_stripefs")
def test_files_of_those_that_hold_slots_lie_on_targets_of_their_own(
    kind: str, stripes: int, tmp_path: Path
) -> None:
    layout = {"targets": TARGETS, "stripe_count": stripes, "play": "lustre"}
    with (
        striped("ssd", fsname="mgs@tcp:/placed", **layout) as mount,
        coordinator(kind) as address,
    ):
        run_where_mounted(
            *(client_of(mount.backing), tmp_path, SAVES, mount.path, str(TARGETS // stripes)),
            variables={"IOSHAPE_COORDINATOR": address},
        )


IN_TURN = """
    import os
    import sys

    import ioshape
    from checkpoints import checkpoint

    path = f"{sys.argv[1]}/file.pt"
    report = ioshape.save(checkpoint(1, 2 << 20), path)
    assert not [one for one in report.downgrades if one.code == "layout"], report.downgrades
"""


@pytest.mark.usefixtures("_mounts_of_stripefs")
def test_a_filesystem_that_balances_its_targets_is_left_to_it(tmp_path: Path) -> None:
    space = {"targets": TARGETS, "capacity": "150Mi", "used": ["2=60Mi"]}
    with striped("ssd", fsname="mgs@tcp:/uneven", stripe_count=1, play="lustre", **space) as mount:
        run_where_mounted(client_of(mount.backing), tmp_path, IN_TURN, mount.path)
