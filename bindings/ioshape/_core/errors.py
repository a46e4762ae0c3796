# SPDX-License-Identifier: Apache-2.0
"""What goes wrong, as exceptions."""

from __future__ import annotations

import errno
import os
import sys
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from ioshape._core.structs import said
from ioshape._core.text import harmless, one_line
from ioshape._native import lib

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ioshape._core.report import Report


class Facts(NamedTuple):
    """What is known about a failure."""

    code: int
    sentence: str
    path: str
    operation: str
    remedy: str = ""
    record: str | None = None
    offset: int | None = None
    rank: int | None = None
    needed_bytes: int | None = None
    free_bytes: int | None = None


class StorageError(OSError, RuntimeError):
    """A save or a load that failed because of the file or what it lies on.

    It is an OSError, with `errno`, `strerror` and `filename`; also the subclass that Python has for
    the errno, such as FileNotFoundError. It is a RuntimeError, too, because that is what torch.save
    and torch.load raise for much of this. str() is one line for people: sentence and remedy.
    Programs look at the fields.
    """

    #: The library's own code: a negative errno, or one of its own.
    code: int
    #: What was being done: "save", "load", "verify", ...
    operation: str
    #: The file or directory, as it was given; "" if it is about none.
    path: str
    #: What failed, and why.
    sentence: str
    #: What to do about it; "" if nothing is known to help.
    remedy: str
    #: The record of the file that is damaged, or None.
    record: str | None
    #: Where in the file, or None.
    offset: int | None
    #: The rank of the group that failed, or None.
    rank: int | None
    #: What a save takes for which there is not enough free space; None for other failures.
    needed_bytes: int | None
    #: What is free; None if it is not known.
    free_bytes: int | None
    #: How far a failed save came; None if there is nothing to say.
    report: Report | None

    def __init__(self, facts: Facts) -> None:
        # A quotation from a file or a server must neither drive a terminal nor show a secret.
        facts = facts._replace(sentence=harmless(facts.sentence), remedy=harmless(facts.remedy))
        number = _ERRNOS.get(facts.code, -facts.code)
        super().__init__(number, os.strerror(number), facts.path)
        self.facts = facts
        for name, value in facts._asdict().items():
            setattr(self, name, value)
        self.report = None

    def __str__(self) -> str:
        return f"{self.sentence}; {self.remedy}" if self.remedy else self.sentence

    def __reduce__(self) -> tuple[Any, ...]:
        return StorageError._restored, (self.facts._asdict(),)

    @classmethod
    def _restored(cls, facts: dict[str, Any]) -> StorageError:
        """Return the exception that was pickled. Pickles name public classes alone."""
        return raised_for(Facts(**facts))


class DamagedError(StorageError):
    """A checksum or a cross-check in the file failed, or it is cut short. Its errno is EBADMSG."""

    #: Of a load into what is there: the tensors that may not be what they were.
    changed: tuple[str, ...] = ()


class FormatError(StorageError):
    """The file is not a torch zip, or one with a feature that is not read. Its errno is EINVAL."""


class NoUsableCheckpointError(StorageError):
    """There are checkpoints, and none of them can be used. Its errno is EBADMSG.

    They are damaged, incomplete, or of a kind that the call does not load. It is no
    FileNotFoundError: that says that there is no checkpoint at all, as at the first start of a job.
    A job that begins anew after this error would write over what may be repaired.
    """

    #: each checkpoint that was tried, the newest first, and why it cannot be used; () if the
    #: message alone says it
    passed_over: tuple[PassedOver, ...] = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return StorageError._restored, (self.facts._asdict(),), {"passed_over": self.passed_over}


class CanceledError(StorageError):
    """The save was canceled, or its progress callback said stop. Its errno is ECANCELED."""


class CoordinatorError(StorageError, ConnectionError):
    """The coordinator of slots is out of reach, or refuses us. Its errno is ENOTCONN.

    Saves raise it only where the setting "unreachable" is "fail".
    """


class Different(NamedTuple):
    """A tensor, or what should be one, that is another one in the file."""

    name: str
    #: what the file has: "(3, 4) float32"
    in_file: str
    #: what it was to be read into
    wanted: str


class MismatchError(ValueError):
    """A file does not have what it was to be loaded into. Nothing has been changed."""

    #: how many of each kind a message names
    _MOST_SHOWN = 10

    def __init__(
        self,
        path: str,
        missing: tuple[str, ...],
        unexpected: tuple[str, ...],
        different: tuple[Different, ...],
    ) -> None:
        super().__init__(path, missing, unexpected, different)
        self.path = path
        #: names of what only the program has
        self.missing = missing
        #: names of what only the file has
        self.unexpected = unexpected
        self.different = different

    def __str__(self) -> str:
        rows = [(one.name, one.in_file, one.wanted) for one in self.different[: self._MOST_SHOWN]]
        rows += [(name, "missing", "there") for name in self.missing[: self._MOST_SHOWN]]
        rows += [(name, "there", "missing") for name in self.unexpected[: self._MOST_SHOWN]]
        count = len(self.different) + len(self.missing) + len(self.unexpected)
        titles = ("", "in the file", "to be filled")
        lines = [[one_line(cell) for cell in line] for line in (titles, *rows)]
        widths = [max(len(line[column]) for line in lines) for column in range(3)]
        table = "\n".join("  " + "  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)
        more = f"\n  and {count - len(rows)} more" if count > len(rows) else ""
        remedy = "give what fits it"
        if not self.different:
            remedy += ", or strict=False to leave these out"
        return f'cannot load "{harmless(self.path)}" into what was given; {remedy}\n{table}{more}'


class SkippedWarning(RuntimeWarning):
    """A save did not fit and was skipped, as the setting "full" has it: the previous file stands.

    Its Report has `skipped` set. The warning is given in the line that saved; of a save in the
    background in the line that asks for it (wait(), result(), report), or else in the next save.
    """


@dataclass(frozen=True)
class PassedOver:
    """A checkpoint that was not loaded, though it is newer than what was."""

    #: of the file, or of the generation's directory
    path: str
    #: why: a DamagedError, a FileNotFoundError where the manifest is missing, ...
    error: StorageError


# Then it was this process that could not, and an older checkpoint would hide that.
_OUR_FAULT = (errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EACCES, errno.EPERM)


def is_our_fault(error: StorageError) -> bool:
    """Whether a checkpoint that could not be loaded may be intact."""
    return error.errno in _OUR_FAULT


class FallbackWarning(RuntimeWarning):
    """What was loaded is intact, but not the newest: newer checkpoints were passed over."""

    def __init__(self, path: str, passed_over: tuple[PassedOver, ...]) -> None:
        #: of what was loaded
        self.path = path
        #: the newest first
        self.passed_over = passed_over
        reasons = "; ".join(str(one.error) for one in passed_over)
        super().__init__(f'loads "{path}" instead of what is newer: {reasons}')


# The codes of the library that are not errnos, as the nearest errno.
_ERRNOS = {
    lib.IOSHAPE_E_FORMAT: errno.EINVAL,
    lib.IOSHAPE_E_DAMAGED: errno.EBADMSG,
    lib.IOSHAPE_E_LIMIT: errno.EFBIG,
    lib.IOSHAPE_E_NO_TABLE: errno.ENODATA,
    lib.IOSHAPE_E_COORDINATOR: errno.ENOTCONN,
    lib.IOSHAPE_E_SKIPPED: errno.ENOSPC,
    lib.IOSHAPE_E_UNCHANGED: errno.EINVAL,
    lib.IOSHAPE_E_CHANGED: errno.EBUSY,
    lib.IOSHAPE_E_UNUSABLE: errno.EBADMSG,
}

_CLASSES: dict[int, type[StorageError]] = {
    lib.IOSHAPE_E_FORMAT: FormatError,
    lib.IOSHAPE_E_DAMAGED: DamagedError,
    lib.IOSHAPE_E_UNUSABLE: NoUsableCheckpointError,
    lib.IOSHAPE_E_COORDINATOR: CoordinatorError,
    -errno.ECANCELED: CanceledError,
}


def _class_for(code: int) -> type[StorageError]:
    """Ours, that is also what Python has for the errno: FileNotFoundError, TimeoutError, ..."""
    if code not in _CLASSES:
        builtin = type(OSError(_ERRNOS.get(code, -code), ""))
        # Named after Python's own, so that tracebacks read as everybody expects.
        _CLASSES[code] = (
            type(builtin.__name__, (StorageError, builtin), {"__module__": "builtins"})
            if builtin is not OSError
            else StorageError
        )
    return _CLASSES[code]


# Tracebacks name them as programs do: ioshape.StorageError.
for _public in (
    StorageError,
    DamagedError,
    FormatError,
    NoUsableCheckpointError,
    CanceledError,
    CoordinatorError,
    MismatchError,
    SkippedWarning,
    FallbackWarning,
):
    _public.__module__ = "ioshape"


def raised_for(facts: Facts) -> StorageError:
    """The exception for a failure."""
    return _class_for(facts.code)(facts)


def failure(
    code: int,
    sentence: str,
    path: str,
    operation: str,
    *,
    remedy: str = "",
    rank: int | None = None,
) -> StorageError:
    """The exception for a failure that is found here."""
    return raised_for(Facts(code, sentence, path, operation, remedy, rank=rank))


# A sentence names so many.
_MOST_REASONS = 5


def _reason(one: PassedOver) -> str:
    sentence = one.error.sentence
    return sentence if one.path in sentence else f'"{one.path}": {sentence}'


def no_usable(where: str, passed_over: Iterable[PassedOver]) -> NoUsableCheckpointError:
    """Return the exception for a load that has tried all checkpoints of `where`."""
    passed_over = tuple(passed_over)
    count = len(passed_over)
    reasons = [_reason(one) for one in passed_over[:_MOST_REASONS]]
    if count > _MOST_REASONS:
        reasons.append(f"and {count - _MOST_REASONS} more")
    error = NoUsableCheckpointError(
        Facts(
            lib.IOSHAPE_E_UNUSABLE,
            f'cannot load "{where}": none of {count} checkpoint{"s" * (count > 1)} can be used: '
            + "; ".join(reasons),
            where,
            "load",
            "repair them or use a copy; to start anew, move them away",
        )
    )
    error.passed_over = passed_over
    error.__cause__ = passed_over[0].error
    return error


def last_facts(path: str, operation: str) -> Facts:
    """About the last call of the library that failed in this thread."""
    last = lib.ioshape_last_error()

    def told(number: int) -> int | None:
        return None if number in (-1, _UNTOLD) else int(number)

    return Facts(
        last.code,
        said(last.sentence),
        path,
        operation,
        said(last.remedy),
        said(last.record) or None,
        told(last.offset),
        told(last.rank),
        told(last.needed_bytes),
        told(last.free_bytes),
    )


def last_failure(path: str, operation: str) -> StorageError:
    """The exception for it."""
    return raised_for(last_facts(path, operation))


#: A number that the library does not know.
_UNTOLD = 2**64 - 1

_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep  # noqa: PTH120


def _warn(warning: Warning) -> None:
    """Where the program called us, if it did."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame, level = frame.f_back, level + 1
    warnings.warn(warning, stacklevel=level)


def warn_skipped(path: str, why: str) -> None:
    """Says that a save was skipped."""
    _warn(SkippedWarning(f"the save to {path} was {why}"))


def warn_passed_over(path: str, passed_over: Iterable[PassedOver]) -> None:
    """Says what newer checkpoints were passed over, if any were, in favour of that of this path."""
    passed_over = tuple(passed_over)
    if passed_over:
        _warn(FallbackWarning(path, passed_over))
