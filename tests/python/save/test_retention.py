# SPDX-License-Identifier: Apache-2.0
"""keep_last of save() and save_async(), and `ioshape prune` for files: what is removed and kept."""

import errno
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ioshape
import pytest
from checkpoints import Gate, checkpoint, names_in, number_in, wait_until
from command import call, fail, succeed
from ioshape._core.names import numbered
from ioshape._save import retention
from processes import run_program
from records import flip


def age(folder: Path, *names: str) -> None:
    """Set the modification times of files, in this order, to long ago."""
    for number, name in enumerate(names):
        os.utime(folder / name, (1_600_000_000 + number, 1_600_000_000 + number))


def saved(folder: Path, *names: str) -> None:
    folder.mkdir(exist_ok=True)
    for number, name in enumerate(names):
        ioshape.save(checkpoint(number), folder / name)
    age(folder, *names)


STEPS = tuple(f"step-{step}.pt" for step in (8, 9, 10, 11))


# ---- Families of files ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("step-100.pt", ("step-", 100, ".pt")),
        ("step-000100.pt", ("step-", 100, ".pt")),
        ("epoch=3-step=1200.ckpt", ("epoch=3-step=", 1200, ".ckpt")),
        ("7", ("", 7, "")),
        ("last.pt", None),
        (".step-100.pt", None),
        ("step-١٠.pt", None),  # noqa: RUF001 - digits, and none of ours
    ],
)
def test_the_last_number_of_a_name_is_what_differs(name: str, parts: Any) -> None:
    assert numbered(name) == parts


@pytest.mark.parametrize(
    "name", ["last.pt", "step-100-rank-3.pt", "step-100.rank3.pt", "model-00001-of-00008.pt"]
)
def test_names_that_count_no_checkpoints_are_refused_before_the_save(
    tmp_path: Path, name: str
) -> None:
    """Check names of shards: with keep_last=1 only the newest shard of a checkpoint would stay."""
    for save in (ioshape.save, ioshape.save_async):
        with pytest.raises(ValueError, match="cannot find older checkpoints"):
            save(checkpoint(1), tmp_path / name, keep_last=1)
    assert not names_in(tmp_path)
    saved(tmp_path, name)
    assert name in fail(call("prune", "--keep-last", "1", "--yes", tmp_path / f"{name[:-1]}*"))


@pytest.mark.parametrize("wrong", [0, -1, True, 1.5])
def test_at_least_one_stays(tmp_path: Path, wrong: Any) -> None:
    with pytest.raises(ValueError, match="keep_last is"):
        ioshape.save(checkpoint(1), tmp_path / "step-1.pt", keep_last=wrong)
    assert not names_in(tmp_path)


def test_file_objects_have_no_family(tmp_path: Path) -> None:
    with (tmp_path / "step-1.pt").open("wb") as file, pytest.raises(ValueError, match="a path"):
        ioshape.save({}, file, keep_last=1)


# ---- Removed files -------------------------------------------------------------------------------


def wait_for(folder: Path, names: list[str]) -> None:
    wait_until(lambda: names_in(folder) == sorted(names), f"{names}")


@pytest.mark.parametrize("save", [ioshape.save, ioshape.save_async])
def test_the_newest_of_a_family_stay(tmp_path: Path, save: Callable[..., Any]) -> None:
    saved(tmp_path, "step-8.pt", "step-9.pt", "step-10.pt")
    for step in (11, 12):
        handle = save(checkpoint(step), tmp_path / f"step-{step}.pt", keep_last=3)
        if isinstance(handle, ioshape.SaveHandle):
            handle.wait()
        wait_for(tmp_path, [f"step-{one}.pt" for one in (step - 2, step - 1, step)])
    assert number_in(tmp_path / "step-12.pt") == 12


def test_a_save_ends_its_process_after_the_old_file_is_gone(tmp_path: Path) -> None:
    program = """
import ioshape, torch
for step in range(5):
    ioshape.save_async({"step": step}, f"run/step-{step}.pt", keep_last=2)
"""
    (tmp_path / "run").mkdir()
    run_program(tmp_path, program)
    names = names_in(tmp_path / "run")
    assert "step-4.pt" in names
    assert len(names) == 2


def test_what_a_job_gave_up_is_older_than_what_it_saves_now(tmp_path: Path) -> None:
    saved(tmp_path, "step-100.pt", "step-200.pt")
    ioshape.save(checkpoint(5), tmp_path / "step-150.pt", keep_last=2)
    assert names_in(tmp_path) == ["step-150.pt", "step-200.pt"]


def test_what_was_saved_stays_whatever_the_clock_says(tmp_path: Path) -> None:
    saved(tmp_path, "step-1.pt", "step-2.pt")
    for name in ("step-1.pt", "step-2.pt"):
        os.utime(tmp_path / name, (4_000_000_000, 4_000_000_000))
    ioshape.save(checkpoint(3), tmp_path / "step-3.pt", keep_last=1)
    assert "step-3.pt" in names_in(tmp_path)


def test_what_is_no_checkpoint_of_the_family_stays(tmp_path: Path) -> None:
    saved(tmp_path, *STEPS, "best-1.pt", "step-1.pth", "step-7.pt", "elsewhere.pt")
    (tmp_path / "elsewhere.pt").rename(tmp_path.parent / "elsewhere.pt")
    (tmp_path / "step-1.pt").symlink_to(tmp_path.parent / "elsewhere.pt")
    (tmp_path / "step-2.pt").mkdir()
    (tmp_path / "step-3.pt").write_text("notes")
    os.truncate(tmp_path / "step-7.pt", 100)
    age(tmp_path, "step-7.pt", "step-3.pt", *STEPS)
    before = set(names_in(tmp_path))
    ioshape.save(checkpoint(12), tmp_path / "step-12.pt", keep_last=2)
    gone = {"step-8.pt", "step-9.pt", "step-10.pt"}
    assert set(names_in(tmp_path)) == before - gone | {"step-12.pt"}
    assert (tmp_path.parent / "elsewhere.pt").exists()


def test_a_directory_that_is_a_link_is_pruned_where_it_leads(tmp_path: Path) -> None:
    saved(tmp_path / "real", *STEPS)
    (tmp_path / "run").symlink_to("real")
    ioshape.save(checkpoint(12), tmp_path / "run" / "step-12.pt", keep_last=1)
    assert names_in(tmp_path / "real") == ["step-12.pt"]


# ---- The time of the removal ---------------------------------------------------------------------


def test_nothing_goes_before_the_new_file_is_there(tmp_path: Path) -> None:
    saved(tmp_path, *STEPS)
    gate = Gate("plan")
    handle = ioshape.save_async(checkpoint(12), tmp_path / "step-12.pt", keep_last=1, progress=gate)
    assert gate.reached.wait(60)
    assert {name for name in names_in(tmp_path) if name[0] != "."} == set(STEPS)
    gate.opened.set()
    handle.wait()
    wait_for(tmp_path, ["step-12.pt"])


def test_a_save_that_fails_or_is_canceled_removes_nothing(tmp_path: Path) -> None:
    saved(tmp_path, *STEPS)

    def stop(_progress: Any) -> None:
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        ioshape.save(checkpoint(12), tmp_path / "step-12.pt", keep_last=1, progress=stop)
    gate = Gate("plan")
    handle = ioshape.save_async(checkpoint(12), tmp_path / "step-12.pt", keep_last=1, progress=gate)
    assert gate.reached.wait(60)
    gate.opened.set()
    handle.cancel()
    if handle.exception() is not None:
        assert names_in(tmp_path) == sorted(STEPS)


def test_a_file_that_torch_wrote_in_its_old_format_removes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Check that nothing is removed, because nothing shows whether such a file is complete."""
    saved(tmp_path, *STEPS)
    with caplog.at_level(logging.WARNING, "ioshape"):
        ioshape.save(
            checkpoint(1),
            tmp_path / "step-12.pt",
            keep_last=1,
            _use_new_zipfile_serialization=False,
        )
    assert names_in(tmp_path) == sorted([*STEPS, "step-12.pt"])
    assert "it is not a torch zip" in caplog.text


def test_what_cannot_be_removed_is_a_warning_and_no_failure(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path, *STEPS)
    unlink = os.unlink

    def refuse(path: Any, *, dir_fd: int | None = None) -> None:
        if path == "step-8.pt":
            raise PermissionError(errno.EPERM, "not yours", path)
        unlink(path, dir_fd=dir_fd)

    monkeypatch.setattr(os, "unlink", refuse)
    with caplog.at_level(logging.WARNING, "ioshape"):
        report = ioshape.save(checkpoint(12), tmp_path / "step-12.pt", keep_last=1)
    assert report.file_bytes
    assert names_in(tmp_path) == ["step-12.pt", "step-8.pt"]
    assert "checkpoints older than" in caplog.text
    assert "not yours" in caplog.text


def test_a_file_that_is_replaced_meanwhile_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path, *STEPS)
    sync = retention._Family._sync

    def replace(family: Any, name: str) -> None:
        sync(family, name)
        ioshape.save(checkpoint(77), tmp_path / "step-8.pt")

    monkeypatch.setattr(retention._Family, "_sync", replace)
    ioshape.save(checkpoint(12), tmp_path / "step-12.pt", keep_last=1)
    assert names_in(tmp_path) == ["step-12.pt", "step-8.pt"]
    assert number_in(tmp_path / "step-8.pt") == 77


def test_over_a_tier_what_is_at_the_destination_counts(tmp_path: Path) -> None:
    run = tmp_path / "run"
    saved(run, *STEPS)
    (tmp_path / "tier").mkdir()
    handle = ioshape.save_async(
        checkpoint(12), run / "step-12.pt", keep_last=2, tier=tmp_path / "tier"
    )
    handle.wait_drained()
    wait_until(lambda: len([n for n in names_in(run) if n != "step-12.pt"]) <= 2, "pruned")
    assert {"step-11.pt", "step-12.pt"} <= set(names_in(run))


# ---- The command ---------------------------------------------------------------------------------


def test_the_command_prunes_the_files_of_a_pattern(tmp_path: Path) -> None:
    run = tmp_path / "run"
    saved(run, *STEPS, "best-1.pt")
    how = ("prune", "--keep-last", "2", "run/step-*.pt")
    told = succeed(call(*how, "--dry-run", folder=tmp_path))
    assert [line.split(":")[0] for line in told.splitlines()[:2]] == [
        "would remove run/step-8.pt",
        "would remove run/step-9.pt",
    ]
    assert len(names_in(run)) == 5
    assert "add --yes" in fail(call(*how, folder=tmp_path), code=2)
    told = json.loads(succeed(call(*how, "--yes", "--json", folder=tmp_path)))
    assert [Path(one["path"]).name for one in told["files"]] == ["step-8.pt", "step-9.pt"]
    assert names_in(run) == ["best-1.pt", "step-10.pt", "step-11.pt"]
    assert "0 files" in succeed(call(*how, "--yes", folder=tmp_path))


def test_a_pattern_that_the_shell_has_expanded_is_the_same(tmp_path: Path) -> None:
    saved(tmp_path, *STEPS)
    succeed(call("prune", "--keep-last", "1", "--yes", *sorted(tmp_path.iterdir())))
    assert names_in(tmp_path) == ["step-11.pt"]


@pytest.mark.parametrize("last", [1, 2])
def test_the_command_never_removes_the_last_that_can_be_used(tmp_path: Path, last: int) -> None:
    saved(tmp_path, *STEPS)
    for name in STEPS[2:]:
        flip(tmp_path / name, 1 << 19)
    age(tmp_path, *STEPS)
    call("prune", "--keep-last", last, "--yes", tmp_path / "step-*.pt")
    assert names_in(tmp_path) == sorted(STEPS[2 - last :])
    with pytest.warns(ioshape.FallbackWarning):
        assert ioshape.load_latest(tmp_path / "step-*.pt")["number"] == 1


def test_what_the_command_does_not_recognise_is_an_error(tmp_path: Path) -> None:
    run = tmp_path / "run"
    saved(run, *STEPS, "best-1.pt")
    how = ("prune", "--keep-last", "1", "--yes")
    before = names_in(run)
    assert f'give a pattern: ioshape prune "{run}/' in fail(call(*how, run))
    assert "several families" in fail(call(*how, run / "*.pt"))
    assert "step-8.pt" in fail(call(*how, run / "step-1*.pt"))
    assert "no file matches" in fail(call(*how, run / "none-*.pt"))
    assert "--keep-every" in fail(call(*how, "--keep-every", "2", run / "step-*.pt"), code=2)
    assert names_in(run) == before
    (tmp_path / "logs").mkdir()
    assert "0 checkpoints" in succeed(call(*how, tmp_path / "logs"))
    (tmp_path / "logs" / "train.log").write_text("")
    assert "it has no checkpoint" in fail(call(*how, tmp_path / "logs"))
    ioshape.save_group(checkpoint(1), tmp_path / "groups", 1)
    with pytest.raises(ioshape.errors.NoUsableCheckpointError, match="cannot prune"):
        ioshape.prune(tmp_path / "groups" / "step-0000000001", keep_last=1)
    with pytest.raises(ioshape.errors.NoUsableCheckpointError, match="cannot prune"):
        ioshape.prune(run, keep_last=1)
    assert "0 checkpoints" in succeed(call(*how, tmp_path / "groups"))


def test_damaged_checkpoints_are_no_reason_to_refuse(tmp_path: Path) -> None:
    ioshape.save_group(checkpoint(1), tmp_path, 1)
    (tmp_path / "step-0000000001" / "manifest.json").unlink()
    assert ioshape.prune(tmp_path, keep_last=1) == []
