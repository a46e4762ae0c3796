# SPDX-License-Identifier: Apache-2.0
"""The state that a training process saves: a GPT-shaped model and its AdamW, as nested dicts.

Matrices are bf16, norms and biases fp32, both moments fp32. Each tensor has its own random seed. So
a loaded state can be compared without a second copy of the whole state in memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

State: TypeAlias = dict[str, Any]
Keys: TypeAlias = tuple[str | int, ...]

WIDTHS = (4096, 2048, 1024, 512, 256, 128, 64)
LEAST_LAYERS = 8
MOST_TOKENS = 50304
TOKENS_PER_WIDTH = 64  # small models must not be mostly embedding
POSITIONS = 1024
RNG_BYTES = 5056  # size of torch.get_rng_state()

MOMENTS = ("exp_avg", "exp_avg_sq")

# Entries of the state that are not tensors.
PLAIN: dict[Keys, object] = {
    ("epoch",): 3,
    ("optimizer", "param_groups"): [
        {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "fused": None}
    ],
}


@dataclass(frozen=True)
class Spec:
    """One tensor: its place in the state, its type and its seed."""

    keys: Keys
    shape: tuple[int, ...]
    dtype: torch.dtype
    seed: int

    @property
    def n_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    @property
    def name(self) -> str:
        return ".".join(map(str, self.keys))

    def make(self) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        tensor = torch.empty(self.shape, dtype=self.dtype)
        if not self.dtype.is_floating_point:
            return tensor.random_(generator=generator)
        if self.keys[-1] == "exp_avg_sq":  # squares are not negative
            return tensor.uniform_(generator=generator)
        return tensor.normal_(generator=generator)


def layer_parameters(width: int) -> Iterator[tuple[str, tuple[int, ...], torch.dtype]]:
    for norm in ("norm_1", "norm_2"):
        yield f"{norm}.weight", (width,), torch.float32
        yield f"{norm}.bias", (width,), torch.float32
    for name, shape in {
        "attention.qkv": (3 * width, width),
        "attention.out": (width, width),
        "mlp.up": (4 * width, width),
        "mlp.down": (width, 4 * width),
    }.items():
        yield f"{name}.weight", shape, torch.bfloat16
        yield f"{name}.bias", shape[:1], torch.float32


def parameters(width: int, layers: int) -> Iterator[tuple[str, tuple[int, ...], torch.dtype]]:
    tokens = min(MOST_TOKENS, TOKENS_PER_WIDTH * width)
    yield "embedding.tokens.weight", (tokens, width), torch.bfloat16
    yield "embedding.positions.weight", (POSITIONS, width), torch.bfloat16
    for layer in range(layers):
        for name, shape, dtype in layer_parameters(width):
            yield f"layers.{layer}.{name}", shape, dtype
    yield "norm.weight", (width,), torch.float32
    yield "norm.bias", (width,), torch.float32


def specs(width: int, layers: int) -> list[Spec]:
    found: list[Spec] = []

    def add(keys: Keys, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        found.append(Spec(keys, shape, dtype, seed=len(found) + 1))

    for index, (name, shape, dtype) in enumerate(parameters(width, layers)):
        add(("model", name), shape, dtype)
        for moment in MOMENTS:
            add(("optimizer", "state", index, moment), shape, torch.float32)
        add(("optimizer", "state", index, "step"), (), torch.float32)
    add(("rng",), (RNG_BYTES,), torch.uint8)
    return found


def specs_of_size(size: int) -> list[Spec]:
    """Return the tensors of the widest model that has LEAST_LAYERS layers in `size` bytes."""
    for width in WIDTHS:
        bare, one = (sum(spec.n_bytes for spec in specs(width, layers)) for layers in (0, 1))
        layers = (size - bare) // (one - bare)
        if layers >= LEAST_LAYERS:
            return specs(width, layers)
    raise ValueError(f"no model with optimizer is as small as {size} bytes")


def make(size: int) -> State:
    state: State = {}
    for keys, value in [
        *((spec.keys, spec.make()) for spec in specs_of_size(size)),
        *PLAIN.items(),
    ]:
        node: dict[Any, Any] = state
        for key in keys[:-1]:
            node = node.setdefault(key, {})
        node[keys[-1]] = value
    return state


def find(state: State, keys: Keys) -> Any:
    node: Any = state
    for key in keys:
        node = node[key]
    return node


def flatten(state: State, size: int) -> dict[str, torch.Tensor]:
    """Return the tensors by name, for formats that store nothing else."""
    return {spec.name: find(state, spec.keys) for spec in specs_of_size(size)}


def require_equal(tensors: dict[str, torch.Tensor], size: int) -> None:
    """Require tensors that are bit for bit those of make()."""
    expected = specs_of_size(size)
    if len(tensors) != len(expected):
        raise ValueError(f"{len(tensors)} tensors instead of {len(expected)}")
    for spec in expected:
        found, wanted = tensors[spec.name], spec.make()
        if (found.dtype, found.shape) != (wanted.dtype, wanted.shape) or not torch.equal(
            found.reshape(-1).view(torch.uint8), wanted.reshape(-1).view(torch.uint8)
        ):
            raise ValueError(f"{spec.name} is not what was saved")


def require_plain_equal(state: State) -> None:
    for keys, value in PLAIN.items():
        if find(state, keys) != value:
            raise ValueError(f"{keys} is not what was saved")
