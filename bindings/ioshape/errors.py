# SPDX-License-Identifier: Apache-2.0
"""Exceptions and warnings of ioshape.

All storage errors derive from StorageError, which is an OSError with errno and path. The most
common classes are also top-level names of ioshape.
"""

import ioshape
from ioshape._core.errors import (
    CanceledError,
    CoordinatorError,
    DamagedError,
    Different,
    FallbackWarning,
    FormatError,
    MismatchError,
    NoUsableCheckpointError,
    PassedOver,
    SkippedWarning,
    StorageError,
)

__all__ = [
    "CanceledError",
    "CoordinatorError",
    "DamagedError",
    "Different",
    "FallbackWarning",
    "FormatError",
    "MismatchError",
    "NoUsableCheckpointError",
    "PassedOver",
    "SkippedWarning",
    "StorageError",
]

# Messages and pickles then name the public module, not the one that defines the class.
for _name in __all__:
    globals()[_name].__module__ = "ioshape" if _name in ioshape.__all__ else __name__
