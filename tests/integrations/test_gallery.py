# SPDX-License-Identifier: Apache-2.0
"""Test that popular training scripts continue after a kill as if they had not been disturbed."""

from pathlib import Path

import gallery
import pytest
from tree import ROOT


@pytest.mark.long
@pytest.mark.parametrize("script", gallery.SCRIPTS)
def test_losses_after_a_kill_are_those_of_an_undisturbed_run(script: str, tmp_path: Path) -> None:
    assert gallery.tried(script, tmp_path) == ""


def test_each_script_is_in_the_table() -> None:
    page = (ROOT / "docs" / "frameworks.md").read_text(encoding="utf-8")
    assert [name for name in gallery.SCRIPTS if f"`{name}.py`" not in page] == []
