# SPDX-License-Identifier: Apache-2.0
"""Describe DeepSpeed's checkpoint tests that run on CPUs. Tests that need a GPU skip."""

from __future__ import annotations

from pathlib import Path

import frameworks

from tests.upstream.framework import Framework, fetch_tag


def fetch(folder: Path) -> Path:
    frameworks.environment("deepspeed")
    version = frameworks.versions("deepspeed")["deepspeed"]
    return fetch_tag("https://github.com/deepspeedai/DeepSpeed", f"v{version}", folder)


FRAMEWORK = Framework(
    package="deepspeed",
    fetch=fetch,
    files=(
        "unit/checkpoint/test_latest_checkpoint.py",
        "unit/checkpoint/test_lr_scheduler.py",
        "unit/checkpoint/test_other_optimizer.py",
        "unit/checkpoint/test_shared_weights.py",
        "unit/checkpoint/test_tag_validation.py",
        "unit/checkpoint/test_universal_checkpoint.py",
        "unit/checkpoint/test_zero_optimizer.py",
    ),
    installed_as="deepspeed",
    # LOCAL_SIZE sets the number of devices on a machine without GPUs.
    environment=(
        ("DS_DISABLE_REUSE_DIST_ENV", "1"),
        ("LOCAL_SIZE", "4"),
        ("OMP_NUM_THREADS", "1"),
    ),
)
