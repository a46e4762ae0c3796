# SPDX-License-Identifier: Apache-2.0
"""Run test_realfs.py on filesystems that the Linux kernel's own clients mount."""

import subprocess
import sys
from pathlib import Path

import pytest
from clusters import IN_MACHINE, machine_unavailable, running

#: On a busy host User-mode Linux occasionally ends a program with this message.
BROKEN = "The futex facility returned an unexpected error code."
MOST_TRIES = 3

pytestmark = [
    pytest.mark.realfs,
    pytest.mark.skipif(bool(machine_unavailable()), reason=machine_unavailable()),
]


@pytest.mark.parametrize("kind", IN_MACHINE)
def test_behaviour_with_the_kernels_client(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(kind, targets=2) as cluster, cluster.client() as other:
        monkeypatch.setenv("IOSHAPE_TEST_MOUNTED", f"{kind}:{cluster.path}:{other}")
        for _ in range(MOST_TRIES):
            done = subprocess.run(
                [
                    *cluster.prefix,
                    *(sys.executable, "-m", "pytest", "-q", "-m", "realfs"),
                    *("-p", "no:cacheprovider", Path(__file__).with_name("test_realfs.py")),
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                check=False,
                timeout=1200,
            )
            if BROKEN not in done.stdout:
                break
    assert not done.returncode, done.stdout
