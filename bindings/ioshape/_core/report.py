# SPDX-License-Identifier: Apache-2.0
"""What a save did, and how far it is."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from ioshape._core.structs import said, shared_fields, sized
from ioshape._native import ffi, lib

_CODES = {
    lib.IOSHAPE_STEP_ENGINE: "engine",
    lib.IOSHAPE_STEP_DIRECT: "direct",
    lib.IOSHAPE_STEP_PREALLOCATE: "preallocate",
    lib.IOSHAPE_STEP_LAYOUT: "layout",
    lib.IOSHAPE_STEP_LOCK: "lock",
    lib.IOSHAPE_STEP_OWNER: "owner",
    lib.IOSHAPE_STEP_SYNC: "sync",
    lib.IOSHAPE_STEP_SLOT: "slot",
    lib.IOSHAPE_STEP_SKIPPED: "skipped",
    lib.IOSHAPE_STEP_OVERTAKEN: "overtaken",
    lib.IOSHAPE_STEP_CHECKSUMS: "checksums",
    lib.IOSHAPE_STEP_TIER: "tier",
    lib.IOSHAPE_STEP_PARITY: "parity",
}

#: The phases of a save or load, as progress callbacks get them.
PHASES = {
    lib.IOSHAPE_PHASE_STAGE: "stage",
    lib.IOSHAPE_PHASE_WAIT: "wait",
    lib.IOSHAPE_PHASE_PLAN: "plan",
    lib.IOSHAPE_PHASE_WRITE: "write",
    lib.IOSHAPE_PHASE_SYNC: "sync",
    lib.IOSHAPE_PHASE_COMMIT: "commit",
    lib.IOSHAPE_PHASE_READ: "read",
    lib.IOSHAPE_PHASE_DONE: "done",
}

#: Numbers of the struct that are yes or no.
_FLAGS = frozenset({"direct", "unchanged"})

#: Attributes of earlier versions, and where their values are now. A job must not end because its
#: own log line names one: until version 0.3 they are empty, with a warning.
_REMOVED = {
    "memory_alignment": '"ioshape doctor PATH --json" has it',
    "offset_alignment": '"ioshape doctor PATH --json" has it',
    "request_s": "file_bytes and write_s give the throughput",
    "least_request_s": "file_bytes and write_s give the throughput",
    "short_results": "requests that the kernel cuts short are continued",
    "queue_depth": "the log tells how the file was written, at level DEBUG",
    "block_bytes": "the log tells how the file was written, at level DEBUG",
    "choice": "the log tells how the file was written, at level DEBUG",
    "stripe_bytes": "stripes has the whole layout",
    "stripe_count": "stripes has the whole layout",
    "stripes_asked": 'a fallback with the code "layout" tells if the file has another layout',
    "record_bytes": "file_bytes has the size of the file",
    "pool": "ioshape.probe(path).pool has it",
    "position": "ahead tells who was before it in the queue",
    "capacity": '"ioshape slots status" has it, and so has the log at level DEBUG',
    "fence": "the log has it at level DEBUG",
    "express": "the log has it at level DEBUG",
    "slot_lost": 'a fallback with the code "slot" tells it',
    "ranks": "ioshape.job().world_size has it",
    "compared_bytes": "unchanged tells whether all of it is as before",
    "unchanged_bytes": "unchanged tells whether all of it is as before",
    "hashed_bytes": "the log has it at level DEBUG",
}
_REMOVED_TEXTS = frozenset({"choice", "pool", "stripes_asked"})


class Progress(NamedTuple):
    """How far a save is."""

    #: "stage", "wait" (for its turn), "plan", "write", "sync", "commit" or "done"; "drain" from a
    #: tier, with durable="destination"
    phase: str
    done_bytes: int
    total_bytes: int
    #: while it waits: requests that are ahead of it in the queue
    position: int = 0
    #: who goes before it, or holds a slot, such as "job 4711, rank 7 on n03"; "" if nobody
    ahead: str = ""
    #: for its turn, so far; 0 if it does not wait
    waited_s: float = 0.0


class Step(str):
    """What was not as preferred, and why: a sentence for people, with a code for programs."""

    #: "engine", "direct", "preallocate", "layout", "lock", "owner", "sync", "slot",
    #: "skipped", "overtaken", "checksums"; "tier": it was not saved there, or will not be
    #: drained; "parity": nodes could not protect each other; "torch": torch itself wrote the file,
    #: or this package could not do all; "safetensors": the original did, for what C has no name for
    code: str

    def __new__(cls, sentence: str, code: str) -> Step:
        step = super().__new__(cls, sentence)
        step.code = code
        return step

    def __reduce__(self) -> tuple[type[Step], tuple[str, str]]:
        return Step, (str(self), self.code)


@dataclass(frozen=True)
class Report:
    """What a save did. Times are in seconds on the clock on the wall."""

    path: str
    #: "ioshape"; "torch" where the call was handed to torch's own writer; "caller" of open()
    written_by: str
    file_bytes: int = 0
    #: torch's pickling of everything but the storages' bytes
    pickle_s: float = 0.0
    #: copying to staging memory, waiting for room in it included: what a background save costs its
    #: caller beside pickling
    stage_s: float = 0.0
    #: of a save with `optimizer` or `lazy`: waiting before a step for what was left to copy
    hook_s: float = 0.0
    #: the same: how long steps took while it was under way, to those without a save; medians. None
    #: if there were too few
    step_slowdown: float | None = None
    #: waiting for its turn to write
    slot_s: float = 0.0
    plan_s: float = 0.0
    write_s: float = 0.0
    sync_s: float = 0.0
    #: waiting for earlier saves to the same path, and putting the file in place
    commit_s: float = 0.0
    #: waiting for bandwidth, where the operator or the setting "rate" limits it; part of write_s
    paced_s: float = 0.0
    #: of a group's save: waiting for other ranks
    group_s: float = 0.0
    total_s: float = 0.0
    #: "uring", "uring-async", "threads", "buffered"; "" if none was reached
    engine: str = ""
    #: who wrote: "single", or of a group's save "each", "node" or "rank0"
    mode: str = ""
    #: whether blocks went past the page cache, up to the last one
    direct: bool = False
    filesystem: str = ""
    #: what was not as preferred, and why: each a sentence with a `code`
    fallbacks: tuple[Step, ...] = ()
    #: who kept the order of writers: "redis", "local", "open" (nobody), or without a slot
    #: "stagger": the coordinator was out of reach, or "deadline": it had no more time; "" if the
    #: save did not come so far
    coordinator: str = ""
    #: who was ahead of it when it began to wait, such as "job 4711, rank 7 on n03"; "" if nobody
    ahead: str = ""
    #: of a group's save: the bytes of all files of the generation; 0 if it failed
    generation_bytes: int = 0
    #: of a group's save: bytes of parts, of all ranks, that were not written, because another
    #: rank's part is equal and is stored
    repeated_bytes: int = 0
    #: of a group's save: why the mode is what it is
    why: str = ""
    #: when it began, in seconds since 1970
    started_s: float = 0.0
    #: the file's layout on a striped filesystem, such as "8 x 1M, pool flash"; "" elsewhere
    stripes: str = ""
    #: whether it did not fit and was given up, as the setting "full" has it: nothing was written
    skipped: bool = False
    #: whether all large storages are as in the save before: stale bytes, or nothing was trained
    unchanged: bool = False
    #: how long before its deadline the save ended; below 0: it was too late; 0: it had none
    deadline_left_s: float = 0.0
    #: the folder of the tier that it was saved on; "" if directly
    tier: str = ""
    #: with durable="destination": waiting until it was drained
    drain_s: float = 0.0

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> object:
            if name not in _REMOVED:
                raise AttributeError(f"Report has no attribute {name!r}")
            empty: object = "" if name in _REMOVED_TEXTS else 0
            sentence = f"Report.{name} is {empty!r}, and goes with version 0.3: {_REMOVED[name]}"
            warnings.warn(sentence, FutureWarning, stacklevel=2)
            return empty

    @property
    def deadline_met(self) -> bool | None:
        """Whether the save was in time. None if it had no deadline."""
        return self.deadline_left_s > 0 if self.deadline_left_s else None

    def __str__(self) -> str:
        own = [
            f"{name} {seconds:.3f}"
            for name, seconds in (
                ("pickle", self.pickle_s),
                ("hook", self.hook_s),
                ("drain", self.drain_s),
            )
            if seconds
        ]
        if self.tier:
            own.append(f"on the tier {self.tier}")
        if self.written_by != "ioshape":
            own.append(f"written by {self.written_by}")
        parts = [f"{self.path}: {', '.join([self._in_words(), *own])}", *self.fallbacks]
        return "; ".join(parts)

    def _in_words(self) -> str:
        """What the library says of its fields."""
        struct = sized("ioshape_report")
        for name, member in ffi.typeof(struct).item.fields:
            value = getattr(self, name, None)
            if isinstance(value, str):
                value = value.encode(errors="replace")[: member.type.length - 1]
            if value is not None and name != "fallbacks":
                setattr(struct, name, value)
        text = ffi.new("char[]", 1 + lib.ioshape_report_text(struct, ffi.NULL, 0))
        lib.ioshape_report_text(struct, text, len(text))
        return said(text)


def from_struct(
    path: str,
    struct: Any,
    *,
    written_by: str = "ioshape",
    pickle_s: float = 0.0,
    hook_s: float = 0.0,
    step_slowdown: float | None = None,
    fallbacks: tuple[Step, ...] = (),
    skipped: bool = False,
) -> Report:
    """What the library filled in, and what only this package knows."""
    told = struct.steps[0 : min(struct.fallbacks, len(struct.steps))]
    values = shared_fields(Report, struct, flags=_FLAGS)
    del values["fallbacks"]  # in C it is how many there are
    values["total_s"] += pickle_s
    values["started_s"] = max(0.0, values["started_s"] - pickle_s)
    return Report(
        path=path,
        written_by=written_by,
        pickle_s=pickle_s,
        hook_s=hook_s,
        step_slowdown=step_slowdown,
        fallbacks=(*fallbacks, *(Step(said(one.sentence), _CODES[one.code]) for one in told)),
        skipped=skipped,
        **values,
    )
