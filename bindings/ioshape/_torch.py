# SPDX-License-Identifier: Apache-2.0
"""torch's own functions, as they were before anybody patched them."""

from __future__ import annotations

import torch
import torch.serialization

save = torch.serialization.save
load = torch.serialization.load
