# SPDX-License-Identifier: Apache-2.0
"""Test training on several ranks: saved, killed and resumed, with unchanged losses."""

import io
import itertools
import os
import random
import re
import shutil
import signal
import subprocess
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ioshape
import pytest
import torch
import yaml  # type: ignore[import-untyped]
from coordinators import running_redis
from ports import free_port
from processes import environment
from same import assert_same
from tree import ROOT, program

RANKS = 2  # each imports torch; examples/quickstart.sh, which tests/install runs, trains with four
TIMEOUT_S = 300.0

PLAIN = ROOT / "examples" / "plain_train.py"
OURS = ROOT / "examples" / "train.py"
GROUP = ROOT / "examples" / "group_train.py"
STEPS, SAVE_EVERY = 16, 2
SIZE = ("--width", "96", "--layers", "1", "--steps", str(STEPS), "--save-every", str(SAVE_EVERY))

# Ways to get checkpoints from ioshape: by an import, and with an unchanged script.
WAYS = pytest.mark.parametrize(
    "way",
    [
        pytest.param([str(OURS)], marks=pytest.mark.long, id="save_async"),
        pytest.param(["-m", "ioshape", "run", str(PLAIN)], id="ioshape run"),
    ],
)


def start(folder: Path, *arguments: str | Path) -> subprocess.Popen[str]:
    """Start the ranks of one host with torchrun."""
    return launch(folder, "--standalone", "--nproc-per-node", str(RANKS), *arguments)


def launch(folder: Path, *arguments: str | Path, **more: str) -> subprocess.Popen[str]:
    """Start torchrun with additional environment variables."""
    return subprocess.Popen(
        [program("torchrun"), *map(str, arguments)],
        cwd=folder,
        env=environment(**more),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(training: subprocess.Popen[str]) -> str:
    """Wait for the end of a training, which must succeed."""
    try:
        output, _ = training.communicate(timeout=TIMEOUT_S)
    finally:
        kill_all(training)
    assert training.returncode == 0, output
    return output


def descendants(pid: int) -> list[int]:
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except FileNotFoundError:
        return []
    return [found for child in map(int, children) for found in (child, *descendants(child))]


def kill_all(training: subprocess.Popen[str]) -> None:
    """Kill torchrun first, so that it cannot end its ranks gracefully."""
    for pid in (training.pid, *descendants(training.pid)):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def losses(folder: Path) -> list[str]:
    """Return steps and losses with all digits. Equal lines of repeated steps count once."""
    file = folder / "losses.txt"
    lines = file.read_text().splitlines() if file.exists() else []
    return sorted(set(lines), key=lambda line: int(line.split()[0]))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of an undisturbed training with torch.save."""
    folder = tmp_path_factory.mktemp("plain")
    finish(start(folder, PLAIN, folder, *SIZE))
    assert len(losses(folder)) == STEPS
    return folder


def wait_for_step(training: subprocess.Popen[str], folder: Path, step: int) -> None:
    end = time.monotonic() + TIMEOUT_S
    while len(losses(folder)) < step:
        assert training.poll() is None, training.communicate()
        assert time.monotonic() < end, "it hangs"
        time.sleep(0.005)


def killed(folder: Path, chance: random.Random, first: int, *arguments: str | Path) -> Path:
    """Return the folder of a training that was killed at a random step from `first` on.

    On a busy machine a training may reach its last step before the kill. No save follows that step,
    and only a next save would remove the leftovers. So another training is started then.
    """
    for number in itertools.count():
        made = folder / str(number)
        made.mkdir()
        training = start(made, *arguments, made, *SIZE)
        try:
            wait_for_step(training, made, chance.randrange(first, STEPS - SAVE_EVERY))
            time.sleep(chance.uniform(0, 0.2))
        finally:
            kill_all(training)
        output, _ = training.communicate()
        assert training.returncode in (0, -signal.SIGKILL), output
        if len(losses(made)) < STEPS:
            break
    return made


@pytest.mark.long
@WAYS
def test_a_killed_training_has_the_losses_of_one_that_was_not(
    plain: Path, way: Sequence[str], tmp_path: Path
) -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)  # shown if the test fails
    folder = killed(tmp_path, random.Random(seed), 2 * SAVE_EVERY, *way)

    # Files with their final names must be complete, whatever was being written.
    files = sorted(folder.glob("*.pt"))
    assert files
    for file in files:
        ioshape.verify(file)
        torch.load(file, weights_only=True)

    output = finish(start(folder, *way, folder, *SIZE))
    assert "resuming from step" in output
    assert losses(folder) == losses(plain)

    # At the end the files are equal, and nothing of the killed writers is left.
    assert names(folder) == names(plain)
    for file in folder.glob("*.pt"):
        assert_same(torch.load(file), torch.load(plain / file.name))
        # Both have CRC-32s, but only ioshape's files have checksums of blocks.
        assert has_block_checksums(file)
        assert not has_block_checksums(plain / file.name)


def names(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


def has_block_checksums(file: Path) -> bool:
    with zipfile.ZipFile(file) as opened:
        return any(name.endswith("/.ioshape/index") for name in opened.namelist())


# ---- All ranks together -------------------------------------------------------------------------


def checkpoints(folder: Path) -> dict[int, list[object]]:
    """Return each rank's object in the complete checkpoints, as torch reads them."""
    found = {}
    for directory in sorted(folder.glob("step-*")):
        assert (directory / "manifest.json").is_file()
        parts = {file.name: torch.load(file, weights_only=True) for file in directory.glob("*.pt")}
        for file in directory.glob("*.zip"):
            with zipfile.ZipFile(file) as archive:
                assert archive.testzip() is None
                for name in archive.namelist():
                    if name.startswith("rank-"):
                        member = io.BytesIO(archive.read(name))
                        parts[name] = torch.load(member, weights_only=True)
        found[int(directory.name.removeprefix("step-"))] = [parts[name] for name in sorted(parts)]
    return found


def check_group(folder: Path, plain: Path) -> None:
    """Check that a group's training equals that with torch.save, and has no leftovers."""
    assert losses(folder) == losses(plain)
    last = [STEPS - SAVE_EVERY, STEPS]
    assert names(folder) == ["losses.txt", *(f"step-{step:010d}" for step in last)]
    for step, objects in checkpoints(folder).items():
        assert len(objects) == RANKS
        for rank, loaded in enumerate(objects):
            assert_same(loaded, torch.load(plain / f"step-{step:06}-rank-{rank}.pt"))


@pytest.mark.long
def test_a_killed_group_has_the_losses_of_a_training_that_was_not(
    plain: Path, tmp_path: Path
) -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)  # shown if the test fails
    # The second save waits for the first.
    folder = killed(tmp_path, random.Random(seed), 2 * SAVE_EVERY + 1, GROUP)

    # Checkpoints with their final names must be complete, whatever was being written.
    found = checkpoints(folder)
    assert found
    assert all(len(objects) == RANKS for objects in found.values())

    output = finish(start(folder, GROUP, folder, *SIZE))
    assert f"resuming from step {max(found)}" in output
    check_group(folder, plain)


def run_pre_stop(stop_file: Path) -> None:
    """Run the container's preStop command without its sleep."""
    (container,) = kubernetes()["Job", "train"]["spec"]["template"]["spec"]["containers"]
    assert "--stop-file=/tmp/stop" in container["command"]
    *shell, script = container["lifecycle"]["preStop"]["exec"]["command"]
    touch, _rest = script.split("; sleep")
    subprocess.run([*shell, touch.replace("/tmp/stop", str(stop_file))], check=True)


@pytest.mark.parametrize(
    ("script", "by"),
    [
        pytest.param(PLAIN, "torchrun", marks=pytest.mark.long),
        pytest.param(OURS, "torchrun", marks=pytest.mark.long),
        pytest.param(OURS, "file", marks=pytest.mark.long),
        pytest.param(GROUP, "torchrun", marks=pytest.mark.long),
        (GROUP, "file"),
    ],
    ids=["plain-torchrun", "alone-torchrun", "alone-file", "group-torchrun", "group-file"],
)
@pytest.mark.slow
def test_a_training_that_is_told_to_end_saves_first(tmp_path: Path, script: Path, by: str) -> None:
    """Stop a training as Slurm and Kubernetes do, some time before they would kill it."""
    stop_file = tmp_path / "stop"
    options = [] if script == PLAIN else ["--stop-file", str(stop_file), "--deadline", "600"]
    size = (*SIZE, "--steps", "1000000", "--save-every", "1000000", *options)
    training = start(tmp_path, script, tmp_path, *size)
    try:
        wait_for_step(training, tmp_path, 3)
        if by == "file":
            run_pre_stop(stop_file)
        else:
            training.terminate()
        output, _ = training.communicate(timeout=TIMEOUT_S)
    finally:
        kill_all(training)
    assert training.returncode != 0  # it did not reach its last step
    step = len(losses(tmp_path))
    assert f"step {step}: loss" in output
    if script == GROUP:
        assert list(checkpoints(tmp_path)) == [step]
    else:
        stop_file.unlink(missing_ok=True)
        files = [f"step-{step:06}-rank-{rank}.pt" for rank in range(RANKS)]
        assert names(tmp_path) == ["losses.txt", *files]


def finish_all(launchers: Sequence[subprocess.Popen[str]]) -> str:
    """Wait for all launchers."""
    try:
        return "".join([finish(launcher) for launcher in launchers])
    finally:
        for launcher in launchers:
            kill_all(launcher)


@pytest.mark.long
def test_a_group_on_two_nodes(plain: Path, tmp_path: Path) -> None:
    """Start the script once for each node, as its docstring says."""
    meeting = f"localhost:{free_port()}"
    ranks = ("--nnodes", "2", "--nproc-per-node", str(RANKS // 2))
    place = ("--rdzv-backend", "c10d", "--rdzv-endpoint", meeting, "--rdzv-id", "two")
    launchers = [
        launch(tmp_path, *ranks, *place, GROUP, tmp_path, *SIZE, IOSHAPE_TEST_NODE=node)
        for node in ("first", "second")
    ]
    assert f"step {STEPS}: loss" in finish_all(launchers)
    check_group(tmp_path, plain)


def kubernetes() -> dict[tuple[str, str], dict[str, Any]]:
    """Return the objects by kind and name."""
    text = (ROOT / "examples" / "kubernetes_group.yaml").read_text(encoding="utf-8")
    objects = list(yaml.safe_load_all(text))
    return {(one["kind"], one["metadata"]["name"]): one for one in objects}


@pytest.mark.long
def test_the_kubernetes_job(plain: Path, tmp_path: Path) -> None:
    """Run the commands of the containers in processes of this host."""
    objects = kubernetes()
    pod = objects["Job", "train"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    nodes = objects["Job", "train"]["spec"]["completions"]
    first = f"train-0.{objects['Service', 'train']['metadata']['name']}:29400"
    torchrun, *arguments = container["command"]
    assert torchrun == "torchrun"
    # These parts of the command refer to the cluster, and are replaced.
    meeting = f"localhost:{free_port()}"
    folder = tmp_path / "train"
    folder.mkdir()
    stands_for = {
        first: meeting,
        "--nproc-per-node=4": f"--nproc-per-node={RANKS // nodes}",
        "/app/group_train.py": str(GROUP),
        "/checkpoints/train": str(folder),
        "/tmp/stop": str(tmp_path / "stop"),
    }
    text = "\n".join(arguments)
    for said, here in stands_for.items():
        assert text.count(said) == 1, said
        text = text.replace(said, here)
    settings = {variable["name"]: variable["value"] for variable in container["env"]}
    assert settings["IOSHAPE_COORDINATOR"] == "redis://coordinator"
    with running_redis() as redis:
        settings["IOSHAPE_COORDINATOR"] = redis.address
        launchers = [
            launch(tmp_path, *text.split("\n"), *SIZE, **settings, IOSHAPE_TEST_NODE=f"train-{pod}")
            for pod in range(nodes)
        ]
        output = finish_all(launchers)
    assert f"step {STEPS}: loss" in output
    check_group(folder, plain)


def test_the_parts_of_the_kubernetes_job_fit_together() -> None:
    objects = kubernetes()
    job = objects["Job", "train"]["spec"]
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    assert job["completionMode"] == "Indexed"
    assert job["completions"] == job["parallelism"]
    assert f"--nnodes={job['completions']}" in container["command"]
    assert ("Service", pod["subdomain"]) in objects
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    for mount in container["volumeMounts"]:
        claim = volumes[mount["name"]]["persistentVolumeClaim"]["claimName"]
        modes = objects["PersistentVolumeClaim", claim]["spec"]["accessModes"]
        assert modes == ["ReadWriteMany"]
    settings = {variable["name"]: variable["value"] for variable in container["env"]}
    # The library knows all settings, and the address is the service of the other part.
    known = {f"IOSHAPE_{name.upper()}" for name in ioshape.settings()}
    assert {name for name in settings if name.startswith("IOSHAPE_")} <= known
    redis = objects["Deployment", "coordinator"]["spec"]["template"]
    service = objects["Service", "coordinator"]["spec"]
    assert service["selector"].items() <= redis["metadata"]["labels"].items()
    for limited in (container, *redis["spec"]["containers"]):
        assert re.fullmatch(r"\d+[MG]i", limited["resources"]["limits"]["memory"])
    assert pod["terminationGracePeriodSeconds"] > 30  # torchrun gives its ranks 30 s


def test_the_scripts_differ_in_their_checkpoints_alone() -> None:
    """Check that comparing the scripts shows what ioshape changes, and little else."""
    changed = subprocess.run(
        [program("diff"), PLAIN, OURS], capture_output=True, text=True, check=False
    ).stdout.splitlines()
    added = [line for line in changed if line.startswith("> ")]
    assert any("ioshape.save_async" in line for line in added)
    assert len(added) <= 24


# ---- The program of docs/groups.md --------------------------------------------------------------

#: All ranks stop at this step, after the checkpoint BEFORE, until they are killed.
STOP_AT, BEFORE = 110, 99


def guide(folder: Path) -> Path:
    """Write the program of docs/groups.md so that it also stops at the step in STOP_AT."""
    page = (ROOT / "docs" / "groups.md").read_text(encoding="utf-8")
    programs = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    (text,) = (one for one in programs if "DistributedDataParallel" in one)
    due = "    if step % 20 == 19:\n"
    assert due in text
    stop = '    if str(step) == os.environ.get("STOP_AT"):\n        __import__("time").sleep(900)\n'
    file = folder / "guide.py"
    file.write_text(text.replace(due, stop + due), encoding="utf-8")
    return file


@pytest.mark.long
def test_the_ddp_guide_resumes_as_if_it_had_not_been_killed(tmp_path: Path) -> None:
    def run(folder: Path, ranks: int, **more: str) -> subprocess.Popen[str]:
        how = ("--standalone", "--nproc-per-node", str(ranks))
        return launch(folder, *how, guide(tmp_path), **more)

    undisturbed, killed = tmp_path / "undisturbed", tmp_path / "killed"
    for folder in (undisturbed, killed):
        folder.mkdir()
    finish(run(undisturbed, RANKS))
    training = run(killed, RANKS, STOP_AT=str(STOP_AT))
    end = time.monotonic() + TIMEOUT_S
    try:
        while not (killed / "checkpoints" / f"step-{BEFORE:010}").is_dir():
            assert training.poll() is None
            assert time.monotonic() < end
            time.sleep(0.1)
    finally:
        kill_all(training)
        training.communicate()
    alone = tmp_path / "alone"
    shutil.copytree(killed, alone)
    finish(run(killed, RANKS))
    wanted = ioshape.load_group(undisturbed / "checkpoints", rank=0)
    assert_same(ioshape.load_group(killed / "checkpoints", rank=0), wanted)
    assert wanted["step"] == 199
    # One of the two ranks has the model. Another number of ranks can continue from it.
    parts = ioshape.checkpoints(killed / "checkpoints")[-1].shards()
    assert parts[1].n_bytes < parts[0].n_bytes / 4
    finish(run(alone, 1))
    found = ioshape.load_group(alone / "checkpoints")
    assert (found["step"], found["ranks"]) == (199, 1)
