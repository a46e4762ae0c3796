# SPDX-License-Identifier: Apache-2.0
"""Talk to a process that runs measurements: bench-worker in C, or one in Python."""

import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TypeAlias

Answer: TypeAlias = dict[str, float | str]


class WorkerError(Exception):
    """The worker failed or ended."""


class Worker:
    """A worker process. It can inherit open files and get its own environment."""

    def __init__(
        self,
        *command: str | Path,
        environment: Mapping[str, str] | None = None,
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
        # The worker ends when its standard input is closed.
        self.process.communicate()

    def ask(self, verb: str, **values: str | float | Path) -> Answer:
        self.tell(verb, **values)
        return self.hear(verb)

    def tell(self, verb: str, **values: str | float | Path) -> None:
        """Send a command without waiting for the answer, which hear() returns."""
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
