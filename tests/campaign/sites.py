# SPDX-License-Identifier: Apache-2.0
"""The calls of the library that may fail, found in the machine code; and which of them have failed.

A call is a line of the source and the function that it calls; the compiler may have made several
of it. Those that it made a jump of, because nothing comes after them, are found, too, but there is
no telling when they fail: they count as not reached.
"""

import hashlib
import json
import re
import subprocess
from collections.abc import Iterable
from pathlib import Path

from .harm import PROGRAM

LINE = re.compile(r"^ +([0-9a-f]+):\s+(\S+)(?:\s+[0-9a-f]+ <((?:__wrap_\w+)|(?:\w+@plt))>)?")
WRAPPED = "__wrap_"
LIBRARY = "/libioshape/"

#: What else the library calls, and why it is not made to fail.
CANNOT_FAIL = """
__ctype_b_loc __errno_location __sched_cpucount __stack_chk_fail clock_gettime closedir
crc32_gzip_refl dirfd dirname explicit_bzero free freeReplyObject freeaddrinfo gai_strerror
getegid geteuid getgid getpid getsid getuid io_uring_queue_exit memccpy memchr memcmp memcpy
memmem memmove memrchr memset qsort qsort_r redisFree redisFreeCommand redisReaderFree
secure_getenv snprintf strcasestr strchr strchrnul strcmp strcpy strcspn strerror strerror_l
strlen strncmp strnlen strpbrk strrchr strspn strstr strtol strtoul strtoull time vsnprintf
"""
#: On no Linux that we know of, for the arguments that it is given.
FAILS_NOWHERE = """
__register_atfork kill munmap nanosleep pthread_cond_broadcast pthread_cond_destroy
pthread_cond_init pthread_cond_signal pthread_cond_timedwait pthread_cond_wait
pthread_condattr_destroy pthread_condattr_init pthread_condattr_setclock pthread_detach
pthread_join pthread_mutex_destroy pthread_mutex_init pthread_mutex_lock pthread_mutex_unlock
pthread_once pthread_self pthread_sigmask setvbuf sigaddset sigemptyset sigfillset sigismember
sigpending sigtimedwait
"""
#: Text from or into memory, or from files of which anything is expected.
TEXT = "__isoc99_fscanf __isoc99_sscanf fprintf fputc fwrite"
OTHERS = set(f"{CANNOT_FAIL} {FAILS_NOWHERE} {TEXT}".split())


def _output(*command: str, given: str = "") -> str:
    return subprocess.run(command, input=given, check=True, capture_output=True, text=True).stdout


def _calls(disassembly: Iterable[str]) -> Iterable[tuple[int, int, str]]:
    """Where it is, where it goes on (0: nowhere), and what it calls."""
    before: tuple[int, str, str] | None = None
    for line in disassembly:
        found = LINE.match(line)
        if not found:
            continue
        address = int(found[1], 16)
        if before:
            yield before[0], address if before[1] == "call" else 0, before[2]
        before = (address, found[2], found[3]) if found[3] else None


class Sites:
    """Kept in a file: what was reached by earlier trials with the same program counts."""

    def __init__(self, work: Path) -> None:
        program = hashlib.sha256(PROGRAM.read_bytes()).hexdigest()[:16]
        self._file = work / f"reached-{program}.json"
        self.reached: set[str] = set()
        if self._file.exists():
            self.reached.update(json.loads(self._file.read_text()))
        calls = list(
            _calls(_output("objdump", "-d", "--no-show-raw-insn", str(PROGRAM)).splitlines())
        )
        lines = _output(
            "addr2line", "-e", str(PROGRAM), given="\n".join(hex(call[0]) for call in calls)
        ).splitlines()
        #: By the address where they go on.
        self._names: dict[int, set[str]] = {}
        self.all: set[str] = set()
        for (_, goes_on, name), place in zip(calls, lines, strict=True):
            if LIBRARY not in place:
                continue
            if not name.startswith(WRAPPED):
                if (other := name.removesuffix("@plt")) not in OTHERS:
                    raise RuntimeError(f"{place}: can {other} fail? See OTHERS, tests/meson.build")
                continue
            where = place.rsplit(LIBRARY, 1)[1].split(" ")[0]
            site = f"{where} {name.removeprefix(WRAPPED)}"
            self.all.add(site)
            self._names.setdefault(goes_on, set()).add(site)

    def add(self, addresses: Iterable[int]) -> None:
        """Those that were made to fail."""
        for address in addresses:
            self.reached |= self._names.get(address, set())
        self._file.write_text(json.dumps(sorted(self.reached)))

    @property
    def missing(self) -> list[str]:
        return sorted(self.all - self.reached)

    @property
    def percent(self) -> float:
        return round(100 * len(self.reached & self.all) / len(self.all), 1)
