# SPDX-License-Identifier: Apache-2.0
"""Maintains the table of tried versions in docs/frameworks.md.

    python tests/tools/tried.py safetensors deepspeed

runs the tests of these frameworks on the installed versions. If none has failed, it writes the
versions into the table. A framework that is not part of the standard set-up is installed first
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
from tree import ROOT

PAGE = ROOT / "docs" / "frameworks.md"
TABLE = re.compile(r"(<!-- tried: begin -->\n\n).*?(\n<!-- tried: end -->)", re.DOTALL)
_HEAD = "| package | tried version | tests |\n|---|---|---|\n"


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


def rows() -> dict[str, tuple[str, str]]:
    """Return the rows of the page: version and tests of each package."""
    table = TABLE.search(PAGE.read_text(encoding="utf-8"))
    found = re.findall(r"^\| `([\w-]+)` \| ([\w.]+) \| (.*) \|$", table[0] if table else "", re.M)
    return {package: (version, tests) for package, version, tests in found}


def tests_of(package: str) -> str:
    """Return the tests as the table names them."""
    return ", ".join(f"`{name}`" for name in TRIALS[package].tests)


def write(versions: dict[str, str]) -> None:
    """Write versions into the page; keep other rows."""
    known = {package: version for package, (version, _) in rows().items()} | versions
    lines = [
        f"| `{package}` | {known[package]} | {tests_of(package)} |\n"
        for package in TRIALS
        if package in known
    ]
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(
        TABLE.sub(lambda found: found[1] + _HEAD + "".join(lines) + found[2], text),
        encoding="utf-8",
    )


def main() -> None:
    names = sys.argv[1:] or list(TRIALS)
    passed: dict[tuple[str, ...], bool] = {}  # several packages may share tests
    for name in names:
        trial = TRIALS[name]
        version = trial.version()
        if trial.tests not in passed:
            passed[trial.tests] = trial.passes()
        if not passed[trial.tests]:
            sys.exit(f"tried: {name} {version} has failed; its row stays")
        write({name: version})


if __name__ == "__main__":
    main()
