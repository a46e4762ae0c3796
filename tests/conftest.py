# SPDX-License-Identifier: Apache-2.0
"""What all tests here need."""

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

# Whoever starts the tests in the background has them ignore Ctrl-C, and so would every program that
# they start. What is handled here, and not ignored, is as usual there.
signal.signal(signal.SIGINT, signal.default_int_handler)

os.environ["IOSHAPE_COORDINATOR"] = SLOTS


def pytest_runtest_setup(item: pytest.Item) -> None:
    """For who runs pytest by itself: the stages leave these tests out, but for `gpu`."""
    if item.get_closest_marker("gpu") is not None:
        import torch  # noqa: PLC0415 - most tests start without

        if not torch.cuda.is_available():
            pytest.skip("no GPU")


@pytest.fixture(autouse=True)
def _settings_are_of_one_test(tmp_path: Path) -> Iterator[None]:  # noqa: ARG001
    """What a test configures, those after it in the same process do not see.

    A test's folder is removed after what the fixtures of its file wait for: its last saves.
    """
    yield
    config = sys.modules.get("ioshape._core.config")  # most tests start without
    if config is not None and config.configured():
        config.reset()


@pytest.fixture(scope="session", params=kinds())
def cluster(request: pytest.FixtureRequest) -> Iterator[Mounted]:
    """A parallel filesystem with two clients."""
    if not MOUNTED and no_clusters():
        pytest.skip(no_clusters())
    with mounted_twice(request.param) as mounted:
        yield mounted


@pytest.fixture(scope="session")
def _mounts_of_stripefs() -> None:
    """For tests that mount stripefs: where nobody can, they say so."""
    reason = unavailable()
    if reason:
        pytest.skip(reason)
