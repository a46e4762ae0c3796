# SPDX-License-Identifier: Apache-2.0
"""Find the library's calls that may fail in the machine code, and record which have failed.

A call is identified by its source line and the called function. The compiler may have made several
calls of it, or a jump if it is the last statement. After a jump, execution continues where the
caller's does. If the caller may have jumped from several places, the call does not count as
reached.
"""

import functools
import hashlib
import re
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from .harm import PROGRAM

LABEL = re.compile(r"^([0-9a-f]+) <")
LINE = re.compile(r"^ +([0-9a-f]+):\s+(\S+)(?:\s+([0-9a-f]+) <([^>+]+)>)?")
WRAPPED = "__wrap_"
LIBRARY = "/libioshape/"
SIGNATURE = re.compile(r"\w[^=;]*?(\w+)\(")

#: Other functions that the library calls, which are not made to fail, grouped by reason. These
#: cannot fail.
CANNOT_FAIL = """
__ctype_b_loc __errno_location __sched_cpucount __stack_chk_fail clock_gettime closedir
crc32_gzip_refl dirfd dirname ec_encode_data_update ec_init_tables explicit_bzero frexp free
freeReplyObject freeaddrinfo gai_strerror getegid geteuid getgid getpid getsid getuid
gf_gen_rs_matrix gf_invert_matrix gf_mul io_uring_queue_exit memccpy memchr memcmp memcpy memmem
memmove memrchr memset qsort qsort_r redisFree redisFreeCommand redisReaderFree
secure_getenv snprintf strcasestr strchr strchrnul strcmp strcpy strcspn strerror strerror_l
stpcpy strlen strncmp strnlen strpbrk strrchr strspn strstr strtol strtoll strtoul strtoull time
vsnprintf
"""
#: These fail on no known Linux with the arguments that they get.
FAILS_NOWHERE = """
__register_atfork kill munmap nanosleep pthread_cond_broadcast pthread_cond_destroy
pthread_cond_init pthread_cond_signal pthread_cond_timedwait pthread_cond_wait
pthread_condattr_destroy pthread_condattr_init pthread_condattr_setclock pthread_detach
pthread_join pthread_mutex_destroy pthread_mutex_init pthread_mutex_lock pthread_mutex_unlock
pthread_once pthread_self pthread_sigmask setvbuf sigaddset sigemptyset sigfillset sigismember
sigpending sigtimedwait sysconf
"""
#: These convert text in memory, or read files whose contents are not trusted anyway.
TEXT = "__isoc99_fscanf __isoc99_sscanf fprintf fputc fwrite"
#: These only improve speed. If one fails, another thread does the work, or nothing changes.
HINTS = "pthread_mutex_trylock pthread_setschedparam readahead"
OTHERS = set(f"{CANNOT_FAIL} {FAILS_NOWHERE} {TEXT} {HINTS}".split())


def _output(*command: str, given: str = "") -> str:
    return subprocess.run(command, input=given, check=True, capture_output=True, text=True).stdout


@dataclass(frozen=True)
class _Call:
    """A call of a function, or a jump to it."""

    address: int
    #: Address of the function that contains the call, then address and name of the called one.
    caller: int
    called: int
    name: str
    #: Return address; 0 for a jump, which returns where its caller does.
    goes_on: int


def _calls(disassembly: Iterable[str]) -> Iterable[_Call]:
    before: tuple[int, str, int, str] | None = None
    function = 0
    for line in disassembly:
        if label := LABEL.match(line):
            function = int(label[1], 16)
        found = LINE.match(line)
        if not found:
            continue
        address = int(found[1], 16)
        if before:
            at, how, called, name = before
            yield _Call(at, function, called, name, address if how == "call" else 0)
        before = (address, found[2], int(found[3], 16), found[4]) if found[4] else None


def _places(calls: list[_Call]) -> list[str]:
    """Return file and line of each call."""
    given = "\n".join(hex(call.address) for call in calls)
    return _output("addr2line", "-e", str(PROGRAM), given=given).splitlines()


def _site(call: _Call, place: str) -> str:
    """Return the name of the call, or "" if it is not made to fail."""
    if LIBRARY not in place:
        return ""
    if not call.name.startswith(WRAPPED):
        other = call.name.removesuffix("@plt")
        if other != call.name and other not in OTHERS:
            raise RuntimeError(f"{place}: can {other} fail? See OTHERS, tests/meson.build")
        return ""
    where = place.rsplit(LIBRARY, 1)[1].split(" ", maxsplit=1)[0]
    return f"{where} {call.name.removeprefix(WRAPPED)}"


def _through_jumps(jumps: dict[int, set[str]], calls: list[_Call]) -> None:
    """Add jumps to functions that themselves end in jumps."""
    more = True
    while more:
        more = False
        for call in calls:
            if call.goes_on or call.caller == call.called:
                continue
            missing = jumps.get(call.called, set()) - jumps.get(call.caller, set())
            if missing:
                jumps.setdefault(call.caller, set()).update(missing)
                more = True


@functools.cache
def _lines(file: str) -> list[str]:
    return Path("libioshape", file).read_text(encoding="utf-8").splitlines()


def _enclosing(lines: list[str], line: int) -> tuple[str, int, int]:
    """Return the name of the function that contains a line, and its first and last line, from 0.

    The library's style puts the braces of a function alone at the beginning of a line.
    """
    first = line
    while first and lines[first] != "{":
        first -= 1
    last = line
    while last < len(lines) - 1 and lines[last] != "}":
        last += 1
    names = (SIGNATURE.match(above) for above in reversed(lines[:first]))
    return next((name[1] for name in names if name), "-"), first, last


@dataclass(frozen=True, order=True)
class Place:
    """A call, identified within its function. It stays equal when other functions change."""

    file: str
    function: str
    #: Digest of the function's text.
    digest: str
    #: Lines from the beginning of the function.
    offset: int
    called: str


def place_of(site: str) -> Place:
    """Return the place of a call in the notation of `Sites.all`."""
    where, called = site.split(" ")
    file, line = where.split(":")
    lines = _lines(file)
    at = int(line) - 1
    function, first, last = _enclosing(lines, at)
    text = "\n".join(lines[first : last + 1])
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    return Place(file, function, digest, at - first, called)


def read(path: Path) -> set[Place]:
    """Return what write() wrote, or nothing if the file is missing."""
    found: set[Place] = set()
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        file, function, digest, *calls = line.split(" ")
        for call in calls:
            offset, called = call.split(":")
            found.add(Place(file, function, digest, int(offset), called))
    return found


def write(path: Path, places: Iterable[Place]) -> None:
    """Write a line for each function: file, name, digest, and offset:called for each call."""
    lines: dict[str, list[str]] = {}
    for place in sorted(places):
        head = f"{place.file} {place.function} {place.digest}"
        lines.setdefault(head, []).append(f"{place.offset}:{place.called}")
    text = "".join(f"{head} {' '.join(calls)}\n" for head, calls in lines.items())
    path.write_text(text, encoding="utf-8")


class Sites:
    """All calls, and those that failed in a trial. A change of a call's function resets it."""

    def __init__(self, work: Path, reached: Iterable[Place]) -> None:
        """Find all calls. `reached` has the places of earlier trials."""
        self._missing_file = work / "missing"
        calls = list(
            _calls(_output("objdump", "-d", "--no-show-raw-insn", str(PROGRAM)).splitlines())
        )
        places = dict(zip(calls, _places(calls), strict=True))
        #: Names of calls by return address.
        self._names: dict[int, set[str]] = {}
        self.all: set[str] = set()
        jumps: dict[int, set[str]] = {}
        for call, place in places.items():
            if site := _site(call, place):
                self.all.add(site)
                if call.goes_on:
                    self._names.setdefault(call.goes_on, set()).add(site)
                else:
                    jumps.setdefault(call.caller, set()).add(site)
        _through_jumps(jumps, calls)
        for call in calls:
            if call.goes_on and len(sites := jumps.get(call.called, set())) == 1:
                self._names.setdefault(call.goes_on, set()).update(sites)
        self._places = {site: place_of(site) for site in self.all}
        before = set(reached)
        self.reached = {site for site in self.all if self._places[site] in before}

    def add(self, addresses: Iterable[int]) -> None:
        """Add calls that were made to fail, by return address."""
        for address in addresses:
            self.reached |= self._names.get(address, set())

    @property
    def places(self) -> set[Place]:
        """The places that were reached."""
        return {self._places[site] for site in self.reached}

    def write_missing(self) -> Path:
        """Write a file with the return addresses of calls that were never made to fail."""
        addresses = (at for at, names in self._names.items() if not names <= self.reached)
        self._missing_file.write_text("".join(f"{at:x}\n" for at in sorted(addresses)))
        return self._missing_file

    @property
    def missing(self) -> list[str]:
        return sorted(self.all - self.reached)

    @property
    def percent(self) -> float:
        return round(100 * len(self.reached) / len(self.all), 1)
