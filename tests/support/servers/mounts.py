# SPDX-License-Identifier: Apache-2.0
"""Small filesystems that only one program can see."""

import os
import subprocess
from pathlib import Path

import pytest

MIB = 1 << 20


#: command that makes an image of each kind, and its size: XFS needs at least that much
IMAGES = {"ext4": ("mkfs.ext4 -q -F", 64 * MIB), "xfs": ("mkfs.xfs -q -f", 300 * MIB)}


def small_disk(
    kind: str, folder: Path, name: str = "disk", n_bytes: int | None = None
) -> list[str]:
    """Return a command prefix that mounts a small filesystem at folder/name, visible only to the
    command.
    """
    (folder / name).mkdir()
    mount = 'mount -t tmpfs -o size=40m none "$0"'
    if kind in IMAGES:
        if os.geteuid() != 0:
            pytest.skip("mounting an image takes root")
        command, least_bytes = IMAGES[kind]
        image = folder / f"{name}.image"
        with image.open("wb") as file:
            file.truncate(n_bytes or least_bytes)
        path = os.environ["PATH"] + ":/usr/sbin:/sbin"
        subprocess.run((*command.split(), image), check=True, env={**os.environ, "PATH": path})
        mount = f'mount -o loop {image} "$0"'
    return seen_alone(f'{mount} && exec "$@"', str(folder / name))


def seen_alone(script: str, name: str = "sh") -> list[str]:
    """Return a command prefix: a script that mounts and then runs "$@", in its own namespace."""
    apart = ["unshare", "--mount", *([] if os.geteuid() == 0 else ["--map-root-user"])]
    command = [*apart, "sh", "-c", script, name]
    tried = subprocess.run([*command, "true"], capture_output=True, text=True, check=False)
    if tried.returncode:
        pytest.skip(f"this machine does not let us mount ({tried.stderr.strip()})")
    return command


def client_of(backing: Path) -> list[str]:
    """Return a command prefix under which /sys shows stripefs's files, like those of a Lustre
    client.
    """
    shown = backing / "sys" / "fs" / "lustre"
    return seen_alone(f'mount -t tmpfs none /sys/fs && ln -s {shown} /sys/fs/lustre && exec "$@"')
