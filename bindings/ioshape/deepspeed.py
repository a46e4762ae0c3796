# SPDX-License-Identifier: Apache-2.0
"""A checkpoint engine for DeepSpeed: durable, atomic, verified checkpoints.

    import ioshape.deepspeed

After this import, `"ioshape": {}` or `"ioshape": {"background": true}` in DeepSpeed's JSON
configuration enables the engine. You can also set it in code, on all ranks:

    engine.checkpoint_engine = ioshape.deepspeed.CheckpointEngine(background=True)

"ioshape run" enables it for an unchanged script.
"""

from __future__ import annotations

import os
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import TYPE_CHECKING, Any

try:
    from deepspeed.runtime.checkpoint_engine.checkpoint_engine import (
        CheckpointCommitInfo as Info,
    )
    from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine as Base
except ModuleNotFoundError as _error:
    raise ImportError(
        f"ioshape.deepspeed needs DeepSpeed ({_error}); install it: pip install deepspeed"
    ) from None
except ImportError as _error:
    raise ImportError(
        f"ioshape.deepspeed needs a newer DeepSpeed ({_error}); update it: pip install -U deepspeed"
    ) from None

import torch
from torch import distributed

from ioshape._core import terminal as _terminal
from ioshape._core.errors import failure
from ioshape._files.open import open as open_file
from ioshape._integrations.deepspeed import patching
from ioshape._load.load import load as our_load
from ioshape._save.save import save as our_save
from ioshape._save.save import save_async

if TYPE_CHECKING:
    from ioshape._save.handle import SaveHandle

__all__ = ["CheckpointEngine"]


# A rank waits for the slowest rank's files. Storage may take much longer than a training step.
_TIMEOUT = timedelta(hours=24)


class _Ranks:
    """A gloo group for these messages only. All ranks create it at one point in their program.

    The group of the training may use NCCL, which stops the job when a checkpoint is slow. The
    collectives of a group must also come in one order on all ranks, which a background thread
    cannot guarantee.
    """

    def __init__(self) -> None:
        self.rank = distributed.get_rank() if distributed.is_initialized() else 0
        group = None
        if distributed.is_initialized() and distributed.get_world_size() > 1:
            group = distributed.new_group(backend="gloo", timeout=_TIMEOUT)
        self._group = group

    def all_agree(self, mine: bool) -> bool:
        """Return whether all ranks say yes. Each rank waits for the others."""
        if self._group is None:
            return mine
        said = torch.tensor([mine], dtype=torch.uint8)
        options: Any = distributed.AllreduceOptions()
        options.reduceOp = distributed.ReduceOp.MIN
        # Call the group's own method. Functions of torch.distributed use a registry that
        # destroy_process_group() empties, while a save may still be in progress.
        self._group.allreduce([said], options).wait()
        return bool(said.item())


class CheckpointEngine(Base):  # type: ignore[misc] # see pyproject
    """DeepSpeed checkpoint engine that uses ioshape.save() and ioshape.load().

    All ranks must create it at the same point of their program. The file `latest` names a
    checkpoint only when the files of all ranks are on stable storage. If a rank fails to save, all
    ranks raise, and `latest` keeps naming the previous checkpoint.

    Args:
        config_params: DeepSpeed's configuration, which is ignored.
        background: whether training waits for one copy in memory only. If such a save fails, the
            next save_checkpoint() or wait() raises on all ranks.
    """

    def __init__(self, config_params: Any = None, background: bool = False) -> None:
        super().__init__(config_params)
        self.name = "ioshape"
        self.background = background
        self._ranks = _Ranks()
        self._info: Info | None = None  # describes the checkpoint that is being saved
        self._handles: list[SaveHandle] = []
        self._failure: Exception | None = None
        self._thread = ThreadPoolExecutor(1, "ioshape") if background else None
        self._ending: Future[None] | None = None

    def create(self, info: Info) -> None:
        """Begin a checkpoint, after the previous one is complete. DeepSpeed calls it.

        Args:
            info: DeepSpeed's description of the checkpoint.
        """
        self.wait()
        self._info, self._handles, self._failure = info, [], None

    def save(self, state_dict: Any, path: str) -> None:
        """Save a file of the checkpoint. An error is raised at the end of it, on all ranks.

        Args:
            state_dict: the object to save.
            path: path of the file.
        """
        if self._info is None:
            our_save(state_dict, path, tier=False)
            return
        try:
            if self.background:
                self._handles.append(save_async(state_dict, path, tier=False))
            else:
                our_save(state_dict, path, tier=False)
        except Exception as error:
            self._failure = self._failure or error

    def load(self, path: str, map_location: Any = None) -> Any:
        """Load and verify a file.

        Args:
            path: path of the file.
            map_location: as in torch.load.
        """
        return our_load(path, map_location, weights_only=False)

    def is_decoupled(self) -> bool:
        """Return True: this engine writes `latest`, not DeepSpeed."""
        return True

    def get_commit_info(self) -> None:
        """Return None: DeepSpeed has nothing to wait for at the next training step."""

    def commit(self, _info: Info) -> bool:
        """Wait until the checkpoint under way is complete. Return True."""
        self.end()
        self.wait()
        return True

    def end(self) -> None:
        """Complete the checkpoint, in the background if so configured.

        save_checkpoint() calls it on all ranks after it has passed all files to save().
        """
        info, self._info = self._info, None
        if info is None:
            return
        if self._thread is None:
            self._complete(info)
        else:
            self._ending = self._thread.submit(self._complete_in_background, info)

    def wait(self) -> None:
        """Wait until the last checkpoint is complete. All ranks must call it.

        Raises:
            StorageError: this rank or another failed to save. `latest` still names the previous
                checkpoint.
        """
        ending, self._ending = self._ending, None
        if ending is not None:
            ending.result()

    def cleanup(self) -> None:
        """Wait like wait(). DeepSpeed calls it at the end of training."""
        self.wait()

    def _complete_in_background(self, info: Info) -> None:
        try:
            self._complete(info)
        except Exception as error:
            # If the program never calls wait(), the error would be lost. The exit handler of
            # ioshape reports only files that failed, not a failed `latest` or another rank.
            _terminal.say(str(error) or repr(error))
            raise

    def _complete(self, info: Info) -> None:
        failed = self._failure
        for handle in self._handles:
            failed = failed or handle.exception()  # type: ignore[assignment] # no interrupts here
        self._all_or_none(failed, info)
        failed = None
        if self._ranks.rank == 0 and info.save_latest:
            try:
                with open_file(os.path.join(info.save_dir, "latest"), "wb") as file:  # noqa: PTH118
                    file.write(info.tag.encode())
            except OSError as error:
                failed = error
        self._all_or_none(failed, info)

    def _all_or_none(self, failed: Exception | None, info: Info) -> None:
        if self._ranks.all_agree(failed is None):
            return
        if failed is not None:
            raise failed
        path = os.path.join(info.save_dir, info.tag)  # noqa: PTH118
        raise failure(
            -5,
            f'cannot save the checkpoint "{path}": another rank failed',
            path,
            "save",
            remedy="see the output of that rank; the file latest names the previous checkpoint",
        )


patching.patch(CheckpointEngine)
