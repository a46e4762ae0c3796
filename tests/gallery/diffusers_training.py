# SPDX-License-Identifier: Apache-2.0
"""As the training scripts of diffusers: checkpoint-N; the oldest goes before a new one comes."""

import shutil

import torch
from accelerate import Accelerator
from tiny import FOLDER, SAVE_EVERY, STEPS, loss_of, model, told

MOST = 2
accelerator = Accelerator(cpu=True)
net = model()
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, weight_decay=1e-2)
net, optimizer = accelerator.prepare(net, optimizer)
first = 0


def checkpoints() -> list[str]:
    """The oldest first."""
    names = [path.name for path in FOLDER.iterdir() if path.name.startswith("checkpoint")]
    return sorted(names, key=lambda name: int(name.split("-")[1]))


found = checkpoints()
if found:
    accelerator.load_state(str(FOLDER / found[-1]))
    first = int(found[-1].split("-")[1]) + 1
for step in range(first, STEPS):
    loss = loss_of(net, step)
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    told(step, loss)
    if step % SAVE_EVERY == 0 and accelerator.is_main_process:
        there = checkpoints()
        for name in there[: max(0, len(there) - MOST + 1)]:
            shutil.rmtree(FOLDER / name)
        accelerator.save_state(str(FOLDER / f"checkpoint-{step}"))
