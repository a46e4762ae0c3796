# SPDX-License-Identifier: Apache-2.0
"""Saves that do not fit: training continues with a full disk."""

import errno
from pathlib import Path

import ioshape
import pytest
from checkpoints import checkpoint, names_in, number_in
from mounts import small_disk
from processes import run_where_mounted
from striped import striped

MIB = 1 << 20

FULL_DISK = """
    import json
    import logging
    import time
    import warnings
    from pathlib import Path

    import ioshape
    import torch
    from checkpoints import checkpoint, names_in, number_in

    MIB = 1 << 20
    folder = Path("disk")
    path = folder / "model.pt"
    filler = folder / "filler"
    ioshape.save(checkpoint(1, 2 * MIB), path)


    def fill():
        filler.write_bytes(bytes(30 * MIB))


    def warned(way, *words):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            result = way()
        assert [one.category for one in caught] == [ioshape.SkippedWarning], caught
        # Of the line that saved, whatever lies between.
        assert caught[0].filename == __file__, caught[0]
        for word in (str(path), "skipped", *words):
            assert word in str(caught[0].message), caught[0].message
        return result


    # ---- A trainer that knows nothing of ioshape: it saves every few steps, and never asks.

    model = torch.nn.Linear(2048, 1024)  # 8 MiB
    saved = []
    ioshape.configure(full="skip")
    ioshape.patch()
    warnings.simplefilter("ignore")
    for step in range(6):
        if step == 2:
            fill()
        if step == 4:
            filler.unlink()
        with torch.no_grad():
            model.bias.fill_(step)
        torch.save(model.state_dict(), path)
        saved.append(int(torch.load(path)["bias"][0]))
    assert saved == [0, 1, 1, 1, 4, 5], saved
    assert names_in(folder) == ["model.pt"]

    warnings.simplefilter("default")
    ioshape.unpatch()


    # ---- What else is said of a save that is skipped.

    lines = []


    class Listener(logging.Handler):
        def emit(self, record):
            lines.append((record.levelname, record.getMessage()))


    logging.getLogger("ioshape").addHandler(Listener())
    ioshape.configure(full="skip")
    ioshape.save(checkpoint(1, 2 * MIB), path)
    fill()
    too_much = checkpoint(2, 20 * MIB)
    old = dict(_use_new_zipfile_serialization=False)


    def opened():
        with ioshape.open(path, "wb") as file:
            for _ in range(20):
                file.write(bytes(MIB))
        return file.report


    def announced():
        with ioshape.open(path, "wb", expected_bytes=20 * MIB) as file:
            file.write(b"x")
        return file.report


    ways = {
        "save": lambda: ioshape.save(too_much, path),
        "async": lambda: ioshape.save_async(too_much, path).result(),
        "torch": lambda: ioshape.save(too_much, path, **old),
        "open": opened,
        "announced": announced,
    }
    for name, way in ways.items():
        del lines[:]
        report = warned(way)
        assert report.skipped, report
        assert "0 bytes in" in str(report) and "skipped" in report.downgrades[-1], str(report)
        assert ";" not in report.downgrades[-1]
        # "needs", or, where torch does not say what it will write, where it stopped
        assert name in ("torch", "open") or "needs 20" in report.downgrades[-1], report.downgrades
        # SkippedWarning says it; the log has it at level INFO.
        assert [level for level, line in lines if "skipped" in line] == [], lines
        assert names_in(folder) == ["filler", "model.pt"] and number_in(path) == 1, name

    # torch's own writer, to a path with anything in it. Recorded, also if warnings are errors.
    ioshape.configure(trace="reports")
    odd = folder / "a; b.pt"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            ioshape.save(too_much, odd, **old)
        except ioshape.SkippedWarning as warning:
            assert str(odd) in str(warning) and "o space left" in str(warning), warning
            assert "free space" not in str(warning), warning  # that is the remedy
        else:
            raise AssertionError("no error")
    try:
        ioshape.save(too_much, folder / "none" / "a.pt", **old)
    except FileNotFoundError:
        pass
    (recorded,) = Path("reports").iterdir()
    skip, failure = map(json.loads, recorded.read_text().splitlines())
    assert skip["skipped"] and skip["started_s"] > 1e9 and not skip["error"], skip
    assert str(odd) in skip["downgrades"][-1], skip
    assert failure["started_s"] > 1e9 and "none" in failure["error"], failure

    # A checkpoint: no attempt is left of it, and the one before is the newest.
    directory = folder / "checkpoints"
    filler.unlink()
    ioshape.save_group(checkpoint(1), directory, step=1)
    fill()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        report = ioshape.save_group(too_much, directory, step=2)
        handle = ioshape.save_group_async(too_much, directory, step=3)
        assert handle.wait() and handle.report.skipped and "skipped" in repr(handle)
    assert [one.category for one in caught] == [ioshape.SkippedWarning] * 2
    assert report.skipped and report.checkpoint_bytes == 0, report
    assert "needs 20" in report.downgrades[-1], report
    assert ioshape.latest(directory).step == 1
    assert [name for name in names_in(directory) if "step" in name] == ["step-0000000001"]

    # The program does not ask. The next save warns and does not raise.
    handle = ioshape.save_async(too_much, path)
    while not handle.done():
        time.sleep(0.01)
    report = warned(lambda: ioshape.save(checkpoint(3, MIB), folder / "small.pt"))
    assert not report.skipped
    assert ioshape.wait_all()

    # Who makes errors of warnings has them.
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            ioshape.save(too_much, path)
        except ioshape.SkippedWarning as warning:
            print(warning)
        else:
            raise AssertionError("no error")
    assert number_in(path) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        handle = ioshape.save_async(too_much, path)
        while not handle.done():
            time.sleep(0.01)
        assert repr(handle).endswith(": skipped>"), handle
    # At the end of the process, too, it is said.
    ioshape.save_async(too_much, path)
"""


@pytest.mark.slow
@pytest.mark.wording
def test_training_goes_on_over_a_full_disk(tmp_path: Path) -> None:
    finished = run_where_mounted(small_disk("tmpfs", tmp_path), tmp_path, FULL_DISK)
    assert "needs 20" in finished.stdout
    assert "SkippedWarning: the save to disk/model.pt was skipped" in finished.stderr
    # The log does not repeat the warning.
    assert "ioshape: skipped" not in finished.stderr
    assert not [line for line in finished.stderr.splitlines() if line.startswith("skipped")]


FULL_IN_A_WRITE = """
    import ioshape

    try:
        with ioshape.open("disk/model.bin", "wb") as file:
            for _ in range(100):
                file.write(bytes(1 << 20))
    except ioshape.StorageError as error:
        print(error)
"""


@pytest.mark.wording
def test_a_disk_without_storage_targets_is_suspected_of_none(tmp_path: Path) -> None:
    said = run_where_mounted(small_disk("ext4", tmp_path), tmp_path, FULL_IN_A_WRITE).stdout
    assert "model.bin" in said
    assert "storage target" not in said
    assert "whole filesystem" not in said


@pytest.mark.wording
@pytest.mark.usefixtures("_mounts_of_stripefs")
def test_a_full_storage_target_is_suspected() -> None:
    with striped("ssd", targets=4, stripe_count=4) as mount:
        mount.order("target 2 full")
        with pytest.raises(ioshape.StorageError, match="one of its storage targets may be"):
            ioshape.save(checkpoint(2, 8 * MIB), mount.path / "model.pt")


@pytest.mark.usefixtures("_mounts_of_stripefs")
def test_one_storage_target_is_full() -> None:
    with striped("ssd", targets=4, stripe_count=4) as mount:
        path = mount.path / "model.pt"
        ioshape.save(checkpoint(1), path)
        mount.order("target 2 full")
        with pytest.raises(ioshape.StorageError) as full:
            ioshape.save(checkpoint(2, 8 * MIB), path)
        assert full.value.errno == errno.ENOSPC
        ioshape.configure(full="skip")
        with pytest.warns(ioshape.SkippedWarning):
            report = ioshape.save(checkpoint(2, 8 * MIB), path)
        assert report.skipped
        # In a group the writer finds out, and rank 0 decides to skip the checkpoint.
        with pytest.warns(ioshape.SkippedWarning):
            report = ioshape.save_group(checkpoint(2, 8 * MIB), mount.path / "steps", 7)
        assert report.skipped
        assert names_in(mount.path) == ["model.pt", "steps"]
        assert not [name for name in names_in(mount.path / "steps") if "step" in name]
        assert number_in(path) == 1
