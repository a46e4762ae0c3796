# SPDX-License-Identifier: Apache-2.0
"""Suggestions for mistyped names of commands and pools."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from collections.abc import Iterable


#: likeness of two words, at most 1, from which one is taken for a mistyped form of the other
MISTYPED = 0.85


def did_you_mean(word: str, known: Iterable[str], likeness: float = 0.6) -> str:
    """Return the end of a sentence that suggests the nearest known word; "" if none is near."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=likeness)
    return f'; did you mean "{near[0]}"?' if near else ""


class Group(click.Group):
    """A click group that suggests the nearest command for an unknown one, as new clicks do."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if not name.startswith("-") and not ctx.resilient_parsing:
            known = self.list_commands(ctx)
            if name not in known:
                ctx.fail(f'there is no command "{name}"{did_you_mean(name, known)}')
        return super().resolve_command(ctx, args)
