# SPDX-License-Identifier: Apache-2.0
"""Run the programs in docs/frameworks.md with the frameworks."""

import re
import socket
import sys
from contextlib import closing, nullcontext
from pathlib import Path

import frameworks
import pytest
from processes import Forker, run_program
from tree import ROOT

PAGE = (ROOT / "docs" / "frameworks.md").read_text(encoding="utf-8")

#: Environment of a section's framework, if it is not part of the set-up.
INSTALLED_AS = {
    "Composer": "composer",
    "Megatron-core": "megatron",
    "NVIDIA's resiliency extension": "nvrx",
    "Ray Train": "ray",
}

#: Code of a user around the page's program.
BEFORE = {
    "Megatron-core": """
import torch

torch.distributed.init_process_group("gloo")
state, directory = {"step": 1000}, "step-1000"
__import__("os").mkdir(directory)
""",
}
AFTER = {
    "Composer": """
import torch
from composer import Trainer
from composer.models import ComposerModel
from torch.utils.data import DataLoader

class Model(ComposerModel):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 3)

    def forward(self, batch):
        return self.layer(batch)

    def loss(self, outputs, _):
        return outputs.square().mean()

def trained(batches, **how):
    data = DataLoader(torch.ones(200, 3), batch_size=1)
    trainer = Trainer(
        model=Model(), train_dataloader=data, max_duration=f"{batches}ba", device="cpu", **how
    )
    trainer.fit()
    trainer.close()
    return trainer.state.model.layer.weight

whole = trained(150, callbacks=[Saver()])
ioshape.wait_all()
assert torch.equal(trained(150, load_path="ba100.pt"), whole)
""",
    "NVIDIA's resiliency extension": """
    assert ioshape.load("step-1000.pt")["weight"].shape == (3, 4)
    torch.distributed.destroy_process_group()
""",
    "Ray Train": """
assert [one.step for one in ioshape.checkpoints(storage / "run")] == [1, 2, 3]
""",
}


def programs() -> list[object]:
    found: list[object] = []
    for section in PAGE.split("\n## ")[1:]:
        title = section.partition("\n")[0]
        texts = re.findall(r"^```python\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
        marks = pytest.mark.long if title in INSTALLED_AS else ()
        for number, text in enumerate(texts):
            name = f"{title.partition(',')[0]}-{number}".replace(" ", "-")
            found.append(pytest.param(title, text, id=name, marks=marks))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("title", "program"), programs())
def test_programs_run(title: str, program: str, tmp_path: Path) -> None:
    try:
        installed_as = INSTALLED_AS.get(title)
        python = str(frameworks.environment(installed_as) if installed_as else sys.executable)
    except frameworks.CannotInstall as problem:
        pytest.skip(str(problem))
    text = BEFORE.get(title, "") + program + AFTER.get(title, "")
    # torchrun sets these variables for a rank.
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    with socket.create_server(("127.0.0.1", 0)) as free:
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    variables = {**rank, **meeting} if "init_process_group" in text else {}
    with closing(Forker(python=python)) if installed_as else nullcontext() as forker:
        run_program(tmp_path, text, variables=variables, forker=forker)
