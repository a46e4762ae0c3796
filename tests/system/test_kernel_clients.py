# SPDX-License-Identifier: Apache-2.0
"""Run tests of real filesystems on those that the Linux kernel's own clients mount."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
from clusters import IN_MACHINE, Cluster, call_harm_for_machine, machine_unavailable, running

HERE = Path(__file__).parent
#: On a busy host User-mode Linux occasionally ends a program with this message.
BROKEN = "The futex facility returned an unexpected error code."
MOST_TRIES = 3
LONGEST_S = 1200.0

pytestmark = [
    pytest.mark.realfs,
    pytest.mark.skipif(bool(machine_unavailable()), reason=machine_unavailable()),
]


def run_in_machine(cluster: Cluster, folder: Path, *names: str) -> tuple[int, str]:
    """Run files of tests in the cluster's machine. Return the exit status and the output."""
    command = [
        *cluster.prefix,
        *(sys.executable, "-m", "pytest", "-q", "-m", "realfs", "-p", "no:cacheprovider"),
        *(str(HERE / name) for name in names),
    ]
    said = folder / "said"
    with (
        said.open("w") as output,
        subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        ) as machine,
    ):
        end = time.monotonic() + LONGEST_S
        try:
            while machine.poll() is None:
                assert time.monotonic() < end, said.read_text(encoding="utf-8")
                call_harm_for_machine(cluster.path)
                time.sleep(0.1)
        finally:
            machine.terminate()
    return machine.returncode, said.read_text(encoding="utf-8")


@pytest.mark.parametrize("kind", IN_MACHINE)
def test_behaviour_with_the_kernels_client(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["test_realfs.py"] + ["test_realfs_harm.py"] * kind.startswith("nfs")
    with running(kind, targets=2) as cluster, cluster.client() as other:
        monkeypatch.setenv("IOSHAPE_TEST_MOUNTED", f"{kind}:{cluster.path}:{other}")
        for _ in range(MOST_TRIES):
            status, said = run_in_machine(cluster, tmp_path, *names)
            if BROKEN not in said:
                break
    assert not status, said
