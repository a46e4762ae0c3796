# SPDX-License-Identifier: Apache-2.0
"""Trains a model on several ranks, saves it in four ways, and resumes from each of the files.

    torchrun --nproc-per-node 4 tests/support/programs/two_models.py (resnet|transformer) FOLDER

Each rank leaves FOLDER/WAY-RANK.pt for the ways "torch", "save" and "async". All ranks save to
FOLDER/shared.pt at the same time. The exit status is 0 if training resumed from each of our files
gives the losses of uninterrupted training, bit by bit.
"""

import copy
import sys
from pathlib import Path
from typing import Any

import ioshape
import torch
import torch.distributed as dist
import torch.distributed.nn  # before there is a group, as examples/training.py says
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, relu
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR
from torch.utils._pytree import tree_leaves

CLASSES = 50
STEPS = 3  # before the save, and after it


class Block(nn.Module):
    """Two convolutions and a shortcut."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(after)
        self.downsample: nn.Module = nn.Identity()
        if stride != 1 or before != after:
            self.downsample = nn.Sequential(
                nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after)
            )

    def forward(self, images: Tensor) -> Tensor:
        inside = relu(self.bn1(self.conv1(images)))
        both: Tensor = self.bn2(self.conv2(inside)) + self.downsample(images)
        return relu(both)


class Resnet(nn.Module):
    """ResNet-18 with a quarter of its channels."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 7, 2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        widths = [16, 32, 64, 128]
        for number, (before, after) in enumerate(zip([16, *widths], widths, strict=False), 1):
            first = Block(before, after, 1 if number == 1 else 2)
            setattr(self, f"layer{number}", nn.Sequential(first, Block(after, after, 1)))
        self.fc = nn.Linear(widths[-1], CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        inside = nn.functional.max_pool2d(relu(self.bn1(self.conv1(images))), 3, 2, padding=1)
        for number in range(1, 5):
            inside = self.get_submodule(f"layer{number}")(inside)
        logits: Tensor = self.fc(inside.mean(dim=(2, 3)))
        return logits

    def batch(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        images = torch.randn(4, 3, 64, 64, generator=generator)
        return images, torch.randint(CLASSES, (4,), generator=generator)


class Attention(nn.Module):
    """A layer of causal self-attention."""

    causal: Tensor

    def __init__(self, width: int, heads: int, length: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(0.1)
        # A bool tensor that is saved with the model, as GPT-2 does.
        self.register_buffer("causal", torch.ones(length, length, dtype=torch.bool).tril())

    def forward(self, inside: Tensor) -> Tensor:
        shape = (*inside.shape[:2], self.heads, -1)
        query, key, value = (
            part.reshape(shape).transpose(1, 2)
            for part in self.qkv(self.norm1(inside)).chunk(3, -1)
        )
        scores = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5
        weights = scores.masked_fill(~self.causal, float("-inf")).softmax(-1)
        seen = (self.dropout(weights) @ value).transpose(1, 2).reshape(inside.shape)
        inside = inside + self.out(seen)
        both: Tensor = inside + self.dropout(self.down(gelu(self.up(self.norm2(inside)))))
        return both


class Transformer(nn.Module):
    """GPT with few layers. Its first and its last layer share their weights."""

    def __init__(self) -> None:
        super().__init__()
        width, length = 128, 24
        self.words = nn.Embedding(CLASSES, width)
        self.positions = nn.Parameter(torch.zeros(length, width))
        self.layers = nn.ModuleList(Attention(width, 4, length) for _ in range(3))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, CLASSES, bias=False)
        self.head.weight = self.words.weight

    def forward(self, words: Tensor) -> Tensor:
        inside = self.words(words) + self.positions
        for layer in self.layers:
            inside = layer(inside)
        logits: Tensor = self.head(self.norm(inside)).flatten(0, 1)
        return logits

    def batch(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        words = torch.randint(CLASSES, (4, len(self.positions) + 1), generator=generator)
        return words[:, :-1], words[:, 1:].flatten()


class Training:
    """A rank's model, optimizer and schedule."""

    def __init__(self, kind: str) -> None:
        torch.manual_seed(0)
        self.model: Resnet | Transformer = Resnet() if kind == "resnet" else Transformer()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.schedule = SequentialLR(
            self.optimizer,
            [LinearLR(self.optimizer, 0.1, total_iters=2), CosineAnnealingLR(self.optimizer, 20)],
            milestones=[2],
        )
        self.step = 0
        torch.manual_seed(100 + dist.get_rank())

    def learn(self) -> list[float]:
        """Train some steps. Return their losses on this rank."""
        # A new instance each time: the order in which it adds gradients depends on earlier steps.
        parallel = DistributedDataParallel(self.model)
        losses = []
        for _ in range(STEPS):
            seed = 1000 * self.step + dist.get_rank()
            inputs, wanted = self.model.batch(torch.Generator().manual_seed(seed))
            loss: Tensor = cross_entropy(parallel(inputs), wanted)
            self.optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
            self.schedule.step()
            self.step += 1
            losses.append(loss.item())
        return losses

    def state(self) -> dict[str, Any]:
        return {
            "rank": dist.get_rank(),
            "step": self.step,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "random": torch.get_rng_state(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        torch.set_rng_state(state["random"])
        self.step = state["step"]


def main(kind: str, folder: Path) -> None:
    rank = dist.get_rank()
    job = ioshape.job()
    assert (job.rank, job.world_size, job.source) == (
        rank,
        dist.get_world_size(),
        "torch.distributed",
    )

    training = Training(kind)
    training.learn()
    state = training.state()
    files = {way: folder / f"{way}-{rank}.pt" for way in ("torch", "save", "async")}
    torch.save(state, files["torch"])
    ioshape.save(state, files["save"])
    dist.barrier()
    ioshape.save(state, folder / "shared.pt")
    passing = copy.deepcopy(state)
    handle = ioshape.save_async(passing, files["async"])
    for value in tree_leaves(passing):
        if isinstance(value, Tensor):
            value.zero_()  # it may change as soon as the call has returned
    expected = training.learn()
    handle.wait()

    for way in ("save", "async"):
        again = Training(kind)
        again.restore(ioshape.load(files[way]))
        assert again.learn() == expected, way
        for name, value in training.model.state_dict().items():
            assert torch.equal(value, again.model.state_dict()[name]), (way, name)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main(sys.argv[1], Path(sys.argv[2]))
    dist.monitored_barrier()  # as in examples/train.py
    dist.destroy_process_group()
