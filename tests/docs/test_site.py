"""`make docs` builds the whole site without a warning, and no page of it asks another server."""

from __future__ import annotations

import ast
import re
import zlib
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml

import evenstride
from tests.docs.blocks import ROOT, blocks

pytestmark = pytest.mark.timeout(400)  # the first test builds the site
CONFIG = yaml.safe_load((ROOT / "mkdocs.yml").read_text())


def pages_in(nav: object) -> list[str]:
    """Return the pages that a part of the navigation names."""
    if isinstance(nav, str):
        return [nav]
    assert isinstance(nav, dict | list)
    inside = nav.values() if isinstance(nav, dict) else nav
    return [page for part in inside for page in pages_in(part)]


def test_every_page_is_in_the_navigation_once() -> None:
    named = pages_in(CONFIG["nav"])
    docs = ROOT / "docs"
    written = {str(path.relative_to(docs)) for path in docs.rglob("*.md")}

    assert len(named) == len(set(named))
    assert written <= set(named)
    assert set(named) - written == {
        "ARCHITECTURE.md",
        "CHANGELOG.md",
        "CONTRIBUTING.md",
        "SECURITY.md",
        "CODE_OF_CONDUCT.md",
        "examples/README.md",
    }


PUBLIC = (
    "evenstride.testing",
    "evenstride.testing.faults",
    "evenstride.integrations.accelerate",
    "evenstride.integrations.lightning",
    "evenstride.integrations.ray",
    "evenstride.integrations.tensorflow",
    "evenstride.integrations.streaming_data",
    "evenstride.integrations.torchft",
    "evenstride.integrations.transformers",
    "evenstride.core",
    "evenstride.core.allocation",
    "evenstride.core.convergence",
    "evenstride.core.reliability",
    "evenstride.core.sync_modes",
    "evenstride.core.time_model",
    "evenstride.trace",
    "evenstride.planner.catalogue",
)


def documented() -> set[str]:
    """Return what the page of public names shows, by its full name."""
    page = (ROOT / "docs" / "reference" / "api.md").read_text()
    return set(re.findall(r"^::: ([\w.]+)$", page, re.MULTILINE))


def exported(package: str) -> list[str]:
    """Return the ``__all__`` of a package, which is not imported for it."""
    path = ROOT / "src" / Path(*package.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    (names,) = (
        node.value
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    )
    found: list[str] = ast.literal_eval(names)
    return found


def test_the_reference_has_every_public_name_and_no_other() -> None:
    names = {f"evenstride.{name}" for name in evenstride.__all__ if not name.startswith("__")}
    names |= {f"{package}.{name}" for package in PUBLIC for name in exported(package)}
    errors = {f"evenstride.{name}" for name in vars(evenstride.errors)}

    assert documented() == (names - errors) | {"evenstride.errors"}


def test_what_pages_import_is_in_the_reference() -> None:
    known = documented()
    asked = {
        f"{module}.{name}"
        for block in blocks("python")
        for module, names in re.findall(r"from (evenstride\.[\w.]+) import ([\w, ]+)", block.text)
        for name in names.split(", ")
    }

    missing = {name for name in asked if not {name, name.rpartition(".")[0]} & known}
    assert not missing, f"add to docs/reference/api.md: {missing}"


class _Asked(HTMLParser):
    """What a page loads by itself, and its links."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        if "id" in given:
            self.anchors.add(given["id"])
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        if tag in ("script", "img", "iframe", "source") and "src" in given:
            self.loads.append(given["src"])
        if tag == "link" and given.get("rel") not in ("canonical", "next", "prev", "alternate"):
            self.loads.append(given.get("href", ""))


def test_no_page_loads_anything_from_elsewhere(site: Path) -> None:
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 35

    outside = {
        f"{page.relative_to(site)}: {load}"
        for page in pages
        for load in _Asked(page.read_text()).loads
        if re.match(r"(https?:)?//", load)
    }
    assert not outside
    for sheet in site.rglob("*.css"):
        assert not re.search(r"(url\(|@import )[\"']?(https?:)?//", sheet.read_text()), sheet


def test_every_link_of_the_site_leads_to_a_page_and_a_place_on_it(site: Path) -> None:
    read = {page: _Asked(page.read_text()) for page in site.rglob("*.html")}
    broken = []
    for page, asked in read.items():
        for link in asked.links:
            if re.match(r"(https?:|mailto:|//)", link) or page.name == "404.html":
                continue
            path, _, anchor = link.partition("#")
            there = (page.parent / path).resolve() if path else page
            there = there / "index.html" if there.is_dir() else there
            if not there.is_file() or (anchor and anchor not in read[there].anchors):
                broken.append(f"{page.relative_to(site)}: {link}")

    assert not broken


def test_the_site_has_a_place_for_every_public_name(site: Path) -> None:
    packed = (site / "objects.inv").read_bytes().split(b"\n", 4)[4]
    names = {line.split()[0] for line in zlib.decompress(packed).decode().splitlines()}

    modules = {
        name
        for name in documented()
        if (ROOT / "src" / name.replace(".", "/")).with_suffix(".py").exists()
    }
    assert documented() - modules <= names
    assert {
        "evenstride.Stride.scale",
        "evenstride.core.reliability.checkpoint_interval.Saving",
    } <= names
    assert "evenstride.errors.WorkerLost" in names
