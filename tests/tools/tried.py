# SPDX-License-Identifier: Apache-2.0
"""Maintains the list of tried versions in docs/frameworks.md.

    python tests/tools/tried.py safetensors deepspeed

runs the tests of these frameworks on the installed versions. If none has failed, it writes the
versions into the list. A framework that is not part of the standard set-up is installed first
(frameworks.py). Without arguments all frameworks are tried.
"""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

import frameworks
from page_text import fill
from tree import ROOT

PAGE = ROOT / "docs" / "frameworks.md"
LIST = re.compile(r"(<!-- tried: begin -->\n).*?(\n<!-- tried: end -->)", re.DOTALL)


@dataclass(frozen=True)
class Trial:
    """The tests of a package, and the environment in which they run."""

    package: str
    #: below tests/integrations
    tests: tuple[str, ...]
    #: in frameworks.py, if it has an environment of its own
    environment: str | None = None

    def version(self) -> str:
        """Return the installed version."""
        python = frameworks.environment(self.environment) if self.environment else sys.executable
        ask = f"from importlib.metadata import version; print(version('{self.package}'))"
        done = subprocess.run([python, "-c", ask], capture_output=True, text=True, check=True)
        return done.stdout.strip().partition("+")[0]  # without torch's build suffix

    def passes(self) -> bool:
        """Run the tests. Return whether none fails."""
        paths = [str(ROOT / "tests" / "integrations" / name) for name in self.tests]
        command = [sys.executable, "-m", "pytest", "-q", "-rs", *paths]
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
        print(done.stdout)
        return done.returncode == 0


TRIALS = {
    trial.package: trial
    for trial in (
        Trial("torch", ("test_dcp.py", "test_dcp_ranks.py")),
        Trial("safetensors", ("test_safetensors.py",)),
        Trial("huggingface_hub", ("test_huggingface.py",), "transformers"),
        Trial("transformers", ("test_huggingface.py",), "transformers"),
        Trial("accelerate", ("test_huggingface.py",), "transformers"),
        Trial("lightning", ("test_lightning.py",)),
        Trial("deepspeed", ("test_deepspeed.py",), "deepspeed"),
        Trial("megatron-core", ("test_megatron.py",), "megatron"),
        Trial("torch_checkpointing", ("test_torch_checkpointing.py",)),
        Trial("stable_baselines3", ("test_witness.py",), "sb3"),
        Trial("torchtitan", ("test_witness.py",), "torchtitan"),
        Trial("torchtune", ("test_witness.py",), "torchtune"),
        Trial("mosaicml", ("test_witness.py", "test_frameworks.py"), "composer"),
        Trial("nvidia-resiliency-ext", ("test_witness.py", "test_frameworks.py"), "nvrx"),
        Trial("ray", ("test_ray.py", "test_frameworks.py"), "ray"),
    )
}


def versions() -> dict[str, str]:
    """Return the versions of the page by package."""
    found = LIST.search(PAGE.read_text(encoding="utf-8"))
    return dict(re.findall(r"`([\w-]+)`\s+([\w.]*\w)", found[0] if found else ""))


def write(renewed: dict[str, str]) -> None:
    """Write versions into the page; keep the others."""
    known = versions() | renewed
    text = ", ".join(f"`{package}` {known[package]}" for package in TRIALS if package in known)
    page = PAGE.read_text(encoding="utf-8")
    page = LIST.sub(lambda found: found[1] + fill(f"{text}.") + found[2], page)
    PAGE.write_text(page, encoding="utf-8")


def main() -> None:
    names = sys.argv[1:] or list(TRIALS)
    passed: dict[tuple[str, ...], bool] = {}  # several packages may share tests
    for name in names:
        trial = TRIALS[name]
        version = trial.version()
        if trial.tests not in passed:
            passed[trial.tests] = trial.passes()
        if not passed[trial.tests]:
            sys.exit(f"tried: {name} {version} has failed; its version stays")
        write({name: version})


if __name__ == "__main__":
    main()
