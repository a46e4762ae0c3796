# SPDX-License-Identifier: Apache-2.0
"""Test the site that docs/site.sh builds: pages exist, links work, nothing is loaded remotely."""

import json
import re
import subprocess
from pathlib import Path

import pytest
from browser import PHONE, browser, served, unavailable
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
    assert "Groups: ranks save together" in texts
    assert [text for text in texts if re.fullmatch(r"[\w./-]+\.md", text)] == []


def test_words_are_found(site: Path) -> None:
    """Check the index that the browser's search reads."""
    index = json.loads(
        re.sub(r"^Search\.setIndex\(|\)$", "", (site / "searchindex.js").read_text())
    )
    # Words of titles have an index of their own.
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


@pytest.mark.long
@pytest.mark.skipif(bool(unavailable()), reason=unavailable())
def test_the_search_finds_sections(site: Path) -> None:
    with served(site) as address, browser() as window:
        window.show(f"{address}/search.html?q=full+disk")
        # A script of the page fills the list of results.
        window.evaluate(
            "new Promise(done => { const look = () =>"
            " document.querySelector('#search-results .search-summary')?.innerText ? done(1) :"
            " setTimeout(look, 50); look(); })"
        )
        first = window.evaluate("document.querySelector('#search-results li a').textContent")
        assert first == "The Python package > When the disk is full"


@pytest.mark.long
@pytest.mark.skipif(bool(unavailable()), reason=unavailable())
def test_a_desktop_shows_code_and_names_whole(site: Path) -> None:
    with served(site) as address, browser() as window:
        for name in ("index.html", "docs/start.html"):
            window.show(f"{address}/{name}")
            cut = window.evaluate(
                "[...document.querySelectorAll('article pre')]"
                ".filter(one => one.scrollWidth > one.clientWidth).map(one => one.textContent)"
            )
            assert (name, cut) == (name, [])
        window.show(f"{address}/docs/performance.html")
        names = "[...document.querySelectorAll('article td:first-child code')]"
        assert window.evaluate(f"{names}.length") > 50
        broken = window.evaluate(
            f"{names}.filter(one => /^\\w+$/.test(one.textContent))"
            ".filter(one => one.getClientRects().length > 1).map(one => one.textContent)"
        )
        assert broken == []
