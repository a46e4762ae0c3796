# SPDX-License-Identifier: Apache-2.0
"""Reading any file takes bounded time and memory, whatever the file contains."""

from pathlib import Path

import hostile
import pytest
from ioshape._cli import trace
from processes import run_program

pytestmark = pytest.mark.slow

MOST_BYTES = 256 << 20
# CPU seconds for all files of a way. CPU time does not grow on a busy machine.
MOST_CPU_S = 300

# Each way runs in a process that limits its memory to what it has plus a margin.
PROGRAM = """
import contextlib, ctypes, io, json, os, resource, sys
import ioshape
from ioshape._cli import main

_, way, most_bytes, most_cpu_s, good, *paths = sys.argv
M_ARENA_MAX = -8
ctypes.CDLL(None).mallopt(M_ARENA_MAX, 1)  # each arena would take 64 MiB of address space

def command(*arguments):
    sys.argv = ["ioshape", *arguments]
    said = io.StringIO()
    with contextlib.redirect_stdout(open(os.devnull, "w")), contextlib.redirect_stderr(said):
        with contextlib.suppress(SystemExit):
            main()
    if "internal error" in said.getvalue():  # such as MemoryError
        sys.exit(said.getvalue())

def extract(path):
    command("extract", path, "--rank", "0", "--force", "-o", path + ".out")

def checkpoint(path):
    ioshape.checkpoints(path)
    newest = ioshape.latest(path)
    if newest:
        newest.shards()
        newest.verify()

def describe(path):
    import ioshape.dcp
    ioshape.dcp.Reader(path).read_metadata()

ways = {
    "describe": describe,
    "inspect": ioshape.inspect,
    "verify": ioshape.verify,
    "load": ioshape.load,
    "check": lambda path: command("verify", path),
    "trace": lambda path: command("trace", path),
    "list": lambda path: command("inspect", "--json", path),
    "table": lambda path: command("inspect", path),
    "extract": extract,
    "checkpoint": checkpoint,
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
    arguments = map(str, (way, MOST_BYTES, MOST_CPU_S, good, *paths))
    run_program(good.parent, PROGRAM, *arguments, variables={"IOSHAPE_LOG": "error"})


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
    path.write_bytes(hostile.valid())
    return path


# These ways read like "inspect" and also print.
PRINTED = [pytest.param(way, marks=pytest.mark.long) for way in ("list", "table")]


@pytest.mark.long
@pytest.mark.parametrize("way", ["inspect", "verify", *PRINTED])
def test_no_file_takes_long_or_much_memory(way: str, files: dict[str, Path], good: Path) -> None:
    try_all(way, good, list(files.values()))


@pytest.mark.long
def test_no_file_that_torch_can_read_takes_long_to_load(files: dict[str, Path], good: Path) -> None:
    beyond = {f"pickle, {name}" for name in hostile.TOO_MUCH_FOR_TORCH}
    try_all("load", good, [path for name, path in files.items() if name not in beyond])


def test_no_part_takes_long_to_extract_or_verify(tmp_path: Path) -> None:
    hostile.write_part(tmp_path / "good", hostile.valid())
    paths = []
    for number, whole in enumerate(hostile.files().values()):
        paths.append(tmp_path / str(number))
        hostile.write_part(paths[-1], whole)
    for way in ("extract", "checkpoint"):
        try_all(way, tmp_path / "good", paths)


def test_no_manifest_takes_long_or_much_memory(tmp_path: Path) -> None:
    hostile.write_part(tmp_path / "good", hostile.valid())
    paths = []
    for name in hostile.MANIFESTS:
        paths.append(tmp_path / name)
        hostile.write_checkpoint(paths[-1], name)
    for way in ("extract", "checkpoint"):
        try_all(way, tmp_path / "good", paths)


@pytest.mark.long
@pytest.mark.parametrize("way", ["list", "table", "check", "describe"])
def test_no_description_takes_long_or_much_memory(way: str, tmp_path: Path) -> None:
    found = {"good": hostile.description(), **hostile.descriptions()}
    for name, data in found.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / ".metadata").write_bytes(data)
    try_all(way, tmp_path / "good", [tmp_path / name for name in found])


@pytest.mark.long
def test_no_header_takes_long_or_much_memory(tmp_path: Path) -> None:
    texts = {
        "good": b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}',
        "objects": b'{"__metadata__":[' + b",".join(10_000_000 * [b"{}"]) + b"]}",
        "lists": b'{"a":' + 30_000_000 * b"[",
        "objects in a tensor": b'{"a":{"shape":[' + b",".join(10_000_000 * [b"{}"]) + b"]}}",
        "numbers": b'{"a":{"dtype":"U8","shape":[' + 15_000_000 * b"0," + b"0]}}",
        "one name": b'{"' + 30_000_000 * b"x" + b'":1}',
        "one wide name": b'{"\xf0\x9f\x98\x80' + 30_000_000 * b"x" + b'":1}',
        "escapes": b'{"' + 15_000_000 * b'\\"' + b'":1}',
        "texts": b'{"__metadata__":{' + b",".join(b'"%d":""' % i for i in range(2_000_000)) + b"}}",
        "tensors": b"{"
        + b",".join(
            b'"%d":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}' % i for i in range(400_000)
        )
        + b"}",
        "wide names": b"{"
        + b",".join(
            b'"\xf0\x9f\x98\x80%0170d":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}' % i
            for i in range(1 << 17)
        )
        + b"}",
        "all dimensions": b"{"
        + b",".join(
            b'"%d":{"dtype":"U8","shape":[0%s],"data_offsets":[0,0]}' % (i, 63 * b",9999999")
            for i in range(50_000)
        )
        + b"}",
        "dimensions": b'{"a":{"dtype":"U8","shape":[' + 99 * b"1," + b'1],"data_offsets":[0,1]}}',
    }
    for name, text in texts.items():
        (tmp_path / f"{name}.safetensors").write_bytes(
            len(text).to_bytes(8, "little") + text + bytes(name == "dimensions")
        )
    paths = [tmp_path / f"{name}.safetensors" for name in texts]
    for path in paths[1:]:
        try_all("inspect", paths[0], [path])


def test_no_trace_takes_long_or_much_memory(tmp_path: Path) -> None:
    lines = {"good": b"{}\n", "deep": 50 * (60_000 * b"[" + b"\n"), "endless": b"["}
    for name, text in lines.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.jsonl").write_bytes(text)
    with (tmp_path / "endless" / "a.jsonl").open("r+b") as file:
        file.truncate(2 * MOST_BYTES)
    try_all("trace", tmp_path / "good", [tmp_path / name for name in lines])


def test_of_a_trace_only_the_first_lines_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace, "_MOST_LINES", 10)
    for name in ("a.jsonl", "b.jsonl", "c.jsonl"):
        (tmp_path / name).write_bytes(6 * b"\n")
    bad = [f"{tmp_path}/{name}.jsonl: {count} lines" for name, count in (("a", 6), ("b", 4))]
    bad = [f"{problem} without a report of a save" for problem in bad]
    assert trace.read(tmp_path).problems == [*bad, "only the first 10 lines are read"]
