# SPDX-License-Identifier: Apache-2.0
"""Checkpoints on object stores: ioshape.s3 and its commands against servers on this machine."""

import errno
import functools
import itertools
import json
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import botocore.session
import ioshape
import object_store
import pytest
import torch
import torch.distributed.checkpoint as dcp
from command import IOSHAPE, call, fail, succeed
from ioshape import s3, safetensors
from ioshape._load.reader import Reader
from ioshape._remote import client as remote
from ioshape._remote import download
from ioshape._remote.listing import LISTING, Entry, Listing, decode, encode
from ioshape._remote.sums import Known, Sums, crc32
from object_store import BUCKET, Store
from processes import TIMEOUT_S, environment
from records import flip, names_in, offset_of
from tiers import saver
from tree import build_folder

PART = 5 << 20
RUN = f"s3://{BUCKET}/run"


@pytest.fixture(scope="module", autouse=True)
def _boto3_reads_its_descriptions_once() -> Iterator[None]:
    """Let sessions share what boto3 reads from files.

    Without that it takes longer than most tests.
    """
    with pytest.MonkeyPatch.context() as changed:
        shared = functools.cache(botocore.session.create_loader)
        changed.setattr(botocore.session, "create_loader", shared)
        yield


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    with object_store.moto(tmp_path_factory.mktemp("moto")) as store:
        yield store


def use(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in store.variables.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def store(server: Store, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """Yield the server without objects and without faults."""
    use(server, monkeypatch)
    server.harm()
    yield server
    server.harm()
    client, keys = server.client, server.objects()
    for first in range(0, len(keys), 1000):
        some = [{"Key": key} for key in keys[first : first + 1000]]
        client.delete_objects(Bucket=BUCKET, Delete={"Objects": some})
    for one in client.list_multipart_uploads(Bucket=BUCKET).get("Uploads", ()):
        client.abort_multipart_upload(Bucket=BUCKET, Key=one["Key"], UploadId=one["UploadId"])


def state(rank: int) -> dict[str, torch.Tensor]:
    return {"weight": torch.arange(300_000.0) + rank, "rank": torch.tensor(rank)}


def make_checkpoint(runs: Path, step: int, mode: str = "each", *, by_torch: bool = False) -> Path:
    parts = runs.parent / "parts"
    parts.mkdir(exist_ok=True)
    files = [parts / f"{rank}.pt" for rank in range(3)]
    for rank, file in enumerate(files):
        (torch.save if by_torch else ioshape.save)(state(rank), file)
    writer = build_folder() / "tests" / "c" / "checkpoint"
    subprocess.run((writer, "write", runs, str(step), mode, *files), check=True)
    return runs / f"step-{step:010}"


def fill(folder: Path, seed: int, large_bytes: int = 3 * PART + 4711) -> dict[str, bytes]:
    """Fill a directory with files of several sizes, and return their content."""
    source = random.Random(seed)
    content = {
        "empty": b"",
        "small": source.randbytes(1000),
        "below/it/a.bin": source.randbytes(70_000),
        "large.bin": source.randbytes(large_bytes),
    }
    for name, data in content.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return content


def content_of(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def written(log: list[str]) -> list[str]:
    """Return the names of the objects in a log, in the order of their writes."""
    return [line.rpartition("/")[2] for line in log if line.startswith("PUT ")]


# ---- Uploads and downloads -----------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["each", "rank0"])
def test_a_checkpoint_goes_there_and_comes_back_and_its_manifest_goes_last(
    mode: str, store: Store, tmp_path: Path
) -> None:
    path = make_checkpoint(tmp_path / "runs", 7, mode)
    done = s3.upload(path, f"{RUN}/")
    assert (done.url, done.kind) == (f"{RUN}/{path.name}", "group")
    assert done.files == len(names_in(path))
    assert written(store.harm())[-2:] == [LISTING, "manifest.json"]
    back = s3.download(done.url, f"{tmp_path}/back/")
    assert back.verified
    (one,) = ioshape.checkpoints(tmp_path / "back")
    one.verify()
    for rank in range(3):
        assert torch.equal(one.load(rank)["weight"], state(rank)["weight"])


def test_a_checkpoint_of_dcp_goes_there_and_comes_back_and_its_metadata_goes_last(
    store: Store, tmp_path: Path
) -> None:
    path = tmp_path / "dcp"
    dcp.save({"weight": torch.arange(5000.0)}, checkpoint_id=path, no_dist=True)
    done = s3.upload(path, RUN)
    assert (done.url, done.kind) == (RUN, "dcp")
    assert written(store.harm())[-2:] == [LISTING, ".metadata"]
    s3.download(RUN, tmp_path / "back")
    found = {"weight": torch.zeros(5000)}
    dcp.load(found, checkpoint_id=tmp_path / "back", no_dist=True)
    assert torch.equal(found["weight"], torch.arange(5000.0))


def test_any_directory_does_with_odd_names_and_empty_files(store: Store, tmp_path: Path) -> None:
    path = tmp_path / "model"
    content = fill(path, 1)
    for name in ("a b", "ä%41+&=?*'\"<>", "~", "-x", "$(x)", "a:b", "\t", ".hidden", "s3:"):
        (path / name).write_bytes(name.encode())
        content[name] = name.encode()
    (path / "nothing" / "in it").mkdir(parents=True)
    os.utime(path / "small", ns=(1, 1_700_000_000_123_456_789))
    s3.upload(path, RUN, part_bytes=PART)
    assert written(store.harm())[-1] == LISTING
    s3.download(RUN, tmp_path / "back", part_bytes=1 << 20)
    assert content_of(tmp_path / "back") == content
    assert names_in(tmp_path / "back" / "nothing") == ["in it"]
    assert (tmp_path / "back" / "small").stat().st_mtime_ns == 1_700_000_000_123_456_789


def test_an_empty_directory_is_one_there(store: Store, tmp_path: Path) -> None:
    (tmp_path / "none").mkdir()
    assert s3.upload(tmp_path / "none", f"{RUN}/").files == 0
    assert store.objects() == [f"run/none/{LISTING}"]
    s3.download(f"{RUN}/none", tmp_path / "back")
    assert names_in(tmp_path / "back") == []


@pytest.mark.parametrize("n_bytes", [0, 1, PART, PART + 1, 3 * PART])
def test_a_file_does_of_any_length(n_bytes: int, store: Store, tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(random.Random(n_bytes).randbytes(n_bytes))
    done = s3.upload(path, f"{RUN}/a.bin", part_bytes=PART)
    assert (done.url, done.kind, done.sent_bytes) == (f"{RUN}/a.bin", "file", n_bytes)
    back = s3.download(done.url, tmp_path / "b.bin", part_bytes=(1 << 20) + 1)
    assert back.verified
    assert (tmp_path / "b.bin").read_bytes() == path.read_bytes()
    assert store.uploads() == []


def test_checksums_beside_a_file_go_with_it_and_still_count(store: Store, tmp_path: Path) -> None:
    path = tmp_path / "tokens.bin"
    with ioshape.open(path, "wb", checksums=True) as file:
        file.write(bytes(3 << 20))
    s3.upload(path, f"{RUN}/")
    assert written(store.harm()) == ["tokens.bin.ioshape-sums", "tokens.bin"]
    (tmp_path / "back").mkdir()
    s3.download(f"{RUN}/tokens.bin", tmp_path / "back")
    ioshape.verify(tmp_path / "back" / "tokens.bin")
    with ioshape.open(tmp_path / "back" / "tokens.bin") as file:
        assert file.has_checksums


def test_statistics_beside_a_file_go_with_it(store: Store, tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    safetensors.save_file({"w": torch.ones(3)}, path, checksums=True)
    s3.upload(path, f"{RUN}/")
    names = [f"{path.name}.ioshape-sums", f"{path.name}.ioshape-stats", path.name]
    assert written(store.harm()) == names
    (tmp_path / "back").mkdir()
    s3.download(f"{RUN}/m.safetensors", tmp_path / "back")
    with Reader(str(tmp_path / "back" / "m.safetensors"), any_format=True) as reader:
        found = reader.statistics(0)
    assert found is not None
    assert found.sum_squares == 3


@pytest.mark.slow
def test_what_is_there_is_not_sent_again(store: Store, tmp_path: Path) -> None:
    path = tmp_path / "model"
    fill(path, 2)
    first = s3.upload(path, RUN, part_bytes=PART)
    assert first.sent_bytes > first.n_bytes
    store.harm()
    assert s3.upload(path, RUN, part_bytes=PART).sent_bytes == 0
    assert not [line for line in store.harm() if line.split()[0] in ("PUT", "POST", "DELETE")]
    (path / "small").write_bytes(b"other")
    again = s3.upload(path, RUN, part_bytes=PART)
    assert 0 < again.sent_bytes < 2000  # the changed file and the listing
    checkpoint = make_checkpoint(tmp_path / "runs", 1)
    s3.upload(checkpoint, f"{RUN}/")
    store.harm()
    s3.upload(checkpoint, f"{RUN}/")
    assert len(store.harm()) == 2  # the manifest identifies a whole checkpoint


def bytes_read() -> int:
    """Return the bytes that this process has read so far."""
    return int(Path("/proc/self/io").read_text().split()[1])


@pytest.mark.slow
def test_what_replaces_an_object_is_read_once(store: Store, tmp_path: Path) -> None:
    path, size = tmp_path / "model.pt", 3 * PART
    for number in range(2):
        path.write_bytes(random.Random(number).randbytes(size))
        before = bytes_read()
        assert s3.upload(path, RUN, part_bytes=PART).sent_bytes == size
        assert size <= bytes_read() - before < 1.5 * size
    body = store.client.get_object(Bucket=BUCKET, Key="run")["Body"].read()
    assert body == path.read_bytes()
    # Objects of other programs have no modification time of the source. Their content is compared.
    store.client.copy_object(
        Bucket=BUCKET,
        Key="run",
        CopySource={"Bucket": BUCKET, "Key": "run"},
        MetadataDirective="REPLACE",
        ChecksumAlgorithm="CRC32",
    )
    os.utime(path)
    assert s3.upload(path, RUN, part_bytes=PART).sent_bytes == 0


@pytest.mark.slow
def test_what_lies_on_a_tier_alone_is_uploaded_from_there(store: Store, tmp_path: Path) -> None:
    with saver(tmp_path) as saves:
        file = saves.save("model.pt", b"weights")
        folder = saves.save_group(1)
        folder_bytes = next(one.n_bytes for one in saves.copies() if one.path == str(folder))
        variables = {**store.variables, "IOSHAPE_TIER": str(saves.fast)}
        for path, n_bytes in ((file, 7), (folder, folder_bytes)):
            text = succeed(call("upload", path, f"s3://{BUCKET}/run/", "--json", env=variables))
            (found,) = json.loads(text)
            assert (found["url"], found["bytes"]) == (f"s3://{BUCKET}/run/{path.name}", n_bytes)
        assert {"run/model.pt", f"run/{folder.name}/manifest.json"} <= set(store.objects())
        # If the file at the destination is newer, it is uploaded instead of the copy.
        file.write_bytes(b"newer here")
        later = time.time_ns() + 10**9
        os.utime(file, ns=(later, later))
        text = succeed(call("upload", file, f"s3://{BUCKET}/run/", "--json", env=variables))
        assert json.loads(text)[0]["bytes"] == 10


def test_where_the_store_fails_nothing_older_is_uploaded_instead(
    store: Store, tmp_path: Path
) -> None:
    with saver(tmp_path) as saves:
        saves.save("model.pt", b"older" * 1000)
        saves.tier.drain()
        file = saves.save("model.pt", b"newer" * 1000)
        variables = {**store.variables, "IOSHAPE_TIER": str(saves.fast)}
        store.harm(flips=3)
        fail(call("upload", file, f"s3://{BUCKET}/run/", env=variables))
        assert store.objects() == []
        succeed(call("upload", file, f"s3://{BUCKET}/run/", env=variables))
        s3.download(f"s3://{BUCKET}/run/model.pt", tmp_path / "back")
        assert (tmp_path / "back").read_bytes() == b"newer" * 1000


def test_where_only_the_last_object_is_missing_that_completes_it(
    store: Store, tmp_path: Path
) -> None:
    path = make_checkpoint(tmp_path / "runs", 7)
    done = s3.upload(path, f"{RUN}/")
    (last,) = (key for key in store.objects() if key.endswith("/manifest.json"))
    store.client.delete_object(Bucket=BUCKET, Key=last)
    assert s3.checkpoints(RUN) == []
    s3.upload(path, f"{RUN}/")
    assert [one.url for one in s3.checkpoints(RUN)] == [done.url]


@pytest.mark.long
def test_more_than_a_thousand_objects(store: Store, tmp_path: Path) -> None:
    path = tmp_path / "many"
    path.mkdir()
    for number in range(1100):
        (path / f"{number:04}").write_bytes(b"%d" % number)
    s3.upload(path, RUN)
    assert len(store.objects("run/")) == 1101
    assert s3.upload(path, RUN).sent_bytes == 0
    s3.download(RUN, tmp_path / "back")
    assert content_of(tmp_path / "back") == content_of(path)
    (one,) = s3.checkpoints(RUN)
    assert one.files == 1100


# ---- Killed uploads ------------------------------------------------------------------------------


def killed_at(store: Store, request: int, path: Path) -> None:
    """Run an upload that is killed when its request of this number arrives."""
    upload = [str(IOSHAPE), "upload", str(path), RUN, "--part-bytes", "5M", "--jobs", "3"]
    process = subprocess.Popen(
        ["sh", "-c", 'read -r go; exec "$@"', "sh", *upload],
        env=environment(**store.variables),
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
    )
    store.harm(kill_at=request, pid=process.pid)
    process.communicate(b"go\n", timeout=TIMEOUT_S)
    assert process.returncode in (0, -9)
    store.forget_the_dead()


@pytest.mark.parametrize("trials", [3, pytest.param(30, marks=pytest.mark.long)])
@pytest.mark.slow
def test_a_killed_upload_leaves_no_checkpoint_or_the_whole_one_that_was_there(
    trials: int, store: Store, tmp_path: Path
) -> None:
    dice = random.Random(4711)
    whole = {seed: fill(tmp_path / f"version-{seed}", seed) for seed in range(2)}
    for version in (tmp_path / "version-0", tmp_path / "version-1"):
        s3.upload(version, RUN, part_bytes=PART)
    n_requests = len(store.harm())  # requests of two whole uploads
    seen = {"none": 0, "whole": 0}
    for trial in range(trials):
        seed = trial // 3 % 2
        killed_at(store, dice.randrange(1, n_requests // 2), tmp_path / f"version-{seed}")
        store.harm()
        back = tmp_path / f"back-{trial}"
        visible = s3.checkpoints(RUN)
        if visible:
            s3.download(RUN, back)
            assert content_of(back) in whole.values()
            seen["whole"] += 1
        else:
            with pytest.raises(FileNotFoundError, match="no complete checkpoint"):
                s3.download(RUN, back)
            assert not back.exists()
            seen["none"] += 1
        if trial % 3 == 2:
            s3.upload(tmp_path / f"version-{seed}", RUN, part_bytes=PART)
            s3.download(RUN, tmp_path / f"done-{trial}")
            assert content_of(tmp_path / f"done-{trial}") == whole[seed]
            assert store.uploads() == []
    assert seen["none"] >= trials / 6, seen


def test_the_parts_that_killed_uploads_have_left_are_removed(store: Store, tmp_path: Path) -> None:
    path = tmp_path / "large.bin"
    path.write_bytes(random.Random(1).randbytes(3 * PART))
    client = store.client
    for key in ("run", "run", "run2"):
        begun = client.create_multipart_upload(
            Bucket=BUCKET, Key=key, ChecksumAlgorithm="CRC32", ChecksumType="FULL_OBJECT"
        )
        place = {"Bucket": BUCKET, "Key": key, "UploadId": begun["UploadId"]}
        client.upload_part(**place, PartNumber=1, Body=bytes(PART), ChecksumAlgorithm="CRC32")
    assert s3.upload(path, RUN, part_bytes=PART).sent_bytes == 3 * PART
    assert store.uploads() == ["run2"]  # the upload of another object is kept
    s3.download(RUN, tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == path.read_bytes()


def test_objects_that_an_interrupted_upload_has_brought_are_not_sent_again(
    store: Store, tmp_path: Path
) -> None:
    path = tmp_path / "model"
    fill(path, 7)
    s3.upload(path, RUN, part_bytes=PART)
    store.client.delete_object(Bucket=BUCKET, Key=f"run/{LISTING}")
    store.client.delete_object(Bucket=BUCKET, Key="run/small")
    assert s3.checkpoints(RUN) == []
    assert 1000 < s3.upload(path, RUN, part_bytes=PART).sent_bytes < 3000
    (one,) = s3.checkpoints(RUN)
    assert one.files == 4


@pytest.mark.slow
@pytest.mark.parametrize("killed_last", [False, True])
def test_the_parts_of_another_one_do_not_stay_when_the_object_is_there(
    killed_last: bool, store: Store, tmp_path: Path
) -> None:
    path = tmp_path / "run"
    path.write_bytes(random.Random(1).randbytes(2 * PART))
    dead = {"Bucket": BUCKET, "Key": "run"}
    store.client.create_multipart_upload(**dead)
    store.harm()
    # The kill hits the request that completes the object. The server still executes it.
    if killed_last:
        s3.upload(path, RUN, part_bytes=PART)
        asked = store.harm()
        store.client.delete_object(**dead)
        store.client.create_multipart_upload(**dead)
        n_before = max(number for number, one in enumerate(asked) if one.startswith("POST"))
        killed_at(store, n_before + 1, path)
    else:
        store.client.put_object(**dead, Body=path.read_bytes(), ChecksumAlgorithm="CRC32")
    assert s3.upload(path, RUN, part_bytes=PART).sent_bytes == 0
    assert store.uploads() == []


# ---- Damage --------------------------------------------------------------------------------------


@pytest.mark.parametrize("by_torch", [False, True])
def test_a_damaged_checkpoint_does_not_become_one_there(
    by_torch: bool, store: Store, tmp_path: Path
) -> None:
    path = make_checkpoint(tmp_path / "runs", 1, by_torch=by_torch)
    flip(path / "rank-00001.pt", offset_of(path / "rank-00001.pt", "data/0") + 5000)
    with pytest.raises(ioshape.DamagedError, match="rank-00001"):
        s3.upload(path, RUN)
    assert not {"run/manifest.json", f"run/{LISTING}"} & set(store.objects())
    assert s3.checkpoints(RUN) == []


@pytest.mark.parametrize("by_torch", [False, True])
def test_a_damaged_record_is_found_where_it_lies_in_several_parts(
    by_torch: bool, store: Store, tmp_path: Path
) -> None:
    path = tmp_path / "model.pt"
    tensors = {"a": torch.arange(10.0), "b": torch.rand(3 * PART // 4)}
    (torch.save if by_torch else ioshape.save)(tensors, path)
    s3.upload(path, RUN, part_bytes=PART)
    flip(path, path.stat().st_size - 100_000)
    with pytest.raises(ioshape.DamagedError, match="data/1"):
        s3.upload(path, f"{RUN}-2", part_bytes=PART)
    assert store.objects() == ["run"]
    assert store.uploads() == []  # nothing would ever continue it


def test_a_file_that_only_a_manifest_has_a_checksum_of_is_compared(
    store: Store, tmp_path: Path
) -> None:
    path = make_checkpoint(tmp_path / "runs", 1, "rank0")
    (bundle,) = (name for name in names_in(path) if name != "manifest.json")
    flip(path / bundle, 40)  # a header, which only the manifest's checksum covers
    with pytest.raises(ioshape.DamagedError):
        s3.upload(path, RUN)
    assert "run/manifest.json" not in store.objects()


def test_what_arrives_with_another_checksum_is_sent_again(store: Store, tmp_path: Path) -> None:
    path = tmp_path / "model"
    content = fill(path, 3)
    store.harm(flips=2)
    s3.upload(path, RUN, part_bytes=PART)
    s3.download(RUN, tmp_path / "back")
    assert content_of(tmp_path / "back") == content


def test_where_it_always_does_the_upload_fails_and_there_is_no_checkpoint(
    store: Store, tmp_path: Path
) -> None:
    fill(tmp_path / "model", 3)
    store.harm(flips=1000)
    with pytest.raises(ioshape.StorageError, match="arrived with a wrong checksum") as found:
        s3.upload(tmp_path / "model", RUN, part_bytes=PART)
    assert found.value.errno == errno.EIO
    assert "network" in found.value.remedy
    assert f"run/{LISTING}" not in store.objects()


@pytest.mark.slow
def test_what_was_damaged_there_does_not_come_back(store: Store, tmp_path: Path) -> None:
    content = fill(tmp_path / "model", 3)
    s3.upload(tmp_path / "model", RUN)
    client = store.client
    for harm in (b"", content["small"][:-1], content["small"][:-1] + b"x"):
        client.put_object(Bucket=BUCKET, Key="run/small", Body=harm)
        with pytest.raises(ioshape.DamagedError, match="run/small"):
            s3.download(RUN, tmp_path / "back")
    client.delete_object(Bucket=BUCKET, Key="run/small")
    with pytest.raises(FileNotFoundError):
        s3.download(RUN, tmp_path / "back")
    assert names_in(tmp_path) == ["model"]
    s3.upload(tmp_path / "model", RUN)
    s3.download(RUN, tmp_path / "back")
    assert content_of(tmp_path / "back") == content


def test_nothing_of_a_listing_is_believed() -> None:
    right = {"format": "ioshape-objects", "version": 1, "kind": "directory", "directories": ["a"]}
    file = {"name": "b", "bytes": 1, "crc32": 2, "modified_ns": 3}
    assert decode(json.dumps({**right, "files": [file]}).encode()).n_bytes == 1
    for wrong in (
        {**file, "name": "../b"},
        {**file, "name": "/b"},
        {**file, "name": "a//b"},
        {**file, "name": "b\0"},
        {**file, "name": 7},
        {**file, "name": "a"},
        {**file, "bytes": -1},
        {**file, "crc32": 1 << 32},
        {**file, "bytes": "1"},
        {"name": "b"},
        7,
    ):
        with pytest.raises(ValueError, match=r"."):
            decode(json.dumps({**right, "files": [wrong]}).encode())
    for changed in ({"version": 2}, {"kind": "file"}, {"format": "x"}, {"directories": [".."]}):
        with pytest.raises(ValueError, match=r"."):
            decode(json.dumps({**right, "files": [file], **changed}).encode())
    for text in (b"", b"[]", b"\xff", b"7"):
        with pytest.raises(ValueError, match=r"."):
            decode(text)


def test_a_flipped_bit_of_a_listing_is_noticed() -> None:
    empty = Entry("empty", 0, 0, 1)
    whole = encode(Listing("directory", (empty,), ("a",)))
    assert decode(whole).files == (empty,)
    for bit in range(8 * len(whole)):
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        try:
            found = decode(bytes(flipped))
        except ValueError:
            continue
        assert found == decode(whole), flipped


@pytest.mark.parametrize("seed", range(20))
def test_checksums_of_pieces_are_those_of_ranges(seed: int) -> None:
    dice = random.Random(seed)
    data = dice.randbytes(dice.randrange(1, 3000))
    ends = sorted(dice.randrange(len(data) + 1) for _ in range(6))
    known = [
        Known(begin, end - begin, crc32(data[begin:end]), AssertionError)  # type: ignore[arg-type]
        for begin, end in itertools.pairwise(ends)
    ]
    parts = [(at, data[at : at + 500]) for at in range(0, len(data), 500)]
    dice.shuffle(parts)
    sums = Sums(known)
    for at, part in parts:
        assert sums.add(at, part) == crc32(part)
    sums.check()
    assert sums.whole() == crc32(data)
    wrong = next((one for one in known if one.n_bytes), None)
    if wrong is not None:
        bad = Sums([wrong._replace(crc32=wrong.crc32 ^ 1)])
        for at, part in parts:
            bad.add(at, part)
        with pytest.raises(AssertionError):
            bad.check()


# ---- Incomplete sources --------------------------------------------------------------------------


def test_what_is_no_complete_checkpoint_is_refused(store: Store, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    path = make_checkpoint(runs, 1)
    (path / "manifest.json").unlink()
    under_way = tmp_path / ".model.ioshape-tmp-1"
    under_way.mkdir()
    attempt = runs / ".step-0000000002.1f2e3d4c-00000003-0123456789abcdef"
    attempt.mkdir()
    for wrong in (path, under_way, attempt, tmp_path / "none"):
        with pytest.raises(ioshape.StorageError):
            s3.upload(wrong, RUN)
    make_checkpoint(runs, 3)
    with pytest.raises(ioshape.StorageError, match="a directory with 1 of them; name one of them"):
        s3.upload(runs, RUN)
    odd = tmp_path / "odd"
    odd.mkdir()
    (odd / "link").symlink_to(path)
    with pytest.raises(ioshape.StorageError, match="symbolic link to a directory"):
        s3.upload(odd, RUN)
    (odd / "link").unlink()
    os.mkfifo(odd / "pipe")
    with pytest.raises(ioshape.StorageError, match="neither a file nor"):
        s3.upload(odd, RUN)
    (odd / "pipe").unlink()
    Path(os.fsdecode(os.fsencode(odd) + b"/\xff")).touch()
    with pytest.raises(ioshape.StorageError, match="not UTF-8"):
        s3.upload(odd, RUN)
    assert store.objects() == []


def test_a_save_under_way_beside_the_files_is_left_out(store: Store, tmp_path: Path) -> None:
    fill(tmp_path / "model", 1, 100)
    (tmp_path / "model" / ".large.bin.ioshape-tmp-1").write_bytes(b"half")
    (tmp_path / "model" / ".ioshape-tmp-2").mkdir()
    s3.upload(tmp_path / "model", RUN)
    assert not [key for key in store.objects() if "tmp" in key]


def test_addresses() -> None:
    for wrong in (
        "s3://",
        "s3:///a",
        "s3://b u/a",
        "s3://bkt/a//b",
        "s3://bkt/../a",
        "a",
        "gs://b",
    ):
        with pytest.raises(ValueError, match=r"s3://bucket/key"):
            s3.download(wrong, "x")
    with pytest.raises(ValueError, match="at least 1"):
        s3.upload("x", RUN, jobs=0)
    with pytest.raises(ValueError, match="5242880"):
        s3.upload("x", RUN, part_bytes=PART - 1)


def test_a_directory_that_is_there_is_not_replaced(store: Store, tmp_path: Path) -> None:
    fill(tmp_path / "model", 1, 100)
    s3.upload(tmp_path / "model", f"{RUN}/")
    assert store.objects()
    with pytest.raises(FileExistsError, match="already exists"):
        s3.download(f"{RUN}/model", tmp_path)
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(FileExistsError, match="already exists"):
        s3.download(f"{RUN}/model", tmp_path / "file")


# ---- Servers -------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("odd_etags", [False, True])
def test_where_crc32s_are_not_known_the_server_compares_md5s(
    odd_etags: bool, store: Store, tmp_path: Path
) -> None:
    content = fill(tmp_path / "model", 5)
    store.harm(knows_no_crc32=True, odd_etags=odd_etags, flips=2)
    s3.upload(tmp_path / "model", RUN, part_bytes=PART)
    assert store.uploads() == []
    sent_again = s3.upload(tmp_path / "model", RUN, part_bytes=PART).sent_bytes
    # With odd ETags, nothing tells whether the object is up to date.
    assert bool(sent_again) == odd_etags
    s3.download(RUN, tmp_path / "back")
    assert content_of(tmp_path / "back") == content
    s3.upload(tmp_path / "model" / "large.bin", f"{RUN}/", part_bytes=PART)
    store.harm(knows_no_crc32=True)
    assert not s3.download(f"{RUN}/large.bin", tmp_path / "large.bin").verified
    assert (tmp_path / "large.bin").read_bytes() == content["large.bin"]


def test_another_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check the server of rclone, which knows only MD5s and lists uploads in its own way."""
    with object_store.rclone(tmp_path) as other:
        use(other, monkeypatch)
        content = fill(tmp_path / "model", 6)
        s3.upload(tmp_path / "model", RUN, part_bytes=PART)
        on_disk = content_of(tmp_path / "objects" / BUCKET / "run")
        assert on_disk.pop(LISTING)
        assert on_disk == content
        s3.download(RUN, tmp_path / "back")
        assert content_of(tmp_path / "back") == content
        assert [one.url for one in s3.checkpoints(f"s3://{BUCKET}")] == [RUN]


def test_without_credentials_or_with_wrong_ones(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_checkpoint(tmp_path / "runs", 1)
    with monkeypatch.context() as changed:
        changed.delenv("AWS_ACCESS_KEY_ID")
        with pytest.raises(PermissionError, match="no credentials; set AWS_ACCESS_KEY_ID"):
            s3.upload(path, RUN)
    store.harm(deny=True)
    with pytest.raises(PermissionError, match="the server denies access; check which credentials"):
        s3.upload(path, RUN)
    with pytest.raises(PermissionError, match="the server denies access"):
        s3.download(RUN, tmp_path / "back")
    with object_store.rclone(tmp_path) as other:  # this server checks signatures
        use(other, monkeypatch)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIDANOTHER00000")
        with pytest.raises(PermissionError, match="does not know these credentials"):
            s3.upload(path, RUN)


def test_a_bucket_or_a_checkpoint_that_is_not_there(store: Store, tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "runs", 1)
    for source in (path, path / "rank-00000.pt"):
        with pytest.raises(FileNotFoundError, match="no such bucket; create it"):
            s3.upload(source, "s3://another-bucket/x")
    with pytest.raises(FileNotFoundError, match="no such bucket"):
        s3.checkpoints("s3://another-bucket")
    with pytest.raises(FileNotFoundError, match='no complete checkpoint; run "'):
        s3.download(RUN, tmp_path / "back")
    assert store.objects() == []


@pytest.mark.slow
def test_a_server_that_goes_midway(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path / "model", 1)
    with object_store.moto(tmp_path) as other:
        use(other, monkeypatch)
        other.harm(gone_at=7)
        with pytest.raises(OSError, match=r"cannot be reached.*check --endpoint") as found:
            s3.upload(tmp_path / "model", RUN, part_bytes=PART)
        assert found.value.errno == errno.EHOSTUNREACH
        with pytest.raises(OSError, match="cannot be reached"):
            s3.download(RUN, tmp_path / "back")
        assert not (tmp_path / "back").exists()


@pytest.mark.slow
def test_a_server_that_accepts_and_never_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path / "model", 1)
    monkeypatch.setattr(remote, "SILENCE_S", 1)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        endpoint = f"http://127.0.0.1:{listening.getsockname()[1]}"
        for name, value in object_store.variables(endpoint, tmp_path).items():
            monkeypatch.setenv(name, value)
        expected = r"^cannot {} .*: the server sent nothing for 1 s; check the network and"
        with pytest.raises(TimeoutError, match=expected.format("upload")):
            s3.upload(tmp_path / "model", RUN)
        with pytest.raises(TimeoutError, match=expected.format("download")):
            s3.download(RUN, tmp_path / "back")
        with pytest.raises(TimeoutError, match=expected.format("list")):
            s3.checkpoints(f"s3://{BUCKET}")
    assert not (tmp_path / "back").exists()


@pytest.mark.long
def test_a_server_that_falls_silent(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Count requests: each is tried twice, because the tests' AWS_MAX_ATTEMPTS is 2."""
    path = f"/{BUCKET}/run/large.bin"
    fill(tmp_path / "model", 1)
    monkeypatch.setattr(remote, "SILENCE_S", 4)
    monkeypatch.setattr(download, "_ATTEMPTS", 3)
    store.harm(silent=f"PUT {path}")
    with pytest.raises(OSError, match=r"^cannot upload .*large\.bin.*: the server "):
        s3.upload(tmp_path / "model", RUN, jobs=1, part_bytes=PART)
    log = store.harm()
    assert log.count(f"PUT {path}") == 2
    assert log[-1] == f"DELETE {path}"
    s3.upload(tmp_path / "model", RUN, part_bytes=PART)
    for harm, tries in (({"silent": f"GET {path}"}, 2), ({"half_bodies": True}, 3)):
        store.harm(**harm)
        with pytest.raises(TimeoutError, match=r"^cannot download .*: the server sent nothing for"):
            s3.download(f"{RUN}/large.bin", tmp_path / "back", jobs=1, part_bytes=PART)
        assert store.harm().count(f"GET {path}") == tries
    assert not (tmp_path / "back").exists()


@pytest.mark.slow
def test_memory_does_not_grow_with_the_file(store: Store, tmp_path: Path) -> None:
    path = tmp_path / "large.bin"
    program = """if True:
        import sys
        from ioshape import s3
        s3.upload(sys.argv[1], sys.argv[2], jobs=2, part_bytes=5 << 20)
        # Not ru_maxrss, which starts with the peak of the process that started this one.
        with open("/proc/self/status") as file:
            print(*(line.split()[1] for line in file if line.startswith("VmHWM:")))
    """
    peaks = []
    # Up to about 100 MiB, a larger file makes boto3 fill more of its buffers.
    for n_bytes in (110 << 20, 170 << 20):
        with path.open("wb") as file:
            file.truncate(n_bytes)
        done = subprocess.run(
            [sys.executable, "-c", program, path, f"{RUN}/{n_bytes}"],
            env=environment(**store.variables),
            capture_output=True,
            text=True,
            check=True,
        )
        peaks.append(int(done.stdout) << 10)
    assert peaks[1] - peaks[0] < 30 << 20


# ---- The commands --------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_commands(store: Store, tmp_path: Path) -> None:
    for step in (1, 2, 3):
        make_checkpoint(tmp_path / "runs", step)
    upload = ("upload", tmp_path / "runs")
    env = {**store.variables}
    del env["AWS_ENDPOINT_URL_S3"]
    there = ("--endpoint", store.endpoint)
    assert "name one of them, or add --newest 1 or --all" in fail(
        call(*upload, RUN, *there, env=env)
    )
    text = succeed(call(*upload, RUN, "--newest", 2, *there, env=env))
    assert [line.partition(":  ")[0].split(": ")[0] for line in text.splitlines()] == [
        f"{RUN}/step-0000000002",
        f"{RUN}/step-0000000003",
    ]
    time.sleep(1)  # stores keep times in seconds, so uploads within one second have no order
    done = json.loads(succeed(call(*upload, RUN, "--all", "--json", *there, env=env)))
    assert [bool(one["sent_bytes"]) for one in done] == [True, False, False]
    listed = succeed(call("ls", RUN, *there, env=env))
    assert listed.count("group") == 3
    assert "step-0000000001" in listed.splitlines()[-1]  # in the order of the uploads
    listed = json.loads(succeed(call("ls", RUN, "--json", *there, env=env)))
    assert len(listed["checkpoints"]) == 3
    assert listed["checkpoints"][0]["bytes"] == done[1]["bytes"]
    back = tmp_path / "back"
    back.mkdir()
    text = succeed(call("download", f"{RUN}/step-0000000002", back, *there, env=env))
    assert text.startswith(f"{back}/step-0000000002: 4 files, ")
    assert succeed(call("verify", back)).count("ok") == 1
    assert "no complete checkpoint" in fail(call("download", f"{RUN}/x", back, *there, env=env))
    assert "There is no complete checkpoint" in succeed(call("ls", f"{RUN}/x", *there, env=env))
    assert "exclude each other" in fail(
        call(*upload, RUN, "--all", "--newest", 1, *there, env=env), 2
    )
    assert "no checkpoint" in fail(call("upload", back.parent, RUN, "--all", *there, env=env))


@pytest.mark.wording
def test_other_commands_and_functions_name_this_one(tmp_path: Path) -> None:
    sentence = fail(call("inspect", "s3://bucket/a.pt"))
    assert '"ioshape upload PATH s3://bucket/a.pt"' in sentence
    with pytest.raises(FileNotFoundError, match="ioshape download"):
        ioshape.open(f"{RUN}/a.pt")
    with pytest.raises(FileNotFoundError, match="fsspec"):
        ioshape.open("gs://bucket/a.pt")
    assert names_in(tmp_path) == []


@pytest.mark.wording
def test_without_boto3_there_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "boto3.py").write_text("raise ImportError")
    text = fail(call("upload", tmp_path, RUN, env={"PYTHONPATH": str(tmp_path)}))
    assert text.endswith("not installed; install it: pip install 'ioshape[s3]'")
    assert "ioshape" in succeed(call("--version", env={"PYTHONPATH": str(tmp_path)}))
