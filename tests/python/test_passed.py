# SPDX-License-Identifier: Apache-2.0
"""Saves that "ioshape run" cannot make ours are not passed over in silence."""

import textwrap
from pathlib import Path

import pytest
from command import call

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
                torch.save({"w": torch.ones(1 << 18)}, file)
    if "memory" in sys.argv:
        torch.save({"w": torch.ones(1 << 18)}, io.BytesIO())
"""


@pytest.mark.parametrize("to", ["nothing", "file", "memory"])
def test_what_goes_past_it_is_told_at_the_end(to: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(PAST_US))
    done = call("run", script, to, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("ioshape: ")]
    assert len(lines) == (to != "nothing"), done.stderr
    if lines:
        # Two files of 1 MiB; or what went to memory, the small one included.
        assert "__main__" in lines[0]
        assert ("__main__ 3 (2.0 MiB)" if to == "file" else "__main__ 2 (1.0 MiB)") in lines[0]
