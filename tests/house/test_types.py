# SPDX-License-Identifier: Apache-2.0
"""Type checkers know all types of the public interface."""

import type_completeness


def test_all_public_types_are_known() -> None:
    percent, unknown = type_completeness.of_package()
    assert not unknown
    assert percent == 100
