# SPDX-License-Identifier: Apache-2.0
"""Writes files as Python programs do, for tests/support/preloaded_table.py.

The function is the argument. The bytes are the same in each run.
"""

import asyncio
import multiprocessing
import os
import random
import shutil
import sqlite3
import subprocess
import sys
import tarfile
import tempfile
import threading
import zipfile
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

MIB = 1 << 20


def content(seed: int, n_bytes: int = 2 * MIB) -> bytes:
    return random.Random(seed).randbytes(n_bytes)


def write_file(seed: int) -> int:
    Path(f"file-{seed}").write_bytes(content(seed))
    return Path(f"file-{seed}").stat().st_size


def files() -> None:
    """Write through each layer of Python's own files."""
    with Path("raw").open("wb", buffering=0) as raw:
        print(raw.write(content(1)), raw.seek(MIB), raw.write(content(2)), raw.truncate(5 * MIB))
    with Path("text").open("w", encoding="utf-8") as text:
        text.writelines(f"line {number}\n" for number in range(100_000))
    with Path("appended").open("ab") as appended:
        for seed in range(8):
            appended.write(content(seed, 300_000))
            appended.flush()
            os.fsync(appended.fileno())
    with tempfile.NamedTemporaryFile(dir=".", delete=False) as temporary:
        temporary.write(content(3))
    Path(temporary.name).replace("replaced")


def processes() -> None:
    """Write in worker processes of every start method, and in threads."""
    for number, method in enumerate(("fork", "spawn", "forkserver")):
        with multiprocessing.get_context(method).Pool(3) as pool:
            print(method, pool.map(write_file, range(number * 10, number * 10 + 6)))
    with ProcessPoolExecutor(2) as executor:
        print(list(executor.map(write_file, range(40, 44))))
    with ThreadPoolExecutor(4) as threads:
        print(list(threads.map(write_file, range(50, 58))))
    lock = threading.Lock()
    with lock:
        child = os.fork()
        if child == 0:
            write_file(60)
            os._exit(7)
    print(os.waitpid(child, 0)[1])


def children() -> None:
    """Start programs whose output is a file, a pipe or the output of a coroutine."""
    source = "import sys; sys.stdout.buffer.write(bytes(range(256)) * 8192)"
    with Path("output").open("wb") as output:
        subprocess.run([sys.executable, "-c", source], stdout=output, check=True)
        subprocess.run([sys.executable, "-c", source], stdout=output, check=True, close_fds=False)
    print(len(subprocess.check_output([sys.executable, "-c", source])))

    async def gather() -> None:
        started = [
            await asyncio.create_subprocess_exec(
                sys.executable, "-c", source, stdout=asyncio.subprocess.PIPE
            )
            for _ in range(3)
        ]
        outputs = await asyncio.gather(*(one.communicate() for one in started))
        for number, (output, _) in enumerate(outputs):
            await asyncio.to_thread(Path(f"gathered-{number}").write_bytes, output)

    asyncio.run(gather())


def archives() -> None:
    for seed in range(3):
        write_file(seed)
        os.utime(f"file-{seed}", (0, 0))
    with zipfile.ZipFile("archive.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for seed in range(3):
            archive.writestr(zipfile.ZipInfo(f"file-{seed}"), content(seed))
    with tarfile.open("archive.tar", "w") as tar:
        tar.add("file-1")
    shutil.unpack_archive("archive.zip", "unpacked")
    shutil.copytree("unpacked", "copies")


def sqlite() -> None:
    """Fill a database with a write-ahead log, roll back, vacuum, and read with a second process."""
    with sqlite3.connect("data.db", isolation_level=None) as database:
        print(*database.execute("pragma journal_mode=wal").fetchone())
        database.execute("pragma synchronous=full")
        database.execute("create table blobs (number integer primary key, content blob)")
        for turn in range(10):
            database.execute("begin")
            rows = [(turn * 20 + row, content(turn * 20 + row, 10_000)) for row in range(20)]
            database.executemany("insert into blobs values (?, ?)", rows)
            database.execute("rollback" if turn % 3 == 2 else "commit")
        print(*database.execute("pragma wal_checkpoint(truncate)").fetchone())
        database.execute("delete from blobs where number % 2")
        database.execute("vacuum")
    source = """if True:
        import sqlite3
        database = sqlite3.connect("data.db")
        print(database.execute("select count(*), sum(length(content)) from blobs").fetchone())
        print(database.execute("pragma integrity_check").fetchone())
    """
    subprocess.run([sys.executable, "-c", source], check=True)


def numpy() -> None:
    import numpy as np  # noqa: PLC0415 - only for this way

    numbers = np.arange(400_000, dtype=np.float64)
    np.save("numbers.npy", numbers)
    np.savez("numbers.npz", a=numbers, b=numbers[::2])
    numbers.tofile("numbers.raw")
    mapped = np.memmap("mapped.raw", dtype=np.float64, mode="w+", shape=numbers.shape)
    mapped[:] = numbers * 2
    mapped.flush()
    with Path("two.npy").open("wb") as file:
        np.save(file, numbers)
        np.save(file, numbers[::-1])
    print(float(np.load("numbers.npz")["b"].sum()))


def torch() -> None:
    import torch  # noqa: PLC0415

    state = {"weights": torch.arange(500_000, dtype=torch.float32), "step": 1}
    torch.save(state, "model.pt")
    with Path("file.pt").open("wb") as file:
        torch.save(state, file)
    torch.save(state, "old.pt", _use_new_zipfile_serialization=False)
    for name in ("model.pt", "file.pt", "old.pt"):
        print(name, torch.load(name)["weights"].sum().item())
    Path("old.pt").unlink()  # its keys are addresses in memory


def h5py() -> None:
    import h5py as h5  # type: ignore[import-not-found,import-untyped,unused-ignore] # noqa: PLC0415
    import numpy as np  # noqa: PLC0415

    for driver in ("sec2", "stdio"):
        with h5.File(f"{driver}.h5", "w", driver=driver, track_order=True) as file:
            file.create_dataset("whole", data=np.arange(300_000), track_times=False)
            chunked = file.create_dataset(
                "chunks", (1000, 1000), chunks=(100, 100), compression="gzip", track_times=False
            )
            chunked[:] = np.arange(1_000_000).reshape(1000, 1000)
        with h5.File(f"{driver}.h5") as file:
            print(driver, file["chunks"][999, 999], file["whole"][-1])


def tensorstore() -> None:
    """Write as Orbax does, the checkpoints of JAX."""
    import numpy as np  # noqa: PLC0415
    import tensorstore as ts  # type: ignore[import-not-found,import-untyped,unused-ignore] # noqa: PLC0415

    kinds = {"zarr": {"compressor": None}, "zarr3": {}}
    for driver, metadata in kinds.items():
        array = ts.open(
            {
                "driver": driver,
                "kvstore": {"driver": "file", "path": driver},
                "metadata": metadata,
            },
            create=True,
            dtype=ts.float32,
            shape=[1000, 1000],
            chunk_layout=ts.ChunkLayout(chunk_shape=[500, 1000]),
        ).result()
        array.write(np.arange(1_000_000, dtype=np.float32).reshape(1000, 1000)).result()
        print(driver, array.read().result().sum())


if __name__ == "__main__":
    globals()[sys.argv[1]]()
