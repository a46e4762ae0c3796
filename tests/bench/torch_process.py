# SPDX-License-Identifier: Apache-2.0
"""Save and load with torch, ioshape and other libraries, and answer how long that took.

This process is for the Python benchmarks what bench-worker is for the others. It speaks the same
protocol: a command is a line of words separated by tabs, an answer is a line of JSON. It lives
through all rounds, so that imports, page faults and one-time preparations are not measured.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import resource
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from . import torch_state
from .worker import Answer

TINY_BYTES = 1 << 10
PAGE_BYTES = 4096

# Staging is allocated in chunks. This many extra bytes are enough for all tensors.
STAGING_SLACK = 64 << 20

COPY_ALIGNMENT = 64

SAVES_PER_LOOP = 3
WIDTH = 512


def cpu_seconds() -> float:
    """Return the processor time of all threads. This includes ended ones and io_uring's workers."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def number_of(file: str, name: str) -> int:
    """Return a number that the kernel keeps of this process, such as `VmRSS` in `status`."""
    for line in Path("/proc/self", file).read_text(encoding="ascii").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1])
    raise KeyError(name)


class PeakMemory:
    """The MiB of resident memory that are added at most in a `with` block."""

    def __enter__(self) -> PeakMemory:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # forgets the last peak
        self._before_kib = number_of("status", "VmRSS")
        return self

    def __exit__(self, *_: object) -> None:
        self.extra_mib = (number_of("status", "VmHWM") - self._before_kib) / 1024


class Cost:
    """The time and processor time of a `with` block."""

    def __init__(self) -> None:
        self.answer: Answer = {}

    def __enter__(self) -> Cost:
        self.began_cpu, self.began = cpu_seconds(), time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.answer["seconds"] = time.perf_counter() - self.began
        self.answer["cpu_seconds"] = cpu_seconds() - self.began_cpu


def sync(path: Path, flags: int = 0) -> None:
    file = os.open(path, os.O_RDONLY | flags)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def address_of(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def told(report: Any) -> Answer:
    """Return the fields of an ioshape.Report that explain a time."""
    names = ("pickle_s", "stage_s", "plan_s", "write_s", "sync_s", "commit_s", "total_s")
    return {
        **{name: float(getattr(report, name)) for name in names},
        "engine": report.engine,
        "direct": float(report.direct),
        "written_by": report.written_by,
        "downgrades": "; ".join(report.downgrades),
    }


class Process:
    def __init__(self) -> None:
        self.state: Any = None
        self.flat: dict[str, torch.Tensor] = {}
        self.size = 0
        self.loaded: Any = None
        self.target: Any = None
        self.handle: Any = None
        self.twin: mmap.mmap | None = None
        self.began = 0.0

    # ---- Making the state -----------------------------------------------------------------------

    def make(self, size: str) -> Answer:
        self.size = int(size)
        self.state = torch_state.make(self.size)
        self.flat = torch_state.flatten(self.state, self.size)
        return {
            "tensors": float(len(self.flat)),
            "bytes": float(sum(tensor.nbytes for tensor in self.flat.values())),
        }

    def make_tiny(self) -> Answer:
        self.state = {"weights": torch.ones(TINY_BYTES // 4)}
        return {"bytes": float(TINY_BYTES)}

    def make_many(self, tensors: str) -> Answer:
        """Make a state of many tiny tensors."""
        self.state = {f"layer.{i}.weight": torch.full((16,), float(i)) for i in range(int(tensors))}
        return {"bytes": 64.0 * int(tensors)}

    def forget(self) -> Answer:
        self.state, self.flat = None, {}
        return {}

    # ---- Saving -----------------------------------------------------------------------------

    def save(self, how: str, path: str) -> Answer:
        return SAVES[how](self, Path(path))

    def save_ioshape(self, path: Path) -> Answer:
        import ioshape  # noqa: PLC0415 - other libraries are measured in processes without it

        with Cost() as cost:
            report = ioshape.save(self.state, path)
        return {**cost.answer, **told(report)}

    def save_torch(self, path: Path) -> Answer:
        with Cost() as cost:
            torch.save(self.state, path)
        return cost.answer

    def save_torch_fsync(self, path: Path) -> Answer:
        with Cost() as cost:
            torch.save(self.state, path)
            sync(path)
        return cost.answer

    def save_safetensors_fsync(self, path: Path) -> Answer:
        from safetensors.torch import save_file  # noqa: PLC0415

        with Cost() as cost:
            save_file(self.flat, path)
            sync(path)
        return cost.answer

    def save_our_safetensors(self, path: Path) -> Answer:
        import ioshape.safetensors  # noqa: PLC0415

        with Cost() as cost:
            ioshape.safetensors.save_file(self.flat, path, checksums=True)
        return cost.answer

    def save_dcp(self, path: Path) -> Answer:
        """Save with DCP's defaults: one file for the rank and a metadata file, both synced."""
        from torch.distributed.checkpoint.state_dict_saver import save  # noqa: PLC0415

        with Cost() as cost:
            save(self.state, checkpoint_id=path, no_dist=True)
        return cost.answer

    def save_dance(self, path: Path) -> Answer:
        """Save as careful programs do by hand."""
        temporary = path.with_name(f"{path.name}.tmp")
        with Cost() as cost:
            torch.save(self.state, temporary)
            sync(temporary)
            temporary.rename(path)
            sync(path.parent, os.O_DIRECTORY)
        return cost.answer

    # ---- Checking ---------------------------------------------------------------------------

    def check(self, how: str, path: str) -> Answer:
        """Load a saved file with the format's own reader, and compare."""
        if how == "safetensors":
            from safetensors.torch import load_file  # noqa: PLC0415

            tensors = load_file(path)
        elif how == "dcp":
            from torch.distributed.checkpoint.state_dict_loader import load  # noqa: PLC0415

            empty = {name: torch.empty_like(tensor) for name, tensor in self.flat.items()}
            load(empty, checkpoint_id=path, no_dist=True)
            tensors = empty
        else:
            state = torch.load(path, weights_only=True)
            torch_state.require_plain_equal(state)
            tensors = torch_state.flatten(state, self.size)
        torch_state.require_equal(tensors, self.size)
        return {}

    # ---- Background saves -----------------------------------------------------------------------

    def make_room(self, bytes: str) -> Answer:  # noqa: A002 - a word of the command
        """Configure staging memory for this many bytes.

        The default depends on the machine's memory.
        """
        import ioshape  # noqa: PLC0415

        ioshape.configure(staging_bytes=int(bytes) + STAGING_SLACK)
        return {}

    def stage(self, path: str) -> Answer:
        """Begin a background save.

        The state may change after it; `wait` ends when it is durable.
        """
        import ioshape  # noqa: PLC0415

        with Cost() as cost:
            self.handle = ioshape.save_async(self.state, path)
        self.began = cost.began
        return cost.answer

    def wait(self) -> Answer:
        report = self.handle.result()
        self.handle = None
        return {"durable_s": time.perf_counter() - self.began, **told(report)}

    def memcpy(self) -> Answer:
        """Copy the tensors with glibc's memcpy on one thread, into warm memory in huge pages."""
        copies, room = [], 0
        for tensor in self.flat.values():
            copies.append((room, tensor.data_ptr(), tensor.nbytes))
            room += -(-tensor.nbytes // COPY_ALIGNMENT) * COPY_ALIGNMENT
        if self.twin is None:
            self.twin = mmap.mmap(-1, room, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self.twin.madvise(mmap.MADV_HUGEPAGE)
            ctypes.memset(address_of(self.twin), 1, room)
        start = address_of(self.twin)
        copy = ctypes.memmove  # memmove runs the code of memcpy in this direction
        with Cost() as cost:
            for offset, source, n_bytes in copies:
                copy(start + offset, source, n_bytes)
        return cost.answer

    # ---- Training ---------------------------------------------------------------------------

    def train(self, how: str, path: str, batch_size: str, steps_per_save: str) -> Answer:
        """Run a training loop that saves regularly or never.

        After the last save it goes on for a while.

        One thread computes, so that a core is left for background work, as where a GPU computes.
        """
        torch.set_num_threads(1)
        torch.manual_seed(1)
        model = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, WIDTH),
            torch.nn.GELU(),
            torch.nn.Linear(WIDTH, WIDTH),
            torch.nn.GELU(),
            torch.nn.Linear(WIDTH, WIDTH),
        )
        optimizer = torch.optim.AdamW(model.parameters())
        batch = torch.randn(int(batch_size), WIDTH)
        between = int(steps_per_save)
        save, before_step = SAVES_IN_LOOP[how], BEFORE_STEP.get(how)
        in_calls = 0.0
        handle: Any = None
        # seconds of steps during a save, or of all steps if there are no saves
        steps: list[float] = []
        with Cost() as cost:
            for step in range(1, between * (SAVES_PER_LOOP + 1)):
                began = time.perf_counter()
                is_told = save is None or (handle is not None and not handle.done())
                loss = (model(batch) - batch).square().mean()
                optimizer.zero_grad()
                loss.backward()
                if before_step is not None:
                    before_step()
                optimizer.step()
                if is_told:
                    steps.append(time.perf_counter() - began)
                if step % between == 0 and save:
                    called = time.perf_counter()
                    state = {
                        **self.state,
                        "net": model.state_dict(),
                        "adam": optimizer.state_dict(),
                    }
                    handle = save(state, f"{path}-{step}.pt")
                    in_calls += time.perf_counter() - called
        if handle is not None:
            import ioshape  # noqa: PLC0415

            ioshape.wait_all()
        return {
            **cost.answer,
            "in_calls_s": in_calls,
            "step_p99_s": sorted(steps)[int(0.99 * (len(steps) - 1))] if steps else 0.0,
            "steps": float(step),
            "saves": float(SAVES_PER_LOOP),
        }

    # ---- Loading ----------------------------------------------------------------------------

    def load(self, how: str, path: str, check: str = "0") -> Answer:
        """Load into new memory, as a process does that has just started and resumes.

        Earlier loads are freed before the clock starts, and malloc keeps none of their memory.
        """
        ctypes.CDLL(None).malloc_trim(0)
        load = self._loader(how)
        with PeakMemory() as memory, Cost() as cost:
            self.loaded = load(path)
        if check == "1" and "safetensors" in how:
            torch_state.require_equal(self.loaded, self.size)
        elif check == "1":
            torch_state.require_plain_equal(self.loaded)
            torch_state.require_equal(torch_state.flatten(self.loaded, self.size), self.size)
        self.loaded = None
        return {**cost.answer, "extra_mib": memory.extra_mib}

    def _loader(self, how: str) -> Callable[[str], Any]:
        """Return the function that loads a file in this way."""
        if how == "torch":
            return torch.load
        if how.startswith("safetensors"):
            return partial(load_safetensors, "pread" if how == "safetensors pread" else "mmap")
        import ioshape.safetensors  # noqa: PLC0415 - other libraries are measured without it

        if how == "ioshape safetensors":
            return ioshape.safetensors.load_file
        return partial(ioshape.load, into=self.target) if how == "ioshape into" else ioshape.load

    def make_target(self, path: str) -> Answer:
        """Load the tensors that later loads fill and that memcpy() copies to, and zero them."""
        self.target = torch.load(path)
        self.flat = torch_state.flatten(self.target, self.size)
        for tensor in self.flat.values():
            tensor.zero_()
        return {}


def load_safetensors(backend: str, path: str) -> dict[str, torch.Tensor]:
    """Load a file with the original, and read every page: it may only map the file."""
    from safetensors.torch import load_file  # noqa: PLC0415

    loaded = load_file(path, backend=backend)
    for tensor in loaded.values():
        tensor.reshape(-1).view(torch.uint8)[::PAGE_BYTES].sum()
    return loaded


SAVES: dict[str, Callable[[Process, Path], Answer]] = {
    "ioshape": Process.save_ioshape,
    "torch": Process.save_torch,
    "torch_fsync": Process.save_torch_fsync,
    "safetensors_fsync": Process.save_safetensors_fsync,
    "ioshape safetensors": Process.save_our_safetensors,
    "dcp": Process.save_dcp,
    "dance": Process.save_dance,
}


def begin_ioshape(state: Any, path: str) -> Any:
    import ioshape  # noqa: PLC0415

    return ioshape.save_async(state, path)


def begin_lazy(state: Any, path: str) -> Any:
    import ioshape  # noqa: PLC0415

    return ioshape.save_async(state, path, lazy=True)


def before_step() -> None:
    import ioshape  # noqa: PLC0415

    ioshape.before_step()


BEFORE_STEP = {"ioshape lazy": before_step}

SAVES_IN_LOOP: dict[str, Callable[[Any, str], Any] | None] = {
    "ioshape": begin_ioshape,
    "ioshape lazy": begin_lazy,
    "torch": torch.save,
    "nobody": None,
}


def await_moment(at: str) -> None:
    """Sleep until this time in nanoseconds of CLOCK_MONOTONIC, which all processes share."""
    while (left := int(at) - time.monotonic_ns()) > 0:
        time.sleep(left / 1e9)


def serve(subject: object) -> None:
    """Answer commands. Their verbs are the names of the subject's methods."""
    # Keep output of libraries away from the driver. (DCP prints a warning whenever it runs alone.)
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    warnings.filterwarnings("ignore", module=r"torch\.distributed\.")
    for line in sys.stdin:
        verb, *words = line.rstrip("\n").split("\t")
        values = dict(word.split("=", 1) for word in words)
        await_moment(values.pop("at", "0"))
        try:
            answer = getattr(subject, verb)(**values)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    serve(Process())
