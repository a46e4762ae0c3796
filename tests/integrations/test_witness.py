# SPDX-License-Identifier: Apache-2.0
"""Test that under "ioshape run" frameworks write no checkpoint bytes without ioshape."""

import sys
from pathlib import Path

import frameworks
import pytest
from witness import INSTALLED_AS, watch

SCENES = (
    "dcp",
    "lightning",
    *(
        pytest.param(scene, marks=pytest.mark.long)
        for scene in ("opened", "accelerate", *INSTALLED_AS)
    ),
)


@pytest.mark.long
@pytest.mark.parametrize("scene", SCENES)
def test_no_byte_of_a_checkpoint_goes_past(scene: str, tmp_path: Path) -> None:
    try:
        installed_as = INSTALLED_AS.get(scene)
        python = frameworks.environment(installed_as) if installed_as else sys.executable
    except frameworks.CannotInstall as problem:
        pytest.skip(str(problem))
    in_files, past = watch(scene, tmp_path, str(python))
    assert in_files > 2 << 20
    assert not past, past


@pytest.mark.long
def test_the_witness_sees_what_the_frameworks_write_without_us(tmp_path: Path) -> None:
    in_files, past = watch("opened", tmp_path, under_run=False)
    assert sum(past.values()) == in_files
