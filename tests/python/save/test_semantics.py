# SPDX-License-Identifier: Apache-2.0
"""ioshape.save and ioshape.load behave as torch's, for every kind of object, in each direction.

A process without ioshape provides the reference: how stock torch loads its own files.
"""

from pathlib import Path
from typing import NamedTuple

import ioshape
import pytest
import zoo
from same import assert_same, assert_same_description
from stock import Outcome, attempt, load_all_ways, load_by, stock

# Ways in which torch reads every file that it has saved. Other ways depend on the object.
ALWAYS = (
    *("whole", "mapped", "mapped by setting", "mapped, offsets computed", "to cpu", "to a device"),
    *("checked by torch", "mapped, checked by torch", "encoding"),
)
# Ways that use where a file has its records. Others read every file alike, so theirs are enough.
BY_LAYOUT = ("default", "safe", "whole", "mapped", "mapped, offsets computed", "fake")


class Files(NamedTuple):
    """One object of the zoo, saved by torch and by ioshape."""

    theirs: Path
    ours: Path
    in_background: Path
    #: results of the saves
    outcomes: dict[str, Outcome]
    #: results of stock torch with its own file
    expected: dict[str, Outcome]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("zoo")


_made: dict[str, Files] = {}


def files_of(name: str, folder: Path) -> Files:
    if name not in _made:
        theirs, ours, in_background = (
            folder / f"{name}.{kind}.pt" for kind in ("theirs", "ours", "background")
        )
        value = zoo.build(name)
        outcomes = {
            "theirs": stock().save(name, theirs),
            "ours": attempt(lambda: silent(ioshape.save(value, ours)), ours),
            "in background": attempt(
                lambda: silent(ioshape.save_async(value, in_background).result()), in_background
            ),
        }
        expected = stock().load_all_ways(theirs) if outcomes["theirs"].error is None else {}
        assert not any(expected[way].error for way in expected if way in ALWAYS), expected
        _made[name] = Files(theirs, ours, in_background, outcomes, expected)
    return _made[name]


def silent(report: ioshape.Report) -> None:
    """Drop the report, because torch.save returns nothing. Check that ioshape wrote the file."""
    assert report.written_by == "ioshape", report
    assert report.file_bytes == Path(report.path).stat().st_size


@pytest.mark.parametrize("name", zoo.CASES)
@pytest.mark.slow
def test_what_torch_saves_is_saved_and_what_it_refuses_is_refused(name: str, folder: Path) -> None:
    files = files_of(name, folder)
    assert files.outcomes["ours"] == files.outcomes["theirs"]
    assert files.outcomes["in background"] == files.outcomes["theirs"]
    saved = files.outcomes["theirs"].error is None
    assert saved != zoo.CASES[name].refused
    assert [path.exists() for path in (files.ours, files.in_background)] == [saved, saved]
    assert not saved or files.in_background.read_bytes() == files.ours.read_bytes()


def assert_alike(name: str, found: dict[str, Outcome], expected: dict[str, Outcome]) -> None:
    assert found.keys() == expected.keys()
    for way, outcome in expected.items():
        if way == "without data" and not zoo.CASES[name].any_data:
            continue
        where = f"when loaded in the way {way!r}"
        assert found[way].error == outcome.error, where
        assert_same_description(found[way].description, outcome.description)
        assert found[way].warnings == outcome.warnings, where


SAVED = [name for name, case in zoo.CASES.items() if not case.refused]


@pytest.mark.parametrize("name", SAVED)
@pytest.mark.slow
def test_ours_is_read_by_stock_torch(name: str, folder: Path) -> None:
    files = files_of(name, folder)
    assert_alike(name, stock().load_all_ways(files.ours), files.expected)


@pytest.mark.parametrize("name", SAVED)
@pytest.mark.slow
def test_theirs_is_read_by_us(name: str, folder: Path) -> None:
    files = files_of(name, folder)
    assert_alike(name, load_all_ways(ioshape.load, files.theirs), files.expected)


@pytest.mark.parametrize("name", SAVED)
@pytest.mark.slow
def test_ours_is_read_by_us(name: str, folder: Path) -> None:
    files = files_of(name, folder)
    found = {way: load_by(ioshape.load, files.ours, way) for way in BY_LAYOUT}
    assert_alike(name, found, {way: files.expected[way] for way in BY_LAYOUT})


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.parametrize("name", [name for name in SAVED if zoo.CASES[name].exact])
def test_it_is_what_was_saved(name: str, folder: Path) -> None:
    files = files_of(name, folder)
    assert_same(ioshape.load(files.ours, weights_only=False), zoo.build(name))


@pytest.mark.filterwarnings("ignore:backward hook .* will not be serialized")
@pytest.mark.parametrize("name", SAVED)
@pytest.mark.slow
def test_every_storage_is_named(name: str, tmp_path: Path) -> None:
    """Check that a listing finds every storage without running the pickle, also to name damage."""
    value = zoo.build(name)
    for protocol in (2, 5):
        path = tmp_path / f"model-{protocol}.pt"
        ioshape.save(value, path, pickle_protocol=protocol, durable=False)
        contents = ioshape.inspect(path)
        assert contents.problem == ""
        storages = {record.name for record in contents.records if record.name.startswith("data/")}
        assert {tensor.record for tensor in contents.tensors} == storages
