# SPDX-License-Identifier: Apache-2.0
"""Describe accelerate's tests of checkpointed states."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

from tests.upstream.framework import Framework, fetch_tag


def fetch(folder: Path) -> Path:
    repository = "https://github.com/huggingface/accelerate"
    return fetch_tag(repository, f"v{version('accelerate')}", folder)


FRAMEWORK = Framework(
    package="accelerate",
    fetch=fetch,
    files=("test_state_checkpointing.py",),
    installed_as="accelerate",
)
