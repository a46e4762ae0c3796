# SPDX-License-Identifier: Apache-2.0
"""Talks to a process in which things are measured: bench-worker in C, or one in Python."""

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import TypeAlias

Answer: TypeAlias = dict[str, float | str]


class WorkerError(Exception):
    """The worker could not do what it was asked for."""


class Worker:
    """May have files of ours open, and an environment of its own."""

    def __init__(
        self,
        *command: str | Path,
        environment: dict[str, str] | None = None,
        files: Sequence[int] = (),
    ) -> None:
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            env=environment,
            pass_fds=files,
        )

    def __enter__(self) -> "Worker":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # It ends by itself when nobody can ask anything any more.
        self.process.communicate()

    def ask(self, verb: str, **values: str | float | Path) -> Answer:
        self.tell(verb, **values)
        return self.hear(verb)

    def tell(self, verb: str, **values: str | float | Path) -> None:
        """Asks, and does not wait for the answer: `hear` does."""
        line = "\t".join([verb, *(f"{key}={value}" for key, value in values.items())])
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def hear(self, verb: str) -> Answer:
        assert self.process.stdout is not None
        answer = self.process.stdout.readline()
        if not answer:
            raise WorkerError(f"{verb}: the worker ended with status {self.process.wait()}")
        result: Answer = json.loads(answer)
        if "error" in result:
            raise WorkerError(f"{verb}: {result['error']}")
        return result
