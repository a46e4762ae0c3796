# SPDX-License-Identifier: Apache-2.0
"""Test Ray Train: workers save to its storage path themselves, and Ray finds the checkpoints."""

import subprocess
from pathlib import Path

import frameworks
import ioshape
import pytest
from processes import environment
from records import is_ours
from tree import ROOT

PROGRAM = ROOT / "tests" / "support" / "programs" / "ray_workers.py"

pytestmark = pytest.mark.long


def run(what: str, folder: Path, *prefix: str) -> tuple[Path, int]:
    """Return the checkpoint that Ray names at the end, and the step that it was told."""
    try:
        python = frameworks.environment("ray")
    except frameworks.CannotInstall as problem:
        pytest.skip(str(problem))
    done = subprocess.run(
        (python, *prefix, str(PROGRAM), what),
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    path, step = (folder / "result").read_text().rsplit(maxsplit=1)
    return Path(path), int(step)


def test_workers_that_are_killed_go_on_from_a_checkpoint_that_ray_was_not_told_of(
    tmp_path: Path,
) -> None:
    path, step = run("killed", tmp_path)
    assert (path.name, step) == ("step-0000000005", 5)
    begun = sorted(note.read_text() for note in (tmp_path / "notes").iterdir())
    assert begun == ["0 0", "0 3", "1 0", "1 3"]
    for rank in range(2):
        state = ioshape.load_group(path.parent, step=5, rank=rank)
        assert set(state["weight"].tolist()) == {rank + 5}
    # Ray removes all but two of the checkpoints that were reported to it.
    steps = {one.step for one in ioshape.checkpoints(path.parent)}
    assert {4, 5} <= steps <= {2, 3, 4, 5}


def test_a_program_under_run_saves_through_us_and_ray_copies_it(tmp_path: Path) -> None:
    path, _ = run("unchanged", tmp_path, "-m", "ioshape", "run")
    assert {file.name: is_ours(file) for file in path.iterdir()} == {
        "rank-0.pt": True,
        "rank-1.pt": True,
    }
