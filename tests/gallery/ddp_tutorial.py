# SPDX-License-Identifier: Apache-2.0
"""As multigpu_torchrun.py of PyTorch's tutorial on DDP: rank 0 saves a snapshot, all load it."""

from typing import Any

import torch
import torch.distributed as dist
from tiny import FOLDER, SAVE_EVERY, STEPS, loss_of, model, told
from torch.nn.parallel import DistributedDataParallel

store = dist.HashStore()  # type: ignore[attr-defined]
dist.init_process_group("gloo", store=store, rank=0, world_size=1)
path = FOLDER / "snapshot.pt"
net = model()
first = 0
if path.exists():
    snapshot: dict[str, Any] = torch.load(path, map_location="cpu")
    net.load_state_dict(snapshot["MODEL_STATE"])
    first = snapshot["EPOCHS_RUN"] + 1
wrapped = DistributedDataParallel(net)
optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
for step in range(first, STEPS):
    loss = loss_of(wrapped, step)
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    told(step, loss)
    if dist.get_rank() == 0 and step % SAVE_EVERY == 0:
        torch.save({"MODEL_STATE": wrapped.module.state_dict(), "EPOCHS_RUN": step}, path)
dist.destroy_process_group()
