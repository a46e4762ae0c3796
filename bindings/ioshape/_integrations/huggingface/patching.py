# SPDX-License-Identifier: Apache-2.0
"""Make functions of Hugging Face packages fill a hidden directory that appears as a whole.

They are replaced once, when their package has been imported. They behave as before while
safetensors does not write through ioshape.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import re
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ioshape._core.config import is_durable
from ioshape._core.replacing import replace
from ioshape._files.directory import NewDirectory, sync_tree
from ioshape._integrations.huggingface.whole import (
    Whole,
    checkpoint,
    filling,
    filling_in,
    is_inside,
    redirected,
)
from ioshape._integrations.tested import is_tested
from ioshape._save import collected

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import ModuleType


def _is_in_force() -> bool:
    """Return whether safetensors writes through ioshape; False if it has not been imported."""
    safetensors = sys.modules.get("ioshape._integrations.safetensors.patching")
    return safetensors is not None and safetensors.is_in_force()


def _wrap(owner: Any, name: str, ours: Callable[..., Any]) -> None:
    """Replace a method by ours(method, self, ...)."""
    method = getattr(owner, name)

    @functools.wraps(method)
    def replaced(self: Any, *arguments: Any, **named: Any) -> Any:
        if not _is_in_force():
            return method(self, *arguments, **named)
        return ours(functools.partial(method, self), self, *arguments, **named)

    setattr(owner, name, replaced)


# ---- Sets of files ----------------------------------------------------------------------------


@contextlib.contextmanager
def _whole_set(path: str | os.PathLike[str]) -> Iterator[str]:
    """Yield the directory to which one process must write a set of files.

    The set appears at `path` when the block ends.
    """
    given, is_synced = os.fspath(path), is_durable(None)
    if is_inside(given) or os.path.isfile(given):  # noqa: PTH113 - the framework rejects a file
        yield given
        return
    with NewDirectory(given, durable=is_synced) as made:
        yield made.path
        for handle in collected.begun() or ():
            handle.wait()
        if not os.listdir(made.path):  # noqa: PTH208 - another rank writes
            os.makedirs(given, exist_ok=True)  # noqa: PTH103
            return
        if is_synced:
            sync_tree(made.path)
        made.commit()


def _save_pretrained(
    original: Callable[..., Any],
    _model: Any,
    save_directory: Any,
    is_main_process: bool = True,
    *arguments: Any,
    **named: Any,
) -> None:
    if not is_main_process or named.get("distributed_checkpoint"):
        original(save_directory, is_main_process, *arguments, **named)
        return
    if named.get("push_to_hub"):
        named.setdefault("repo_id", Path(save_directory).name)
    with _whole_set(save_directory) as folder:
        original(folder, is_main_process, *arguments, **named)


def _patch_models(module: Any) -> None:
    _wrap(module.PreTrainedModel, "save_pretrained", _save_pretrained)


def _patch_hub(module: Any) -> None:
    original = module.save_torch_state_dict

    @functools.wraps(original)
    def save_torch_state_dict(state_dict: Any, save_directory: Any, **named: Any) -> None:
        if not _is_in_force() or not named.get("is_main_process", True):
            original(state_dict, save_directory, **named)
            return
        with _whole_set(save_directory) as folder:
            original(state_dict, folder, **named)

    replace([(original, save_torch_state_dict)])


# ---- accelerate -------------------------------------------------------------------------------


def _save_model(
    original: Callable[..., Any],
    accelerator: Any,
    model: Any,
    save_directory: Any,
    *a: Any,
    **n: Any,
) -> None:
    if not accelerator.is_main_process:
        original(model, save_directory, *a, **n)
        return
    with _whole_set(save_directory) as folder:
        original(model, folder, *a, **n)


def _save_state(
    original: Callable[..., Any],
    accelerator: Any,
    output_dir: Any = None,
    *arguments: Any,
    **named: Any,
) -> Any:
    configuration = accelerator.project_configuration
    is_named = configuration.automatic_checkpoint_naming
    path = os.fspath(output_dir) if output_dir is not None else None
    folder = None
    if is_named:
        folder = os.path.join(accelerator.project_dir, "checkpoints")  # noqa: PTH118
        path = os.path.join(folder, f"checkpoint_{accelerator.save_iteration}")  # noqa: PTH118
    if path is None or is_inside(path) or (is_named and os.path.exists(path)):  # noqa: PTH110
        return original(output_dir, *arguments, **named)
    # accelerate regards everything in that directory as a checkpoint, also hidden names.
    with Whole(path, beside=folder) as whole:
        configuration.automatic_checkpoint_naming = False
        try:
            original(whole.folder, *arguments, **named)
        finally:
            configuration.automatic_checkpoint_naming = is_named
        if folder is not None and accelerator.is_main_process:
            whole.afterwards.append(
                functools.partial(_remove_old, folder, path, configuration.total_limit)
            )
        whole.finish()
    return Path(path)


def _remove_old(folder: str, newest: str, limit: int | None) -> None:
    """Remove old checkpoints, lowest numbers first, as accelerate does before it saves.

    Names without a number are not checkpoints of accelerate.
    """
    if limit is None:
        return
    numbered = [name for name in os.listdir(folder) if re.search("[0-9]", name)]  # noqa: PTH208
    others = [name for name in numbered if name != Path(newest).name]
    others.sort(key=lambda name: int(re.findall("[0-9]+", name)[0]))
    for name in others[: max(0, len(others) + 1 - limit)]:
        shutil.rmtree(os.path.join(folder, name), ignore_errors=True)  # noqa: PTH118


def _patch_accelerator(module: Any) -> None:
    _wrap(module.Accelerator, "save_model", _save_model)
    _wrap(module.Accelerator, "save_state", _save_state)


# ---- Trainer ----------------------------------------------------------------------------------


# The methods of Trainer that write to the checkpoint's directory.
_PARTS = ("save_model", "_save_optimizer_and_scheduler", "_save_scaler", "_save_rng_state")


def _elsewhere(original: Callable[..., Any], _self: Any, *given: Any, **named: Any) -> Any:
    there = {name: redirected(value) for name, value in named.items()}
    return original(*map(redirected, given), **there)


@contextlib.contextmanager
def _redirecting(trainer: Any, path: str) -> Iterator[None]:
    """Make a trainer write to the hidden directory while the block runs.

    The methods are replaced in the object, because a derived class may have overridden them.
    """
    before = {name: vars(trainer)[name] for name in _PARTS if name in vars(trainer)}
    save_model = trainer.save_model

    def save_model_elsewhere(output_dir: Any = None, _internal_call: bool = False) -> None:
        save_model(redirected(output_dir), _internal_call=_internal_call)
        # The Trainer sets best_model_checkpoint only if the path exists, which it does not yet.
        if output_dir == path and trainer.state.best_global_step == trainer.state.global_step:
            trainer.state.best_model_checkpoint = output_dir

    for name in _PARTS:
        setattr(trainer, name, functools.partial(_elsewhere, getattr(trainer, name), trainer))
    trainer.save_model = save_model_elsewhere
    try:
        yield
    finally:
        for name in _PARTS:
            delattr(trainer, name)
        vars(trainer).update(before)


def _save_checkpoint(
    prefix: str, original: Callable[..., Any], trainer: Any, model: Any, trial: Any = None
) -> None:
    name = f"{prefix}-{trainer.state.global_step}"
    path = os.path.join(trainer._get_output_dir(trial=trial), name)  # noqa: PTH118
    with checkpoint(path), _redirecting(trainer, path):
        original(model, trial)


def _push_from_checkpoint(original: Callable[..., Any], _trainer: Any, folder: str) -> None:
    whole = filling(folder)
    if whole is None:
        original(folder)
    else:
        whole.afterwards.append(functools.partial(original, folder))


def _patch_trainer(module: Any) -> None:
    # Attributes that may be missing come first, so that nothing is replaced before transformers 5.
    trainer, rotate = module.Trainer, module.rotate_checkpoints
    if list(inspect.signature(trainer._save_checkpoint).parameters) != ["self", "model", "trial"]:
        raise TypeError(
            "Trainer's _save_checkpoint() has other parameters; install transformers>=5"
        )
    save_checkpoint = functools.partial(_save_checkpoint, module.PREFIX_CHECKPOINT_DIR)
    _wrap(trainer, "_save_checkpoint", save_checkpoint)
    _wrap(module.TrainerState, "save_to_json", _elsewhere)
    _wrap(trainer, "_push_from_checkpoint", _push_from_checkpoint)

    @functools.wraps(rotate)
    def rotate_checkpoints(output_dir: str, *arguments: Any, **named: Any) -> None:
        """Remove old checkpoints once the new one is in place."""
        call = functools.partial(rotate, output_dir, *arguments, **named)
        whole = filling_in(output_dir)
        if whole is None:
            call()
        else:
            whole.afterwards.append(call)

    module.rotate_checkpoints = rotate_checkpoints


#: The modules that write sets of files or whole checkpoints. Each has the name of its package, and
#: the function that replaces functions in it.
MODULES: dict[str, tuple[str, Callable[[Any], None]]] = {
    "transformers.modeling_utils": ("transformers", _patch_models),
    "transformers.trainer": ("transformers", _patch_trainer),
    "accelerate.accelerator": ("accelerate", _patch_accelerator),
    "huggingface_hub.serialization._torch": ("huggingface_hub", _patch_hub),
}
_patched: set[str] = set()


def follow(module: ModuleType, *, load: bool = True) -> None:  # noqa: ARG001 - nothing here loads
    """Replace the functions of a module, once.

    "ioshape run" and ioshape.patch(safetensors=True) call this when one of the modules has been
    imported.
    """
    name = module.__name__
    package, replaces = MODULES[name]
    if name not in _patched and is_tested(package):
        _patched.add(name)
        replaces(module)
