# SPDX-License-Identifier: Apache-2.0
"""Test that docs/frameworks.md states the versions that were tested."""

import re

import frameworks
import tried
from packaging.requirements import Requirement
from tree import ROOT


def declared() -> list[Requirement]:
    """Return the requirements by which the project installs packages for tests."""
    lines = (ROOT / "tests" / "support" / "requirements.txt").read_text().splitlines()
    lines += [one for framework in frameworks.FRAMEWORKS.values() for one in framework.packages]
    extras = (ROOT / "pyproject.toml").read_text()
    lines += re.findall(r'^\w+ = \["([\w-]+>=[^"]+)"\]$', extras, re.MULTILINE)
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


def test_the_page_has_a_version_for_all_that_is_tried() -> None:
    assert list(tried.versions()) == list(tried.TRIALS)
    for trial in tried.TRIALS.values():
        for name in trial.tests:
            assert (ROOT / "tests" / "integrations" / name).is_file()


def test_the_versions_are_such_as_the_project_installs() -> None:
    found = tried.versions()
    wanted = [one for one in declared() if one.name in found]
    assert len({one.name for one in wanted}) > 5
    assert not [one for one in wanted if not one.specifier.contains(found[one.name])]
