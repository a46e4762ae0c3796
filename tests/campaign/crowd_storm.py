# SPDX-License-Identifier: Apache-2.0
"""Run one storm in a process with its own namespaces: crowd_storm SEED FOLDER.

64 processes share one pool and one filesystem of 400 MiB. Each runs in one of two pods. In each pod
the filesystem has a FUSE mount of its own at one path, which does not see locks taken through the
other mount. For each user, 12 processes save, replace, load and prune files, and 4 are ranks of a
job that saves checkpoints. The findings are printed as JSON. If there are any, the log is copied to
FOLDER.
"""

import contextlib
import itertools
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from chaos import Client, Scene, client_program
from chaos_scenes import LONG_LEASE_MS, NOTHING, hurt_redis
from coordinators import Redis, await_true, short_folder
from processes import environment
from tree import build_folder

from . import crowd_judge

#: Memory that only this mount namespace sees.
MEMORY = Path("/dev/shm")
BASE, SHARED = MEMORY / "base", MEMORY / "shared"
N_PODS = 2

FIRST_USER = 60001
N_USERS, N_SAVERS, N_RANKS = 4, 12, 4
N_MEMBERS = N_SAVERS + N_RANKS

STORM_S = 4.0
CAPACITY = 3
LARGE_BYTES, PAUSE_MS = 256 << 10, 60

#: A process without progress for this time hangs. So do ranks of a broken job, after their
#: deadline.
PATIENCE_S = 60.0
PEACE_S = 660.0

STORES = {"host": 2, "files": 3, "redis": 1}
MODES = (1, 2, 3)
ENGINES = ("auto", "threads", "buffered")


# ---- The filesystem -----------------------------------------------------------------------------


def call(*command: object) -> None:
    subprocess.run([str(one) for one in command], check=True, capture_output=True, text=True)


def mount() -> None:
    """Mount the filesystems. The mounts end with the namespace."""
    call("mount", "-t", "tmpfs", "-o", "mode=1777", "none", MEMORY)
    for folder in (BASE, SHARED, MEMORY / "build"):
        folder.mkdir()
    # Other users may not be able to reach the build folder at its real path.
    call("mount", "--bind", build_folder(), MEMORY / "build")
    os.environ["IOSHAPE_TEST_BUILD"] = str(MEMORY / "build")
    call("mount", "-t", "tmpfs", "-o", "size=400m,mode=0755", "none", BASE)


def pod() -> list[str]:
    """Start a pod, and return the prefix of commands that run in it.

    It ends with the namespaces.
    """
    program = build_folder() / "tests/c/fault/passthrough"
    device = SHARED.stat().st_dev
    holder = subprocess.Popen(["unshare", "--mount", program, BASE, SHARED, "users"])
    there = Path(f"/proc/{holder.pid}/root") / SHARED.relative_to("/")
    await_true(lambda: there.stat().st_dev != device, "a mount")
    return ["nsenter", f"--mount=/proc/{holder.pid}/ns/mnt"]


def fill_disk() -> None:
    """Fill the disk for a moment."""
    free = os.statvfs(BASE)
    filler = BASE / "filler"
    with filler.open("wb") as file:
        with contextlib.suppress(OSError):  # another process was faster
            os.posix_fallocate(file.fileno(), 0, free.f_bavail * free.f_frsize)
        time.sleep(0.4)
    filler.unlink()


# ---- Jobs ---------------------------------------------------------------------------------------


class Job:
    """The ranks of one user. When one of them is gone, all start again."""

    def __init__(self, storm: "Storm", user: int, store: str) -> None:
        self.user, self.store = user, store
        self.mode = storm.random.choice(MODES)
        self._scattered = storm.random.random() < 0.5
        self._life = -1
        self._broken_at = 0.0
        first = len(storm.clients)
        self.members = [
            Client(storm, first + rank, [], **storm.variables_of(user)) for rank in range(N_RANKS)
        ]
        storm.clients += self.members
        self.start(storm)

    @property
    def token(self) -> str:
        return f"storm-{self.user}"

    def words_of(self, rank: int) -> tuple[object, ...]:
        """Return the arguments of a rank."""
        runs = SHARED / f"user{self.user}" / "runs"
        store = STORES[self.store]
        return (runs, self.token, store, self.mode, rank, N_RANKS, LARGE_BYTES, PAUSE_MS // 2)

    def start(self, storm: "Storm") -> None:
        """Start all ranks again. Rank 0 moves to the other pod."""
        self._life += 1
        self._broken_at = 0.0
        for rank, member in enumerate(self.members):
            where = (self._life + rank * self._scattered) % N_PODS
            member.prefix = storm.prefix_of(self.user, where)
            member.arguments = ["group", *map(str, self.words_of(rank))]
            member.start()

    def tend(self, storm: "Storm") -> None:
        """Start the ranks again when all have ended. If one has, the others must end, too."""
        ended = [one for one in self.members if one.process and one.process.poll() is not None]
        for one in ended:
            assert one.process
            if one.process.returncode not in {0, -9}:
                storm.findings.append(f"{one.name} ends with {one.process.returncode}")
        if len(ended) == N_RANKS:
            self.start(storm)
        elif ended:
            self._broken_at = self._broken_at or time.monotonic()
            if time.monotonic() > self._broken_at + PATIENCE_S:
                left = [one.name for one in self.members if one not in ended]
                storm.findings.append(f"{left} hang: {ended[0].name} is gone")
                for one in self.members:
                    one.kill()


# ---- The storm ----------------------------------------------------------------------------------


class Storm(Scene):
    """One storm: its clients, jobs and faults."""

    patience_s = PATIENCE_S

    def __init__(self, folder: Path, seed: int, address: str, redis: Redis | None) -> None:
        super().__init__(
            folder,
            seed,
            address,
            lease_ms=LONG_LEASE_MS,
            capacity=CAPACITY,
            WORLD_SIZE=str(N_USERS * N_MEMBERS),
            IOSHAPE_STAGING_BYTES=str(16 << 20),
        )
        self.findings: list[str] = []
        self._pods = [pod() for _ in range(N_PODS)]
        self._redis = redis
        self._wakes: dict[Client, float] = {}
        self.log.chmod(0o666)
        self.variables["IOSHAPE_ENGINE"] = self.random.choice(ENGINES)
        self.users = N_USERS if os.getuid() == 0 and _is_real_root() else 1
        for user in range(N_USERS):
            home = BASE / f"user{user}"
            (home / "runs").mkdir(parents=True)
            for made in (home, home / "runs"):
                os.chown(made, self._uid(user), self._uid(user))
        stores = [*STORES] if redis else ["host", "files"]
        self.jobs = [Job(self, user, self.random.choice(stores)) for user in range(N_USERS)]
        for user in range(N_USERS):
            for number in range(N_SAVERS):
                home = SHARED / f"user{user}"
                words = (home, home / "runs", number, N_PODS, N_SAVERS, LARGE_BYTES, PAUSE_MS)
                self.add(
                    1,
                    *("crowd", *map(str, words)),
                    prefix=self.prefix_of(user, number % N_PODS),
                    **self.variables_of(user),
                )
        self._savers = self.clients[N_USERS * N_RANKS :]

    def _uid(self, user: int) -> int:
        return FIRST_USER + user if self.users > 1 else os.getuid()

    def prefix_of(self, user: int, where: int) -> list[str]:
        """Return the prefix of a user's command in a pod."""
        uid = self._uid(user)
        other = ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups", "--"]
        return self._pods[where] + (other if self.users > 1 else [])

    def variables_of(self, user: int) -> dict[str, str]:
        return {"IOSHAPE_JOB": f"job{user}", "HOME": "/nowhere"}

    def tend(self) -> None:
        for job in self.jobs:
            job.tend(self)
        for client in self._savers:
            assert client.process
            if client.process.poll() is not None:
                self.findings.append(f"{client.name} ends with {client.process.returncode}")
                client.start()

    # -- Faults --

    def _kill(self) -> None:
        # Kill several, because few of them write at any moment.
        for one in self.random.sample(self._awake(self._savers), 6):
            one.kill()
            one.start()

    def _kill_rank(self) -> None:
        one = self.random.choice(self._awake([m for job in self.jobs for m in job.members]))
        if one.process and one.process.poll() is None:
            one.kill()

    def _stop(self) -> None:
        for one in self.random.sample(self._awake(self.clients), 3):
            if one.process and one.process.poll() is None:
                one.stop()
                seconds = self.random.choice((0.2, 0.5, 1.2)) * self.lease_ms / 1000
                self._wakes[one] = time.monotonic() + seconds

    def _awake(self, clients: list[Client]) -> list[Client]:
        return [one for one in clients if one not in self._wakes]

    def _wake(self) -> None:
        for one in [one for one, at in self._wakes.items() if at <= time.monotonic()]:
            one.go_on()
            del self._wakes[one]

    def rage(self, seconds: float) -> None:
        """Kill and stop processes, fill the disk, and kill the Redis."""
        harms: list[Callable[[], None]] = [*3 * [self._kill], *2 * [self._kill_rank]]
        harms += [self._stop, self._stop, self._fill]
        if self._redis:
            server = self._redis
            harms += [lambda: hurt_redis(self, server)]
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.pause(0.25)
            self._wake()
            self.tend()
            self.random.choice(harms)()

    def _fill(self) -> None:
        fill_disk()
        self.harm.counts["fills"] += 1

    # -- Results --

    def _await_peace(self) -> None:
        """Wait longer than other scenes: a boost can be worth ten minutes of the pool."""
        self.patience_s = PEACE_S
        super()._await_peace()

    def judge(self) -> list[str]:
        """Return all findings."""
        faults = self.finish().faults()
        if self.harm.counts["fills"]:
            faults = [one for one in faults if " -28 " not in one]
        self._save_last()
        jobs = {member.number: job.user for job in self.jobs for member in job.members}
        story = crowd_judge.Story(self.log, self.harm.deaths, jobs)
        faults += self.findings + story.findings
        files = [path for path in BASE.glob("user*/*.pt") if path.is_file()]
        there = dict(self._whole("check", *files, wrong=faults))
        faults += crowd_judge.judge_files(story, there)
        for job in self.jobs:
            listed = self._whole("checkpoints", BASE / f"user{job.user}" / "runs", wrong=faults)
            newest = max((step for _, step in listed), default=0)
            if newest < story.newest(job.user):
                known = story.newest(job.user)
                faults.append(f"job {job.user}: {newest} is the newest, but {known} was saved")
        faults += [f"{path} is left" for path in self._left()]
        self.verdict.counts["checkpoints"] = sum(len(set(kept)) for kept in story.kept.values())
        return faults

    def _save_last(self) -> None:
        for job, where in itertools.product(self.jobs, range(N_PODS)):
            ranks = [self._last_of(job, where, rank) for rank in range(N_RANKS)]
            end = time.monotonic() + PATIENCE_S
            while any(one.poll() is None for one in ranks) and time.monotonic() < end:
                time.sleep(0.01)
            statuses = [one.poll() for one in ranks]
            if any(statuses) or None in statuses:
                self.findings.append(
                    f"{job.token}: the last saves of its ranks end with {statuses}"
                )

    def _last_of(self, job: Job, where: int, rank: int) -> "subprocess.Popen[bytes]":
        name = f"{job.members[rank].number}.{where}-last"
        home = SHARED / f"user{job.user}"
        return subprocess.Popen(
            [
                *self.prefix_of(job.user, where),
                *(client_program(), "last", str(self.log), name, f"{where}{rank}"),
                *map(str, (home, *job.words_of(rank))),
            ],
            env=environment(**self.variables, **self.variables_of(job.user)),
        )

    def _whole(self, mode: str, *paths: Path, wrong: list[str]) -> Iterator[tuple[str, int]]:
        done = subprocess.run(
            [client_program(), mode, *map(str, paths)],
            env=environment(IOSHAPE_COORDINATOR="open"),
            capture_output=True,
            text=True,
            check=False,
        )
        for line in done.stdout.splitlines():
            how, what, rest = line.split(" ", 2)
            if how == "whole":
                yield "/".join(rest.rsplit("/", 2)[1:]), int(what)
            else:
                wrong.append(line)
        if done.returncode > 1 or done.returncode < 0:
            wrong.append(f"{mode} ends with {done.returncode}: {done.stderr}")

    def _left(self) -> Iterator[Path]:
        for path in BASE.rglob("*"):
            if path.name.startswith(".") or (
                path.parent.name == "runs" and not path.name.startswith("step-")
            ):
                yield path


def _is_real_root() -> bool:
    """Return whether this is root of the initial user namespace, where other users exist."""
    return int(Path("/proc/self/uid_map").read_text(encoding="ascii").split()[2]) > 1


def storm(seed: int, work: Path) -> dict[str, Any]:
    mount()
    lot = random.Random(f"crowd {seed}")
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(short_folder())
        folder.chmod(0o755)
        redis = None
        address = f"local:{MEMORY / 'slots'}"
        if lot.random() < 0.5:
            redis = Redis(folder / "redis", [*NOTHING, "unixsocketperm 777"])
            redis.folder.chmod(0o755)
            redis.start()
            stack.callback(redis.kill)
            address = redis.address
        else:
            (MEMORY / "slots").mkdir()
            (MEMORY / "slots").chmod(0o1777)
        here = Storm(folder, seed, address, redis)
        stack.callback(here.close)
        here.rage(STORM_S)
        findings = here.judge()
        if findings:
            shutil.copy(here.log, work / f"seed-{seed}.log")
            shutil.copy(here.errors, work / f"seed-{seed}.errors")
        return {"findings": findings, "counts": dict(here.verdict.counts)}


if __name__ == "__main__":
    print(json.dumps(storm(int(sys.argv[1]), Path(sys.argv[2]))))
