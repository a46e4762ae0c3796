# SPDX-License-Identifier: Apache-2.0
"""Random calls on descriptors have the same results with the preload library as without it.

A seed is a sequence of calls: files that are opened, duplicated, closed, renamed and written in
all ways, by threads, children and signal handlers. Each call prints its result and errno.
"""

from pathlib import Path

import pytest
from preloaded import Case, differences, make_inputs, preload, run, turns

STEPS = 400
SEEDS = range(12)
LONG_SEEDS = range(12, 600)
#: settings of the library: rare and frequent turns, alone and beside others, with and without waits
SETTINGS: tuple[dict[str, str], ...] = (
    {},
    {"IOSHAPE_PRELOAD_BYTES": "4096", "IOSHAPE_SLOTS": "8"},
    {"IOSHAPE_PRELOAD_BYTES": "1", "IOSHAPE_SLOTS": "8"},
    {"IOSHAPE_PRELOAD_WAIT_S": "0"},
    {"IOSHAPE_SLOTS": "8", "IOSHAPE_RATE": "50M"},
    {"IOSHAPE_PRELOAD_BYTES": "4096", "IOSHAPE_COORDINATOR": "redis://127.0.0.1:1"},
)


@pytest.fixture(scope="module", name="inputs")
def _inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("preloaded") / "inputs"
    make_inputs(folder)
    return folder


@pytest.mark.parametrize(
    "seed", [*SEEDS, *(pytest.param(seed, marks=pytest.mark.long) for seed in LONG_SEEDS)]
)
def test_random_calls_have_the_same_results(seed: int, inputs: Path, tmp_path: Path) -> None:
    case = Case(f"descriptors {seed} {STEPS}")
    variables = {"IOSHAPE_PRELOAD_WAIT_S": "1", **SETTINGS[seed % len(SETTINGS)]}
    plain = run(case, inputs, tmp_path / "work", {})
    assert plain.status == 0
    assert plain.stdout.count("\n") > STEPS
    preloaded = run(case, inputs, tmp_path / "work", preload(tmp_path, **variables))
    assert differences(plain, preloaded) == [], f"{case.name} with {variables}"
    if variables["IOSHAPE_PRELOAD_WAIT_S"] != "0":
        assert turns(tmp_path)
