# SPDX-License-Identifier: Apache-2.0
"""What a framework's module here says of it."""

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
    """Its tests, and how they come to use us."""

    #: as pip calls it
    package: str
    #: brings its tests, of the version that is installed, into a folder; the folder of `files`
    fetch: Callable[[Path], Path]
    #: files of tests, or what else pytest takes, in that folder
    files: tuple[str, ...]
    #: a module that pytest loads before the tests (-p), and that makes the framework use us;
    #: without one, they run under "ioshape run"
    plugin: str = ""
    #: of tests/support/frameworks.py, if the set-up does not bring it
    installed_as: str = ""
    #: more variables of the environment, for both runs
    environment: tuple[tuple[str, str], ...] = ()
    #: further arguments of pytest, for both runs
    arguments: tuple[str, ...] = ()


# pip asks the package's build backend for a name and a version before it hands a source archive
# over, and the backend may want compilers and a network for that. This one reads what the archive
# says of itself.
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
    """The tests of a tag, where the packages do not bring them: for a module's fetch()."""
    into = folder / "repository"
    subprocess.run(
        ["git", "clone", "-q", "--depth", "1", "--branch", tag, repository, into], check=True
    )
    # Without the rest of it, which some take for the package.
    return Path(shutil.move(into / "tests", folder / "tests"))


def fetch_source(package: str, backend: str, folder: Path) -> Path:
    """Unpacks the source archive of the installed version: for a module's fetch()."""
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
