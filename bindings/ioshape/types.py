# SPDX-License-Identifier: Apache-2.0
"""Types that functions of ioshape return or take, or pass to callbacks; for annotations."""

from ioshape._core.job import Job
from ioshape._core.report import Downgrade, Progress
from ioshape._group.checkpoints import Checkpoint, Shard
from ioshape._load.contents import Contents
from ioshape._load.pickled import Tensor
from ioshape._load.reader import Record
from ioshape._load.stored import StoredTensor
from ioshape._load.verified import VerifiedFile
from ioshape._probe import Storage, StorageTarget
from ioshape._save.atomic import AtomicFile
from ioshape._save.preemption import Notice
from ioshape._slots.slots import Place, Slot, SlotInfo

__all__ = [
    "AtomicFile",
    "Checkpoint",
    "Contents",
    "Downgrade",
    "Job",
    "Notice",
    "Place",
    "Progress",
    "Record",
    "Shard",
    "Slot",
    "SlotInfo",
    "Storage",
    "StorageTarget",
    "StoredTensor",
    "Tensor",
    "VerifiedFile",
]

# Messages and pickles then name the public module, not the one that defines the class.
for _name in __all__:
    globals()[_name].__module__ = __name__
