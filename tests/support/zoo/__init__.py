# SPDX-License-Identifier: Apache-2.0
"""Objects of every kind that users put into checkpoints. Each is built in one way every time.

The tests import this package, and also the process that never imports ioshape. Both need it,
because objects that are pickled by name must be found by name.
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
