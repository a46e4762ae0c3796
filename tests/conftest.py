# SPDX-License-Identifier: Apache-2.0
"""Fixtures and settings that all Python tests share."""

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from clusters import MOUNTED, Mounted, kinds, mounted_twice
from clusters import unavailable as no_clusters
from processes import SLOTS
from striped import unavailable
from tree import ROOT

# pytest compiles its tests anew in each process unless it may keep the result. Programs that tests
# start keep nothing.
sys.dont_write_bytecode = False
sys.pycache_prefix = str(ROOT / "build" / "pycache")

# A shell starts background jobs with SIGINT ignored, and child processes would inherit that. With a
# handler in place the programs that tests start get the default again.
signal.signal(signal.SIGINT, signal.default_int_handler)

os.environ["IOSHAPE_COORDINATOR"] = SLOTS


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests marked `gpu` on a machine without a GPU.

    The test stages deselect the other marked tests; a plain pytest run includes them.
    """
    if item.get_closest_marker("gpu") is not None:
        import torch  # noqa: PLC0415 - most tests start without

        if not torch.cuda.is_available():
            pytest.skip("no GPU")


@pytest.fixture(autouse=True)
def _settings_are_of_one_test(tmp_path: Path) -> Iterator[None]:  # noqa: ARG001
    """Reset the settings that a test has changed, so that later tests in this process do not see
    them.

    The test's folder is removed after what the fixtures of its file wait for: its last saves.
    """
    yield
    config = sys.modules.get("ioshape._core.config")  # most tests start without it
    if config is not None and config.given:
        config.reset()


@pytest.fixture(scope="session", params=kinds())
def cluster(request: pytest.FixtureRequest) -> Iterator[Mounted]:
    """Mount a parallel filesystem with two clients."""
    if not MOUNTED and no_clusters():
        pytest.skip(no_clusters())
    with mounted_twice(request.param) as mounted:
        yield mounted


@pytest.fixture(scope="session")
def _mounts_of_stripefs() -> None:
    """Skip tests that mount stripefs if this machine cannot, and give the reason."""
    reason = unavailable()
    if reason:
        pytest.skip(reason)
