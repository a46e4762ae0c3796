# SPDX-License-Identifier: Apache-2.0
"""As fvcore's Checkpointer, which detectron2 has: files with numbers, and one that names the last.

It opens the file itself, so that torch.save gets a file object.
"""

from typing import Any

import torch
from tiny import FOLDER, SAVE_EVERY, STEPS, loss_of, model, told

tag = FOLDER / "last_checkpoint"
net = model()
optimizer = torch.optim.SGD(net.parameters(), lr=1e-2, momentum=0.9)
first = 0
if tag.exists():
    with (FOLDER / tag.read_text(encoding="utf-8").strip()).open("rb") as file:
        found: dict[str, Any] = torch.load(file, map_location="cpu")
    net.load_state_dict(found["model"])
    optimizer.load_state_dict(found["optimizer"])
    first = found["iteration"] + 1
for step in range(first, STEPS):
    loss = loss_of(net, step)
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    told(step, loss)
    if (step + 1) % SAVE_EVERY == 0:
        name = f"model_{step:07d}.pth"
        data = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "iteration": step}
        with (FOLDER / name).open("wb") as file:
            torch.save(data, file)
        tag.write_text(name, encoding="utf-8")
