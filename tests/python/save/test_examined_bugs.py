# SPDX-License-Identifier: Apache-2.0
"""Ten published bugs that wrote valid files with wrong content. Each is caught at the next save."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ioshape
import pytest
import torch
from checkpoints import left_clean
from ioshape import Report
from torch import nn


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    with left_clean():
        yield


class Training:
    """A small model in training, which saves a checkpoint after each step."""

    def __init__(self, folder: Path) -> None:
        torch.manual_seed(0)
        self.folder = folder
        self.step = 0
        self.model = nn.Sequential(nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 128))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-3)

    def train(self) -> None:
        self.step += 1
        self.optimizer.zero_grad()
        self.model(torch.randn(8, 128)).square().mean().backward()
        self.optimizer.step()

    def save(self, **state: Any) -> Report:
        content = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            **state,
            "step": self.step,
        }
        return ioshape.save(content, self.folder / f"step-{self.step}.pt")

    def run(self, steps: int = 2) -> None:
        for _ in range(steps):
            self.train()
            assert not self.save().alarms


@pytest.fixture
def training(tmp_path: Path) -> Training:
    return Training(tmp_path)


def test_nemo_rl_4183_each_checkpoint_has_the_optimizer_of_the_first(training: Training) -> None:
    """Save an optimizer's state from memory that the optimizer has left."""
    training.run()
    stale = copy.deepcopy(training.optimizer.state_dict())
    training.train()
    training.save(optimizer=stale)
    training.train()
    report = training.save(optimizer=stale)
    assert report.alarms == ("unchanged",)
    assert "optimizer" in report.alarm


def test_megatron_lm_174_the_optimizer_updates_other_parameters(training: Training) -> None:
    """Build the optimizer before the parameters are loaded, so that it updates the old ones."""
    training.run()
    saved = copy.deepcopy(training.model)
    training.train()
    training.save(model=saved.state_dict())
    training.train()
    report = training.save(model=saved.state_dict())
    assert report.alarms == ("unchanged",)
    assert "the model" in report.alarm


def test_lightning_20545_each_averaged_state_dict_is_the_same(training: Training) -> None:
    averaged = torch.optim.swa_utils.AveragedModel(training.model)
    reports = []
    for epoch in range(2):  # update_parameters() is never called
        training.train()
        content = {"state_dict": averaged.state_dict(), "epoch": epoch}
        reports.append(ioshape.save(content, training.folder / f"averaged-{epoch}.pt"))
    assert [report.alarms for report in reports] == [(), ("unchanged",)]


def test_micromind_64_a_model_of_nan_is_saved(training: Training) -> None:
    training.run()
    for group in training.optimizer.param_groups:
        group["lr"] = float("inf")  # a schedule that diverges
    training.train()
    report = training.save()
    assert report.alarms[0] == "nonfinite"
    assert "model." in report.alarm


def test_optimi_15_moments_in_float16_overflow(training: Training) -> None:
    """Square a scaled gradient of 1000, which exceeds every float16."""
    training.model.half()
    training.optimizer = torch.optim.AdamW(training.model.parameters(), 1e-5)
    for scale in (10.0, 1000.0):
        training.step += 1
        for parameter in training.model.parameters():
            parameter.grad = torch.full_like(parameter, scale)
            parameter.grad.view(-1)[0] = -scale * 100
        training.optimizer.step()
        report = training.save()
    assert report.alarms[0] == "nonfinite"
    assert any(torch.isinf(one["exp_avg_sq"]).any() for one in training.optimizer.state.values())


def test_ultralytics_24615_the_average_becomes_infinite(training: Training) -> None:
    average = copy.deepcopy(training.model).state_dict()
    training.train()
    assert not training.save(ema=average).alarms
    training.train()
    for name, value in training.model.state_dict().items():
        average[name] = average[name] * 0.99 + value * 0.01
    average["2.bias"][5] = float("inf")
    report = training.save(ema=average)
    assert report.alarms == ("nonfinite",)
    assert "ema.2.bias" in report.alarm


def test_ultralytics_24085_second_moments_are_rounded_to_zero(training: Training) -> None:
    """Store the optimizer in float16, where small squares are zero."""

    def in_float16() -> dict[str, Any]:
        state = copy.deepcopy(training.optimizer.state_dict())
        for moments in state["state"].values():
            moments["exp_avg_sq"] = moments["exp_avg_sq"].half()
        return state

    for scale in (1.0, 1e-6):
        training.step += 1
        for parameter in training.model.parameters():
            parameter.grad = torch.randn_like(parameter) * scale
        training.optimizer.step()
        report = training.save(optimizer=in_float16())
        for moments in training.optimizer.state.values():
            moments["exp_avg_sq"].zero_()  # a long training forgets the large gradients
    assert report.alarms == ("constant",)
    assert "exp_avg_sq" in report.alarm


def test_executorch_9660_weights_are_zero_after_a_failed_load(training: Training) -> None:
    training.run()
    training.train()
    for parameter in training.model.parameters():
        nn.init.zeros_(parameter)
    report = training.save()
    assert report.alarms == ("constant",)
    assert "model." in report.alarm


def test_torchtitan_3764_an_export_overwrites_a_tied_weight(tmp_path: Path) -> None:
    """Export a head that was never filled over the embedding that it is tied to."""
    embedding = nn.Embedding(512, 64)
    ioshape.save({"tok_embeddings": embedding.weight.detach()}, tmp_path / "export-1.pt")
    head = nn.Linear(64, 512, bias=False, device="meta").to_empty(device="cpu")
    exported = {"tok_embeddings": head.weight.detach().zero_()}  # what fresh memory holds
    report = ioshape.save(exported, tmp_path / "export-2.pt")
    assert report.alarms == ("constant",)
    assert "tok_embeddings" in report.alarm


def test_pytorch_144657_a_tensor_changes_while_it_is_written(tmp_path: Path) -> None:
    tensor = torch.randn(8 << 20)
    handle = ioshape.save_async({"w": tensor}, tmp_path / "model.pt", lazy=True)
    tensor.add_(1)  # the training does not wait for the copy
    with pytest.raises(ioshape.errors.StorageError, match="changed"):
        handle.result()
