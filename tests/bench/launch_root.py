# SPDX-License-Identifier: Apache-2.0
"""Common code of the packaging benchmarks: commands, minimal Debian roots, and build results.

mmdebstrap makes each root from Debian's archive and removes it again. This takes root rights.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGING = ROOT / "bindings" / "packaging"
SUITE = "bookworm"


class LaunchError(Exception):
    """A package cannot be built or measured here, or does not work."""


def run(*command: str | Path, folder: Path = ROOT, **variables: str) -> str:
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, **variables},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode:
        shown = " ".join(map(str, command))
        raise LaunchError(f"{shown[:200]} failed:\n{done.stdout[-4000:]}")
    return done.stdout


def needed(program: str, package: str) -> str:
    found = shutil.which(program)
    if found is None:
        raise LaunchError(f"{program} is not installed: apt-get install {package}")
    return found


def mmdebstrap() -> list[str]:
    """Return mmdebstrap's command in a mount namespace: if it is killed, no mount of /dev stays."""
    # In a container, apt's own user may lack rights.
    options = ["--quiet", "--skip=output/mknod", '--aptopt=APT::Sandbox::User "root"']
    return ["unshare", "--mount", needed("mmdebstrap", "mmdebstrap"), *options]


@dataclass
class Root:
    """A recipe for a Debian root: hooks of mmdebstrap that run in order."""

    include: Sequence[str] = ()
    hooks: list[str] = field(default_factory=list)

    def give(self, source: Path, place: str) -> None:
        """Copy a file, or the contents of a folder, into the root."""
        if source.is_dir():
            self.hooks += [f'mkdir -p "$1{place}"', f'cp -rL {source}/. "$1{place}"']
        else:
            self.hooks += [f'mkdir -p "$1{place}"', f'cp -L {source} "$1{place}"']

    def do(self, script: str) -> None:
        number = sum("script-" in hook for hook in self.hooks)
        text = f"set -eu; export HOME=/root LC_ALL=C.UTF-8 TMPDIR=/tmp\n{script}\n"
        self.hooks += [
            f"cat >\"$1/tmp/script-{number}\" <<'END_OF_SCRIPT'\n{text}END_OF_SCRIPT\n",
            f'chroot "$1" sh /tmp/script-{number}',
        ]

    def take(self, place: str, target: Path) -> None:
        target.mkdir(parents=True, exist_ok=True)
        self.hooks += [f'cp -r "$1{place}/." {target}']

    def make(self) -> None:
        include = [f"--include={','.join(self.include)}"] if self.include else []
        hooks = [f"--customize-hook={hook}" for hook in self.hooks]
        run(*mmdebstrap(), "--variant=apt", "--format=null", *include, *hooks, SUITE, "/dev/null")


class Workplace:
    """The sources of a release candidate, and what is built from them."""

    def __init__(self, folder: Path, say: Callable[[str], None]) -> None:
        self.folder = folder
        self.say = say
        self.epoch = run("git", "log", "-1", "--format=%ct").strip()
        self.sources = folder / "sources"
        self.sources.mkdir()
        for name in run("git", "ls-files").splitlines():
            if (ROOT / name).exists():
                target = self.sources / name
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, target)
        self.debs = folder / "debs"
        #: Differences between two builds, and findings of lintian. A missing check counts as one.
        self.differences = [f"{what}: not compared" for what in ("debs", "wheel", "wheel-aarch64")]
        self.findings = ["not looked at"]

    def differ(self, what: str, one: Path, two: Path) -> None:
        """Note the files whose bytes differ between two folders."""
        self.differences.remove(f"{what}: not compared")
        names = {path.name for path in (*one.iterdir(), *two.iterdir())}
        for name in sorted(names):
            pair = one / name, two / name
            # These two files record time, place and tools of the build.
            if not name.endswith((".buildinfo", ".changes")) and not (
                all(path.is_file() for path in pair)
                and pair[0].read_bytes() == pair[1].read_bytes()
            ):
                self.differences.append(name)

    def archive(self) -> Path:
        folder = self.folder / "sdist"
        if not folder.exists():
            run(sys.executable, "-m", "build", "--sdist", "--outdir", folder, ROOT)
        (found,) = folder.iterdir()
        return found
