# SPDX-License-Identifier: Apache-2.0
"""Hold tensors on a GPU for gpu.py, and speak the protocol of torch_process.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from . import torch_state
from .torch_process import Cost, serve, told
from .worker import Answer

# ioshape copies in pieces of this size, so the limit is the speed of such copies.
PIECE_BYTES = 16 << 20
PIECES = 3


def on_gpu(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.cuda()
    if isinstance(value, dict):
        return {key: on_gpu(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(on_gpu, value))
    return value


class Process:
    def __init__(self) -> None:
        self.state: Any = None
        self.size = 0
        self.loaded: Any = None

    def find(self) -> Answer:
        """Return the GPU and the rival that can be measured. A name is "" if there is none."""
        if not torch.cuda.is_available():
            return {"gpu": "", "torch": torch.__version__}
        try:
            import fastsafetensors  # noqa: F401, PLC0415 - is it installed?

            rival = "fastsafetensors"
        except ImportError:
            rival = ""
        return {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "rival": rival}

    def make(self, size: str) -> Answer:
        self.size = int(size)
        plain = torch_state.make(self.size)
        flat = torch_state.flatten(plain, self.size)
        n_bytes = float(sum(tensor.nbytes for tensor in flat.values()))
        self.state = on_gpu(plain)
        return {"bytes": n_bytes}

    def pinned(self, direction: str, bytes: str) -> Answer:  # noqa: A002 - a word of the command
        """Copy between pinned memory and the GPU, and do nothing else."""
        there = [torch.empty(PIECE_BYTES, dtype=torch.uint8, device="cuda") for _ in range(PIECES)]
        here = [torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(PIECES)]
        into, source = (here, there) if direction == "from" else (there, here)
        torch.cuda.synchronize()
        with Cost() as cost:
            for number in range(int(bytes) // PIECE_BYTES):
                into[number % PIECES].copy_(source[number % PIECES], non_blocking=True)
            torch.cuda.synchronize()
        return {**cost.answer, "bytes": float(int(bytes) // PIECE_BYTES * PIECE_BYTES)}

    def save(self, path: str) -> Answer:
        import ioshape  # noqa: PLC0415

        torch.cuda.synchronize()
        with Cost() as cost:
            report = ioshape.save(self.state, path)
        return {**cost.answer, **told(report)}

    def save_safetensors(self, path: str) -> Answer:
        """Save a file for the rival to load."""
        from safetensors.torch import save_file  # noqa: PLC0415

        save_file(torch_state.flatten(self.state, self.size), path)
        return {}

    def forget(self) -> Answer:
        self.state = None
        torch.cuda.empty_cache()
        return {}

    def load(self, how: str, path: str, check: str = "0") -> Answer:
        self.loaded = None
        torch.cuda.synchronize()
        with Cost() as cost:
            self.loaded = LOADS[how](path)
            torch.cuda.synchronize()
        if check == "1":
            flat = self.loaded if how == "rival" else torch_state.flatten(self.loaded, self.size)
            torch_state.require_equal({name: one.cpu() for name, one in flat.items()}, self.size)
        self.loaded = None
        return cost.answer


def load_ours(path: str) -> Any:
    import ioshape  # noqa: PLC0415

    return ioshape.load(path, map_location="cuda")


def load_rival(path: str) -> Any:
    from fastsafetensors import SafeTensorsFileLoader, SingleGroup  # noqa: PLC0415

    loader = SafeTensorsFileLoader(SingleGroup(), "cuda:0", nogds=True)
    try:
        loader.add_filenames({0: [path]})
        buffer = loader.copy_files_to_device()
        # Clone the tensors, because they point into the buffer, which is freed with the loader.
        return {name: buffer.get_tensor(name).clone() for name in buffer.key_to_rank_lidx}
    finally:
        loader.close()


LOADS: dict[str, Callable[[str], Any]] = {"ioshape": load_ours, "rival": load_rival}

if __name__ == "__main__":
    serve(Process())
