# SPDX-License-Identifier: Apache-2.0
"""The report of a save, and the progress of an operation."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ioshape._core.structs import enum_names, said, sized
from ioshape._native import ffi, lib

#: names of the downgrades of the library, as Downgrade.code has them
CODES = enum_names("IOSHAPE_DOWNGRADE_")

#: Names of the phases of a save or load, as progress callbacks get them.
PHASES = enum_names("IOSHAPE_PHASE_")

#: fields that are numbers in C and bool in Python
FLAGS = frozenset({"direct"})

#: rules that judge the content of a save, by the bits of enum ioshape_alarm
ALARMS = enum_names("IOSHAPE_ALARM_")

#: Attributes of earlier versions, and where to find their values now. A job must not end because
#: its log line uses one. So until version 0.3 they are empty and give a warning.
_REMOVED = {
    "memory_alignment": '"ioshape doctor PATH --json" reports it',
    "offset_alignment": '"ioshape doctor PATH --json" reports it',
    "request_s": "file_bytes and write_s give the throughput",
    "least_request_s": "file_bytes and write_s give the throughput",
    "short_results": "ioshape continues requests that the kernel cuts short",
    "queue_depth": "the log reports at level DEBUG how the file was written",
    "block_bytes": "the log reports at level DEBUG how the file was written",
    "choice": "the log reports at level DEBUG how the file was written",
    "stripe_bytes": "stripes has the whole layout",
    "stripe_count": "stripes has the whole layout",
    "stripes_asked": 'an entry of downgrades with the code "layout" reports a different layout',
    "record_bytes": "file_bytes has the size of the file",
    "pool": "ioshape.probe(path).pool has it",
    "position": "ahead names the request before it in the queue",
    "capacity": '"ioshape slots status" and the log at level DEBUG report it',
    "fence": "the log reports it at level DEBUG",
    "express": "the log reports it at level DEBUG",
    "slot_lost": 'an entry of downgrades with the code "slot" reports it',
    "ranks": "ioshape.job().world_size has it",
    "compared_bytes": 'alarms has "unchanged" if all large tensors are unchanged',
    "unchanged_bytes": 'alarms has "unchanged" if all large tensors are unchanged',
    "hashed_bytes": "the log reports it at level DEBUG",
}
_REMOVED_TEXTS = frozenset({"choice", "pool", "stripes_asked"})


#: Attributes that have other names since version 0.1. Version 0.3 removes these.
_RENAMED = {"fallbacks": "downgrades", "generation_bytes": "checkpoint_bytes"}


class Progress(NamedTuple):
    """The progress of a save or load, as callbacks get it."""

    #: The phase: "stage", "wait" (for a slot), "plan", "write", "sync", "commit", "read" or "done";
    #: "drain" while a save with durable="destination" is copied from its tier.
    phase: str
    #: Bytes that this phase has done so far.
    done_bytes: int
    #: Bytes of the whole phase; 0 if unknown.
    total_bytes: int
    #: While it waits: the number of requests ahead of it in the queue.
    position: int = 0
    #: A request before it, or the holder of a slot: "job 4711, rank 7 on n03"; "" if there is none.
    ahead: str = ""
    #: Seconds that it has waited for its slot so far; 0 if it does not wait.
    waited_s: float = 0.0


class Downgrade(str):
    """A downgrade: a sentence for people that says what was not as preferred, and why.

    It is a str with a code for programs.
    """

    #: "engine", "direct", "preallocate", "layout", "lock", "owner", "sync", "slot", "skipped",
    #: "overtaken" or "checksums"; "tier": the file was saved past the tier, or will not be drained
    #: from it; "parity": the nodes could not protect each other; "torch": torch wrote the file
    #: itself, or ioshape could not do all of its work; "safetensors": the original library saved,
    #: because the C library has no name for something.
    code: str

    def __new__(cls, sentence: str, code: str) -> Downgrade:
        downgrade = super().__new__(cls, sentence)
        downgrade.code = code
        return downgrade

    def __reduce__(self) -> tuple[type[Downgrade], tuple[str, str]]:
        return Downgrade, (str(self), self.code)


@dataclass(frozen=True)
class Report:
    """The result of a save: a timing breakdown and the downgrades. Times are wall-clock seconds."""

    #: The path as the caller gave it.
    path: str
    #: The writer: "ioshape"; "torch" if torch wrote the bytes itself; "caller" for open().
    written_by: str
    #: The size of the file in bytes.
    file_bytes: int = 0
    #: Seconds that torch took to pickle everything except the storages' bytes.
    pickle_s: float = 0.0
    #: Seconds of copying to staging memory, including the wait for free staging memory. Beside
    #: pickling, this is what a background save costs its caller.
    stage_s: float = 0.0
    #: With `optimizer` or `lazy`: seconds that steps waited for the rest of the copying.
    hook_s: float = 0.0
    #: Seconds of waiting for a slot.
    slot_s: float = 0.0
    #: Seconds of planning and of creating the file.
    plan_s: float = 0.0
    #: Seconds of writing, including the examining of tensors. Each piece of 128 KiB is examined and
    #: written in turn, so examining has no time of its own: that would take two looks at the clock
    #: for each piece.
    write_s: float = 0.0
    #: Seconds until all bytes were on stable storage.
    sync_s: float = 0.0
    #: Seconds of waiting for earlier saves to the same path and of renaming the file into place.
    commit_s: float = 0.0
    #: Seconds of waiting for bandwidth, if the operator or the setting "rate" limits it. Part of
    #: write_s.
    paced_s: float = 0.0
    #: For a group's save: seconds of waiting for other ranks.
    group_s: float = 0.0
    #: Seconds of the whole save.
    total_s: float = 0.0
    #: The I/O engine: "uring", "uring-async", "threads" or "buffered"; "" if none was started.
    engine: str = ""
    #: Which processes wrote: "single", or for a group's save "each", "node" or "rank0".
    mode: str = ""
    #: Whether blocks bypassed the page cache (O_DIRECT) up to the end of the file.
    direct: bool = False
    #: The type of the filesystem, such as "ext4" or "lustre".
    filesystem: str = ""
    #: The downgrades: sentences that say what was not as preferred, each with a `code`.
    downgrades: tuple[Downgrade, ...] = ()
    #: What ordered the writers: "redis", "local" or "open" (no order). Without a slot it is
    #: "stagger" (the coordinator was unreachable) or "deadline" (there was no more time to wait).
    #: "" if the save did not come so far.
    coordinator: str = ""
    #: The request that was ahead when the save began to wait, such as "job 4711, rank 7 on n03"; ""
    #: if there was none.
    ahead: str = ""
    #: For a group's save: bytes of all files of the checkpoint; 0 if it failed.
    checkpoint_bytes: int = 0
    #: For a group's save: bytes of all ranks' shards that were not written, because an equal shard
    #: of another rank is stored.
    repeated_bytes: int = 0
    #: For a group's save: why the mode was chosen.
    why: str = ""
    #: When the save began, in seconds since 1970.
    started_s: float = 0.0
    #: The file's layout on a striped filesystem, such as "8 x 1M, pool flash"; "" on others.
    stripes: str = ""
    #: Whether the save was skipped because it did not fit (setting "full"). Nothing was written.
    skipped: bool = False
    #: What looks wrong with the content, compared with the checkpoint before it: "nonfinite",
    #: "unchanged", "constant" and "jump" (setting "examine").
    alarms: tuple[str, ...] = ()
    #: The first alarm as a sentence; "" if there is none.
    alarm: str = ""
    #: Seconds between the end of the save and its deadline. Negative: it was late. 0: no deadline.
    deadline_left_s: float = 0.0
    #: The folder of the tier that holds the file; "" if it was saved directly.
    tier: str = ""
    #: With durable="destination": seconds of waiting until the file was drained.
    drain_s: float = 0.0

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> object:
            if name in _RENAMED:
                now = _RENAMED[name]
                sentence = f"Report.{name} is now Report.{now}; version 0.3 removes the old name"
                warnings.warn(sentence, FutureWarning, stacklevel=2)
                return getattr(self, now)
            if name not in _REMOVED:
                raise AttributeError(f"Report has no attribute {name!r}")
            empty: object = "" if name in _REMOVED_TEXTS else 0
            sentence = f"Report.{name} is {empty!r}, and version 0.3 removes it: {_REMOVED[name]}"
            warnings.warn(sentence, FutureWarning, stacklevel=2)
            return empty

    @property
    def deadline_met(self) -> bool | None:
        """True if the save met its deadline, False if it was late, None if it had no deadline."""
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
        parts = [f"{self.path}: {', '.join([self._in_words(), *own])}", *self.downgrades]
        return "; ".join(parts)

    def _in_words(self) -> str:
        """Return the text that the library makes of the report's fields."""
        struct = sized("ioshape_report")
        for name, member in ffi.typeof(struct).item.fields:
            value = getattr(self, name, None)
            if isinstance(value, str):
                value = value.encode(errors="replace")[: member.type.length - 1]
            if value is not None and name not in {"alarms", "downgrades"}:
                setattr(struct, name, value)
        text = ffi.new("char[]", 1 + lib.ioshape_report_text(struct, ffi.NULL, 0))
        lib.ioshape_report_text(struct, text, len(text))
        return said(text)
