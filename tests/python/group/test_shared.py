# SPDX-License-Identifier: Apache-2.0
"""load(shared=True): ranks of several nodes read a file once and send its bytes to each other."""

from pathlib import Path
from typing import Any

import ioshape
import pytest
import ranks
import shared_load
import torch
from records import flip, offset_of
from shared_load import is_right, state

NODES = [{"IOSHAPE_TEST_NODE": str(rank // 2), "LOCAL_WORLD_SIZE": "2"} for rank in range(4)]

ON_ONE_NODE = [{"IOSHAPE_TEST_NODE": "0"}] * 4

# ---- Several ranks -------------------------------------------------------------------------------


def run(stage: str, folder: Path, nodes: Any = NODES) -> list[Any]:
    return ranks.run(shared_load.__file__, stage, folder, 4, nodes)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    ioshape.save(state(), tmp_path / "x.pt")
    return tmp_path


@pytest.fixture(params=["ioshape", "torch"])
def either(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Return the folder of a file with a checksum for each MiB of a record, or for each record."""
    save = ioshape.save if request.param == "ioshape" else torch.save
    save(state(), tmp_path / "x.pt")
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["load_new", "load_into"])
def test_each_byte_is_read_by_one_rank(either: Path, stage: str) -> None:
    found = run(stage, either)
    assert all(one[0] for one in found)
    if stage == "load_new":
        assert all(one[2] for one in found)
    read = [one[1] for one in found]
    file_bytes = (either / "x.pt").stat().st_size
    assert sum(read) < 1.1 * file_bytes
    assert max(read) < file_bytes / 2


@pytest.mark.slow
def test_on_one_node_the_page_cache_does_it(folder: Path) -> None:
    found = run("load_new", folder, ON_ONE_NODE)
    file_bytes = (folder / "x.pt").stat().st_size
    assert all(one[0] and one[1] > 0.9 * file_bytes for one in found)


@pytest.mark.long
def test_devices_get_each_byte_from_one_rank_also_on_one_node(either: Path) -> None:
    found = run("load_to_devices", either, ON_ONE_NODE)
    assert all(one[0] for one in found)
    # The bytes of the tensor with a view go to the CPU as well.
    n_bytes = (either / "x.pt").stat().st_size + state()["large"].nbytes
    read = [one[1] for one in found]
    assert sum(read) < 1.1 * n_bytes
    assert max(read) < n_bytes / 2
    assert all(one[2] for one in found)
    assert all(one[3] <= 48 << 20 for one in found)


@pytest.mark.long
def test_damage_is_found_by_all_devices(either: Path) -> None:
    flip(either / "x.pt", offset_of(either / "x.pt", "data/0") + 10_000_000)
    assert run("load_damaged_to_devices", either) == [("data/0", True, True)] * 4


@pytest.mark.slow
def test_ranks_of_which_one_has_no_way_to_the_others_load_alone(folder: Path) -> None:
    found = run("load_with_one_device_apart", folder, ON_ONE_NODE)
    file_bytes = (folder / "x.pt").stat().st_size
    assert all(one[0] and one[1] > 0.9 * file_bytes and one[2] for one in found)


@pytest.mark.slow
def test_with_devices_a_rank_that_cannot_read_says_so_and_the_others_go_on(either: Path) -> None:
    found = run("load_to_devices_with_an_end", either)
    assert found == [(True, True), (True, True), ("no such luck", True), (True, True)]


@pytest.mark.slow
def test_with_devices_a_rank_that_fails_does_not_stop_the_others(folder: Path) -> None:
    found = run("load_to_devices_with_a_failure", folder)
    assert found == [(True, True), ("enough", True), (True, True), (True, True)]


@pytest.mark.slow
def test_with_devices_who_is_killed_is_not_waited_for_long(folder: Path) -> None:
    stage = "load_to_devices_with_a_death"
    found = ranks.run(shared_load.__file__, stage, folder, 4, NODES, killed=[2])
    assert found == [True, True, "killed", True]


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU has no other")
def test_gpus_get_each_byte_from_one_rank(either: Path) -> None:
    size = min(4, torch.cuda.device_count())
    found = ranks.run(shared_load.__file__, "load_to_gpus", either, size, ON_ONE_NODE[:size])
    assert all(one[0] for one in found)
    assert sum(one[1] for one in found) < 1.1 * (either / "x.pt").stat().st_size


@pytest.mark.slow
def test_damage_is_found_by_all(either: Path) -> None:
    flip(either / "x.pt", offset_of(either / "x.pt", "data/0") + 10_000_000)
    assert run("load_damaged", either) == ["data/0"] * 4


@pytest.mark.slow
def test_who_wants_something_else_does_not_hold_up_the_others(folder: Path) -> None:
    other = state()
    other["more"] = torch.ones(5)
    ioshape.save(other, folder / "y.pt")
    found = run("load_what_differs", folder)
    assert [one[0] for one in found] == [True, True, False, True]
    assert [one[1] for one in found] == [True, True, True, "none"]


@pytest.mark.slow
def test_a_rank_that_cannot_read_says_so_and_the_others_go_on(either: Path) -> None:
    assert run("load_with_an_end", either) == [True, True, "no such luck", True]


@pytest.mark.slow
def test_who_is_killed_is_not_waited_for_long(folder: Path) -> None:
    found = ranks.run(shared_load.__file__, "load_with_a_death", folder, 4, NODES, killed=[2])
    assert found == [True, True, "killed", True]


def test_one_process_needs_nobody(folder: Path) -> None:
    assert is_right(ioshape.load(folder / "x.pt", shared=True))


def test_ranks_that_cannot_be_reached_are_not_needed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(_timeout_s: float) -> None:
        raise RuntimeError("no route to host")

    monkeypatch.setattr("ioshape._core.comm.of_torch", failing)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert is_right(ioshape.load(folder / "x.pt", shared=True))
    assert "no route to host" in caplog.text


def test_ranks_that_cannot_send_are_told_so(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.raises(ValueError, match="init_process_group"):
        ioshape.load(folder / "x.pt", shared=True)
