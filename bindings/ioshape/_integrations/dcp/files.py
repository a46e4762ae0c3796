# SPDX-License-Identifier: Apache-2.0
"""Write the files of a DCP checkpoint so that each appears when it is complete."""

from __future__ import annotations

import contextlib
import errno
import functools
import io
import os
from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint import filesystem

from ioshape._core.errors import failure
from ioshape._integrations.tested import is_tested
from ioshape._save.atomic import AtomicFile
from ioshape._save.request import SaveRequest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager
    from types import ModuleType

    from ioshape._core.report import Report
    from ioshape._save.atomic import Part
    from ioshape._save.items import Items


class FilesAlone(filesystem.FileSystem):
    """A filesystem for writers whose directories fill file by file, each of them atomic."""

    def create(self, path: str | os.PathLike[str]) -> AbstractContextManager[AtomicFile]:
        """Open a file for writing."""
        return AtomicFile(SaveRequest.of(os.fspath(path)))

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        """Open a file, which appears when it is complete."""
        if mode not in ("w", "wb"):
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        with self.create(path) as file:
            if mode == "wb":
                yield file
                return
            text = io.StringIO()
            yield text
            file.write(text.getvalue().encode())


class Files(FilesAlone):
    """The filesystem that DCP's code writes to, whose files are AtomicFiles in a hidden folder."""

    def __init__(self, *, durable: bool) -> None:
        super().__init__()
        self.durable = durable
        self.folder = ""  # hidden folder of the save in progress
        self.items: Items | None = None  # collects the tensors of all files; None: not examined
        self.expected_bytes = 0  # expected size of the next file in bytes; 0 if it is not known
        self.reports: list[Report] = []
        self.failure: BaseException | None = None

    @contextlib.contextmanager
    def create(
        self, path: str | os.PathLike[str], part: Part | None = None
    ) -> Iterator[AtomicFile]:
        """Open a file for writing, or this rank's part of a file that several ranks write."""
        target = os.path.join(self.folder, os.path.basename(path))  # noqa: PTH118, PTH119
        try:
            with AtomicFile(
                SaveRequest.of(target, self.durable),
                expected_bytes=self.expected_bytes,
                known_as=os.fspath(path),
                part=part,
                items=self.items,
            ) as file:
                yield file
            if file.report is not None:
                self._keep(file.report)
        except BaseException as error:
            self.failure = error  # DCP's threads lose their exceptions
            raise

    def _keep(self, report: Report) -> None:
        self.reports.append(report)
        if report.skipped:
            # The checkpoint cannot do without one of its files, so a skipped file is a failure.
            raise failure(
                -errno.ENOSPC,
                f'cannot save "{report.path}": {report.downgrades[-1]}',
                report.path,
                "save",
            )

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        """Do nothing: the hidden directory exists already."""


# ---- HuggingFaceStorageWriter --------------------------------------------------------------------
#
# Make DCP's HuggingFaceStorageWriter write its safetensors files through ioshape.


def follow(hf_storage: ModuleType, *, load: bool) -> None:  # noqa: ARG001 - it reads as before
    """Patch the writer. "ioshape run" calls this when its module has been imported."""
    if not is_tested("torch"):
        return
    writer = hf_storage.HuggingFaceStorageWriter
    by_torch = writer.__init__

    @functools.wraps(by_torch)
    def begin(self: Any, *arguments: Any, **named: Any) -> None:
        by_torch(self, *arguments, **named)
        if type(self.fs) is filesystem.FileSystem:  # not the filesystem of a URL
            self.fs = FilesAlone()
            # With sync_files DCP would sync the whole machine, because these files have no
            # descriptor.
            self.sync_files = False

    writer.__init__ = begin
