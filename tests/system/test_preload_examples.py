# SPDX-License-Identifier: Apache-2.0
"""The examples that preload the library in a whole cluster do what their comments say."""

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]
from coordinators import await_true
from preloaded import LIBRARY, NO_SLOT, preload, turns
from processes import environment
from slurm import running_slurm, unavailable
from tree import ROOT, build_folder, program

PROLOG = ROOT / "examples" / "slurm_task_prolog.sh"
MANIFEST = ROOT / "examples" / "kubernetes_preload.yaml"
N_BYTES = 4 << 20


def exported(**variables: str) -> dict[str, str]:
    """Return the variables that the task prolog of Slurm exports."""
    given = {"SLURM_JOB_USER": "user", "SLURM_JOB_PARTITION": "all", **variables}
    done = subprocess.run(
        [PROLOG],
        env=environment(LIBRARY=str(build_folder() / LIBRARY), COORDINATOR="open", **given),
        capture_output=True,
        text=True,
        check=True,
    )
    assert not done.stderr
    lines = [line.removeprefix("export ").partition("=") for line in done.stdout.splitlines()]
    return {name: value for name, _, value in lines}


def test_the_task_prolog_of_slurm_makes_programs_take_turns(tmp_path: Path) -> None:
    # environment() sets a coordinator, which the prolog leaves alone.
    found = exported(**preload(tmp_path) | {"LD_PRELOAD": ""})
    assert "IOSHAPE_COORDINATOR" not in found
    variables = {**preload(tmp_path), **found}
    (tmp_path / "from").write_bytes(bytes(N_BYTES))
    command = [program("cp"), "--reflink=never", "--sparse=never", "from", "to"]
    subprocess.run(command, cwd=tmp_path, env=environment(**variables), check=True)
    await_true(lambda: turns(tmp_path) != [], "the line of the log")
    (turn,) = turns(tmp_path)
    assert (turn.program, turn.path) == ("cp", str(tmp_path / "to"))
    assert turn.end not in NO_SLOT


def test_the_task_prolog_of_slurm_keeps_what_a_job_preloads() -> None:
    assert exported(LD_PRELOAD="libm.so.6")["LD_PRELOAD"].split(":") == [
        "libm.so.6",
        str(build_folder() / LIBRARY),
    ]


@pytest.mark.parametrize(
    "variables",
    [
        {"IOSHAPE_PRELOAD": "off"},
        {"SLURM_JOB_USER": "backup"},
        {"SLURM_JOB_PARTITION": "debug"},
        {"LIBRARY": "/missing/libioshape-preload.so"},
    ],
    ids=["job", "user", "partition", "no library"],
)
def test_the_task_prolog_of_slurm_leaves_these_tasks_alone(variables: dict[str, str]) -> None:
    given = {"SLURM_JOB_USER": "user", "SLURM_JOB_PARTITION": "all", **variables}
    library = {"LIBRARY": str(build_folder() / LIBRARY), **given}
    done = subprocess.run([PROLOG], env=environment(**library), capture_output=True, check=True)
    assert (done.stdout, done.stderr) == (b"", b"")


@pytest.mark.long
@pytest.mark.skipif(bool(unavailable()), reason=unavailable())
def test_tasks_of_a_real_slurm_take_turns(tmp_path: Path) -> None:
    (tmp_path / "slurm").mkdir()
    (tmp_path / "from").write_bytes(bytes(N_BYTES))
    text = PROLOG.read_text(encoding="utf-8").replace(" root backup ", " backup ")
    variables = {
        **preload(tmp_path),
        "LD_PRELOAD": "",
        "LIBRARY": str(build_folder() / LIBRARY),
    }
    command = f"cp --reflink=never --sparse=never {tmp_path}/from {tmp_path}/to"
    with running_slurm(tmp_path / "slurm", "#!/bin/sh\n", text) as cluster:
        job = cluster.submit(tmp_path, variables, "--wrap", f"srun {command}")
        cluster.wait_for(job, "the end", lambda state: state["JobState"] == "COMPLETED")
        await_true(lambda: turns(tmp_path) != [], "the line of the log")
    assert [turn.path for turn in turns(tmp_path) if turn.program == "cp"] == [str(tmp_path / "to")]


# ---- Kubernetes ----------------------------------------------------------------------------------


def pod_of(kind: str) -> dict[str, Any]:
    manifests = yaml.safe_load_all(MANIFEST.read_text(encoding="utf-8"))
    (spec,) = [one["spec"]["template"]["spec"] for one in manifests if one["kind"] == kind]
    return dict(spec)


def test_pods_of_kubernetes_mount_what_the_nodes_have() -> None:
    nodes, job = pod_of("DaemonSet"), pod_of("Job")
    (node,) = nodes["volumes"]
    (writer,) = job["containers"]
    volumes = {one["name"]: one for one in job["volumes"]}
    mounts = {one["name"]: one for one in writer["volumeMounts"]}
    variables = {one["name"]: one["value"] for one in writer["env"]}
    assert set(mounts) == set(volumes)
    assert volumes["ioshape"]["hostPath"]["path"] == node["hostPath"]["path"]
    assert mounts["ioshape"]["readOnly"]
    assert job["shareProcessNamespace"]
    assert variables["LD_PRELOAD"].startswith(mounts["ioshape"]["mountPath"] + "/current/")


def test_the_nodes_of_kubernetes_get_the_library_of_the_package(tmp_path: Path) -> None:
    """Run the command of the DaemonSet twice, on a folder of the test."""
    (copy,) = pod_of("DaemonSet")["initContainers"]
    (writer,) = pod_of("Job")["containers"]
    node = tmp_path / "node"
    node.mkdir()
    for _ in range(2):
        command = [word.replace("/node", str(node)) for word in copy["command"]]
        subprocess.run(command, env=environment(), check=True)
    path = next(one["value"] for one in writer["env"] if one["name"] == "LD_PRELOAD")
    library = Path(path.replace("/opt/ioshape", str(node)))
    assert library.is_file()
    assert os.access(library.with_name("ioshape-holder"), os.X_OK)
    assert len(list(node.glob("version-*"))) == len(list(node.glob("*"))) - 1
