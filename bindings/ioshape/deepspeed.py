# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of DeepSpeed, saved as safely as all others.

    import ioshape.deepspeed

Then the JSON configuration decides: `"ioshape": {}`, or `"ioshape": {"background": true}`. Or one
line, on all ranks, puts it into an engine:

    engine.checkpoint_engine = ioshape.deepspeed.CheckpointEngine(background=True)

Under "ioshape run" an unchanged script saves this way.
"""

from __future__ import annotations

import os
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from ioshape._core import terminal as _terminal
from ioshape._core.errors import failure
from ioshape._files.open import open as open_file
from ioshape._integrations.deepspeed import patching
from ioshape._integrations.deepspeed.original import Base, Info
from ioshape._integrations.deepspeed.ranks import Ranks
from ioshape._load.load import load as our_load
from ioshape._save.save import save as our_save
from ioshape._save.save import save_async

if TYPE_CHECKING:
    from ioshape._save.handle import SaveHandle

__all__ = ["CheckpointEngine"]


class CheckpointEngine(Base):  # type: ignore[misc] # see pyproject
    """Writes through ioshape.save(), reads through ioshape.load().

    All ranks make one at the same place in their program. The file `latest` names a checkpoint when
    the files of all ranks are on stable storage, and not before. If a rank cannot save, all ranks
    raise, and `latest` stays.

    Args:
        config_params: DeepSpeed's configuration; it is not looked at.
        background: training waits for one copy in memory. A save that fails raises from the next
            save_checkpoint(), or from wait(), on all ranks.
    """

    def __init__(self, config_params: Any = None, background: bool = False) -> None:
        super().__init__(config_params)
        self.name = "ioshape"
        self.background = background
        self._ranks = Ranks()
        self._info: Info | None = None  # of the checkpoint that is being saved
        self._handles: list[SaveHandle] = []
        self._failure: Exception | None = None
        self._thread = ThreadPoolExecutor(1, "ioshape") if background else None
        self._ending: Future[None] | None = None

    def create(self, info: Info) -> None:
        """Begins a checkpoint, when the one before is complete. DeepSpeed calls it."""
        self.wait()
        self._info, self._handles, self._failure = info, [], None

    def save(self, state_dict: Any, path: str) -> None:
        """Saves a file. What fails in a checkpoint is raised at its end, on all ranks.

        Args:
            state_dict: what to save.
            path: of the file.
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
        """Loads and verifies a file.

        Args:
            path: of the file.
            map_location: as in torch.load.
        """
        return our_load(path, map_location, weights_only=False)

    def is_decoupled(self) -> bool:
        """True: `latest` is not DeepSpeed's to write."""
        return True

    def get_commit_info(self) -> None:
        """None: DeepSpeed has nothing to wait for at the next step."""

    def commit(self, _info: Info) -> bool:
        """Waits for the checkpoint under way."""
        self.end()
        self.wait()
        return True

    def end(self) -> None:
        """All files have been given to save(). Called on all ranks, by save_checkpoint()."""
        info, self._info = self._info, None
        if info is None:
            return
        if self._thread is None:
            self._complete(info)
        else:
            self._ending = self._thread.submit(self._complete_in_background, info)

    def wait(self) -> None:
        """Waits until the last checkpoint is complete; on all ranks.

        Raises:
            StorageError: it is not, on this rank or another one. `latest` names the one before.
        """
        ending, self._ending = self._ending, None
        if ending is not None:
            ending.result()

    def cleanup(self) -> None:
        """As wait(). DeepSpeed calls it in the end."""
        self.wait()

    def _complete_in_background(self, info: Info) -> None:
        try:
            self._complete(info)
        except Exception as error:
            # The end of the process tells of files that failed; of the rest, nobody else may.
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
            remedy="its output says why; the file latest names the checkpoint before",
        )


patching.patch(CheckpointEngine)
