# SPDX-License-Identifier: Apache-2.0
"""patch() replaces torch.save and torch.load in foreign code, and unpatch() restores them."""

import inspect
import io
import pickle
import sys
import threading
import types
import warnings
import zipfile
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import ioshape
import pytest
import torch
from checkpoints import checkpoint, left_clean, names_in, number_in
from processes import run_program
from records import is_ours
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

MIB = 1 << 20


class Torchs:
    """torch's own functions. They are attributes because patch() would replace global variables."""

    save: Any = staticmethod(torch.save)
    load: Any = staticmethod(torch.load)


@pytest.fixture(autouse=True)
def _left_clean() -> Iterator[None]:
    """Check that no test leaves anything patched."""
    with left_clean():
        yield
    assert torch.save is Torchs.save
    assert torch.load is Torchs.load


def _damage(path: Path) -> None:
    """Change a byte in the middle of a tensor."""
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, io.SEEK_CUR)
        file.write(bytes([byte ^ 1]))


# ---- References in modules -----------------------------------------------------------------------

# All the ways in which a module can reach the two functions.
CALLER = """
import torch
import torch as t
import torch.serialization
from torch import load, save
from torch import load as l
from torch import save as s
from torch.serialization import save as deeper, load as load_deeper

serialization = torch.serialization


def inside(*arguments, **named):
    from torch import save as save_inside

    save_inside(*arguments, **named)


class Engine:
    def save(self, *arguments, **named):
        torch.save(*arguments, **named)

    def load(self, *arguments, **named):
        return torch.load(*arguments, **named)


SAVES = {
    "torch.save": lambda *arguments: torch.save(*arguments),
    "as": lambda *arguments: t.save(*arguments),
    "from": lambda *arguments: save(*arguments),
    "from as": lambda *arguments: s(*arguments),
    "serialization": lambda *arguments: torch.serialization.save(*arguments),
    "serialization from": lambda *arguments: deeper(*arguments),
    "serialization as": lambda *arguments: serialization.save(*arguments),
    "inside": inside,
    "method": Engine().save,
}
LOADS = {
    "torch.load": lambda path: torch.load(path),
    "from": lambda path: load(path),
    "from as": lambda path: l(path),
    "serialization": lambda path: torch.serialization.load(path),
    "serialization from": lambda path: load_deeper(path),
    "method": Engine().load,
}
"""


@pytest.fixture
def caller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    """Return a function that imports a foreign module of a given name."""
    folder = tmp_path / "modules"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    imported = []

    def import_it(name: str) -> Any:
        (folder / f"{name}.py").write_text(CALLER)
        imported.append(name)
        return import_module(name)

    yield import_it
    for name in imported:
        sys.modules.pop(name, None)


def _assert_all_save(module: Any, folder: Path, ours: bool) -> None:
    for i, (way, save) in enumerate(module.SAVES.items()):
        path = folder / f"{i}.pt"
        assert save(checkpoint(i), path) is None, way
        assert is_ours(path) == ours, way
        assert number_in(path) == i, way


def _assert_all_load(module: Any, path: Path, ours: bool) -> None:
    """Check which load each way calls: only ours names the damaged tensor."""
    for way, load in module.LOADS.items():
        if ours:
            with pytest.raises(ioshape.DamagedError, match="'data'"):
                load(path)
        else:
            try:
                load(path)
            except ioshape.DamagedError:
                pytest.fail(f"{way} is ours")
            except RuntimeError:
                pass  # torch may detect the damage, too


def test_every_way_to_call_them_is_ours_while_patched(
    tmp_path: Path, caller: Callable[[str], Any]
) -> None:
    before = caller("imported_before")
    damaged = tmp_path / "damaged.pt"
    ioshape.save(checkpoint(1), damaged)
    _damage(damaged)
    with ioshape.patched():
        after = caller("imported_after")
        for module in (before, after):
            _assert_all_save(module, tmp_path, True)
            _assert_all_load(module, damaged, True)
    for module in (before, after):
        _assert_all_save(module, tmp_path, False)
        _assert_all_load(module, damaged, False)
        assert module.s is module.save is module.deeper is Torchs.save
        assert module.l is module.load is module.load_deeper is Torchs.load


def test_the_load_can_be_left_alone(tmp_path: Path, caller: Callable[[str], Any]) -> None:
    module = caller("saves_only")
    damaged = tmp_path / "damaged.pt"
    ioshape.save(checkpoint(1), damaged)
    _damage(damaged)
    with ioshape.patched(load=False):
        assert torch.load is Torchs.load
        _assert_all_save(module, tmp_path, True)
        _assert_all_load(module, damaged, False)


def _holders() -> dict[tuple[str, str], int]:
    """Return every name in every module that refers to one of the two functions."""
    found = {}
    for name, module in list(sys.modules.items()):
        for key, value in list(getattr(module, "__dict__", {}).items()):
            if value is Torchs.save or value is Torchs.load:
                found[name, key] = id(value)
    return found


def test_nothing_is_left_of_it(caller: Callable[[str], Any]) -> None:
    caller("holder")
    before = _holders()
    assert ("torch", "save") in before
    assert ("torch.serialization", "load") in before
    assert ("holder", "s") in before
    with ioshape.patched():
        # Only our own modules still refer to torch's functions, which they need to call.
        assert {name.partition(".")[0] for name, _ in _holders()} <= {"ioshape"}
    assert _holders() == before


def test_ours_go_on_reaching_torchs(tmp_path: Path) -> None:
    """Check that our functions still call torch's: otherwise they would recurse for ever."""
    with ioshape.patched():
        torch.save(checkpoint(1), tmp_path / "old.pt", _use_new_zipfile_serialization=False)
        stream = io.BytesIO()
        torch.save(checkpoint(2), stream)
        stream.seek(0)
        assert torch.load(stream)["number"] == 2
        assert torch.load(tmp_path / "old.pt")["number"] == 1
    assert not zipfile.is_zipfile(tmp_path / "old.pt")


# ---- Nesting -------------------------------------------------------------------------------------


def test_patches_nest() -> None:
    ioshape.patch()
    ours = torch.save
    with ioshape.patched():
        ioshape.patch()
        assert torch.save is ours
        ioshape.unpatch()
        assert torch.save is ours
    assert torch.save is ours
    ioshape.unpatch()
    assert torch.save is Torchs.save
    with pytest.raises(RuntimeError, match=r"unpatch\(\) without patch\(\)"):
        ioshape.unpatch()
    assert torch.save is Torchs.save


def test_packages_are_followed_once(tmp_path: Path) -> None:
    """Check that several patches before the import of a package wrap its functions once."""
    (tmp_path / "accelerate").mkdir()
    (tmp_path / "accelerate" / "__init__.py").touch()
    (tmp_path / "accelerate" / "accelerator.py").write_text(
        "class Accelerator:\n    save_model = save_state = print\n"
    )
    program = """
import sys
import ioshape
for _ in range(2):
    with ioshape.patched(safetensors=True):
        pass
sys.path.insert(0, sys.argv[1])
import accelerate.accelerator
assert accelerate.accelerator.Accelerator.save_state is not print
"""
    run_program(tmp_path, program, tmp_path)


def test_an_exception_undoes_it() -> None:
    with pytest.raises(ValueError, match="enough"), ioshape.patched():
        raise ValueError("enough")
    assert torch.save is Torchs.save


@pytest.mark.long
def test_threads_may_patch(tmp_path: Path) -> None:
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for _ in range(20):
                with ioshape.patched():
                    path = tmp_path / f"{number}.pt"
                    torch.save({"number": number}, path)
                    assert is_ours(path)
                    assert torch.load(path) == {"number": number}
        except BaseException as error:
            failures.append(error)

    ioshape.configure(durable=False)
    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_odd_modules_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Lazy(types.ModuleType):
        """A lazy module, which would import much more if an attribute were requested."""

        def __getattr__(self, name: str) -> object:
            raise AssertionError(f"{name} was asked for")

    class Slotted:
        __slots__ = ()

    lazy: Any = Lazy("lazy")
    lazy.kept = Torchs.save
    for name, odd in {"lazy": lazy, "slotted": Slotted(), "none": None}.items():
        monkeypatch.setitem(sys.modules, name, odd)
    with ioshape.patched():
        assert lazy.kept is torch.save
    assert lazy.kept is Torchs.save


# ---- Signatures and errors -----------------------------------------------------------------------


def test_they_look_like_torchs() -> None:
    theirs = {"save": Torchs.save, "load": Torchs.load}
    with ioshape.patched():
        ours = {"save": torch.save, "load": torch.load}
        for name, original in theirs.items():
            function: Any = ours[name]
            assert function is not original
            assert inspect.signature(function) == inspect.signature(original)
            for attribute in ("__name__", "__qualname__", "__module__", "__doc__"):
                assert getattr(function, attribute) == getattr(original, attribute)
            assert function.__wrapped__ is original
            assert inspect.isfunction(function)
            # Functions are pickled by name, as multiprocessing sends them.
            assert pickle.loads(pickle.dumps(function)) is function


def test_all_of_torchs_arguments_are_taken(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    with ioshape.patched():
        torch.save(checkpoint(1), path, pickle, 4, True, True)
        assert torch.load(path, weights_only=False)["number"] == 1
        torch.save(
            obj=checkpoint(2),
            f=str(path),
            pickle_module=pickle,
            pickle_protocol=2,
            _use_new_zipfile_serialization=True,
            _disable_byteorder_record=False,
        )
        assert torch.load(path, "cpu", pickle, weights_only=False)["number"] == 2
        assert (
            torch.load(
                f=path, map_location=lambda storage, _: storage, weights_only=True, mmap=True
            )["number"]
            == 2
        )
        assert torch.load(path, weights_only=False, encoding="latin1")["number"] == 2
        with pytest.raises(TypeError):
            torch.save(checkpoint(1), path, protocol=2)  # type: ignore[call-arg]
        with pytest.raises(TypeError):
            torch.load(path, "cpu", None, True)  # type: ignore[call-arg]


class Mine:
    """A class that weights_only=True refuses."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mine)

    def __hash__(self) -> int:
        return 1


def test_the_default_of_weights_only_is_torchs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "mine.pt"
    with ioshape.patched():
        torch.save(Mine(), path)
        with pytest.raises(pickle.UnpicklingError, match="weights_only") as ours:
            torch.load(path)
        assert torch.load(path, weights_only=False) == Mine()
        with torch.serialization.safe_globals([Mine]):
            assert torch.load(path) == Mine()
        monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
        with pytest.warns(UserWarning, match="TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"):
            assert torch.load(path) == Mine()
        monkeypatch.delenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD")
        monkeypatch.setenv("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "1")
        with pytest.raises(pickle.UnpicklingError):
            torch.load(path, weights_only=False)
        monkeypatch.delenv("TORCH_FORCE_WEIGHTS_ONLY_LOAD")
    with pytest.raises(pickle.UnpicklingError) as theirs:
        torch.load(path)
    assert str(ours.value) == str(theirs.value)


def test_errors_are_of_the_same_kind(tmp_path: Path) -> None:
    def outcomes() -> list[type[BaseException]]:
        seen = []
        for action in (
            lambda: torch.save(checkpoint(1), tmp_path / "missing" / "model.pt"),
            lambda: torch.save(threading.Lock(), tmp_path / "lock.pt"),
            lambda: torch.save(checkpoint(1), 5),  # type: ignore[arg-type]
            lambda: torch.load(tmp_path / "none.pt"),
            lambda: torch.load(5),  # type: ignore[arg-type]
        ):
            with pytest.raises(BaseException) as caught:  # noqa: PT011
                action()
            seen.append(caught.type)
        return seen

    theirs = outcomes()
    with ioshape.patched():
        ours = outcomes()
    for our, their in zip(ours, theirs, strict=True):
        assert issubclass(our, their) or issubclass(our, OSError), (our, their)
    assert names_in(tmp_path) == [] or "model.pt" not in names_in(tmp_path)


def test_no_warnings_are_added(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with ioshape.patched():
            torch.save(checkpoint(1), tmp_path / "model.pt")
            assert torch.load(tmp_path / "model.pt")["number"] == 1


# ---- Foreign programs ----------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_dcp_works_while_patched(tmp_path: Path) -> None:
    """Check torch's distributed checkpoints, which save shards to streams with torch.save."""
    state = {"model": {"weight": torch.arange(1000.0)}, "step": 7}
    with ioshape.patched():
        dcp_save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
        loaded = {"model": {"weight": torch.zeros(1000)}, "step": 0}
        dcp_load(loaded, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert torch.equal(loaded["model"]["weight"], state["model"]["weight"])  # type: ignore[index]
    assert loaded["step"] == 7


# The calls of deepspeed/runtime/checkpoint_engine/torch_checkpoint_engine.py and its neighbours.
DEEPSPEED = """
    import torch


    class TorchCheckpointEngine:
        def __init__(self, zipfile_serialization):
            self.zipfile_serialization = zipfile_serialization

        def save(self, state_dict, path: str):
            torch.save(
                state_dict, path, _use_new_zipfile_serialization=self.zipfile_serialization
            )

        def load(self, path: str, map_location=None):
            return torch.load(path, map_location=map_location, weights_only=False)


    class FastCheckpointEngine(TorchCheckpointEngine):
        def save(self, state_dict, path: str):
            with open(path, "wb") as writer:
                torch.save(
                    obj=state_dict,
                    f=writer,
                    _use_new_zipfile_serialization=self.zipfile_serialization,
                )
"""

DEEPSPEED_PROGRAM = """
    import sys

    import ioshape

    ioshape.patch()
    from engines import FastCheckpointEngine, TorchCheckpointEngine

    import torch

    for kind in (TorchCheckpointEngine, FastCheckpointEngine):
        for zipped in (False, True):
            engine = kind(zipped)
            path = f"{kind.__name__} {zipped}.pt"
            engine.save({"module": {"weight": torch.arange(10.0)}, "step": 3}, path)
            loaded = engine.load(path, map_location="cpu")
            assert loaded["step"] == 3
            assert torch.equal(loaded["module"]["weight"], torch.arange(10.0))
"""


def test_deepspeeds_ways_to_call_them(tmp_path: Path) -> None:
    (tmp_path / "engines.py").write_text(inspect.cleandoc(DEEPSPEED))
    run_program(tmp_path, DEEPSPEED_PROGRAM)
    assert is_ours(tmp_path / "TorchCheckpointEngine True.pt")
    assert not zipfile.is_zipfile(tmp_path / "TorchCheckpointEngine False.pt")
    # This engine saves to a file that it has just opened.
    assert is_ours(tmp_path / "FastCheckpointEngine True.pt")


ACCELERATE = """
    import sys

    from accelerate import Accelerator

    import torch
    import ioshape

    ioshape.patch()
    torch.manual_seed(1)


    def made():
        model = torch.nn.Linear(64, 64)
        optimizer = torch.optim.AdamW(model.parameters())
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        return accelerator.prepare(model, optimizer, scheduler)


    def step(model, optimizer, scheduler):
        accelerator.backward(model(torch.ones(8, 64)).square().sum())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()


    accelerator = Accelerator(cpu=True)
    first = made()
    step(*first)
    accelerator.save_state("state", safe_serialization=False)
    accelerator.save({"step": 1}, "saved.pt")
    step(*first)
    expected = first[0].weight.clone()

    accelerator.free_memory()
    second = made()
    assert not torch.equal(second[0].weight, expected)
    accelerator.load_state("state")
    step(*second)
    assert torch.equal(second[0].weight, expected)
    assert torch.load("saved.pt") == {"step": 1}
"""


@pytest.mark.long
def test_accelerate_saves_and_resumes(tmp_path: Path) -> None:
    run_program(tmp_path, ACCELERATE)
    assert is_ours(tmp_path / "saved.pt")
    for name in ("pytorch_model.bin", "optimizer.bin", "scheduler.bin"):
        assert is_ours(tmp_path / "state" / name), name
    assert not [name for name in names_in(tmp_path / "state") if "ioshape-tmp" in name]


class WritesAlone:
    """A file object with only the methods that torch.save documents."""

    def __init__(self) -> None:
        self.content = b""
        self.asked: list[str] = []

    def write(self, data: bytes) -> int:
        self.content += bytes(data)
        return len(data)

    def flush(self) -> None:
        pass

    def __getattr__(self, name: str) -> object:
        self.asked.append(name)
        raise RuntimeError(f"there is no {name}")


class Nameless(io.BytesIO):
    """A file object of Python whose properties raise."""

    @property
    def name(self) -> str:
        raise RuntimeError("it has no name")

    raw = name

    def tell(self) -> int:
        raise RuntimeError("it has no position")

    def fileno(self) -> int:
        raise RuntimeError("it has no descriptor")


def test_file_objects_need_no_more_than_for_torch() -> None:
    picky = WritesAlone()
    torch.save(checkpoint(1), picky)  # type: ignore[arg-type]
    asked_by_torch, picky = set(picky.asked), WritesAlone()
    with ioshape.patched():
        torch.save(checkpoint(2), picky)  # type: ignore[arg-type]
        assert set(picky.asked) <= asked_by_torch
        nameless = Nameless()
        torch.save(checkpoint(3), nameless)
    assert torch.load(io.BytesIO(picky.content))["number"] == 2
    assert torch.load(io.BytesIO(nameless.getvalue()))["number"] == 3
