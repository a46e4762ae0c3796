# SPDX-License-Identifier: Apache-2.0
"""Measure how evenly something is shared."""

from collections.abc import Sequence


def jain(values: Sequence[float]) -> float:
    """Return Jain's index of fairness, which is 1 if all values are equal."""
    squares = sum(value**2 for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else 1.0
