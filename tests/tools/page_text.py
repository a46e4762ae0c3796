# SPDX-License-Identifier: Apache-2.0
"""Break the text of generated pages into lines of their width."""

import re
import textwrap

#: columns of a page
COLUMNS = 160


def fill(text: str, first: str = "", others: str = "") -> str:
    """Break a paragraph, and begin its first line and the others with these texts."""
    return textwrap.fill(
        " ".join(text.split()),
        COLUMNS,
        initial_indent=first,
        subsequent_indent=others,
        break_long_words=False,
        break_on_hyphens=False,
    )


def paragraphs(text: str) -> str:
    """Break paragraphs, and keep indented blocks as they are."""
    blocks = re.split(r"\n[ \t]*\n", text.strip("\n"))
    return "\n\n".join(one if one.startswith("    ") else fill(one) for one in blocks)
