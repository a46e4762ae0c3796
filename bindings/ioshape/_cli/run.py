# SPDX-License-Identifier: Apache-2.0
"""Command "ioshape run": runs a program whose saves and other large writes take slots."""

from __future__ import annotations

import os

import click

from ioshape._cli.output import UsageSentenceError
from ioshape._run import run as _run


@click.command(
    context_settings={"allow_interspersed_args": False},
    options_metavar="[--no-load] [--tier FOLDER] [--all-writes] [--no-preload]",
    short_help="Run a program with torch.save made durable and atomic.",
)
@click.option("-m", "is_module", is_flag=True, help="SCRIPT is the name of a Python module.")
@click.option("--no-load", is_flag=True, help="Replace only torch.save, not torch.load.")
@click.option(
    "--tier",
    metavar="FOLDER",
    type=click.Path(),
    help="Save to this fast local disk first (IOSHAPE_TIER).",
)
@click.option(
    "--all-writes",
    is_flag=True,
    help="Large writes take slots on filesystems of this host, too (IOSHAPE_PRELOAD_ALL).",
)
@click.option("--no-preload", is_flag=True, help="Only saves of torch take slots.")
@click.argument("script", metavar="{SCRIPT | PROGRAM | -m MODULE}", type=click.Path())
@click.argument("arguments", metavar="[ARGUMENTS]...", nargs=-1, type=click.UNPROCESSED)
def command(
    is_module: bool,
    no_load: bool,
    tier: str | None,
    all_writes: bool,
    no_preload: bool,
    script: str,
    arguments: tuple[str, ...],
) -> None:
    """Run a script as "python SCRIPT" does, with torch.save and torch.load replaced by ioshape's.

    The script needs no change. The replacement also applies to Python processes that it starts:
    multiprocessing, data loaders, launchers. All arguments after the script's name belong to the
    script. A script that never imports torch runs unchanged.

    PROGRAM is any other program. It and its children take a slot when they write a large file
    sequentially to a shared filesystem, and so does a script that writes files without torch. The
    library libioshape-preload.so does that.

    Examples:

    \b
    ioshape run train.py --lr 1e-3
    ioshape run --tier /local/nvme train.py  - save to a local disk first
    ioshape run -m package.train
    ioshape run rsync -a run7 /scratch/      - any other program
    torchrun --nproc-per-node 8 -m ioshape run train.py
    python -X dev -m ioshape run train.py    - pass options to Python itself
    """
    from ioshape._core import config  # noqa: PLC0415

    if tier is not None:
        os.environ[config.SETTINGS["tier"].variable] = os.path.abspath(tier)  # noqa: PTH100
    # Wrong settings are reported now. The first save would be too late.
    wrong = config.mistakes()
    if wrong:
        raise UsageSentenceError("\n".join(wrong))
    try:
        _run.run(
            script,
            arguments,
            is_module=is_module,
            load=not no_load,
            preloads=not no_preload,
            everywhere=all_writes,
        )
    except _run.CannotRun as error:
        # Exit code 2 is also Python's for a missing script.
        raise UsageSentenceError(str(error)) from None
