# SPDX-License-Identifier: Apache-2.0
"""The calls of the library that may fail, found in the machine code; and which of them have failed.

A call is a line of the source and the function that it calls; the compiler may have made several
of it, or a jump, because nothing comes after it: then it goes on where its caller does. What such a
caller may have called in several places counts as not reached.
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

#: What else the library calls, and why it is not made to fail.
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
#: On no Linux that we know of, for the arguments that it is given.
FAILS_NOWHERE = """
__register_atfork kill munmap nanosleep pthread_cond_broadcast pthread_cond_destroy
pthread_cond_init pthread_cond_signal pthread_cond_timedwait pthread_cond_wait
pthread_condattr_destroy pthread_condattr_init pthread_condattr_setclock pthread_detach
pthread_join pthread_mutex_destroy pthread_mutex_init pthread_mutex_lock pthread_mutex_unlock
pthread_once pthread_self pthread_sigmask setvbuf sigaddset sigemptyset sigfillset sigismember
sigpending sigtimedwait sysconf
"""
#: Text from or into memory, or from files of which anything is expected.
TEXT = "__isoc99_fscanf __isoc99_sscanf fprintf fputc fwrite"
#: For speed alone: if one fails, things go on as they are, or another thread does it.
HINTS = "pthread_mutex_trylock pthread_setschedparam readahead"
OTHERS = set(f"{CANNOT_FAIL} {FAILS_NOWHERE} {TEXT} {HINTS}".split())


def _output(*command: str, given: str = "") -> str:
    return subprocess.run(command, input=given, check=True, capture_output=True, text=True).stdout


@dataclass(frozen=True)
class _Call:
    """Of a function, or a jump to it."""

    address: int
    #: Where the function begins that it is in; and that which it calls, and its name.
    caller: int
    called: int
    name: str
    #: The address; 0 for a jump: where its caller does.
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
    """File and line of each."""
    given = "\n".join(hex(call.address) for call in calls)
    return _output("addr2line", "-e", str(PROGRAM), given=given).splitlines()


def _site(call: _Call, place: str) -> str:
    """Its name; "" if it is not made to fail."""
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
    """Jumps to functions that end in jumps themselves."""
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
    """The function that a line is in: its name, and its first line and its last, from 0.

    As all of the library's are written: its braces stand alone, at the beginning of their lines.
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
    """A call, told by the function that it is in: so it stays the same while others change."""

    file: str
    function: str
    #: of the function's text
    digest: str
    #: in lines, from where the function begins
    offset: int
    called: str


def place_of(site: str) -> Place:
    """Of one that is called as in `Sites.all`."""
    where, called = site.split(" ")
    file, line = where.split(":")
    lines = _lines(file)
    at = int(line) - 1
    function, first, last = _enclosing(lines, at)
    text = "\n".join(lines[first : last + 1])
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    return Place(file, function, digest, at - first, called)


def read(path: Path) -> set[Place]:
    """What `write` wrote; nothing if it is not there."""
    found: set[Place] = set()
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        file, function, digest, *calls = line.split(" ")
        for call in calls:
            offset, called = call.split(":")
            found.add(Place(file, function, digest, int(offset), called))
    return found


def write(path: Path, places: Iterable[Place]) -> None:
    """A line for each function: file, name, digest, and offset:called for each call."""
    lines: dict[str, list[str]] = {}
    for place in sorted(places):
        head = f"{place.file} {place.function} {place.digest}"
        lines.setdefault(head, []).append(f"{place.offset}:{place.called}")
    text = "".join(f"{head} {' '.join(calls)}\n" for head, calls in lines.items())
    path.write_text(text, encoding="utf-8")


class Sites:
    """What earlier trials reached counts until the function that it is in is changed."""

    def __init__(self, work: Path, reached: Iterable[Place]) -> None:
        """`reached`: of earlier trials."""
        self._missing_file = work / "missing"
        calls = list(
            _calls(_output("objdump", "-d", "--no-show-raw-insn", str(PROGRAM)).splitlines())
        )
        places = dict(zip(calls, _places(calls), strict=True))
        #: By the address where they go on.
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
        """Those that were made to fail."""
        for address in addresses:
            self.reached |= self._names.get(address, set())

    @property
    def places(self) -> set[Place]:
        """That were reached."""
        return {self._places[site] for site in self.reached}

    def write_missing(self) -> Path:
        """A file of addresses where those go on that were never made to fail."""
        addresses = (at for at, names in self._names.items() if not names <= self.reached)
        self._missing_file.write_text("".join(f"{at:x}\n" for at in sorted(addresses)))
        return self._missing_file

    @property
    def missing(self) -> list[str]:
        return sorted(self.all - self.reached)

    @property
    def percent(self) -> float:
        return round(100 * len(self.reached) / len(self.all), 1)
