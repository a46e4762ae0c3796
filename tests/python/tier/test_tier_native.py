# SPDX-License-Identifier: Apache-2.0
"""The Python wrapper of the C library's tier."""

import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import ioshape
import pytest
from ioshape._core.context import Context
from ioshape._tier.tier import Drained, Tier, tiers_at


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[Tier]:
    (tmp_path / "fast").mkdir()
    (tmp_path / "slow").mkdir()
    opened = Tier(Context(), str(tmp_path / "fast"))
    yield opened
    opened.close()


def save(tier: Tier, path: Path, text: str = "saved") -> Path:
    """Save a file to the tier and return the path of the copy."""
    place = Path(tier.path_for(str(path), len(text)))
    with ioshape.open(place, "wb") as file:
        file.write(text.encode())
    tier.keep(str(path))
    return place


def drain(tier: Tier, path: Path | None = None) -> list[Drained]:
    told: list[Drained] = []
    tier.drain(None if path is None else str(path), ended=told.append)
    return told


def test_exceptions_of_callbacks_end_a_drain_and_nothing_is_lost(
    tier: Tier, tmp_path: Path
) -> None:
    paths = [tmp_path / "slow" / name for name in ("a", "b")]
    for path in paths:
        save(tier, path)

    def stop(_: object) -> None:
        raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        tier.drain(progress=stop)
    assert not any(path.exists() for path in paths)
    with pytest.raises(LookupError, match="mine"):
        tier.drain(ended=stop)
    assert [path.exists() for path in paths] == [True, False]
    assert [one.path for one in drain(tier)] == [str(paths[1])]


def test_ctrl_c_ends_the_wait_for_another_drain(tier: Tier, tmp_path: Path) -> None:
    """Check that Ctrl-C works on the main thread while other threads run, without callbacks too."""
    save(tier, tmp_path / "slow" / "a")
    other = Tier(Context(), str(tmp_path / "fast"))
    drains, may_end = threading.Event(), threading.Event()

    def hold(_: object) -> None:
        drains.set()
        may_end.wait()

    holder = threading.Thread(target=other.drain, kwargs={"progress": hold})
    holder.start()
    drains.wait()
    waits = threading.Event()

    def interrupt() -> None:
        waits.wait()
        signal.raise_signal(signal.SIGINT)

    killer = threading.Thread(target=interrupt)
    killer.start()
    with pytest.raises(KeyboardInterrupt):
        tier.drain(progress=lambda progress: waits.set() if progress.phase == "wait" else None)
    may_end.set()
    holder.join()
    killer.join()
    assert (tmp_path / "slow" / "a").read_text() == "saved"


# Names and targets of links that the C library logs and ignores, because they are no journal
# entries.
NO_ENTRIES = {
    "0" * 20: "0 0 /a",  # numbers begin at 1
    "9" * 20: "0 0 /a",  # numbers end below 2**64
    "00000000000000000077": "0 0 a",
    "00000000000000000078": "0 /a",
    "00000000000000000079": "4294967296 0 /a",
    "00000000000000000080": "0 0 /a/../b",
    "00000000000000000081-1": "0 0 /a",
    "00000000000000000082-01-1": "0 0 /a",
    "82": "0 0 /a",
    "lock": "0 0 /a",
}


def test_an_operator_sees_what_the_library_does(tier: Tier, tmp_path: Path) -> None:
    """Check that tiers_at() and the C library agree on what a journal entry is.

    An operator's command reads the tiers of all users without opening them.
    """
    slow = tmp_path / "slow"
    (slow / "1 2 ").mkdir()
    drained = save(tier, slow / "drained")
    drain(tier)
    for name in ("a b", "1 2 /c", "d\udcff\ne", "f", "f"):
        save(tier, slow / name, "x" * len(name))
    drained.unlink()
    journal = Path(tier.files).with_name("journal")
    for name, text in NO_ENTRIES.items():
        (journal / name).symlink_to(text)
    (journal / "00000000000000000083").touch()
    [one] = tiers_at(str(tmp_path / "fast"))
    waiting = [copy for copy in tier.copies() if copy.is_waiting]
    assert one.waiting == len(waiting) == 4
    assert one.waiting_bytes == sum(copy.n_bytes for copy in waiting)
    assert one.oldest_s > 0
    assert str(slow / "d\udcff\ne") in [one.path for one in drain(tier)]
    [one] = tiers_at(str(tmp_path / "fast"))
    assert (one.waiting, one.waiting_bytes, one.oldest_s) == (0, 0, 0)
    assert one.drained_s > time.time() - 60


def test_mistakes_are_said(tier: Tier, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="cannot open the tier"):
        Tier(Context(), str(tmp_path / "not there"))
    with pytest.raises(FileNotFoundError, match="was not saved on the tier"):
        tier.keep(str(tmp_path / "slow" / "a"))
    with pytest.raises(FileNotFoundError, match="is a URL"):
        tier.path_for("s3://bucket/a", 0)
    tier.close()
    tier.close()
    with pytest.raises(ValueError, match="it is closed"):
        tier.copies()
