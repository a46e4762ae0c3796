# SPDX-License-Identifier: Apache-2.0
"""Command "ioshape settings": prints all settings with their values and origins."""

from __future__ import annotations

import click

from ioshape._cli.output import Table, UsageSentenceError, columns, json_option, say_json


@click.command(short_help="Show the settings and their origins.")
@json_option
def command(as_json: bool) -> None:
    """Show the settings that a program would have if it started here and now.

    Each value is the default, or comes from its environment variable. An invalid variable is an
    error, and so is a variable with the prefix IOSHAPE_ that is no setting.

    A program can also set them by ioshape.configure(), which takes the names in lowercase without
    IOSHAPE_. Variables override configure(). Keyword arguments of a call override both.

    \b
    IOSHAPE_ENGINE=threads ioshape settings
    """
    from ioshape._core import config  # noqa: PLC0415

    wrong = config.mistakes()
    if wrong:
        raise UsageSentenceError("\n".join(wrong))
    current = config.settings()
    if as_json:
        say_json(
            {
                name: {
                    "value": value,
                    "from": source,
                    "variable": config.SETTINGS[name].variable,
                    "default": config.SETTINGS[name].default.replace("`", ""),
                    "values": config.SETTINGS[name].values.replace("`", ""),
                    "about": config.SETTINGS[name].about.replace("`", ""),
                    "user": config.SETTINGS[name].user.replace("`", ""),
                }
                for name, (value, source) in current.items()
            }
        )
        return
    table = Table(*columns("<variable", "<value", "<from", "<about"))
    for name, (value, source) in current.items():
        setting = config.SETTINGS[name]
        default = setting.default.replace("`", "")
        shown = {None: default, True: "yes", False: "no"}.get(value, str(value))
        origin = "variable" if source == setting.variable else source
        table.add(setting.variable, shown, origin, setting.about.replace("`", ""))
    table.show()
