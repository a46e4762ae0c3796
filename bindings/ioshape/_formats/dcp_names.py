# SPDX-License-Identifier: Apache-2.0
"""Names of the files of a checkpoint of torch.distributed.checkpoint (DCP)."""

from __future__ import annotations

import re

#: description of a checkpoint; it exists once the checkpoint is complete
DESCRIPTION = ".metadata"
#: data files: groups for rank and number
DATA = re.compile(r"__(\d+)_(\d+)\.distcp")
#: descriptions that each rank writes for itself, under use_collectives=False
OF_A_RANK = re.compile(r"__(\d+)\.metadata")
