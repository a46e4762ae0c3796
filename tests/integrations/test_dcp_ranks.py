# SPDX-License-Identifier: Apache-2.0
"""Test ioshape.dcp with background saves, and on several ranks."""

import fcntl
import gc
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import dcp_ranks
import ioshape
import ioshape.dcp
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from dcp_states import (
    assert_same,
    by_stock,
    entries,
    save,
    state,
)
from ioshape._integrations.dcp import staging
from processes import TIMEOUT_S, run_program

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is",
    "ignore:Detected an existing",
    "ignore::pytest.PytestUnhandledThreadExceptionWarning",  # in DCP's threads
)

RANKS = pytest.mark.skipif(
    not dist.is_available() or not dist.is_gloo_available(), reason="this torch has no gloo"
)


# ---- Background saves ---------------------------------------------------------------------------


def test_async_save_takes_the_state_as_it_was(tmp_path: Path) -> None:
    value = state(1)
    writer = ioshape.dcp.Writer(tmp_path / "a", cache_staged_state_dict=False)
    future: Any = dcp.async_save(value, storage_writer=writer, no_dist=True)
    value["large"].fill_(9)
    future.result()
    assert_same(by_stock(tmp_path / "a", state()), state(1))


@pytest.mark.parametrize("length", [1 << 18, 5])
def test_async_save_takes_conjugates_for_what_they_are(length: int, tmp_path: Path) -> None:
    numbers = torch.complex(torch.arange(float(length)), torch.ones(length))
    value = {"a": numbers.conj(), "as it is": numbers, "n": torch._neg_view(torch.ones(length * 2))}
    writer = ioshape.dcp.Writer(tmp_path / "a")
    assert [one.is_conj() for one in writer.stage(value).values()] == [True, False, False]
    future: Any = dcp.async_save(value, storage_writer=writer, no_dist=True)
    future.result()
    like = {name: one.resolve_conj().resolve_neg() for name, one in value.items()}
    assert_same(by_stock(tmp_path / "a", like), like)


def test_saves_to_one_path_at_the_same_time_leave_one_of_them(tmp_path: Path) -> None:
    threads = [
        threading.Thread(target=save, args=(tmp_path / "a", state(factor))) for factor in (1, 2, 3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    loaded = by_stock(tmp_path / "a", state())
    assert_same(loaded, state(loaded["step"] // 100))
    assert len(entries(tmp_path / "a")) == 2


def test_a_save_waits_for_another_that_takes_its_place(tmp_path: Path) -> None:
    save(tmp_path, state(1))
    fd = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    thread = threading.Thread(target=save, args=(tmp_path, state(2)))
    thread.start()
    thread.join(1)
    assert thread.is_alive()
    assert_same(by_stock(tmp_path, state()), state(1))
    os.close(fd)
    thread.join()
    assert_same(by_stock(tmp_path, state()), state(2))


_PROCESS = """
import sys, torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
import ioshape.dcp
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

if __name__ == "__main__":
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/store", rank=0, world_size=1)
    writer = ioshape.dcp.Writer(sys.argv[1] + "/a")
    for factor in (1, 2):
        state = {"w": torch.ones(1 << 20) * factor}
        dcp.async_save(
            state, storage_writer=writer, async_checkpointer_type=AsyncCheckpointerType.PROCESS
        ).result()
"""


@RANKS
@pytest.mark.slow
def test_async_save_in_a_process_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(_PROCESS)
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "RANK": "0", "WORLD_SIZE": "1"}
    done = subprocess.run(
        [sys.executable, tmp_path / "program.py", tmp_path],
        env={**environment, "MASTER_ADDR": "127.0.0.1", "LOCAL_RANK": "0"},
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    like = {"w": torch.ones(1 << 20)}
    assert torch.equal(by_stock(tmp_path / "a", like)["w"], like["w"] * 2)


# ---- Ranks ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """Save with four ranks, by ioshape and by stock DCP."""
    folder = tmp_path_factory.mktemp("ranks")
    return folder, dcp_ranks.run("save", folder, 4)


@RANKS
@pytest.mark.slow
def test_each_rank_writes_one_file_and_a_rank_that_fails_changes_nothing(saved: Any) -> None:
    folder, told = saved
    for rank, outcomes in enumerate(told):
        assert outcomes["paths"] == [str(folder / "ours" / f"__{rank}_0.distcp")]
        assert outcomes["failure of replaced"] == outcomes["failure of never"] == [3]
        assert outcomes.get("failure of changed", [3]) == [3]
    directories = [path for path in folder.iterdir() if path.is_dir()]
    assert sorted(path.name for path in directories) == ["async", "ours", "replaced", "stock"]
    for path in directories:
        assert len(entries(path)) == 5


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """Save with four ranks of two nodes, with one file for each node."""
    folder = tmp_path_factory.mktemp("nodes")
    return folder, dcp_ranks.run("save", folder, 4, nodes=2)


@RANKS
@pytest.mark.slow
def test_the_ranks_of_a_node_write_one_file(shared: Any) -> None:
    folder, told = shared
    for rank, outcomes in enumerate(told):
        assert outcomes["paths"][-1] == str(folder / "ours" / f"__{rank // 2 * 2}_0.distcp")
        assert outcomes["failure of replaced"] == outcomes["failure of never"] == [3]
    for name in ("ours", "replaced", "async"):
        # There are .metadata, a file for each node, and one item that is too large for its rank's
        # part.
        assert len(entries(folder / name)) == 4, entries(folder / name)
    assert len(entries(folder / "stock")) == 5


@RANKS
@pytest.mark.slow
def test_files_of_nodes_are_loaded_by_stock_and_by_us(shared: Any) -> None:
    folder, told = shared
    for outcomes in dcp_ranks.run("load", folder, 2):
        for loaded in outcomes.values():
            assert_same(loaded, told[0]["state"])
    for name in ("ours", "replaced", "async"):
        ioshape._group.dcp_contents.verify(str(folder / name))


@RANKS
@pytest.mark.slow
@pytest.mark.parametrize("size", [2, pytest.param(8, marks=pytest.mark.long)])
def test_another_number_of_ranks_loads_it_by_stock_and_by_us(saved: Any, size: int) -> None:
    folder, told = saved
    for outcomes in dcp_ranks.run("load", folder, size):
        assert len(outcomes) == 5
        for loaded in outcomes.values():
            assert_same(loaded, told[0]["state"])


@RANKS
@pytest.mark.slow
def test_tensors_stand_still_only_if_those_of_all_ranks_do(tmp_path: Path) -> None:
    told = dcp_ranks.run("examine", tmp_path, 2)
    for outcomes in told:
        for number in (1, 2, 5):
            assert outcomes[f"alarms of {number}"] == [()]
        assert outcomes["path"] == f"{tmp_path}/step-2"
        assert outcomes["loaded"] == 1 << 19
    assert told[0]["alarms of 3"] == [("unchanged",)]
    assert told[1]["alarms of 4"] == [("nonfinite",)]
    for name in ("step-1", "step-2", "step-3"):
        assert all(path.stat().st_size > 1 << 21 for path in (tmp_path / name).glob("*.distcp"))


# ---- Memory for copies --------------------------------------------------------------------------


def kept() -> list[int]:
    """Return the lengths of free memory."""
    return sorted(size for size, free in staging._free.items() for _ in free)


@pytest.fixture
def _nothing_kept() -> None:
    gc.collect()
    staging._free.clear()


@pytest.mark.usefixtures("_nothing_kept")
def test_a_copy_lies_in_the_memory_of_the_copy_before(tmp_path: Path) -> None:
    value = {"a": torch.ones(1 << 20), "b": torch.ones(2 << 20), "small": torch.ones(3)}
    writer = ioshape.dcp.Writer(tmp_path / "a")
    places = set()
    for factor in (1, 2):
        copied = writer.stage({key: tensor * factor for key, tensor in value.items()})
        assert torch.equal(copied["b"], value["b"] * factor)
        assert kept() == []
        places.add(copied["b"].data_ptr())
        del copied
        assert kept() == [4 << 20, 8 << 20]
    assert len(places) == 1


@pytest.mark.usefixtures("_nothing_kept")
def test_a_copy_that_somebody_holds_stays_as_it_is(tmp_path: Path) -> None:
    writer = ioshape.dcp.Writer(tmp_path / "a")
    copies = [writer.stage({"a": torch.full((1 << 20,), factor)}) for factor in range(3)]
    for factor, copied in enumerate(copies):
        assert bool((copied["a"] == factor).all())
    tensor = copies[0]["a"][5:]
    del copies, copied
    gc.collect()
    assert len(kept()) == 2
    assert bool((tensor == 0).all())


@pytest.mark.usefixtures("_nothing_kept")
def test_memory_that_later_copies_have_no_use_for_is_let_go(tmp_path: Path) -> None:
    writer = ioshape.dcp.Writer(tmp_path / "a")
    writer.stage({"a": torch.ones(1 << 20)})
    for _ in range(4):
        writer.stage({"b": torch.ones(2 << 20)})
    assert kept() == [8 << 20]


@pytest.mark.slow
@pytest.mark.skipif(
    not hasattr(dcp.state_dict_saver, "DefaultStager"), reason="this torch copies otherwise"
)
@pytest.mark.usefixtures("_nothing_kept")
def test_with_a_path_alone_a_patched_program_copies_to_kept_memory(tmp_path: Path) -> None:
    def save(name: str) -> None:
        value = {"a": torch.ones(1 << 20)}
        future: Any = dcp.async_save(value, checkpoint_id=tmp_path / name, no_dist=True)
        value["a"].fill_(9)
        future.result()
        assert_same(by_stock(tmp_path / name, value), {"a": torch.ones(1 << 20)})
        del future
        gc.collect()

    saver: Any = dcp.state_dict_saver
    theirs = saver.DefaultStager
    with ioshape.patched(dcp=True), ioshape.patched(dcp=True):
        save("ours")
        assert kept() == [4 << 20]
        save("again")
        assert kept() == [4 << 20]
    assert saver.DefaultStager is theirs
    staging._free.clear()
    save("theirs")
    assert kept() == []


def test_what_dcp_is_told_to_keep_dcp_keeps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = dcp.FileSystemWriter
    monkeypatch.setattr(own, "stage", lambda _self, state_dict: ("theirs", state_dict))
    writer = ioshape.dcp.Writer(tmp_path / "a", cache_staged_state_dict=True)
    assert writer.stage({})[0] == "theirs"
    # This simulates a torch with another stager.
    monkeypatch.setattr(staging, "_CAN_STAGE", False)
    assert ioshape.dcp.Writer(tmp_path / "a").stage({})[0] == "theirs"


# ---- Page cache or direct reads -----------------------------------------------------------------


_READ_ONCE = """
import ctypes, mmap, os, sys
from pathlib import Path
import torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
import ioshape.dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

libc = ctypes.CDLL(None)
folder, other = sys.argv[1], os.fork()
rank = 0 if other else 1
os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
mesh = init_device_mesh("cpu", (2,))

def there(path):
    dist.barrier()
    count = 0
    for file in Path(path).glob("*.distcp"):
        n_bytes = file.stat().st_size
        if not n_bytes:
            continue
        pages = (ctypes.c_ubyte * -(-n_bytes // mmap.PAGESIZE))()
        with file.open("rb") as opened:
            mapped = mmap.mmap(opened.fileno(), n_bytes, mmap.MAP_PRIVATE)  # looks, reads nothing
            address = ctypes.addressof(ctypes.c_ubyte.from_buffer(mapped))
            assert not libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(n_bytes), pages)
        count += sum(page & 1 for page in pages) * mmap.PAGESIZE
    dist.barrier()
    return count >> 20

found = []
for wanted, placement in ("own", [Shard(0)]), ("by both", [Replicate()]):
    path = f"{folder}/{wanted}"
    state = {"w": distribute_tensor(torch.ones(16 << 20, dtype=torch.uint8), mesh, placement)}
    dcp.save(state, storage_writer=ioshape.dcp.Writer(path))
    for file in Path(path).iterdir():
        with file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    found.append(there(path))
    dcp.load(state, storage_reader=ioshape.dcp.Reader(path))
    found.append(there(path))
if not rank:
    Path(folder, "there").write_text(" ".join(map(str, found)))
dist.destroy_process_group()
if not other:
    os._exit(0)  # the end of Python aborts if a thread of gloo still drops an object of Python
assert not os.waitpid(other, 0)[1]
"""


@RANKS
@pytest.mark.slow
def test_only_what_several_ranks_want_comes_through_the_page_cache(tmp_path: Path) -> None:
    """Compare the MiB in the page cache."""
    variables = {"GLOO_SOCKET_IFNAME": "lo", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    sizes = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    run_program(tmp_path, _READ_ONCE, tmp_path, variables={**variables, **sizes})
    before, own, before_both, both = map(int, (tmp_path / "there").read_text().split())
    if before or before_both:
        pytest.skip("the folder for temporary files is on no disk")
    # The ends of two files of 8 MiB always go through the page cache.
    assert own <= 4
    assert both >= 16
