# SPDX-License-Identifier: Apache-2.0
"""Measure what a new user meets first: the site, and the way from a clone to the first picture.

A figure that could not be measured is left out. The reason is listed among the ceilings.
"""

import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import gallery
from browser import PHONE, browser, served, unavailable
from pages import SITE, dead_links, pages

from . import launch_alerts, launch_packages
from .launch_root import ROOT, LaunchError
from .setting import Figure, Outcome, Setting

LIMIT_S = 1800


# ---- The site ----------------------------------------------------------------------------------


def site_figures(setting: Setting) -> Iterator[Figure]:
    """Build the site and open every page in a browser, in two widths and two color schemes."""
    setting.say("the site")
    subprocess.run([ROOT / "docs" / "site.sh"], check=True, timeout=LIMIT_S)
    found = pages(SITE)
    yield Figure("site_pages", len(found), ">=", 30, "of HTML in build/site")
    dead = dead_links(SITE)
    yield Figure("site_dead_links", len(dead), "<=", 0, "; ".join(dead[:5]) or "anchors included")
    if unavailable():
        raise LaunchError(f"site_console_errors: {unavailable()}")
    troubles = []
    with served(SITE) as address, browser() as window:
        for path in found:
            name = str(path.relative_to(SITE))
            for size in ((1280, 900), PHONE):
                for dark in (False, True):
                    shown = window.show(f"{address}/{name}", size, dark=dark)
                    troubles += [f"{name}: {one}" for one in [*shown.troubles, *shown.foreign]]
    remark = "; ".join(troubles[:5]) or f"{4 * len(found)} times shown: 2 widths, light and dark"
    yield Figure("site_console_errors", len(troubles), "<=", 0, remark)


# ---- The first save ----------------------------------------------------------------------------


def first_save_figures(setting: Setting) -> Iterator[Figure]:
    """Time the way from "git clone" to the picture of the demo. Packages are in pip's cache."""
    setting.say("a clone, and its demo")
    with tempfile.TemporaryDirectory(prefix="ioshape-launch-") as folder:
        clone, picture = Path(folder) / "clone", Path(folder) / "storm.svg"
        began = time.monotonic()
        subprocess.run(["git", "clone", "-q", ROOT, clone], check=True, timeout=LIMIT_S)
        done = subprocess.run(
            [clone / "examples" / "storm_demo.sh", "--picture", picture],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        took_s = time.monotonic() - began
        if done.returncode or not picture.exists():
            last = done.stdout.strip().rpartition("\n")[2]
            raise LaunchError(f"first_save_s: the demo ended with {done.returncode}: {last}")
        shutil.copy(picture, ROOT / "build" / "storm-demo.svg")
    yield Figure("first_save_s", took_s, "<=", 180, "git clone, setup, build, storm, picture")


# ---- The gallery -------------------------------------------------------------------------------


def gallery_figures(setting: Setting) -> Iterator[Figure]:
    """Run popular training scripts, kill them while they save, and resume them."""
    setting.say("the gallery")
    with tempfile.TemporaryDirectory(prefix="ioshape-launch-") as folder:
        found = {}
        for script in gallery.SCRIPTS:
            place = Path(folder) / script
            place.mkdir()
            found[script] = gallery.tried(script, place)
    wrong = [sentence for sentence in found.values() if sentence]
    remark = "; ".join(wrong) or ", ".join(found)
    yield Figure("gallery_ok", len(found) - len(wrong), ">=", 8, remark)


# Each entry is a function here or in a launch_* module.
PARTS: tuple[Callable[[Setting], Iterable[Figure]], ...] = (
    site_figures,
    first_save_figures,
    gallery_figures,
    launch_packages.figures,
    launch_alerts.figures,
)


def measure(setting: Setting) -> Outcome:
    outcome = Outcome()
    for part in PARTS:
        try:
            for figure in part(setting):
                outcome.figures.append(figure)
        # This benchmark takes an hour: a failed part must not discard the figures of the others.
        except (LaunchError, AssertionError, subprocess.SubprocessError) as error:
            outcome.ceilings.append(str(error))
    return outcome
