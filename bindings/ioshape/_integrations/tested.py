# SPDX-License-Identifier: Apache-2.0
"""Know which versions of other packages the integrations have been tested with."""

from __future__ import annotations

import re
from importlib import metadata

#: for each package the first tested version, and the first untested one
TESTED = {
    "accelerate": ("1.10", "2"),
    "deepspeed": ("0.18", "1"),
    "huggingface_hub": ("1", "3"),
    "lightning": ("2.5", "3"),
    "lightning_fabric": ("2.5", "3"),
    "safetensors": ("0.5", "1"),
    "stable_baselines3": ("2.2", "3"),
    "torch": ("2.6", "3"),
    "torch_checkpointing": ("0.1.1", "0.2"),
    "transformers": ("5", "6"),
}


def is_tested(package: str) -> bool:
    """Return whether functions of the installed version may be replaced; warn if not.

    A package without metadata, such as a folder in PYTHONPATH, is assumed to fit.
    """
    first, untried = TESTED[package]
    try:
        installed = metadata.version(package)
    except metadata.PackageNotFoundError:
        return True
    if _numbers(first) <= _numbers(installed) < _numbers(untried):
        return True
    from ioshape._core import terminal  # noqa: PLC0415 - imports the native library

    terminal.say(
        f"ioshape does not handle saves of {package} {installed}: it was tested with {package} "
        f"{first} and newer, before {untried}; install one of these, or a newer ioshape"
    )
    return False


def _numbers(version: str) -> list[int]:
    release = re.match(r"[0-9.]*", version)
    return [int(one) for one in (release[0] if release else "").split(".") if one]
