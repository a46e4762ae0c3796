# SPDX-License-Identifier: Apache-2.0
"""Exceptions and warnings of ioshape, and their construction from errors of the library."""

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
    """Everything that is known about a failure. StorageError documents the fields."""

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
    """A save or a load that failed because of the file or the storage below it.

    It is an OSError with `errno`, `strerror` and `filename`. It is also an instance of Python's
    subclass for the errno, such as FileNotFoundError. It is a RuntimeError as well, because
    torch.save and torch.load raise that for many of these failures.

    str() gives one line for people: the sentence and the remedy. Programs should test the fields.
    """

    #: The library's code: a negative errno, or a code below -5000 of its own.
    code: int
    #: The operation that failed: "save", "load", "verify", ...
    operation: str
    #: The file or directory as the caller gave it; "" if the failure concerns none.
    path: str
    #: A sentence that says what failed, and why.
    sentence: str
    #: Advice on what to do; "" if no remedy is known.
    remedy: str
    #: The damaged record of the file, or the tensor that looks wrong (setting "examine"); or None.
    record: str | None
    #: The offset of the damage in the file in bytes, or None.
    offset: int | None
    #: The rank of the group on which the operation failed, or None.
    rank: int | None
    #: The bytes that the save needs, if free space is too small; None for other failures.
    needed_bytes: int | None
    #: The free bytes of the filesystem; None if unknown, or if the failure is not about space.
    free_bytes: int | None
    #: The report of the failed save, filled as far as the save came; None if there is none.
    report: Report | None

    def __init__(self, facts: Facts) -> None:
        # The texts may quote a file or a server. Such a quotation must neither send escape
        # sequences to a terminal nor show a secret.
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
        """Rebuild an exception from its pickle.

        Pickles refer to StorageError alone, because the subclasses that _class_for() makes cannot
        be imported.
        """
        return raised_for(Facts(**facts))


class DamagedError(StorageError):
    """A file with damage: a checksum or a cross-check failed, or the file is cut short.

    Its errno is EBADMSG.
    """

    #: After a failed load into existing tensors: names of the tensors whose content may have
    #: changed.
    changed: tuple[str, ...] = ()


class FormatError(StorageError):
    """A file that is not a torch zip, or that uses a feature ioshape does not read.

    Its errno is EINVAL.
    """


class NoUsableCheckpointError(StorageError):
    """A failed load where checkpoints exist but none is usable. Its errno is EBADMSG.

    The checkpoints are damaged, incomplete, or of a kind that the call does not load. This is not a
    FileNotFoundError, which means that there is no checkpoint at all, as at the first start of a
    job. If a job started over after this error, it would overwrite checkpoints that could be
    repaired.
    """

    #: The checkpoints that were tried, newest first, each with the reason why it cannot be used; ()
    #: if only the message says it.
    passed_over: tuple[PassedOver, ...] = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return StorageError._restored, (self.facts._asdict(),), {"passed_over": self.passed_over}


class CanceledError(StorageError):
    """A save that was canceled, or whose progress callback asked to stop.

    Its errno is ECANCELED.
    """


class CoordinatorError(StorageError, ConnectionError):
    """A coordinator of slots that is unreachable or refuses this client. Its errno is ENOTCONN.

    Saves raise it only if the setting "unreachable" is "fail".
    """


class Different(NamedTuple):
    """A tensor, or an object in the place of a tensor, that differs between program and file."""

    name: str
    #: Shape and dtype in the file, such as "(3, 4) float32".
    in_file: str
    #: Shape and dtype of the object that the load should fill.
    wanted: str


class MismatchError(ValueError):
    """A file whose content does not match the objects to load it into. Nothing was changed."""

    #: the most rows of each kind that a message shows
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
        #: names that only the program has
        self.missing = missing
        #: names that only the file has
        self.unexpected = unexpected
        self.different = different

    def __str__(self) -> str:
        rows = [(one.name, one.in_file, one.wanted) for one in self.different[: self._MOST_SHOWN]]
        rows += [(name, "missing", "there") for name in self.missing[: self._MOST_SHOWN]]
        rows += [(name, "there", "missing") for name in self.unexpected[: self._MOST_SHOWN]]
        count = len(self.different) + len(self.missing) + len(self.unexpected)
        titles = ("", "in the file", "wanted")
        lines = [[one_line(cell) for cell in line] for line in (titles, *rows)]
        widths = [max(len(line[column]) for line in lines) for column in range(3)]
        table = "\n".join("  " + "  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)
        more = f"\n  and {count - len(rows)} more" if count > len(rows) else ""
        remedy = "give objects that match the file"
        if not self.different:
            remedy += ", or strict=False to skip these"
        return (
            f'cannot load "{harmless(self.path)}" into the given objects; {remedy}\n{table}{more}'
        )


class SkippedWarning(RuntimeWarning):
    """A save that was skipped because it did not fit, as the setting "full" asks.

    The previous file stays, and the save's Report has `skipped` set. The warning points at the line
    that saved. After a background save it points at the line that asks for the outcome (wait(),
    result() or report), or else at the next save.
    """


@dataclass(frozen=True)
class PassedOver:
    """A checkpoint that is newer than the one that was loaded, but could not be used."""

    #: The path of the file, or of the directory of a group's checkpoint.
    path: str
    #: The reason: a DamagedError, a FileNotFoundError if the manifest is missing, ...
    error: StorageError


# With these errors this process is at fault, and the checkpoint may be intact. Loading an older
# checkpoint would hide that.
_OUR_FAULT = (errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EACCES, errno.EPERM)


def is_our_fault(error: StorageError) -> bool:
    """Return whether a load failed for a reason that leaves the checkpoint possibly intact."""
    return error.errno in _OUR_FAULT


class FallbackWarning(RuntimeWarning):
    """A load of an intact checkpoint that is not the newest: newer ones were unusable."""

    def __init__(self, path: str, passed_over: tuple[PassedOver, ...]) -> None:
        #: The path of the checkpoint that was loaded.
        self.path = path
        #: The newer checkpoints that could not be used, newest first.
        self.passed_over = passed_over
        reasons = "; ".join(str(one.error) for one in passed_over)
        super().__init__(f'loading "{path}" instead of newer checkpoints: {reasons}')


# The nearest errno for each code of the library that is not an errno itself.
_ERRNOS = {
    lib.IOSHAPE_E_FORMAT: errno.EINVAL,
    lib.IOSHAPE_E_DAMAGED: errno.EBADMSG,
    lib.IOSHAPE_E_LIMIT: errno.EFBIG,
    lib.IOSHAPE_E_NO_TABLE: errno.ENODATA,
    lib.IOSHAPE_E_COORDINATOR: errno.ENOTCONN,
    lib.IOSHAPE_E_SKIPPED: errno.ENOSPC,
    lib.IOSHAPE_E_ALARM: errno.EINVAL,
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
    """Return the exception class for a code of the library.

    It also derives from Python's class for the errno, such as FileNotFoundError or TimeoutError.
    """
    if code not in _CLASSES:
        builtin = type(OSError(_ERRNOS.get(code, -code), ""))
        # The class has the name of Python's own, so that tracebacks show the name that readers
        # expect.
        _CLASSES[code] = (
            type(builtin.__name__, (StorageError, builtin), {"__module__": "builtins"})
            if builtin is not OSError
            else StorageError
        )
    return _CLASSES[code]


# Tracebacks and pickles show the public name, such as ioshape.StorageError.
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
    """Return the exception for a failure, in the class that fits its code."""
    return _class_for(facts.code)(facts)


def failure(
    code: int,
    sentence: str,
    path: str,
    operation: str,
    *,
    remedy: str = "",
    record: str | None = None,
    offset: int | None = None,
    rank: int | None = None,
) -> StorageError:
    """Return the exception for a failure that Python code has detected."""
    return raised_for(Facts(code, sentence, path, operation, remedy, record, offset, rank))


def damaged(
    path: str,
    why: str,
    operation: str,
    *,
    remedy: str = "use another copy or an older checkpoint",
    record: str | None = None,
    offset: int | None = None,
) -> DamagedError:
    """Return the exception for a file that Python code has found to be damaged."""
    sentence = f'"{path}" is damaged: {why}'
    code = lib.IOSHAPE_E_DAMAGED
    return DamagedError(Facts(code, sentence, path, operation, remedy, record, offset))


def holding(error: DamagedError, what: str) -> DamagedError:
    """Return the error with what the damaged bytes hold, such as the name of a tensor."""
    return DamagedError(error.facts._replace(sentence=f"{error.sentence}, which holds {what}"))


# the most reasons that one message quotes
_MOST_REASONS = 5


def _reason(one: PassedOver) -> str:
    sentence = one.error.sentence
    return sentence if one.path in sentence else f'"{one.path}": {sentence}'


def no_usable(where: str, passed_over: Iterable[PassedOver]) -> NoUsableCheckpointError:
    """Return the exception for a load that could use none of the checkpoints of `where`."""
    passed_over = tuple(passed_over)
    count = len(passed_over)
    reasons = [_reason(one) for one in passed_over[:_MOST_REASONS]]
    if count > _MOST_REASONS:
        reasons.append(f"and {count - _MOST_REASONS} more")
    error = NoUsableCheckpointError(
        Facts(
            lib.IOSHAPE_E_UNUSABLE,
            f'cannot load "{where}": none of {count} checkpoint{"s" * (count > 1)} can be '
            "used: " + "; ".join(reasons),
            where,
            "load",
            "repair them or use a copy; to start from scratch, move them away",
        )
    )
    error.passed_over = passed_over
    error.__cause__ = passed_over[0].error
    return error


def last_facts(path: str, operation: str) -> Facts:
    """Return the details of the last library call of this thread that failed."""
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
    """Return the exception for the last library call of this thread that failed."""
    return raised_for(last_facts(path, operation))


#: UINT64_MAX, which the library gives for a number that it does not know
_UNTOLD = 2**64 - 1

_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep  # noqa: PTH120


def _warn(warning: Warning) -> None:
    """Issue a warning that points at the program's line that called ioshape, if there is one."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame, level = frame.f_back, level + 1
    warnings.warn(warning, stacklevel=level)


def warn_skipped(path: str, why: str) -> None:
    """Issue a SkippedWarning for a save."""
    _warn(SkippedWarning(f"the save to {path} was {why}"))


def warn_passed_over(path: str, passed_over: Iterable[PassedOver]) -> None:
    """Issue a FallbackWarning if newer checkpoints than the one at `path` were unusable."""
    passed_over = tuple(passed_over)
    if passed_over:
        _warn(FallbackWarning(path, passed_over))
