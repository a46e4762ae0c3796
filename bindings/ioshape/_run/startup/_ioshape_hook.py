# SPDX-License-Identifier: Apache-2.0
"""Makes torch.save ours as soon as the program has imported torch, and what frameworks write as
soon as it has imported those; without them, does nothing.

Every Python below "ioshape run" loads this before the program's first line, so it imports nothing
that is not there already.
"""

import os
import sys

TYPE_CHECKING = False  # the one in typing takes milliseconds to import
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType


class _Finder:
    """First among the finders: what the others find for these modules gets a sequel."""

    def __init__(self, sequels: "dict[str, Callable[[str], None]]") -> None:
        self._sequels = sequels

    def find_spec(
        self, name: str, path: "Sequence[str] | None", target: "ModuleType | None" = None
    ) -> "ModuleSpec | None":
        if name not in self._sequels:
            return None
        for finder in sys.meta_path:
            if finder is self:
                continue
            # Finders from before Python 3.4 have no such method, and are skipped by Python as well.
            find = getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = find(name, path, target) if find else None
            if spec is not None:
                self._follow(name, spec)
                return spec
        return None

    def _follow(self, name: str, spec: "ModuleSpec") -> None:
        """Sees to it that the sequel is called when the module's code has run.

        The loader stays the loader that it is, for whoever asks it for sources or data: only this
        one, and only for this once, has another exec_module().
        """
        loader = spec.loader
        try:
            contents = vars(loader)
            execute = loader.exec_module  # type: ignore[union-attr] # AttributeError is caught
        except (TypeError, AttributeError) as error:
            _complain(name, error)
            return

        def execute_and_follow(module: "ModuleType") -> None:
            execute(module)
            contents.pop("exec_module", None)
            sequel = self._sequels.pop(name, None)
            if not self._sequels and self in sys.meta_path:
                sys.meta_path.remove(self)
            if sequel is not None:
                _try(name, sequel)

        contents["exec_module"] = execute_and_follow


def install() -> None:
    """Patches what this process imports."""
    follow(_SEQUELS)


def follow(sequels: "Mapping[str, Callable[[str], None]]") -> None:
    """Calls these now for modules that are there, and for the rest when they have been imported."""
    later = {}
    # Two finders would ask each other for one name without end.
    followed = [finder._sequels for finder in sys.meta_path if isinstance(finder, _Finder)]
    for name, sequel in sequels.items():
        if name in sys.modules:
            _try(name, sequel)
        elif not any(name in one for one in followed):
            later[name] = sequel
    if later:
        sys.meta_path.insert(0, _Finder(later))


def _loads() -> bool:
    """Whether loading is ours as well."""
    return os.environ.get("IOSHAPE_RUN") != "no-load"


def _patch(_name: str) -> None:
    import ioshape  # noqa: PLC0415

    # The first use of ioshape may be what imports torch: it has imported no module of ours yet.
    ioshape._bring_in(with_torch=True)
    ioshape.patch(load=_loads())


def _patch_dcp(_name: str) -> None:
    from ioshape._dcp import patching  # noqa: PLC0415

    patching.patch(load=_loads())


def _patch_safetensors(_name: str) -> None:
    # Not by patch(): that needs torch, and a program may do without.
    from ioshape._safetensors import patching  # noqa: PLC0415

    patching.patch()


def _patch_lightning(name: str) -> None:
    from ioshape._lightning import patching  # noqa: PLC0415

    patching.patch(sys.modules[name].TorchCheckpointIO, loads=_loads())


def _patch_deepspeed(_name: str) -> None:
    import ioshape.deepspeed  # noqa: F401, PLC0415
    from ioshape._deepspeed import patching  # noqa: PLC0415

    patching.prefer()


def _patch_sb3(name: str) -> None:
    from ioshape._run import sb3  # noqa: PLC0415

    sb3.patch(sys.modules[name])


def _patch_directories(name: str) -> None:
    from ioshape._huggingface import patching  # noqa: PLC0415

    patching.patch(name)


#: Modules that write sets of files, and checkpoints with all that belongs to them.
DIRECTORIES = {
    "accelerate.accelerator": _patch_directories,
    "huggingface_hub.serialization._torch": _patch_directories,
    "transformers.modeling_utils": _patch_directories,
    "transformers.trainer": _patch_directories,
}

_SEQUELS = {
    "torch": _patch,
    "safetensors": _patch_safetensors,
    "torch.distributed.checkpoint": _patch_dcp,
    "deepspeed.runtime.engine": _patch_deepspeed,
    "stable_baselines3.common.save_util": _patch_sb3,
    # The whole of Lightning, and its older part by itself.
    "lightning.fabric.plugins.io.torch_io": _patch_lightning,
    "lightning_fabric.plugins.io.torch_io": _patch_lightning,
    **DIRECTORIES,
}


def _try(name: str, sequel: "Callable[[str], None]") -> None:
    try:
        sequel(name)
    except Exception as error:
        _complain(name, error)


def _complain(name: str, error: Exception) -> None:
    # The program is worth more than our part in it. But nobody shall believe that it was there.
    what = "torch.save stays torch's own" if name == "torch" else f"{name} writes by itself"
    try:  # noqa: SIM105 - contextlib has not been imported yet, as a rule
        sys.stderr.write(
            f"ioshape: {what} in process {os.getpid()} ({sys.executable}): "
            f"{type(error).__name__}: {error}\n"
        )
    except Exception:
        pass  # there may be no stderr
