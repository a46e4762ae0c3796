# SPDX-License-Identifier: Apache-2.0
"""Describe Lightning's tests of writing, reading and removing checkpoints."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

from tests.upstream.framework import Framework, fetch_tag


def fetch(folder: Path) -> Path:
    repository = "https://github.com/Lightning-AI/pytorch-lightning"
    return fetch_tag(repository, version("lightning"), folder)


FRAMEWORK = Framework(
    package="lightning",
    fetch=fetch,
    files=(
        "tests_pytorch/checkpointing/test_torch_saving.py",
        "tests_pytorch/checkpointing/test_trainer_checkpoint.py",
        "tests_pytorch/plugins/test_async_checkpoint.py",
        "tests_pytorch/plugins/test_checkpoint_io_plugin.py",
    ),
    installed_as="lightning",
)
