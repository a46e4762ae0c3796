# SPDX-License-Identifier: Apache-2.0
"""As imagenet/main.py of pytorch/examples: checkpoint.pth.tar, and a copy of the best."""

import shutil
from typing import Any

import torch
from tiny import FOLDER, STEPS, loss_of, model, told

PER_EPOCH = 4
last, best_file = FOLDER / "checkpoint.pth.tar", FOLDER / "model_best.pth.tar"
net = model()
optimizer = torch.optim.SGD(net.parameters(), 0.01, momentum=0.9, weight_decay=1e-4)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.1)
first, best = 0, torch.tensor(1e9)
if last.is_file():
    found: dict[str, Any] = torch.load(last, map_location="cpu")
    first, best = found["epoch"], found["best_acc1"]
    net.load_state_dict(found["state_dict"])
    optimizer.load_state_dict(found["optimizer"])
    schedule.load_state_dict(found["scheduler"])
for epoch in range(first, STEPS // PER_EPOCH):
    for i in range(PER_EPOCH):
        step = epoch * PER_EPOCH + i
        loss = loss_of(net, step)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        told(step, loss)
    schedule.step()
    is_best = bool(loss.detach() < best)
    best = torch.minimum(loss.detach(), best)
    state = {
        "epoch": epoch + 1,
        "arch": "tiny",
        "state_dict": net.state_dict(),
        "best_acc1": best,
        "optimizer": optimizer.state_dict(),
        "scheduler": schedule.state_dict(),
    }
    torch.save(state, last)
    if is_best:
        shutil.copyfile(last, best_file)
