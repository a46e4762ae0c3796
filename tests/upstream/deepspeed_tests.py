# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's tests of checkpoints that run on CPUs; what needs a GPU skips."""

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
    # With LOCAL_SIZE a machine without GPUs has so many devices.
    environment=(
        ("DS_DISABLE_REUSE_DIST_ENV", "1"),
        ("LOCAL_SIZE", "4"),
        ("OMP_NUM_THREADS", "1"),
    ),
)
