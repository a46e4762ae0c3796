# SPDX-License-Identifier: Apache-2.0
"""Makes docs/cli-reference.md from the help of each command.

tests/tools/reference.py writes it.
"""

import inspect
from collections.abc import Iterator
from pathlib import Path

import click
from ioshape._cli.app import commands
from page_text import fill

PAGE = Path(__file__).resolve().parents[2] / "docs" / "cli-reference.md"

HEAD = """# The command `ioshape`: reference

What `ioshape COMMAND --help` says, written by `tests/tools/reference.py --write`.
[cli.md](cli.md) explains more: how `ioshape run` works, what columns and JSON fields mean.
"""


def all_commands() -> Iterator[tuple[str, click.Command]]:
    """Yield all commands with their full names, in the order of the help."""
    context = click.Context(commands, info_name="ioshape")
    for name in commands.list_commands(context):
        command = commands.get_command(context, name)
        assert command is not None
        yield f"ioshape {name}", command
        if isinstance(command, click.Group):
            for other, subcommand in command.commands.items():
                yield f"ioshape {name} {other}", subcommand


def prose(text: str) -> str:
    """Return the paragraphs of a help text as Markdown.

    Those that click does not wrap become code, which needs no title.
    """
    out = []
    for paragraph in inspect.cleandoc(text).split("\n\n"):
        if paragraph.startswith("\b\n"):
            lines = paragraph.removeprefix("\b\n").splitlines()
            out.append("\n".join(f"    {line}" for line in lines))
        elif paragraph != "Examples:":
            out.append(fill(paragraph.replace("|", "\\|")))
    return "\n\n".join(out)


def option_item(option: click.Option) -> str:
    names = ", ".join(f"`{name}`" for name in [*option.opts, *option.secondary_opts])
    metavar = "" if option.is_flag else f" {option.metavar or option.type.name.upper()}"
    default = f" Default: `{option.default}`." if option.show_default else ""
    return fill(f"{names}{metavar}: {option.help or ''}{default}", "- ", "  ")


def section(name: str, command: click.Command) -> str:
    context = click.Context(command, info_name=name)
    usage = " ".join([name, *command.collect_usage_pieces(context)])
    parts = [f"## {name}\n    {usage}", prose(command.help or "")]
    options = [one for one in command.params if isinstance(one, click.Option)]
    if options:
        parts.append("\n".join(map(option_item, options)))
    return "\n\n".join(parts)


def page() -> str:
    """Return the whole page."""
    return "\n\n".join([HEAD.strip(), *(section(*one) for one in all_commands())]) + "\n"
