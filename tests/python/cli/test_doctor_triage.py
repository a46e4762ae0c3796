# SPDX-License-Identifier: Apache-2.0
"""The rules by which `ioshape doctor` turns facts into findings, as tables of cases."""

import errno
from dataclasses import fields, replace
from typing import Any

import pytest
from ioshape._cli.doctor_facts import (
    Coordination,
    Facts,
    Folder,
    Host,
    Installation,
    Near,
)
from ioshape._cli.doctor_findings import ROWS, SEVERITIES, Finding, triage
from ioshape.types import Storage, StorageTarget
from tree import ROOT

KIB, MIB, GIB, TIB = (1 << 10 * i for i in range(1, 5))

LUSTRE = Storage(
    directory="/scratch/run 7",
    family="lustre",
    type="lustre",
    source="10.0.0.1@tcp:/scratch",
    mount_point="/scratch",
    options="rw,flock",
    total_bytes=80 * TIB,
    free_bytes=40 * TIB,
    direct=True,
    remote=True,
    target_count=8,
    targets=tuple(StorageTarget(f"scratch-OST000{i}", 10 * TIB, 5 * TIB) for i in range(8)),
    stripes="8 x 4M",
    stripe_bytes=4 * MIB,
    stripe_count=8,
    mirrors=1,
    for_bytes=4 * GIB,
    engine="uring",
    block_bytes=4 * MIB,
    queue_depth=14,
    pool="lustre:scratch",
    writers=1,
)
NFS = replace(
    LUSTRE,
    family="nfs",
    type="nfs4",
    source="server:/export",
    mount_point="/mnt/nfs",
    options="rw,relatime,vers=4.2,rsize=1048576,wsize=1048576,hard,proto=tcp",
    target_count=0,
    targets=(),
    stripes="",
    stripe_bytes=0,
    stripe_count=0,
)
LOCAL = replace(
    NFS,
    family="xfs",
    type="xfs",
    source="/dev/nvme0n1",
    mount_point="/",
    options="rw",
    remote=False,
)
REDIS = Coordination(address="redis://coordinator", latency_s=0.0004)
HEALTHY = Installation(
    python="3.11.2",
    ioshape="0.2.0",
    torch="2.13.0",
    password_file="/etc/ioshape/password",
    password_mode=0o400,
)


def facts(
    storage: Storage = LUSTRE,
    *,
    ranks: int = 1,
    coordination: Coordination = REDIS,
    installation: Installation = HEALTHY,
    tier: Near | None = None,
    **more: Any,
) -> Facts:
    """Return the facts of a healthy system with some changes.

    Keyword arguments set fields of the folder, the storage and the host by their names.
    """
    of_folder = {name: more.pop(name) for name in list(more) if name in FOLDER_FIELDS}
    of_storage = {name: more.pop(name) for name in list(more) if name in STORAGE_FIELDS}
    storage = replace(storage, **of_storage)
    return Facts(
        storage=storage,
        folder=Folder(path=storage.directory, **of_folder),
        host=Host(user="eve", kernel="6.1.0", **more),
        coordination=coordination,
        installation=installation,
        tier=tier,
        ranks=ranks,
        files=ranks,
    )


FOLDER_FIELDS = {field.name for field in fields(Folder)} - {"path"}
STORAGE_FIELDS = {field.name for field in fields(Storage)}


def found(some: Facts) -> dict[str, Finding]:
    return {one.id: one for one in triage(some)}


def one(some: Facts) -> Finding:
    """Return the finding, and check that it is the only one."""
    all_of_them = found(some)
    assert len(all_of_them) == 1, all_of_them
    return next(iter(all_of_them.values()))


def full(percent: int, *, which: int = 3, others: int = 50) -> tuple[StorageTarget, ...]:
    """Return targets of which one is fuller than the others."""
    return tuple(
        StorageTarget(
            f"scratch-OST000{i}",
            10 * TIB,
            10 * TIB * (100 - (percent if i == which else others)) // 100,
        )
        for i in range(8)
    )


def lustre(**more: Any) -> Facts:
    return facts(LUSTRE, **more)


def nfs(**more: Any) -> Facts:
    return facts(NFS, **more)


def local(**more: Any) -> Facts:
    return facts(LOCAL, **{"coordination": Coordination(), **more})


def installed(**more: Any) -> Facts:
    return facts(installation=replace(HEALTHY, **more))


NEAR = Near("/local nvme", free_bytes=8 * GIB)


def near(**more: Any) -> Facts:
    return facts(tier=replace(NEAR, **more))


FINE: dict[str, Facts] = {
    "a tier": near(waiting=2, waiting_bytes=8 * GIB, oldest_s=3000.0),
    "a tier that saves cannot use": near(usable=False, remote=True),
    "a tier that is drained": near(waiting=1, oldest_s=90000.0, draining=True),
    "lustre": lustre(),
    "nfs": nfs(),
    "local": local(),
    "84 %": lustre(free_bytes=128 * TIB // 10),
    "unknown space": lustre(total_bytes=0, free_bytes=0),
    "no count of inodes": lustre(inodes=0, inodes_free=0),
    "a target at 85 %": lustre(targets=full(85, others=80)),
    "many ranks in turns": lustre(ranks=64),
    "a large container": lustre(memory_bytes=64 * GIB, memory_used=2 * GIB, staging_bytes=16 * GIB),
}

TRIAGE: list[tuple[Facts, str]] = [
    # facts; id and severity of the only finding, and words of its remedy
    (lustre(free_bytes=112 * TIB // 10), "full warning remove old files"),
    (lustre(free_bytes=32 * TIB // 10), "full serious remove old files"),
    (lustre(free_bytes=3 * GIB), "no-space serious IOSHAPE_FULL=skip"),
    (
        lustre(ranks=256, for_bytes=8 * GIB, free_bytes=2 * TIB - 1),
        "no-space serious IOSHAPE_FULL=skip",
    ),
    (
        local(
            ranks=256,
            local_ranks=8,
            for_bytes=8 * GIB,
            free_bytes=64 * GIB,
            total_bytes=100 * GIB,
            coordination=REDIS,
        ),
        "not-shared warning shared filesystem",
    ),
    (
        local(
            ranks=8, local_ranks=8, for_bytes=8 * GIB, free_bytes=63 * GIB, total_bytes=100 * GIB
        ),
        "no-space serious IOSHAPE_FULL=skip",
    ),
    (local(free_bytes=4 * GIB), "full serious remove old files"),
    (lustre(inodes=10**6, inodes_free=40000), "few-inodes warning small files"),
    (lustre(inodes=10**6, inodes_free=12), "few-inodes serious small files"),
    (lustre(targets=full(86, others=80)), "target-full warning move large files"),
    (lustre(targets=full(99)), "target-full serious move large files"),
    (local(family="tmpfs", type="tmpfs"), "in-memory serious on a disk"),
    (
        local(family="tmpfs", type="tmpfs", container="podman"),
        "in-memory serious on a disk",
    ),
    (
        local(directory="/dev/shm/run", family="tmpfs", type="tmpfs", container="docker"),
        "in-memory serious on a disk",
    ),
    (
        local(family="overlay", type="overlay", container="docker"),
        "container-layer serious into the container",
    ),
    (
        local(family="overlay", type="overlay", mount_point="/merged"),
        "container-layer warning into the container",
    ),
    (lustre(read_only=True, writable=False), "read-only serious writable"),
    (lustre(writable=False), "not-writable serious another directory"),
    (near(in_memory=True), "tier-in-memory warning local disk"),
    (near(remote=True), "tier-not-local warning local disk"),
    (near(is_destination=True), "tier-not-local warning local disk"),
    (
        near(waiting=1, waiting_bytes=GIB, oldest_s=3600.0),
        "tier-waits warning ioshape drain /local nvme",
    ),
    (local(options="rw,sync"), "sync-mount warning async"),
    (nfs(options="rw,sync,proto=tcp"), "sync-mount warning async"),
    (local(options="rw,nobarrier"), "no-barrier serious barriers"),
    (
        nfs(options="rw,vers=3,soft,proto=tcp,addr=10.0.0.9"),
        ("nfs-soft serious hard"),
    ),
    (nfs(options="rw,nolock,proto=tcp"), "nfs-nolock hint local_lock=none"),
    (nfs(options="rw,local_lock=all,proto=tcp"), "nfs-nolock hint local_lock=none"),
    (local(direct=False), "no-direct hint another filesystem"),
    (
        nfs(family="fuse", type="fuse.sshfs", options="rw", direct=False),
        "no-direct warning direct_io",
    ),
    (
        lustre(uring_errno=errno.EPERM, seccomp=True, container="docker"),
        "no-io-uring warning allow io_uring_setup",
    ),
    (
        lustre(uring_errno=errno.EPERM, seccomp=True, uring_disabled=2),
        "no-io-uring warning set it to 0",
    ),
    (lustre(uring_errno=errno.ENOSYS), "no-io-uring warning newer"),
    (lustre(file_bytes=GIB), "file-size-limit serious ulimit -f unlimited"),
    (
        lustre(memory_bytes=4 * GIB, memory_used=2 * GIB, staging_bytes=8 * GIB),
        "staging-memory warning IOSHAPE_STAGING_BYTES=1024M",
    ),
    (
        lustre(coordination=replace(REDIS, error="refused")),
        "coordinator-away warning Redis",
    ),
    (
        lustre(coordination=replace(REDIS, error="refused", unreachable="fail")),
        "coordinator-away serious Redis",
    ),
    (
        lustre(coordination=Coordination()),
        "no-shared-coordinator hint IOSHAPE_COORDINATOR",
    ),
    (local(ranks=16, local_ranks=8, coordination=REDIS), "not-shared warning shared filesystem"),
    (installed(password_mode=0o644), "password-readable hint group"),
    (installed(password_problem="no"), "password-unreadable warning group"),
    (lustre(shared_bytes=None), "no-shared-memory warning --ipc=host"),
    (lustre(shared_bytes=None, container="podman"), "no-shared-memory warning --ipc=host"),
    (lustre(shared_bytes=MIB), "no-shared-memory warning --ipc=host"),
]


@pytest.mark.parametrize("some", FINE.values(), ids=FINE)
def test_nothing_is_said_of_a_healthy_system(some: Facts) -> None:
    assert not found(some)


@pytest.mark.parametrize(("some", "expected"), TRIAGE, ids=[row[1].split()[0] for row in TRIAGE])
def test_the_triage_finds_what_is_wrong_and_nothing_else(some: Facts, expected: str) -> None:
    name, severity, remedy = expected.split(maxsplit=2)
    finding = one(some)
    assert (finding.id, finding.severity) == (name, severity)
    assert remedy in finding.remedy


def test_each_finding_has_a_case_and_is_described() -> None:
    """Check that every finding has a case in TRIAGE and a description in docs/cli.md."""
    names = {row.id for row in ROWS}
    assert len(names) == len(ROWS)
    page = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    assert not {name for name in names if f"`{name}`" not in page}
    assert names == {expected.split()[0] for _, expected in TRIAGE}


def test_the_worst_comes_first() -> None:
    many = triage(
        facts(
            read_only=True,
            targets=full(90),
            installation=replace(HEALTHY, password_mode=0o644),
        )
    )
    order = [SEVERITIES.index(finding.severity) for finding in many]
    assert order == sorted(order)
    assert len(set(order)) == 3


def test_of_equals_what_gains_most_comes_first() -> None:
    many = triage(
        facts(
            options="rw,sync",
            shared_bytes=None,
            coordination=replace(REDIS, error="refused"),
            uring_errno=errno.EPERM,
        )
    )
    names = [finding.id for finding in many if finding.severity == "warning"]
    assert names == ["sync-mount", "coordinator-away", "no-io-uring", "no-shared-memory"]
