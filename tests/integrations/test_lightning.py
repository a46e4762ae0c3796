# SPDX-License-Identifier: Apache-2.0
"""Test Lightning with the plug-in, and an unchanged script under "ioshape run"."""

import pickle
from pathlib import Path

import pytest
import torch
from processes import common_forker, run_program
from records import is_ours, names_in

COMMON = """
    import warnings

    warnings.simplefilter("ignore")
    import lightning
    import torch
    from torch.utils.data import DataLoader


    class Model(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(1)
            self.layer = torch.nn.Linear(8, 1)

        def training_step(self, batch, _):
            return self.layer(batch).square().mean()

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters())


    def trainer(epochs, **options):
        return lightning.Trainer(
            **options,
            max_epochs=epochs,
            accelerator="cpu",
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir="root",
        )


    def data():
        return DataLoader(torch.arange(64.0).reshape(8, 8) / 64, batch_size=4)


    def assert_goes_on(path, **options):
        resumed, whole = Model(), Model()
        trainer(4, enable_checkpointing=False).fit(whole, data())
        options["enable_checkpointing"] = False
        trainer(4, **options).fit(resumed, data(), ckpt_path=path, weights_only=False)
        assert torch.equal(resumed.layer.weight, whole.layer.weight)
"""

PLUGIN = (
    COMMON
    + """
    from lightning.pytorch.callbacks import ModelCheckpoint

    import ioshape.lightning

    for kind in ("IoshapeCheckpointIO", "IoshapeAsyncCheckpointIO"):
        io = getattr(ioshape.lightning, kind)()
        best = ModelCheckpoint(dirpath=kind, filename="{epoch}", monitor=None, save_last=True)
        some = ModelCheckpoint(
            dirpath=f"{kind}/some", filename="{step}", save_top_k=-1, every_n_train_steps=3
        )
        half = trainer(2, plugins=[io], callbacks=[best, some])
        half.fit(Model(), data())
        half.save_checkpoint(f"new/directory/{kind}.ckpt")
        half.strategy.remove_checkpoint(f"new/directory/{kind}.ckpt")
        half.save_checkpoint(f"{kind}/half.ckpt")
        assert_goes_on(f"{kind}/half.ckpt", plugins=[io])
        half.save_checkpoint("memory://elsewhere.ckpt")
        assert_goes_on("memory://elsewhere.ckpt", plugins=[io])
"""
)


@pytest.mark.slow
def test_the_plug_ins(tmp_path: Path) -> None:
    run_program(tmp_path, PLUGIN)
    for kind in ("IoshapeCheckpointIO", "IoshapeAsyncCheckpointIO"):
        names = names_in(tmp_path / kind)
        assert names == ["epoch=1.ckpt", "half.ckpt", "last.ckpt", "some"]
        assert names_in(tmp_path / kind / "some") == ["step=3.ckpt"]
        for name in [*names[:3], "some/step=3.ckpt"]:
            assert is_ours(tmp_path / kind / name), name
    assert names_in(tmp_path / "new" / "directory") == []


UNDER_RUN = (
    COMMON
    + """
    from lightning.fabric import Fabric
    from lightning.pytorch.plugins.io import AsyncCheckpointIO

    for name, plugins in (("plain", []), ("async", [AsyncCheckpointIO()])):
        half = trainer(2, plugins=plugins)
        half.fit(Model(), data())
        half.save_checkpoint(f"{name}.ckpt")
        half.strategy.teardown()
        assert_goes_on(f"{name}.ckpt")
    half.save_checkpoint("memory://elsewhere.ckpt")
    assert_goes_on("memory://elsewhere.ckpt")
    fabric = Fabric(accelerator="cpu", devices=1)
    model = Model()
    fabric.save("fabric.ckpt", {"model": model, "step": 2})
    loaded = {"model": Model(), "step": 0}
    fabric.load("fabric.ckpt", loaded)
    assert loaded["step"] == 2
"""
)


@pytest.mark.slow
@pytest.mark.parametrize("under_run", [True, pytest.param(False, marks=pytest.mark.long)])
def test_an_unchanged_script(under_run: bool, tmp_path: Path) -> None:
    run_program(tmp_path, UNDER_RUN, forker=common_forker(under_run=under_run))
    for name in ("plain.ckpt", "async.ckpt", "fabric.ckpt"):
        assert is_ours(tmp_path / name) == under_run, name
        assert torch.load(tmp_path / name, weights_only=False)


FAILING = """
    import pathlib
    import resource
    import signal

    import torch

    import ioshape
    from ioshape.lightning import IoshapeAsyncCheckpointIO

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    io = IoshapeAsyncCheckpointIO()
    checkpoint = {"weight": torch.ones(1_000_000)}
    io.save_checkpoint(checkpoint, "sound.ckpt")
    io.load_checkpoint("sound.ckpt")
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, resource.RLIM_INFINITY))
    for call in (
        lambda: io.load_checkpoint("lost.ckpt"),
        lambda: io.remove_checkpoint("lost.ckpt"),
        io.teardown,
    ):
        io.save_checkpoint(checkpoint, "lost.ckpt")
        try:
            call()
        except ioshape.StorageError as error:
            assert error.path.endswith("lost.ckpt")
        else:
            raise AssertionError("nobody heard of it")
    io.teardown()
    assert sorted(path.name for path in pathlib.Path().glob("*.ckpt*")) == ["sound.ckpt"]
"""


@pytest.mark.slow
def test_a_save_that_fails_in_the_background_is_heard_of(tmp_path: Path) -> None:
    run_program(tmp_path, FAILING)


def test_it_goes_to_other_processes(tmp_path: Path) -> None:
    from ioshape.lightning import IoshapeAsyncCheckpointIO  # noqa: PLC0415 - takes seconds

    io = IoshapeAsyncCheckpointIO()
    io.save_checkpoint({"x": torch.ones(3)}, tmp_path / "x.ckpt")
    other = pickle.loads(pickle.dumps(io))  # as Lightning's spawned ranks receive it
    other.teardown()
    io.teardown()
    assert torch.equal(other.load_checkpoint(tmp_path / "x.ckpt")["x"], torch.ones(3))


MISSING = """
    import sys

    sys.modules["lightning.fabric"] = sys.modules["lightning_fabric"] = None
    try:
        import ioshape.lightning
    except ImportError as error:
        assert "pip install lightning" in str(error)
    else:
        raise AssertionError("imported")
"""


def test_without_lightning(tmp_path: Path) -> None:
    run_program(tmp_path, MISSING)
