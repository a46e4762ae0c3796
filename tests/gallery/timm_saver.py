# SPDX-License-Identifier: Apache-2.0
"""As timm's CheckpointSaver: a temporary file that is renamed, hard links to it, the best kept."""

import os
from pathlib import Path
from typing import Any

import torch
from tiny import FOLDER, STEPS, loss_of, model, told

PER_EPOCH, MOST = 4, 2
temporary, last = FOLDER / "tmp.pth.tar", FOLDER / "last.pth.tar"
net = model()
optimizer = torch.optim.RMSprop(net.parameters(), lr=1e-3, momentum=0.9)
kept: list[tuple[Path, float]] = []
first = 0
if last.exists():
    found: dict[str, Any] = torch.load(last, map_location="cpu")
    net.load_state_dict(found["state_dict"])
    optimizer.load_state_dict(found["optimizer"])
    first = found["epoch"] + 1
for epoch in range(first, STEPS // PER_EPOCH):
    for i in range(PER_EPOCH):
        step = epoch * PER_EPOCH + i
        loss = loss_of(net, step)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        told(step, loss)
    state = {"epoch": epoch, "arch": "tiny", "version": 2}
    state |= {"state_dict": net.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state, temporary)
    os.replace(temporary, last)  # noqa: PTH105 - as it does
    worst = max((metric for _, metric in kept), default=0.0)
    if len(kept) < MOST or loss.item() < worst:
        while len(kept) >= MOST:
            kept.sort(key=lambda one: one[1])
            kept.pop()[0].unlink(missing_ok=True)
        path = FOLDER / f"checkpoint-{epoch}.pth.tar"
        path.unlink(missing_ok=True)
        os.link(last, path)
        kept.append((path, loss.item()))
        if loss.item() <= min(metric for _, metric in kept):
            best = FOLDER / "model_best.pth.tar"
            best.unlink(missing_ok=True)
            os.link(last, best)
