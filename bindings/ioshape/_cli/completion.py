# SPDX-License-Identifier: Apache-2.0
"""Command "ioshape completion": prints the completion script of a shell."""

from __future__ import annotations

import click

_INSTALL = {
    "bash": 'To install it, add to ~/.bashrc:  eval "$(ioshape completion bash)"',
    "zsh": 'To install it, add to ~/.zshrc, below compinit:  eval "$(ioshape completion zsh)"',
    "fish": "To install it, run once:  "
    "ioshape completion fish > ~/.config/fish/completions/ioshape.fish",
}


@click.command(short_help="Print the completion script of a shell.")
@click.argument("shell", type=click.Choice(list(_INSTALL)))
def command(shell: str) -> None:
    """Print the script that makes your shell complete commands, options and file names.

    To install it:

    \b
    bash, in ~/.bashrc:
      eval "$(ioshape completion bash)"
    zsh, in ~/.zshrc, below compinit:
      eval "$(ioshape completion zsh)"
    fish, once:
      ioshape completion fish > ~/.config/fish/completions/ioshape.fish
    """
    from click.shell_completion import get_completion_class  # noqa: PLC0415

    from ioshape._cli.app import COMPLETE_VARIABLE, commands  # noqa: PLC0415

    completion = get_completion_class(shell)
    assert completion is not None
    script = completion(commands, {}, "ioshape", COMPLETE_VARIABLE)
    # Not source(): for bash, that starts a bash to find its version.
    text = script.source_template % script.source_vars()
    # The hint comes last, because zsh interprets the first line.
    click.echo(f"{text.strip()}\n\n# {_INSTALL[shell]}")
