# SPDX-License-Identifier: Apache-2.0
"""Parsers get any bytes: the targets of tests/fuzz, with a corpus that grows from run to run.

What one machine found worth keeping is packed into the source now and then, for the next one.
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

from .trial import CannotTry, Trial

ROOT = Path(__file__).resolve().parents[2]
TARGETS = ROOT / "build/asan/tests/fuzz"
CORPUS = ROOT / "tests/fuzz/corpus"
KEPT = ROOT / "tests/fuzz/kept.tar.xz"

SECONDS = 5
MOST_MIB = 2048  # AddressSanitizer keeps what is freed, and libFuzzer its corpus
EXECUTED = re.compile(r"^stat::number_of_executed_units:\s+(\d+)", re.MULTILINE)
TOLD_LINES = 12

# The largest inputs: of files 1 MiB, of notes and texts what they may have at most.
MOST_BYTES = dict.fromkeys(("file", "manifest", "reader"), 1 << 20)
USUAL_BYTES = 1 << 16


def names() -> list[str]:
    return sorted(path.name for path in CORPUS.iterdir())


def command(name: str, seed: int, work: Path) -> list[str]:
    kept = work / name
    kept.mkdir(exist_ok=True)
    return [
        str(TARGETS / f"fuzz-{name}"),
        f"-seed={seed}",
        f"-max_total_time={SECONDS}",
        f"-max_len={MOST_BYTES.get(name, USUAL_BYTES)}",
        f"-rss_limit_mb={MOST_MIB}",
        "-timeout=10",
        "-error_exitcode=1",
        "-print_final_stats=1",
        f"-artifact_prefix={work / name}-",
        str(kept),  # what is new goes here
        str(CORPUS / name),
    ]


def run(name: str, seed: int, work: Path) -> Trial:
    environment = os.environ | {"UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1"}
    with subprocess.Popen(
        command(name, seed, work),
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
    """Of each target as few inputs as reach all that is reached."""
    with tempfile.TemporaryDirectory() as folder, tarfile.open(KEPT, "w:xz") as kept:
        for name in names():
            merged, found = Path(folder) / name, work / name
            merged.mkdir()
            found.mkdir(exist_ok=True)
            target = str(TARGETS / f"fuzz-{name}")
            command = [target, "-merge=1", str(merged), str(CORPUS / name), str(found)]
            subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
            for path in sorted(merged.iterdir()):
                about = tarfile.TarInfo(f"{name}/{path.name}")  # nothing of this machine
                about.size = path.stat().st_size
                with path.open("rb") as content:
                    kept.addfile(about, content)


@contextlib.contextmanager
def trials(work: Path) -> Iterator[Callable[[int], Trial]]:
    missing = [name for name in names() if not (TARGETS / f"fuzz-{name}").exists()]
    if missing:
        raise CannotTry(f"fuzz: there is no target {missing[0]} in {TARGETS}")
    if KEPT.exists():
        shutil.unpack_archive(KEPT, work)
    yield lambda seed: run(names()[seed % len(names())], seed, work)
