# SPDX-License-Identifier: Apache-2.0
"""ioshape run."""

from __future__ import annotations

import os

import click

from ioshape._cli.output import UsageSentenceError
from ioshape._run import run as _run


@click.command(
    context_settings={"allow_interspersed_args": False},
    options_metavar="[--no-load] [--tier FOLDER]",
    short_help="Run a script with torch.save made durable and atomic.",
)
@click.option("-m", "is_module", is_flag=True, help="SCRIPT is the name of a module.")
@click.option("--no-load", is_flag=True, help="Replace torch.save only; torch.load stays torch's.")
@click.option(
    "--tier", metavar="FOLDER", type=click.Path(), help="Save to a fast disk first: IOSHAPE_TIER."
)
@click.argument("script", metavar="{SCRIPT | -m MODULE}", type=click.Path())
@click.argument("arguments", metavar="[ARGUMENTS]...", nargs=-1, type=click.UNPROCESSED)
def command(
    is_module: bool, no_load: bool, tier: str | None, script: str, arguments: tuple[str, ...]
) -> None:
    """Runs a script as "python SCRIPT" does, with torch.save and torch.load replaced by ioshape's.

    The script need not know. Python programs that it starts are treated alike: processes of
    multiprocessing, data loaders, launchers. Everything behind the script's name belongs to the
    script. A script that never imports torch runs as ever.

    \b
    ioshape run train.py --lr 1e-3
    ioshape run --tier /local/nvme train.py
    ioshape run -m package.train --lr 1e-3
    torchrun --nproc-per-node 8 -m ioshape run train.py --lr 1e-3
    python -X dev -m ioshape run train.py         options for Python itself
    """
    from ioshape._core import config  # noqa: PLC0415

    if tier is not None:
        os.environ[config.SETTINGS["tier"].variable] = os.path.abspath(tier)  # noqa: PTH100
    # Now, and not at the first save, hours from here.
    wrong = config.mistakes()
    if wrong:
        raise UsageSentenceError("\n".join(wrong))
    try:
        _run.run(script, arguments, is_module=is_module, load=not no_load)
    except _run.CannotRun as error:
        raise UsageSentenceError(str(error)) from None  # as Python's own code for a missing script
