# SPDX-License-Identifier: Apache-2.0
"""Build packages, install them in minimal Debian roots, and use them."""

import platform
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from .launch_descriptions import DESCRIPTIONS
from .launch_root import (
    PACKAGING,
    ROOT,
    LaunchError,
    Root,
    Workplace,
    mmdebstrap,
    needed,
    run,
)
from .launch_wheels import LIBRARIES, OFFLINE, USE, WHEELS, wheel, wheel_aarch64
from .setting import Figure, Outcome, Setting

BUILD_TOOLS = ("gcc", "pkg-config", "python3-dev", "python3-venv")


def build_depends() -> list[str]:
    text = (PACKAGING / "debian" / "control").read_text(encoding="utf-8")
    found = re.search(r"^Build-Depends:\n((?: .*\n)+)", text, re.MULTILINE)
    assert found
    names = re.findall(r"^ ([\w.+-]+)", found[1], re.MULTILINE)
    return ["debhelper" if name == "debhelper-compat" else name for name in names]


# ---- Debian -------------------------------------------------------------------------------------


def build_debs(work: Workplace) -> None:
    """Build the packages twice, with different folders, umask, time zone, locale and user name."""
    again = work.folder / "debs-again"
    root = Root(["build-essential", *build_depends()])
    root.give(work.sources, "/one")
    root.do(f"SOURCE_DATE_EPOCH={work.epoch} /one/bindings/packaging/deb.sh /first")
    root.do(
        "mkdir -p /var/some/where/else; cp -r /one /var/some/where/else/two; umask 077\n"
        "export TZ=Pacific/Chatham LC_ALL=C TMPDIR=/var/some/where USER=nobody\n"
        f"SOURCE_DATE_EPOCH={work.epoch} /var/some/where/else/two/bindings/packaging/deb.sh /second"
    )
    root.take("/first", work.debs)
    root.take("/second", again)
    root.make()
    work.differ("debs", work.debs, again)


def lintian(work: Workplace) -> None:
    (changes,) = work.debs.glob("*.changes")
    tool = needed("lintian", "lintian")
    told = subprocess.run(
        [tool, "--allow-root", "--fail-on=none", "--tag-display-limit=0", changes],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    work.findings = [line for line in told.splitlines() if line[:2] in ("E:", "W:")]


def depends_of_tests() -> list[str]:
    text = (PACKAGING / "debian" / "tests" / "control").read_text(encoding="utf-8")
    lines = re.findall(r"^Depends: (.*)$", text, re.MULTILINE)
    return sorted({name for line in lines for name in line.split(", ")})


def try_debs(work: Workplace) -> None:
    """Run tests as autopkgtest does: install dependencies and packages, then run each test."""
    theirs = [one for one in depends_of_tests() if "ioshape" not in one]
    root = Root(theirs)
    root.give(work.debs, "/debs")
    root.give(PACKAGING / "debian" / "tests", "/tests")
    root.do("apt-get install --yes --no-install-recommends /debs/*.deb")
    for path in sorted((PACKAGING / "debian" / "tests").iterdir()):
        if path.name != "control":
            root.do(
                f"echo == {path.name}; mkdir /work-{path.name}; "
                f"AUTOPKGTEST_TMP=/work-{path.name} /tests/{path.name}"
            )
    root.do("apt-get purge --yes 'libioshape*' 'ioshape*' 'python3-ioshape'; ! command -v ioshape")
    root.make()


def deb(work: Workplace) -> None:
    build_debs(work)
    lintian(work)
    try_debs(work)


# ---- Source archive -----------------------------------------------------------------------------


def sdist(work: Workplace) -> None:
    """Build in a root that has the libraries but no package index."""
    root = Root([*BUILD_TOOLS, *LIBRARIES])
    root.give(work.archive(), "/archive")
    root.give(WHEELS, "/wheels")
    root.do(
        "python3 -m venv /venv\n"
        f"/venv/bin/{OFFLINE} /archive/*.tar.gz\n"
        f"cd /root; /venv/bin/python - <<'END'\n{USE}\nEND\n"
        "/venv/bin/ioshape verify state.pickle"
    )
    root.make()


# ---- Container image ----------------------------------------------------------------------------


def container_file(work: Workplace) -> None:
    """Build on a Debian image made by mmdebstrap, because the test machine reaches no registry."""
    buildah = needed("buildah", "buildah")
    base = work.folder / "base.tar"
    run(
        *(*mmdebstrap(), "--variant=apt"),
        *("--include=ca-certificates", "trixie", base),
    )
    store: list[str | Path] = [
        *("--storage-driver", "vfs", "--root", work.folder / "images"),
        *("--runroot", work.folder / "containers"),
    ]
    made = run(buildah, *store, "from", "scratch").strip()
    run(buildah, *store, "add", made, base)
    run(buildah, *store, "commit", made, "localhost/base")
    run(
        *(buildah, *store, "build", "--isolation", "chroot", "--network", "host"),
        *("--build-arg", "BASE=localhost/base", "--tag", "localhost/ioshape"),
        *("-f", PACKAGING / "Containerfile", work.sources),
    )
    made = run(buildah, *store, "from", "localhost/ioshape").strip()
    command = [buildah, *store, "run", "--isolation", "chroot", made, "--", "/usr/bin/ioshape"]
    work.say(f"container: {run(*command, '--version').strip()}")
    run(*command, "settings")
    run(*command[:-1], "/bin/sh", "-c", f"cd /tmp && python3 - <<'END'\n{USE}\nEND")
    run(buildah, *store, "rm", "--all")
    run(buildah, *store, "rmi", "--all", "--force")


PACKAGES: dict[str, Callable[[Workplace], None]] = {
    "deb": deb,
    "sdist": sdist,
    f"wheel {platform.machine()}": wheel,
    "wheel aarch64": wheel_aarch64,
    "container file": container_file,
}


def measure(setting: Setting) -> Outcome:
    folder = ROOT / "build" / "launch"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    work = Workplace(folder, setting.say)
    failed: dict[str, str] = {}

    def tried(what: dict[str, Callable[[Workplace], None]]) -> int:
        for name, step in what.items():
            try:
                step(work)
                setting.say(f"{name}: works")
            except LaunchError as error:
                setting.say(f"{name}: {error}")
                failed[name] = str(error)
        return sum(name not in failed for name in what)

    good = tried(PACKAGES)
    described = tried(DESCRIPTIONS)
    remark = f"failed: {', '.join(failed)}" if failed else "each built, installed and used"
    outcome = Outcome()
    outcome.figures += [
        Figure("packages_ok", good, ">=", len(PACKAGES), remark),
        Figure("descriptions_ok", described, ">=", len(DESCRIPTIONS), remark),
        Figure("lintian_findings", len(work.findings), "<=", 0, "; ".join(work.findings)[:200]),
        Figure(
            "reproducible_differences",
            len(work.differences),
            "<=",
            0,
            ", ".join(work.differences) or "debs and wheels built twice",
        ),
    ]
    return outcome
