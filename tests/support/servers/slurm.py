# SPDX-License-Identifier: Apache-2.0
"""A Slurm of one node on this host, whose daemons listen only on the loopback."""

import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from ports import free_port
from processes import TIMEOUT_S, environment

_PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel")

_CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmdPort={node_port}
SlurmUser=root
SlurmdUser=root
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmdSpoolDir={folder}/spool
StateSaveLocation={folder}/state
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=2
GresTypes=gpu
MailProg=/bin/true
NodeName={host} NodeAddr=127.0.0.1 CPUs=64 Gres=gpu:4
PartitionName=all Nodes=ALL Default=YES
Epilog={folder}/epilog
TaskProlog={folder}/task_prolog
"""


def unavailable() -> str:
    """Return why Slurm cannot run here; "" if it can."""
    missing = [name for name in _PROGRAMS if not _found(name)]
    if missing:
        return f"{missing[0]} is not installed; run tests/support/setup.sh test"
    return "" if os.geteuid() == 0 else "only root can start slurmd"


def _found(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")


class Cluster:
    """A running Slurm, and its commands."""

    def __init__(self, folder: Path) -> None:
        self._variables = {"SLURM_CONF": str(folder / "slurm.conf")}

    def _run(self, *command: str, cwd: Path | None = None, **more: str) -> str:
        return subprocess.run(
            command,
            check=True,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            cwd=cwd,
            env=environment(**self._variables, **more),
        ).stdout

    def is_ready(self) -> bool:
        """Return whether the node accepts jobs."""
        try:
            return "State=IDLE" in self._run("scontrol", "show", "node")
        except subprocess.CalledProcessError:  # the controller is not running yet
            return False

    def submit(self, folder: Path, variables: Mapping[str, str], *arguments: str) -> str:
        """Submit a job that logs to train-NUMBER.txt in the folder. Return its number."""
        return self._run("sbatch", "--parsable", *arguments, cwd=folder, **variables).strip()

    def show(self, job: str) -> dict[str, str]:
        """Return what Slurm reports about a job: JobState, Restarts and so on."""
        return dict(re.findall(r"(\S+?)=(\S*)", self._run("scontrol", "show", "job", job)))

    def wait_for(self, job: str, what: str, come: Callable[[dict[str, str]], object]) -> None:
        """Wait until a condition holds for the state of a job."""
        end = time.monotonic() + TIMEOUT_S
        while not come(state := self.show(job)):
            over = state["JobState"] in ("COMPLETED", "FAILED", "TIMEOUT", "CANCELLED")
            assert not over, f"{what} cannot come any more: {state}"
            assert time.monotonic() < end, f"{what} did not come: {state}"
            time.sleep(0.5)

    def pids(self, job: str) -> list[int]:
        """Return the process IDs of a job's ranks and launchers, oldest first."""
        lines = self._run("scontrol", "listpids", job).splitlines()[1:]
        return sorted(int(line.split()[0]) for line in lines)

    def set_time_left(self, job: str, least_s: int) -> None:
        """Set the remaining time: at least so long, and less than a minute more, because limits are
        whole minutes.
        """
        hours, minutes, seconds = map(int, self.show(job)["RunTime"].split(":"))
        limit = -(-(hours * 3600 + minutes * 60 + seconds + least_s) // 60)
        self._run("scontrol", "update", f"JobId={job}", f"TimeLimit={limit}")

    def cancel(self, job: str) -> None:
        """Cancel a job, like its owner."""
        self._run("scancel", job)


@contextmanager
def running_slurm(folder: Path, epilog: str, task_prolog: str = "#!/bin/sh\n") -> Iterator[Cluster]:
    """Run a Slurm whose daemons and jobs end with the block.

    The script `epilog` runs after each job, and `task_prolog` before each task.
    """
    for name in ("spool", "state"):
        (folder / name).mkdir()
    # munged requires a folder to which no other user can write.
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    host = socket.gethostname().partition(".")[0]
    for name, script in (("epilog", epilog), ("task_prolog", task_prolog)):
        (folder / name).write_text(script)
        (folder / name).chmod(0o755)
    (folder / "slurm.conf").write_text(
        _CONFIGURATION.format(
            host=host,
            folder=folder,
            controller_port=free_port(),
            node_port=free_port(),
        )
    )
    (folder / "gres.conf").write_text(f"Name=gpu File={folder}/gpu[0-3]\n")
    for number in range(4):
        (folder / f"gpu{number}").touch()
    munged = [f"--{name}-file={folder}/munge.{name}" for name in ("key", "pid", "seed", "log")]
    configuration = ("-f", str(folder / "slurm.conf"))
    daemons: list[subprocess.Popen[bytes]] = []
    try:
        for command in (
            ("munged", "--foreground", "--force", f"--socket={folder}/munge.socket", *munged),
            ("slurmctld", "-D", "-c", *configuration),
            ("slurmd", "-D", "-N", host, *configuration),
        ):
            daemons.append(_start(folder, *command))
        cluster = Cluster(folder)
        _wait_until_ready(cluster, daemons)
        yield cluster
    finally:
        for daemon in reversed(daemons):
            daemon.send_signal(signal.SIGTERM)
            daemon.wait(60)


def _start(folder: Path, *command: str) -> subprocess.Popen[bytes]:
    path = _found(command[0])
    assert path
    with (folder / f"{command[0]}.log").open("wb") as log:
        return subprocess.Popen((path, *command[1:]), stdout=log, stderr=log, env=environment())


def _wait_until_ready(cluster: Cluster, daemons: list[subprocess.Popen[bytes]]) -> None:
    end = time.monotonic() + TIMEOUT_S
    while not cluster.is_ready():
        assert all(daemon.poll() is None for daemon in daemons), daemons
        assert time.monotonic() < end, "the node does not come"
        time.sleep(0.2)
