# SPDX-License-Identifier: Apache-2.0
"""The site that docs/site.sh builds: every page, no dead link, nothing from elsewhere."""

import json
import re
import subprocess
from pathlib import Path

import pytest
from browser import PHONE, browser, served, unavailable
from pages import ENVIRONMENT, SITE, dead_links, foreign, pages
from tree import ROOT

TIMEOUT_S = 300
NOT_PAGES = {"genindex.html", "search.html"}


@pytest.fixture(scope="module")
def site() -> Path:
    """Built as for readers: what Sphinx warns of is an error."""
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
    """Neither fonts nor scripts: a cluster may have no way out."""
    assert foreign(site) == []


def test_words_are_found(site: Path) -> None:
    """What the search of the browser reads."""
    index = json.loads(
        re.sub(r"^Search\.setIndex\(|\)$", "", (site / "searchindex.js").read_text())
    )
    # Words of titles are kept apart.
    found = [*_many(index["terms"]["lustr"]), *_many(index["titleterms"]["lustr"])]
    assert {"docs/filesystems/lustre", "docs/layouts"} <= {index["docnames"][one] for one in found}


def _many(found: "int | list[int]") -> list[int]:
    return [found] if isinstance(found, int) else found


@pytest.mark.long
@pytest.mark.skipif(bool(unavailable()), reason=unavailable())
def test_a_browser_shows_every_page_without_an_error(site: Path) -> None:
    with served(site) as address, browser() as window:
        for path in pages(site):
            name = str(path.relative_to(site))
            for dark in (False, True):
                shown = window.show(f"{address}/{name}", PHONE, dark=dark)
                assert (name, shown.troubles, shown.foreign) == (name, [], [])
                assert (name, shown.excess) == (name, 0)
        # A script of the page's own: it makes the list of what was found.
        window.show(f"{address}/search.html?q=stripe")
        window.evaluate(
            "new Promise(done => { const look = () =>"
            " document.querySelector('#search-results li a') ? done(1) :"
            " setTimeout(look, 50); look(); })"
        )
