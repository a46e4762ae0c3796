# SPDX-License-Identifier: Apache-2.0
"""ioshape bench storm."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ioshape.cli._output import (
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
from ioshape.cli._scratch import (
    check_file_to_write,
    check_folder,
    check_memory,
    check_space,
    scratch,
    status,
)

if TYPE_CHECKING:
    from ioshape.cli._storm import Storm
    from ioshape.cli._storm_figures import Latency, Neighbours, Summary

_LEAST_BYTES = 64 << 10
#: what a process takes that has torch, and nothing to save
_RANK_BYTES = 32 << 20
_MOST_RANKS = 1024
_USUAL_RANKS = 16


def _measure(parent: Path, ways: str, **plan: Any) -> Storm:
    # Of the libraries that torch brings. Ranks share the cores.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        from ioshape.cli import _storm  # noqa: PLC0415 - imports torch
    except ImportError as error:
        raise SentenceError(f"the storm needs torch ({error}); pip install torch") from None
    from ioshape.cli._children import ChildError  # noqa: PLC0415

    wanted = _storm.Plan(ways=_ways(ways, _storm.WAYS, _storm.USUAL), **plan)
    total = wanted.ranks * wanted.n_bytes
    rounds = wanted.rounds + 1
    with scratch(parent) as folder:
        note(
            f"ioshape: {plural(wanted.ranks, 'rank')} save {human_size(wanted.n_bytes)} each to "
            f"{folder}, about {human_size(total * rounds * len(wanted.ways))} in all; the folder "
            "is removed at the end"
        )
        try:
            with _storm.Measurement(wanted, folder) as measurement, status() as tell:
                measurement.tell = tell
                measurement.all()
        except ChildError as error:
            raise SentenceError(f"the storm has failed: {error}") from None
    return measurement.storm


def _ways(text: str, known: dict[str, str], usual: tuple[str, ...]) -> tuple[str, ...]:
    if not text:
        return usual
    ways = tuple(text.split(","))
    for way in ways:
        if way not in known or ways.count(way) > 1:
            raise click.BadParameter(
                f"{way!r} is not one of {', '.join(known)}"
                if way not in known
                else f"{way} is named twice",
                param_hint="--ways",
            )
    return ways
