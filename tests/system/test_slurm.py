# SPDX-License-Identifier: Apache-2.0
"""Test the Slurm jobs in examples/ with a real Slurm of one node: killed jobs start again."""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from command import IOSHAPE
from processes import TIMEOUT_S
from slurm import Cluster, running_slurm, unavailable
from tree import ROOT

pytestmark = [pytest.mark.long, pytest.mark.skipif(bool(unavailable()), reason=unavailable())]

SIZE = ("--width", "96", "--layers", "1")
JOBS = pytest.mark.parametrize("script", ["slurm.sbatch", "slurm_group.sbatch"])


@pytest.fixture(scope="module")
def near(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the fast disk of the node."""
    return tmp_path_factory.mktemp("near")


@pytest.fixture(scope="module")
def cluster(near: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    epilog = (ROOT / "examples" / "slurm_epilog.sh").read_text()
    for was, now in {"/local/nvme": near, "/opt/ioshape/bin/ioshape": IOSHAPE}.items():
        assert was in epilog
        epilog = epilog.replace(was, str(now))
    with running_slurm(tmp_path_factory.mktemp("slurm"), epilog) as running:
        yield running


def submit(cluster: Cluster, folder: Path, script: str, *arguments: str, restarts: int = 5) -> str:
    """Submit the example job as it is, but on one node."""
    variables = {
        "REPOSITORY": str(ROOT),
        "CHECKPOINTS": str(folder / "run"),
        "RESTARTS": str(restarts),
    }
    path = str(ROOT / "examples" / script)
    return cluster.submit(folder, variables, "--nodes=1", path, *SIZE, *arguments)


def steps(folder: Path) -> list[int]:
    """Return the trained steps, in the order in which they were trained."""
    file = folder / "run" / "losses.txt"
    return [int(line.split()[0]) for line in file.read_text().splitlines()] if file.exists() else []


def wait_until(folder: Path, what: str, come: Callable[[], object]) -> None:
    end = time.monotonic() + TIMEOUT_S
    while not come():
        logs = "".join(log.read_text() for log in folder.glob("train-*.txt"))
        assert time.monotonic() < end, f"{what} did not come\n{logs}"
        time.sleep(0.1)


@JOBS
def test_a_job_whose_rank_is_killed_starts_again(
    cluster: Cluster, tmp_path: Path, script: str
) -> None:
    job = submit(cluster, tmp_path, script, "--steps", "40", "--save-every", "4")
    wait_until(tmp_path, "a checkpoint", lambda: len(steps(tmp_path)) > 10)
    os.kill(cluster.pids(job)[-1], signal.SIGKILL)  # as the kernel does when memory runs out
    cluster.wait_for(job, "its end", lambda state: state["JobState"] == "COMPLETED")
    state = cluster.show(job)
    assert state["Restarts"] == "1"
    assert state["TresPerNode"] == "gres:gpu:4"
    made = steps(tmp_path)
    assert set(made) == set(range(1, 41))
    assert len(made) < 60  # it continued from a checkpoint, not from the beginning
    # A step that was trained twice has equal losses.
    assert len(set((tmp_path / "run" / "losses.txt").read_text().splitlines())) == 40


@JOBS
def test_a_job_saves_before_its_time_is_up_and_goes_on(
    cluster: Cluster, tmp_path: Path, script: str
) -> None:
    many = ("--steps", "1000000", "--save-every", "1000000")
    job = submit(cluster, tmp_path, script, *many)
    log = tmp_path / f"train-{job}.txt"
    wait_until(tmp_path, "the training", lambda: steps(tmp_path))
    cluster.set_time_left(job, 60)
    cluster.wait_for(job, "its requeue", lambda state: state["Restarts"] == "1")
    cluster.set_time_left(job, 3600)
    wait_until(tmp_path, "its next start", lambda: "resuming from step" in log.read_text())
    assert cluster.show(job)["Restarts"] == "1"
    # The only checkpoint is that of the last moment, and it has no leftovers.
    saved = {int(path.name.split("-")[1]) for path in (tmp_path / "run").glob("step-*")}
    assert len(saved) == 1
    assert not list((tmp_path / "run").rglob(".*"))

    # A cancelled job must not start again.
    cluster.cancel(job)
    cluster.wait_for(job, "its end", lambda state: state["JobState"] == "CANCELLED")
    assert cluster.show(job)["Restarts"] == "1"


def test_a_job_that_fails_each_time_ends(cluster: Cluster, tmp_path: Path) -> None:
    job = submit(cluster, tmp_path, "slurm.sbatch", "--no-such-option", restarts=1)
    cluster.wait_for(job, "its end", lambda state: state["JobState"] == "FAILED")
    assert cluster.show(job)["Restarts"] == "1"
    assert cluster.show(job)["ExitCode"] != "0:0"


SAVING = """\
#!{python}
import sys, time
from pathlib import Path
import ioshape
from ioshape._core.context import Context
from ioshape._tier.tier import Tier
path = "{folder}/model.bin"
tier = Tier(Context(), "{near}")
with ioshape.open(tier.path_for(path, 5), "wb") as file:
    file.write(b"saved")
tier.keep(path)
Path("{folder}/is-safe").touch()
time.sleep(1000)
"""


def test_what_a_killed_job_has_on_the_tier_is_drained_by_the_epilog(
    cluster: Cluster, near: Path, tmp_path: Path
) -> None:
    script = tmp_path / "saving"
    script.write_text(SAVING.format(python=sys.executable, folder=tmp_path, near=near))
    job = cluster.submit(tmp_path, {}, "--no-requeue", str(script))
    wait_until(tmp_path, "the save", (tmp_path / "is-safe").exists)
    assert not (tmp_path / "model.bin").exists()
    cluster.cancel(job)
    wait_until(tmp_path, "the drain", (tmp_path / "model.bin").exists)
    assert (tmp_path / "model.bin").read_bytes() == b"saved"
    wait_until(tmp_path, "the node", cluster.is_ready)  # the node stays in service
