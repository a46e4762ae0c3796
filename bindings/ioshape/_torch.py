# SPDX-License-Identifier: Apache-2.0
"""torch's own save and load functions, before patch() replaces them."""

from __future__ import annotations

import torch
import torch.serialization

save = torch.serialization.save
load = torch.serialization.load
