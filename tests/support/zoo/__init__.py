# SPDX-License-Identifier: Apache-2.0
"""Objects of every kind that people put into checkpoints, each built the same way every time.

Both the tests and the process that has never heard of ioshape import this package: what is pickled
by name must be found by name.
"""

from zoo import objects, special, tensors, training
from zoo.cases import CASES, Case, build, filled
from zoo.objects import Config
from zoo.refused import not_picklable

__all__ = [
    "CASES",
    "Case",
    "Config",
    "build",
    "filled",
    "not_picklable",
    "objects",
    "special",
    "tensors",
    "training",
]
