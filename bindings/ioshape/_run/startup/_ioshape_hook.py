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


#: what "ioshape run" has found in the entry points of its Python: module=package.module:function,
#: which is called with that module when it has been imported
VARIABLE = "IOSHAPE_INTEGRATIONS"


class _Finder:
    """First among the finders: what the others find for these modules gets a sequel."""

    def __init__(self, sequels: "dict[str, Callable[[ModuleType], None]]") -> None:
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
                _try(module, name, sequel)

        contents["exec_module"] = execute_and_follow


def install() -> None:
    """Patches what this process imports."""
    sequels: dict[str, Callable[[ModuleType], None]] = {"torch": _patch}
    for line in os.environ.get(VARIABLE, "").split():
        name, _, function = line.partition("=")
        sequels[name] = _Integration(function)
    follow(sequels)


class _Integration:
    """A function of somebody's, by its name; it is imported when it is called."""

    def __init__(self, function: str) -> None:
        self._module, _, self._name = function.partition(":")

    def __call__(self, module: "ModuleType") -> None:
        ours = __import__(self._module, fromlist=[self._name])
        getattr(ours, self._name)(module, load=_loads())


def follow(sequels: "Mapping[str, Callable[[ModuleType], None]]") -> None:
    """Calls these now for modules that are there, and for the rest when they have been imported."""
    later = {}
    # Two finders would ask each other for one name without end.
    followed = [finder._sequels for finder in sys.meta_path if isinstance(finder, _Finder)]
    for name, sequel in sequels.items():
        if name in sys.modules:
            _try(sys.modules[name], name, sequel)
        elif not any(name in one for one in followed):
            later[name] = sequel
    if later:
        sys.meta_path.insert(0, _Finder(later))


def _loads() -> bool:
    """Whether loading is ours as well."""
    return os.environ.get("IOSHAPE_RUN") != "no-load"


def _patch(_module: "ModuleType") -> None:
    import ioshape  # noqa: PLC0415

    # The first use of ioshape may be what imports torch: it has imported no module of ours yet.
    ioshape._bring_in(with_torch=True)
    ioshape.patch(load=_loads())


def _try(module: "ModuleType", name: str, sequel: "Callable[[ModuleType], None]") -> None:
    try:
        sequel(module)
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
