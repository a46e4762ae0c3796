# SPDX-License-Identifier: Apache-2.0
"""Whatever is in a file, looking at it takes little time and memory."""

import subprocess
import sys
from pathlib import Path

import hostile
import pytest
from processes import TIMEOUT_S, environment

pytestmark = pytest.mark.slow

MOST_BYTES = 256 << 20
# Of the processor's time for all files of a way, of which a busy machine takes no more.
MOST_CPU_S = int(TIMEOUT_S)
PATIENCE_S = 10 * TIMEOUT_S

# Each way is tried in a process of its own, which has little memory besides what it has begun with.
PROGRAM = """
import contextlib, json, os, resource, sys
import ioshape
from ioshape.cli import main

way, most_bytes, most_cpu_s, good, *paths = sys.argv[1:]

def command(*arguments):
    sys.argv = ["ioshape", *arguments]
    with contextlib.redirect_stdout(open(os.devnull, "w")), contextlib.suppress(SystemExit):
        main()

def extract(path):
    command("extract", path, "--rank", "0", "--force", "-o", path + ".out")

def generation(path):
    ioshape.generations(path)
    newest = ioshape.latest(path)
    if newest:
        newest.parts()
        newest.verify()

ways = {
    "inspect": ioshape.inspect,
    "verify": ioshape.verify,
    "load": ioshape.load,
    "list": lambda path: command("inspect", "--json", "--records", path),
    "table": lambda path: command("inspect", path),
    "extract": extract,
    "generation": generation,
}
call = ways[way]
call(good)
pages = int(open("/proc/self/statm").read().split()[0])
limit = pages * resource.getpagesize() + int(most_bytes)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
resource.setrlimit(resource.RLIMIT_CPU, (int(most_cpu_s), int(most_cpu_s)))
for path in paths:
    print(json.dumps({"path": path}), file=sys.__stdout__, flush=True)
    try:
        call(path)
    except MemoryError:
        sys.exit("it took more memory than it may: " + path)
    except Exception as error:
        print(json.dumps({"error": str(error)[:1000]}), file=sys.__stdout__, flush=True)
"""


def try_all(way: str, good: Path, paths: list[Path]) -> None:
    limits = (str(MOST_BYTES), str(MOST_CPU_S))
    command = (sys.executable, "-c", PROGRAM, way, *limits, *map(str, (good, *paths)))
    # Each arena of malloc() would take 64 MiB of addresses.
    env = environment(MALLOC_ARENA_MAX="1", IOSHAPE_LOG="error")
    try:
        done = subprocess.run(
            command, env=env, capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )
    except subprocess.TimeoutExpired as expired:
        pytest.fail(f"hangs after {str(expired.stdout)[-1000:]}")
    assert done.returncode == 0, (done.stdout[-1000:], done.stderr[-2000:])


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("hostile")
    paths = {}
    for name, whole in hostile.files().items():
        paths[name] = folder / f"{name}.pt"
        paths[name].write_bytes(whole)
    return paths


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("good") / "good.pt"
    path.write_bytes(hostile.sound())
    return path


# As "inspect", but for what is printed.
PRINTED = [pytest.param(way, marks=pytest.mark.long) for way in ("list", "table")]


@pytest.mark.parametrize("way", ["inspect", "verify", *PRINTED])
def test_no_file_takes_long_or_much_memory(way: str, files: dict[str, Path], good: Path) -> None:
    try_all(way, good, list(files.values()))


def test_no_file_that_torch_can_read_takes_long_to_load(files: dict[str, Path], good: Path) -> None:
    beyond = {f"pickle, {name}" for name in hostile.TOO_MUCH_FOR_TORCH}
    try_all("load", good, [path for name, path in files.items() if name not in beyond])


def test_no_part_takes_long_to_extract_or_verify(tmp_path: Path) -> None:
    hostile.write_part(tmp_path / "good", hostile.sound())
    paths = []
    for number, whole in enumerate(hostile.files().values()):
        paths.append(tmp_path / str(number))
        hostile.write_part(paths[-1], whole)
    for way in ("extract", "generation"):
        try_all(way, tmp_path / "good", paths)


def test_no_manifest_takes_long_or_much_memory(tmp_path: Path) -> None:
    hostile.write_part(tmp_path / "good", hostile.sound())
    paths = []
    for name in hostile.MANIFESTS:
        paths.append(tmp_path / name)
        hostile.write_generation(paths[-1], name)
    for way in ("extract", "generation"):
        try_all(way, tmp_path / "good", paths)
