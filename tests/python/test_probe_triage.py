# SPDX-License-Identifier: Apache-2.0
"""What ioshape probe makes of facts: tables."""

import errno
import re
import shlex
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from ioshape import Storage, StorageTarget
from ioshape.cli import probe
from ioshape.cli.probe.facts import (
    SEVERITIES,
    Coordination,
    Facts,
    Finding,
    Folder,
    Host,
    Leftovers,
)
from ioshape.cli.probe.triage import triage
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


def facts(
    storage: Storage = LUSTRE, *, ranks: int = 1, coordination: Coordination = REDIS, **more: Any
) -> Facts:
    """Those of a healthy system, but for what is said. Fields of folder and host by their names."""
    of_folder = {name: more.pop(name) for name in list(more) if name in FOLDER_FIELDS}
    of_storage = {name: more.pop(name) for name in list(more) if name in STORAGE_FIELDS}
    return Facts(
        storage=replace(storage, **of_storage),
        folder=Folder(path=storage.directory, asked=storage.directory, **of_folder),
        host=Host(user="eve", kernel="6.1.0", **more),
        coordination=coordination,
        ranks=ranks,
        files=ranks,
    )


FOLDER_FIELDS = {field.name for field in fields(Folder)} - {"path", "asked"}
STORAGE_FIELDS = {field.name for field in fields(Storage)}


def found(some: Facts) -> dict[str, Finding]:
    """By id; what is always said of the family is left out."""
    return {one.id: one for one in triage(some) if one.id != "quota-unseen"}


def one(some: Facts) -> Finding:
    """The only finding."""
    all_of_them = found(some)
    assert len(all_of_them) == 1, all_of_them
    return next(iter(all_of_them.values()))


def full(percent: int, *, which: int = 3, others: int = 50) -> tuple[StorageTarget, ...]:
    """Targets of which one is so full."""
    return tuple(
        StorageTarget(
            f"scratch-OST000{i}",
            10 * TIB,
            10 * TIB * (100 - (percent if i == which else others)) // 100,
        )
        for i in range(8)
    )


@pytest.mark.parametrize("storage", [LUSTRE, NFS, LOCAL], ids=lambda storage: storage.family)
def test_nothing_is_said_of_a_healthy_system(storage: Storage) -> None:
    coordination = REDIS if storage.remote else Coordination()
    assert not found(facts(storage, coordination=coordination))


TRIAGE: list[tuple[str, Facts, str, str, str]] = [
    # what, facts, id, severity, in the first command
    ("84 %", facts(free_bytes=128 * TIB // 10), "", "", ""),
    ("86 %", facts(free_bytes=112 * TIB // 10), "full", "warning", "lfs df -h /scratch"),
    ("96 %", facts(free_bytes=32 * TIB // 10), "full", "serious", "lfs df -h /scratch"),
    ("too small", facts(free_bytes=3 * GIB), "no-room", "serious", "lfs df"),
    (
        "too many",
        facts(ranks=256, for_bytes=8 * GIB, free_bytes=2 * TIB - 1),
        "no-room",
        "serious",
        "lfs df",
    ),
    (
        "many on disks of their own",
        facts(
            LOCAL,
            ranks=256,
            local_ranks=8,
            for_bytes=8 * GIB,
            free_bytes=64 * GIB,
            total_bytes=100 * GIB,
        ),
        "not-shared",
        "warning",
        "findmnt",
    ),
    (
        "too many for this host's disk",
        facts(
            LOCAL,
            coordination=Coordination(),
            ranks=8,
            local_ranks=8,
            for_bytes=8 * GIB,
            free_bytes=63 * GIB,
            total_bytes=100 * GIB,
        ),
        "no-room",
        "serious",
        "du -xh",
    ),
    (
        "fits barely",
        facts(LOCAL, coordination=Coordination(), free_bytes=4 * GIB),
        "full",
        "serious",
        "du -xh",
    ),
    ("unknown space", facts(total_bytes=0, free_bytes=0), "", "", ""),
    (
        "few inodes",
        facts(inodes=10**6, inodes_free=40_000),
        "few-inodes",
        "warning",
        "df -i /scratch",
    ),
    ("no inodes", facts(inodes=10**6, inodes_free=12), "few-inodes", "serious", "df -i /scratch"),
    ("no count of inodes", facts(inodes=0, inodes_free=0), "", "", ""),
    ("a target at 85 %", facts(targets=full(85, others=80)), "", "", ""),
    ("a target at 86 %", facts(targets=full(86, others=80)), "target-full", "warning", "lfs df"),
    ("a target at 99 %", facts(targets=full(99)), "target-full", "serious", "lfs df"),
    (
        "a target above others",
        facts(targets=full(75)),
        "targets-uneven",
        "warning",
        "lfs find /scratch --ost scratch-OST0003 --type f --size +1G | lfs_migrate -y",
    ),
    ("a target a little above", facts(targets=full(69)), "", "", ""),
    (
        "one stripe",
        facts(stripes="1 x 4M", stripe_count=1),
        "few-stripes",
        "warning",
        "lfs setstripe -c 8 -S 4M '/scratch/run 7'",
    ),
    (
        "one stripe, mended by us",
        facts(stripes="1 x 4M", stripe_count=1, stripes_asked="8 x 4M"),
        "few-stripes",
        "hint",
        "lfs setstripe -c 8",
    ),
    (
        "one stripe, small file",
        facts(stripes="1 x 4M", stripe_count=1, for_bytes=90 * MIB),
        "",
        "",
        "",
    ),
    (
        "one stripe, a file for each target",
        facts(
            stripes="1 x 4M",
            stripe_count=1,
            ranks=8,
            writers=8,
            coordination=replace(REDIS, capacity=8),
        ),
        "",
        "",
        "",
    ),
    ("all targets", facts(stripes="all x 4M", stripe_count=-1), "", "", ""),
    (
        "too many stripes",
        facts(stripes="100 x 1M", stripe_count=100, target_count=100, targets=()),
        "many-stripes",
        "warning",
        "lfs setstripe -E 100M -c 1 -E 10G -c 8 -E 100G -c 16 -E -1 -c 32 '/scratch/run 7'",
    ),
    (
        "small stripes",
        facts(stripes="8 x 64K", stripe_bytes=64 * KIB),
        "small-stripes",
        "warning",
        "lfs setstripe -c 8 -S 4M",
    ),
    (
        "one small stripe",
        facts(stripes="1 x 64K", stripe_bytes=64 * KIB, stripe_count=1, for_bytes=MIB),
        "",
        "",
        "",
    ),
    (
        "BeeGFS, one target",
        facts(family="beegfs", stripes="1 x 512K", stripe_count=1),
        "few-stripes",
        "warning",
        "beegfs entry set --num-targets=8 --chunk-size=4MiB '/scratch/run 7'",
    ),
    (
        "CephFS, one object",
        facts(family="ceph", stripes="1 x 4M", stripe_count=1),
        "few-stripes",
        "warning",
        "setfattr -n ceph.dir.layout -v "
        "'stripe_unit=4194304 stripe_count=8 object_size=4194304' '/scratch/run 7'",
    ),
    (
        "a narrow file",
        facts(is_file=True, file_stripes="1 x 4M", file_stripe_count=1),
        "file-few-stripes",
        "hint",
        "lfs migrate -c 8 -S 4M '/scratch/run 7'",
    ),
    (
        "a crowd without order",
        facts(ranks=64, coordination=Coordination(address="open"), remote=False, local_ranks=64),
        "crowded-targets",
        "warning",
        "export IOSHAPE_COORDINATOR=redis://HOST",
    ),
    (
        "a crowd by the operator",
        facts(ranks=64, local_ranks=64, coordination=replace(REDIS, capacity=16)),
        "crowded-targets",
        "warning",
        "ioshape slots set lustre:scratch --capacity 1 --new",
    ),
    (
        "one stripe, half a gigabyte",
        facts(stripes="1 x 4M", stripe_count=1, for_bytes=512 * MIB),
        "",
        "",
        "",
    ),
    (
        "a crowd, but for what is asked",
        facts(
            ranks=64,
            local_ranks=64,
            stripes_asked="1 x 4M",
            asked_stripe_count=1,
            coordination=replace(REDIS, capacity=16),
        ),
        "",
        "",
        "",
    ),
    ("many ranks in turns", facts(ranks=64), "", "", ""),
    ("many objects", facts(ranks=1024), "many-objects", "warning", "export IOSHAPE_MODE=node"),
    (
        "a pool of disks",
        facts(target_pool="hdd", target_pools=("flash", "hdd")),
        "disk-pool",
        "warning",
        "lfs setstripe -p flash '/scratch/run 7'",
    ),
    (
        "no other pool",
        facts(target_pool="capacity", target_pools=("capacity",)),
        "disk-pool",
        "hint",
        "lfs pool_list /scratch",
    ),
    (
        "flash nearby",
        facts(target_pools=("scratch-nvme",)),
        "flash-unused",
        "hint",
        "lfs setstripe -p scratch-nvme",
    ),
    ("a name that sounds like it", facts(target_pools=("breakfast", "photos")), "", "", ""),
    ("on flash", facts(target_pool="ssd", target_pools=("nvme", "ssd")), "", "", ""),
    (
        "a disk",
        facts(LOCAL, rotational=True, source="/dev/sda1", coordination=Coordination()),
        "spinning-disk",
        "hint",
        "lsblk",
    ),
    (
        "a disk that says nothing true",
        facts(LOCAL, rotational=True, source="/dev/vda1", coordination=Coordination()),
        "",
        "",
        "",
    ),
    (
        "memory",
        facts(LOCAL, family="tmpfs", type="tmpfs", coordination=Coordination()),
        "in-memory",
        "serious",
        "findmnt",
    ),
    (
        "memory of a container",
        facts(LOCAL, family="tmpfs", type="tmpfs", coordination=Coordination(), container="podman"),
        "in-memory",
        "serious",
        "podman run -v '/srv/checkpoints:/scratch/run 7' IMAGE",
    ),
    (
        "memory of a container below /dev",
        facts(
            replace(LOCAL, directory="/dev/shm/run"),
            family="tmpfs",
            type="tmpfs",
            coordination=Coordination(),
            container="docker",
        ),
        "in-memory",
        "serious",
        "docker run -v /srv/checkpoints:/checkpoints IMAGE",
    ),
    (
        "a container's layer",
        facts(
            LOCAL, family="overlay", type="overlay", coordination=Coordination(), container="docker"
        ),
        "container-layer",
        "serious",
        "docker run -v ",
    ),
    (
        "an overlay elsewhere",
        facts(
            LOCAL,
            family="overlay",
            type="overlay",
            mount_point="/merged",
            coordination=Coordination(),
        ),
        "container-layer",
        "warning",
        "findmnt -no OPTIONS /merged",
    ),
    ("read-only", facts(read_only=True, writable=False), "read-only", "serious", "dmesg"),
    (
        "somebody else's",
        facts(writable=False),
        "not-writable",
        "serious",
        "ls -ld '/scratch/run 7'",
    ),
    ("another clock", facts(ahead_s=90.0), "clock", "warning", "chronyc tracking"),
    (
        "left behind here",
        facts(temporary=Leftovers(1, GIB, names=(".a b.ioshape-tmp-0-1",))),
        "stale-files",
        "hint",
        "rm -- '/scratch/run 7/.a b.ioshape-tmp-0-1'",
    ),
    (
        "left behind somewhere",
        facts(temporary=Leftovers(0, 0, 1, GIB)),
        "stale-files",
        "hint",
        "find '/scratch/run 7' -maxdepth 1 -type f -name '.*.ioshape-tmp-*' -mmin +1440 -delete",
    ),
    (
        "generations left behind",
        facts(leftovers=Leftovers(1, GIB)),
        "stale-generations",
        "hint",
        "ioshape ls '/scratch/run 7'",
    ),
    (
        "synchronous",
        facts(LOCAL, options="rw,sync", coordination=Coordination()),
        "sync-mount",
        "warning",
        "sudo mount -o remount,async /",
    ),
    (
        "no barriers",
        facts(LOCAL, options="rw,nobarrier", coordination=Coordination()),
        "no-barrier",
        "serious",
        "sudo mount -o remount,barrier /",
    ),
    (
        "NFS, soft",
        facts(NFS, options="rw,vers=3,soft,proto=tcp,nconnect=4,addr=10.0.0.9"),
        "nfs-soft",
        "serious",
        "sudo umount /mnt/nfs && sudo mount -t nfs4 -o vers=3,proto=tcp,nconnect=4,hard "
        "server:/export /mnt/nfs",
    ),
    (
        "NFS, sync",
        facts(NFS, options="rw,sync,nconnect=4,proto=tcp"),
        "nfs-sync",
        "warning",
        "async",
    ),
    (
        "NFS, small requests",
        facts(NFS, options="rw,wsize=32768,rsize=32768,proto=tcp,nconnect=4"),
        "nfs-wsize",
        "warning",
        "wsize=1048576",
    ),
    ("NFS, UDP", facts(NFS, options="rw,proto=udp"), "nfs-udp", "warning", "proto=tcp"),
    (
        "NFS, no locks",
        facts(NFS, options="rw,nolock,proto=tcp,nconnect=4"),
        "nfs-nolock",
        "hint",
        "local_lock=none",
    ),
    (
        "NFS, locks of this host",
        facts(NFS, options="rw,local_lock=all,proto=tcp,nconnect=4"),
        "nfs-nolock",
        "hint",
        "local_lock=none",
    ),
    (
        "NFS, no caching",
        facts(NFS, options="rw,noac,proto=tcp,nconnect=4"),
        "nfs-noac",
        "warning",
        "umount",
    ),
    (
        "NFS, one connection",
        facts(NFS, options="rw,proto=tcp"),
        "nfs-one-connection",
        "hint",
        "nconnect=8",
    ),
    ("NFS over RDMA", facts(NFS, options="rw,proto=rdma"), "", "", ""),
    (
        "no direct I/O",
        facts(LOCAL, direct=False, coordination=Coordination()),
        "no-direct",
        "hint",
        "",
    ),
    (
        "no direct I/O in FUSE",
        facts(NFS, family="fuse", type="fuse.sshfs", options="rw", direct=False),
        "no-direct",
        "warning",
        "findmnt -no OPTIONS",
    ),
    (
        "coarse",
        facts(offset_alignment=8 * MIB),
        "coarse-alignment",
        "warning",
        "export IOSHAPE_BLOCK_BYTES=8388608",
    ),
    ("serial", facts(serial_direct=True), "serial-direct", "hint", "ioshape probe --calibrate"),
    (
        "seccomp",
        facts(uring_errno=errno.EPERM, seccomp=True, container="docker"),
        "no-io-uring",
        "warning",
        "jq ",
    ),
    (
        "sysctl",
        facts(uring_errno=errno.EPERM, seccomp=True, uring_disabled=2),
        "no-io-uring",
        "warning",
        "sudo sysctl kernel.io_uring_disabled=0",
    ),
    ("an old kernel", facts(uring_errno=errno.ENOSYS), "no-io-uring", "warning", "uname -r"),
    (
        "little memory to lock",
        facts(memlock_bytes=8 * MIB, buffers_refused=True),
        "memlock",
        "hint",
        "ulimit -l 114688",
    ),
    ("enough memory to lock", facts(memlock_bytes=8 * MIB), "", "", ""),
    ("short files", facts(file_bytes=GIB), "file-size-limit", "serious", "ulimit -f unlimited"),
    ("few files", facts(open_files=64), "few-open-files", "warning", "ulimit -n 65536"),
    (
        "a small container",
        facts(memory_bytes=4 * GIB, memory_used=2 * GIB, staging_bytes=8 * GIB),
        "staging-memory",
        "warning",
        "export IOSHAPE_STAGING_BYTES=1024M",
    ),
    (
        "a large container",
        facts(memory_bytes=64 * GIB, memory_used=2 * GIB, staging_bytes=16 * GIB),
        "",
        "",
        "",
    ),
    (
        "a small /dev/shm",
        facts(shm_bytes=64 * MIB, container="docker"),
        "small-shm",
        "hint",
        "docker run --shm-size=16g IMAGE",
    ),
    (
        "the coordinator is away",
        facts(coordination=replace(REDIS, error="refused")),
        "coordinator-away",
        "warning",
        "redis-cli -h coordinator -p 6379 ping",
    ),
    (
        "... and saves fail",
        facts(coordination=replace(REDIS, error="refused", unreachable="fail")),
        "coordinator-away",
        "serious",
        "redis-cli",
    ),
    (
        "a coordinator far away",
        facts(coordination=replace(REDIS, latency_s=0.08)),
        "coordinator-slow",
        "hint",
        "redis-cli",
    ),
    (
        "nobody else's coordinator",
        facts(coordination=Coordination()),
        "no-shared-coordinator",
        "hint",
        "export IOSHAPE_COORDINATOR=redis://HOST",
    ),
    (
        "a disk for many hosts",
        facts(LOCAL, ranks=16, local_ranks=8),
        "not-shared",
        "warning",
        "findmnt",
    ),
]


@pytest.mark.parametrize(
    ("some", "name", "severity", "command"),
    [pytest.param(*rest, id=what) for what, *rest in TRIAGE],
)
def test_the_triage_finds_what_is_wrong_and_nothing_else(
    some: Facts, name: str, severity: str, command: str
) -> None:
    if not name:
        assert not found(some)
        return
    finding = one(some)
    assert (finding.id, finding.severity) == (name, severity)
    assert command in finding.commands[0] if command else not finding.commands
    for each in finding.commands:
        assert shlex.split(each, comments=True)  # a shell understands it
    assert not finding.sentence.endswith(".")


def test_each_finding_has_a_case_and_is_described() -> None:
    """So that a new one gets one, too."""
    folder = Path(probe.__file__).parent
    text = "".join(path.read_text(encoding="utf-8") for path in folder.glob("rules_*.py"))
    names = set(re.findall(r'yield Finding\(\s*"([\w-]+)"', text))
    assert len(names) == text.count("yield Finding(")
    page = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    assert not {name for name in names if f"`{name}`" not in page}
    assert names - {name for _, _, name, *_ in TRIAGE} == {"quota-unseen"}


def test_a_checkpoint_is_all_of_its_files() -> None:
    finding = one(facts(ranks=256, for_bytes=8 * GIB, free_bytes=2 * TIB - 1))
    assert finding.sentence.startswith(
        "a checkpoint of 256 files, 2.00 TiB together, does not fit into the "
    )
    assert any("IOSHAPE_FULL=skip" in command for command in finding.commands)


def test_slots_of_each_host_add_up() -> None:
    shared = replace(REDIS, capacity=2)
    own = Coordination(capacity=2)
    assert "crowded-targets" not in found(facts(ranks=64, local_ranks=8, coordination=shared))
    crowd = found(facts(ranks=64, local_ranks=8, coordination=own))["crowded-targets"]
    assert crowd.sentence.startswith("16 writers at a time")


def test_the_worst_comes_first() -> None:
    many = triage(facts(read_only=True, targets=full(90), temporary=Leftovers(1, 1), open_files=9))
    order = [SEVERITIES.index(finding.severity) for finding in many]
    assert order == sorted(order)
    assert len(set(order)) == 3


def test_what_lies_in_names_is_no_command() -> None:
    evil = "/scratch/$(reboot); rm -rf ~"
    some = facts(replace(LUSTRE, directory=evil, stripes="1 x 4M", stripe_count=1))
    (command,) = one(some).commands
    assert shlex.split(command) == ["lfs", "setstripe", "-c", "8", "-S", "4M", evil]
