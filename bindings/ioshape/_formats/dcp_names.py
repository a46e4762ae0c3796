# SPDX-License-Identifier: Apache-2.0
"""What the files of a checkpoint are called."""

from __future__ import annotations

import re

#: the description of a checkpoint, which is there when all is
DESCRIPTION = ".metadata"
#: of data files: rank and number
DATA = re.compile(r"__(\d+)_(\d+)\.distcp")
#: descriptions that ranks write each for itself, under use_collectives=False
OF_A_RANK = re.compile(r"__(\d+)\.metadata")
