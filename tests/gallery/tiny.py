# SPDX-License-Identifier: Apache-2.0
"""What the scripts of the gallery have in common: something to learn, and somebody who listens.

The scripts do with their checkpoints what well-known ones do; only model and data are ours. None of
them knows ioshape. They are called SCRIPT FOLDER, and say each step's loss by told().
"""

import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch
from torch import Tensor, nn

STEPS = 24
SAVE_EVERY = 4
WIDTH = 64

FOLDER = Path(sys.argv[1])


def model() -> nn.Module:
    """The same for everybody."""
    torch.manual_seed(7)
    return nn.Sequential(
        nn.Linear(WIDTH, 4 * WIDTH), nn.Tanh(), nn.Dropout(0.1), nn.Linear(4 * WIDTH, 1)
    )


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Of a step: the same whenever it is done."""
    torch.manual_seed(1000 + step)  # for the dropout, too
    x = torch.randn(16, WIDTH)
    return x, x.sum(1, keepdim=True).sin()


def loss_of(net: nn.Module, step: int) -> Tensor:
    """To go down."""
    x, y = batch(step)
    loss: Tensor = nn.functional.mse_loss(net(x), y)
    return loss


def _kill() -> None:
    time.sleep(float(os.environ["GALLERY_KILL_AFTER_S"]))
    os.kill(os.getpid(), signal.SIGKILL)


def told(step: int, loss: Tensor) -> None:
    """Writes it down. After the step that GALLERY_KILL_AT names this process is killed.

    The kill hits whatever the script does before its next step, which does not come.
    """
    with (FOLDER / "losses.txt").open("a", encoding="ascii") as file:
        file.write(f"{step} {loss.item():.17g}\n")
    last = int(os.environ.get("GALLERY_KILL_AT", "-1"))
    if step == last:
        threading.Thread(target=_kill, daemon=True).start()
    elif 0 <= last < step:
        signal.pause()
