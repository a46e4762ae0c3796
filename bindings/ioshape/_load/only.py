# SPDX-License-Identifier: Apache-2.0
"""load(only=...): parts of an object.

torch.load creates the object without the bytes of large storages. Then the parts that are not
wanted are left out, and the bytes of the rest are read.
"""

from __future__ import annotations

import copy
import re
from typing import TYPE_CHECKING, Any, NamedTuple

from ioshape._load.into import join_names
from ioshape._load.placement import Placement
from ioshape._load.unread import UnreadFile, failures_of, tensors_in, unread_object
from ioshape._load.verified import Source

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ioshape._core.report import Progress
    from ioshape._load.reader import Reader


class Only(NamedTuple):
    """The arguments `only`, as a pattern, and `map_location` of load()."""

    wanted: re.Pattern[str]
    map_location: Any


# ---- Selection of the wanted parts --------------------------------------------------------------


def patterns_of(only: Iterable[str] | None) -> re.Pattern[str] | None:
    """Return one pattern for names in which * matches any text; None if `only` is None."""
    if only is None:
        return None
    if isinstance(only, str):
        raise TypeError("only takes a list of names, not one name")
    each = [".*".join(map(re.escape, name.split("*"))) for name in only]
    return re.compile("|".join(each) or "(?!)", re.DOTALL)


_NOTHING = object()


def _picked(value: Any, wanted: re.Pattern[str], name: str, inside: tuple[int, ...]) -> Any:
    if wanted.fullmatch(name):
        return value
    if id(value) in inside:
        return _NOTHING  # the container contains itself
    inside = (*inside, id(value))
    if isinstance(value, dict):
        items = ((k, _picked(v, wanted, join_names(name, k), inside)) for k, v in value.items())
        kept = {key: item for key, item in items if item is not _NOTHING}
        if not kept:
            return _NOTHING
        same = copy.copy(value)  # keeps attributes, such as _metadata of a state dict
        same.clear()
        same.update(kept)
        return same
    if type(value) in (list, tuple):
        parts = (_picked(v, wanted, f"{name}[{i}]", inside) for i, v in enumerate(value))
        found = [part for part in parts if part is not _NOTHING]
        return type(value)(found) if found else _NOTHING
    return _NOTHING


def pick(loaded: Any, path: str, wanted: re.Pattern[str] | None) -> Any:
    """Return the parts of an object that match, with the containers around them.

    Raises:
        ValueError: Nothing matches.
    """
    found = loaded if wanted is None else _picked(loaded, wanted, "", ())
    if found is _NOTHING:
        raise ValueError(
            f'cannot load a part of "{path}": nothing in it has a name that was given; '
            "ioshape.inspect() lists the names of its tensors"
        )
    return found


# ---- Reading the wanted parts -------------------------------------------------------------------


def load_only(
    reader: Reader,
    torch_load: Callable[[Any], Any],
    progress: Callable[[Progress], object] | None,
    part: tuple[int, int] | None,
    only: Only,
) -> Any:
    """Return the wanted parts of an open file, or of a shard.

    If they contain more than tensors, containers and plain values, torch_load loads the whole file.
    """
    file = UnreadFile(reader, progress, is_whole=False)
    placement = Placement(only.map_location, file)
    with failures_of(file, part):
        unread = unread_object(file, placement.defer)
        if unread is not None:
            found = pick(unread[0], reader.path, only.wanted)
            placement.bring(tensors_in(found))
            return found
    whole = Source(reader, progress)
    with failures_of(whole, part):
        loaded = torch_load(whole)
    return pick(loaded, reader.path, only.wanted)
