# SPDX-License-Identifier: Apache-2.0
"""As mnist/main.py of pytorch/examples: weights at the end, and nothing to resume from."""

import torch
from tiny import FOLDER, STEPS, loss_of, model, told

net = model()
optimizer = torch.optim.Adadelta(net.parameters(), lr=1.0)
for step in range(STEPS):
    optimizer.zero_grad()
    loss = loss_of(net, step)
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    told(step, loss)
torch.save(net.state_dict(), FOLDER / "mnist_cnn.pt")
