# SPDX-License-Identifier: Apache-2.0
"""Save on a failing device.

A save fails with a message or is durable, and the old file survives.
"""

import contextlib
import errno
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ioshape

from . import power_device as device
from . import power_judge as judge
from . import power_saves as saves

N_ROUNDS = 5
N_BLOCKS = 200


def _choose_rules(random_: random.Random, size: int) -> tuple[str, dict[str, Any]]:
    """Return which requests fail, in words and as rules for qemu."""
    error = {"event": "none", "errno": errno.EIO, "immediately": False}
    kind = random_.choice(("writes", "blocks", "a flush", "a write"))
    if kind == "writes":
        return "all writes", {"inject-error": [error | {"iotype": "write"}]}
    if kind == "blocks":
        # A request that includes one of these blocks fails.
        some = sorted(random_.sample(range(0, size // 512, 8), N_BLOCKS))
        bad = [error | {"iotype": "write", "sector": sector} for sector in some]
        return f"{N_BLOCKS} blocks", {"inject-error": bad}
    if kind == "a flush":
        return kind, {"inject-error": [error | {"iotype": "flush", "once": True}]}
    which = random_.randint(2, 12)
    event = {"event": "pwritev"}
    rules = {
        "set-state": [event | {"state": n, "new_state": n + 1} for n in range(1, which)],
        "inject-error": [error | event | {"iotype": "write", "once": True, "state": which}],
    }
    return f"write {which}", rules


@contextlib.contextmanager
def _failing(disk: device.Device, at: Path, rules: dict[str, Any]) -> Iterator[None]:
    with device.small_requests(at):
        disk.refuse(rules)
        try:
            yield
        finally:
            disk.accept()


class _Series:
    """Versions of one checkpoint. A failed save leaves the old version or its own."""

    def __init__(self, at: Path) -> None:
        self._at = at
        self._oldest = self._newest = 0
        self._wrong: list[str] = []

    def _save(self, version: int) -> None:
        raise NotImplementedError

    def _judge(self, versions: range) -> str:
        """Return what is wrong with it, or ""."""
        raise NotImplementedError

    def take_wrong(self) -> list[str]:
        """Return the findings since the last call."""
        wrong, self._wrong = self._wrong, []
        return wrong

    def save(self) -> bool:
        """Save the next version, and return whether it succeeded."""
        self._newest += 1
        try:
            self._save(self._newest)
        except Exception as error:
            if not isinstance(error, ioshape.StorageError) or not error.errno:
                self._wrong.append(f"fails without saying how: {error!r}")
            return False
        self._oldest = self._newest
        return True

    def must_save(self) -> None:
        if not self.save():
            self._wrong.append("cannot be saved though the device works again")

    def judge(self) -> None:
        """Judge the checkpoint after a remount, when no cache has its bytes."""
        wrong = self._judge(range(self._oldest, self._newest + 1))
        if wrong:
            self._wrong.append(wrong)


class _File(_Series):
    """A file that is replaced each time."""

    name = "model.pt"

    def _save(self, version: int) -> None:
        ioshape.save(saves.contents(self.name, version), self._at / self.name)

    def _judge(self, versions: range) -> str:
        return judge.judge_file(self._at / self.name, versions)


class _Checkpoints(_Series):
    """Checkpoints of one rank. A version is a step."""

    name = "run"

    def _save(self, version: int) -> None:
        ioshape.save_group(
            saves.contents(self.name, version), self._at / self.name, version, keep_last=2
        )

    def _judge(self, versions: range) -> str:
        steps = []
        for one in ioshape.checkpoints(self._at / self.name):
            try:
                one.verify()
                found = one.load(0)
            except Exception as error:
                return f"is torn: {error}"
            if not saves.is_equal(found, saves.contents(self.name, one.step)):
                return f"has contents in step {one.step} that nobody saved"
            steps.append(one.step)
        if not steps or steps[-1] not in versions:
            return f"has steps {steps}; the newest is not in {versions[0]} to {versions[-1]}"
        return ""


def trial(folder: Path, image: Path, seed: int) -> tuple[int, list[str]]:
    """Return the number of saves while the device failed, and the findings."""
    random_ = random.Random(f"eio {seed}")
    at = folder / "disk"
    disk = device.Device(folder, image)
    all_series = _File(at), _Checkpoints(at)
    findings = []
    device.mount(disk.file, at)
    for series in all_series:
        series.must_save()
    for number in range(N_ROUNDS):
        what, rules = _choose_rules(random_, image.stat().st_size)
        series = random_.choice(all_series)
        with _failing(disk, at, rules):
            series.save()
        # The filesystem may have shut itself down. If this save succeeds it must be durable.
        if random_.random() < 0.5:
            random_.choice(all_series).save()
        device.unmount(at)
        device.mount(disk.file, at)
        for series in all_series:
            series.judge()
            series.must_save()
            wrong = series.take_wrong()
            findings += [f"round {number}, {what}: {series.name} {one}" for one in wrong]
    device.unmount(at)
    disk.stop()
    return N_ROUNDS, findings
