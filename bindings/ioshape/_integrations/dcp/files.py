# SPDX-License-Identifier: Apache-2.0
"""The files of a directory that appears as a whole, as DCP's code and ours write them."""

from __future__ import annotations

import contextlib
import errno
import io
import os
from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint import filesystem

from ioshape._core.errors import failure
from ioshape._save.atomic import AtomicFile
from ioshape._save.request import SaveRequest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ioshape._core.report import Report
    from ioshape._save.atomic import Part


class Files(filesystem.FileSystem):
    """Where DCP's own code gets the files that it writes."""

    def __init__(self, *, durable: bool) -> None:
        super().__init__()
        self.durable = durable
        self.folder = ""  # of the attempt under way
        self.expected_bytes = 0  # of the next file; 0 if that is not known
        self.reports: list[Report] = []
        self.failure: BaseException | None = None

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        """A file that is there when it is complete."""
        if mode != "wb":
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        with self.create(path) as file:
            yield file

    @contextlib.contextmanager
    def create(
        self, path: str | os.PathLike[str], part: Part | None = None
    ) -> Iterator[AtomicFile]:
        """The same; or this rank's part of one."""
        target = os.path.join(self.folder, os.path.basename(path))  # noqa: PTH118, PTH119
        try:
            with AtomicFile(
                target,
                SaveRequest(self.durable),
                expected_bytes=self.expected_bytes,
                known_as=os.fspath(path),
                part=part,
            ) as file:
                yield file
            if file.report is not None:
                self._keep(file.report)
        except BaseException as error:
            self.failure = error  # DCP's threads lose theirs
            raise

    def _keep(self, report: Report) -> None:
        self.reports.append(report)
        if report.skipped:
            # One file of many: the checkpoint cannot be without it.
            raise failure(
                -errno.ENOSPC,
                f'cannot save "{report.path}": {report.fallbacks[-1]}',
                report.path,
                "save",
            )

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        """Nothing: a directory is there when what is in it is complete."""


class FilesAlone(filesystem.FileSystem):
    """The same for writers whose directory fills file by file."""

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        """A file that is there when it is complete."""
        if mode not in ("w", "wb"):
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        with AtomicFile(os.fspath(path), SaveRequest.of()) as file:
            if mode == "wb":
                yield file
                return
            text = io.StringIO()
            yield text
            file.write(text.getvalue().encode())
