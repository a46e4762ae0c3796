# SPDX-License-Identifier: Apache-2.0
"""Output of the commands: lines, tables, JSON, progress bars, sizes and times.

Names in the output come from untrusted files. They are escaped, so that they cannot control the
terminal.
"""

from __future__ import annotations

import json
import os
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

import click

from ioshape._core.text import one_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from ioshape.types import Progress

    Option = Callable[[Callable[..., Any]], Callable[..., Any]]

_GAP = 2
_LEAST_CUT = 8


class SentenceError(click.ClickException):
    """An error that ends the command with its message on stderr, and exit code 1."""


class UsageSentenceError(SentenceError):
    """An error of usage: exit code 2, without click's hint at --help."""

    exit_code = 2


def explain(error: OSError) -> str:
    """Return the message of an error. Errors of ioshape have one; Python's get their path."""
    if hasattr(error, "operation") or not error.filename:
        return str(error)
    return f"{os.fsdecode(error.filename)}: {error.strerror}"


def say(text: str = "") -> None:
    """Print a line on stdout."""
    click.echo(one_line(text))


def remark(text: str) -> None:
    """Print a line on stderr, about the work rather than its result."""
    click.echo(one_line(text), err=True)


def say_json(value: object) -> None:
    """Print indented JSON on stdout."""
    click.echo(json.dumps(value, indent=2))


def for_json(value: Any) -> dict[str, Any]:
    """Return a dataclass for JSON: a size is named "bytes", and times are strings."""
    fields = {"bytes" if name == "n_bytes" else name: one for name, one in asdict(value).items()}
    return {
        name: one.isoformat() if isinstance(one, datetime) else one for name, one in fields.items()
    }


def human_size(n_bytes: float) -> str:
    """Return a size as three digits and a unit, such as "1.50 GiB"."""
    unit = "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        # A value that would be rounded to 1024 takes the larger unit.
        if n_bytes < 1023.5:
            break
        n_bytes, unit = n_bytes / 1024, larger
    digits = 0 if unit == "B" or n_bytes >= 99.95 else 1 if n_bytes >= 9.995 else 2
    return f"{n_bytes:.{digits}f} {unit}"


def human_seconds(seconds: float) -> str:
    """Return a time as three digits and a unit, or as two units, such as "2 m 05 s"."""
    if seconds < 0.9995:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 99.95:
        return f"{seconds:.{2 if seconds < 9.995 else 1}f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} m {rest:02} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} m"


def plural(count: int, noun: str) -> str:
    """Return a count with its noun, such as "1 tensor" or "2,000 tensors"."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


json_option: Option = click.option(
    "--json", "as_json", is_flag=True, help="Print the result as JSON."
)


def size_option(_context: click.Context, _option: click.Parameter, text: str) -> int:
    """Parse the value of an option that takes a number of bytes, such as 64M."""
    from ioshape._core.config import number_of_bytes  # noqa: PLC0415

    try:
        return number_of_bytes(text)
    except ValueError:
        raise click.BadParameter(f"{text!r} is not a number of bytes, such as 1G or 512M") from None


def bytes_option(context: click.Context, option: click.Parameter, text: str | None) -> int:
    """Parse the value of an optional option that takes a number of bytes; 0 if it is absent."""
    if text is None:
        return 0
    number = size_option(context, option, text)
    if not 1 <= number < 1 << 63:
        raise click.BadParameter(f"{text!r} is not between 1 byte and 8 EiB")
    return number


@dataclass(frozen=True)
class Column:
    """A column of a table."""

    title: str
    #: whether its cells are aligned to the right
    right: bool = False
    #: order of removal in a narrow window, the highest first; 0 if it is never removed
    optional: int = 0
    #: whether its cells may be cut in a narrow window
    cut: bool = False


class Table:
    """A table of text. A row is always a single line, for grep and awk."""

    def __init__(self, *columns: Column) -> None:
        self.columns = columns
        self.rows: list[list[str]] = []
        self._styles: list[str] = []

    def add(self, *cells: str, style: str = "") -> None:
        """Add a row. `style` is its colour on a terminal."""
        self.rows.append([one_line(cell) for cell in cells])
        self._styles.append(style)

    def show(self) -> None:
        """Print the table on stdout. On a terminal titles are bold, and rows have their colours."""
        titles, *rows = self.lines()
        click.secho(titles, bold=True)
        for row, style in zip(rows, self._styles, strict=True):
            click.secho(row, fg=style or None)

    def lines(self) -> Iterable[str]:
        """Yield the plain lines of the table, titles first."""
        titles = [column.title for column in self.columns]
        widths = self._widths()
        for row in [titles, *self.rows]:
            cells = [
                cell.rjust(width) if column.right else cell.ljust(width)
                for cell, width, column in zip(row, widths, self.columns, strict=True)
            ]
            yield (" " * _GAP).join(cells).rstrip()

    def _widths(self) -> list[int]:
        return [
            max(len(column.title), *(len(row[i]) for row in self.rows), 0)
            for i, column in enumerate(self.columns)
        ]

    def _needed(self) -> int:
        return sum(self._widths()) + _GAP * len(self.columns)

    def fitted(self, width: int) -> Table:
        """Return a table that fits into a window, if possible.

        First optional columns are removed, then cells are cut.
        """
        kept = list(range(len(self.columns)))
        while (fitted := self._only(kept))._needed() > width:
            most = max(kept, key=lambda i: self.columns[i].optional)
            if not self.columns[most].optional:
                break
            kept.remove(most)
        return fitted._cut(width)

    def _only(self, kept: list[int]) -> Table:
        table = Table(*(self.columns[i] for i in kept))
        table.rows = [[row[i] for i in kept] for row in self.rows]
        table._styles = self._styles
        return table

    def _cut(self, width: int) -> Table:
        cut = [i for i, column in enumerate(self.columns) if column.cut]
        while (excess := self._needed() - width) > 0 and cut:
            widths = self._widths()
            widest = max(cut, key=lambda i: widths[i])
            most = max(widths[widest] - excess, _LEAST_CUT)
            if most >= widths[widest]:
                break
            for row in self.rows:
                if len(row[widest]) > most:
                    row[widest] = row[widest][: most - 1] + "\N{HORIZONTAL ELLIPSIS}"
        return self


def columns(*titles: str) -> Sequence[Column]:
    """Return columns from titles. "<name" is aligned left, ">size" right."""
    return [Column(title[1:], right=title[0] == ">") for title in titles]


@contextmanager
def progress_bar(path: str, wanted: bool) -> Iterator[Callable[[Progress], object] | None]:
    """Show a progress bar on stderr until the block ends.

    Yield a function that updates it; None if it is not wanted.
    """
    if not wanted:
        yield None
        return
    from rich import progress as rich  # noqa: PLC0415 - its import takes longer than small files
    from rich.console import Console  # noqa: PLC0415
    from rich.markup import escape  # noqa: PLC0415

    bar = rich.Progress(
        rich.TextColumn("{task.description}"),
        rich.BarColumn(),
        rich.DownloadColumn(binary_units=True),
        rich.TransferSpeedColumn(),
        rich.TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    with bar:
        task = bar.add_task(escape(one_line(path)), total=None)

        def tell(progress: Progress) -> None:
            bar.update(task, completed=progress.done_bytes, total=progress.total_bytes)

        yield tell
