# SPDX-License-Identifier: Apache-2.0
"""Under "ioshape run" no byte of a framework's checkpoint is written by anybody else."""

from pathlib import Path

import pytest
from witness import watch

#: Those whose packages the set-up installs; `tests/bench.sh frameworks` watches more.
SCENES = (
    "dcp",
    "lightning",
    *(pytest.param(scene, marks=pytest.mark.long) for scene in ("opened", "accelerate")),
)


@pytest.mark.slow
@pytest.mark.parametrize("scene", SCENES)
def test_no_byte_of_a_checkpoint_goes_past(scene: str, tmp_path: Path) -> None:
    in_files, past = watch(scene, tmp_path)
    assert in_files > 2 << 20
    assert not past, past


@pytest.mark.slow
def test_the_witness_sees_what_the_frameworks_write_without_us(tmp_path: Path) -> None:
    in_files, past = watch("opened", tmp_path, under_run=False)
    assert sum(past.values()) == in_files
