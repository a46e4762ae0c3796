# SPDX-License-Identifier: Apache-2.0
"""Calls of the library fail: each once, or from there on; and those that come because of it."""

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from striped import INSTANT, striped, unavailable

from . import harm
from .sites import Sites
from .trial import Trial

#: Of each act in one trial.
COUNT = 32

#: Trials are in memory, where nothing waits for a disk, but for one of so many: it is on a disk,
#: and the next one on a filesystem with stripes, each of these in turn.
EACH = 4
PLAYS = ("lustre", "beegfs", "ceph")
MEMORY = Path("/dev/shm")


@contextlib.contextmanager
def place(seed: int, work: Path) -> Iterator[Path]:
    if seed % EACH == 1 and not unavailable():
        with striped("ssd", play=PLAYS[seed // EACH % len(PLAYS)], **INSTANT) as mount:
            yield mount.path
    elif seed % EACH and MEMORY.is_dir():
        with tempfile.TemporaryDirectory(prefix="ioshape-faults-", dir=MEMORY) as folder:
            yield Path(folder)
    else:
        yield work


@contextlib.contextmanager
def trials(work: Path) -> Iterator[Callable[[int], Trial]]:
    harm.check()
    sites = Sites(work)

    def attempt(seed: int) -> Trial:
        with place(seed, work) as where:
            done = harm.run("faults", seed, COUNT, where)
        sites.add(done.sites)
        return done.trial("faults", ("wrong",), faults_sites_percent=sites.percent)

    yield attempt
    (work / "not-reached.txt").write_text("\n".join([*sites.missing, ""]))
