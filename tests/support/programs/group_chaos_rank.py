# SPDX-License-Identifier: Apache-2.0
"""A rank of a job that group_chaos.py harms: it loads the newest checkpoint, and saves more."""

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
    """Report the failure."""
    say("failed", step=step, text=str(error), kind=type(error).__name__, at=time.monotonic())


def saved_or_failed(step: int, finish: Any) -> bool:
    """Finish a save and report its result. Return whether it succeeded."""
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
    """Load the newest checkpoint and report the result. Return its step."""
    try:
        found = ioshape.load_group(directory)
    except FileNotFoundError:
        say("loaded", step=0, right=True)
        return 0
    step = int(found["step"])
    say("loaded", step=step, right=is_right(found, rank, step, size_at(step)))
    return step


def size_at(step: int) -> int:
    """Return the size of this rank's object, which differs from rank to rank."""
    return (5_000, 300_000, 20, 80_000)[(rank + step) % 4]


def run() -> None:
    """Save until a save fails, or all steps are done."""
    options = {"mode": asked["mode"], "keep_last": 3}
    failures = 0
    try:
        if asked["gloo"]:
            set_up_distributed(20.0)
        say("ready")
        first = newest() + 1
    except Exception as error:
        # A rank that meets the others may wait for ranks that never come.
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
                # An earlier save failed, or other ranks did not come.
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
    """Wait for saves without a handle.

    A call that raises the error of an earlier save may also have begun a save.
    """
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
    os._exit(0)  # like a job that is stopped
Path(directory).stat()
