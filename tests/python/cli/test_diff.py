# SPDX-License-Identifier: Apache-2.0
"""The command `ioshape diff`: what differs between two checkpoints, and by how much."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ioshape
import pytest
import torch
from click.testing import CliRunner
from command import call, on_terminal, succeed
from ioshape import safetensors
from ioshape._cli.diff import command
from ioshape.dcp import Writer
from torch.distributed.checkpoint import state_dict_saver as dcp

MIB = 1 << 20
Save = Callable[[Any, Path], object]


def diff(*arguments: str | Path, code: int = 1) -> dict[str, Any]:
    """Run the command in this process, because an import of torch takes seconds."""
    done = CliRunner().invoke(command, ["--json", *map(str, arguments)], standalone_mode=False)
    assert done.return_value == code, (done.output, done.exception)
    found: dict[str, Any] = json.loads(done.output)
    return found


def rows(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in found["differences"]}


def state() -> dict[str, Any]:
    torch.manual_seed(1)
    return {
        "big": torch.randn(4 * MIB // 4),
        "half": torch.randn(300, 7).to(torch.bfloat16),
        "none": torch.empty(0, 3),
        "tied": (tensor := torch.randn(1000)),
        "tied too": tensor,
        "column": torch.randn(9, 9)[:, 2:4],
        "step": 7,
    }


@pytest.mark.parametrize("save", [ioshape.save, torch.save])
@pytest.mark.parametrize("options", [[], ["--exact"]])
def test_equal_files_are_equal(save: Save, options: list[str], tmp_path: Path) -> None:
    ioshape.save(state(), tmp_path / "a.pt")
    save(state(), tmp_path / "b.pt")
    found = diff(tmp_path / "a.pt", tmp_path / "b.pt", *options, code=0)
    assert (found["equal"], found["differences"]) == (6, [])


@pytest.mark.parametrize("save", [ioshape.save, torch.save])
@pytest.mark.parametrize("options", [[], ["--exact"]])
def test_a_change_of_one_bit_is_found_in_any_tensor(
    save: Save, options: list[str], tmp_path: Path
) -> None:
    ioshape.save(state(), tmp_path / "a.pt")
    for name in ("big", "half", "tied", "column"):
        changed = state()
        last = changed[name][-1:] if changed[name].dim() == 1 else changed[name][-1:, -1:]
        last.view({2: torch.int16, 4: torch.int32}[last.element_size()]).bitwise_xor_(1)
        save(changed, tmp_path / "b.pt")
        found = rows(diff(tmp_path / "a.pt", tmp_path / "b.pt", *options))
        assert set(found) == ({"tied", "tied too"} if name == "tied" else {name})


def test_checksums_locate_the_change_without_reading_data(tmp_path: Path) -> None:
    ioshape.save(state(), tmp_path / "a.pt")
    changed = state()
    changed["big"][MIB // 4 + 5] += 1
    ioshape.save(changed, tmp_path / "b.pt")
    (record,) = (r for r in ioshape.inspect(tmp_path / "a.pt").records if r.n_bytes == 4 * MIB)
    with (tmp_path / "a.pt").open("r+b") as file:  # A reader would find this damage.
        file.seek(record.file_offset)
        file.write(b"\x55" * 100)
    row = rows(diff(tmp_path / "a.pt", tmp_path / "b.pt"))["big"]
    assert (row["state"], row["changed"], row["relative"]) == ("changed", 0.25, None)
    done = call("diff", "--exact", tmp_path / "a.pt", tmp_path / "b.pt")
    assert done.returncode == 2
    assert "damaged" in done.stderr


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float32,
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.complex64,
        torch.int64,
        torch.uint8,
    ],
)
def test_exact_tells_the_elements_and_the_norm(dtype: torch.dtype, tmp_path: Path) -> None:
    torch.manual_seed(2)
    # Three pieces, so that some are equal.
    count = (10 << 20) // dtype.itemsize
    a = (torch.randn(count) * 50).abs().to(dtype)
    b = a.clone()
    b[: count // 4] = torch.zeros(count // 4).to(dtype)
    ioshape.save({"w": a}, tmp_path / "a.pt")
    ioshape.save({"w": b}, tmp_path / "b.pt")
    row = rows(diff("--exact", tmp_path / "a.pt", tmp_path / "b.pt"))["w"]
    x, y = ((torch.view_as_real(t) if dtype.is_complex else t).double() for t in (a, b))
    assert row["changed"] == pytest.approx(float((x != y).double().mean()))
    assert row["relative"] == pytest.approx(float((x - y).norm() / x.norm()), rel=1e-5)


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_norms_of_extreme_numbers_are_finite(scale: float, tmp_path: Path) -> None:
    ioshape.save({"w": torch.full((1000,), scale)}, tmp_path / "a.pt")
    ioshape.save({"w": torch.full((1000,), 2 * scale)}, tmp_path / "b.pt")
    row = rows(diff("--exact", tmp_path / "a.pt", tmp_path / "b.pt"))["w"]
    assert row["relative"] == pytest.approx(1, rel=1e-5)


def test_norms_of_the_saves_bound_the_difference(tmp_path: Path) -> None:
    """Compare tensors whose norms are 5 and 10: their difference is at least 5, and here 5."""
    a = {"w": torch.tensor([3.0, 4.0]), "turned": torch.tensor([3.0, 4.0]), "zero": torch.zeros(2)}
    b = {"w": torch.tensor([6.0, 8.0]), "turned": torch.tensor([4.0, 3.0]), "zero": torch.ones(2)}
    for state, name in ((a, "a.pt"), (b, "b.pt")):
        state["sick"] = torch.tensor([1.0, float("nan")]) * state["w"]
        state["part"] = torch.cat([state["w"], torch.ones(2)])[:2]
        ioshape.save(state, tmp_path / name)
    found = rows(diff(tmp_path / "a.pt", tmp_path / "b.pt"))
    assert found["w"]["relative_at_least"] == pytest.approx(1, rel=1e-5)
    assert found["w"]["relative"] is None
    assert found["zero"]["relative_at_least"] == "inf"
    assert [found[name]["relative_at_least"] for name in ("turned", "sick", "part")] == [None] * 3
    exact = rows(diff("--exact", tmp_path / "a.pt", tmp_path / "b.pt"))
    assert exact["w"]["relative"] == pytest.approx(1)
    assert exact["w"]["relative_at_least"] is None
    text = call("diff", tmp_path / "a.pt", tmp_path / "b.pt").stdout
    (line,) = (line for line in text.splitlines() if line.startswith("w "))
    assert line.endswith("  at least 1")


def test_equal_infinities_do_not_hide_the_norm(tmp_path: Path) -> None:
    a = torch.tensor([float("inf"), float("nan"), 3.0])
    ioshape.save({"w": a, "zero": torch.zeros(2)}, tmp_path / "a.pt")
    b = torch.tensor([float("inf"), float("nan"), 4.0])
    ioshape.save({"w": b, "zero": torch.ones(2)}, tmp_path / "b.pt")
    found = rows(diff("--exact", tmp_path / "a.pt", tmp_path / "b.pt"))
    assert found["w"]["changed"] == pytest.approx(1 / 3)
    assert found["w"]["relative"] == pytest.approx(1 / 3)  # of the finite number
    assert found["zero"]["relative"] == "inf"  # JSON has no infinity


@pytest.mark.parametrize("options", [[], ["--exact"]])
def test_other_strides_are_compared_by_element(options: list[str], tmp_path: Path) -> None:
    a = torch.randn(700, 900)
    ioshape.save({"w": a}, tmp_path / "a.pt")
    ioshape.save({"w": a.t().contiguous().t()}, tmp_path / "b.pt")
    assert set(rows(diff(tmp_path / "a.pt", tmp_path / "b.pt", *options))) == {"(values)"}
    a[3, 4] += 1
    ioshape.save({"w": a.t().contiguous().t()}, tmp_path / "b.pt")
    found = rows(diff(tmp_path / "a.pt", tmp_path / "b.pt", *options))
    assert found["w"]["changed"] == pytest.approx(1 / a.numel())


def test_tensors_that_are_new_missing_or_of_another_type(tmp_path: Path) -> None:
    ioshape.save({"x": torch.ones(3), "y": torch.ones(3), "z": torch.ones(3)}, tmp_path / "a.pt")
    other = {"x": torch.ones(4), "y": torch.ones(3).double(), "w": torch.ones(3), "lr": 0.1}
    ioshape.save(other, tmp_path / "b.pt")
    found = rows(diff(tmp_path / "a.pt", tmp_path / "b.pt"))
    states = {name: row["state"] for name, row in found.items()}
    assert states == {
        "x": "shape",
        "y": "dtype",
        "z": "only in A",
        "w": "only in B",
        "(values)": "changed",
    }
    assert (found["x"]["a"], found["z"]["b"]) == ({"dtype": "float32", "shape": [3]}, None)


def test_safetensors_with_checksums_are_compared_to_the_byte(tmp_path: Path) -> None:
    tensors = {f"w{i}": torch.randn(300_000) for i in range(4)}  # no tensor fills blocks
    safetensors.save_file(tensors, tmp_path / "a.safetensors")
    tensors["w2"][0] += 1
    safetensors.save_file(tensors, tmp_path / "b.safetensors")
    found = diff(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    assert (found["equal"], set(rows(found))) == (3, {"w2"})
    ioshape.save(tensors, tmp_path / "b.pt")
    found = diff("--exact", tmp_path / "b.safetensors", tmp_path / "b.pt")
    assert (found["equal"], set(rows(found))) == (4, {"(values)"})


def test_the_largest_change_comes_first_and_text_has_a_line_each(tmp_path: Path) -> None:
    names = [f"w{i}" for i in range(4)]
    ioshape.save({name: torch.ones(100) for name in names}, tmp_path / "a.pt")
    other = {name: torch.full((100,), 1 + 0.1 * i) for i, name in enumerate(names)}
    ioshape.save(other, tmp_path / "b.pt")
    done = call("diff", "--exact", tmp_path / "a.pt", tmp_path / "b.pt")
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines[1:4]] == ["w3", "w2", "w1"]
    assert lines[1].split()[-1] == "0.3"
    assert lines[-1] == "1 tensor equal, 3 differences"
    assert succeed(call("diff", tmp_path / "a.pt", tmp_path / "a.pt")) == (
        "4 tensors equal, 0 differences\n"
    )
    code, text = on_terminal("diff", tmp_path / "a.pt", tmp_path / "b.pt", width=120)
    assert code == 1
    assert "\x1b[33mw3" in text


def test_group_checkpoints_are_compared_rank_by_rank(tmp_path: Path) -> None:
    for step in (1, 2):
        ioshape.save_group({"w": torch.ones(1000), "step": step}, tmp_path, step=step)
    first, second = (step.path for step in ioshape.checkpoints(tmp_path))
    assert set(rows(diff(first, second))) == {"rank 0: (values)"}
    assert diff(second, tmp_path, code=0)["equal"] == 1


def test_dcp_checkpoints_are_compared_by_item(tmp_path: Path) -> None:
    for name, value in (("a", 1.0), ("b", 2.0)):
        state = {"w": torch.full((9,), value), "v": torch.ones(5)}
        dcp.save(state, storage_writer=Writer(tmp_path / name), no_dist=True)
    found = diff(tmp_path / "a", tmp_path / "b", "--exact")
    assert (found["equal"], set(rows(found))) == (1, {"w"})
    assert rows(found)["w"]["relative"] == pytest.approx(1)


@pytest.mark.parametrize("content", [None, b"text", b"PK\x05\x06" + bytes(18)])
def test_trouble_ends_with_2(content: bytes | None, tmp_path: Path) -> None:
    ioshape.save(state(), tmp_path / "a.pt")
    if content is not None:
        (tmp_path / "b.pt").write_bytes(content)
    done = call("diff", tmp_path / "a.pt", tmp_path / "b.pt")
    assert (done.returncode, done.stdout) == (2, "")
    assert str(tmp_path / "b.pt") in done.stderr
