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
    from collections.abc import Callable, Sequence
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
    """Patches now what is there, and the rest when it comes."""
    later = {}
    for name, sequel in _SEQUELS.items():
        if name in sys.modules:
            _try(name, sequel)
        else:
            later[name] = sequel
    if later:
        sys.meta_path.insert(0, _Finder(later))


def _loads() -> bool:
    """Whether loading is ours as well."""
    return os.environ.get("IOSHAPE_RUN") != "no-load"


def _patch(_name: str) -> None:
    from ioshape import patch  # noqa: PLC0415

    patch(load=_loads())


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


_SEQUELS = {
    "torch": _patch,
    "safetensors": _patch_safetensors,
    "torch.distributed.checkpoint": _patch_dcp,
    # The whole of Lightning, and its older part by itself.
    "lightning.fabric.plugins.io.torch_io": _patch_lightning,
    "lightning_fabric.plugins.io.torch_io": _patch_lightning,
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
