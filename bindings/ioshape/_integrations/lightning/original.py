# SPDX-License-Identifier: Apache-2.0
"""What is used of Lightning, under whichever of its names it is installed."""

from __future__ import annotations

from importlib import import_module
from typing import Any

# The whole of it, and its older part by itself. Who has imported one of them already means that.
PACKAGES = ("lightning.fabric", "lightning_fabric")


def find_torch_io() -> Any:
    """The class that saves where nobody has asked for another one."""
    for name in PACKAGES:
        try:
            return import_module(f"{name}.plugins.io.torch_io").TorchCheckpointIO
        except ImportError:
            continue
    raise ImportError(
        "ioshape.lightning needs Lightning, which is not installed; install it: "
        "pip install lightning"
    )
