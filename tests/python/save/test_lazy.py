# SPDX-License-Identifier: Apache-2.0
"""save_async(..., optimizer=) and lazy=True: the file has the state at the time of the call."""

import copy
import gc
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ioshape
import pytest
import torch
from checkpoints import left_clean
from processes import run_program

WIDTH = 700
LARGE = 1 << 20


@pytest.fixture(autouse=True)
def _left_clean() -> Iterator[None]:
    with left_clean():
        yield


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def where(request: pytest.FixtureRequest) -> Iterator[str]:
    """Create all tensors of a test on this device."""
    with torch.device(request.param):
        yield request.param


def network() -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Sequential(
        torch.nn.Linear(WIDTH, WIDTH),
        torch.nn.BatchNorm1d(WIDTH),
        torch.nn.ReLU(),
        torch.nn.Linear(WIDTH, WIDTH),
    )


def go(model: torch.nn.Module, scale: float = 1.0) -> None:
    """Run forward and backward."""
    (model(torch.randn(16, WIDTH)).square().mean() * scale).backward()


def state_of(model: torch.nn.Module, *optimizers: Any, **more: Any) -> dict[str, Any]:
    return {
        "model": model.state_dict(),
        "optimizers": [one.state_dict() for one in optimizers],
        **more,
    }


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


class Saver:
    """Saves in a loop, and comparisons of all files at the end."""

    def __init__(self, folder: Path, **how: Any) -> None:
        self._folder = folder
        self._how = how
        self._saved: list[tuple[ioshape.SaveHandle, Any]] = []

    def save(self, state: dict[str, Any]) -> ioshape.SaveHandle:
        was = copy.deepcopy(state)
        handle = ioshape.save_async(state, self._folder / f"{len(self._saved)}.pt", **self._how)
        self._saved.append((handle, was))
        return handle

    def check(self) -> None:
        assert self._saved
        for handle, was in self._saved:
            handle.wait()
            assert same(ioshape.load(handle.path), was)


# ---- Loops ---------------------------------------------------------------------------------------

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.1),
    "foreach": lambda params: torch.optim.AdamW(params, lr=0.1, foreach=True),
    "fused": lambda params: torch.optim.AdamW(params, lr=0.1, fused=True),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.usefixtures("where")
def test_a_loop_saves_what_there_was_at_the_call(name: str, tmp_path: Path) -> None:
    """Check buffers that change in each forward pass, and gradients that accumulate."""
    model = network()
    optimizer = OPTIMIZERS[name](model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    saver = Saver(tmp_path, optimizer=optimizer)
    counter = torch.zeros(LARGE)
    for step in range(6):
        saver.save(state_of(model, optimizer, schedule=schedule.state_dict(), counter=counter))
        counter += 1
        go(model, 0.5)
        go(model, 0.5)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if step % 2:
            # The step follows the call immediately.
            saver.save(state_of(model, optimizer, schedule=schedule.state_dict()))
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    saver.check()


@pytest.mark.usefixtures("where")
def test_several_optimizers_wait_each(tmp_path: Path) -> None:
    models = [network(), network()]
    optimizers = [torch.optim.AdamW(one.parameters(), lr=0.1) for one in models]
    saver = Saver(tmp_path, optimizer=optimizers)
    for _ in range(3):
        for one in models:
            go(one)
        saver.save({"models": [one.state_dict() for one in models]})
        for optimizer in reversed(optimizers):
            optimizer.step()
    saver.check()


def test_a_step_that_the_scaler_leaves_out_changes_nothing(where: str, tmp_path: Path) -> None:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(where, init_scale=4.0)
    saver = Saver(tmp_path, optimizer=optimizer)
    for step in range(4):
        scaler.scale(model(torch.randn(16, WIDTH)).square().mean()).backward()
        if step == 1:
            next(model.parameters()).grad[0, 0] = float("inf")  # type: ignore[index]
        saver.save(state_of(model, optimizer, scaler=scaler.state_dict()))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    saver.check()


@pytest.mark.usefixtures("where")
def test_averages_that_follow_the_step_are_copied_at_once(tmp_path: Path) -> None:
    model = network()
    average = torch.optim.swa_utils.AveragedModel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    saver = Saver(tmp_path, optimizer=optimizer)
    for _ in range(4):
        go(model)
        saver.save(state_of(model, optimizer, average=average.state_dict()))
        average.update_parameters(model)  # before the step, so no hook has waited
        optimizer.step()
        optimizer.zero_grad()
    saver.check()


@pytest.mark.usefixtures("where")
def test_what_needs_no_gradient_is_copied_at_once(tmp_path: Path) -> None:
    model = network()
    frozen = next(model.parameters())
    frozen.requires_grad = False
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    saver = Saver(tmp_path, optimizer=optimizer)
    for _ in range(3):
        go(model)
        saver.save(state_of(model, optimizer))
        with torch.no_grad():
            frozen.add_(1)
        optimizer.step()
    saver.check()


@pytest.mark.usefixtures("where")
def test_part_of_a_storage_that_others_have_is_copied_at_once(tmp_path: Path) -> None:
    flat = torch.zeros(2 * LARGE)
    parameter = torch.nn.Parameter(flat[:LARGE])
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    parameter.grad = torch.ones(LARGE)
    saver = Saver(tmp_path, optimizer=optimizer)
    for _ in range(3):
        saver.save({"flat": flat, "parameter": parameter.detach()})
        flat[LARGE:] += 1
        optimizer.step()
    saver.check()


@pytest.mark.slow
@pytest.mark.usefixtures("where")
def test_a_loop_of_ones_own_says_when(tmp_path: Path) -> None:
    weight, small = torch.zeros(16, LARGE), torch.zeros(10)
    saver = Saver(tmp_path, lazy=True)
    for _ in range(4):
        saver.save({"weight": weight, "small": small})
        small += 1
        ioshape.before_step()
        weight += 1
    saver.check()
    ioshape.before_step()  # no save is waiting for its copy


def test_who_is_to_be_called_does_not_wait(tmp_path: Path) -> None:
    """Check that callbacks need no step.

    Neither the callback nor an await blocks the caller: a thread waits until the data is copied.
    """
    ended = threading.Event()
    handle = ioshape.save_async({"weight": torch.zeros(64, LARGE)}, tmp_path / "a.pt", lazy=True)
    handle.add_done_callback(lambda _: ended.set())
    assert ended.wait(120)
    assert handle.result().hook_s == 0


#: Saves on one processor beside programs that never sleep.
ON_A_BUSY_PROCESSOR = f"""
import os
import threading
import ioshape
import torch

os.sched_setaffinity(0, {{min(os.sched_getaffinity(0))}})
saver = os.getpid()
for _ in range(8):
    if not os.fork():
        while os.getppid() == saver:
            pass
        os._exit(0)
ended = threading.Event()
handle = ioshape.save_async({{"weight": torch.zeros(64, {LARGE})}}, "a.pt", lazy=True)
handle.add_done_callback(lambda _: ended.set())
assert ended.wait(120)
"""


@pytest.mark.long  # the copying has some seconds before it is helped
def test_busy_processors_do_not_keep_a_save_from_ending(tmp_path: Path) -> None:
    """Check that the thread of the lowest priority is helped if it hardly ever runs."""
    run_program(tmp_path, ON_A_BUSY_PROCESSOR)


# ---- Failures ------------------------------------------------------------------------------------


def test_what_has_no_steps_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="before_step"):
        ioshape.save_async({}, tmp_path / "a.pt", optimizer=object())
    with pytest.raises(ValueError, match="empty"):
        ioshape.save_async({}, tmp_path / "a.pt", optimizer=[])
    assert not list(tmp_path.iterdir())


def test_an_optimizer_goes_when_nobody_has_it(tmp_path: Path) -> None:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    ioshape.save_async(state_of(model), tmp_path / "a.pt", optimizer=optimizer).wait()
    go(model)
    optimizer.step()
    copied = copy.deepcopy(optimizer)  # a copy of the optimizer has no hooks
    copied.step()
    gone = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert gone() is None


def test_a_child_does_not_wait_for_saves_of_its_parent(tmp_path: Path) -> None:
    weight = torch.zeros(16, LARGE)
    handle = ioshape.save_async({"weight": weight}, tmp_path / "a.pt", lazy=True)
    child = os.fork()
    if not child:
        ioshape.before_step()
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    handle.wait()


# ---- Reports -------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.usefixtures("where")
def test_the_report_says_what_it_cost(tmp_path: Path) -> None:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(10):
        go(model)
        optimizer.step()
    weight = torch.zeros(64, LARGE)
    handle = ioshape.save_async(
        state_of(model, optimizer, weight=weight), tmp_path / "b.pt", optimizer=optimizer
    )
    steps = 0
    while not handle.done() or steps < 3:
        go(model)
        optimizer.step()
        steps += 1
    report = handle.result()
    assert report.hook_s > 0
    assert report.stage_s > 0
    assert "hook" in str(report)
