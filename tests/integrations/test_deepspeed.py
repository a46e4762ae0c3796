# SPDX-License-Identifier: Apache-2.0
"""Test DeepSpeed with ioshape: by its JSON, by one line of code, and under "ioshape run".

Each test has two ranks. They continue from the loaded state as if training had not stopped.
"""

import json
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import frameworks
import pytest
from processes import Forker, Program, environment, run_program
from records import is_ours, names_in
from tree import ROOT

PROGRAM = ROOT / "tests" / "support" / "programs" / "deepspeed_ranks.py"

#: modules that engines need
MODULES = ("deepspeed", "torch._inductor.compile_fx")


@pytest.fixture(scope="module")
def python() -> str:
    try:
        return str(frameworks.environment("deepspeed"))
    except frameworks.CannotInstall as problem:
        pytest.skip(str(problem))


@pytest.fixture(scope="module")
def plain(python: str) -> Iterator[Forker]:
    with closing(Forker(MODULES, python=python)) as forker:
        yield forker


@pytest.fixture(scope="module")
def under_run(python: str) -> Iterator[Forker]:
    """Yield a forker whose programs run under `ioshape run`."""
    with closing(Forker(MODULES, python=python, under_run=True)) as forker:
        yield forker


def run(forker: Forker, folder: Path, what: str, stage: int, **options: object) -> str:
    """Run two ranks, and return what they print."""
    program = Program(folder, [str(PROGRAM), what, str(stage), json.dumps(options)], {}, forker)
    with closing(program):
        output, errors = program.end()
    return output + errors


def files_in(folder: Path) -> dict[str, bool]:
    """Return the files of the checkpoint, and whether ioshape wrote them."""
    assert (folder / "run" / "latest").read_text() == "global_step3"
    parts = folder / "run" / "global_step3"
    return {name: is_ours(parts / name) for name in names_in(parts)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "background"),
    [
        pytest.param(0, False, marks=pytest.mark.long),
        pytest.param(1, True, marks=pytest.mark.long),
        pytest.param(2, False, marks=pytest.mark.long),
        (3, True),
    ],
)
def test_the_json_configuration_names_us(
    stage: int, background: bool, plain: Forker, tmp_path: Path
) -> None:
    run(plain, tmp_path, "json_config", stage, ioshape={"background": background})
    files = files_in(tmp_path)
    assert len(files) == {0: 1, 1: 3, 2: 3, 3: 4}[stage]
    assert all(files.values()), files


FIRST = """
import ioshape.deepspeed
import torch

torch.save({"a": torch.ones(300_000)}, "model.pt")
"""


@pytest.mark.slow
@pytest.mark.long  # covered by test_a_script_may_begin_with_a_part_of_ours
def test_a_script_under_run_may_begin_with_our_module(python: str, tmp_path: Path) -> None:
    """Import ioshape.deepspeed first. It imports torch, which the hook must still notice."""
    (tmp_path / "first.py").write_text(FIRST)
    command = (python, "-m", "ioshape", "run", "first.py")
    done = subprocess.run(
        command, cwd=tmp_path, env=environment(), capture_output=True, text=True, check=True
    )
    assert is_ours(tmp_path / "model.pt"), done.stderr
    assert "does not handle" not in done.stderr


@pytest.mark.long
def test_one_line_puts_us_into_an_engine(plain: Forker, tmp_path: Path) -> None:
    run(plain, tmp_path, "one_line", 2)
    assert all(files_in(tmp_path).values())


@pytest.mark.slow
@pytest.mark.parametrize("how", ["under_run", pytest.param("plain", marks=pytest.mark.long)])
def test_an_unchanged_script(how: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    said = run(request.getfixturevalue(how), tmp_path, "unchanged", 1)
    assert set(files_in(tmp_path).values()) == {how == "under_run"}
    assert "file objects" not in said


@pytest.mark.long
def test_a_checkpoint_of_ours_becomes_a_universal_one(under_run: Forker, tmp_path: Path) -> None:
    run(under_run, tmp_path, "universal", 1)


@pytest.mark.slow
@pytest.mark.parametrize("background", [True, pytest.param(False, marks=pytest.mark.long)])
def test_if_one_rank_fails_all_raise_and_the_latest_stays(
    background: bool, under_run: Forker, tmp_path: Path
) -> None:
    # The run needs the module ioshape.deepspeed, which is there.
    run(under_run, tmp_path, "one_rank_fails", 1, ioshape={"background": background})


@pytest.mark.long
def test_nothing_is_the_latest_before_it_is_written(plain: Forker, tmp_path: Path) -> None:
    run(plain, tmp_path, "held", 1, ioshape={"background": True})


MISSING = """
    import sys

    sys.modules["deepspeed"] = None
    try:
        import ioshape.deepspeed
    except ImportError as error:
        assert "pip install deepspeed" in str(error)
    else:
        raise AssertionError("imported")
"""


def test_without_deepspeed(tmp_path: Path) -> None:
    run_program(tmp_path, MISSING)
