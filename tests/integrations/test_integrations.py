# SPDX-License-Identifier: Apache-2.0
"""Test what "ioshape run" does for packages that write checkpoints: our integrations and others."""

import json
import os
import subprocess
import sysconfig
from pathlib import Path

import pytest
import safetensors
import torch
import torch.distributed as dist
from processes import TIMEOUT_S, common_forker, run_program

COMMAND = Path(sysconfig.get_path("scripts")) / "ioshape"


def run(folder: Path, text: str, packages: Path) -> subprocess.CompletedProcess[str]:
    (folder / "script.py").write_text(text, encoding="utf-8")
    return subprocess.run(
        [COMMAND, "run", "script.py"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(packages), "IOSHAPE_TRACE": str(folder / "trace")},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=True,
    )


def forked(folder: Path, text: str) -> str:
    """Run a script that needs no other packages. Return its stderr."""
    variables = {"IOSHAPE_TRACE": str(folder / "trace")}
    forker = common_forker(under_run=True)
    return run_program(folder, text, variables=variables, forker=forker).stderr


def saved_by_us(folder: Path) -> set[str]:
    lines = [
        json.loads(line)
        for file in (folder / "trace").iterdir()
        for line in file.read_text().splitlines()
    ]
    return {Path(line["path"]).name for line in lines}


def installed(
    folder: Path, name: str, version: str, files: dict[str, str], points: str = ""
) -> Path:
    """Write a package as pip would install it."""
    for file, content in files.items():
        path = folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    about = folder / f"{name}-{version}.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (about / "entry_points.txt").write_text(points)
    return folder


# ---- Integrations of ioshape --------------------------------------------------------------------


@pytest.mark.slow
def test_safetensors_files_of_dcp_are_ours(tmp_path: Path) -> None:
    errors = forked(
        tmp_path,
        """
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import hf_storage
state = {"weight": torch.arange(100_000.0), "bias": torch.ones(3)}
writer = hf_storage.HuggingFaceStorageWriter("model", fqn_to_index_mapping={"weight": 1, "bias": 2})
dcp.save(state, storage_writer=writer)
loaded = {name: torch.zeros_like(one) for name, one in state.items()}
dcp.load(loaded, storage_reader=hf_storage.HuggingFaceStorageReader("model"))
assert all(torch.equal(loaded[name], state[name]) for name in state)
""",
    )
    assert "ioshape" not in errors
    names = {
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    }
    assert {path.name for path in (tmp_path / "model").iterdir()} == names
    assert saved_by_us(tmp_path) == names
    index = json.loads((tmp_path / "model" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == {"weight", "bias"}


# Two processes save the shards, and one of them makes whole files of the shards.
_EXPORT = """
import json, os
import torch, torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageWriter, consolidate_safetensors_files
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
import ioshape
rank = 0 if (child := os.fork()) else 1
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{os.getcwd()}/met", rank=rank, world_size=2)
mesh = init_device_mesh("cpu", (2,))
torch.manual_seed(1)
table = torch.randn(1003, 771)
whole = {"rows": table, "columns": table * 2, "plain": torch.arange(5.0)}
state = {
    "rows": distribute_tensor(whole["rows"], mesh, [Shard(0)]),
    "columns": distribute_tensor(whole["columns"], mesh, [Shard(1)]),
    "plain": whole["plain"],
}
files = {"rows": 1, "columns": 2, "plain": 2}
dcp.save(state, storage_writer=HuggingFaceStorageWriter("shards", files, save_distributed=True))
if rank == 0:
    os.mkdir("model")
    with open("model/config.json", "w") as config:
        config.write("{}")
    with ioshape.directory("model") as folder:
        consolidate_safetensors_files("shards", folder, files)
together = HuggingFaceStorageWriter(
    "together", files, save_distributed=True, enable_consolidation=True
)
dcp.save(state, storage_writer=together)
dist.barrier()
dist.destroy_process_group()
if rank == 0:
    torch.save(whole, "whole.pt")
    assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.skipif(
    not dist.is_available() or not dist.is_gloo_available(), reason="this torch has no gloo"
)
def test_ranks_export_one_directory_in_the_format_of_hugging_face(tmp_path: Path) -> None:
    assert "ioshape" not in forked(tmp_path, _EXPORT)
    whole = torch.load(tmp_path / "whole.pt")
    files = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    for folder in (tmp_path / "model", tmp_path / "together"):
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        assert sorted(set(index["weight_map"].values())) == files
        assert set(index["weight_map"]) == set(whole)
        for name, file in index["weight_map"].items():
            with safetensors.safe_open(folder / file, "pt") as opened:
                assert torch.equal(opened.get_tensor(name), whole[name])
    assert (tmp_path / "model" / "config.json").read_text() == "{}"
    shards = {path.name for path in (tmp_path / "shards").iterdir()}
    assert shards == {path.name for path in (tmp_path / "together" / "sharded").iterdir()}
    assert len(shards) == 4
    assert saved_by_us(tmp_path) == {*shards, "whole.pt"}


def test_the_usual_storage_of_torch_checkpointing_is_ours(tmp_path: Path) -> None:
    pytest.importorskip("torch_checkpointing")
    errors = forked(
        tmp_path,
        """
import torch
import torch_checkpointing as package
save = package.SyncCheckpointSaverConfig()
manager = package.CheckpointManager(package.CheckpointManager.Config(save=save))
manager.save("checkpoint", {"weight": torch.arange(100_000.0)})
loaded = manager.load("checkpoint", into={"weight": torch.zeros(100_000)})
assert torch.equal(loaded["weight"], torch.arange(100_000.0))
""",
    )
    assert "ioshape" not in errors
    files = {path.name for path in (tmp_path / "checkpoint").rglob("*") if path.is_file()}
    assert files == saved_by_us(tmp_path)


# ---- Untested versions --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "is_tested"),
    [("0.5.0", True), ("0.9.1rc1", True), ("0.4.9", False), ("1.0", False), ("2.0.dev1", False)],
)
def test_a_version_that_was_not_tried_writes_by_itself(
    tmp_path: Path, version: str, is_tested: bool
) -> None:
    site = installed(
        tmp_path / "site",
        "safetensors",
        version,
        {"safetensors/__init__.py": "def serialize_file(*all): pass\nkept = serialize_file\n"},
    )
    name = "import safetensors; print(safetensors.serialize_file.__module__)"
    done = run(tmp_path, name, site)
    if is_tested:
        assert not done.stderr
    else:
        assert (
            f"ioshape does not handle saves of safetensors {version}: it was tested with "
            "safetensors 0.5 and newer, before 1; install one of these, or a newer ioshape"
        ) in done.stderr


# ---- Integrations in other packages -------------------------------------------------------------

THEIRS = """
def follow(module, *, load):
    module.save = lambda: f"saved by us, load={load}"
"""


def test_packages_of_others_may_be_called_too(tmp_path: Path) -> None:
    points = "[ioshape.integrations]\ntrainer.io = for_trainer:follow\n"
    files = {"trainer/__init__.py": "", "trainer/io.py": "def save(): return 'as ever'\n"}
    site = installed(tmp_path / "site", "trainer", "1", files)
    script = "import sys, trainer.io; print(trainer.io.save(), 'torch' in sys.modules)"
    assert run(tmp_path, script, site).stdout == "as ever False\n"
    installed(site, "for-trainer", "1", {"for_trainer.py": THEIRS}, points)
    assert run(tmp_path, script, site).stdout == "saved by us, load=True False\n"


def test_one_that_fails_stops_nothing(tmp_path: Path) -> None:
    points = "[ioshape.integrations]\ntrainer = for_trainer:gone\n"
    files = {"trainer.py": "", "for_trainer.py": ""}
    site = installed(tmp_path / "site", "trainer", "1", files, points)
    done = run(tmp_path, "import trainer; print('trained')", site)
    assert done.stdout == "trained\n"
    assert "ioshape: saves of trainer were not replaced in process" in done.stderr
    assert "gone" in done.stderr
