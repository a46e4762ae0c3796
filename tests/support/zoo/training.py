# SPDX-License-Identifier: Apache-2.0
"""Objects that a training script saves."""

import argparse
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from zoo.cases import case


class Net(nn.Module):
    """A small module with layers of many kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.block = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Dropout(0.1), nn.Linear(8, 4))
        self.norm = nn.BatchNorm1d(4)
        self.extra = nn.ParameterList([nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))])
        self.named = nn.ParameterDict({"a": nn.Parameter(torch.zeros(2))})
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("table", torch.arange(6.0), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.block(self.embedding(tokens)))
        out: torch.Tensor = self.head(hidden)
        return out


def trained(make: Callable[..., Any] = torch.optim.AdamW, **options: Any) -> tuple[Net, Any]:
    """Return a module and its optimizer after some steps."""
    net = Net()
    optimizer = make(net.parameters(), **options)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(torch.arange(7)), torch.arange(7))
        torch.autograd.backward(loss)
        return loss

    for _ in range(3):
        optimizer.step(closure)
    return net, optimizer


@case()
def module() -> Any:
    net = trained()[0]
    net.register_forward_hook(forward_hook)
    return net.eval()


def forward_hook(_module: nn.Module, _input: Any, output: Any) -> Any:
    """Return the output unchanged. A hook that can be pickled."""
    return output


@case()
def modules_of_torch() -> Any:
    return [
        nn.LSTM(3, 4, num_layers=2),
        nn.Conv2d(2, 3, 3, dtype=torch.bfloat16),
        nn.MultiheadAttention(8, 2),
        nn.TransformerEncoderLayer(8, 2, 16),
        nn.ModuleDict({"a": nn.Linear(2, 2)}),
        nn.Identity(),
    ]


@case()
def state_dict() -> Any:
    return trained()[0].state_dict()


@case()
def whole_checkpoint() -> Any:
    net, optimizer = trained(fused=False)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=100)
    scheduler.step()
    return {
        "model": net.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "scaler": torch.amp.GradScaler("cpu").state_dict(),
        "rng": torch.get_rng_state(),
        "python rng": random.Random(3).getstate(),
        "numpy rng": np.random.RandomState(4).get_state(),
        "epoch": 3,
        "args": argparse.Namespace(lr=0.1, name="x"),
    }


@case()
def optimizers() -> Any:
    return {
        "sgd": trained(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True)[1].state_dict(),
        "adagrad": trained(torch.optim.Adagrad)[1].state_dict(),
        "amsgrad": trained(torch.optim.Adam, amsgrad=True, capturable=False)[1].state_dict(),
        "lbfgs": trained(torch.optim.LBFGS, max_iter=3)[1].state_dict(),
    }


@case()
def optimizer_object() -> Any:
    return trained()[1]


@case()
def schedulers() -> Any:
    optimizer = trained()[1]
    lr = torch.optim.lr_scheduler
    return {
        "cosine": lr.CosineAnnealingWarmRestarts(optimizer, 10).state_dict(),
        "lambda": lr.LambdaLR(optimizer, Callback()).state_dict(),
        "plateau": lr.ReduceLROnPlateau(optimizer).state_dict(),
        "steps": lr.MultiStepLR(optimizer, [3, 5]).state_dict(),
    }


class Callback:
    """A function with a state."""

    def __init__(self) -> None:
        self.seen = [1, 2]

    def __call__(self, epoch: int) -> float:
        return 0.5**epoch


@case()
def averaged_model() -> Any:
    average = torch.optim.swa_utils.AveragedModel(nn.Linear(3, 2))
    average.update_parameters(nn.Linear(3, 2))
    return average.state_dict()


@case()
def random_generators() -> Any:
    generator = torch.Generator().manual_seed(7)
    torch.rand(5, generator=generator)
    return {
        "torch": generator.get_state(),
        "python": random.Random(5),
        "numpy": np.random.default_rng(6),
        "legacy": np.random.RandomState(7),
    }


@case(any_data=False)
def generator_object() -> Any:
    return torch.Generator().manual_seed(7)


@case()
def distributions() -> Any:
    return torch.distributions.Normal(torch.zeros(2), torch.ones(2))
