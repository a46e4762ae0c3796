# SPDX-License-Identifier: Apache-2.0
"""As run_clm_no_trainer.py of transformers: accelerate's save_state(); the newest folder counts."""

import os

import torch
from accelerate import Accelerator
from tiny import FOLDER, SAVE_EVERY, STEPS, loss_of, model, told

accelerator = Accelerator(cpu=True)
net = model()
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=STEPS)
net, optimizer, schedule = accelerator.prepare(net, optimizer, schedule)
first = 0
found = [entry for entry in os.scandir(FOLDER) if entry.is_dir() and entry.name.startswith("step_")]
if found:
    newest = max(found, key=lambda entry: entry.stat().st_ctime_ns)
    accelerator.load_state(newest.path)
    first = int(newest.name.removeprefix("step_")) + 1
for step in range(first, STEPS):
    loss = loss_of(net, step)
    accelerator.backward(loss)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
    told(step, loss)
    if step % SAVE_EVERY == 0:
        accelerator.save_state(str(FOLDER / f"step_{step}"))
accelerator.unwrap_model(net)
accelerator.save(net.state_dict(), FOLDER / "model.bin")
