# SPDX-License-Identifier: Apache-2.0
"""Find the class of Lightning that ioshape extends, under either name of the package."""

from __future__ import annotations

from importlib import import_module
from typing import Any

# The whole package, and its older part alone. find_torch_io() takes the first that can be imported.
PACKAGES = ("lightning.fabric", "lightning_fabric")


def find_torch_io() -> Any:
    """Return the class that saves checkpoints by default."""
    for name in PACKAGES:
        try:
            return import_module(f"{name}.plugins.io.torch_io").TorchCheckpointIO
        except ImportError:
            continue
    raise ImportError(
        "ioshape.lightning needs Lightning, which is not installed; install it: "
        "pip install lightning"
    )
