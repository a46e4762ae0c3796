# SPDX-License-Identifier: Apache-2.0
"""Sphinx's configuration. MyST reads Markdown as forges do; others want a dialect of it."""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from pages import version as version_of  # noqa: E402

project = "libioshape"
version = release = version_of()
copyright = "the authors of libioshape, Apache-2.0"  # noqa: A001 - Sphinx's name for it
extensions = ["myst_parser"]
myst_heading_anchors = 6  # links to headings, as on a forge
highlight_language = "text"  # of blocks that do not say
exclude_patterns = ["examples"]

html_theme = "furo"
html_title = f"libioshape {release}"
html_favicon = str(HERE.parent / "drawings" / "icon.svg")
html_static_path = [str(HERE / "style.css"), str(HERE / "search.js")]
html_css_files = ["style.css"]
html_js_files = [("search.js", {"defer": "defer"})]  # after Sphinx's own, before the first query
html_copy_source = False
html_show_sphinx = False
