# SPDX-License-Identifier: Apache-2.0
"""Stale bytes are noticed: all large storages of a save equal those of the previous one."""

import copy
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ioshape
import pytest
import torch
from checkpoints import left_clean
from ioshape._native import lib
from nodes import run_ranks
from processes import run_program


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    with left_clean():
        yield


@pytest.fixture
def warned(caplog: pytest.LogCaptureFixture) -> Any:
    """Return a function that counts the warnings in the log since its last call."""
    caplog.set_level(logging.DEBUG, logger="ioshape")

    def count() -> int:
        found = sum(one.levelno == logging.WARNING for one in caplog.records)
        caplog.clear()
        return found

    return count


def compared(caplog: pytest.LogCaptureFixture) -> tuple[int, int]:
    """Return the unchanged bytes and all bytes of large tensors, as the log has them."""
    lines = [one.getMessage() for one in caplog.records]
    found = [re.search(r": (\d+) of (\d+) bytes of large tensors", line) for line in lines]
    numbers = [(int(one[1]), int(one[2])) for one in found if one]
    return numbers[-1] if numbers else (0, 0)


class Training:
    """A model of 4 MiB, its optimizer, and other state that changes with every step."""

    def __init__(self) -> None:
        self.model = torch.nn.Linear(1024, 1024)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.step = 0

    def train(self) -> None:
        self.step += 1
        self.optimizer.zero_grad()
        self.model(torch.randn(4, 1024)).square().mean().backward()
        self.optimizer.step()

    def rest(self) -> dict[str, Any]:
        return {"step": self.step, "random": torch.get_rng_state(), "seen": torch.tensor(self.step)}

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            **self.rest(),
        }


def test_training_that_goes_on_is_not_told(
    tmp_path: Path, warned: Any, caplog: pytest.LogCaptureFixture
) -> None:
    training = Training()
    ioshape.save(training.state(), tmp_path / "model-0.pt")
    for _ in range(3):
        training.train()
        report = ioshape.save(training.state(), tmp_path / f"model-{training.step}.pt")
        same, of_all = compared(caplog)
        assert same == 0
        assert of_all > 4 << 20
        assert not report.alarms
    assert not warned()


def test_a_state_dict_that_was_taken_once_is_told(tmp_path: Path, warned: Any) -> None:
    training = Training()
    training.train()
    taken = copy.deepcopy(training.state())
    for times in range(3):
        training.train()
        state = {**taken, **training.rest()}
        report = ioshape.save(state, tmp_path / f"model-{training.step}.pt")
        assert report.alarms == (("unchanged",) if times else ())
        assert warned() == (times > 0)


def test_a_model_that_is_stale_beside_a_live_optimizer_is_not_told_but_counted(
    tmp_path: Path, warned: Any, caplog: pytest.LogCaptureFixture
) -> None:
    training = Training()
    training.train()
    model = copy.deepcopy(training.model.state_dict())
    for times in range(2):
        training.train()
        report = ioshape.save({**training.state(), "model": model}, tmp_path / "last.pt")
        same, of_all = compared(caplog)
        assert same == (times and model["weight"].nbytes)
        assert not report.alarms
    assert 0 < same < of_all
    assert not warned()


def test_what_a_patched_torch_saves_is_told(tmp_path: Path, warned: Any) -> None:
    state = Training().state()
    with ioshape.patched():
        torch.save(state, tmp_path / "model-1.pt")
        torch.save(state, tmp_path / "model-2.pt")
    assert warned() == 1


def test_a_stock_file_that_is_saved_again_is_not_told(tmp_path: Path, warned: Any) -> None:
    path = tmp_path / "best.pt"
    torch.save(Training().state(), path)
    state = ioshape.load(path)
    for _ in range(2):
        assert not ioshape.save(state, path).alarms
    state["step"] += 1
    assert ioshape.save(state, path).alarms == ("unchanged",)
    assert warned() == 1


@pytest.mark.slow
def test_who_has_not_set_logging_up_reads_it_on_stderr(tmp_path: Path) -> None:
    done = run_program(
        tmp_path,
        """
        import ioshape
        import torch

        state = {"weights": torch.ones(1 << 20)}
        ioshape.save(state, "model-1.pt")
        ioshape.save(state, "model-2.pt")
        """,
    )
    lines = done.stderr.splitlines()
    assert len(lines) == 1
    assert "model-2.pt" in lines[0]
    assert "model-1.pt" in lines[0]


# ---- Groups --------------------------------------------------------------------------------------

RANKS = """
from group_program import *

if arguments[2:]:
    set_up_distributed()
directory, mode = arguments[:2]


def save(state, step, **more):
    try:
        report = ioshape.save_group({**state, "step": step}, directory, step, mode=mode, **more)
    except ioshape.StorageError as error:
        say("saved", step=step, code=error.code, failed=error.rank)
    else:
        say("saved", step=step, code=0, told=report.alarms == ("unchanged",))


state = object_of(rank, 1, 2_000_000)
save(state, 1)
save(state, 2)
if rank == 1:
    state["data"][0] ^= 1
save(state, 3)
ioshape.configure(examine="unchanged=fail")  # begins anew
found = ioshape.load_group(directory)
if rank != 1:
    found["data"][0] ^= 1
save(found, 4)
found["data"][1] ^= 1
save(found, 5)
"""


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["each", "node", "rank0"])
def test_each_rank_compares_its_own_part(tmp_path: Path, mode: str) -> None:
    said = run_ranks(
        *(tmp_path, RANKS, tmp_path / "run", mode),
        *(["gloo"] if mode == "rank0" else []),
        ranks=3,
        nodes=2,
    )
    for rank, lines in enumerate(said):
        saved = {line["step"]: line for line in lines if line["event"] == "saved"}
        assert [saved[step]["code"] for step in (1, 2, 3, 5)] == [0, 0, 0, 0]
        assert not saved[1]["told"]
        assert saved[2]["told"]
        assert saved[3]["told"] == (rank != 1)
        # The shard of one rank is stale, so the checkpoint fails on all ranks.
        assert (saved[4]["code"], saved[4]["failed"]) == (lib.IOSHAPE_E_ALARM, 1)
        assert not saved[5]["told"]
    steps = sorted(path.name for path in (tmp_path / "run").glob("*"))
    assert steps == [f"step-{step:010d}" for step in (1, 2, 3, 5)]
