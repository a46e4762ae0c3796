# SPDX-License-Identifier: Apache-2.0
"""Saves that fail or are stopped: the errors that they raise, and the old file, which stays."""

import asyncio
import contextlib
import errno
import os
import pickle
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ioshape
import pytest
import torch
from checkpoints import Gate, checkpoint, left_clean, names_in, number_in, wait_until
from ioshape import _torch as original
from ioshape._load.reader import Reader
from mounts import small_disk
from processes import run_interpreter, run_program, run_where_mounted

MIB = 1 << 20


@pytest.fixture(autouse=True)
def _left_clean() -> Iterator[None]:
    with left_clean():
        yield


# ---- Exceptions ----------------------------------------------------------------------------------

Save = Callable[..., object]


def _in_background(state: object, path: Path, **options: Any) -> object:
    return ioshape.save_async(state, path, **options).result()


def _by_torch(state: object, path: Path, **options: Any) -> object:
    return ioshape.save(state, path, _use_new_zipfile_serialization=False, **options)


def _awaited(state: object, path: Path, **options: Any) -> object:
    async def main() -> object:
        return await ioshape.save_async(state, path, **options)

    return asyncio.run(main())


@pytest.fixture(
    params=[ioshape.save, _in_background, _awaited, _by_torch],
    ids=["save", "save_async", "await", "written by torch"],
)
def save(request: pytest.FixtureRequest) -> Save:
    """Return a way to save. All ways raise equal errors."""
    way: Save = request.param
    return way


def _assert_tells(error: BaseException, number: int, path: Path) -> None:
    assert isinstance(error, ioshape.StorageError)
    assert isinstance(error, type(OSError(number, "")))
    assert isinstance(error, RuntimeError)  # torch.save raises this class
    assert (error.errno, error.strerror) == (number, os.strerror(number))
    assert (error.filename, error.path, error.operation) == (str(path), str(path), "save")


@pytest.mark.wording
def test_an_error_is_one_line_of_what_where_why_and_what_to_do(tmp_path: Path, save: Save) -> None:
    path = tmp_path / "missing" / "model.pt"
    with pytest.raises(FileNotFoundError) as caught:
        save(checkpoint(1), path)
    sentence = str(caught.value)
    assert sentence.startswith("cannot save ")
    assert f'"{path}"' in sentence
    assert sentence.endswith("; create it first")
    assert "\n" not in sentence


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("missing/model.pt", errno.ENOENT),
        ("file/model.pt", errno.ENOTDIR),
        ("folder", errno.EISDIR),
        ("x" * 300, errno.ENAMETOOLONG),
        ("loop", errno.ELOOP),
        ("", errno.EINVAL),
        ("folder/", errno.EINVAL),
    ],
)
def test_where_no_file_can_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, save: Save, name: str, number: int
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("x")
    Path("folder").mkdir()
    Path("loop").symlink_to("loop")
    with pytest.raises(ioshape.StorageError) as caught:
        save(checkpoint(1), name)
    _assert_tells(caught.value, number, name)  # type: ignore[arg-type]
    assert caught.value.remedy or number in (errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP)
    assert names_in(tmp_path) == ["file", "folder", "loop"]
    assert names_in("folder") == []


def test_what_must_not_be_replaced(tmp_path: Path, save: Save) -> None:
    path = tmp_path / "model.pt"
    save(checkpoint(1), path, replace=False)
    with pytest.raises(FileExistsError) as caught:
        save(checkpoint(2), path, replace=False)
    _assert_tells(caught.value, errno.EEXIST, path)
    assert names_in(tmp_path) == ["model.pt"]
    assert torch.load(path)["number"] == 1
    save(checkpoint(3), path)
    assert torch.load(path)["number"] == 3


def test_errors_travel_between_processes(tmp_path: Path) -> None:
    """Check that errors keep all fields when multiprocessing pickles them."""
    with pytest.raises(FileNotFoundError) as caught:
        ioshape.save(checkpoint(1), tmp_path / "missing" / "model.pt")
    sent = pickle.loads(pickle.dumps(caught.value))
    _assert_tells(sent, errno.ENOENT, tmp_path / "missing" / "model.pt")
    assert isinstance(sent, FileNotFoundError)
    assert str(sent) == str(caught.value)
    assert repr(sent) == repr(caught.value)


@pytest.mark.parametrize("way", [ioshape.save, _in_background, _awaited])
def test_the_report_tells_how_far_a_failed_save_came(tmp_path: Path, way: Save) -> None:
    path = tmp_path / "model.pt"
    ioshape.save(checkpoint(1), path)
    with pytest.raises(FileExistsError) as caught:
        way(checkpoint(2, 8 * MIB), path, replace=False)
    report = caught.value.report  # type: ignore[attr-defined]
    assert report.path == str(path)
    assert report.engine
    assert report.write_s > 0


# ---- Files without permission --------------------------------------------------------------------

# Prefix of a command that drops the capabilities by which root ignores permissions.
AS_OTHERS = (
    ["setpriv", "--inh-caps=-all", "--bounding-set=-dac_override,-dac_read_search"]
    if os.geteuid() == 0
    else []
)

FORBIDDEN = """
    import errno
    import os
    from pathlib import Path

    import ioshape
    from checkpoints import checkpoint, names_in, number_in

    folder = Path("files")
    folder.mkdir()
    path = folder / "model.pt"
    ioshape.save(checkpoint(1), path)


    def refused(save):
        try:
            save()
        except PermissionError as error:
            assert isinstance(error, ioshape.StorageError)
            assert isinstance(error, RuntimeError)
            assert error.errno == errno.EACCES, error
            assert error.filename == str(path)
            assert number_in(path) == 1
            assert names_in(folder) == ["model.pt"]
            print(error)
        else:
            raise AssertionError("it was permitted")


    ways = (
        lambda: ioshape.save(checkpoint(2), path),
        lambda: ioshape.save_async(checkpoint(2), path).wait(),
        lambda: ioshape.save(checkpoint(2), path, _use_new_zipfile_serialization=False),
    )
    for way in ways:
        folder.chmod(0o555)
        refused(way)
        folder.chmod(0o755)
        path.chmod(0o444)
        refused(way)
        path.chmod(0o644)
    ioshape.save(checkpoint(3), path)
    assert number_in(path) == 3

    # Not readable: the same for loads.
    path.chmod(0o222)
    for read in (ioshape.load, ioshape.verify, ioshape.inspect):
        try:
            read(path)
        except PermissionError as error:
            assert isinstance(error, ioshape.StorageError), read
            assert error.filename == str(path), read
        else:
            raise AssertionError(f"{read} was permitted")
"""


@pytest.mark.slow
@pytest.mark.wording
def test_where_one_may_not_write(tmp_path: Path) -> None:
    finished = run_interpreter(tmp_path, FORBIDDEN, prefix=AS_OTHERS)
    sentences = finished.stdout.splitlines()
    assert len(sentences) == 6
    for of_folder, of_file in zip(sentences[::2], sentences[1::2], strict=True):
        assert "directory must be writable" in of_folder
        assert "the file is not writable" in of_file


# ---- Full disks ----------------------------------------------------------------------------------


FULL_DISK = """
    import asyncio
    import errno
    import sys
    from pathlib import Path

    import ioshape
    from checkpoints import checkpoint, names_in, number_in

    MIB = 1 << 20
    folder = Path("disk")
    path = folder / "model.pt"
    (folder / "lost+found").exists() and (folder / "lost+found").rmdir()
    ioshape.save(checkpoint(1, 2 * MIB), path)
    too_much = checkpoint(2, 100 * MIB)


    async def awaited():
        await ioshape.save_async(too_much, path)


    ways = {
        "save": lambda: ioshape.save(too_much, path),
        "wait": lambda: ioshape.save_async(too_much, path).wait(),
        "result": lambda: ioshape.save_async(too_much, path).result(),
        "await": lambda: asyncio.run(awaited()),
        "torch": lambda: ioshape.save(too_much, path, _use_new_zipfile_serialization=False),
    }
    for name, way in ways.items():
        try:
            way()
        except ioshape.StorageError as error:
            assert error.errno == errno.ENOSPC, (name, error)
            assert error.filename == str(path), name
            assert error.operation == "save", name
            assert error.remedy, name
            print(name, error)
        else:
            raise AssertionError(f"{name}: there was room")
        assert names_in(folder) == ["model.pt"], name
        assert number_in(path) == 1, name
        # The old file takes its room; what fits, fits.
        ioshape.save(checkpoint(3, MIB), folder / "other.pt")
        assert number_in(folder / "other.pt") == 3
        (folder / "other.pt").unlink()

    # The program does not wait for the failure. The next save raises it after it has saved.
    handle = ioshape.save_async(too_much, path)
    while not handle.done():
        pass
    try:
        ioshape.save(checkpoint(4, MIB), path)
    except ioshape.StorageError as error:
        assert error.errno == errno.ENOSPC
    else:
        raise AssertionError("nobody heard of it")
    assert number_in(path) == 4
    assert ioshape.load(path)["number"] == 4
    print("done", ioshape.save(checkpoint(5), path).filesystem)
"""


@pytest.mark.parametrize(
    ("kind", "engine"),
    [
        ("tmpfs", "auto"),
        ("ext4", "auto"),
        ("ext4", "buffered"),
        pytest.param("ext4", "threads", marks=pytest.mark.long),
        pytest.param("tmpfs", "threads", marks=pytest.mark.long),
    ],
)
@pytest.mark.slow
def test_a_full_disk_leaves_the_old_file(tmp_path: Path, kind: str, engine: str) -> None:
    prefix = small_disk(kind, tmp_path)
    variables = {"IOSHAPE_ENGINE": engine} if engine != "auto" else {}
    finished = run_where_mounted(prefix, tmp_path, FULL_DISK, variables=variables)
    assert finished.stdout.splitlines()[-1] == f"done {kind}"


@pytest.mark.wording
@pytest.mark.slow
def test_a_full_disk_says_what_to_do(tmp_path: Path) -> None:
    finished = run_where_mounted(small_disk("tmpfs", tmp_path), tmp_path, FULL_DISK)
    told = dict(line.split(" ", 1) for line in finished.stdout.splitlines())
    for way in ("save", "wait", "result", "await", "torch"):
        assert "disk/model.pt" in told[way]
        remedy = told[way].rpartition("; ")[2]
        assert remedy.startswith("free space")
        assert "save elsewhere" in remedy
        assert ("full=skip" in remedy) == (way != "torch")


def test_a_limit_on_the_size_of_files(tmp_path: Path) -> None:
    run_program(
        tmp_path,
        """
        import errno
        import resource
        from pathlib import Path

        import ioshape
        from checkpoints import checkpoint, names_in, number_in

        folder = Path("files")
        folder.mkdir()
        path = folder / "model.pt"
        ioshape.save(checkpoint(1), path)
        resource.setrlimit(resource.RLIMIT_FSIZE, (8 << 20, resource.RLIM_INFINITY))
        too_much = checkpoint(2, 20 << 20)
        for way in (
            lambda: ioshape.save(too_much, path),
            lambda: ioshape.save_async(too_much, path).wait(),
            lambda: ioshape.save(too_much, path, _use_new_zipfile_serialization=False),
        ):
            try:
                way()
            except ioshape.StorageError as error:
                assert error.errno == errno.EFBIG, error
                assert error.filename == str(path)
                assert error.remedy, error
            else:
                raise AssertionError("it was larger than permitted")
            assert names_in(folder) == ["model.pt"]
            assert number_in(path) == 1
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        ioshape.save(too_much, path)
        assert number_in(path) == 2
        """,
    )


@pytest.mark.slow
def test_a_limit_on_memory(tmp_path: Path) -> None:
    """Check that a save without staging memory fails alone."""
    run_program(
        tmp_path,
        """
        import errno
        import resource
        from pathlib import Path

        import ioshape
        from checkpoints import checkpoint, names_in, number_in

        MIB = 1 << 20
        folder = Path("files")
        folder.mkdir()
        path = folder / "model.pt"
        ioshape.save_async(checkpoint(1), path).wait()
        large = checkpoint(2, 128 * MIB)
        with open("/proc/self/statm") as statm:
            in_use = int(statm.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (in_use + 56 * MIB, resource.RLIM_INFINITY))
        for _ in range(2):
            try:
                ioshape.save_async(large, path).wait()
            except (MemoryError, ioshape.StorageError) as error:
                assert isinstance(error, MemoryError) or error.errno == errno.ENOMEM, error
            else:
                raise AssertionError("there was memory")
            assert names_in(folder) == ["model.pt"]
            assert number_in(path) == 1
        # Nothing need be copied, so this goes on.
        ioshape.save(large, path)
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)
        assert number_in(path) == 2
        ioshape.save_async(checkpoint(3, 128 * MIB), path).wait()
        assert number_in(path) == 3
        """,
    )


# ---- Failures that no caller waited for ----------------------------------------------------------


def _failed(path: Path) -> ioshape.SaveHandle:
    handle = ioshape.save_async(checkpoint(1), path)
    wait_until(handle.done, "the failure")
    return handle


@pytest.mark.parametrize("background", [False, True])
def test_the_next_save_tells_what_nobody_asked_for(tmp_path: Path, background: bool) -> None:
    missing, path = tmp_path / "missing" / "model.pt", tmp_path / "model.pt"
    _failed(missing)
    with pytest.raises(FileNotFoundError) as caught:
        (ioshape.save_async if background else ioshape.save)(checkpoint(2), path)
    assert caught.value.filename == str(missing)
    assert ioshape.wait_all()
    assert number_in(path) == 2, "the new checkpoint must not be lost, too"
    ioshape.save(checkpoint(3), path)  # the failure has been raised once
    assert number_in(path) == 3


def test_each_of_several_failures_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    missing = [tmp_path / f"missing {i}" / "model.pt" for i in range(3)]
    _failed(missing[0])
    told: list[str] = []
    # Each of these calls raises an older failure and has a failure of its own.
    for path in missing[1:]:
        with pytest.raises(FileNotFoundError) as caught:
            ioshape.save_async(checkpoint(1), path)
        told.append(caught.value.filename)
        # A call that raises returns no handle, so only the log shows that its save has failed.
        wait_until(lambda: str(path) in caplog.text, "the failure")  # noqa: B023
    for number in range(2):
        try:
            ioshape.save(checkpoint(number), tmp_path / "model.pt")
        except FileNotFoundError as error:
            told.append(error.filename)
    assert sorted(told) == [str(path) for path in missing]
    assert number_in(tmp_path / "model.pt") == 1
    ioshape.save(checkpoint(5), tmp_path / "model.pt")


@pytest.mark.parametrize("ask", ["wait", "result", "exception", "cancel"])
def test_what_was_asked_for_is_not_told_again(tmp_path: Path, ask: str) -> None:
    handle = _failed(tmp_path / "missing" / "model.pt")
    with contextlib.suppress(FileNotFoundError):
        getattr(handle, ask)()
    ioshape.save(checkpoint(2), tmp_path / "model.pt")


@pytest.mark.parametrize("look", ["done", "report", "progress", "__repr__"])
def test_looking_is_not_asking(tmp_path: Path, look: str) -> None:
    handle = _failed(tmp_path / "missing" / "model.pt")
    seen = getattr(handle, look)
    if callable(seen):
        seen()
    with pytest.raises(FileNotFoundError):
        ioshape.save(checkpoint(2), tmp_path / "model.pt")


def test_waiting_for_all_tells_too(tmp_path: Path) -> None:
    _failed(tmp_path / "missing" / "model.pt")
    good = ioshape.save_async
    with pytest.raises(FileNotFoundError):
        good(checkpoint(2), tmp_path / "model.pt")
    _failed(tmp_path / "missing" / "model.pt")
    with pytest.raises(FileNotFoundError):
        ioshape.wait_all()
    assert ioshape.wait_all()
    assert number_in(tmp_path / "model.pt") == 2


def test_a_save_that_fails_itself_does_not_hide_the_earlier_failure(tmp_path: Path) -> None:
    _failed(tmp_path / "first" / "model.pt")
    with pytest.raises(FileNotFoundError) as caught:
        ioshape.save(checkpoint(2), tmp_path / "second" / "model.pt")
    assert caught.value.filename == str(tmp_path / "second" / "model.pt")
    with pytest.raises(FileNotFoundError) as caught:
        ioshape.save(checkpoint(2), tmp_path / "model.pt")
    assert caught.value.filename == str(tmp_path / "first" / "model.pt")


# ---- Progress callbacks that stop the save -------------------------------------------------------


class StopIt(BaseException):
    """A BaseException that is not an Exception."""


def _stopping(at: str, error: BaseException) -> Callable[[ioshape.types.Progress], None]:
    def progress(told: ioshape.types.Progress) -> None:
        if told.phase == at:
            raise error

    return progress


@pytest.mark.parametrize("error", [ValueError("enough"), StopIt("enough"), SystemExit(3)])
@pytest.mark.parametrize("at", ["stage", "plan", "write", "sync"])
@pytest.mark.parametrize("background", [False, True])
@pytest.mark.slow
def test_an_exception_in_the_progress_callback_stops_the_save(
    tmp_path: Path, background: bool, at: str, error: BaseException
) -> None:
    path = tmp_path / "model.pt"
    ioshape.save(checkpoint(1), path)
    way = _in_background if background else ioshape.save
    if at == "stage" and not background:
        assert way(checkpoint(2, 8 * MIB), path, progress=_stopping(at, error))
        assert number_in(path) == 2  # a blocking save stages nothing
        return
    with pytest.raises(type(error)) as caught:
        way(checkpoint(2, 8 * MIB), path, progress=_stopping(at, error))
    assert caught.value is error
    assert number_in(path) == 1
    assert names_in(tmp_path) == ["model.pt"]
    ioshape.save(checkpoint(3), path)
    assert number_in(path) == 3


@pytest.mark.parametrize("at", ["commit", "done"])
def test_an_exception_at_the_very_end_comes_too_late(tmp_path: Path, at: str) -> None:
    """Check that an exception comes too late once the file is in place: the save succeeds."""
    path = tmp_path / "model.pt"
    handle = ioshape.save_async(checkpoint(1), path, progress=_stopping(at, ValueError("late")))
    assert handle.wait()
    assert number_in(path) == 1


def test_loads_and_verifications_are_stopped_as_well(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    ioshape.save(checkpoint(1, 8 * MIB), path)
    error = StopIt("enough")
    for read in (ioshape.load, ioshape.verify):
        with pytest.raises(StopIt) as caught:
            read(path, progress=_stopping("read", error))
        assert caught.value is error
    assert ioshape.load(path)["number"] == 1


def test_torch_cannot_lose_what_a_read_failed_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that an exception in readinto() is kept.

    Torch calls read() after readinto() with the exception set, and that call may clear it.
    """
    path = tmp_path / "model.pt"
    ioshape.save(checkpoint(1, 8 * MIB), path)
    by_torch = original.load

    class Forgetful:
        def __init__(self, file: Any) -> None:
            self.__dict__.update(seek=file.seek, tell=file.tell, read=file.read)
            self._readinto = file.readinto

        def readinto(self, buffer: Any) -> int:
            with contextlib.suppress(StopIt):
                return int(self._readinto(buffer))
            return int(self._readinto(buffer))

    def forgetful_load(file: Any, *args: Any, **more: Any) -> Any:
        forgetful: Any = Forgetful(file)
        return by_torch(forgetful, *args, **more)

    monkeypatch.setattr(original, "load", forgetful_load)
    read_file = Reader.read_file
    calls: list[int] = []

    def read_or_stop(self: Reader, offset: int, into: memoryview) -> None:
        calls.append(offset)
        if len(calls) == 3:
            raise StopIt("enough")
        read_file(self, offset, into)

    monkeypatch.setattr(Reader, "read_file", read_or_stop)
    with pytest.raises(StopIt):
        ioshape.load(path)


def test_a_failure_does_not_stop_other_saves_in_flight(tmp_path: Path) -> None:
    gate = Gate()
    good = ioshape.save_async(checkpoint(1), tmp_path / "good.pt", progress=gate)
    gate.await_save()
    with pytest.raises(FileNotFoundError):
        ioshape.save(checkpoint(2), tmp_path / "missing" / "model.pt")
    bad = ioshape.save_async(checkpoint(3), tmp_path / "missing" / "model.pt")
    assert isinstance(bad.exception(), FileNotFoundError)
    assert not good.done()
    gate.open()
    assert good.wait()
    assert number_in(tmp_path / "good.pt") == 1
    assert sys.exc_info() == (None, None, None)
