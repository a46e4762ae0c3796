# SPDX-License-Identifier: Apache-2.0
"""Open the files of trainer.c and trainer.cpp with torch alone, and check their contents.

python examples/read_back.py DIRECTORY
"""

import sys
from pathlib import Path

import torch


def show(path: Path) -> dict[str, torch.Tensor]:
    """Load a file with stock torch, safely and without copying, and list its tensors."""
    tensors: dict[str, torch.Tensor] = torch.load(path, weights_only=True, mmap=True)
    print(f"{path.name}:")
    for name, tensor in tensors.items():
        print(f"  {name:<9} {tensor.dtype!s:<14} {tuple(tensor.shape)}")
    return tensors


def expect(what: str, holds: bool) -> None:
    print(f"  {'yes' if holds else 'NO'}: {what}")
    if not holds:
        sys.exit(1)


def main(folder: Path) -> None:
    trained = show(folder / "model.pt")
    rows, columns = trained["weights"].shape
    # This is the pattern that examples/trainer.c trains towards.
    pattern = (7 * torch.arange(rows)[:, None] + 3 * torch.arange(columns)) % 11 / 11
    expect(
        "the weights of the C trainer have learned the pattern",
        torch.allclose(trained["weights"], pattern),
    )
    expect("the saved loss is near 0", 0 <= trained["loss"].item() < 1e-9)

    counted = show(folder / "model_cpp.pt")["weights"]
    expect(
        "the weights of the C++ trainer are 0, 1, 2, …",
        torch.equal(counted.flatten(), torch.arange(256.0 * 128)),
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
