# SPDX-License-Identifier: Apache-2.0
"""Command "ioshape drain": copies checkpoints from a tier to their destinations.

With --to it then uploads them. ioshape._tier does the copying.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ioshape._cli.output import (
    SentenceError,
    bytes_option,
    explain,
    human_seconds,
    human_size,
    progress_bar,
    remark,
    say,
    say_json,
)
from ioshape._cli.paths import endpoint_option, s3

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ioshape._tier.tier import Copy, Drained, Tier
    from ioshape.types import Progress

# Pause of --watch between two checks of the tier; it doubles after failures, up to the second.
_LOOK_S = 0.5
_MOST_PAUSE_S = 60.0
_EXIT_TERMINATED = 143

_WORDS = {
    "overtaken": "not drained: a later save to this path replaces it",
    "newer": "not drained: the destination has a newer checkpoint",
    "gone": "not drained: it was removed from the tier",
    "waits": "drained from this node; the checkpoint appears when all nodes have drained it",
}


@dataclass(frozen=True)
class _Outcome:
    """The result for one checkpoint, with the member names of the JSON output."""

    #: destination of the checkpoint
    path: str
    #: a value of ioshape._tier.tier.Result, or "uploaded", "forgotten" or "failed"
    result: str
    bytes: int
    seconds: float
    #: URL of the upload; None without one
    url: str | None = None
    error: str | None = None

    def sentence(self) -> str:
        """Return the result as a line of text output."""
        if self.result in _WORDS:
            return f"{self.path}: {_WORDS[self.result]}"
        to = f" to {self.url}" if self.url else ""
        took = f"{human_size(self.bytes)} in {human_seconds(self.seconds)}"
        return f"{self.path}: {self.result}{to}, {took}"


class _Bar:
    """Total progress of a drain, computed from the progress of its copies one after another."""

    def __init__(self, total_bytes: int, tell: Callable[[Progress], object]) -> None:
        self._total_bytes = total_bytes
        self._tell = tell
        self._ended_bytes = 0

    def progress(self, now: Progress) -> None:
        done = min(self._ended_bytes + now.done_bytes, self._total_bytes)
        self._tell(now._replace(done_bytes=done, total_bytes=self._total_bytes))

    def ended(self, one: Drained) -> None:
        self._ended_bytes += one.n_bytes


class _Command:
    """The work of the command: its options, and methods that do each kind of work."""

    def __init__(
        self,
        folder: str,
        rate: int,
        keep_last: int,
        url: str | None,
        endpoint: str | None,
        told: Callable[[_Outcome], object],
        *,
        with_bar: bool,
    ) -> None:
        self._folder = folder
        self._rate = rate
        self._keep_last = keep_last
        self._url = url
        self._endpoint = endpoint
        self._told = told
        self._with_bar = with_bar
        self._began = time.monotonic()
        self._failed = False
        #: whether a checkpoint waits for files of other nodes
        self._waits = False
        #: copies that are already uploaded
        self._passed_on: set[Copy] = set()

    def once(self) -> bool:
        """Drain everything that waits. Return whether this node's part of it succeeded."""
        self._failed = self._waits = False
        with self._opened() as tier:
            for path in self._in_turn(tier):
                self._drain(tier, path)
                self._pass_on_drained(tier)
        return not self._failed

    def _in_turn(self, tier: Tier) -> Iterator[str | None]:
        """Yield the destinations to drain next, each before an upload; None for all that wait.

        With --keep-last, draining a checkpoint removes an older copy. So each one is uploaded
        before the next is drained.
        """
        if self._url is not None and self._keep_last:
            self._pass_on_drained(tier)
            seen: set[str] = set()
            while left := [one.path for one in _waiting(tier) if one.path not in seen]:
                seen.add(left[0])
                yield left[0]
        yield None

    def _opened(self) -> contextlib.closing[Tier]:
        """Open the tier. It is opened only while needed: an open tier cannot be unmounted."""
        from ioshape._tier.drain import drain_context  # noqa: PLC0415
        from ioshape._tier.tier import Tier  # noqa: PLC0415

        context = drain_context(rate=self._rate or None)
        return contextlib.closing(Tier(context, self._folder, keep_last=self._keep_last))

    def _drain(self, tier: Tier, path: str | None) -> None:
        waiting = [copy for copy in _waiting(tier) if path in (None, copy.path)]
        self._began = time.monotonic()
        is_told = False
        with progress_bar(path or self._folder, self._with_bar and bool(waiting)) as tell:
            bar = tell and _Bar(sum(copy.n_bytes for copy in waiting), tell)

            def ended(one: Drained) -> None:
                nonlocal is_told
                if bar:
                    bar.ended(one)
                error = None if one.error is None else explain(one.error)
                is_told = is_told or error is not None
                self._tell(one.path, one.result, one.n_bytes, error=error)

            try:
                tier.drain(path, ended=ended, progress=bar.progress if bar else None)
            except OSError as error:
                # The library has logged the errors of copies, and ended() has recorded them. EAGAIN
                # says that only files of other nodes are missing.
                if not is_told and error.errno != errno.EAGAIN:
                    raise

    def _pass_on_drained(self, tier: Tier) -> None:
        """Upload the drained copies on the tier, if --to was given."""
        url = self._url
        if url is None:
            return
        for copy in tier.copies():
            if not copy.is_waiting and copy not in self._passed_on:
                self._pass_on(tier, copy, url)

    def _pass_on(self, tier: Tier, copy: Copy, url: str) -> None:
        to = url.rstrip("/") + copy.path
        self._began = time.monotonic()
        try:
            self._upload(tier, copy, to)
        except OSError as error:
            remark(f"ioshape: {explain(error)}")
            self._tell(copy.path, "failed", 0, url=to, error=explain(error))
            return
        self._passed_on.add(copy)

    def _upload(self, tier: Tier, copy: Copy, to: str) -> None:
        """Upload a copy, unless it is uploaded already, or no longer on the tier.

        If several nodes have saved a checkpoint, only the destination has all of it. Then the
        destination is uploaded instead of the copy.
        """
        from ioshape._remote.download import is_uploaded  # noqa: PLC0415
        from ioshape._remote.source import is_whole  # noqa: PLC0415

        if tier.find(copy.path) is None:
            return
        source = copy.copy_path if is_whole(copy.copy_path) else copy.path
        if not Path(source).exists() or is_uploaded(source, to, endpoint=self._endpoint):
            return
        with progress_bar(copy.path, self._with_bar) as tell:
            done = s3().upload(source, to, endpoint=self._endpoint, progress=tell)
        self._tell(copy.path, "uploaded", done.n_bytes, url=done.url)

    def _tell(
        self,
        path: str,
        result: str,
        n_bytes: int,
        *,
        url: str | None = None,
        error: str | None = None,
    ) -> None:
        self._failed = self._failed or error is not None
        self._waits = self._waits or result == "waits"
        now = time.monotonic()
        self._told(_Outcome(path, result, n_bytes, round(now - self._began, 6), url, error))
        self._began = now

    def forget(self, paths: tuple[str, ...]) -> bool:
        """Remove the copies that wait for these destinations. Return whether all were removed."""
        with self._opened() as tier:
            for path in paths:
                try:
                    self._tell(path, "forgotten", tier.forget(path))
                except OSError as error:
                    remark(f"ioshape: {explain(error)}")
                    self._tell(path, "failed", 0, error=explain(error))
        return not self._failed

    # ---- --watch ---------------------------------------------------------------------------------

    def watch(self) -> None:
        """Drain again whenever something was saved. The tier may be unmounted in between."""
        seen: list[str] | None = None
        pause, has_been, is_gone = _LOOK_S, False, False
        while True:
            names = self._names()
            if names is None:  # not mounted, or never used as a tier
                if has_been and not is_gone:
                    remark(f"ioshape: the tier {self._folder} is gone; waiting until it is back")
                seen, pause, is_gone = None, _LOOK_S, has_been
            else:
                if is_gone:
                    remark(f"ioshape: the tier {self._folder} is back")
                has_been, is_gone = True, False
                if names != seen:
                    pause = self._try_once(pause)
                    seen = names if pause == _LOOK_S else None
            time.sleep(pause)

    def _names(self) -> list[str] | None:
        """Return the names in the tier's journal, which change with each save; None if no tier."""
        from ioshape._tier.tier import journal_of  # noqa: PLC0415

        try:
            return sorted(os.listdir(journal_of(self._folder)))  # noqa: PTH208
        except OSError:
            return None

    def _try_once(self, pause: float) -> float:
        """Drain once. Return the pause after it, which grows from `pause` if work is left."""
        try:
            if self.once() and not self._waits:
                return _LOOK_S
        except OSError as error:
            remark(f"ioshape: {explain(error)}")
        return min(2 * pause, _MOST_PAUSE_S)


def _waiting(tier: Tier) -> list[Copy]:
    return [copy for copy in tier.copies() if copy.is_waiting]


def _terminate(_signal: int, _frame: object) -> None:
    sys.exit(_EXIT_TERMINATED)  # raises SystemExit, so that cleanup runs


def _say(outcome: _Outcome) -> None:
    if outcome.error is None:
        say(outcome.sentence())
    sys.stdout.flush()


def _say_json_line(outcome: _Outcome) -> None:
    click.echo(json.dumps(asdict(outcome)))
    sys.stdout.flush()


def _check_url(_context: click.Context, _option: click.Parameter, url: str | None) -> str | None:
    if url is not None:
        s3()  # reports a missing boto3 now rather than after the drain
        from ioshape._remote.listing import parse  # noqa: PLC0415

        parse(url)
    return url


@click.command(short_help="Copy checkpoints from a tier to their destinations.")
@click.argument("folder", metavar="FOLDER", type=click.Path())
@click.option(
    "--rate",
    metavar="BYTES",
    callback=bytes_option,
    help="Write at most this many bytes per second, such as 500M.",
)
@click.option(
    "--keep-last",
    metavar="N",
    type=click.IntRange(min=1),
    help="Keep the newest N drained copies of each directory on the tier.  [default: as many as "
    "fit]",
)
@click.option("--watch", is_flag=True, help="Keep running, and drain later saves as they appear.")
@click.option(
    "--forget",
    "given_up",
    metavar="PATH",
    multiple=True,
    type=click.Path(),
    help="Drain nothing; remove the copy that waits for PATH, which is lost. Can be given several "
    "times.",
)
@click.option(
    "--to",
    "url",
    metavar="URL",
    callback=_check_url,
    help="Then upload drained checkpoints below s3://BUCKET/KEY.",
)
@endpoint_option
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Print the result of each checkpoint as JSON: a list, or with --watch lines.",
)
def command(
    folder: str,
    rate: int,
    keep_last: int | None,
    watch: bool,
    given_up: tuple[str, ...],
    url: str | None,
    endpoint: str | None,
    as_json: bool,
) -> int:
    """Copy checkpoints that you saved on the tier FOLDER to their destinations, oldest first.

    The drain takes slots as saves do, with a share of 1 where saves have 100. Each file or
    directory appears at its destination when it is complete and durable. Damaged copies are not
    drained, and newer checkpoints are not replaced. If a drain fails, the copy stays on the tier
    for the next time. Only one process drains a tier at a time; others wait for it.

    With --to s3://BUCKET/KEY, drained checkpoints are also uploaded as by "ioshape upload", with
    their whole path below the URL. Existing objects are not sent again. Uploads need boto3:
    pip install 'ioshape[s3]'.

    With --forget nothing is drained. It removes the copy that waits for that destination, as
    "ioshape ls" shows it. Use it for copies that can never be drained, because the destination's
    directory was deleted or the copy is damaged.

    If several nodes have saved a checkpoint, each node drains its own files. The checkpoint appears
    when all of them are drained.

    Examples:

    \b
    ioshape drain /local/nvme
    ioshape drain /local/nvme --watch --to s3://bucket
    ioshape drain /local/nvme --json | jq '.[] | select(.error)'
    ioshape drain /local/nvme --forget model.pt

    Exit code: 0 if nothing waits, except for other nodes, also if nothing was saved there; 1 if
    something could not be drained. With --watch: 0 after Ctrl-C.
    """
    from ioshape._tier.tier import is_tier, of_another_user, other_owner  # noqa: PLC0415

    if not Path(folder).is_dir():
        reason = "is not a directory" if Path(folder).exists() else "does not exist"
        raise SentenceError(f"{folder} {reason}; give the folder that saves use as their tier")
    if not watch and (owner := other_owner(folder)) is not None:
        raise SentenceError(of_another_user(folder, owner))
    if given_up and (watch or url):
        raise click.UsageError("give --forget alone, not with --watch or --to")
    outcomes: list[_Outcome] = []

    def told(outcome: _Outcome) -> None:
        if not watch:
            outcomes.append(outcome)
        elif as_json:
            _say_json_line(outcome)
        if not as_json:
            _say(outcome)

    is_whole = True
    if given_up and not is_tier(folder):
        raise SentenceError(f"no checkpoint was ever saved on {folder}")
    if watch or is_tier(folder):
        signal.signal(signal.SIGTERM, _terminate)
        with_bar = sys.stderr.isatty() and not as_json and not watch
        work = _Command(folder, rate, keep_last or 0, url, endpoint, told, with_bar=with_bar)
        if watch:
            with contextlib.suppress(KeyboardInterrupt):
                work.watch()
            return 0
        is_whole = work.forget(given_up) if given_up else work.once()
    if as_json:
        say_json([asdict(one) for one in outcomes])
    elif not outcomes:
        say(f"No checkpoint on {folder} waits to be drained.")
    return int(not is_whole)
