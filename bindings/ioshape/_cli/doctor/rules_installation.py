# SPDX-License-Identifier: Apache-2.0
"""What an administrator would say of what is installed, and of what processes of a host share."""

from __future__ import annotations

import stat
from typing import TYPE_CHECKING

from ioshape._cli.doctor import remedies
from ioshape._cli.doctor.facts import Finding
from ioshape._cli.output import human_size

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ioshape._cli.doctor.facts import Facts

_MIB = 1 << 20
_LITTLE_SHARED = 16 * _MIB


def password(facts: Facts) -> Iterator[Finding]:
    """Its file is readable for this user, and not for everybody."""
    it = facts.installation
    path = remedies.quoted(it.password_file)
    # In this order: between the two commands all that could read it still can.
    limit = (f"chgrp GROUP {path}", f"chmod 440 {path}")
    if it.password_problem and facts.coordination.kind == "redis":
        yield Finding(
            "password-unreadable",
            "serious" if facts.coordination.unreachable == "fail" else "warning",
            f"this user cannot read the password of the coordinator in {it.password_file} "
            f"({it.password_problem}), and without it the coordinator is unreachable; make a group "
            "of its users the file's",
            limit,
        )
    elif it.password_mode is not None and it.password_mode & stat.S_IROTH:
        yield Finding(
            "password-readable",
            "hint",
            f"everybody can read the password of the coordinator in {it.password_file} (mode "
            f"{it.password_mode:04o}), and so take slots and set capacities; make a group of its "
            "users the file's",
            limit,
        )


def versions(facts: Facts) -> Iterator[Finding]:
    """Only one is found here."""
    it = facts.installation
    if len(set(it.found)) > 1:
        what = f"this Python finds several packages ioshape ({', '.join(it.found)}), and uses"
    elif it.other_command:
        path, version = it.other_command
        what = f'the command "ioshape" that a shell finds, {path}, is {version}; this Python has'
    else:
        return
    yield Finding(
        "version-mix",
        "warning",
        f"{what} {it.ioshape}: ranks of two versions do not meet",
        ("python -m pip list --verbose | grep ioshape", "type -a ioshape"),
    )


def torch(facts: Facts) -> Iterator[Finding]:
    """Whether it is one that we know."""
    it = facts.installation
    if not it.python:
        return
    if it.torch_problem and not it.torch:
        yield Finding(
            "torch-broken",
            "warning",
            f"this Python cannot import its torch ({it.torch_problem}): its programs cannot save",
            ("python -c 'import torch'",),
        )
    elif not it.torch:
        yield Finding(
            "no-torch",
            "hint",
            "this Python has no torch: its commands work, and its programs cannot save",
            ("pip install 'ioshape[torch]'",),
        )
    elif it.torch_problem:
        yield Finding(
            "torch-unknown",
            "warning",
            f"torch {it.torch} pickles in a way that ioshape {it.ioshape} does not know "
            f"({it.torch_problem}): torch writes the files itself, through memory",
            ("pip install --upgrade ioshape",),
        )


def shared_memory(facts: Facts) -> Iterator[Finding]:
    """Where slots and notes of a host's processes are."""
    free = facts.host.shared_bytes
    if free is not None and free >= _LITTLE_SHARED:
        return
    if free is not None:
        why = f"/dev/shm has {human_size(free)} left"
        commands: tuple[str, ...] = ("du -sh /dev/shm/* | sort -h | tail",)
    else:
        why = "/dev/shm is missing, or this user may not write there"
        commands = (
            remedies.container(facts, "--ipc=host")
            if facts.host.container
            else ("sudo mount -t tmpfs tmpfs /dev/shm",)
        )
    yield Finding(
        "no-shared-memory",
        "warning",
        f"{why}: ranks of this host leave their notes and slots in files elsewhere",
        commands,
    )


RULES = (password, versions, torch, shared_memory)
