# SPDX-License-Identifier: Apache-2.0
"""Compare the log of a storm with the files and checkpoints at its end."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from chaos_judge import Line, read_log


@dataclass
class Save:
    """A save of a file. It ends when its process logs the result, or dies."""

    client: str
    turn: int
    file: str
    content: int
    asked: float
    ended: float = math.inf
    acknowledged: bool = False

    def is_after(self, other: "Save") -> bool:
        """Return whether this save must win over the other one."""
        if self.client == other.client:
            return self.turn > other.turn
        return self.asked > other.ended

    def __str__(self) -> str:
        return f"{self.client}/{self.turn} of {self.content}"


class Story:
    """The contents of a log. `jobs` maps the number of a checkpointing client to its job."""

    def __init__(self, log: Path, deaths: Mapping[str, int], jobs: Mapping[int, int]) -> None:
        self.saves: list[Save] = []
        self.findings: list[str] = []
        #: By job: times at which a rank logged that a step is saved, and the step.
        self.kept: dict[int, list[tuple[float, int]]] = {job: [] for job in jobs.values()}
        self._jobs = jobs
        self._open: dict[tuple[str, str], Save] = {}
        self._begun: dict[str, float] = {}
        for line in read_log(log):
            self._read(line)
        for save in self._open.values():
            save.ended = deaths.get(save.client, math.inf)

    def newest(self, job: int, before: float = math.inf) -> int:
        """Return the newest step that a rank had logged before this time."""
        return max((step for at, step in self.kept[job] if at < before), default=0)

    def _job_of(self, client: str) -> int:
        return self._jobs[int(client.partition(".")[0])]

    def _read(self, line: Line) -> None:
        key = (line.client, line.values.get("turn", ""))
        if line.event == "begin":
            self._begun[line.client] = line.at
        elif line.event == "ask":
            file = "/".join(line.values["file"].rsplit("/", 2)[1:])
            save = Save(line.client, int(key[1]), file, int(line.values["step"]), line.at)
            self.saves.append(save)
            self._open[key] = save
        elif line.event in {"saved", "fail", "gave-up"} and key in self._open:
            save = self._open.pop(key)
            save.ended, save.acknowledged = line.at, line.event == "saved"
        elif line.event in {"torn", "spied"} or self._is_last(line):
            self.findings.append(f"{line.client}: {line.event}: {line.text}")
        elif line.event == "kept":
            self.kept[self._job_of(line.client)].append((line.at, int(key[1])))
        elif line.event == "latest":
            self._judge_latest(line)

    @staticmethod
    def _is_last(line: Line) -> bool:
        """Return whether a last save failed, although the storm was over."""
        return line.event == "broke" and line.client.endswith("-last")

    def _judge_latest(self, line: Line) -> None:
        found = int(line.values["step"])
        known = self.newest(self._job_of(line.client), self._begun[line.client])
        if found < known:
            self.findings.append(f"{line.client} finds step {found}, but {known} had been saved")


def judge_files(story: Story, there: Mapping[str, int]) -> Iterator[str]:
    """Yield findings about files. `there` has each file's content by user folder and name."""
    of: dict[str, list[Save]] = {}
    for save in story.saves:
        of.setdefault(save.file, []).append(save)
    for file, saves in of.items():
        acknowledged = [one for one in saves if one.acknowledged]
        found = next((one for one in saves if one.content == there.get(file)), None)
        if file not in there:
            if acknowledged:
                yield f"{file} is not there, but {acknowledged[-1]} was saved"
        elif found is None:
            yield f"{file} holds {there[file]}, which nobody saved there"
        else:
            newer = next((one for one in acknowledged if one.is_after(found)), None)
            if newer:
                yield f"{file} holds {found}, but {newer} was saved after it"
