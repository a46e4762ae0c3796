# SPDX-License-Identifier: Apache-2.0
"""Checks the pages of the site that docs/site.sh builds: their links, and what they load."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

from tree import ROOT

SITE = ROOT / "build" / "site"
ENVIRONMENT = ROOT / "build" / "site-env" / "complete"

#: attributes whose targets a browser fetches without a click
_LOADED = {
    ("img", "src"),
    ("script", "src"),
    ("link", "href"),
    ("source", "src"),
    ("iframe", "src"),
}


@dataclass
class Page:
    """The references of an HTML page."""

    anchors: set[str] = field(default_factory=set)
    #: targets of links
    links: list[str] = field(default_factory=list)
    #: files that are fetched with the page
    loaded: list[str] = field(default_factory=list)


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.page = Page()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.page.anchors |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.page.links.append(given["href"])
        for name, value in given.items():
            # A canonical address and a rel="next" are not fetched.
            if (tag, name) in _LOADED and given.get("rel") in (None, "stylesheet", "icon"):
                self.page.loaded.append(value)


@cache
def page_of(path: Path) -> Page:
    """Return the references of a file."""
    reader = _Reader()
    reader.feed(path.read_text(encoding="utf-8"))
    return reader.page


def has(path: Path, fragment: str) -> bool:
    """Return whether a page has an anchor."""
    return unquote(fragment) in page_of(path).anchors


def pages(site: Path = SITE) -> list[Path]:
    """Return all pages for readers, without the theme's own files."""
    return sorted(path for path in site.rglob("*.html") if "_static" not in path.parts)


def dead_links(site: Path = SITE) -> list[str]:
    """Return error messages about links and loaded files that do not exist within the site."""
    found = []
    for path in pages(site):
        page = page_of(path)
        for link in [*page.links, *page.loaded]:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            place = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            place = place / "index.html" if place.is_dir() else place
            where = f"{path.relative_to(site)}: {link}"
            if not place.is_file():
                found.append(f"{where}: there is no {place.name}")
            elif place.suffix == ".html" and parts.fragment and not has(place, parts.fragment):
                found.append(f"{where}: there is no such anchor")
    return found


def foreign(site: Path = SITE) -> list[str]:
    """Return error messages about files that pages load from other sites."""
    return [
        f"{path.relative_to(site)}: {link}"
        for path in pages(site)
        for link in page_of(path).loaded
        if urlsplit(link).netloc
    ]
