# SPDX-License-Identifier: Apache-2.0
"""What "ioshape ls" says of a tier."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from ioshape._cli.output import Table, columns, human_size, plural, say, say_json
from ioshape._core.context import Context
from ioshape._tier.tier import Tier, is_draining

if TYPE_CHECKING:
    from ioshape._tier.tier import Copy


def show(folder: str, as_json: bool) -> int:
    """What waits there to be drained, and what has been."""
    with contextlib.closing(Tier(Context(), folder)) as tier:
        copies = tier.copies()
        states = _states(copies, is_draining(folder))
    listed = list(zip(copies, states, strict=True))
    if as_json:
        say_json({"tier": folder, "copies": [_as_json(copy, state) for copy, state in listed]})
        return 0
    if not copies:
        say(f"There is no checkpoint on {folder}.")
        return 0
    table = Table(*columns("<path", "<saved", "<kind", ">size", "<state"))
    for copy, state in listed:
        saved = f"{copy.saved.astimezone():%Y-%m-%d %H:%M:%S}"
        table.add(copy.path, saved, _kind(copy), human_size(copy.n_bytes), state)
    table.show()
    waiting = [copy for copy in copies if copy.is_waiting]
    say()
    say(
        f"{plural(len(copies), 'checkpoint')}, {human_size(sum(one.n_bytes for one in copies))}; "
        f"{human_size(sum(one.n_bytes for one in waiting))} of it waits to be drained"
    )
    return 0


def _states(copies: list[Copy], drains: bool) -> list[str]:
    """The oldest of those that wait is the one that a drain is at."""
    states = ["waits" if one.is_waiting else "drained" for one in copies]
    if drains and states[:1] == ["waits"]:
        states[0] = "is drained now"
    return states


def _kind(copy: Copy) -> str:
    return "directory" if copy.is_directory else "file"


def _as_json(copy: Copy, state: str) -> dict[str, Any]:
    return {
        "path": copy.path,
        "place": copy.place,
        "kind": _kind(copy),
        "saved": copy.saved.isoformat(),
        "bytes": copy.n_bytes,
        "state": state,
    }
