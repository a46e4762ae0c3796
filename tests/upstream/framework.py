# SPDX-License-Identifier: Apache-2.0
"""Define the description of a framework's tests, and functions that fetch them."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path


@dataclass(frozen=True)
class Framework:
    """A framework's tests, and how they are made to use ioshape."""

    #: name of the package for pip
    package: str
    #: puts the tests of the installed version into a folder, and returns the folder of `files`
    fetch: Callable[[Path], Path]
    #: test files in that folder, or other arguments for pytest
    files: tuple[str, ...]
    #: module that pytest loads before the tests (-p) and that makes the framework use ioshape; if
    #: empty, the tests run under "ioshape run"
    plugin: str = ""
    #: name in tests/support/frameworks.py, if the framework has its own environment
    installed_as: str = ""
    #: additional environment variables for both runs
    environment: tuple[tuple[str, str], ...] = ()
    #: additional arguments of pytest for both runs
    arguments: tuple[str, ...] = ()


# Before pip downloads a source archive, it asks the package's build backend for name and version.
# The real backend may need compilers and a network for that. This one reads PKG-INFO.
_BACKEND = """
import email
import pathlib

def prepare_metadata_for_build_wheel(folder, settings=None):
    text = pathlib.Path("PKG-INFO").read_text(encoding="utf-8")
    said = email.message_from_string(text)
    made = pathlib.Path(folder) / f"{said['Name']}-{said['Version']}.dist-info"
    made.mkdir()
    (made / "METADATA").write_text(text, encoding="utf-8")
    return made.name
"""


def fetch_tag(repository: str, tag: str, folder: Path) -> Path:
    """Fetch the tests of a git tag, for packages that do not include them."""
    into = folder / "repository"
    subprocess.run(
        ["git", "clone", "-q", "--depth", "1", "--branch", tag, repository, into], check=True
    )
    # Move the tests out of the clone, because some tests would import the package from there.
    return Path(shutil.move(into / "tests", folder / "tests"))


def fetch_source(package: str, backend: str, folder: Path) -> Path:
    """Download and unpack the source archive of the installed version."""
    wanted = version(package).partition("+")[0]
    stub = folder / "backend"
    stub.mkdir()
    (stub / f"{backend}.py").write_text(_BACKEND, encoding="utf-8")
    options = ["-q", "--no-build-isolation", "--no-deps", "--no-binary", ":all:"]
    subprocess.run(
        [sys.executable, "-m", "pip", "download", *options, "-d", folder, f"{package}=={wanted}"],
        env={"PYTHONPATH": str(stub), "PATH": "/usr/bin:/bin"},
        check=True,
    )
    archive = next(folder.glob("*.tar.gz"))
    with tarfile.open(archive) as opened:
        opened.extractall(folder, filter="data")
    return folder / archive.name.removesuffix(".tar.gz")
