# SPDX-License-Identifier: Apache-2.0
"""As references/classification of torchvision: model_N.pth, checkpoint.pth, with arguments."""

import argparse
from copy import deepcopy
from typing import Any

import torch
from tiny import FOLDER, STEPS, loss_of, model, told

PER_EPOCH = 4
args = argparse.Namespace(lr=0.05, epochs=STEPS // PER_EPOCH, output_dir=str(FOLDER))
net = model()
average = torch.optim.swa_utils.AveragedModel(
    deepcopy(net),
    multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9),  # type: ignore[no-untyped-call]
)
optimizer = torch.optim.SGD(net.parameters(), lr=args.lr, momentum=0.9, nesterov=True)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.epochs)
first = 0
if (FOLDER / "checkpoint.pth").exists():
    # The arguments are an object of a class: so they have it loaded with all that pickle may do.
    found: dict[str, Any] = torch.load(FOLDER / "checkpoint.pth", weights_only=False)
    net.load_state_dict(found["model"])
    average.load_state_dict(found["model_ema"])
    optimizer.load_state_dict(found["optimizer"])
    schedule.load_state_dict(found["lr_scheduler"])
    first = found["epoch"] + 1
for epoch in range(first, args.epochs):
    for i in range(PER_EPOCH):
        step = epoch * PER_EPOCH + i
        loss = loss_of(net, step)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        average.update_parameters(net)
        told(step, loss)
    schedule.step()
    checkpoint = {
        "model": net.state_dict(),
        "optimizer": optimizer.state_dict(),
        "lr_scheduler": schedule.state_dict(),
        "epoch": epoch,
        "args": args,
        "model_ema": average.state_dict(),
    }
    torch.save(checkpoint, FOLDER / f"model_{epoch}.pth")
    torch.save(checkpoint, FOLDER / "checkpoint.pth")
