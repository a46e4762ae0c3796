# SPDX-License-Identifier: Apache-2.0
"""NVIDIA's library for GPUDirect Storage: reads from a file to a GPU that bypass host memory.

The library is loaded if it is installed. torch also has functions for it, but they hold the GIL
while they read, and only handle whole storages.
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
from pathlib import Path

_LIBRARY = "libcufile.so.0"
# the interface of the library's kernel module
_MODULE = Path("/proc/driver/nvidia-fs")
# Without that module the kernel's own peer-to-peer DMA works, if the configuration asks for it.
_CONFIGURATION = "/etc/cufile.json"
_ASKS = re.compile(r'"use_pci_p2pdma"\s*:\s*true')
_KIND_OF_DESCRIPTOR = 1  # CU_FILE_HANDLE_TYPE_OPAQUE_FD


class _Result(ctypes.Structure):
    _fields_ = (("code", ctypes.c_int), ("cuda_code", ctypes.c_int))


class _Handle(ctypes.Union):
    _fields_ = (("descriptor", ctypes.c_int), ("pointer", ctypes.c_void_p))


class _Description(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int), ("handle", _Handle), ("operations", ctypes.c_void_p))


def _is_set_up() -> bool:
    """Return whether the system is configured for reads that bypass the CPU.

    If it is not, the library copies through host memory, and takes half a second to find that out.
    """
    if _MODULE.exists() or os.environ.get("CUFILE_USE_PCIP2PDMA", "").lower() in ("true", "1"):
        return True
    configuration = Path(os.environ.get("CUFILE_ENV_PATH_JSON", _CONFIGURATION))
    try:
        return _ASKS.search(configuration.read_text("utf-8", "replace")) is not None
    except OSError:
        return False


@functools.cache
def _library() -> ctypes.CDLL:
    """Load the library. Its calls release the GIL.

    Raises:
        OSError: The library is not installed, or the system is not configured for it.
    """
    if not _is_set_up():
        raise OSError(
            f"there is no kernel module nvidia-fs, and {_CONFIGURATION} does not set use_pci_p2pdma"
        )
    library = ctypes.CDLL(_LIBRARY, use_errno=True)
    library.cuFileHandleRegister.restype = _Result
    library.cuFileHandleDeregister.argtypes = (ctypes.c_void_p,)
    library.cuFileHandleDeregister.restype = None
    library.cuFileRead.argtypes = (
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int64,
        ctypes.c_int64,
    )
    library.cuFileRead.restype = ctypes.c_ssize_t
    return library


class CuFile:
    """A file that is read by GPUDirect Storage. The caller keeps the descriptor and closes it.

    Raises:
        OSError: The library is not available, or does not support this file.
    """

    def __init__(self, descriptor: int) -> None:
        self._library = _library()
        self._pointer = ctypes.c_void_p()
        described = _Description(_KIND_OF_DESCRIPTOR, _Handle(descriptor=descriptor))
        result = self._library.cuFileHandleRegister(
            ctypes.byref(self._pointer), ctypes.byref(described)
        )
        if result.code:
            raise OSError(f"cuFileHandleRegister() failed with {result.code}, {result.cuda_code}")

    def close(self) -> None:
        self._library.cuFileHandleDeregister(self._pointer)

    def read(self, offset: int, address: int, n_bytes: int) -> None:
        """Read into memory of the GPU that is current on this thread.

        Raises:
            OSError: The read failed.
        """
        done = 0
        while done < n_bytes:
            count = self._library.cuFileRead(
                self._pointer, address, n_bytes - done, offset + done, done
            )
            if count == -1:
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
            if count <= 0:
                raise OSError(f"cuFileRead() returned {count} at byte {offset + done}")
            done += count
