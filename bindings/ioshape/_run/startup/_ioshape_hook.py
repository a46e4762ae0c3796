# SPDX-License-Identifier: Apache-2.0
"""Patch torch and the frameworks when the program imports them. Without them, do nothing.

Every Python process below "ioshape run" loads this module before the program's first line.
Therefore it imports no other module at its top.
"""

import os
import sys

TYPE_CHECKING = False  # the one in typing takes milliseconds to import
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType


#: The integrations that "ioshape run" found in entry points: MODULE=PACKAGE.MODULE:FUNCTION,
#: separated by spaces. The function is called with MODULE once the program has imported it.
VARIABLE = "IOSHAPE_INTEGRATIONS"


class _Finder:
    """The first finder in sys.meta_path. It calls a function after one of its modules was imported.

    The functions are called sequels. The other finders find the modules.
    """

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
            # Python, too, skips finders without this method, which is new in Python 3.4.
            find = getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = find(name, path, target) if find else None
            if spec is not None:
                self._follow(name, spec)
                return spec
        return None

    def _follow(self, name: str, spec: "ModuleSpec") -> None:
        """Make the loader call the sequel when the module's code has run.

        The program may ask the loader for sources or data, so the loader object is not replaced.
        This one object gets another exec_module(), which removes itself after its first call.
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
    """Patch torch and the frameworks in this process."""
    sequels: dict[str, Callable[[ModuleType], None]] = {"torch": _patch}
    for line in os.environ.get(VARIABLE, "").split():
        name, _, function = line.partition("=")
        sequels[name] = _Integration(function)
    follow(sequels)


class _Integration:
    """The function of an entry point, given as MODULE:NAME. A call imports it."""

    def __init__(self, function: str) -> None:
        self._module, _, self._name = function.partition(":")

    def __call__(self, module: "ModuleType") -> None:
        ours = __import__(self._module, fromlist=[self._name])
        getattr(ours, self._name)(module, load=_loads())


def follow(sequels: "Mapping[str, Callable[[ModuleType], None]]") -> None:
    """Call the sequels of imported modules now, and the others after their modules' import."""
    later = {}
    # Two finders with the same name would ask each other for it forever.
    followed = [finder._sequels for finder in sys.meta_path if isinstance(finder, _Finder)]
    for name, sequel in sequels.items():
        if name in sys.modules:
            _try(sys.modules[name], name, sequel)
        elif not any(name in one for one in followed):
            later[name] = sequel
    if later:
        sys.meta_path.insert(0, _Finder(later))


def _loads() -> bool:
    """Return whether ioshape also loads files."""
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
    # The program goes on without ioshape, and the user must know it.
    what = (
        "torch.save was not replaced" if name == "torch" else f"saves of {name} were not replaced"
    )
    try:  # noqa: SIM105 - contextlib has not been imported yet, as a rule
        sys.stderr.write(
            f"ioshape: {what} in process {os.getpid()} ({sys.executable}): "
            f"{type(error).__name__}: {error}\n"
        )
    except Exception:
        pass  # there may be no stderr
