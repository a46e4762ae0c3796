# SPDX-License-Identifier: Apache-2.0
"""Run power failures in the first process of a namespace, with which all its processes end.

Its mounts are private, and files in memory end with them. The process prints a line that says why
it cannot work, or an empty line. Then it reads requests, one line of JSON each, and answers each
with one. Leftovers of a trial are removed after it.
"""

import contextlib
import ctypes
import json
import logging
import os
import random
import shutil
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

import ioshape._group.load  # noqa: F401 - the forked processes of a trial need these modules
import torch

from . import power_device as device
from . import power_eio, power_judge, power_log, power_saves

#: Private memory; the library keeps its own files there, too.
MEMORY = Path("/dev/shm")
PRISTINE = MEMORY / "pristine"
TRIAL = MEMORY / "trial"
SLOTS = MEMORY / "slots"

#: Mount options, of which the seed chooses one.
OPTIONS = {
    "ext4": ("data=ordered", "data=ordered", "data=writeback", "data=journal"),
    "xfs": ("nouuid",),
    "btrfs": ("datacow", "compress=zstd"),
}

_MNT_DETACH = 2


class _Images:
    """The images of a disk after a power failure in a trial."""

    def __init__(self, request: dict[str, Any]) -> None:
        self._request = request
        self._pristine = PRISTINE / request["filesystem"]
        lot = random.Random(f"mount {request['seed']}")
        self._option = lot.choice(OPTIONS[request["filesystem"]])

    def _save(self) -> power_saves.History:
        image, at, log = TRIAL / "written", TRIAL / "disk", TRIAL / "log"
        shutil.copy(self._pristine, image)
        disk = device.Device(TRIAL, image, log)
        device.mount(disk.file, at, self._option)
        request = self._request
        history = power_saves.run(at, TRIAL / "history", log, request["seed"], request["durable"])
        device.unmount(at)
        disk.stop()
        image.unlink()
        return history

    def look(self) -> list[str]:
        """Make and judge all images of the trial, and return the findings."""
        seed, findings = self._request["seed"], list[str]()
        history = self._save()
        with contextlib.closing(power_log.Replay(TRIAL, self._pristine, TRIAL / "log")) as replay:
            chosen = power_log.choose_prefixes(
                replay.entries,
                history.saves[0].begun,
                history.acknowledged(),
                self._request["images"],
                random.Random(f"prefixes {seed}"),
            )
            for number, (prefix, way) in enumerate(chosen):
                lot = f"image {seed} {number}"
                image = replay.image(prefix, way, random.Random(lot))
                wrong = self._judge(image, history, prefix)
                where = f"{self._request['filesystem']}, {self._option}, prefix {prefix} ({way})"
                if wrong and not findings:
                    where += self._keep(replay.image(prefix, way, random.Random(lot)))
                findings += [f"{where}: {what}" for what in wrong]
        return findings

    def _judge(self, image: Path, history: power_saves.History, prefix: int) -> list[str]:
        at = TRIAL / f"prefix-{prefix}"
        try:
            device.mount(image, at, self._option)  # the kernel replays its journal
        except OSError as error:
            return [f"cannot be mounted: {error}"]
        try:
            return power_judge.judge(at, history, prefix)
        finally:
            device.unmount(at)

    def _keep(self, image: Path) -> str:
        """Keep the first bad image of a trial, for debugging."""
        if not self._request["durable"]:
            return ""
        kept = Path(self._request["work"]) / f"seed-{self._request['seed']}.image"
        device.call("cp", "--sparse=always", image, kept)
        return f", {kept.name}"


def _try_eio(request: dict[str, Any]) -> tuple[int, list[str]]:
    image = TRIAL / "failing"
    shutil.copy(PRISTINE / request["filesystem"], image)
    n_saves, findings = power_eio.trial(TRIAL, image, request["seed"])
    return n_saves, [f"{request['filesystem']}, EIO, {finding}" for finding in findings]


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    findings = _Images(request).look()
    n_eio = 0
    if request["durable"]:
        n_eio, more = _try_eio(request)
        findings += more
    return {"images": request["images"], "eio": n_eio, "findings": findings}


# ---- Service loop -------------------------------------------------------------------------------


def _clean_up() -> None:
    """Kill all other processes of the namespace and remove the mounts of a trial."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        while True:
            os.wait()
    libc = ctypes.CDLL(None)
    mounts = Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines()
    for mounted in reversed([line.split(" ")[1] for line in mounts]):
        if mounted.startswith(str(TRIAL)):
            libc.umount2(mounted.encode(), _MNT_DETACH)
    shutil.rmtree(TRIAL, ignore_errors=True)


def _serve_one(line: str) -> str:
    """Answer a request in a child, because a trial leaves threads and open files."""
    TRIAL.mkdir()
    answer = TRIAL / "answer"
    child = os.fork()
    if not child:
        status = 1
        try:
            answer.write_text(json.dumps(_answer(json.loads(line))), encoding="utf-8")
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    os.waitpid(child, 0)
    # A trial that failed has printed the reason.
    said = answer.read_text(encoding="utf-8") if answer.exists() else "{}"
    _clean_up()
    return said


def _prepare() -> None:
    """Prepare the filesystems. An OSError says that trials are impossible here."""
    device.call("mount", "-t", "tmpfs", "-o", "mode=1777,size=6g", "none", MEMORY)
    SLOTS.mkdir(mode=0o700)
    PRISTINE.mkdir()
    TRIAL.mkdir()
    for kind in device.SIZES:
        image = PRISTINE / kind
        device.make_filesystem(kind, image)
        disk = device.Device(TRIAL, image)
        device.mount(disk.file, TRIAL / "disk")
        device.unmount(TRIAL / "disk")
        disk.stop()
    _clean_up()


def main() -> None:
    # Output of C code must not mix with the answers.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)
    os.environ["IOSHAPE_COORDINATOR"] = f"local:{SLOTS}"
    logging.getLogger("ioshape").addHandler(logging.NullHandler())
    torch.set_num_threads(1)
    try:
        _prepare()
    except OSError as error:
        answers.write(f"{error}\n")
        return
    answers.write("\n")
    for line in sys.stdin:
        answers.write(_serve_one(line) + "\n")


if __name__ == "__main__":
    main()
