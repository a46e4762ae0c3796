# SPDX-License-Identifier: Apache-2.0
"""Test dcp.async_save() with ioshape.dcp.Writer(optimizer=), which copies during training."""

import gc
import os
import pickle
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ioshape
import ioshape.dcp
import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoints import left_clean, wait_until
from dcp_states import assert_same, by_stock, entries
from ioshape._integrations.dcp import staging
from ioshape._native import lib

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is"),
    pytest.mark.skipif(
        not hasattr(dcp.state_dict_saver, "AsyncSaveResponse"),
        reason="this torch has no future of a copy",
    ),
]

LARGE = 3 << 18  # float32: 3 MiB


@pytest.fixture(autouse=True)
def _left_clean() -> Iterator[None]:
    with left_clean():
        yield


@pytest.fixture
def leisure(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Stop background copies until the event is set."""
    begin, copy = threading.Event(), staging._Later._copy_in_background

    def copy_later(self: Any) -> None:
        begin.wait(60)
        copy(self)

    monkeypatch.setattr(staging._Later, "_copy_in_background", copy_later)
    return begin


def trained() -> tuple[torch.nn.Parameter, torch.optim.Optimizer]:
    weight = torch.nn.Parameter(torch.arange(float(LARGE)))
    optimizer = torch.optim.AdamW([weight], lr=0.1)
    step(weight, optimizer)
    return weight, optimizer


def step(weight: torch.nn.Parameter, optimizer: torch.optim.Optimizer) -> None:
    loss: Any = (weight * 2).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def state_of(weight: torch.nn.Parameter, optimizer: Any, **more: Any) -> dict[str, Any]:
    return {"weight": weight.detach(), "moment": optimizer.state[weight]["exp_avg"], **more}


def copied(state: dict[str, Any]) -> dict[str, Any]:
    return {name: one.clone() for name, one in state.items()}


def begin(state: dict[str, Any], path: Path, **how: Any) -> Any:
    return dcp.async_save(state, storage_writer=ioshape.dcp.Writer(path, **how), no_dist=True)


def test_a_step_waits_for_the_copy_of_what_it_changes(
    leisure: threading.Event, tmp_path: Path
) -> None:
    weight, optimizer = trained()
    counter = torch.zeros(LARGE)
    state = state_of(weight, optimizer, counter=counter)
    was = copied(state)
    response = begin(state, tmp_path / "a", optimizer=optimizer)
    assert not response.staging_completion.done()
    counter += 1  # not in the optimizer, so it was copied before
    step(weight, optimizer)
    assert response.staging_completion.done()
    assert not torch.equal(weight, was["weight"])
    response.upload_completion.result(60)
    assert_same(by_stock(tmp_path / "a", was), was)
    leisure.set()


def test_it_is_copied_without_a_step(tmp_path: Path) -> None:
    weight, optimizer = trained()
    was = copied(state_of(weight, optimizer))
    begin(
        state_of(weight, optimizer), tmp_path / "a", optimizer=optimizer
    ).upload_completion.result(60)
    assert_same(by_stock(tmp_path / "a", was), was)


def test_a_loop_of_ones_own_says_when(leisure: threading.Event, tmp_path: Path) -> None:
    state = {"large": torch.ones(LARGE), "small": torch.ones(5)}
    was = copied(state)
    response = begin(state, tmp_path / "a", lazy=True)
    state["small"] += 1
    ioshape.before_step()
    state["large"] += 1
    response.upload_completion.result(60)
    assert_same(by_stock(tmp_path / "a", was), was)
    leisure.set()


def test_what_changes_too_early_fails_the_save(leisure: threading.Event, tmp_path: Path) -> None:
    weight, optimizer = trained()
    response = begin(state_of(weight, optimizer), tmp_path / "a", optimizer=optimizer)
    with torch.no_grad():
        weight[7] += 1
    leisure.set()
    # Ranks learn of the failure from each other. A rank without a copy would miss the save.
    assert response.staging_completion.exception(60) is None
    failed = response.upload_completion.exception(60)
    assert isinstance(failed, dcp.CheckpointException)
    error = failed.failures[0][0]
    assert isinstance(error, ioshape.StorageError)
    assert isinstance(pickle.loads(pickle.dumps(error)), ioshape.StorageError)
    assert str(error).startswith(f'cannot save "{tmp_path / "a"}": a tensor of shape ({LARGE},)')
    assert "before_step" in str(error)
    assert not entries(tmp_path)


def test_a_writer_whose_save_has_failed_saves_again(
    leisure: threading.Event, tmp_path: Path
) -> None:
    state = {"large": torch.ones(LARGE)}
    writer = ioshape.dcp.Writer(tmp_path / "a", lazy=True)
    responses: list[Any] = []
    for factor in (1, 2):
        state["large"].fill_(factor)
        responses.append(dcp.async_save(state, storage_writer=writer, no_dist=True))
        if factor == 1:
            state["large"] += 1
            leisure.set()
            assert responses[0].upload_completion.exception(60) is not None
    responses[1].upload_completion.result(60)
    assert_same(by_stock(tmp_path / "a", state), state)


def test_an_interrupt_while_a_step_waits_loses_nothing(
    leisure: threading.Event, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"large": torch.arange(float(LARGE))}
    response = begin(state, tmp_path / "a", lazy=True)

    class Interrupting:
        """The library, whose first copy is followed by Ctrl-C."""

        def __getattr__(self, name: str) -> Any:
            return getattr(lib, name)

        def base_copier_copy(self, *how: Any) -> None:
            monkeypatch.setattr(staging, "lib", lib)
            lib.base_copier_copy(*how)
            raise KeyboardInterrupt

    monkeypatch.setattr(staging, "lib", Interrupting())
    with pytest.raises(KeyboardInterrupt):
        ioshape.before_step()
    assert not response.staging_completion.done()
    leisure.set()
    response.upload_completion.result(60)
    assert_same(by_stock(tmp_path / "a", state), state)


def test_where_no_thread_may_start_it_is_copied_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def starting(self: threading.Thread) -> None:
        if self.name == "ioshape":
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", starting)
    state = {"large": torch.ones(LARGE)}
    response = begin(state, tmp_path / "a", lazy=True)
    assert response.staging_completion.done()
    state["large"] += 1
    response.upload_completion.result(60)
    assert_same(by_stock(tmp_path / "a", state), {"large": torch.ones(LARGE)})


def test_memory_is_kept_for_the_next_copy(tmp_path: Path) -> None:
    weight, optimizer = trained()
    state = state_of(weight, optimizer)
    writer = ioshape.dcp.Writer(tmp_path / "a", optimizer=optimizer)
    places = []
    gc.collect()
    staging._free.clear()
    for _ in range(2):
        staged = writer.stage(state).result(60)
        places.append({one.data_ptr() for one in staged.values()})
        del staged
        # The copying thread holds the memory slightly longer.
        wait_until(lambda: len(staging._free.get(4 * LARGE, [])) >= 2, "memory is given back")
    assert places[0] == places[1]


def test_a_child_does_not_wait_for_a_copy_of_its_parent(
    leisure: threading.Event, tmp_path: Path
) -> None:
    response = begin({"large": torch.ones(LARGE)}, tmp_path / "a", lazy=True)
    child = os.fork()
    if not child:
        ioshape.before_step()
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    leisure.set()
    response.upload_completion.result(60)


def test_a_torch_that_waits_for_no_future_gets_a_copy(
    leisure: threading.Event, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("torch.distributed.checkpoint.state_dict_saver.AsyncSaveResponse")
    tensor = torch.ones(LARGE)
    staged = ioshape.dcp.Writer(tmp_path / "a", lazy=True).stage({"large": tensor})
    tensor += 1
    assert torch.equal(staged["large"], torch.ones(LARGE))
    leisure.set()


def test_what_has_no_steps_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="before_step"):
        ioshape.dcp.Writer(tmp_path / "a", optimizer=object())


def test_the_process_that_writes_needs_no_optimizer(tmp_path: Path) -> None:
    _, optimizer = trained()
    writer = ioshape.dcp.Writer(tmp_path / "a", optimizer=optimizer)
    assert len(pickle.dumps(writer)) < LARGE
