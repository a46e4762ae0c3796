# SPDX-License-Identifier: Apache-2.0
"""Make DeepSpeed use ioshape's checkpoint engine, and report the end of each checkpoint to it."""

from __future__ import annotations

import functools
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ioshape._core.replacing import replace
from ioshape._integrations.huggingface.whole import is_inside
from ioshape._integrations.tested import is_tested

if TYPE_CHECKING:
    from types import ModuleType

#: section of the JSON configuration
SECTION = "ioshape"

_always = False  # also if the configuration does not name ioshape


def follow(_module: ModuleType, *, load: bool) -> None:  # noqa: ARG001 - its loads are ours, too
    """Use ioshape's engine wherever DeepSpeed would choose its own that calls torch.save.

    "ioshape run" calls this when DeepSpeed's engine module has been imported.
    """
    global _always  # noqa: PLW0603
    if is_tested("deepspeed"):
        import_module("ioshape.deepspeed")
        _always = True


def patch(ours: Any) -> None:
    """Make DeepSpeed create engines of this class if the configuration says so."""
    _choose(import_module("deepspeed.runtime.checkpoint_engine.utils"), ours)
    _end_checkpoints(import_module("deepspeed.runtime.engine").DeepSpeedEngine, ours)


def _choose(utils: Any, ours: Any) -> None:
    by_deepspeed, torchs = utils.create_checkpoint_engine, utils.TorchCheckpointEngine

    @functools.wraps(by_deepspeed)
    def create_checkpoint_engine(config_params: Any, *rest: Any, **named: Any) -> Any:
        section = getattr(config_params, "_param_dict", {}).get(SECTION)
        if section is not None:
            return ours(config_params, **_checked(section))
        made = by_deepspeed(config_params, *rest, **named)
        return ours(config_params) if _always and type(made) is torchs else made

    replace([(by_deepspeed, create_checkpoint_engine)])


def _checked(section: Any) -> dict[str, Any]:
    if isinstance(section, dict) and set(section) <= {"background"}:
        return section
    raise ValueError(
        f'cannot understand "{SECTION}": {section!r} in DeepSpeed\'s configuration; write '
        f'"{SECTION}": {{"background": true}}, or {{}}'
    )


def _end_checkpoints(engine_class: Any, ours: Any) -> None:
    by_deepspeed = engine_class.save_checkpoint

    @functools.wraps(by_deepspeed)
    def save_checkpoint(self: Any, save_dir: Any, *arguments: Any, **named: Any) -> Any:
        done = by_deepspeed(self, save_dir, *arguments, **named)
        if isinstance(self.checkpoint_engine, ours):
            self.checkpoint_engine.end()
            if is_inside(save_dir):
                self.checkpoint_engine.wait()  # the caller renames the directory next
        return done

    engine_class.save_checkpoint = save_checkpoint
