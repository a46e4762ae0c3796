# SPDX-License-Identifier: Apache-2.0
"""ioshape bench."""

from __future__ import annotations

import json
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem

from ioshape.cli.bench.scratch import (
    check_folder,
    check_memory,
    check_space,
    scratch,
    status,
)
from ioshape.cli.output import (
    SentenceError,
    Table,
    columns,
    human_size,
    note,
    plural,
    say,
    say_json,
    size_option,
)
from ioshape.cli.paths import check_file_to_write, json_option, write_file

if TYPE_CHECKING:
    from ioshape.cli.bench.contest import Contest, Summary

_LEAST_BYTES = 1 << 20
_SHORT_SECONDS = 0.1


def _measure(parent: Path, size: int, rounds: int) -> Contest:
    try:
        from ioshape.cli.bench.contest import Contest  # noqa: PLC0415 - imports torch
    except ImportError as error:
        raise SentenceError(f"the bench needs torch ({error}); pip install torch") from None
    # Four contestants and a warm-up, the ceiling, and what it takes to find that.
    total = (4 * (rounds + 1) + rounds) * size + min(size, 256 << 20) * 5
    with scratch(parent) as folder:
        note(
            f"ioshape: saving {human_size(size)} again and again to {folder}, about "
            f"{human_size(total)} in all; the folder is removed at the end"
        )
        with status() as tell:
            contest = Contest(folder, size, tell)
            try:
                contest.run(rounds)
            finally:
                contest.stop()
    return contest


# ---- Telling -----------------------------------------------------------------------------------


def _labels(contest: Contest) -> dict[str, str]:
    from ioshape.cli.bench import contest as names  # noqa: PLC0415

    assert contest.ceiling is not None
    return {
        names.TORCH: "torch.save (not durable)",
        names.TORCH_FSYNC: "torch.save + fsync",
        names.SAVE: "ioshape.save",
        names.STALL: "ioshape.save_async until it returns",
        names.ASYNC: "ioshape.save_async until durable",
        names.CEILING: f"ceiling: {contest.ceiling.name}",
    }


def _ratio(ours: Summary, theirs: Summary) -> float:
    """Throughput over throughput, within each round; the median of these."""
    from statistics import median  # noqa: PLC0415

    return median(
        (a.n_bytes / a.seconds) / (b.n_bytes / b.seconds)
        for a, b in zip(ours.samples, theirs.samples, strict=True)
    )


def _ratios(contest: Contest) -> dict[str, float]:
    from ioshape.cli.bench import contest as names  # noqa: PLC0415

    them = contest.summaries
    return {
        "save_vs_torch": _ratio(them[names.SAVE], them[names.TORCH]),
        "save_vs_torch_fsync": _ratio(them[names.SAVE], them[names.TORCH_FSYNC]),
        "save_vs_ceiling": _ratio(them[names.SAVE], them[names.CEILING]),
        "async_stall_vs_torch": 1 / _ratio(them[names.STALL], them[names.TORCH]),
    }


def _as_json(contest: Contest, parent: Path, rounds: int) -> dict[str, Any]:
    import torch  # noqa: PLC0415

    import ioshape  # noqa: PLC0415

    assert contest.ceiling is not None
    assert contest.report is not None
    return {
        "path": str(parent.absolute()),
        "filesystem": contest.report.filesystem,
        "bytes": contest.n_bytes,
        "tensors": len(contest.state),
        "rounds": rounds,
        "ceiling": contest.ceiling.name,
        "ioshape": ioshape.__version__,
        "torch": str(torch.__version__),
        "ratios": _ratios(contest),
        "medians": {
            name: {
                "seconds": summary.seconds,
                "gb_per_s": summary.gb_per_s,
                "cpu_seconds_per_gb": summary.cpu_seconds_per_gb,
            }
            for name, summary in contest.summaries.items()
        },
        "seconds": {
            name: [sample.seconds for sample in summary.samples]
            for name, summary in contest.summaries.items()
        },
        "report": {**asdict(contest.report), "path": None},
    }


def _show(contest: Contest, parent: Path, rounds: int) -> None:
    from ioshape.cli.bench import contest as names  # noqa: PLC0415

    report = contest.report
    assert report is not None
    them = contest.summaries
    say(
        f"{parent}: {report.filesystem}; {human_size(contest.n_bytes)} in "
        f"{plural(len(contest.state), 'tensor')}; medians of {plural(rounds, 'round')}"
    )
    say()
    table = Table(*columns("<what", ">seconds", ">GB/s", ">of ceiling", ">CPU s/GB"))
    for name, label in _labels(contest).items():
        one = them[name]
        cpu = one.cpu_seconds_per_gb
        table.add(
            label,
            f"{one.seconds:.3f}",
            f"{one.gb_per_s:.2f}",
            # The stall is no writing.
            "-" if name == names.STALL else f"{_ratio(one, them[names.CEILING]):.0%}",
            "-" if cpu is None else f"{cpu:.2f}",
        )
    table.show()
    ratios = _ratios(contest)
    say()
    say(
        f"ioshape.save is {ratios['save_vs_torch_fsync']:.2f} times as fast as torch.save + fsync "
        f"and reaches {ratios['save_vs_ceiling']:.0%} of the ceiling."
    )
    say(
        f"Training waits {them[names.STALL].seconds:.3f} s for save_async, and "
        f"{them[names.TORCH].seconds:.3f} s for torch.save."
    )
    say(f"Engine: {report.engine}, {'direct' if report.direct else 'through the page cache'}.")
    for fallback in report.fallbacks:
        say(f"Note: {fallback}.")
    if them[names.CEILING].seconds < _SHORT_SECONDS:
        say("These times are too short to mean much; choose a larger --size.")


class _Bench(click.Command):
    """Takes a directory, or the name of another bench before it.

    A directory of that name is reached as ./storm.
    """

    others = ("storm",)

    def make_context(
        self,
        info_name: str | None,
        args: list[str],
        parent: click.Context | None = None,
        **extra: Any,
    ) -> click.Context:
        if args and args[0] in self.others:
            other: click.Command = import_module(f"ioshape.cli.bench.{args[0]}").command
            return other.make_context(f"{info_name} {args[0]}", args[1:], parent, **extra)
        return super().make_context(info_name, args, parent, **extra)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        found = super().shell_complete(ctx, incomplete)
        if incomplete:
            found += [CompletionItem(name) for name in self.others if name.startswith(incomplete)]
        return found


@click.command(
    cls=_Bench, short_help="Measure torch.save, ioshape and the ceiling on a filesystem."
)
@click.argument("path", default=".", type=click.Path(file_okay=False))
@click.option(
    "--size",
    default="1G",
    show_default=True,
    metavar="BYTES",
    callback=size_option,
    help="What is saved each time, such as 4G or 512M.",
)
@click.option(
    "--rounds",
    default=3,
    show_default=True,
    metavar="N",
    type=click.IntRange(1, 1000),
    help="How often each is measured.",
)
@json_option
def command(path: str, size: int, rounds: int, json_path: str | None) -> None:
    """Saves the tensors of a transformer in several ways to the directory PATH, and compares.

    Side by side, in turns: torch.save without and with fsync, ioshape.save, ioshape.save_async (how
    long training waits, and until the file is durable), and the ceiling: what the filesystem gives
    to a program that only writes: direct writes of large blocks by threads.

    Everything is written to a folder below PATH, which is removed at the end, also after Ctrl-C.
    Whatever else is busy on the machine or the filesystem has its part in the numbers.

    The settings are those that "ioshape settings" shows.

    "ioshape bench storm" is another bench: many processes save together, and neighbours have to
    live with it; "ioshape bench storm --help" tells more. A directory called storm is ./storm.

    \b
    ioshape bench /scratch
    ioshape bench storm /scratch
    ioshape bench /scratch --size 8G --rounds 5 --json bench.json
    """
    parent = check_folder(path)
    if size < _LEAST_BYTES:
        raise click.BadParameter(f"at least {human_size(_LEAST_BYTES)}", param_hint="--size")
    check_file_to_write(json_path)
    check_space(parent, size)
    check_memory(size)
    contest = _measure(parent, size, rounds)
    found = _as_json(contest, parent, rounds)
    if json_path == "-":
        say_json(found)
        return
    _show(contest, parent, rounds)
    write_file(json_path, json.dumps(found, indent=2) + "\n")
