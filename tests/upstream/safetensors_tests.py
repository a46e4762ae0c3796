# SPDX-License-Identifier: Apache-2.0
"""Describe the Python tests of safetensors that need only torch and numpy."""

from __future__ import annotations

from pathlib import Path

from tests.upstream.framework import Framework, fetch_source


def fetch(folder: Path) -> Path:
    return fetch_source("safetensors", "maturin", folder) / "bindings" / "python"


FRAMEWORK = Framework(
    package="safetensors",
    fetch=fetch,
    files=(
        "tests/test_handle.py",
        "tests/test_multithreaded.py",
        "tests/test_pread_backend.py",
        "tests/test_pt_comparison.py",
        "tests/test_pt_model.py",
        "tests/test_simple.py",
        "tests/test_threadable.py",
    ),
    plugin="tests.upstream.safetensors_plugin",
)
