# SPDX-License-Identifier: Apache-2.0
"""Small new files under `ioshape run` appear whole at once and are synced together soon after.

strace counts the calls that the kernel sees, and makes calls fail.
"""

import json
import os
import signal
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path

import pytest
import torch
from processes import Finished, Forker, run_program
from records import is_ours

WATCHED = "fsync,fdatasync,syncfs,linkat,rename,renameat,renameat2"

SAVE = 'import torch\ntorch.save({"a": torch.ones(3)}, "model.pt")\n'


class Watched:
    """Programs under `ioshape run` that strace watches."""

    def __init__(self, logs: Path) -> None:
        self.log = logs / "calls"
        strace = ("strace", "-ff", "--seccomp-bpf", "-qq", "-o", str(self.log))
        # The seccomp filter lets all other calls run at full speed.
        watch = ("-e", f"trace={WATCHED}")
        self._forker = Forker(prefix=(*strace, *watch), under_run=True)

    def run(
        self,
        folder: Path,
        text: str,
        variables: Mapping[str, str] | None = None,
        status: int = 0,
    ) -> tuple[Finished, Counter[str]]:
        """Run a program. Return how often it made each of the watched calls."""
        before = self._logs()
        done = run_program(
            *(folder, text, self.log),
            status=status,
            variables=variables,
            forker=self._forker,
        )
        lines = [
            line
            for log in self._logs() - before
            for line in log.read_text(encoding="utf-8").splitlines()
        ]
        return done, Counter(line.split("(")[0] for line in lines)

    def _logs(self) -> set[Path]:
        """Return the logs, one for each process and thread."""
        return set(self.log.parent.glob(f"{self.log.name}.*"))

    def close(self) -> None:
        self._forker.close()


@pytest.fixture(scope="module", name="watched")
def _watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    with closing(Watched(tmp_path_factory.mktemp("watched"))) as watched:
        yield watched


def syncs(calls: Counter[str]) -> int:
    return calls["fsync"] + calls["fdatasync"]


@pytest.mark.slow
def test_many_small_files_are_synced_together(watched: Watched, tmp_path: Path) -> None:
    text = """
import ioshape._save.small, torch
ioshape._save.small.WITHIN_S = 1000
for number in range(100):
    torch.save({"n": number, "all": [torch.full((100,), float(number)), "text"]}, f"{number}.pt")
"""
    _, calls = watched.run(tmp_path, text)
    assert calls["linkat"] == 100
    assert syncs(calls) == 0
    assert calls["syncfs"] == 1  # once, when the program ends
    for number in range(100):
        loaded = torch.load(tmp_path / f"{number}.pt", weights_only=True)
        assert loaded["n"] == number
        assert torch.equal(loaded["all"][0], torch.full((100,), float(number)))
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [*[".pt"] * 100, ".py"]


@pytest.mark.slow
def test_few_small_files_do_not_wait_for_what_others_have_written(
    watched: Watched, tmp_path: Path
) -> None:
    text = """
import ioshape._save.small, os, torch
ioshape._save.small.WITHIN_S = 1000
os.mkdir("other")
for name in ("a.pt.new", "b.pt", "other/c.pt"):
    torch.save(torch.ones(3), name)
os.rename("a.pt.new", "a.pt")
"""
    _, calls = watched.run(tmp_path, text)
    assert calls["syncfs"] == 0
    assert syncs(calls) == 5  # three files and two directories


def test_small_files_that_need_not_be_durable_are_not_synced(
    watched: Watched, tmp_path: Path
) -> None:
    _, calls = watched.run(tmp_path, SAVE, {"IOSHAPE_DURABLE": "0"})
    assert calls["linkat"] == 1
    assert syncs(calls) + calls["syncfs"] == 0
    assert torch.equal(torch.load(tmp_path / "model.pt")["a"], torch.ones(3))


def test_they_are_synced_while_the_program_goes_on(watched: Watched, tmp_path: Path) -> None:
    text = f"""
import os, sys, time
from pathlib import Path
def count():
    logs = Path(sys.argv[1]).parent.iterdir()
    return sum(log.read_text().count("fsync(") for log in logs)
before = count()
{SAVE}
while count() < before + 2:  # as soon as there is one, strace has written it
    time.sleep(0.05)
os._exit(0)  # no exit handlers
"""
    _, calls = watched.run(tmp_path, text)
    assert syncs(calls) == 2


@pytest.mark.parametrize(
    ("before", "save", "variables"),
    [
        ('open("model.pt", "w").close()', SAVE, {}),
        ("", SAVE, {"IOSHAPE_DURABLE": "1"}),
        ("", SAVE.replace("ones(3)", "ones(1 << 16)"), {}),
        ("", SAVE.replace("torch.save(", "import ioshape; ioshape.save("), {}),
    ],
    ids=["replaced", "durable", "large", "ours"],
)
def test_others_are_durable_when_the_call_returns(
    watched: Watched, tmp_path: Path, before: str, save: str, variables: dict[str, str]
) -> None:
    _, calls = watched.run(tmp_path, f"{before}\n{save}", variables)
    assert syncs(calls) == 2  # the file and its directory
    assert calls["syncfs"] == 0
    assert is_ours(tmp_path / "model.pt")


MADE = [
    "torch.ones(3).to_sparse()",
    "torch.nn.Linear(2, 2)",
    "torch.nn.Linear(2, 2).state_dict()",
    "list(range(1000))",
    "{1: {2: (3, [4.0, None, True, b'x', 'y', torch.nn.Parameter(torch.ones(2))])}}",
    "torch.ones(1 << 20)[:2]",
    "torch.ones(3, device='meta')",
    "torch.empty(0)",
]


def test_whatever_it_is_it_is_saved_as_torch_saves_it(watched: Watched, tmp_path: Path) -> None:
    text = f"""
import torch
for number, made in enumerate({MADE}):
    torch.manual_seed(1)
    torch.save(eval(made), f"{{number}}.pt")
"""
    watched.run(tmp_path, text)
    for number, made in enumerate(MADE):
        torch.manual_seed(1)
        torch.save(eval(made), tmp_path / "theirs.pt")
        loaded = torch.load(tmp_path / f"{number}.pt", weights_only=False)
        assert repr(loaded) == repr(torch.load(tmp_path / "theirs.pt", weights_only=False)), made


@pytest.mark.parametrize("call", ["open", "link"])
def test_a_filesystem_without_unnamed_files_gets_them_the_usual_way(
    watched: Watched, call: str, tmp_path: Path
) -> None:
    text = f"""
import os, torch
call = os.{call}
def fail(path, *rest, **named):
    if "src_dir_fd" in named or os.O_TMPFILE in [flags & os.O_TMPFILE for flags in rest[:1]]:
        raise OSError(95, os.strerror(95))
    return call(path, *rest, **named)
os.{call} = fail
torch.save({{"a": torch.ones(3)}}, "model.pt")
"""
    _, calls = watched.run(tmp_path, text)
    assert calls["linkat"] == 0
    assert syncs(calls) == 2
    assert is_ours(tmp_path / "model.pt")


def test_a_sync_that_fails_is_told_and_ends_the_program_nonzero(
    watched: Watched, tmp_path: Path
) -> None:
    text = f"""{SAVE}
import os
def fail(descriptor):
    raise OSError(5, os.strerror(5))
os.fsync = fail
"""
    done, _ = watched.run(tmp_path, text, status=os.EX_IOERR)
    assert done.stderr.count("cannot sync") == 1
    assert str(tmp_path) in done.stderr or '"."' in done.stderr


def test_threads_and_forked_children_save_small_files(watched: Watched, tmp_path: Path) -> None:
    text = """
import os, threading, torch
def save(who):
    for number in range(50):
        torch.save(torch.full((10,), float(number)), f"{who}-{number}.pt")
# A child waits forever for a module that a thread was importing at the fork, and for a C++ static
# of torch that a thread was initialising. So all calls of the threads are made once before.
torch.save(torch.full((10,), 0.0), "main-0.pt")
threads = [threading.Thread(target=save, args=(who,)) for who in range(4)]
for thread in threads:
    thread.start()
child = os.fork()
if not child:
    save("child")
    raise SystemExit
for thread in threads:
    thread.join()
assert os.waitpid(child, 0)[1] == 0
"""
    _, calls = watched.run(tmp_path, text)
    assert calls["linkat"] == 251
    assert calls["syncfs"] + syncs(calls) >= 2  # the parent and the child sync separately
    for path in tmp_path.glob("*.pt"):
        number = float(path.stem.split("-")[1])
        assert torch.equal(torch.load(path, weights_only=True), torch.full((10,), number))


def test_messages_to_closed_streams_land_in_none_of_our_files(
    watched: Watched, tmp_path: Path
) -> None:
    text = """
import os, torch
write = os.write
def write_messages_first(file, content):
    for stream in range(3):
        try:
            write(stream, b"a message")
        except OSError:
            pass
    return write(file, content)
os.write = write_messages_first
torch.save({"a": torch.ones(3)}, "earlier.pt")  # what is opened once is open
os.closerange(0, 3)
torch.save({"a": torch.ones(3)}, "model.pt")
# Its directory is held open until it is synced.
os._exit(10 + sum(os.path.lexists(f"/proc/self/fd/{stream}") for stream in range(3)))
"""
    _, calls = watched.run(tmp_path, text, {"IOSHAPE_TRACE": str(tmp_path / "trace")}, status=10)
    assert calls["linkat"] == 2
    assert torch.equal(torch.load(tmp_path / "model.pt", weights_only=True)["a"], torch.ones(3))
    (trace,) = (tmp_path / "trace").iterdir()
    saves = [json.loads(line) for line in trace.read_text(encoding="utf-8").splitlines()]
    assert [Path(save["path"]).name for save in saves] == ["earlier.pt", "model.pt"]
    assert {save["written_by"] for save in saves} == {"ioshape"}


def test_a_kill_leaves_whole_files_only(watched: Watched, tmp_path: Path) -> None:
    text = """
import os, torch
for number in range(10**6):
    torch.save(torch.full((1000,), float(number)), f"{number}.pt")
    if number == 40:
        import threading, signal
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGKILL)).start()
"""
    watched.run(tmp_path, text, status=-signal.SIGKILL)
    files = list(tmp_path.glob("*.pt"))
    assert len(files) > 40
    for path in files:
        assert torch.load(path, weights_only=True)[0] == float(path.stem)
    assert {path.suffix for path in tmp_path.iterdir()} == {".pt", ".py"}
