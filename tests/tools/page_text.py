# SPDX-License-Identifier: Apache-2.0
"""Break the text of generated pages into lines of their width."""

import re
import textwrap

#: columns of a page, and of its code, which the site shows without a scroll bar
PAGE_COLUMNS = 160
CODE_COLUMNS = 100


def fill(text: str, first: str = "", others: str = "", columns: int = PAGE_COLUMNS) -> str:
    """Break a paragraph, and begin its first line and the others with these texts."""
    return textwrap.fill(
        " ".join(text.split()),
        columns,
        initial_indent=first,
        subsequent_indent=others,
        break_long_words=False,
        break_on_hyphens=False,
    )


def paragraphs(text: str) -> str:
    """Break paragraphs, and keep indented blocks as they are."""
    blocks = re.split(r"\n[ \t]*\n", text.strip("\n"))
    return "\n\n".join(one if one.startswith("    ") else fill(one) for one in blocks)
