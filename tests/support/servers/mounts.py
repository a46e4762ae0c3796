# SPDX-License-Identifier: Apache-2.0
"""Small filesystems, seen by one program alone."""

import os
import subprocess
from pathlib import Path

import pytest

MIB = 1 << 20


#: how an image of a kind is made, and how many bytes it has: XFS takes none that is smaller
IMAGES = {"ext4": ("mkfs.ext4 -q -F", 64 * MIB), "xfs": ("mkfs.xfs -q -f", 300 * MIB)}


def small_disk(
    kind: str, folder: Path, name: str = "disk", n_bytes: int | None = None
) -> list[str]:
    """A command that mounts a small filesystem at folder/name, seen by the rest of it alone."""
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
    """A command: the shell's script, which mounts and then runs "$@", seen by the rest alone."""
    apart = ["unshare", "--mount", *([] if os.geteuid() == 0 else ["--map-root-user"])]
    command = [*apart, "sh", "-c", script, name]
    tried = subprocess.run([*command, "true"], capture_output=True, text=True, check=False)
    if tried.returncode:
        pytest.skip(f"this machine does not let us mount ({tried.stderr.strip()})")
    return command


def client_of(backing: Path) -> list[str]:
    """A command; the rest of it sees what Lustre's client shows in /sys of a mount of stripefs."""
    shown = backing / "sys" / "fs" / "lustre"
    return seen_alone(f'mount -t tmpfs none /sys/fs && ln -s {shown} /sys/fs/lustre && exec "$@"')
