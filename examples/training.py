# SPDX-License-Identifier: Apache-2.0
"""What the examples have in common: a small language model, trained on several ranks.

Each rank learns from data of its own, and is the only one to keep optimizer state for its share of
the parameters. So every rank has something to save, all in the same second: rank 0 the model, each
rank its share of the optimizer and its random numbers.

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

# The optimizer would import it when there is a group already, which would then be the default of
# its functions, and live as long as they: its threads could meet the end of Python, and abort.
import torch.distributed.nn
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

WORDS = 1000
LENGTH = 16  # words of a sentence
SENTENCES = 4  # for a rank and a step
KEEP = 2  # checkpoints


class Model(nn.Module):
    """Guesses the next word."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            width, nhead=4, dim_feedforward=4 * width, batch_first=True, norm_first=True
        )
        self.embedding = nn.Embedding(WORDS, width)
        self.blocks = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        """The logits of each position's next word."""
        mask = nn.Transformer.generate_square_subsequent_mask(words.shape[1])
        logits: Tensor = self.head(self.blocks(self.embedding(words), mask=mask, is_causal=True))
        return logits


def sentences(seed: int) -> Tensor:
    """Something that can be learned: the first word tells all the others."""
    first = torch.randint(WORDS, (SENTENCES, 1), generator=torch.Generator().manual_seed(seed))
    return (first + 17 * torch.arange(LENGTH + 1)) % WORDS


def joined(tensors: Iterable[Tensor]) -> Tensor:
    """One long vector: one message instead of many."""
    return torch.cat([tensor.flatten() for tensor in tensors])


def spread(vector: Tensor, tensors: list[Tensor]) -> None:
    """The way back."""
    parts = torch.split(vector, [tensor.numel() for tensor in tensors])
    for tensor, part in zip(tensors, parts, strict=True):
        tensor.copy_(part.view_as(tensor))


class Training(ABC):
    """One rank's part, without the checkpoints."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.step = 0
        self.stalls: list[float] = []  # seconds, one for each save
        self.saving: Any = None  # the handle of a save in the background
        self.stopping = False  # all ranks are
        torch.manual_seed(0)  # the same model everywhere
        self.model = Model(options.width, options.layers)
        # Dealt out by size, so that all ranks get about as much.
        self.parameters: list[Tensor] = sorted(self.model.parameters(), key=Tensor.numel)
        self.shares = [self.parameters[rank :: self.ranks] for rank in range(self.ranks)]
        torch.manual_seed(1 + self.rank)  # but not the same dropout
        self.optimizer = torch.optim.AdamW(self.shares[self.rank], lr=1e-3)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, options.steps)

    # ---- What an example adds -----------------------------------------------------------------

    @abstractmethod
    def told_to_stop(self) -> bool:
        """Whether this rank was told that the cluster wants its node back."""

    @abstractmethod
    def save(self) -> None:
        """Saves state(). If self.stopping, it is the last save."""

    @abstractmethod
    def resume(self) -> None:
        """Takes up the newest checkpoint, if there is one."""

    # ---- The training -------------------------------------------------------------------------

    def learn(self) -> float:
        """One step. All ranks' mean loss."""
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
        """What this rank saves."""
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
        """The way back: what this rank has saved, and what rank 0 has."""
        self.model.load_state_dict(of_rank_0["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        torch.set_rng_state(state["random"])
        self.step = state["step"]
        self.say(f"going on from step {self.step}")

    def finish_save(self) -> None:
        """The one before: there for good, as a rule long ago. If it failed, this raises why."""
        if self.saving is not None:
            self.say(f"  {self.saving.result()}")
            self.saving = None

    def run(self) -> None:
        """Trains to the last step."""
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

    # ---- What it tells ------------------------------------------------------------------------

    def say(self, text: str) -> None:
        """Once for all ranks."""
        if self.rank == 0:
            print(text, flush=True)

    def note(self, loss: float) -> None:
        """Every loss with all its digits, those of steps done again, too."""
        if self.rank == 0:
            with Path(self.options.folder, "losses.txt").open("a", encoding="utf-8") as file:
                file.write(f"{self.step} {loss!r}\n")

    def tell_stalls(self) -> None:
        """How long training stood still for saves, on the rank where that was longest."""
        if self.stalls:
            first, *others = self.stalls
            stalls = torch.tensor([first, sum(others) / max(len(others), 1)])
            dist.all_reduce(stalls, dist.ReduceOp.MAX)
            first_ms, other_ms = (1000 * stalls).tolist()
            text = f"the first save held the training up for {first_ms:.0f} ms"
            self.say(text + (f", later ones for {other_ms:.0f} ms each" if others else ""))


class TrainingWithFiles(Training):
    """Each rank saves to files of its own."""

    def file(self, step: int, rank: int) -> Path:
        """Where a rank's checkpoint lies."""
        return Path(self.options.folder) / f"step-{step:06}-rank-{rank}.pt"

    def mine(self) -> list[int]:
        """The steps of which this rank has a checkpoint."""
        files = Path(self.options.folder).glob(f"step-*-rank-{self.rank}.pt")
        return sorted(int(file.name.split("-")[1]) for file in files)

    def finish_save(self) -> None:
        """Leaves the newest. No rank is more than one save ahead, so all ranks have one of them."""
        super().finish_save()
        for step in self.mine()[:-KEEP]:
            self.file(step, self.rank).unlink()

    def newest(self) -> int | None:
        """The newest step of which all ranks have a checkpoint."""
        steps: list[Any] = [None] * self.ranks
        dist.all_gather_object(steps, self.mine())
        return max(set.intersection(*map(set, steps)), default=None)


def command_line() -> argparse.ArgumentParser:
    """What all examples can be told."""
    parser = argparse.ArgumentParser(description="Trains a small language model.")
    parser.add_argument("folder", help="of the checkpoints")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--save-every", type=int, default=10, metavar="STEPS")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument(
        "--kill-at-step", type=int, metavar="STEP", help="kill -9 all ranks right after this step"
    )
    return parser


def train(way: type[Training], options: argparse.Namespace) -> None:
    """The whole life of a rank."""
    Path(options.folder).mkdir(parents=True, exist_ok=True)
    dist.init_process_group("gloo")
    training = way(options)
    training.run()
    # gloo lets go of the last message here.
    dist.monitored_barrier()
    dist.destroy_process_group()
    if training.step < options.steps:
        # As if it had died of the signal: whoever started it knows that there is more to do.
        sys.exit(128 + signal.SIGTERM)
