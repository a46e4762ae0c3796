# SPDX-License-Identifier: Apache-2.0
"""Makes torch.save ours as soon as the program has imported torch; without torch, does nothing.

Every Python below "ioshape run" loads this before the program's first line, so it imports nothing
that is not there already.
"""

import os
import sys

TYPE_CHECKING = False  # the one in typing takes milliseconds to import
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType


class _Finder:
    """First among the finders: what the others find for "torch" gets a sequel."""

    def find_spec(
        self, name: str, path: "Sequence[str] | None", target: "ModuleType | None" = None
    ) -> "ModuleSpec | None":
        if name != "torch":
            return None
        for finder in sys.meta_path:
            if finder is self:
                continue
            # Finders from before Python 3.4 have no such method, and are skipped by Python as well.
            find = getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = find(name, path, target) if find else None
            if spec is not None:
                self._follow(spec)
                return spec
        return None

    def _follow(self, spec: "ModuleSpec") -> None:
        """Sees to it that patch() is called when the module's code has run.

        The loader stays the loader that it is, for whoever asks it for sources or data: only this
        one, and only for this once, has another exec_module().
        """
        loader = spec.loader
        try:
            contents = vars(loader)
            execute = loader.exec_module  # type: ignore[union-attr] # AttributeError is caught
        except (TypeError, AttributeError) as error:
            _complain(error)
            return

        def execute_and_patch(module: "ModuleType") -> None:
            execute(module)
            contents.pop("exec_module", None)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                _patch()

        contents["exec_module"] = execute_and_patch


def install() -> None:
    """Patches torch now if it is there, or else when it comes."""
    if "torch" in sys.modules:
        _patch()
    else:
        sys.meta_path.insert(0, _Finder())


def _patch() -> None:
    try:
        from ioshape import patch  # noqa: PLC0415

        patch(load=os.environ.get("IOSHAPE_RUN") != "no-load")
    except Exception as error:
        _complain(error)


def _complain(error: Exception) -> None:
    # The program is worth more than our part in it. But nobody shall believe that it was there.
    try:  # noqa: SIM105 - contextlib has not been imported yet, as a rule
        sys.stderr.write(
            f"ioshape: torch.save stays torch's own in process {os.getpid()} ({sys.executable}): "
            f"{type(error).__name__}: {error}\n"
        )
    except Exception:
        pass  # there may be no stderr
