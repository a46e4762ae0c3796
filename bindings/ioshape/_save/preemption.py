# SPDX-License-Identifier: Apache-2.0
"""Notice of preemption: on_preemption() learns that the cluster will end this process soon."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

# Seconds between two looks for the file, which may be on a slow filesystem.
_LOOK_S = 0.5


class Notice:
    """A notice of preemption, as ioshape.on_preemption() returns it.

    It is false until the process is asked to end, and true from then on. The end of its `with`
    block restores the signal handlers that were installed before.
    """

    def __init__(
        self, deadline: float, signals: Iterable[int], file: str | os.PathLike[str] | None
    ) -> None:
        self._deadline = deadline
        self._file = None if file is None else os.fspath(file)
        self._looked = -_LOOK_S
        self._since: float | None = None
        self._owner = os.getpid()
        #: The cause: a signal's name such as "SIGTERM", or the path of the file; "" before the
        #: notice.
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
        """The seconds until the deadline, negative after it; None while there is no notice.

        So it can be passed to every save: save(state, path, deadline=notice.left).
        """
        if not self or self._since is None:
            return None
        return self._since + self._deadline - time.monotonic()

    def close(self) -> None:
        """Restore the signal handlers that were installed before. A second call does nothing."""
        for number, before in self._before.items():
            # None means that the handler was not installed by Python, so it cannot be restored. A
            # handler that was installed since stays.
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
            # A forked child inherits the handler but not the loop that reads the notice. So the
            # signal must have its original effect there.
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
    """Watch for notice that the process must end soon, so that it can save before.

        with ioshape.on_preemption() as notice:
            for step in range(steps):
                train(step)
                if notice:
                    # Save in the time left.
                    ioshape.save(state, path, deadline=notice.left)
                    break

    The notice comes by a signal (Slurm, Kubernetes, torchrun) or by a file that appears. Nothing
    else happens by itself: your loop tests the notice. A signal handler that was installed before
    is called as well.

    The ranks of a job get the notice in different steps. They must agree on the step at which they
    stop, for example by an all_reduce.

    Args:
        deadline: Seconds from the notice to the end of the process. Choose a little less than your
            cluster grants. Default: 25.
        signals: The signals that give notice. Only the main thread may pass any. Default: SIGTERM
            and SIGUSR1.
        file: A path that gives notice when it appears. It is checked when you test the notice, at
            most twice a second. Default: none.

    Returns:
        A Notice for a `with` statement, which is true once notice was given.

    Raises:
        ValueError: Signals were passed on a thread other than the main thread.
    """
    return Notice(deadline, signals, file)
