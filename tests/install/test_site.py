# SPDX-License-Identifier: Apache-2.0
"""Test the site that docs/site.sh builds: pages exist, links work, nothing is loaded remotely."""

import json
import re
import subprocess
from pathlib import Path

import pytest
from pages import ENVIRONMENT, SITE, dead_links, foreign, pages
from tree import ROOT

TIMEOUT_S = 1800
NOT_PAGES = {"genindex.html", "search.html"}


@pytest.fixture(scope="module")
def site() -> Path:
    """Build the site as for readers. Warnings of Sphinx are errors."""
    if not ENVIRONMENT.exists():
        pytest.skip("there is no build/site-env; docs/site.sh --environment makes it")
    done = subprocess.run(
        [ROOT / "docs" / "site.sh"], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert done.returncode == 0, done.stderr
    return SITE


def test_every_page_is_there(site: Path) -> None:
    made = {str(path.relative_to(site)) for path in pages(site)} - NOT_PAGES
    sources = {
        str(path.relative_to(ROOT).with_suffix(".html")) for path in (ROOT / "docs").rglob("*.md")
    }
    more = {"index.html", "CONTRIBUTING.html", "CHANGELOG.html", "docs/c-reference.html"}
    assert made == sources | more
    assert len(made) >= 30


def test_no_link_leads_nowhere(site: Path) -> None:
    assert dead_links(site) == []


def test_nothing_comes_from_elsewhere(site: Path) -> None:
    """Check that no fonts or scripts are remote, because a cluster may have no internet access."""
    assert foreign(site) == []


def test_links_read_as_titles(site: Path) -> None:
    """Check that links show titles, because file names mean little to readers of the site."""
    link = re.compile(r'<a class="reference internal"[^>]*>(?:<[^>]+>)*([^<]+)')
    texts = [text for path in pages(site) for text in link.findall(path.read_text("utf-8"))]
    assert "Checkpoints of many ranks" in texts
    assert [text for text in texts if re.fullmatch(r"[\w./-]+\.md", text)] == []


def test_words_are_found(site: Path) -> None:
    """Check the index that the browser's search reads."""
    index = json.loads(
        re.sub(r"^Search\.setIndex\(|\)$", "", (site / "searchindex.js").read_text())
    )
    # Words of titles have an index of their own.
    found = [*_many(index["terms"]["lustr"]), *_many(index["titleterms"]["lustr"])]
    assert {"docs/filesystems", "docs/slots"} <= {index["docnames"][one] for one in found}


def _many(found: "int | list[int]") -> list[int]:
    return [found] if isinstance(found, int) else found
