# SPDX-License-Identifier: Apache-2.0
"""on_preemption(): the cluster wants its node back."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

# A file is looked for no more often, on whatever filesystem it is to appear.
_LOOK_S = 0.5


class Notice:
    """Whether this process is told to end, as ioshape.on_preemption() gives it.

    It is false until then, and true from then on. The end of its `with` block puts the handlers of
    signals back that were there before.
    """

    def __init__(
        self, deadline: float, signals: Iterable[int], file: str | os.PathLike[str] | None
    ) -> None:
        self._deadline = deadline
        self._file = None if file is None else os.fspath(file)
        self._looked = -_LOOK_S
        self._since: float | None = None
        self._owner = os.getpid()
        #: what told it: "SIGTERM", or the file; "" until then
        self.reason: str = ""
        self._before: dict[int, Any] = {}
        try:
            for number in signals:
                self._before[number] = signal.signal(number, self._on_signal)
        except BaseException:
            self.close()
            raise

    def __bool__(self) -> bool:
        now = time.monotonic()
        if self._since is None and self._file is not None and now - self._looked >= _LOOK_S:
            self._looked = now
            if os.path.lexists(self._file):
                self._notice(self._file)
        return self._since is not None

    def __repr__(self) -> str:
        state = f"{self.reason}, {self.left:.1f} s left" if self else "none"
        return f"<ioshape.types.Notice: {state}>"

    @property
    def left(self) -> float | None:
        """Seconds of the deadline, below 0 if it is over; None as long as nobody wants the node.

        So it can be given to every save: save(state, path, deadline=notice.left).
        """
        if not self or self._since is None:
            return None
        return self._since + self._deadline - time.monotonic()

    def close(self) -> None:
        """Puts the handlers back that were there before. A second time it does nothing."""
        for number, before in self._before.items():
            # None: it is not one of Python's, and cannot be put back. Nor is what came since.
            if before is not None and signal.getsignal(number) == self._on_signal:
                signal.signal(number, before)
        self._before = {}

    def __enter__(self) -> Notice:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _notice(self, reason: str) -> None:
        if self._since is None:
            self.reason = reason
            self._since = time.monotonic()

    def _on_signal(self, number: int, frame: Any) -> None:
        before = self._before.get(number)
        if self._owner != os.getpid():
            # A forked child inherits the handler, but not the loop that would ask: what ends it
            # is to end it.
            signal.signal(number, before if before is not None else signal.SIG_DFL)
            signal.raise_signal(number)
            return
        names = (one.name for one in signal.Signals if one == number)
        self._notice(next(names, f"signal {number}"))
        if callable(before):
            before(number, frame)


def on_preemption(
    deadline: float = 25.0,
    *,
    signals: Iterable[int] = (signal.SIGTERM, signal.SIGUSR1),
    file: str | os.PathLike[str] | None = None,
) -> Notice:
    """Watches for the word that the process has to end soon, so that it can save before.

        with ioshape.on_preemption() as notice:
            for step in range(steps):
                train(step)
                if notice:
                    ioshape.save(state, path, deadline=notice.left)
                    break

    It is told by a signal (Slurm, Kubernetes, torchrun) or by a file that appears. Nothing else
    happens then: the loop asks the notice. A handler of a signal that was there before is called,
    too. The ranks of a job are not told in the same step: they have to agree when they stop, for
    example by an all_reduce.

    Args:
        deadline: seconds from the word to the end; take some off what your cluster gives.
        signals: that bring the word. Only the main thread can watch for signals.
        file: also a file of this name does. It is looked for twice a second at most, when the
            notice is asked.

    Returns:
        A Notice, to be used in a `with` statement: true once the word has come.
    """
    return Notice(deadline, signals, file)
