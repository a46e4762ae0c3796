# SPDX-License-Identifier: Apache-2.0
"""The table of programs that must not notice the preload library.

Each row runs a function of tests/support/programs/preloaded_programs.sh.
"""

from preloaded import Case

#: programs that write large files with the calls that the library sees
SEEN = (
    *("cp", "dd", "tar", "mv", "cat", "truncate", "gzip", "zip", "openssl", "perl", "limits"),
    *("git", "streams", "pip", "dpkg", "fio", "strace"),
    *(f"c {way}" for way in ("vectors", "closed", "processes", "signals")),
    *(f"python {way}" for way in ("files", "processes", "children", "archives", "numpy")),
    "python torch",
)
#: programs whose large writes the library cannot see, or lets pass, and programs that write little
UNSEEN = (
    *("sort", "find", "patch", "mkfs", "bash", "sh", "renamed", "terminal", "make"),
    *("python sqlite", "static vectors", "static processes"),
    "redis",  # the library excludes it
    "valgrind",  # it refuses to start a holder
    "c few",  # the holder may have too few descriptors
    "c sandbox",  # it may start no process
    *(f"c {way}" for way in ("uring", "aio")),
)

TABLE = (
    *(Case(name, takes_turns=True) for name in SEEN),
    *(Case(name) for name in UNSEEN),
    Case("users", takes_turns=True, needs_root=True),
    Case("c killed", status=-9),
    # One that has the slot waits for the next one, which waits for the slot.
    Case("pipe", takes_turns=True, wait_s=5),
    Case("meson", is_long=True),  # "make" builds in each run
    Case("cmake", is_long=True),
    Case("rsync", takes_turns=True, is_long=True, needs=("rsync",)),
    Case("cpio", takes_turns=True, is_long=True, needs=("cpio",)),
    Case("busybox", is_long=True, needs=("busybox",)),
    Case("compressors", takes_turns=True, is_long=True, needs=("xz", "bzip2", "zstd", "lz4")),
    Case("sqlite", is_long=True, needs=("sqlite3",)),
    Case("gpg", is_long=True, needs=("gpg",)),
    Case("node", is_long=True, needs=("node",)),
    Case("java", takes_turns=True, is_long=True, needs=("java",)),
    Case("ffmpeg", takes_turns=True, is_long=True, needs=("ffmpeg",)),
    Case("python h5py", takes_turns=True, is_long=True, needs=("import h5py",)),
    Case("python tensorstore", takes_turns=True, is_long=True, needs=("import tensorstore",)),
)
