# SPDX-License-Identifier: Apache-2.0
"""Extracts the Python programs from the pages in docs/."""

import re

from tree import ROOT

DOCS = ROOT / "docs"


def programs(page: str) -> list[str]:
    """Return the Python blocks of a page in their order."""
    text = (DOCS / page).read_text(encoding="utf-8")
    return re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
