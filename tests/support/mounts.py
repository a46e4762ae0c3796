# SPDX-License-Identifier: Apache-2.0
"""Small filesystems, seen by one program alone."""

import os
import subprocess
from pathlib import Path

import pytest

MIB = 1 << 20


def small_disk(kind: str, folder: Path) -> list[str]:
    """A command that mounts a small filesystem at folder/disk, seen by the rest of it alone."""
    (folder / "disk").mkdir()
    mount = 'mount -t tmpfs -o size=40m none "$0"'
    if kind == "ext4":
        if os.geteuid() != 0:
            pytest.skip("mounting an image takes root")
        image = folder / "image"
        with image.open("wb") as file:
            file.truncate(64 * MIB)
        path = os.environ["PATH"] + ":/usr/sbin:/sbin"
        subprocess.run(
            ("mkfs.ext4", "-q", "-F", image), check=True, env={**os.environ, "PATH": path}
        )
        mount = f'mount -o loop {image} "$0"'
    return seen_alone(f'{mount} && exec "$@"', str(folder / "disk"))


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
