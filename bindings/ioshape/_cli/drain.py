# SPDX-License-Identifier: Apache-2.0
"""ioshape drain."""

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
    note,
    progress_bar,
    say,
    say_json,
)
from ioshape._cli.paths import endpoint_option, s3

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ioshape._tier.tier import Copy, Drained, Tier
    from ioshape.types import Progress

#: for --to: the archive of the filesystem where the destinations are
_HSM = "hsm"
# Of --watch: between two looks, and after failures up to so long.
_LOOK_S = 0.5
_MOST_PAUSE_S = 60.0
_EXIT_TERMINATED = 143

_WORDS = {
    "overtaken": "a later save to it goes instead",
    "newer": "there is a newer one, which stays",
    "gone": "it was removed from the tier",
    "waits": "the files of this node are there; it appears when those of the others are",
}


@dataclass(frozen=True)
class _Outcome:
    """What became of a copy, as in the JSON."""

    path: str
    #: as ioshape._tier.tier.Result has it, "uploaded", "archived" or "forgotten"
    result: str
    bytes: int
    seconds: float
    #: where it was uploaded to
    url: str | None = None
    error: str | None = None

    def sentence(self) -> str:
        """For people."""
        if self.result in _WORDS:
            return f"{self.path}: {_WORDS[self.result]}"
        to = f" to {self.url}" if self.url else ""
        took = f"{human_size(self.bytes)} in {human_seconds(self.seconds)}"
        return f"{self.path}: {self.result}{to}, {took}"


class _Bar:
    """How far all of it is, from what is told of one copy after the other."""

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
    """What was asked for, and what has become of it."""

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
        #: something waits for other nodes
        self._waits = False
        #: what need not be looked for on the object store, or in the archive, again
        self._passed_on: set[Copy] = set()

    def once(self) -> bool:
        """Whether all of it was carried, as far as it is up to this node."""
        self._failed = self._waits = False
        with self._opened() as tier:
            for path in self._in_turn(tier):
                self._drain(tier, path)
                self._pass_on_drained(tier)
        return not self._failed

    def _in_turn(self, tier: Tier) -> Iterator[str | None]:
        """What to drain before any of it goes on from there; None: all that waits.

        Where only so many copies stay, each goes on before the drain of the next one removes it.
        """
        if self._url is not None and self._keep_last:
            self._pass_on_drained(tier)
            seen: set[str] = set()
            while left := [one.path for one in _waiting(tier) if one.path not in seen]:
                seen.add(left[0])
                yield left[0]
        yield None

    def _opened(self) -> contextlib.closing[Tier]:
        """As short as it is needed: an open one cannot be unmounted."""
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
                # Of a copy, the library has logged why.
                if not is_told and error.errno != errno.EAGAIN:
                    raise

    def _pass_on_drained(self, tier: Tier) -> None:
        """What is on the tier and at its destination, if it is to go on from there."""
        url = self._url
        if url is None:
            return
        for copy in tier.copies():
            if not copy.is_waiting and copy not in self._passed_on:
                self._pass_on(tier, copy, url)

    def _pass_on(self, tier: Tier, copy: Copy, url: str) -> None:
        to = None if url == _HSM else url.rstrip("/") + copy.path
        self._began = time.monotonic()
        try:
            if to is None:
                self._archive(copy)
            else:
                self._upload(tier, copy, to)
        except OSError as error:
            note(f"ioshape: {explain(error)}")
            self._tell(copy.path, "failed", 0, url=to, error=explain(error))
            return
        self._passed_on.add(copy)

    def _upload(self, tier: Tier, copy: Copy, to: str) -> None:
        """Unless it is there, or the destination has a newer one. What several nodes have saved is
        whole at the destination alone."""
        from ioshape._remote.look import is_uploaded  # noqa: PLC0415
        from ioshape._remote.source import is_whole  # noqa: PLC0415

        if tier.find(copy.path) is None:
            return
        source = copy.place if is_whole(copy.place) else copy.path
        if not Path(source).exists() or is_uploaded(source, to, endpoint=self._endpoint):
            return
        with progress_bar(copy.path, self._with_bar) as tell:
            done = s3().upload(source, to, endpoint=self._endpoint, progress=tell)
        self._tell(copy.path, "uploaded", done.n_bytes, url=done.url)

    def _archive(self, copy: Copy) -> None:
        """What is at the destination, unless it was removed there since."""
        from ioshape._remote.hsm import archive  # noqa: PLC0415

        if not Path(copy.path).exists():
            return
        with progress_bar(copy.path, self._with_bar) as tell:
            done = archive(copy.path, progress=tell)
        if done.archived_bytes:
            self._tell(copy.path, "archived", done.n_bytes)

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
        """Whether what waited for all these destinations is gone."""
        with self._opened() as tier:
            for path in paths:
                try:
                    self._tell(path, "forgotten", tier.forget(path))
                except OSError as error:
                    note(f"ioshape: {explain(error)}")
                    self._tell(path, "failed", 0, error=explain(error))
        return not self._failed

    # ---- --watch ---------------------------------------------------------------------------------

    def watch(self) -> None:
        """Again and again, whenever something was saved there. It may be unmounted in between."""
        seen: list[str] | None = None
        pause, has_been, is_gone = _LOOK_S, False, False
        while True:
            names = self._names()
            if names is None:  # it is not mounted, or not saved on yet: what is there is left alone
                if has_been and not is_gone:
                    note(f"ioshape: the tier {self._folder} is gone; it is waited for")
                seen, pause, is_gone = None, _LOOK_S, has_been
            else:
                if is_gone:
                    note(f"ioshape: the tier {self._folder} is back")
                has_been, is_gone = True, False
                if names != seen:
                    pause = self._try_once(pause)
                    seen = names if pause == _LOOK_S else None
            time.sleep(pause)

    def _names(self) -> list[str] | None:
        """What tells whether anything has changed; None: it is no tier."""
        from ioshape._tier.tier import journal_of  # noqa: PLC0415

        try:
            return sorted(os.listdir(journal_of(self._folder)))  # noqa: PTH208
        except OSError:
            return None

    def _try_once(self, pause: float) -> float:
        """How long to wait after it."""
        try:
            if self.once() and not self._waits:
                return _LOOK_S
        except OSError as error:
            note(f"ioshape: {explain(error)}")
        return min(2 * pause, _MOST_PAUSE_S)


def _waiting(tier: Tier) -> list[Copy]:
    return [copy for copy in tier.copies() if copy.is_waiting]


def _terminate(_signal: int, _frame: object) -> None:
    sys.exit(_EXIT_TERMINATED)  # which leaves nothing half done


def _say(outcome: _Outcome) -> None:
    if outcome.error is None:
        say(outcome.sentence())
    sys.stdout.flush()


def _say_json_line(outcome: _Outcome) -> None:
    click.echo(json.dumps(asdict(outcome)))
    sys.stdout.flush()


def _check_url(_context: click.Context, _option: click.Parameter, url: str | None) -> str | None:
    if url is not None and url != _HSM:
        s3()  # now rather than after the drain
        from ioshape._remote.address import parse  # noqa: PLC0415

        parse(url)
    return url


@click.command(short_help="Carry what was saved on a fast disk to where it belongs.")
@click.argument("folder", metavar="FOLDER", type=click.Path())
@click.option(
    "--rate",
    metavar="BYTES",
    callback=bytes_option,
    help="Write at most so many bytes per second, such as 500M.",
)
@click.option(
    "--keep-last",
    metavar="N",
    type=click.IntRange(min=1),
    help="Of what was drained into a directory leave the newest N on the tier. Default: as "
    "many as there is room for.",
)
@click.option("--watch", is_flag=True, help="Go on, and carry what is saved from now on.")
@click.option(
    "--forget",
    "given_up",
    metavar="PATH",
    multiple=True,
    type=click.Path(),
    help="Remove what waits for PATH instead: it is lost. Can be given several times.",
)
@click.option(
    "--to",
    "url",
    metavar="URL",
    callback=_check_url,
    help="Then upload what was carried, below s3://BUCKET/KEY; hsm: have Lustre archive it.",
)
@endpoint_option
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Print what became of each as JSON: a list, or with --watch lines.",
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
    """Carries what you have saved on a tier, FOLDER, to where it belongs, the oldest first.

    It writes as saves do, in slots, with a share of 1 where saves have 100, and puts each file or
    directory in place when it is whole and durable. What is damaged is not carried, and what is
    newer there is not replaced. Whatever fails stays on the tier for the next time. Only one
    process drains a tier at a time: others wait for it.

    With --to what was drained is uploaded as well, as by "ioshape upload", with its whole path
    below the URL. What is there is not sent again. Needs boto3: pip install 'ioshape[s3]'. With
    --to hsm the filesystem where it was drained to archives it, as by "ioshape archive".

    \b
    ioshape drain /local/nvme
    ioshape drain /local/nvme --rate 500M
    ioshape drain /local/nvme --watch --to s3://bucket/cluster7
    ioshape drain /local/nvme --json | jq '.[] | select(.error)'
    ioshape drain /local/nvme --forget /scratch/deleted/model.pt

    With --forget nothing is drained. What waits for that destination, as "ioshape ls" shows it, is
    removed from the tier, with its copy: for what can never be drained, as its directory was
    deleted, or the copy is damaged.

    Of a generation that several nodes have saved, each drains its own files. It appears when the
    last of them are there.

    Exit code: 0 if nothing waits any more but for other nodes, also if nothing was saved there; 1
    if something could not be carried. With --watch: 0 after Ctrl-C.
    """
    from ioshape._tier.tier import is_tier, of_another_user, other_owner  # noqa: PLC0415

    if not Path(folder).is_dir():
        reason = "is not a directory" if Path(folder).exists() else "does not exist"
        raise SentenceError(f"{folder} {reason}; give the folder that saves have as their tier")
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
        raise SentenceError(f"nothing was ever saved on {folder}")
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
        say(f"Nothing on {folder} waits to be drained.")
    return int(not is_whole)
