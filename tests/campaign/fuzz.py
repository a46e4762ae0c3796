# SPDX-License-Identifier: Apache-2.0
"""Feed arbitrary bytes to parsers: the targets of tests/c/fuzz, with a corpus that grows.

From time to time the best inputs of one machine are packed into the repository for others. The
short form runs the packed inputs and inputs made from them. It does not run libFuzzer's search,
because that depends on reached code and so on the processor.
"""

import contextlib
import os
import re
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

from .damage import BLIND
from .trial import CannotTry, Trial

ROOT = Path(__file__).resolve().parents[2]
TARGETS = ROOT / "build/asan/tests/c/fuzz"
CORPUS = ROOT / "tests/c/fuzz/corpus"
KEPT = ROOT / "tests/c/fuzz/kept.tar.xz"

SECONDS = 5
N_SHORT = 2000
MOST_MIB = 2048  # AddressSanitizer keeps freed memory, and libFuzzer its corpus
EXECUTED = re.compile(r"^stat::number_of_executed_units:\s+(\d+)", re.MULTILINE)
TOLD_LINES = 12

# Largest inputs in bytes: 1 MiB for files, and for other formats their maximum.
MOST_BYTES = dict.fromkeys(("file", "manifest", "reader"), 1 << 20)
USUAL_BYTES = 1 << 16


def names() -> list[str]:
    return sorted(path.name for path in CORPUS.iterdir())


def command(name: str, work: Path, *arguments: str) -> list[str]:
    return [
        str(TARGETS / f"fuzz-{name}"),
        *arguments,
        f"-max_len={MOST_BYTES.get(name, USUAL_BYTES)}",
        f"-rss_limit_mb={MOST_MIB}",
        "-timeout=10",
        "-error_exitcode=1",
        "-print_final_stats=1",
        f"-artifact_prefix={work / name}-",
    ]


def go_on(name: str, seed: int, work: Path) -> Trial:
    """Run libFuzzer for SECONDS, starting from the inputs of earlier trials."""
    kept = work / name
    kept.mkdir(exist_ok=True)
    folders = (str(kept), str(CORPUS / name))  # new inputs go into the first folder
    return run(name, command(name, work, f"-seed={seed}", f"-max_total_time={SECONDS}", *folders))


def made(name: str, seed: int, work: Path) -> Iterator[bytes]:
    """Yield inputs that follow from the seed and the kept inputs alone."""
    found = work / name
    found.mkdir(exist_ok=True)  # a new target has no kept inputs
    kept = sorted([*found.iterdir(), *(CORPUS / name).iterdir()], key=lambda path: path.name)
    inputs = [data for path in kept if (data := path.read_bytes())]
    rng = Random(f"{name} {seed}")
    for _ in range(N_SHORT):
        yield rng.choice(BLIND)(rng, rng.choice(inputs), inputs)


def repeat(name: str, seed: int, work: Path) -> Trial:
    """Run the kept inputs, and inputs made from them."""
    folder = work / f"{name}-made"
    folder.mkdir()
    for number, data in enumerate(made(name, seed, work)):
        (folder / f"{number:05}").write_bytes(data)
    return run(
        name, command(name, work, "-runs=0", str(work / name), str(CORPUS / name), str(folder))
    )


def run(name: str, command: list[str]) -> Trial:
    environment = os.environ | {"UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1"}
    with subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=environment,
    ) as process:
        try:
            _, output = process.communicate()
        finally:
            process.kill()
    executed = EXECUTED.search(output)
    counts = {"fuzz_executions": int(executed[1]) if executed else 0}
    if process.returncode == 0:
        return Trial(counts)
    told = [
        line
        for line in output.splitlines()
        if not line.startswith(("#", "stat::", "INFO", "\tNEW_FUNC"))
    ]
    finding = "\n".join([f"{name} ends with {process.returncode}:", *told[:TOLD_LINES], told[-1]])
    return Trial(counts | {"fuzz_findings_open": 1}, findings=[finding])


def keep(work: Path) -> None:
    """Pack as few inputs of each target as reach all the code that is reached."""
    with tempfile.TemporaryDirectory() as folder, tarfile.open(KEPT, "w:xz") as kept:
        for name in names():
            merged, found = Path(folder) / name, work / name
            merged.mkdir()
            found.mkdir(exist_ok=True)
            target = str(TARGETS / f"fuzz-{name}")
            command = [target, "-merge=1", str(merged), str(CORPUS / name), str(found)]
            subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
            for path in sorted(merged.iterdir()):
                about = tarfile.TarInfo(f"{name}/{path.name}")  # no metadata of this machine
                about.size = path.stat().st_size
                with path.open("rb") as content:
                    kept.addfile(about, content)


def make_ready(work: Path) -> None:
    missing = [name for name in names() if not (TARGETS / f"fuzz-{name}").exists()]
    if missing:
        raise CannotTry(f"fuzz: there is no target {missing[0]} in {TARGETS}")
    if KEPT.exists():
        shutil.unpack_archive(KEPT, work)


@contextlib.contextmanager
def trials(work: Path) -> Iterator[Callable[[int], Trial]]:
    make_ready(work)
    yield lambda seed: go_on(names()[seed % len(names())], seed, work)


@contextlib.contextmanager
def short(work: Path) -> Iterator[Callable[[int], Trial]]:
    make_ready(work)
    yield lambda seed: repeat(names()[seed % len(names())], seed, work)
