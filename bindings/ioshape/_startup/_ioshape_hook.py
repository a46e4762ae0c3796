# SPDX-License-Identifier: Apache-2.0
"""Makes torch.save ours as soon as the program has imported torch. Without torch, it does nothing.

Every Python below "ioshape run" loads this before the program's first line, so it imports nothing
that is not there already.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
