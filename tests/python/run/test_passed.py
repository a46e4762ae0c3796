# SPDX-License-Identifier: Apache-2.0
"""`ioshape run` reports the saves that it cannot intercept."""

import zipfile
from pathlib import Path

import pytest
from processes import common_forker, run_program
from records import is_ours

PAST_US = """
    import io
    import sys

    import ioshape
    import torch

    state = {"w": torch.ones(1000)}
    torch.save(state, "path.pt")
    with ioshape.open("ours.pt", "wb") as file:
        torch.save(state, file)
    torch.save(state, io.BytesIO())
    if "file" in sys.argv:
        for name in ("a.pt", "b.pt"):
            with open(name, "wb") as file:
                file.write(b"a header")
                torch.save({"w": torch.ones(1 << 18)}, file)
    if "memory" in sys.argv:
        torch.save({"w": torch.ones(1 << 18)}, io.BytesIO())
"""


@pytest.mark.slow
@pytest.mark.parametrize("to", ["nothing", "file", "memory"])
def test_what_goes_past_it_is_told_at_the_end(to: str, tmp_path: Path) -> None:
    done = run_program(tmp_path, PAST_US, to, forker=common_forker(under_run=True))
    lines = [line for line in done.stderr.splitlines() if line.startswith("ioshape: ")]
    assert len(lines) == (to != "nothing"), done.stderr
    if lines:
        # Two files of 1 MiB, or all saves to memory, including the small one.
        assert "__main__" in lines[0]
        assert ("__main__ 3 (2.0 MiB)" if to == "file" else "__main__ 2 (1.0 MiB)") in lines[0]


# Stable-Baselines3 before 2.2 has such functions: nothing closes the file.
SAVE_UTIL = """
import zipfile


def open_path(path, mode, verbose=0, suffix=None):
    return open(path, mode + "b")


def save_to_zip_file(path):
    with zipfile.ZipFile(open_path(path, "w"), mode="w") as archive:
        archive.writestr("data", "")
"""


@pytest.mark.slow
def test_archives_that_nobody_closes_are_left_to_the_framework(tmp_path: Path) -> None:
    package = tmp_path / "stable_baselines3" / "common"
    package.mkdir(parents=True)
    (package / "save_util.py").write_text(SAVE_UTIL)
    script = """
        import sys

        sys.path.insert(0, ".")
        from stable_baselines3.common import save_util

        save_util.save_to_zip_file("model.zip")
    """
    run_program(tmp_path, script, forker=common_forker(under_run=True))
    assert zipfile.is_zipfile(tmp_path / "model.zip")


OPENED = """
    import io
    import os
    import sys

    import ioshape
    import torch

    if "patch" in sys.argv:
        ioshape.patch()
    state = {"w": torch.arange(1 << 18)}


    def opened(name, mode="wb", before=lambda file: None, small=False):
        file = open(name, mode)
        before(file)
        torch.save({"w": torch.ones(3)} if small else state, file)
        return file


    with opened("plain.pt") as file:
        assert file.tell() == os.path.getsize("plain.pt")
        assert os.fstat(file.fileno()).st_ino == os.stat("plain.pt").st_ino
        assert not os.get_inheritable(file.fileno())
        os.fsync(file.fileno())
    with opened("more.pt") as file:
        file.write(b"more")
    with opened("exclusive.pt", "xb") as file:
        pass
    assert os.stat("plain.pt").st_mode & 0o777 == 0o666 & ~os.umask(0o22)

    for name in ("small.pt", "private.pt"):
        os.close(os.open(name, os.O_CREAT, 0o600 if "private" in name else 0o644))
        with opened(name, small=True) as file:
            file.write(b"more")
        size = os.path.getsize(name)
        assert file.name == name and size > 1000, size
        assert os.stat(name).st_mode & 0o777 == (0o600 if "private" in name else 0o644)
        with open(name, "rb") as file:
            content = file.read()
        assert content.endswith(b"more")
        assert torch.load(io.BytesIO(content[:-4]))["w"].sum() == 3

    # Left to torch, because the program could see the difference.
    opened("header.pt", before=lambda file: file.write(b"header")).close()
    opened("flushed.pt", before=lambda file: (file.write(b"header"), file.flush())).close()
    opened("appended.pt", "ab").close()
    opened("both.pt", "w+b").close()
    opened("linked.pt", before=lambda file: os.link("linked.pt", "other.pt")).close()
    opened("moved.pt", before=lambda file: os.rename("moved.pt", "there.pt")).close()
    opened("gone.pt", before=lambda file: os.unlink("gone.pt")).close()
    os.symlink("behind.pt", "link.pt")
    opened("link.pt").close()
    assert os.path.samefile("linked.pt", "other.pt")
    assert not os.path.exists("moved.pt") and not os.path.exists("gone.pt")
    for name in ("appended", "both", "other", "there", "behind"):
        assert torch.equal(torch.load(name + ".pt")["w"], state["w"])
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["run", "patch"])
def test_a_file_that_was_just_opened_becomes_ours(how: str, tmp_path: Path) -> None:
    run_program(tmp_path, OPENED, how, forker=common_forker(under_run=how == "run"))
    ours = {path.name for path in tmp_path.glob("*.pt") if is_zip(path) and is_ours(path)}
    if how == "run":
        # The file has the bytes of torch, but it appears whole.
        assert "small.pt" not in ours
        ours.add("small.pt")
    assert ours == {"plain.pt", "more.pt", "exclusive.pt", "small.pt", "private.pt"}
    assert (tmp_path / "more.pt").read_bytes().endswith(b"more")


def is_zip(path: Path) -> bool:
    return path.read_bytes().startswith(b"PK")
