# SPDX-License-Identifier: Apache-2.0
"""Open checkpoints with torch alone, safely and without copying, and list their contents.

python examples/stock_load.py FILE...
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield all tensors in a nested value."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (dict, list, tuple)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors(item)


def main(paths: list[str]) -> None:
    for path in paths:
        state = torch.load(path, weights_only=True, mmap=True)
        found = list(tensors(state))
        elements = sum(tensor.numel() for tensor in found)
        # This reads the data of all tensors, not only their names.
        finite = all(bool(tensor.isfinite().all()) for tensor in found)
        print(
            f"{Path(path).name}: {', '.join(state)}; {len(found)} tensors, {elements:,} elements, "
            f"{'all finite' if finite else 'NOT ALL FINITE'}"
        )
        if not finite:
            sys.exit(1)
    if "ioshape" in sys.modules:
        sys.exit("ioshape was imported, so this does not test torch alone")


if __name__ == "__main__":
    main(sys.argv[1:])
