# SPDX-License-Identifier: Apache-2.0
"""Import the parts of DeepSpeed that ioshape uses, or say what to install."""

from __future__ import annotations

try:
    from deepspeed.runtime.checkpoint_engine.checkpoint_engine import (
        CheckpointCommitInfo as Info,
    )
    from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine as Base
except ModuleNotFoundError as error:
    raise ImportError(
        f"ioshape.deepspeed needs DeepSpeed ({error}); install it: pip install deepspeed"
    ) from None
except ImportError as error:
    raise ImportError(
        f"ioshape.deepspeed needs a newer DeepSpeed ({error}); update it: pip install -U deepspeed"
    ) from None

__all__ = ["Base", "Info"]
