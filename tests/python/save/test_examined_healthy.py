# SPDX-License-Identifier: Apache-2.0
"""More than a hundred healthy trainings, of every usual kind, raise no alarm."""

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ioshape
import ioshape.dcp
import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoints import left_clean
from torch import nn

#: each kind of training is tried with two of them in the usual run
SEEDS = (0, 1, *(pytest.param(seed, marks=pytest.mark.long) for seed in (2, 3, 4)))
SIZE = 96  # weights of 36 KiB, which count as large in a file without larger ones
Step = Callable[[], dict[str, Any]]


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    with left_clean():
        yield


def mlp(dtype: torch.dtype = torch.float32) -> nn.Module:
    return nn.Sequential(nn.Linear(SIZE, SIZE), nn.Tanh(), nn.Linear(SIZE, SIZE)).to(dtype)


def updated(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Any = None) -> None:
    optimizer.zero_grad()
    first = next(model.parameters())
    inputs = torch.randn(4, SIZE, dtype=first.dtype) if inputs is None else inputs
    model(inputs).float().square().mean().backward()
    optimizer.step()


def trained(
    model: nn.Module, optimizer: Any = torch.optim.AdamW, rate: float = 1e-2, **options: Any
) -> Step:
    chosen = optimizer([p for p in model.parameters() if p.requires_grad], rate, **options)

    def step() -> dict[str, Any]:
        updated(model, chosen)
        return {"model": model.state_dict(), "optimizer": chosen.state_dict()}

    return step


# ---- Kinds of trainings: each returns a function that trains and returns the state --------------


def fresh() -> Step:
    step = trained(mlp())
    model = mlp()
    states = iter([{"model": model.state_dict(), "optimizer": {"state": {}, "param_groups": []}}])
    return lambda: next(states, None) or step()


def zero_initialised() -> Step:
    model = mlp()
    nn.init.zeros_(model[2].weight)  # type: ignore[index]
    return trained(model)


def momentum() -> Step:
    return trained(mlp(), torch.optim.SGD, momentum=0.9)


def half() -> Step:
    return trained(mlp(torch.bfloat16), rate=0.1)


def frozen_backbone() -> Step:
    """Train a small head above a large model that stands still."""
    model = nn.Sequential(
        nn.Linear(SIZE, 4 * SIZE), nn.Linear(4 * SIZE, 4 * SIZE), nn.Linear(4 * SIZE, 8)
    )
    for layer in list(model)[:2]:
        layer.requires_grad_(False)
    return trained(model)


class LoRA(nn.Module):
    """A frozen layer with an adapter of rank 4, whose second factor begins with zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(SIZE, SIZE).requires_grad_(False)
        self.a = nn.Parameter(torch.randn(4, SIZE))
        self.b = nn.Parameter(torch.zeros(SIZE, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        moved: torch.Tensor = self.base(x) + x @ self.a.t() @ self.b.t()
        return moved


def lora() -> Step:
    return trained(LoRA())


def lora_alone() -> Step:
    model = LoRA()
    step = trained(model)
    return lambda: {k: v for k, v in step()["model"].items() if k in "ab"}


def sparse() -> Step:
    """Prune most weights to zero."""
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    mask = torch.rand(SIZE, SIZE) > 0.95

    def step() -> dict[str, Any]:
        updated(model, optimizer)
        with torch.no_grad():
            model[0].weight.mul_(mask)  # type: ignore[index]
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "mask": mask}

    return step


def sparse_gradients() -> Step:
    """Train a few rows of an embedding; the other rows and their moments never change."""
    model = nn.Embedding(4 * SIZE, SIZE, sparse=True)
    optimizer = torch.optim.SparseAdam(model.parameters())

    def step() -> dict[str, Any]:
        updated(model, optimizer, torch.randint(4 * SIZE, (3,)))
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    return step


def quantised() -> Step:
    """Integer weights with scales beside the float weights in training."""
    model = mlp()
    step = trained(model, rate=0.1)

    def quantise() -> dict[str, Any]:
        step()
        weight = model[0].weight.detach()  # type: ignore[index]
        scale = weight.abs().amax(1, keepdim=True) / 127
        return {"w": (weight / scale).round().to(torch.int8), "scale": scale}

    return quantise


def tied() -> Step:
    model = mlp()
    model[2].weight = model[0].weight  # type: ignore[index]
    return trained(model)


def no_rate() -> Step:
    """Begin with a learning rate of zero: parameters stand still, moments move."""
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), 1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: max(0, n - 3) * 1e-3)

    def step() -> dict[str, Any]:
        updated(model, optimizer)
        schedule.step()
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    return step


def warm_restarts() -> Step:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 4)

    def step() -> dict[str, Any]:
        for _ in range(2):
            updated(model, optimizer)
            schedule.step()
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    return step


def without_optimizer() -> Step:
    step = trained(mlp())
    return lambda: step()["model"]


def normalised() -> Step:
    """Weights of norms begin with one number, and counters are integers."""
    return trained(nn.Sequential(nn.Linear(SIZE, SIZE), nn.BatchNorm1d(SIZE), nn.LayerNorm(SIZE)))


def masked() -> Step:
    """Keep a mask of infinities in the model from its beginning."""
    model = mlp()
    model.register_buffer("mask", torch.full((SIZE, SIZE), -torch.inf).triu(1))
    return trained(model)


def averaged() -> Step:
    model = mlp()
    average = torch.optim.swa_utils.AveragedModel(model)
    step = trained(model)

    def both() -> dict[str, Any]:
        state = step()
        average.update_parameters(model)
        return {**state, "ema": average.state_dict()}

    return both


def target_network() -> Step:
    """Renew a copy of the model at intervals, as in reinforcement learning."""
    model = mlp()
    target = copy.deepcopy(model)
    step = trained(model)
    count = iter(range(1000))

    def both() -> dict[str, Any]:
        state = step()
        if next(count) % 3 == 0:
            target.load_state_dict(model.state_dict())
        return {**state, "target": target.state_dict()}

    return both


def growing() -> Step:
    """Layers are added during the training."""
    layers = nn.ModuleList([nn.Linear(SIZE, SIZE)])

    def step() -> dict[str, Any]:
        model = nn.Sequential(*layers)
        updated(model, torch.optim.SGD(model.parameters(), 0.1))
        layers.append(nn.Linear(SIZE, SIZE))
        return {"model": model.state_dict()}

    return step


def unfrozen() -> Step:
    """Train one layer after the other."""
    model = mlp().requires_grad_(False)
    count = iter(range(1000))

    def step() -> dict[str, Any]:
        model[2 * (next(count) // 3 % 2)].requires_grad_(True)  # type: ignore[index]
        learning = [p for p in model.parameters() if p.requires_grad]
        updated(model, torch.optim.SGD(learning, 0.1))
        return {"model": model.state_dict()}

    return step


KINDS = (
    fresh,
    zero_initialised,
    momentum,
    half,
    frozen_backbone,
    lora,
    lora_alone,
    sparse,
    sparse_gradients,
    quantised,
    tied,
    no_rate,
    warm_restarts,
    without_optimizer,
    normalised,
    masked,
    averaged,
    target_network,
    growing,
    unfrozen,
)


def test_there_are_more_than_a_hundred() -> None:
    assert (len(KINDS) + 1) * len(SEEDS) == 105


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_healthy_training_raises_no_alarm(
    kind: Callable[[], Step], seed: int, tmp_path: Path
) -> None:
    torch.manual_seed(seed)
    step = kind()
    path = tmp_path / "step-{}.pt"
    for number in range(6):
        state = {**step(), "step": number, "random": torch.get_rng_state()}
        report = ioshape.save(state, str(path).format(number), durable=False)
        assert (number, report.alarm) == (number, "")
    # An evaluation saves the model elsewhere.
    assert not ioshape.save(state, tmp_path / "best.pt", durable=False).alarms


@pytest.mark.parametrize("seed", SEEDS)
def test_a_healthy_training_that_is_only_evaluated_raises_no_alarm(
    seed: int, tmp_path: Path
) -> None:
    """Save the final state again and again to one path, in a restarted process, too."""
    torch.manual_seed(seed)
    step = trained(mlp())
    path = tmp_path / "last.pt"
    for number in range(8):
        if number < 3:
            state = {**step(), "step": number}
        if number == 5:
            ioshape.configure(examine="warn")  # begins anew
            state = ioshape.load(path)
        state["random"] = torch.get_rng_state()
        report = ioshape.save(state, path, durable=False)
        assert (number, report.alarm) == (number, "")
        torch.randn(8)  # an evaluation draws numbers, too


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_items_of_a_healthy_training_raise_no_alarm(
    kind: Callable[[], Step], tmp_path: Path
) -> None:
    """Save with torch's distributed checkpoint, which stores each tensor as an item."""
    torch.manual_seed(0)
    step = kind()
    for number in range(6):
        path = tmp_path / f"step-{number}"
        state = {**step(), "step": number}
        writer = ioshape.dcp.Writer(path)
        dcp.save(state, storage_writer=writer, no_dist=True)
        assert [(number, report.alarm) for report in writer.reports] == [(number, "")]
        if number == 2:
            ioshape.configure(examine="warn")  # begins anew, as a restarted job does
            dcp.load(state, storage_reader=ioshape.dcp.Reader(path), no_dist=True)
