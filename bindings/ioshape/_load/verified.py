# SPDX-License-Identifier: Apache-2.0
"""A file that is read: what has checksums is verified before it is handed out."""

from __future__ import annotations

import io
import os
from typing import TYPE_CHECKING, Any

from ioshape._core.report import Progress
from ioshape._core.text import one_line
from ioshape._load.reader import Reader

if TYPE_CHECKING:
    from collections.abc import Callable

    from ioshape._load.stored import StoredTensor

# torch reads what stands at a file's end in pieces of at most 4 KiB.
_RECORD_BYTES = (4 << 10) + 1
# What is read in small pieces comes in pieces of so much.
_AHEAD_BYTES = 64 << 10


class Source(io.RawIOBase):
    """Bytes of a Reader. Who jumps about reads what it asks for, who reads onward is read ahead of.

    torch.load reads from this: the small parts at the file's end, then one record after the other,
    each with one call, into the memory where it is to stay.
    """

    def __init__(
        self, reader: Reader, progress: Callable[[Progress], object] | None = None
    ) -> None:
        self.name = reader.path
        self.mode = "rb"
        self._reader = reader
        self._progress = progress
        self.n_bytes = reader.file_bytes
        self.has_checksums = reader.has_checksums
        self._position = 0
        self._told = 0
        #: what a read failed with: torch may wrap it, or lose it and read again
        self.failure: BaseException | None = None

    def readable(self) -> bool:
        """As for any file."""
        return True

    def seekable(self) -> bool:
        """As for any file."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        """As for any file."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self.n_bytes}[whence]
        if base + offset < 0:
            raise ValueError(f"negative position {base + offset}")
        self._position = base + offset
        return self._position

    def tell(self) -> int:
        """As for any file."""
        return self._position

    def readinto(self, buffer: Any) -> int:
        """Fills the buffer, but for the end of the file."""
        view = memoryview(buffer).cast("B")
        count = max(0, min(view.nbytes, self.n_bytes - self._position))
        try:
            if count:
                self._reader.read_file(self._position, view[:count])
            self._position += count
            if count:
                # What was handed out, once: torch looks at the file's end first, and at headers.
                self.tell_progress(self._position if count >= _RECORD_BYTES else 0)
        except BaseException as error:
            self.failure = error
            raise
        return count

    def tell_progress(self, done_bytes: int) -> None:
        """So much of the file has come."""
        self._told = max(self._told, done_bytes)
        if self._progress is not None:
            self._progress(Progress("read", self._told, self.n_bytes))

    def read(self, n_bytes: int = -1, /) -> bytes:
        """As for any file. No more memory is asked for than there are bytes left."""
        left = max(0, self.n_bytes - self._position)
        data = bytearray(left if n_bytes < 0 else min(n_bytes, left))
        self.readinto(data)
        return bytes(data)

    def readall(self) -> bytes:
        """As for any file."""
        return self.read()

    def close(self) -> None:
        """As for any file."""
        if not self.closed:
            self._reader.close()
        super().close()


class BoundedFile(io.BufferedReader):
    """A file of which nobody reads more at once than there is left of it.

    An unpickler asks for as many bytes as the pickle says, and gets memory for them first.
    """

    def __init__(self, raw: Any, n_bytes: int) -> None:
        super().__init__(raw, _AHEAD_BYTES)
        self._n_bytes = n_bytes

    def read(self, size: int | None = -1, /) -> bytes:
        """As for any file."""
        left = max(0, self._n_bytes - self.tell())
        return super().read(left if size is None or size < 0 else min(size, left))


class VerifiedFile(BoundedFile):
    """A file that is read, as ioshape.open(path, "rb") gives it.

    It is an io.BufferedReader with read(), readinto(), seek() and tell(). Who reads onward is read
    ahead of, past the page cache. It has no fileno(): what somebody reads by the descriptor would
    not be verified. A file that is replaced meanwhile is read to its end as it was.

    Of a torch.save file, or one named .safetensors, tensors and parts of them can be read by name:

        with ioshape.open("model.pt") as file:
            rows = file["model.embedding.weight"][1024:2048]

    Nothing of it is unpickled, and nothing else of it read.
    """

    #: Whether what is read can be verified. A file has checksums if ioshape.save or torch.save has
    #: written it, or ioshape.open(…, checksums=True) and nobody has changed it since.
    has_checksums: bool

    def __init__(self, path: str) -> None:
        self._reader = Reader(path, any_format=True)
        source = Source(self._reader)
        super().__init__(source, source.n_bytes)
        self.has_checksums = source.has_checksums
        self._tensors: dict[str, StoredTensor | str] | None = None

    def _stored(self) -> dict[str, StoredTensor | str]:
        if self._tensors is None:
            from ioshape._load.stored import stored_tensors  # noqa: PLC0415 - it reads by this

            self._tensors = stored_tensors(self)
        return self._tensors

    def keys(self) -> list[str]:
        """The names of the file's tensors, as inspect() has them, in its order.

        Raises:
            FormatError: it is no file of tensors.
        """
        return list(self._stored())

    def __getitem__(self, name: str) -> StoredTensor:
        """A tensor. Only when it is indexed, what is asked for is read.

        Raises:
            KeyError: there is none of that name.
            ValueError: no part of it can be read, only all of it, by load().
        """
        found = self._stored()[name]
        if isinstance(found, str):
            raise ValueError(
                f"cannot read a part of tensor '{one_line(name)}' of \"{self.name}\": it {found}; "
                "load() the file"
            )
        return found

    def __contains__(self, name: object) -> bool:
        """Whether the file has a tensor of that name."""
        return name in self._stored()
