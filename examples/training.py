# SPDX-License-Identifier: Apache-2.0
"""The common code of the examples: a small language model that is trained on several ranks.

Each rank trains on its own data. Each rank keeps the optimizer state of its share of the
parameters, and no other rank has that state. So every rank has something to save in the same
second: rank 0 the model, each rank its share of the optimizer and its random numbers.

The examples differ in how they save and resume: plain_train.py, train.py, group_train.py.
"""

import argparse
import os
import signal
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# Import this before there is a process group. Otherwise the optimizer imports it later, and its
# functions take the group as their default and keep it alive. The threads of the group could then
# run into the end of Python, which aborts.
import torch.distributed.nn
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

WORDS = 1000
LENGTH = 16  # words in a sentence
SENTENCES = 4  # for one rank and one step
KEEP = 2  # checkpoints of each rank that stay on disk


class Model(nn.Module):
    """A language model that predicts the next word."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            width, nhead=4, dim_feedforward=4 * width, batch_first=True, norm_first=True
        )
        self.embedding = nn.Embedding(WORDS, width)
        self.blocks = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        """Return the logits of the next word for each position."""
        mask = nn.Transformer.generate_square_subsequent_mask(words.shape[1])
        logits: Tensor = self.head(self.blocks(self.embedding(words), mask=mask, is_causal=True))
        return logits


def sentences(seed: int) -> Tensor:
    """Return sentences that can be learned: the first word determines all others."""
    first = torch.randint(WORDS, (SENTENCES, 1), generator=torch.Generator().manual_seed(seed))
    return (first + 17 * torch.arange(LENGTH + 1)) % WORDS


def joined(tensors: Iterable[Tensor]) -> Tensor:
    """Return all tensors as one long vector, so that one message replaces many."""
    return torch.cat([tensor.flatten() for tensor in tensors])


def spread(vector: Tensor, tensors: list[Tensor]) -> None:
    """Copy a vector made by joined() back into its tensors."""
    parts = torch.split(vector, [tensor.numel() for tensor in tensors])
    for tensor, part in zip(tensors, parts, strict=True):
        tensor.copy_(part.view_as(tensor))


class Training(ABC):
    """A training on one rank, without the checkpoints."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.step = 0
        self.stalls: list[float] = []  # seconds of each save
        self.saving: Any = None  # the handle of a background save
        self.stopping = False  # true if any rank was told to stop; equal on all ranks
        torch.manual_seed(0)  # all ranks begin with the same model
        self.model = Model(options.width, options.layers)
        # Sorted by size, so that all ranks get about as many elements.
        self.parameters: list[Tensor] = sorted(self.model.parameters(), key=Tensor.numel)
        self.shares = [self.parameters[rank :: self.ranks] for rank in range(self.ranks)]
        torch.manual_seed(1 + self.rank)  # each rank has its own dropout
        self.optimizer = torch.optim.AdamW(self.shares[self.rank], lr=1e-3)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, options.steps)

    # ---- Methods that the examples add ---------------------------------------------------------

    @abstractmethod
    def told_to_stop(self) -> bool:
        """Return whether this rank was told that the cluster wants its node back."""

    @abstractmethod
    def save(self) -> None:
        """Save state(). If self.stopping is set, this is the last save."""

    @abstractmethod
    def resume(self) -> None:
        """Load the newest checkpoint, if there is one."""

    # ---- The training -------------------------------------------------------------------------

    def learn(self) -> float:
        """Train one step and return the mean loss of all ranks."""
        words = sentences(self.step * self.ranks + self.rank)
        logits = self.model(words[:, :-1])
        loss = cross_entropy(logits.flatten(0, 1), words[:, 1:].flatten())
        self.model.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        sums = joined(gradients)
        dist.all_reduce(sums)
        spread(sums / self.ranks, gradients)
        self.optimizer.step()
        self.schedule.step()
        with torch.no_grad():
            for rank, share in enumerate(self.shares):
                updated = joined(share)
                dist.broadcast(updated, src=rank)
                spread(updated, share)
        self.step += 1
        sums = torch.tensor([loss.item(), self.told_to_stop()])
        dist.all_reduce(sums)
        self.stopping = sums[1].item() > 0
        return sums[0].item() / self.ranks

    def state(self) -> dict[str, Any]:
        """Return the state that this rank saves."""
        state = {
            "step": self.step,
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "random": torch.get_rng_state(),
        }
        if self.rank == 0:
            state["model"] = self.model.state_dict()
        return state

    def restore(self, state: dict[str, Any], of_rank_0: dict[str, Any]) -> None:
        """Restore the saved state of this rank and the model, which is in the state of rank 0."""
        self.model.load_state_dict(of_rank_0["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        torch.set_rng_state(state["random"])
        self.step = state["step"]
        self.say(f"resuming from step {self.step}")

    def finish_save(self) -> None:
        """Wait for the background save, if there is one, and raise its exception if it failed."""
        if self.saving is not None:
            self.tell_save(self.saving.result())
            self.saving = None

    def run(self) -> None:
        """Train to the last step, or until a rank is told to stop."""
        self.resume()
        while self.step < self.options.steps and not self.stopping:
            loss = self.learn()
            self.note(loss)
            if self.step % self.options.save_every == 0 or self.stopping:
                self.say(f"step {self.step}: loss {loss:.4f}")
                before = time.perf_counter()
                self.save()
                self.stalls.append(time.perf_counter() - before)
            if self.step == self.options.kill_at_step:
                os.kill(os.getpid(), signal.SIGKILL)
        self.finish_save()
        self.tell_stalls()

    # ---- Output -------------------------------------------------------------------------------

    def say(self, text: str) -> None:
        """Print text on rank 0 only."""
        if self.rank == 0:
            print(text, flush=True)

    def tell_save(self, report: Any) -> None:
        """File, size and time until it was durable. `print(report)` would show all of it."""
        size = f"{report.file_bytes / 2**20:.1f} MiB"
        self.say(f"  saved {Path(report.path).name}: {size} in {report.total_s:.2f} s")

    def note(self, loss: float) -> None:
        """Append the loss to losses.txt with all its digits, also of steps that are repeated."""
        if self.rank == 0:
            with Path(self.options.folder, "losses.txt").open("a", encoding="utf-8") as file:
                file.write(f"{self.step} {loss!r}\n")

    def tell_stalls(self) -> None:
        """Print how long saves blocked the training, on the rank where they blocked longest."""
        if self.stalls:
            first, *others = self.stalls
            stalls = torch.tensor([first, sum(others) / max(len(others), 1)])
            dist.all_reduce(stalls, dist.ReduceOp.MAX)
            first_ms, other_ms = (1000 * stalls).tolist()
            text = f"stall of the first save {first_ms:.0f} ms"
            self.say(text + (f", of later saves {other_ms:.0f} ms" if others else ""))


class TrainingWithFiles(Training):
    """A training in which each rank saves its own files."""

    def file(self, step: int, rank: int) -> Path:
        """Return the path of a rank's checkpoint."""
        return Path(self.options.folder) / f"step-{step:06}-rank-{rank}.pt"

    def mine(self) -> list[int]:
        """Return the steps for which this rank has a checkpoint, in order."""
        files = Path(self.options.folder).glob(f"step-*-rank-{self.rank}.pt")
        return sorted(int(file.name.split("-")[1]) for file in files)

    def finish_save(self) -> None:
        """Finish the background save, then remove all but the newest checkpoints of this rank.

        No rank is more than one save ahead, so all ranks still have one checkpoint in common.
        """
        super().finish_save()
        for step in self.mine()[:-KEEP]:
            self.file(step, self.rank).unlink()

    def newest(self) -> int | None:
        """Return the newest step for which all ranks have a checkpoint."""
        steps: list[Any] = [None] * self.ranks
        dist.all_gather_object(steps, self.mine())
        return max(set.intersection(*map(set, steps)), default=None)


def command_line() -> argparse.ArgumentParser:
    """Return a parser with the options that all examples share."""
    parser = argparse.ArgumentParser(description="Trains a small language model.")
    parser.add_argument("folder", help="folder of the checkpoints")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--save-every", type=int, default=10, metavar="STEPS")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument(
        "--kill-at-step",
        type=int,
        metavar="STEP",
        help="kill all ranks with SIGKILL after this step",
    )
    return parser


def train(way: type[Training], options: argparse.Namespace) -> None:
    """Run one rank from the start of its process group to its end."""
    Path(options.folder).mkdir(parents=True, exist_ok=True)
    dist.init_process_group("gloo")
    training = way(options)
    training.run()
    # gloo still sends the last message here.
    dist.monitored_barrier()
    dist.destroy_process_group()
    if training.step < options.steps:
        # This is the exit status of a process that died of the signal. It tells the launcher that
        # steps remain.
        sys.exit(128 + signal.SIGTERM)
