# SPDX-License-Identifier: Apache-2.0
"""Test that a torch with an unknown pickling writes its files itself, and that the report says so.

Each variant is made of the real torch in a process of its own, before ioshape is imported there.
"""

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from records import content_of, names_in
from same import assert_same, describe
from stock import stock
from tree import PYTHONPATH

# Calls the original save function with the private parts that it expects.
COMMON = """
    import functools, json, os, pickle, sys, warnings
    import torch, torch.serialization as serialization

    old_save, _save = serialization.save, serialization._save

    def edit(before, after):
        "Another text of _save() here and there."
        import inspect
        source = inspect.getsource(_save)
        assert before in source
        exec(source.replace(before, after), vars(serialization))

    def with_private(name, value):
        "torch.save, for which a private part of the module is still the old one."
        @functools.wraps(old_save)
        def save(*arguments, **named):
            changed = getattr(serialization, name, None)
            setattr(serialization, name, value)
            try:
                return old_save(*arguments, **named)
            finally:
                if changed is None:
                    delattr(serialization, name)
                else:
                    setattr(serialization, name, changed)
        torch.save = serialization.save = save
"""

# Changes of torch, and whether torch must write the files itself (None: both are right).
OTHERS = {
    "unchanged": ("", False),
    "more arguments, which need not be given": (
        """
        def changed(obj, zip_file, module, protocol, no_byteorder, level=3, *, fast=False):
            return _save(obj, zip_file, module, protocol, no_byteorder)
        serialization._save = changed
        """,
        False,
    ),
    "a record that nobody knows yet": (
        """
        marker = "    # Write byte order marker"
        edit(marker, '    zip_file.write_record(".more", b"something", 9)' + chr(10) + marker)
        """,
        False,
    ),
    "another signature": (
        """
        with_private("_save", _save)
        def changed(obj, zip_file, *, pickler, options):
            raise AssertionError("not for us")
        serialization._save = changed
        """,
        True,
    ),
    "no such function": (
        """
        with_private("_save", _save)
        del serialization._save
        """,
        True,
    ),
    "a class of its own for the writer": (
        """
        with_private("_save", _save)
        edit("zip_file.write_record(name, storage", "zip_file.begin(name).write(storage")
        """,
        True,
    ),
    "storages of other names": (
        """
        with_private("_save", _save)
        edit('name = f"data/{key}"', 'name = f"storages/{key}"')
        """,
        True,
    ),
    "storages in another order": (
        """
        with_private("_save", _save)
        edit("for key in serialized_storages:", "for key in reversed(serialized_storages):")
        """,
        True,
    ),
    "storages that are copied to bytes": (
        """
        with_private("_save", _save)
        edit("write_record(name, storage,", "write_record(name, bytes(storage),")
        """,
        True,
    ),
    "large storages of a type of their own": (
        """
        with_private("_save", _save)
        edit(
            "write_record(name, storage,",
            "write_record(name, bytes(storage) if num_bytes > 100 else storage,",
        )
        """,
        True,
    ),
    "other names for what is gathered": (
        """
        edit("serialized_storages", "gathered_storages")
        """,
        None,
    ),
    "storages that are compressed": (
        """
        with_private("_save", _save)
        edit("(name, storage, num_bytes)", "(name, storage, num_bytes // 2)")
        """,
        True,
    ),
    "large storages by another function": (
        """
        with_private("_save", _save)
        edit(
            "zip_file.write_record(name, storage, num_bytes)",
            "(zip_file.write_large if num_bytes > 100 else zip_file.write_record)"
            "(name, storage, num_bytes)",
        )
        """,
        True,
    ),
    "no more checks of arguments": (
        """
        with_private("_check_save_filelike", serialization._check_save_filelike)
        del serialization._check_save_filelike
        """,
        None,
    ),
    "no more checks of dill": (
        """
        old_load, check = serialization.load, serialization._check_dill_version
        with_private("_check_dill_version", check)
        def load(*arguments, **named):
            serialization._check_dill_version = check
            try:
                return old_load(*arguments, **named)
            finally:
                del serialization._check_dill_version
        torch.load = serialization.load = load
        del serialization._check_dill_version
        """,
        None,
    ),
    "an alignment that nobody can ask for": (
        """
        alignment = serialization._get_storage_alignment
        with_private("_get_storage_alignment", alignment)
        def changed(*arguments):
            serialization._get_storage_alignment = alignment
            try:
                return _save(*arguments)
            finally:
                del serialization._get_storage_alignment
        serialization._save = changed
        del serialization._get_storage_alignment
        """,
        None,
    ),
    "no data to be skipped": (
        """
        old_tls = serialization._serialization_tls
        with_private("_serialization_tls", old_tls)
        old_load = serialization.load
        def load(*arguments, **named):
            now, serialization._serialization_tls = serialization._serialization_tls, old_tls
            try:
                return old_load(*arguments, **named)
            finally:
                serialization._serialization_tls = now
        torch.load = serialization.load = load
        class Before:
            map_location = None
        def changed(*arguments):
            now, serialization._serialization_tls = serialization._serialization_tls, old_tls
            try:
                return _save(*arguments)
            finally:
                serialization._serialization_tls = now
        serialization._save = changed
        serialization._serialization_tls = Before()
        """,
        None,
    ),
    "no alignment to ask for": (
        """
        with_private("_get_storage_alignment", serialization._get_storage_alignment)
        del serialization._get_storage_alignment
        """,
        True,
    ),
    "packages that are registered otherwise": (
        """
        def register_package(name, *, save, load):
            raise AssertionError("not for us")
        serialization.register_package = register_package
        """,
        None,  # both are right
    ),
}

RUN = """
    import ioshape, zoo

    model, background = os.path.join(folder, "model.pt"), os.path.join(folder, "background.pt")
    with open(model, "wb") as file:
        file.write(b"old")
    try:
        ioshape.save(lambda: 1, model)
    except Exception as error:
        failure = type(error).__name__
    left = os.listdir(folder)
    with open(model, "rb") as file:
        old = file.read() == b"old"
    value = zoo.build(name)
    reports = [ioshape.save(value, model), ioshape.save_async(value, background).result()]
    try:
        ioshape.save(value, model, replace=False)
        exists = "replaced"
    except FileExistsError as error:
        exists = error.filename
    ioshape.load(model, weights_only=False)
    told = {
        "failure": failure, "left": left, "old": old, "exists": exists,
        "reports": [[report.written_by, report.downgrades, report.sync_s] for report in reports],
    }
"""

# Imports slow modules, then forks a child for each request. The child changes torch and runs.
DRIVER = """
import json, os, sys, traceback
import torch, zoo

torch.set_num_threads(1)  # a child has none but the first
assert "ioshape" not in sys.modules
for line in sys.stdin:
    script, folder, name, answer = json.loads(line)
    if os.fork() == 0:
        try:
            scope = {"folder": folder, "name": name}
            exec(script, scope)
            told = scope["told"]
        except BaseException:
            told = {"error": traceback.format_exc()}
        with open(answer, "w") as file:
            json.dump(told, file)
        sys.exit()
    os.wait()
    print(flush=True)
"""


@pytest.fixture(scope="module")
def driver() -> Iterator[Any]:
    process = subprocess.Popen(
        [sys.executable, "-c", DRIVER],
        env={**os.environ, "PYTHONPATH": f"{PYTHONPATH}:{os.environ.get('PYTHONPATH', '')}"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    yield process
    process.communicate()


def run_with(driver: Any, change: str, folder: Path, name: str) -> Any:
    """Change torch, execute RUN, and return its results."""
    script = "".join(textwrap.dedent(part) for part in (COMMON, change, RUN))
    answer = folder.parent / f"{folder.name}.json"
    driver.stdin.write(json.dumps([script, str(folder), name, str(answer)]) + "\n")
    driver.stdin.flush()
    driver.stdout.readline()
    told = json.loads(answer.read_text())
    assert "error" not in told, told["error"]
    return told


@pytest.mark.long
@pytest.mark.parametrize("name", OTHERS)
def test_the_file_is_right_whatever_torch_does(name: str, driver: Any, tmp_path: Path) -> None:
    change, by_torch = OTHERS[name]
    told = run_with(driver, change, tmp_path, "views_of_one_storage")
    # The failure is that of torch, and the old file still exists.
    assert told["failure"] in ("AttributeError", "PicklingError")
    assert (told["left"], told["old"]) == (["model.pt"], True)
    assert told["exists"] == str(tmp_path / "model.pt")
    expected = describe(zoo.build("views_of_one_storage"))
    for file in ("model.pt", "background.pt"):
        outcome = stock().load(tmp_path / file)
        assert outcome.error is None
        assert outcome.description == expected
    assert names_in(tmp_path) == ["background.pt", "model.pt"]
    for written_by, downgrades, sync_s in told["reports"]:
        assert sync_s > 0  # durable in any case
        assert written_by in ("torch", "ioshape")
        if by_torch is not None:
            assert written_by == ("torch" if by_torch else "ioshape")
        if by_torch:
            assert any("written by torch itself" in note for note in downgrades), downgrades


def test_a_record_that_nobody_knows_is_kept(driver: Any, tmp_path: Path) -> None:
    run_with(driver, OTHERS["a record that nobody knows yet"][0], tmp_path, "shared_objects")
    assert content_of(tmp_path / "model.pt", ".more") == b"something"
    assert_same(torch.load(tmp_path / "model.pt"), zoo.build("shared_objects"))
