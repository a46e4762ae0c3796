# SPDX-License-Identifier: Apache-2.0
"""Jobs that are harmed while they save as a group, one after another into one directory.

Each round is a job of four ranks on two nodes. Like a restart it loads the newest checkpoint and
compares it bit by bit. Then it saves step after step, until a writer, a member of a node, rank 0,
or the Redis is killed at a random time. Then the campaign checks this:

* The checkpoints are whole and right. All ranks of the next job verify that.
* No checkpoint is missing that was reported as saved.
* Survivors ended in time, and left no shared memory.
* The next save has removed what dead processes left.
"""

import collections
import contextlib
import json
import random
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from coordinators import Redis, short_folder
from nodes import Member, Ranks, forker, rank_variables
from ports import free_port
from processes import environment

RANKS, NODES = 4, 2
DEADLINE_S = 2.0

#: time that a busy machine may need in addition to the deadlines of a job that ends
GRACE_S = 12.0

#: concurrent background saves, each with a deadline of its own
PENDING = 2

MODES = ("each", "node", "rank0")
WAYS = ("sync", "async")
STORES = ("host", "files", "redis")
VICTIMS = ("writer", "member", "rank 0", "redis")


class Scene(NamedTuple):
    """A way in which a job saves, and the part of it that is killed."""

    mode: str
    how: str
    store: str
    victim: str

    @property
    def rank(self) -> int | None:
        """The rank that is killed."""
        writer = 0 if self.mode == "rank0" else 2
        return {"writer": writer, "member": 3, "rank 0": 0}.get(self.victim)


def scenes() -> list[Scene]:
    """Return all valid scenes: a Redis can be killed only if it is used."""
    return [
        Scene(mode, how, store, victim)
        for mode in MODES
        for how in WAYS
        for store in STORES
        for victim in VICTIMS
        if victim != "redis" or store == "redis"
    ]


@dataclass
class Verdict:
    """The findings of a campaign."""

    kills: int = 0
    counts: collections.Counter[str] = field(default_factory=collections.Counter)
    bad_checkpoints: list[str] = field(default_factory=list)
    lost_checkpoints: list[str] = field(default_factory=list)
    hangs: list[str] = field(default_factory=list)
    #: attempts of dead jobs that the next save did not remove, and shared memory
    leftovers: list[str] = field(default_factory=list)
    #: programs with an unexpected end
    broken: list[str] = field(default_factory=list)
    #: seconds from the kill of a rank to the end of the last survivor
    longest_s: float = 0.0
    #: seconds from the kill of a Redis; several saves may fail one after another
    longest_without_redis_s: float = 0.0
    #: failures that do not name the killed rank
    unnamed: list[str] = field(default_factory=list)

    @property
    def faults(self) -> list[str]:
        """All faults."""
        return [
            *self.bad_checkpoints,
            *self.lost_checkpoints,
            *self.hangs,
            *self.leftovers,
            *self.broken,
        ]

    def told(self) -> dict[str, Any]:
        """Return the findings for JSON."""
        return {
            "kills": self.kills,
            "bad_checkpoints": len(self.bad_checkpoints),
            "lost_checkpoints": len(self.lost_checkpoints),
            "hangs": len(self.hangs),
            "leftovers": len(self.leftovers),
            "broken": len(self.broken),
            "longest_s": round(self.longest_s, 2),
            "longest_without_redis_s": round(self.longest_without_redis_s, 2),
            "unnamed": [sentence[:400] for sentence in self.unnamed[:12]],
            "counts": dict(sorted(self.counts.items())),
            "faults": [fault[:600] for fault in self.faults[:20]],
        }


class Lane:
    """A directory, and the jobs that use it one after another."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder = folder
        self.directory = folder / "checkpoints"
        self.random = random.Random(seed)
        self.verdict = Verdict()
        self.told_of = 0  # newest step that was reported as saved
        self._stack = contextlib.ExitStack()
        self.redis = Redis(self._stack.enter_context(short_folder()))
        self.redis.start()

    def close(self) -> None:
        """Stop the Redis and remove the folder."""
        self.redis.kill()
        self._stack.close()

    def play(self, scene: Scene) -> None:
        """Run a job, kill one of its parts, and judge the result."""
        place = f"{scene} after {self.verdict.kills} kills in {self.folder}"
        before = {path.name for path in self.directory.glob(".*step-*")}
        with tempfile.TemporaryDirectory(dir=self.folder) as name:
            folder = Path(name)
            job = self._start(folder, scene)
            try:
                killed_at, back_at = self._hurt(job, scene)
                self._await_end(job, scene, killed_at, back_at, place)
                self._judge(job, scene, place, before)
            finally:
                job.kill()
        if scene.victim == "redis":
            self.redis.kill()
            self.redis.start()

    def _start(self, folder: Path, scene: Scene) -> Ranks:
        asked = {
            "directory": str(self.directory),
            "mode": scene.mode,
            "how": scene.how,
            "gloo": scene.mode == "rank0",
            "steps": 60 if scene.victim == "redis" else 1000,
            "pending": PENDING,
            "patience": 2 if scene.victim == "redis" else 0,
            "leave": self.random.random() < 0.5,
        }
        program = Path(__file__).parents[1] / "programs" / "group_chaos_rank.py"
        each = rank_variables(
            RANKS,
            NODES,
            port=free_port(),
            IOSHAPE_TEST_STORE=scene.store,
            IOSHAPE_DEADLINE_MS=str(round(DEADLINE_S * 1000)),
        )
        if scene.store == "redis":
            for one in each:
                one["IOSHAPE_COORDINATOR"] = self.redis.address
                one["IOSHAPE_SLOTS"] = "8"
        # A kill may come during the start of a job; half of the jobs get beyond it.
        return Ranks(
            [Member(folder, [str(program), json.dumps(asked)], environment(**one)) for one in each]
        )

    def _hurt(self, job: Ranks, scene: Scene) -> tuple[float, float]:
        """Kill the victim. Return the time of the kill, and that of the return of a Redis."""
        # A death during the set-up of torch.distributed tests torch, not the library.
        for member in job.members:
            member.await_said("ready", 60.0)
        begin = time.monotonic()
        if self.random.random() < 0.8:
            for member in job.members:
                member.await_said("loaded", 30.0)
            self._pause(self.random.uniform(0, 0.6))
        else:
            self._pause(self.random.uniform(0, 0.2))
        self.verdict.counts["ms_until_kills"] += round((time.monotonic() - begin) * 1000)
        self.verdict.kills += 1
        self.verdict.counts[f"{scene.mode}, {scene.how}, {scene.store}: {scene.victim}"] += 1
        if scene.rank is not None:
            job.members[scene.rank].process.kill()
            return time.monotonic(), 0.0
        self.redis.kill()
        killed_at = time.monotonic()
        if self.random.random() < 0.5:
            self._pause(self.random.uniform(0, 1.0))
            self.redis.start()
            return killed_at, time.monotonic()
        return killed_at, 0.0

    @staticmethod
    def _pause(seconds: float) -> None:
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            forker().hear(left)

    def _await_end(
        self, job: Ranks, scene: Scene, killed_at: float, back_at: float, place: str
    ) -> None:
        # One deadline for each save, one to meet missing ranks, one to close the group.
        bound = (PENDING + 3) * DEADLINE_S + GRACE_S
        if scene.victim == "redis":
            # The job goes on, or fails three times.
            bound = 6 * DEADLINE_S + GRACE_S + 30.0
        for rank, member in enumerate(job.members):
            left = max(killed_at, back_at) + bound - time.monotonic()
            process = member.process
            if process.wait(max(0.01, left)) is None:
                stacks = _where(process.pid)
                process.signal(6)
                process.wait(5.0)
                self.verdict.hangs.append(
                    f"{place}: rank {rank} hangs: {member.said()[-2:]} {stacks} "
                    f"{member.errors()[-1500:]}"
                )
            elif rank != scene.rank:
                name = "longest_s" if scene.rank is not None else "longest_without_redis_s"
                took_s = process.ended_at - max(killed_at, back_at)
                setattr(self.verdict, name, max(getattr(self.verdict, name), took_s))
                if process.status:
                    self.verdict.broken.append(
                        f"{place}: rank {rank}: status {process.status}: {member.errors()[-400:]}"
                    )

    def _judge(self, job: Ranks, scene: Scene, place: str, before: set[str]) -> None:
        verdict = self.verdict
        said = job.said()
        loaded = {line["step"] for lines in said for line in lines if line["event"] == "loaded"}
        for line in (line for lines in said for line in lines if line["event"] == "loaded"):
            if not line["right"]:
                verdict.bad_checkpoints.append(f"{place}: {line}")
        if len(loaded) > 1:
            verdict.bad_checkpoints.append(f"{place}: ranks loaded steps {sorted(loaded)}")
        if loaded and max(loaded) < self.told_of:
            verdict.lost_checkpoints.append(
                f"{place}: loaded {max(loaded)}, but {self.told_of} had been saved"
            )
        verdict.counts["jobs_that_loaded"] += bool(loaded and max(loaded))
        saved = [line["step"] for lines in said for line in lines if line["event"] == "saved"]
        self.told_of = max([self.told_of, *saved])
        verdict.counts["checkpoints"] += len(set(saved))
        failed = [line for lines in said for line in lines if line["event"] == "failed"]
        verdict.counts["failures_seen"] += len(failed)
        for line in failed:
            of_others = scene.rank is not None and line["rank"] != scene.rank
            if of_others and line["step"] > 0 and f"rank {scene.rank}" not in line["text"]:
                verdict.counts["failures_without_the_name"] += 1
                verdict.unnamed.append(
                    f"{scene.mode}, {scene.how}, {scene.store}, {scene.victim}: {line['text']}"
                )
        for line in (line for lines in said for line in lines if line["event"] == "end"):
            # The kernel frees memory files, unless another process has them open.
            if line["shm_files"] or line["memory_files"] > 1:
                verdict.leftovers.append(f"{place}: {line}")
        # Leftovers from before the job that a save of this job did not remove.
        for line in (line for lines in said for line in lines if line["event"] == "entries"):
            verdict.leftovers += [f"{place}: {name}" for name in line["names"] if name in before]


def _where(pid: int) -> list[str]:
    told = []
    for task in Path(f"/proc/{pid}/task").glob("*"):
        with contextlib.suppress(OSError):
            told.append(f"{(task / 'comm').read_text().strip()} {(task / 'wchan').read_text()}")
    return told


@contextlib.contextmanager
def lane(folder: Path, seed: int) -> Iterator[Lane]:
    """Make a lane, and close it at the end."""
    folder.mkdir(parents=True, exist_ok=True)
    made = Lane(folder, seed)
    try:
        yield made
    finally:
        made.close()
