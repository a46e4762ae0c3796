# SPDX-License-Identifier: Apache-2.0
"""The rules by which `ioshape doctor` turns facts into findings, as tables of cases."""

import errno
import shlex
from dataclasses import fields, replace
from typing import Any

import pytest
from ioshape._cli.doctor_facts import (
    Coordination,
    Facts,
    Folder,
    Host,
    Installation,
    Leftovers,
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
    options="rw,relatime,vers=4.2,rsize=1048576,wsize=1048576,hard,proto=tcp,nconnect=8",
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
    rotational=False,
)
REDIS = Coordination(address="redis://coordinator", latency_s=0.0004)
HEALTHY = Installation(
    python="3.11.2",
    ioshape="0.2.0",
    found=("0.2.0",),
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
        folder=Folder(path=storage.directory, asked=storage.directory, **of_folder),
        host=Host(user="eve", kernel="6.1.0", **more),
        coordination=coordination,
        installation=installation,
        tier=tier,
        ranks=ranks,
        files=ranks,
    )


FOLDER_FIELDS = {field.name for field in fields(Folder)} - {"path", "asked"}
STORAGE_FIELDS = {field.name for field in fields(Storage)}


def found(some: Facts) -> dict[str, Finding]:
    """Return the findings by id. Leave out "quota-unseen", which such a family always has."""
    return {one.id: one for one in triage(some) if one.id != "quota-unseen"}


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


#: A tier with space for two checkpoints of 4 GiB, if drained copies are removed.
NEAR = Near("/local nvme", free_bytes=GIB, drained_bytes=7 * GIB)


def near(**more: Any) -> Facts:
    return facts(tier=replace(NEAR, **more))


FINE: dict[str, Facts] = {
    "a tier": near(waiting=2, waiting_bytes=8 * GIB, oldest_s=3000.0),
    "a tier that is drained": near(waiting=1, oldest_s=90000.0, draining=True),
    "a tier of a host of many": facts(tier=NEAR, ranks=64, local_ranks=1),
    "lustre": lustre(),
    "nfs": nfs(),
    "local": local(),
    "84 %": lustre(free_bytes=128 * TIB // 10),
    "unknown space": lustre(total_bytes=0, free_bytes=0),
    "no count of inodes": lustre(inodes=0, inodes_free=0),
    "a target at 85 %": lustre(targets=full(85, others=80)),
    "a target a little above": lustre(targets=full(69)),
    "one stripe, small file": lustre(stripes="1 x 4M", stripe_count=1, for_bytes=90 * MIB),
    "one stripe, a file for each target": lustre(
        stripes="1 x 4M",
        stripe_count=1,
        ranks=8,
        writers=8,
        coordination=replace(REDIS, capacity=8),
    ),
    "all targets": lustre(stripes="all x 4M", stripe_count=-1),
    "one small stripe": lustre(
        stripes="1 x 64K", stripe_bytes=64 * KIB, stripe_count=1, for_bytes=MIB
    ),
    "one stripe, half a gigabyte": lustre(stripes="1 x 4M", stripe_count=1, for_bytes=512 * MIB),
    "a crowd, but for what is asked": lustre(
        ranks=64,
        local_ranks=64,
        stripes_asked="1 x 4M",
        asked_stripe_count=1,
        coordination=replace(REDIS, capacity=16),
    ),
    "many ranks in turns": lustre(ranks=64),
    "a name that sounds like it": lustre(target_pools=("breakfast", "photos")),
    "on flash": lustre(target_pool="ssd", target_pools=("nvme", "ssd")),
    "a disk that says nothing true": local(rotational=True, source="/dev/vda1"),
    "NFS over RDMA": nfs(options="rw,proto=rdma"),
    "enough memory to lock": lustre(memlock_bytes=8 * MIB),
    "a large container": lustre(memory_bytes=64 * GIB, memory_used=2 * GIB, staging_bytes=16 * GIB),
}

TRIAGE: list[tuple[Facts, str]] = [
    # facts; id and severity of the only finding, and what its first command contains
    (lustre(free_bytes=112 * TIB // 10), "full warning lfs df -h /scratch"),
    (lustre(free_bytes=32 * TIB // 10), "full serious lfs df -h /scratch"),
    (lustre(free_bytes=3 * GIB), "no-room serious lfs df"),
    (lustre(ranks=256, for_bytes=8 * GIB, free_bytes=2 * TIB - 1), "no-room serious lfs df"),
    (
        local(
            ranks=256,
            local_ranks=8,
            for_bytes=8 * GIB,
            free_bytes=64 * GIB,
            total_bytes=100 * GIB,
            coordination=REDIS,
        ),
        "not-shared warning findmnt",
    ),
    (
        local(
            ranks=8, local_ranks=8, for_bytes=8 * GIB, free_bytes=63 * GIB, total_bytes=100 * GIB
        ),
        "no-room serious du -xh",
    ),
    (local(free_bytes=4 * GIB), "full serious du -xh"),
    (lustre(inodes=10**6, inodes_free=40000), "few-inodes warning df -i /scratch"),
    (lustre(inodes=10**6, inodes_free=12), "few-inodes serious df -i /scratch"),
    (lustre(targets=full(86, others=80)), "target-full warning lfs df"),
    (lustre(targets=full(99)), "target-full serious lfs df"),
    (
        lustre(targets=full(75)),
        (
            "targets-uneven warning lfs find /scratch --ost scratch-OST0003 --type f --size +1G | "
            "lfs_migrate -y"
        ),
    ),
    (
        lustre(stripes="1 x 4M", stripe_count=1),
        "few-stripes warning lfs setstripe -c 8 -S 4M '/scratch/run 7'",
    ),
    (
        lustre(stripes="1 x 4M", stripe_count=1, stripes_asked="8 x 4M"),
        "few-stripes hint lfs setstripe -c 8",
    ),
    (
        lustre(stripes="100 x 1M", stripe_count=100, target_count=100, targets=()),
        (
            "many-stripes warning lfs setstripe -E 100M -c 1 -E 10G -c 8 -E 100G -c 16 -E -1 -c 32 "
            "'/scratch/run 7'"
        ),
    ),
    (
        lustre(stripes="8 x 64K", stripe_bytes=64 * KIB),
        "small-stripes warning lfs setstripe -c 8 -S 4M",
    ),
    (
        lustre(family="beegfs", stripes="1 x 512K", stripe_count=1),
        ("few-stripes warning beegfs entry set --num-targets=8 --chunk-size=4MiB '/scratch/run 7'"),
    ),
    (
        lustre(family="ceph", stripes="1 x 4M", stripe_count=1),
        (
            "few-stripes warning setfattr -n ceph.dir.layout -v 'stripe_unit=4194304 "
            "stripe_count=8 object_size=4194304' '/scratch/run 7'"
        ),
    ),
    (
        lustre(is_file=True, file_stripes="1 x 4M", file_stripe_count=1),
        "file-few-stripes hint lfs migrate -c 8 -S 4M '/scratch/run 7'",
    ),
    (
        lustre(ranks=64, coordination=Coordination(address="open"), remote=False, local_ranks=64),
        "crowded-targets warning export IOSHAPE_COORDINATOR=redis://HOST",
    ),
    (
        lustre(ranks=64, local_ranks=64, coordination=replace(REDIS, capacity=16)),
        "crowded-targets warning ioshape slots set lustre:scratch --capacity 1 --new",
    ),
    (lustre(ranks=1024), "many-objects warning export IOSHAPE_MODE=node"),
    (
        lustre(target_pool="hdd", target_pools=("flash", "hdd")),
        "disk-pool warning lfs setstripe -p flash '/scratch/run 7'",
    ),
    (
        lustre(target_pool="capacity", target_pools=("capacity",)),
        "disk-pool hint lfs pool_list /scratch",
    ),
    (lustre(target_pools=("scratch-nvme",)), "flash-unused hint lfs setstripe -p scratch-nvme"),
    (local(rotational=True, source="/dev/sda1"), "spinning-disk hint export IOSHAPE_SLOTS=1"),
    (local(family="tmpfs", type="tmpfs"), "in-memory serious findmnt"),
    (
        local(family="tmpfs", type="tmpfs", container="podman"),
        "in-memory serious podman run -v '/srv/checkpoints:/scratch/run 7' IMAGE",
    ),
    (
        local(directory="/dev/shm/run", family="tmpfs", type="tmpfs", container="docker"),
        "in-memory serious docker run -v /srv/checkpoints:/checkpoints IMAGE",
    ),
    (
        local(family="overlay", type="overlay", container="docker"),
        "container-layer serious docker run -v ",
    ),
    (
        local(family="overlay", type="overlay", mount_point="/merged"),
        "container-layer warning findmnt -no OPTIONS /merged",
    ),
    (lustre(read_only=True, writable=False), "read-only serious dmesg"),
    (lustre(writable=False), "not-writable serious ls -ld '/scratch/run 7'"),
    (lustre(ahead_s=90.0), "clock warning chronyc tracking"),
    (
        lustre(temporary=Leftovers(1, GIB, names=(".a b.ioshape-tmp-0-1",))),
        "stale-files hint rm -- '/scratch/run 7/.a b.ioshape-tmp-0-1'",
    ),
    (
        lustre(temporary=Leftovers(0, 0, 1, GIB)),
        (
            "stale-files hint find '/scratch/run 7' -maxdepth 1 -type f -name '.*.ioshape-tmp-*' "
            "-mmin +1440 -delete"
        ),
    ),
    (near(exists=False), "tier-unusable warning lsblk"),
    (near(writable=False), "tier-unusable warning ls -ld '/local nvme'"),
    (
        near(own="/local nvme/ioshape-1000", owner=1001),
        "tier-unusable warning ls -ld '/local nvme/ioshape-1000'",
    ),
    (near(in_memory=True), "tier-in-memory warning findmnt -T '/local nvme'"),
    (near(remote=True), "tier-not-local warning findmnt -T '/local nvme'"),
    (near(is_destination=True), "tier-not-local warning findmnt"),
    (near(free_bytes=GIB - 1), "tier-small warning ioshape ls '/local nvme'"),
    (
        facts(tier=NEAR, ranks=2, local_ranks=2),
        "tier-small warning ioshape ls '/local nvme'",
    ),
    (
        near(waiting=1, waiting_bytes=GIB, oldest_s=3600.0),
        "tier-waits warning ioshape drain '/local nvme'",
    ),
    (lustre(leftovers=Leftovers(1, GIB)), "stale-generations hint ioshape ls '/scratch/run 7'"),
    (local(options="rw,sync"), "sync-mount warning sudo mount -o remount,async /"),
    (local(options="rw,nobarrier"), "no-barrier serious sudo mount -o remount,barrier /"),
    (
        nfs(options="rw,vers=3,soft,proto=tcp,nconnect=4,addr=10.0.0.9"),
        (
            "nfs-soft serious sudo umount /mnt/nfs && sudo mount -t nfs4 -o "
            "vers=3,proto=tcp,nconnect=4,hard server:/export /mnt/nfs"
        ),
    ),
    (nfs(options="rw,sync,nconnect=4,proto=tcp"), "nfs-sync warning async"),
    (
        nfs(options="rw,wsize=32768,rsize=32768,proto=tcp,nconnect=4"),
        "nfs-wsize warning wsize=1048576",
    ),
    (nfs(options="rw,proto=udp"), "nfs-udp warning proto=tcp"),
    (nfs(options="rw,nolock,proto=tcp,nconnect=4"), "nfs-nolock hint local_lock=none"),
    (nfs(options="rw,local_lock=all,proto=tcp,nconnect=4"), "nfs-nolock hint local_lock=none"),
    (nfs(options="rw,noac,proto=tcp,nconnect=4"), "nfs-noac warning umount"),
    (nfs(options="rw,proto=tcp"), "nfs-one-connection hint nconnect=8"),
    (local(direct=False), "no-direct hint"),
    (
        nfs(family="fuse", type="fuse.sshfs", options="rw", direct=False),
        "no-direct warning findmnt -no OPTIONS",
    ),
    (lustre(uring_errno=errno.EPERM, seccomp=True, container="docker"), "no-io-uring warning jq "),
    (
        lustre(uring_errno=errno.EPERM, seccomp=True, uring_disabled=2),
        "no-io-uring warning sudo sysctl kernel.io_uring_disabled=0",
    ),
    (lustre(uring_errno=errno.ENOSYS), "no-io-uring warning uname -r"),
    (lustre(memlock_bytes=8 * MIB, buffers_refused=True), "memlock hint ulimit -l 114688"),
    (lustre(file_bytes=GIB), "file-size-limit serious ulimit -f unlimited"),
    (lustre(open_files=64), "few-open-files warning ulimit -n 65536"),
    (
        lustre(memory_bytes=4 * GIB, memory_used=2 * GIB, staging_bytes=8 * GIB),
        "staging-memory warning export IOSHAPE_STAGING_BYTES=1024M",
    ),
    (
        lustre(coordination=replace(REDIS, error="refused")),
        "coordinator-away warning redis-cli -h coordinator -p 6379 ping",
    ),
    (
        lustre(coordination=replace(REDIS, error="refused", unreachable="fail")),
        "coordinator-away serious redis-cli",
    ),
    (lustre(coordination=replace(REDIS, latency_s=0.08)), "coordinator-slow hint redis-cli"),
    (lustre(coordination=replace(REDIS, unasked=True)), "no-redis-package hint pip install"),
    (
        lustre(coordination=Coordination()),
        "no-shared-coordinator hint export IOSHAPE_COORDINATOR=redis://HOST",
    ),
    (local(ranks=16, local_ranks=8, coordination=REDIS), "not-shared warning findmnt"),
    (installed(password_mode=0o644), "password-readable hint chgrp GROUP /etc/ioshape/password"),
    (installed(password_problem="no"), "password-unreadable warning chgrp GROUP /etc/ioshape/pass"),
    (installed(found=("0.1.0", "0.2.0")), "version-mix warning pip list --verbose"),
    (installed(other_command=("/usr/bin/ioshape", "0.1.0")), "version-mix warning pip list"),
    (installed(torch=""), "no-torch hint pip install"),
    (installed(torch="", torch_problem="OSError: libc"), "torch-broken warning python -c"),
    (installed(torch_problem="another signature"), "torch-unknown warning pip install --upgrade"),
    (lustre(shared_bytes=None), "no-shared-memory warning sudo mount -t tmpfs tmpfs /dev/shm"),
    (lustre(shared_bytes=None, container="podman"), "no-shared-memory warning podman run --ipc"),
    (lustre(shared_bytes=MIB), "no-shared-memory warning du -sh"),
]


@pytest.mark.parametrize("some", FINE.values(), ids=FINE)
def test_nothing_is_said_of_a_healthy_system(some: Facts) -> None:
    assert not found(some)


@pytest.mark.parametrize(("some", "expected"), TRIAGE, ids=[row[1].split()[0] for row in TRIAGE])
def test_the_triage_finds_what_is_wrong_and_nothing_else(some: Facts, expected: str) -> None:
    name, severity, *command = expected.split(maxsplit=2)
    finding = one(some)
    assert (finding.id, finding.severity) == (name, severity)
    assert command[0] in finding.commands[0] if command else not finding.commands
    for each in finding.commands:
        assert shlex.split(each, comments=True)  # a shell can parse the command


def test_each_finding_has_a_case_and_is_described() -> None:
    """Check that every finding has a case in TRIAGE and a description in docs/cli.md."""
    names = {row.id for row in ROWS}
    assert len(names) == len(ROWS)
    page = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    assert not {name for name in names if f"`{name}`" not in page}
    assert names - {expected.split()[0] for _, expected in TRIAGE} == {"quota-unseen"}


def test_slots_of_each_host_add_up() -> None:
    shared = replace(REDIS, capacity=2)
    own = Coordination(capacity=2)
    assert "crowded-targets" not in found(facts(ranks=64, local_ranks=8, coordination=shared))
    assert "crowded-targets" in found(facts(ranks=64, local_ranks=8, coordination=own))


def test_the_worst_comes_first() -> None:
    many = triage(facts(read_only=True, targets=full(90), temporary=Leftovers(1, 1), open_files=9))
    order = [SEVERITIES.index(finding.severity) for finding in many]
    assert order == sorted(order)
    assert len(set(order)) == 3


def test_of_equals_what_gains_most_comes_first() -> None:
    many = triage(
        facts(
            options="rw,sync",
            open_files=9,
            coordination=replace(REDIS, error="refused"),
            uring_errno=errno.EPERM,
        )
    )
    names = [finding.id for finding in many if finding.severity == "warning"]
    assert names == ["few-open-files", "sync-mount", "coordinator-away", "no-io-uring"]


def test_what_lies_in_names_is_no_command() -> None:
    evil = "/scratch/$(reboot); rm -rf ~"
    some = facts(replace(LUSTRE, directory=evil, stripes="1 x 4M", stripe_count=1))
    (command,) = one(some).commands
    assert shlex.split(command) == ["lfs", "setstripe", "-c", "8", "-S", "4M", evil]
