# SPDX-License-Identifier: Apache-2.0
"""Calls of the library fail: each once, or from there on; and those that come because of it."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from striped import INSTANT, striped, unavailable

from . import harm
from .sites import Sites
from .trial import Trial

#: Of each act in one trial.
COUNT = 16

#: One trial of so many is on a filesystem with stripes, each of these in turn.
STRIPED_EACH = 4
PLAYS = ("lustre", "beegfs", "ceph")


@contextlib.contextmanager
def trials(work: Path) -> Iterator[Callable[[int], Trial]]:
    harm.check()
    sites = Sites(work)

    def attempt(seed: int) -> Trial:
        with contextlib.ExitStack() as stack:
            where = work
            if seed % STRIPED_EACH == 0 and not unavailable():
                play = PLAYS[seed // STRIPED_EACH % len(PLAYS)]
                where = stack.enter_context(striped("ssd", play=play, **INSTANT)).path
            done = harm.run("faults", seed, COUNT, where)
        sites.add(done.sites)
        return done.trial("faults", ("wrong",), faults_sites_percent=sites.percent)

    yield attempt
    (work / "not-reached.txt").write_text("\n".join([*sites.missing, ""]))
