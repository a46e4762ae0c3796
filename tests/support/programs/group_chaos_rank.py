# SPDX-License-Identifier: Apache-2.0
"""A rank of a job that group_chaos.py hurts: it goes on from what is there, and saves."""

import collections
import json
from typing import Any

from group_program import (
    Path,
    arguments,
    ioshape,
    is_right,
    object_of,
    os,
    rank,
    say,
    set_up_distributed,
    shared_memory,
    time,
)

asked: dict[str, Any] = json.loads(arguments[0])
directory = asked["directory"]


def failed(step: int, error: Exception) -> None:
    """Says so."""
    say("failed", step=step, text=str(error), kind=type(error).__name__, at=time.monotonic())


def saved_or_failed(step: int, finish: Any) -> bool:
    """Says how a save ended."""
    try:
        finish()
    except Exception as error:
        failed(step, error)
        return False
    say("saved", step=step, at=time.monotonic())
    if rank == 0:
        say("entries", names=[name for name in os.listdir(directory) if name.startswith(".")])
    return True


def newest() -> int:
    """The step that is there; how it was loaded is said."""
    try:
        found = ioshape.load_group(directory)
    except FileNotFoundError:
        say("loaded", step=0, right=True)
        return 0
    step = int(found["step"])
    say("loaded", step=step, right=is_right(found, rank, step, size_at(step)))
    return step


def size_at(step: int) -> int:
    """Of this rank's object: uneven."""
    return (5_000, 300_000, 20, 80_000)[(rank + step) % 4]


def run() -> None:
    """Saves until it fails, or all is done."""
    options = {"mode": asked["mode"], "keep_last": 3}
    failures = 0
    try:
        if asked["gloo"]:
            set_up_distributed(20.0)
        say("ready")
        first = newest() + 1
    except Exception as error:
        # Whoever meets the others waits for them, and may do so in vain.
        failed(-1, error)
        return
    pending: collections.deque[tuple[int, Any]] = collections.deque()
    for step in range(first, first + asked["steps"]):
        state = object_of(rank, step, size_at(step))
        if asked["how"] == "sync":
            well = saved_or_failed(
                step, lambda s=step, o=state: ioshape.save_group(o, directory, s, **options)
            )
        else:
            try:
                pending.append((step, ioshape.save_group_async(state, directory, step, **options)))
            except Exception as error:
                # An earlier one failed, or the others did not come.
                failed(step, error)
                well = False
            else:
                well = True
            state["data"].fill_(0)
            if well and len(pending) > asked["pending"]:
                number, handle = pending.popleft()
                well = saved_or_failed(number, handle.wait)
        failures += not well
        if failures > asked["patience"]:
            break
    while pending:
        number, handle = pending.popleft()
        saved_or_failed(number, handle.wait)


def await_the_rest() -> None:
    """A call that raised what an earlier save failed with began one, too, and gave no handle."""
    while True:
        try:
            ioshape.wait_all()
        except Exception as error:
            failed(-1, error)
        else:
            break


run()
await_the_rest()
say("end", **shared_memory(), at=time.monotonic())
if asked["leave"]:
    os._exit(0)  # as a job that is stopped
Path(directory).stat()
