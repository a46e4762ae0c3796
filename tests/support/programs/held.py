# SPDX-License-Identifier: Apache-2.0
"""Runs a save or a load in a process that stops in the middle and can be killed there."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from processes import Program, started_program

PROGRAM = """
    import json
    import sys

    import ioshape
    from checkpoints import checkpoint

    act, path, number, n_bytes, phase = sys.argv[1:]
    held = False

    def hold(progress):
        global held
        if not held and progress.phase == phase and (phase != "write" or progress.done_bytes):
            held = True
            print("held", flush=True)
            sys.stdin.readline()

    try:
        if act == "save":
            ioshape.save(checkpoint(int(number), int(n_bytes)), path, progress=hold)
        elif act == "save_group":
            ioshape.save_group(
                checkpoint(int(number), int(n_bytes)), path, int(number), progress=hold
            )
        else:
            loaded = ioshape.load_group(path, step=int(number), progress=hold)
            assert loaded["number"] == int(number)
    except ioshape.StorageError as error:
        print(json.dumps({"errno": error.errno, "sentence": str(error)}))
    else:
        print(json.dumps({"errno": 0}))
"""


class Held:
    """The process while it is stopped."""

    def __init__(self, program: Program) -> None:
        self._program = program

    def kill(self) -> None:
        self._program.kill()

    def go_on(self) -> None:
        self._program.tell("go on")

    def end(self) -> dict[str, Any]:
        """Wait for its end. Return the errno and the sentence of its failure, or errno 0."""
        told: dict[str, Any] = json.loads(self._program.end().stdout)
        return told


@contextmanager
def held(
    folder: Path,
    act: str,
    path: Path,
    number: int,
    *,
    n_bytes: int = 32 << 20,
    phase: str = "write",
) -> Iterator[Held]:
    """Begin to save (or save_group, or load_group), and stop in this phase."""
    words = (act, path, str(number), str(n_bytes), phase)
    with started_program(folder, PROGRAM, *words) as program:
        program.expect("held")
        yield Held(program)
