# SPDX-License-Identifier: Apache-2.0
"""What goes wrong, as exceptions."""

from __future__ import annotations

import errno
import os
import sys
import warnings
from typing import TYPE_CHECKING, Any

from ioshape._native import ffi, lib

if TYPE_CHECKING:
    from ioshape._report import Report


class StorageError(OSError, RuntimeError):
    """A save or a load that failed because of the file or what it lies on.

    It is an OSError, with `errno`, `strerror` and `filename`; also the subclass that Python has for
    the errno, such as FileNotFoundError. It is a RuntimeError, too, because that is what torch.save
    and torch.load raise for much of this. str() is a sentence with the path, what was done, and
    what to do about it.
    """

    #: The library's own code: a negative errno, or one of its own.
    code: int
    #: What was being done: "save", "load", "verify", ...
    operation: str
    #: What to do about it; "" if nothing is known to help.
    remedy: str
    #: How far a failed save came; None if there is nothing to say.
    report: Report | None

    def __init__(self, code: int, sentence: str, path: str, operation: str) -> None:
        number = _ERRNOS.get(code, -code)
        super().__init__(number, os.strerror(number), path)
        self.code = code
        self._sentence = sentence
        self.operation = operation
        reason = ffi.string(lib.ioshape_strerror(code)).decode()
        # Behind the path, which may have anything in it.
        known = sentence.removesuffix(f": {reason}")
        end = ""
        if code == lib.IOSHAPE_E_SKIPPED:  # it is told in the words of what it was skipped for
            endings = (f": {os.strerror(one)}" for one in (errno.ENOSPC, errno.EDQUOT))
            end = next(filter(known.endswith, endings), "")
            known = known.removesuffix(end)
        rest = known.rpartition(path)[2] if path else known
        self.remedy = rest.partition("; ")[2]
        # The sentence without it: a "; " may also be one of the path.
        self._cause = (known.removesuffix(f"; {self.remedy}") if self.remedy else known) + end
        self.report = None

    def __str__(self) -> str:
        return self._sentence

    def __reduce__(self) -> tuple[Any, ...]:
        return failure, (self.code, self._sentence, self.filename, self.operation)


class DamagedError(StorageError):
    """A checksum or a cross-check in the file failed, or it is cut short. Its errno is EBADMSG."""


class FormatError(StorageError):
    """The file is not a torch zip, or one with a feature that is not read. Its errno is EINVAL."""


class CanceledError(StorageError):
    """The save was canceled, or its progress callback said stop. Its errno is ECANCELED."""


class CoordinatorError(StorageError, ConnectionError):
    """The coordinator of slots is out of reach, or refuses us. Its errno is ENOTCONN.

    Saves raise it only where the setting "away" is "fail".
    """


class SkippedWarning(RuntimeWarning):
    """A save did not fit and was skipped, as the setting "full" has it: the previous file stands.

    Its Report has `skipped` set. The warning is given in the line that saved; of a save in the
    background in the line that asks for it (wait(), result(), report), or else in the next save.
    """


# The codes of the library that are not errnos, as the nearest errno.
_ERRNOS = {
    lib.IOSHAPE_E_FORMAT: errno.EINVAL,
    lib.IOSHAPE_E_DAMAGED: errno.EBADMSG,
    lib.IOSHAPE_E_LIMIT: errno.EFBIG,
    lib.IOSHAPE_E_NO_TABLE: errno.ENODATA,
    lib.IOSHAPE_E_COORDINATOR: errno.ENOTCONN,
    lib.IOSHAPE_E_SKIPPED: errno.ENOSPC,
}

_CLASSES: dict[int, type[StorageError]] = {
    lib.IOSHAPE_E_FORMAT: FormatError,
    lib.IOSHAPE_E_DAMAGED: DamagedError,
    lib.IOSHAPE_E_COORDINATOR: CoordinatorError,
    -errno.ECANCELED: CanceledError,
}


def _class_for(code: int) -> type[StorageError]:
    """Ours, that is also what Python has for the errno: FileNotFoundError, TimeoutError, ..."""
    if code not in _CLASSES:
        builtin = type(OSError(_ERRNOS.get(code, -code), ""))
        # Named after Python's own, so that tracebacks read as everybody expects.
        _CLASSES[code] = (
            type(builtin.__name__, (StorageError, builtin), {"__module__": __name__})
            if builtin is not OSError
            else StorageError
        )
    return _CLASSES[code]


def failure(code: int, sentence: str, path: str, operation: str) -> StorageError:
    """The exception for a code of the library."""
    return _class_for(code)(code, sentence, path, operation)


_PACKAGE = os.path.dirname(__file__) + os.sep  # noqa: PTH120


def warn_skipped(path: str, why: str) -> None:
    """Says that a save was skipped, where the program called us, if it did."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame, level = frame.f_back, level + 1
    warnings.warn(f"the save to {path} was {why}", SkippedWarning, stacklevel=level)
