# SPDX-License-Identifier: Apache-2.0
"""Test ioshape.dcp: checkpoints of torch.distributed.checkpoint are complete or absent."""

import io
import json
import pickle
from pathlib import Path
from typing import IO, Any, cast

import ioshape
import ioshape.dcp
import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoints import left_clean
from command import call
from dcp_states import (
    Runs,
    Stopped,
    assert_same,
    blank,
    by_stock,
    by_us,
    entries,
    save,
    state,
)
from processes import common_forker, run_program
from torch.distributed.checkpoint._extension import ExtensionRegistry, StreamTransformExtension

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is",
    "ignore:Detected an existing",
    "ignore::pytest.PytestUnhandledThreadExceptionWarning",  # in DCP's threads
)

# ---- Files ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [{}, {"thread_count": 3}, {"single_file_per_rank": False}], ids=str)
def test_stock_dcp_reads_what_we_write(tmp_path: Path, how: dict[str, Any]) -> None:
    writer = save(tmp_path / "a", state(), **how)
    dcp.save(state(), storage_writer=dcp.FileSystemWriter(tmp_path / "stock", **how), no_dist=True)
    assert_same(by_stock(tmp_path / "a", state()), state())
    assert entries(tmp_path / "a") == entries(tmp_path / "stock")
    assert entries(tmp_path) == ["a", "stock"]
    assert {Path(report.path) for report in writer.reports} == set(
        (tmp_path / "a").glob("*.distcp")
    )
    meta = pickle.loads((tmp_path / "a" / ".metadata").read_bytes())
    assert meta.storage_meta.checkpoint_id == tmp_path / "a"


@pytest.mark.parametrize("how", [{}, {"thread_count": 3}, {"single_file_per_rank": False}], ids=str)
def test_we_read_what_stock_dcp_writes(tmp_path: Path, how: dict[str, Any]) -> None:
    dcp.save(state(), storage_writer=dcp.FileSystemWriter(tmp_path, **how), no_dist=True)
    assert_same(by_us(tmp_path, state()), state())


def test_format_utils_of_torch_read_ours(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save  # noqa: PLC0415

    save(tmp_path / "a", {"model": state()["model"]})
    dcp_to_torch_save(tmp_path / "a", tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt")
    assert_same(loaded["model"], state()["model"])


def test_targets_of_another_type_or_form_are_filled(tmp_path: Path) -> None:
    base = torch.arange(60.0).reshape(10, 6)
    save(tmp_path / "a", {"a": base, "b": base})
    loaded = {"a": torch.zeros(10, 6, dtype=torch.float64), "b": torch.zeros(6, 10).t()}
    dcp.load(loaded, storage_reader=ioshape.dcp.Reader(tmp_path / "a"), no_dist=True)
    assert torch.equal(loaded["a"], base.double())
    assert torch.equal(loaded["b"], base)


def test_tensors_are_read_into_those_of_the_state_dict(tmp_path: Path) -> None:
    save(tmp_path / "a", {"large": torch.arange(1 << 20)})
    loaded = {"large": torch.zeros(1 << 20, dtype=torch.int64)}
    before = loaded["large"]
    dcp.load(loaded, storage_reader=ioshape.dcp.Reader(tmp_path / "a"), no_dist=True)
    assert torch.equal(before, torch.arange(1 << 20))


class _Turned(StreamTransformExtension):
    """An extension that inverts every byte."""

    @staticmethod
    def from_descriptor(version: str) -> "_Turned":
        assert version
        return _Turned()

    @staticmethod
    def registry_name() -> str:
        return "test.turned"

    def get_descriptor(self) -> str:
        return f"{self.registry_name()}/1"

    def transform_to(self, output: IO[bytes]) -> IO[bytes]:
        class Out(io.RawIOBase):
            def writable(self) -> bool:
                return True

            def write(self, data: Any) -> int:
                output.write(bytes(255 - byte for byte in bytes(data)))
                return len(data)

        return cast("IO[bytes]", Out())

    def transform_from(self, input: IO[bytes]) -> IO[bytes]:  # noqa: A002 - torch's name
        return io.BytesIO(bytes(255 - byte for byte in input.read()))


def test_transformed_items_are_written_and_read(tmp_path: Path) -> None:
    value = {"a": torch.arange(100), "step": 3}
    save(tmp_path / "a", value, _extensions=[_Turned()])
    registry = ExtensionRegistry()
    registry.register(_Turned)
    for kind in (dcp.FileSystemReader, ioshape.dcp.Reader):
        loaded = blank(value)
        reader = kind(tmp_path / "a", _extension_registry=registry)
        dcp.load(loaded, storage_reader=reader, no_dist=True)
        assert_same(loaded, value)


# ---- Complete or absent -------------------------------------------------------------------------


@pytest.mark.parametrize("made_before", [False, True])
def test_a_save_that_fails_leaves_no_trace(tmp_path: Path, made_before: bool) -> None:
    if made_before:
        (tmp_path / "a").mkdir()
    planner = Stopped(tmp_path)
    writer = ioshape.dcp.Writer(tmp_path / "a")
    with pytest.raises(dcp.CheckpointException):
        dcp.save(state(), storage_writer=writer, planner=planner, no_dist=True)
    assert planner.seen == (["a"] if made_before else [])
    assert entries(tmp_path) == planner.seen
    assert not made_before or entries(tmp_path / "a") == []
    save(tmp_path / "a", state())
    assert_same(by_stock(tmp_path / "a", state()), state())


@pytest.mark.parametrize("threads", [1, 2])
def test_a_checkpoint_is_replaced_or_stays(tmp_path: Path, threads: int) -> None:
    path = tmp_path / "a"
    save(path, state(1), thread_count=threads)
    (path / "config.json").write_text("mine")
    writer = ioshape.dcp.Writer(path, thread_count=threads)
    with pytest.raises(dcp.CheckpointException):  # also if another thread fails
        dcp.save(state(2), storage_writer=writer, planner=Stopped(path), no_dist=True)
    assert_same(by_stock(path, state()), state(1))
    for factor in (2, 3):
        save(path, state(factor), thread_count=threads)
        assert_same(by_stock(path, state()), state(factor))
    assert (path / "config.json").read_text() == "mine"
    assert len(entries(path)) == threads + 2
    assert entries(tmp_path) == ["a"]


def test_a_larger_checkpoint_of_stock_is_replaced_with_all_of_its_files(tmp_path: Path) -> None:
    dcp.save(
        state(1),
        storage_writer=dcp.FileSystemWriter(tmp_path, single_file_per_rank=False),
        no_dist=True,
    )
    save(tmp_path, state(2))
    assert len(entries(tmp_path)) == 2
    assert_same(by_stock(tmp_path, state()), state(2))


def test_who_reads_while_it_is_replaced_gets_nothing_of_the_new_one(tmp_path: Path) -> None:
    save(tmp_path / "a", {"w": torch.ones(1000)})

    class Late(ioshape.dcp.Reader):
        def read_data(self, plan: Any, planner: Any) -> Any:
            save(tmp_path / "a", {"w": torch.ones(1000) * 2})
            return super().read_data(plan, planner)

    with pytest.raises(dcp.CheckpointException):
        dcp.load({"w": torch.zeros(1000)}, storage_reader=Late(tmp_path / "a"), no_dist=True)


def test_a_directory_that_is_there_keeps_its_mode(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir(mode=0o700)
    save(tmp_path / "a", state())
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o700


def test_a_link_to_a_directory_stays_one(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "later").symlink_to("new")
    save(tmp_path / "link", state())
    save(tmp_path / "later", state())
    assert (tmp_path / "link").is_symlink()
    assert entries(tmp_path / "real") == entries(tmp_path / "new") == [".metadata", "__0_0.distcp"]


def test_overwrite_can_be_forbidden(tmp_path: Path) -> None:
    save(tmp_path / "a", state(1))
    with pytest.raises(dcp.CheckpointException, match="already exists"):
        save(tmp_path / "a", state(2), overwrite=False)
    assert_same(by_stock(tmp_path / "a", state()), state(1))


def test_ranks_without_collectives_have_files_of_their_own(tmp_path: Path) -> None:
    for factor in (1, 2):
        for rank in (0, 1):
            writer = ioshape.dcp.Writer(tmp_path / "a")
            planner = dcp.DefaultSavePlanner()
            value = state(factor + rank)
            planner.set_up_planner(value, is_coordinator=rank == 0)
            writer.set_up_storage_writer(rank == 0, rank=rank, use_collectives=False)
            plans, metadata = planner.create_global_plan([planner.create_local_plan()])
            plan = writer.prepare_global_plan([writer.prepare_local_plan(plans[0])])[0]
            results = writer.write_data(planner.finish_plan(plan), planner).wait()
            writer.finish(metadata, [results])
    names = entries(tmp_path / "a")
    assert [name.split("_")[2][:1] for name in names if name.endswith("distcp")] == ["0", "1"]
    assert [name for name in names if not name.endswith("distcp")] == [
        "__0.metadata",
        "__1.metadata",
    ]
    for reader in (dcp.FileSystemReader(tmp_path / "a"), ioshape.dcp.Reader(tmp_path / "a")):
        loaded = reader.read_metadata(rank=1)
        assert set(loaded.state_dict_metadata) >= {"model.weight", "large"}


# ---- patch() -------------------------------------------------------------------------------------


def _own_subclass() -> Any:
    """Define a subclass, as code that is imported under patch() does."""

    class Special(dcp.FileSystemWriter):
        def write_data(self, plan: Any, planner: Any) -> Any:
            return super().write_data(plan, planner)

    return Special


def test_patch_puts_ours_into_code_that_gives_a_path(tmp_path: Path) -> None:
    stock = dcp.FileSystemWriter
    with ioshape.patched(dcp=True):
        assert isinstance(dcp.FileSystemWriter(tmp_path / "x"), ioshape.dcp.Writer)
        assert isinstance(ioshape.dcp.Writer(tmp_path / "x"), dcp.FileSystemWriter)
        assert issubclass(ioshape.dcp.Writer, dcp.FileSystemWriter)
        assert dcp.FileSystemWriter.validate_checkpoint_id(tmp_path / "x")
        assert isinstance(stock(tmp_path / "x"), dcp.FileSystemWriter)
        special = _own_subclass()(tmp_path / "x")
        assert isinstance(special, stock)
        assert not isinstance(special, ioshape.dcp.Writer)
        dcp.save(state(2), storage_writer=special, no_dist=True)
        planner = Stopped(tmp_path)
        with pytest.raises(dcp.CheckpointException):
            dcp.save(state(), checkpoint_id=tmp_path / "a", planner=planner, no_dist=True)
        assert planner.seen == ["x"]
        dcp.save(state(), checkpoint_id=tmp_path / "a", no_dist=True)
        loaded = blank(state())
        dcp.load(loaded, checkpoint_id=tmp_path / "a", no_dist=True)
        assert_same(loaded, state())
        (tmp_path / "a" / ".metadata").write_bytes(pickle.dumps(Runs(tmp_path / "ran")))
        with pytest.raises(dcp.CheckpointException):
            dcp.load(loaded, checkpoint_id=tmp_path / "a", no_dist=True)
    assert dcp.FileSystemWriter is stock
    assert type(dcp.FileSystemWriter(tmp_path / "x")) is stock
    assert not (tmp_path / "ran").exists()


def test_the_trace_has_the_files_of_a_checkpoint_and_not_its_items(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("IOSHAPE_TRACE", str(tmp_path / "trace"))
    with ioshape.patched(dcp=True):
        dcp.save(state(), checkpoint_id=tmp_path / "a", no_dist=True)
    lines = [
        json.loads(line)
        for file in (tmp_path / "trace").iterdir()
        for line in file.read_text().splitlines()
    ]
    names = [str(tmp_path / "a" / name) for name in ("__0_0.distcp", ".metadata")]
    # Objects that are not tensors are pickled into memory by DCP's planner first.
    assert [line["path"] for line in lines if line["path"]] == names


def test_a_writer_of_a_patched_program_can_be_pickled(tmp_path: Path) -> None:
    with ioshape.patched(dcp=True):
        made = dcp.FileSystemWriter(tmp_path / "a")
        made.prepare_global_plan([])  # the writer has begun a save
        writer = pickle.loads(pickle.dumps(made))
    made.reset()
    dcp.save(state(), storage_writer=writer, no_dist=True)
    assert_same(by_stock(tmp_path / "a", state()), state())


_SCRIPT = """
{imports}
import torch
import torch.distributed.checkpoint as dcp

state = {{"w": torch.ones(1000)}}
dcp.save(state, checkpoint_id="a", no_dist=True)
dcp.load(state, checkpoint_id="a", no_dist=True)
print(type(dcp.FileSystemWriter("b")).__name__, type(dcp.FileSystemReader("b")).__name__)
"""


@pytest.mark.slow
@pytest.mark.parametrize("imports", ["", "import ioshape.dcp"])
def test_a_script_under_ioshape_run_saves_through_us(tmp_path: Path, imports: str) -> None:
    script = _SCRIPT.format(imports=imports)
    done = run_program(tmp_path, script, forker=common_forker(under_run=True))
    assert "ioshape:" not in done.stderr
    assert done.stdout.split() == ["Writer", "Reader"]
    assert entries(tmp_path / "a") == [".metadata", "__0_0.distcp"]


# ---- Examined saves ------------------------------------------------------------------------------


def _trained() -> dict[str, Any]:
    torch.manual_seed(1)
    model = torch.nn.Linear(100, 100)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(3, 100)).sum().backward()
    optimizer.step()
    return {"model": model.state_dict(), "optim": optimizer.state_dict(), "step": 1}


def _save_examined(state: dict[str, Any], path: Path, **options: Any) -> tuple[str, ...]:
    """Save a checkpoint, and return its alarms."""
    writer = ioshape.dcp.Writer(path, **options)
    dcp.save(state, storage_writer=writer, no_dist=True)
    (alarms,) = {report.alarms for report in writer.reports}
    return alarms


def _train(state: dict[str, Any]) -> None:
    for name in state["model"]:
        state["model"][name] += 1
    for moments in state["optim"]["state"].values():
        moments["exp_avg"] += 1
        moments["exp_avg_sq"] += 1
    state["step"] += 1


def _restart() -> None:
    ioshape.configure(examine="warn")  # the next save has a new context, which remembers nothing


def test_alarms_name_items_and_the_checkpoint_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = _trained()
    assert _save_examined(state, tmp_path / "step-1") == ()
    state["model"]["weight"] += 1
    for moments in state["optim"]["state"].values():
        moments["exp_avg"] += 1
        moments["exp_avg_sq"] += 1
    assert _save_examined(state, tmp_path / "step-2") == ()
    state["model"]["weight"] += 1
    state["model"]["weight"][3] = float("nan")
    assert _save_examined(state, tmp_path / "step-3") == ("nonfinite", "unchanged")
    assert 'tensor "model.weight" has 100 NaN' in caplog.text
    assert f'in "{tmp_path}/step-2"' in caplog.text
    assert "all tensors of the optimizer" in caplog.text


def test_a_failing_rule_leaves_no_checkpoint(tmp_path: Path) -> None:
    state = _trained()
    with left_clean():
        ioshape.configure(examine="nonfinite=fail")
        _save_examined(state, tmp_path / "step-1")
        state["model"]["bias"][3] = float("inf")
        with pytest.raises(dcp.CheckpointException, match=r'"model\.bias" has 0 NaN and 1'):
            _save_examined(state, tmp_path / "step-2")
    assert [one.name for one in tmp_path.iterdir()] == ["step-1"]


def test_items_have_statistics_for_inspect_and_diff(tmp_path: Path) -> None:
    for name, factor in (("a", 1.0), ("b", 3.0)):
        state = {"w": torch.tensor([3.0, 4.0]) * factor, "step": 7}
        _save_examined(state, tmp_path / name)
    (found,) = json.loads(call("inspect", "--stats", "--json", tmp_path / "a").stdout)
    by_name = {item["name"]: item["statistics"] for item in found["items"]}
    assert by_name["w"]["sum_squares"] == 25
    assert by_name["step"] is None
    assert "float32" in call("inspect", "--stats", tmp_path / "a").stdout
    (row,) = json.loads(call("diff", "--json", tmp_path / "a", tmp_path / "b").stdout)[
        "differences"
    ]
    assert row["relative_at_least"] == pytest.approx(2, rel=1e-5)
    loaded: dict[str, Any] = {"w": torch.zeros(2), "step": 0}
    dcp.load(loaded, checkpoint_id=tmp_path / "b", no_dist=True)
    assert loaded["w"].tolist() == [9, 12]


@pytest.mark.parametrize("how", [{"thread_count": 3}, {"single_file_per_rank": False}], ids=str)
def test_the_files_of_a_rank_are_judged_together(tmp_path: Path, how: dict[str, Any]) -> None:
    state = _trained()
    for number in range(3):
        assert _save_examined(state, tmp_path / f"step-{number}", **how) == ()
        _train(state)
    state["optim"]["state"][0]["exp_avg"] += torch.inf
    assert _save_examined(state, tmp_path / "step-3", **how) == ("nonfinite",)
    assert _save_examined(state, tmp_path / "step-4", **how) == ("nonfinite", "unchanged")


def test_a_restarted_job_compares_with_what_it_has_loaded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = _trained()
    with left_clean():
        _save_examined(state, tmp_path / "step-1")
        _restart()
        dcp.load(state, storage_reader=ioshape.dcp.Reader(tmp_path / "step-1"), no_dist=True)
        assert _save_examined(state, tmp_path / "step-1") == ()  # an evaluation
        assert _save_examined(state, tmp_path / "step-2") == ("unchanged",)
        assert f'are identical to those of "{tmp_path}/step-1"' in caplog.text
        _restart()
        dcp.load(state, storage_reader=ioshape.dcp.Reader(tmp_path / "step-1"), no_dist=True)
        _train(state)
        state["model"]["bias"][7] = torch.nan
        assert _save_examined(state, tmp_path / "step-2") == ("nonfinite",)
        assert f'has 1 NaN and 0 infinities, and had none in "{tmp_path}/step-1"' in caplog.text


def test_an_alarm_stays_after_a_restart(tmp_path: Path) -> None:
    state = _trained()
    state["model"]["mask"] = torch.full((100,), -torch.inf)  # as it should be
    with left_clean():
        _save_examined(state, tmp_path / "step-1")
        for number, repaired in ((2, False), (3, False), (4, True)):
            _train(state)
            state["model"]["weight"][3] = 1 if repaired else torch.nan
            expected = () if repaired else ("nonfinite",)
            assert _save_examined(state, tmp_path / f"step-{number}") == expected
            _restart()
            reader = ioshape.dcp.Reader(tmp_path / f"step-{number}")
            dcp.load(state, storage_reader=reader, no_dist=True)


def test_the_newest_healthy_checkpoint_is_loaded(tmp_path: Path) -> None:
    state = _trained()
    for number in range(4):
        if number < 3:
            _train(state)
        if number == 2:
            state["model"]["bias"][0] = torch.nan
        _save_examined(state, tmp_path / f"step-{number}")
    loaded = _trained()
    with pytest.warns(ioshape.FallbackWarning) as warnings:
        path = ioshape.dcp.load_latest(loaded, tmp_path, healthy=True, no_dist=True)
    assert (path, loaded["step"]) == (f"{tmp_path}/step-1", 3)
    text = "".join(str(warning.message) for warning in warnings)
    assert f'"{tmp_path}/step-3" looked wrong when it was saved (nonfinite, unchanged)' in text
    assert f'"{tmp_path}/step-2" looked wrong when it was saved (nonfinite)' in text
    assert ioshape.dcp.load_latest(loaded, tmp_path, no_dist=True) == f"{tmp_path}/step-3"
    assert by_stock(tmp_path / "step-2", state)["model"]["bias"][:2].isnan().tolist() == [
        True,
        False,
    ]
    (found,) = json.loads(call("inspect", "--stats", "--json", tmp_path / "step-2").stdout)
    alarms = {item["name"]: (item["statistics"] or {}).get("alarms") for item in found["items"]}
    assert alarms["model.bias"] == ["nonfinite"]
    assert alarms["model.weight"] == []


def test_a_failing_rule_for_all_tensors_leaves_no_checkpoint(tmp_path: Path) -> None:
    state = _trained()
    with left_clean():
        ioshape.configure(examine="unchanged=fail")
        _save_examined(state, tmp_path / "step-1")
        with pytest.raises(dcp.CheckpointException, match="save what training updates"):
            _save_examined(state, tmp_path / "step-2")
    assert [one.name for one in tmp_path.iterdir()] == ["step-1"]


@pytest.mark.parametrize("alarms", [{"nonfinite": "w"}, {"nonfinite": [1]}, []], ids=str)
def test_alarms_of_a_wrong_type_are_refused(tmp_path: Path, alarms: Any) -> None:
    save(tmp_path / "step-1", state())
    path = tmp_path / "step-1" / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    metadata.ioshape_alarms = alarms
    path.write_bytes(pickle.dumps(metadata))
    with pytest.raises(ioshape.errors.FormatError, match="it has alarms that are not valid"):
        ioshape.dcp.Reader(tmp_path / "step-1").read_metadata()
    with pytest.raises(
        ioshape.errors.NoUsableCheckpointError, match="it has alarms that are not valid"
    ):
        ioshape.dcp.load_latest(state(), tmp_path, healthy=True, no_dist=True)
