# SPDX-License-Identifier: Apache-2.0
"""As nanoGPT's train.py: one ckpt.pt, written over and over, with the model's arguments in it."""

from typing import Any

import torch
from tiny import FOLDER, SAVE_EVERY, STEPS, WIDTH, loss_of, model, told

path = FOLDER / "ckpt.pt"
net = model()
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
step, best = 0, 1e9
if path.exists():
    found: dict[str, Any] = torch.load(path, map_location="cpu")
    prefix = "_orig_mod."  # of a compiled model
    weights = {name.removeprefix(prefix): value for name, value in found["model"].items()}
    net.load_state_dict(weights)
    optimizer.load_state_dict(found["optimizer"])
    step, best = found["iter_num"] + 1, found["best_val_loss"]
while step < STEPS:
    loss = loss_of(net, step)
    loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    told(step, loss)
    if step % SAVE_EVERY == 0:
        best = min(best, loss.item())
        checkpoint = {
            "model": net.state_dict(),
            "optimizer": optimizer.state_dict(),
            "model_args": {"width": WIDTH},
            "iter_num": step,
            "best_val_loss": best,
            "config": {"steps": STEPS},
        }
        torch.save(checkpoint, path)
    step += 1
