# SPDX-License-Identifier: Apache-2.0
"""Uses strace to find bytes of a framework's checkpoint that the library did not write.

The library's files have a temporary name with "ioshape-tmp" in it, or no name yet. Most of their
bytes are written by io_uring, past ordinary system calls. So each byte that an ordinary call writes
to another file below the folder bypassed the library.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

from processes import environment
from tree import ROOT, program

SCENES = ROOT / "tests" / "support" / "programs" / "witness_scenes.py"

#: Frameworks of frameworks.py with the packages of a scene, if the standard set-up lacks them.
INSTALLED_AS = {
    "composer": "composer",
    "deepspeed": "deepspeed",
    "deepspeed_plugin": "deepspeed_plugin",
    "nvrx": "nvrx",
    "sb3": "sb3",
    "torchtitan": "torchtitan",
    "torchtune": "torchtune",
    "trainer": "transformers",
}

TIMEOUT_S = 600

# The descriptor that is written to is the first or the third argument.
_WRITES = "write,pwrite64,writev,pwritev,pwritev2,sendfile,copy_file_range,mmap"
_LINE = re.compile(r"^(\w+)\((.*)\)\s+= (0x)?(\d+)")
_FILE = re.compile(r"\d+<([^>]*)>")

#: files that describe a checkpoint; small texts, each written by one call
TEXT = (".json", ".md", ".txt", ".py", ".yaml", ".jinja")


def _target(call: str, arguments: str) -> tuple[str, int]:
    """Return the file that a call writes to, and the length if it is a mapping."""
    files = _FILE.findall(arguments)
    if call == "mmap":
        if "PROT_WRITE" not in arguments or "MAP_SHARED" not in arguments:
            return "", 0
        return (files[0] if files else ""), int(arguments.split(",")[1])
    which = 1 if call == "copy_file_range" else 0
    return (files[which] if len(files) > which else ""), 0


def _is_ours(path: str) -> bool:
    # A directory's name does not count, because other code may put files into our temporary
    # directories.
    name = Path(path).name
    return "ioshape-tmp" in name or name.startswith("#")


def bypassed(log: Path, folder: Path) -> Counter[str]:
    """Return the bytes that bypassed the library, by file.

    `log` is the file name given to strace -ff -y.
    """
    found: Counter[str] = Counter()
    for one in log.parent.glob(f"{log.name}.*"):
        for line in one.read_text(encoding="utf-8", errors="replace").splitlines():
            match = _LINE.match(line)
            if match is None:
                continue
            call, arguments, _, result = match.groups()
            path, mapped = _target(call, arguments)
            if not path.startswith(f"{folder}/") or _is_ours(path) or path.endswith(TEXT):
                continue
            found[str(Path(path).relative_to(folder))] += mapped or int(result)
    return found


def watch(
    scene: str,
    folder: Path,
    python: str = sys.executable,
    *,
    under_run: bool = True,
) -> tuple[int, Counter[str]]:
    """Run the two ranks of a scene.

    Return the number of bytes in its files, and the bytes that bypassed the library.
    """
    log = folder / "calls"
    strace = (
        *(program("strace"), "-ff", "--seccomp-bpf", "-qq", "-y", "-s", "0"),
        *("-o", str(log), "-e", f"trace={_WRITES}"),
    )
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    run = ("-m", "ioshape", "run") if under_run else ()
    done = subprocess.run(
        (*strace, python, *torchrun, *run, str(SCENES), scene),
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
    saved = folder / "saved"
    sizes = [path.stat().st_size for path in saved.rglob("*") if path.is_file()]
    return sum(sizes), bypassed(log, saved)
