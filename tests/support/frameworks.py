# SPDX-License-Identifier: Apache-2.0
"""Installs training frameworks that are too large for the standard set-up, when a test needs one.

Each has a virtual environment in build/frameworks, on top of the one that runs this program.
Packages that are there already, such as torch and this tree's package, are not installed again.

    python tests/support/frameworks.py deepspeed    installs it, and prints its Python
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import distributions
from pathlib import Path

from tree import ROOT

FOLDER = ROOT / "build" / "frameworks"


class CannotInstall(Exception):
    """No package index has the framework, or it cannot be installed here."""


def _no_vision(packages: Path) -> None:
    """Disable torchvision's operators.

    Composer imports torchvision, but uses only its images. Package indexes usually have builds for
    CUDA, whose operators cannot be loaded or described without CUDA.
    """
    (packages / "torchvision" / "_meta_registrations.py").write_text("", encoding="utf-8")


def _no_compiler(packages: Path) -> None:
    """Disable DeepSpeed's extensions, which it would compile at their first use.

    That takes too long.
    """
    with (packages / "deepspeed" / "ops" / "__init__.py").open("a", encoding="utf-8") as file:
        file.write("\n__compatible_ops__ = __import__('collections').defaultdict(bool)\n")


@dataclass(frozen=True)
class Framework:
    """Instructions for the installation of a framework."""

    #: requirements for pip
    packages: tuple[str, ...]
    #: requirements without their dependencies, which include another version of torch
    bare: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    variables: dict[str, str] = field(default_factory=dict)
    #: changes its installed packages
    finish: Callable[[Path], None] | None = None


#: pip installs their dependencies, too, except those that are there already.
FRAMEWORKS = {
    # Dependencies of its own tests.
    "accelerate": Framework(("parameterized>=0.9,<1",)),
    "composer": Framework(
        (
            *("coolname>=1.1,<3", "importlib-metadata>=5,<8.8", "mosaicml-cli>=0.5.25,<0.8"),
            *("py-cpuinfo>=8,<10", "tabulate==0.9.0", "torch_optimizer>=0.3,<0.4"),
            *("pillow>=10.3,<12", "requests>=2.26,<3", "torchmetrics>=1,<1.7.5"),
        ),
        bare=("mosaicml>=0.32,<1", "torchvision>=0.25,<1"),
        finish=_no_vision,
    ),
    "lightning": Framework(("cloudpickle>=3,<4", "scikit-learn>=1.5,<2")),
    "deepspeed": Framework(
        ("deepspeed>=0.19,<1",), variables={"DS_BUILD_OPS": "0"}, finish=_no_compiler
    ),
    # With DeepSpeed, accelerate needs transformers.
    "deepspeed_plugin": Framework(
        ("deepspeed>=0.19,<1", "transformers>=5,<6"),
        variables={"DS_BUILD_OPS": "0"},
        finish=_no_compiler,
    ),
    "megatron": Framework(("megatron-core>=0.16,<1",)),
    "nvrx": Framework((), bare=("nvidia-resiliency-ext>=0.4,<1",)),
    "ray": Framework(("ray[train]>=2.50,<3",)),
    "sb3": Framework(("stable-baselines3>=2.7,<3",)),
    "torchtitan": Framework(
        ("spmd_types==0.2.3", "tyro>=0.9,<2"), bare=("torchtitan>=0.3,<1", "torchdata>=0.11,<1")
    ),
    "torchtune": Framework(
        (
            *("blobfile>=3,<4", "datasets>=3,<6", "kagglehub>=0.3,<2", "omegaconf>=2.3,<3"),
            *("sentencepiece>=0.2,<1", "tiktoken>=0.9,<1", "tokenizers>=0.21,<1"),
        ),
        bare=("torchtune>=0.6,<1", "torchao>=0.15,<0.16", "torchdata>=0.11,<1"),
    ),
    "transformers": Framework(("transformers>=5,<6",)),
}


def _packages(folder: Path) -> Path:
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    return folder / "lib" / version / "site-packages"


def _install(framework: Framework, folder: Path) -> None:
    venv.create(folder, clear=True, symlinks=True)
    below = sysconfig.get_paths()["purelib"]
    (_packages(folder) / "below.pth").write_text(below + "\n", encoding="utf-8")
    # The environment's own pip treats packages outside it as installed and does not change them.
    pip = (str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet")
    for packages in (("--no-deps", *framework.bare), framework.packages):
        if packages in ((), ("--no-deps",)):
            continue
        done = subprocess.run(
            (*pip, *framework.options, *packages),
            env={**os.environ, **framework.variables},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise CannotInstall(f"pip cannot install {packages}: {done.stderr[-500:]}")
    if framework.finish is not None:
        framework.finish(_packages(folder))


def environment(name: str) -> Path:
    """Return the Python of a framework's environment.

    Install the framework if it is not there yet.
    """
    framework, folder = FRAMEWORKS[name], FOLDER / name
    packages = framework.packages + framework.bare
    wanted = f"{packages} {framework.options} {sys.version} {sys.prefix}"
    stamp = folder / "complete"
    FOLDER.mkdir(parents=True, exist_ok=True)
    with (FOLDER / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not stamp.exists() or stamp.read_text(encoding="utf-8") != wanted:
            _install(framework, folder)
            stamp.write_text(wanted, encoding="utf-8")
    return folder / "bin" / "python"


def versions(name: str) -> dict[str, str]:
    """Return the versions of the packages that a framework has installed."""
    return {one.name: one.version for one in distributions(path=[str(_packages(FOLDER / name))])}


if __name__ == "__main__":
    try:
        print(environment(sys.argv[1]))
    except (CannotInstall, IndexError, KeyError) as problem:
        sys.exit(f"frameworks: {problem}")
