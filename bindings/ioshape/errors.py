# SPDX-License-Identifier: Apache-2.0
"""What ioshape raises and warns of.

All that concerns storage derives from StorageError, which is an OSError with errno and path. Those
that most programs name are in ioshape itself, too.
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

# So that messages and pickles say where programs find it, not where its file is.
for _name in __all__:
    globals()[_name].__module__ = "ioshape" if _name in ioshape.__all__ else __name__
