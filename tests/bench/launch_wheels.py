# SPDX-License-Identifier: Apache-2.0
"""Build and try wheels, for this machine's architecture and for aarch64, which is emulated."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from .launch_root import ROOT, SUITE, LaunchError, Root, Workplace, mmdebstrap, needed, run

WHEELS = ROOT / ".venv" / "wheels"
FOREIGN = "arm64"
LIBRARIES = ("libhiredis-dev", "libisal-dev", "liburing-dev")
OFFLINE = "pip install --quiet --no-index --find-links /wheels --disable-pip-version-check"

# The program runs in a root: with the argument "torch" if torch is available there.
USE = """
import pickle, sys
import ioshape

state = {"weights": bytes(range(256)) * 4096, "step": 7}
with ioshape.open("state.pickle", "wb", checksums=True) as file:
    pickle.dump(state, file)
with ioshape.open("state.pickle", "rb") as file:
    assert pickle.load(file) == state
ioshape.verify("state.pickle")
if "torch" in sys.argv:
    import torch
    model = {"weights": torch.arange(1 << 20, dtype=torch.float32), "step": 7}
    print(ioshape.save(model, "model.pt"))
    loaded = ioshape.load("model.pt")
    assert torch.equal(loaded["weights"], model["weights"]) and loaded["step"] == 7
    assert torch.equal(torch.load("model.pt", weights_only=True)["weights"], model["weights"])
"""


def path_without_ours() -> str:
    ours = Path(sys.executable).parent
    return ":".join(one for one in os.environ["PATH"].split(":") if Path(one) != ours)


def build_wheel(work: Workplace, target: Path, *options: str | Path) -> Path:
    """Build the wheel twice, with different folders, umask and time zone, and compare both."""
    names = []
    for number, (umask, zone) in enumerate((("022", "UTC"), ("077", "Pacific/Chatham"))):
        tree = work.folder / f"wheel-{target.name}-{'x' * (20 * number)}{number}"
        shutil.copytree(work.sources, tree)
        made = work.folder / f"{target.name}-{number}"
        script = f'umask {umask}; exec bindings/wheel.sh "$@"'
        run(
            *("bash", "-c", script, "wheel.sh", *options, made),
            folder=tree,
            PATH=path_without_ours(),
            TZ=zone,
            SOURCE_DATE_EPOCH=work.epoch,
        )
        names.append(made)
        shutil.rmtree(tree)
    work.differ(target.name, *names)
    shutil.copytree(names[0], target)
    (found,) = target.iterdir()
    return found


def wheel(work: Workplace) -> None:
    """Try the wheel in a root without any of the libraries. torch comes from this environment."""
    made = build_wheel(work, work.folder / "wheel")
    ours = Path(sysconfig.get_path("purelib"))
    root = Root(["python3-venv"])
    root.give(made, "/wheel")
    root.give(WHEELS, "/wheels")
    root.give(ours, "/given")
    root.do(
        "python3 -m venv /venv\n"
        f"/venv/bin/{OFFLINE} /wheel/*.whl\n"
        "echo /given >$(echo /venv/lib/python3*/site-packages)/given.pth\n"
        f"cd /root; cat >use.py <<'END'\n{USE}\nEND\n"
        "/venv/bin/python use.py torch\n"
        "/venv/bin/ioshape verify model.pt"
    )
    root.make()


# ---- Wheels for another architecture ------------------------------------------------------------


@contextmanager
def foreign_root(work: Workplace) -> Iterator[Path]:
    """Yield an unpacked arm64 root. Packages are not configured, because no program of it ran."""
    folder = work.folder / FOREIGN
    include = [*LIBRARIES, "check", "libc6-dev", "libfuse3-dev", "libpython3-dev", "python3-pip"]
    include += ["python3-cffi-backend", "python3-click", "python3-rich"]
    run(
        *(*mmdebstrap(), "--variant=extract"),
        *(f"--architectures={FOREIGN}", f"--include={','.join(include)}"),
        *("--format=directory", SUITE, folder),
    )
    emulator = needed("qemu-aarch64-static", "qemu-user-static")
    shutil.copy2(emulator, folder / "emulator")
    yield folder
    shutil.rmtree(folder)


CROSS = """
[binaries]
c = ['ccache', 'aarch64-linux-gnu-gcc']
cpp = ['ccache', 'aarch64-linux-gnu-g++']
ar = 'aarch64-linux-gnu-ar'
objcopy = 'aarch64-linux-gnu-objcopy'
strip = 'aarch64-linux-gnu-strip'
pkg-config = 'pkg-config'
[built-in options]
c_args = ['--sysroot=ROOT']
cpp_args = ['--sysroot=ROOT']
c_link_args = ['--sysroot=ROOT']
cpp_link_args = ['--sysroot=ROOT']
[properties]
sys_root = 'ROOT'
pkg_config_libdir = 'ROOT/usr/lib/aarch64-linux-gnu/pkgconfig'
[host_machine]
system = 'linux'
cpu_family = 'aarch64'
cpu = 'aarch64'
endian = 'little'
"""


# Program for x86-64 that makes the kernel answer like the emulator (QEMU 7.2). The emulator has
# neither io_uring nor seccomp, and returns 0 for madvise() calls that it ignores. Takes root.
AS_EMULATED = """
import ctypes, os, struct, sys

LOAD, IS, ANSWER = 0x20, 0x15, 0x06 # of linux/bpf_common.h
REFUSED, ALLOWED = 0x00050000, 0x7FFF0000 # of linux/seccomp.h
NUMBER, FIRST, THIRD = 0, 16, 32 # where struct seccomp_data has the call and its arguments

def answered(number, argument, values, code):
    one = [(IS, argument_is, len(values) - i, 0) for i, argument_is in enumerate(values)]
    kept = [(LOAD, argument, 0, 0), *one, (ANSWER, ALLOWED, 0, 0), (ANSWER, REFUSED | code, 0, 0)]
    return [(LOAD, NUMBER, 0, 0), (IS, number, 0, len(kept)), *kept]

rules = [
    *answered(425, NUMBER, [425], 38), # io_uring_setup: ENOSYS
    *answered(451, NUMBER, [451], 38), # cachestat: ENOSYS
    *answered(157, FIRST, [22], 22), # prctl(PR_SET_SECCOMP): EINVAL
    *answered(28, THIRD, [10, 22, 23], 0), # MADV_DONTFORK, _POPULATE_…
    (ANSWER, ALLOWED, 0, 0),
]
code = b"".join(struct.pack("HBBI", op, yes, no, k) for op, k, yes, no in rules)
kept = ctypes.create_string_buffer(code)
program = struct.pack("HxxxxxxQ", len(rules), ctypes.addressof(kept))
if ctypes.CDLL(None, use_errno=True).prctl(22, 2, program, 0, 0):
    sys.exit(os.strerror(ctypes.get_errno()))
os.execv(sys.argv[1], sys.argv[1:])
"""
# Tests that fail in the emulator for reasons that AS_EMULATED cannot imitate. statx() reports no
# file with direct I/O, which read-ahead needs. And the kernel, which starts setgid programs, does
# not know the emulator.
NOT_EMULATED = re.compile(
    "test_stream.c:ahead:|:a_part_is_read_ahead_to_its_end$"
    "|:settings_are_not_for_programs_with_more_rights$"
)


def failures(command: Sequence[str | Path], scratch: Path) -> set[str]:
    """Run a test program and return the names of failed tests."""
    done = subprocess.run(
        command,
        cwd=scratch,
        env={**os.environ, "CK_TIMEOUT_MULTIPLIER": "20"},
        capture_output=True,
        text=True,
        check=False,
    )
    names = re.findall(r"^not ok \d+ - .*?(test_\w+\.c:.+?:\w+): ", done.stdout, re.MULTILINE)
    return set(names) or ({f"all: {done.stderr[-200:]}"} if done.returncode else set())


def build_units(folder: Path, programs: Sequence[str] = (), *options: str | Path) -> list[str]:
    """Build the named test programs, or all of them."""
    run("meson", "setup", folder, ROOT, "-Dtests=true", *options)
    listed = run("ninja", "-C", folder, "-t", "targets", "all")
    named = list(programs) or sorted(
        set(re.findall(r"^(tests/c/unit-\w+): ", listed, re.MULTILINE))
    )
    run("ninja", "-C", folder, *named)
    return named


def units_aarch64(work: Workplace, root: Path) -> None:
    """Run the unit tests of the C library, compiled for aarch64, in the emulator.

    A failure is the emulator's if the test fails here, too, once the kernel answers like the
    emulator. Such tests are reported by name.
    """
    needed("aarch64-linux-gnu-g++", "g++-aarch64-linux-gnu")
    cross = work.folder / "cross.txt"
    text = CROSS.replace("ROOT", str(root))
    cross.write_text(text if shutil.which("ccache") else text.replace("'ccache', ", ""))
    programs = build_units(work.folder / "units", (), "--cross-file", cross)
    # Give the emulator a folder with libraries alone, because it looks up every path there first.
    libraries = work.folder / "libraries"
    for name in ("lib", "usr/lib"):
        (libraries / name).parent.mkdir(parents=True, exist_ok=True)
        (libraries / name).symlink_to(root / name)
    scratch = work.folder / "scratch"
    scratch.mkdir()

    def emulated_failures(name: str) -> set[str]:
        start = ("qemu-aarch64-static", "-L", libraries)
        return failures((*start, work.folder / "units" / name), scratch)

    with ThreadPoolExecutor(os.cpu_count()) as several:
        found = dict(zip(programs, several.map(emulated_failures, programs), strict=True))
    failed = {name: tests for name, tests in found.items() if tests}
    if failed:
        build_units(work.folder / "units-here", list(failed))
    wrong = set()
    for name, tests in failed.items():
        start = (sys.executable, "-c", AS_EMULATED)
        lacking = failures((*start, work.folder / "units-here" / name), scratch) & tests
        lacking |= {test for test in tests if NOT_EMULATED.search(test)}
        work.say(f"aarch64: {name} needs what the emulator lacks: {sorted(lacking)}")
        wrong |= tests - lacking
    work.say(f"aarch64: {len(programs)} programs, {len(programs) - len(failed)} without a failure")
    if wrong:
        raise LaunchError(f"unit tests fail on aarch64: {sorted(wrong)}")


def emulated(root: Path, *command: str) -> str:
    """Run a command in the root, with a /proc in its own mount namespace."""
    script = 'mkdir -p "$0/proc"; mount -t proc none "$0/proc" && exec chroot "$0" /emulator "$@"'
    apart = ("unshare", "--mount", "sh", "-c", script, root)
    return run(*apart, *command, PYTHONDONTWRITEBYTECODE="1")


def wheel_aarch64(work: Workplace) -> None:
    with foreign_root(work) as root:
        units_aarch64(work, root)
        made = build_wheel(work, work.folder / "wheel-aarch64", "--root", root)
        if "manylinux_2_28_aarch64" not in made.name:
            raise LaunchError(f"{made.name} is not for aarch64")
        shutil.copy2(made, root / made.name)
        python = ("/usr/bin/python3.11",)
        install = ("install", "--no-deps", "--no-index", "--break-system-packages")
        emulated(root, *python, "-m", "pip", *install, f"/{made.name}")
        (root / "use.py").write_text(f"import os; os.chdir('/tmp')\n{USE}", encoding="utf-8")
        emulated(root, *python, "/use.py")
        said = emulated(root, *python, "-m", "ioshape", "verify", "/tmp/state.pickle")
        work.say(f"aarch64: {said.strip()}")
