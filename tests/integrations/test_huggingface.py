# SPDX-License-Identifier: Apache-2.0
"""Test that directories by transformers, accelerate and huggingface_hub appear complete."""

import json
import socket
import subprocess
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import frameworks
import hugging_kills
import hugging_train
import ioshape
import pytest
import torch
from ioshape._integrations.huggingface import patching
from ioshape._integrations.huggingface.whole import Whole, filling_in
from ioshape._save.collected import in_background
from processes import Forker, Program, environment
from records import is_ours, names_in
from safetensors.torch import load_file

pytestmark = pytest.mark.slow

#: Processes import transformers, on a machine that may be busy.
TIMEOUT_S = 600

TRAINER_FILES = [
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "optimizer.pt",
    "rng_state.pth",
    "scheduler.pt",
    "trainer_state.json",
    "training_args.bin",
]


def python_with_transformers() -> str:
    try:
        return str(frameworks.environment("transformers"))
    except frameworks.CannotInstall as reason:
        pytest.skip(str(reason))


class Turn(NamedTuple):
    """The observations of the ranks of one training."""

    saving: list[list[str]]
    removing: list[list[str]]
    #: the error that each rank caught
    errors: list[str]


#: those that have the packages imported, by whether that was under `ioshape run`
_forkers: dict[bool, Forker] = {}


@pytest.fixture(scope="module", autouse=True)
def _forkers_end() -> Iterator[None]:
    yield
    for forker in _forkers.values():
        forker.close()
    _forkers.clear()


def _forker(*, under_run: bool) -> Forker:
    if under_run not in _forkers:
        modules = (
            *("accelerate", "torch._dynamo", "transformers.trainer"),
            "transformers.models.llama.modeling_llama",
        )
        python = python_with_transformers()
        _forkers[under_run] = Forker(modules, python=python, under_run=under_run)
    return _forkers[under_run]


def run(how: str, folder: Path, *steps: int, ranks: int = 1, ours: bool = True) -> list[Turn]:
    """Run the program with these numbers of steps, one after the other.

    Return what rank 0 of each has seen.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [hugging_train.__file__, how, str(folder), str(ranks), *map(str, steps)]
    variables = {
        "ACCELERATE_USE_CPU": "true",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    folder.mkdir(exist_ok=True)
    program = Program(folder, command, variables, _forker(under_run=ours))
    try:
        output, _ = program.end()
    finally:
        program.close()
    told = [json.loads(line) for line in output.splitlines() if line.startswith("[")]
    assert len(told) == ranks * len(steps)
    turns = [sorted(told[first : first + ranks]) for first in range(0, len(told), ranks)]
    return [Turn(**turn[0][1], errors=[error for _, _, error in turn]) for turn in turns]


# ---- Trainer ------------------------------------------------------------------------------------


def test_a_trainer_that_knows_nothing_of_us(tmp_path: Path) -> None:
    """Train with an unchanged Trainer, resume in another process, and compare with stock.

    Checkpoints must appear complete, and old ones must be removed last.
    """
    first, resumed = run("train", tmp_path / "ours", 6, 8)
    assert first.saving == [
        [],
        ["checkpoint-2"],
        ["checkpoint-2", "checkpoint-4"],
    ]
    assert first.removing == [["checkpoint-2", "checkpoint-4", "checkpoint-6"]]
    assert resumed.saving == [["checkpoint-4", "checkpoint-6"]]
    assert names_in(tmp_path / "ours") == ["checkpoint-6", "checkpoint-8"]
    for name in names_in(tmp_path / "ours"):
        assert names_in(tmp_path / "ours" / name) == TRAINER_FILES
        assert is_ours(tmp_path / "ours" / name / "optimizer.pt")
    run("train", tmp_path / "stock", 8, ours=False)
    for name, value in load_file(tmp_path / "stock/checkpoint-8/model.safetensors").items():
        there = load_file(tmp_path / "ours/checkpoint-8/model.safetensors")
        assert torch.equal(there[name], value), name


@pytest.mark.long
def test_the_best_checkpoint_is_known_and_stays(tmp_path: Path) -> None:
    run("train_with_best", tmp_path, 4)
    assert all(name.startswith("checkpoint-") for name in names_in(tmp_path))


@pytest.mark.long  # covered by test_a_trainer_in_the_background
def test_ranks_of_a_trainer_fill_one_checkpoint(tmp_path: Path) -> None:
    (seen,) = run("train", tmp_path, 4, ranks=2)
    assert seen.saving == [[], ["checkpoint-2"]]
    assert names_in(tmp_path) == ["checkpoint-2", "checkpoint-4"]
    names = [name for name in TRAINER_FILES if name != "rng_state.pth"]
    assert names_in(tmp_path / "checkpoint-4") == sorted(
        [*names, "rng_state_0.pth", "rng_state_1.pth"]
    )


@pytest.mark.long  # covered by test_a_checkpoint_that_fails_in_the_background
def test_a_rank_that_fails_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    (seen,) = run("train_and_fail", tmp_path, 4, ranks=2)
    assert names_in(tmp_path) == ["checkpoint-2"]
    assert "one rank has failed" in seen.errors[1]
    assert "rank 1 failed: one rank has failed" in seen.errors[0]


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.long), 2])
def test_a_trainer_in_the_background(ranks: int, tmp_path: Path) -> None:
    (seen,) = run("train_in_background", tmp_path, 6, ranks=ranks, ours=False)
    assert seen.removing == [["checkpoint-2", "checkpoint-4", "checkpoint-6"]]
    last = tmp_path / "checkpoint-6"
    assert len(names_in(tmp_path)) == 2
    of_ranks = ["rng_state.pth"] if ranks == 1 else ["rng_state_0.pth", "rng_state_1.pth"]
    names = [name for name in TRAINER_FILES if name != "rng_state.pth"]
    assert names_in(last) == sorted([*names, *of_ranks])
    assert is_ours(last / "optimizer.pt")


@pytest.mark.long
def test_a_checkpoint_that_fails_in_the_background(tmp_path: Path) -> None:
    (seen,) = run("train_in_background_and_fail", tmp_path, 4, ranks=2, ours=False)
    assert names_in(tmp_path) == ["checkpoint-2"]
    assert "File name too long" in seen.errors[1]
    assert "rank 1 failed" in seen.errors[0]


@pytest.mark.long  # covered by the campaign's kind "frameworks"
def test_killed_trainings_leave_the_newest_checkpoint_whole(tmp_path: Path) -> None:
    done = subprocess.run(
        [python_with_transformers(), hugging_kills.__file__, tmp_path, "5", "1"],
        env=environment(TRANSFORMERS_VERBOSITY="error"),
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout) <= 2  # leftovers of earlier kills were removed


# ---- accelerate ---------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.long), 2])
def test_states_that_accelerate_names(ranks: int, tmp_path: Path) -> None:
    (seen,) = run("accelerate_named", tmp_path, 4, ranks=ranks)
    names = [f"checkpoint_{number}" for number in range(4)]
    assert seen.saving == [[], names[:1], names[:2], names[1:3]]
    assert seen.removing == [names[:3], names[1:]]
    assert names_in(tmp_path) == ["checkpoints"]
    assert names_in(tmp_path / "checkpoints") == names[2:]
    of_ranks = [f"random_states_{rank}.pkl" for rank in range(ranks)]
    expected = ["model.safetensors", "optimizer.bin", *of_ranks]
    assert names_in(tmp_path / "checkpoints" / names[3]) == expected


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.long), 2])
def test_a_state_that_is_replaced(ranks: int, tmp_path: Path) -> None:
    run("accelerate_again", tmp_path, 3, ranks=ranks)
    assert names_in(tmp_path) == ["state"]
    of_ranks = [f"random_states_{rank}.pkl" for rank in range(ranks)]
    assert names_in(tmp_path / "state") == [
        "model.safetensors",
        "notes.txt",
        "optimizer.bin",
        *of_ranks,
    ]


@pytest.mark.long
def test_fsdp_of_accelerate(tmp_path: Path) -> None:
    (seen,) = run("accelerate_fsdp", tmp_path, 2, ranks=2)
    assert seen.saving == [["state-0"], ["state-0", "state-1"]]
    names = names_in(tmp_path / "state-1")
    assert names[:3] == ["optimizer_0", "pytorch_model_fsdp_0", "random_states_0.pkl"]


# ---- Sets of shards -----------------------------------------------------------------------------


def test_a_set_of_shards_replaces_another(tmp_path: Path) -> None:
    """Replace sets by models, huggingface_hub and accelerate, beside other files."""
    run("sets", tmp_path, 0)
    assert names_in(tmp_path) == ["hub", "model", "other"]
    assert len(names_in(tmp_path / "hub")) == 3


# ---- Patches, without the packages --------------------------------------------------------------


def test_a_transformers_that_is_too_old_stays_as_it_is() -> None:
    class WithMetrics:
        def _save_checkpoint(self, model: Any, trial: Any, metrics: Any = None) -> None: ...

    class Without:
        def _save_checkpoint(self, model: Any, trial: Any) -> None: ...

    rotates = {"rotate_checkpoints": print}
    for trainer, more in ((WithMetrics, rotates), (Without, {})):
        before = trainer._save_checkpoint
        module = types.SimpleNamespace(
            Trainer=trainer, TrainerState=object, PREFIX_CHECKPOINT_DIR="checkpoint", **more
        )
        with pytest.raises((TypeError, AttributeError), match="_checkpoint"):
            patching._patch_trainer(module)
        assert trainer._save_checkpoint is before


def test_paths_may_be_named(tmp_path: Path) -> None:
    path = str(tmp_path / "checkpoint-2")

    def save_to_json(json_path: str) -> str:
        return json_path

    with Whole(path) as whole:
        seen = patching._elsewhere(save_to_json, None, json_path=f"{path}/state.json")
        assert seen == f"{whole.folder}/state.json"
        whole.finish()
    assert patching._elsewhere(save_to_json, None, json_path=path) == path


def test_old_checkpoints_go_afterwards_however_the_directory_is_written(tmp_path: Path) -> None:
    with Whole(f"{tmp_path}/checkpoint-2") as whole:
        assert filling_in(f"{tmp_path}/") is whole
        whole.finish()


def test_a_directory_waits_for_the_saves_in_it(tmp_path: Path) -> None:
    value = torch.zeros(16 << 20)
    with Whole(str(tmp_path / "whole")) as whole:
        ioshape.save_async(value, f"{whole.folder}/a.pt")
        whole.finish()
    assert names_in(tmp_path / "whole") == ["a.pt"]
    with (
        ioshape.patched(),
        in_background(),
        patching._whole_set(tmp_path / "set") as folder,
    ):
        torch.save(value, f"{folder}/a.pt")
    assert names_in(tmp_path / "set") == ["a.pt"]


def test_what_has_no_number_is_no_old_checkpoint(tmp_path: Path) -> None:
    for name in ("best", "checkpoint_0", "checkpoint_1", "checkpoint_2"):
        (tmp_path / name).mkdir()
    patching._remove_old(str(tmp_path), str(tmp_path / "checkpoint_2"), 2)
    assert names_in(tmp_path) == ["best", "checkpoint_1", "checkpoint_2"]
