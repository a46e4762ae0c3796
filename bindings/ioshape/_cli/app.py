# SPDX-License-Identifier: Apache-2.0
"""Main program of the command line: runs commands, turns errors into messages and exit codes."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from importlib import import_module
from typing import NoReturn

import click

from ioshape._cli.output import explain
from ioshape._core.text import harmless

# Each name is a module of this package that has a click command named "command".
COMMANDS = (
    "run",
    "inspect",
    "verify",
    "diff",
    "ls",
    "extract",
    "prune",
    "upload",
    "download",
    "drain",
    "doctor",
    "bench",
    "trace",
    "slots",
    "top",
    "exporter",
    "settings",
)

_COMPLETE_VARIABLE = "_IOSHAPE_COMPLETE"

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141  # the status that shells report for a program ended by SIGPIPE


class _Commands(click.Group):
    """A click group that imports the module of a command only when the command is needed."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = import_module(f"ioshape._cli.{cmd_name}").command
        return command


def _print_version(context: click.Context, _option: click.Parameter, wanted: bool) -> None:
    if wanted:
        import ioshape  # noqa: PLC0415

        click.echo(f"ioshape {ioshape.__version__}")
        context.exit()


@click.command(
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"]},
    invoke_without_command=True,
)
@click.option(
    "--version",
    is_flag=True,
    expose_value=False,
    is_eager=True,
    callback=_print_version,
    help="Show the version and exit.",
)
@click.option("--debug", is_flag=True, help="Show the Python traceback of an error.")
@click.pass_context
def commands(context: click.Context, debug: bool) -> None:
    """Durable, atomic, verified checkpoints for PyTorch: torch.save at the speed of the disk.

    Examples:

    \b
    ioshape run train.py --lr 1e-3   - replace torch.save in train.py
    ioshape verify checkpoints/*.pt  - check every checksum of these files
    ioshape inspect model.pt         - list the tensors and their offsets
    ioshape ls checkpoints           - list the checkpoints in a directory
    ioshape doctor /scratch          - diagnose this machine and a path
    ioshape bench /scratch           - measure torch.save and ioshape here
    ioshape top                      - show which jobs write and which wait

    "ioshape COMMAND --help" explains a command.
    """
    context.obj = debug
    if context.invoked_subcommand is None:
        click.echo(context.get_help(), err=True)
        context.exit(EXIT_USAGE)


def _leave(code: int) -> NoReturn:
    try:
        sys.stdout.flush()
    except OSError:
        # Python flushes again at exit, and would print an error. /dev/null accepts the rest.
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, 1)
    sys.exit(code)


def _fail(sentence: str, code: int) -> NoReturn:
    with contextlib.suppress(OSError):  # stderr may be closed
        click.echo(f"ioshape: {harmless(sentence)}", err=True)
    _leave(code)


def _show(error: Exception) -> None:
    """Print the traceback of an error, with secrets removed: other packages may quote them."""
    with contextlib.suppress(OSError):
        for line in "".join(traceback.format_exception(error)).splitlines():
            click.echo(harmless(line), err=True)


def _explain(error: Exception) -> str:
    if isinstance(error, OSError):
        return explain(error)
    if isinstance(error, ValueError):
        return str(error)
    return (
        f"internal error: {type(error).__name__}: {error}; please report it "
        'with the output of "ioshape --debug"'
    )


def _call() -> int:
    """Parse sys.argv and run the command. Return its exit code.

    This replaces click's own main(), which would handle Ctrl-C and closed pipes in another way.
    """
    instruction = os.environ.get(_COMPLETE_VARIABLE)
    if instruction:
        from click.shell_completion import shell_complete  # noqa: PLC0415 - for shells only

        return shell_complete(commands, {}, "ioshape", _COMPLETE_VARIABLE, instruction)
    try:
        with commands.make_context("ioshape", sys.argv[1:]) as context:
            code = commands.invoke(context)
    except click.exceptions.Exit as exit_:  # --help
        code = exit_.exit_code
    sys.stdout.flush()
    return code if isinstance(code, int) else 0


def run() -> NoReturn:
    """Run the command in sys.argv, and end the process with its exit code."""
    for stream in (sys.stdout, sys.stderr):
        # File names and tensor names need not be valid in the terminal's encoding.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    try:
        code = _call()
    except click.UsageError as error:
        path = error.ctx.command_path if error.ctx else "ioshape"
        _fail(f'{error.format_message().rstrip(".")} (see "{path} --help")', EXIT_USAGE)
    except click.ClickException as error:
        _fail(error.format_message(), error.exit_code)
    except (KeyboardInterrupt, click.Abort):
        _leave(EXIT_INTERRUPTED)
    except Exception as error:
        if sys.argv[1:2] == ["--debug"]:
            _show(error)
            _leave(EXIT_FAILED)
        if isinstance(error, BrokenPipeError) and not error.filename:
            _leave(EXIT_BROKEN_PIPE)
        _fail(_explain(error), EXIT_FAILED)
    sys.exit(code)
