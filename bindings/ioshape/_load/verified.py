# SPDX-License-Identifier: Apache-2.0
"""File objects for reading. Bytes with checksums are verified before the caller gets them."""

from __future__ import annotations

import io
import os
from typing import TYPE_CHECKING, Any

from ioshape._core.report import Progress
from ioshape._core.text import one_line
from ioshape._load.reader import Reader
from ioshape._load.stored import stored_tensors

if TYPE_CHECKING:
    from collections.abc import Callable

    from ioshape._load.stored import StoredTensor

# torch reads the end of a file in pieces of at most 4 KiB.
_RECORD_BYTES = (4 << 10) + 1
# buffer size for small reads
_AHEAD_BYTES = 64 << 10


class Source(io.RawIOBase):
    """Raw file over a Reader. Sequential reads are prefetched; random reads are not.

    Closing it leaves the reader open, because torch may have to read the file a second time.

    torch.load reads the small parts at the end of the file first. It then reads one record after
    the other, each with one call, into its final memory.
    """

    def __init__(
        self, reader: Reader, progress: Callable[[Progress], object] | None = None
    ) -> None:
        self.name = reader.path
        self.mode = "rb"
        self.reader = reader
        self._progress = progress
        self.n_bytes = reader.file_bytes
        self.has_checksums = reader.has_checksums
        self._position = 0
        self._told = 0
        #: the first failure of a read; torch may wrap it, or swallow it and read again
        self.failure: BaseException | None = None

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        """Move to an offset, and return it. The offset may be beyond the end."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self.n_bytes}[whence]
        if base + offset < 0:
            raise ValueError(f"negative position {base + offset}")
        self._position = base + offset
        return self._position

    def tell(self) -> int:
        """Return the offset of the next byte."""
        return self._position

    def readinto(self, buffer: Any) -> int:
        """Fill the buffer, or read up to the end of the file. Return the number of bytes."""
        view = memoryview(buffer).cast("B")
        count = max(0, min(view.nbytes, self.n_bytes - self._position))
        try:
            if count:
                self.reader.read_file(self._position, view[:count])
            self._position += count
            if count:
                # Count large reads only: torch looks at the file's end and at headers first.
                self.tell_progress(self._position if count >= _RECORD_BYTES else 0)
        except BaseException as error:
            self.failure = error
            raise
        return count

    def tell_progress(self, done_bytes: int) -> None:
        """Report that this many bytes of the file were read."""
        self._told = max(self._told, done_bytes)
        if self._progress is not None:
            self._progress(Progress("read", self._told, self.n_bytes))

    def read(self, n_bytes: int = -1, /) -> bytes:
        """Return up to `n_bytes`. Allocate no more memory than there are bytes left."""
        left = max(0, self.n_bytes - self._position)
        data = bytearray(left if n_bytes < 0 else min(n_bytes, left))
        self.readinto(data)
        return bytes(data)


class BoundedFile(io.BufferedReader):
    """A buffered file whose reads never ask for more bytes than are left.

    An unpickler asks for as many bytes as the pickle says. BufferedReader would allocate that
    memory before it reads.
    """

    def __init__(self, raw: Any, n_bytes: int) -> None:
        super().__init__(raw, _AHEAD_BYTES)
        self._n_bytes = n_bytes

    def read(self, size: int | None = -1, /) -> bytes:
        """Return up to `size` bytes, or all that are left."""
        left = max(0, self._n_bytes - self.tell())
        return super().read(left if size is None or size < 0 else min(size, left))


class VerifiedFile(BoundedFile):
    """A file that is open for reading, as ioshape.open(path, "rb") returns it.

    It is an io.BufferedReader with read(), readinto(), seek() and tell(). Sequential reads are
    prefetched past the page cache. It has no fileno(), because reads from a descriptor would not be
    verified. If the file is replaced meanwhile, reads still return the old content to its end.

    In a file of torch.save, or one named *.safetensors, you can read tensors and slices of them by
    name.

        # Read 1,024 rows.
        with ioshape.open("model.pt") as file:
            rows = file["model.embedding.weight"][1024:2048]

    Nothing is unpickled, and other tensors are not read.

    One thread at a time may use a file. Different threads may read different files.
    """

    #: Whether the file has checksums, so that reads are verified. It has them if ioshape.save or
    #: torch.save wrote it. It also has them if ioshape.open(…, checksums=True) wrote it and it was
    #: not changed since.
    has_checksums: bool

    def __init__(self, path: str) -> None:
        self._reader = Reader(path, any_format=True)
        source = Source(self._reader)
        super().__init__(source, source.n_bytes)
        self.has_checksums = source.has_checksums
        self._tensors: dict[str, StoredTensor | str] | None = None

    def _stored(self) -> dict[str, StoredTensor | str]:
        if self._tensors is None:
            self._tensors = stored_tensors(self._reader)
        return self._tensors

    def close(self) -> None:
        """Close the file. A second call does nothing."""
        super().close()
        self._reader.close()

    def keys(self) -> list[str]:
        """Return the names of the file's tensors, in the order and form of inspect().

        Raises FormatError if it is not a file of tensors.
        """
        return list(self._stored())

    def __getitem__(self, name: str) -> StoredTensor:
        """Return a tensor by name. Its data is read when you index the tensor.

        Raises KeyError if there is no tensor of that name, and ValueError if only load() can read
        it.
        """
        found = self._stored()[name]
        if isinstance(found, str):
            raise ValueError(
                f"cannot read a part of tensor '{one_line(name)}' of \"{self.name}\": it {found}; "
                "load() the file"
            )
        return found

    def __contains__(self, name: object) -> bool:
        """Return whether the file has a tensor of that name."""
        return name in self._stored()
