"""The page in a real browser: nothing leaves it, nothing fails, and keys do what they should."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.report_runs import Made, make

from evenstride.report.page.html_page import page_of
from evenstride.report.page.page_runs import read_run
from tests.browser import Browser, NoBrowser
from tests.unit.report.page.hostile import MARKER, hostile_trace

CHART = "document.getElementById('run0-times')"
BOX = f"{CHART}.querySelector('svg.x').getAttribute('viewBox')"
PAPER = "getComputedStyle(document.body).backgroundColor"
WIDER = "document.documentElement.scrollWidth - innerWidth"


@pytest.fixture
def page(tmp_path: Path) -> str:
    """A page of a hostile run and of a plain one."""
    hostile = read_run(hostile_trace(tmp_path / "a" / "trace.jsonl"), "a")
    plain = read_run(make(Made(80), tmp_path / "b" / "trace.jsonl"), "b")
    path = tmp_path / "report.html"
    path.write_text(page_of([hostile, plain]), encoding="utf-8")
    return path.as_uri()


def test_the_page_in_a_browser(page: str, tmp_path: Path) -> None:
    try:
        browser = Browser(tmp_path / "profile")
    except NoBrowser as reason:
        pytest.skip(str(reason))
    with browser:
        for width, scheme in ((1280, "light"), (400, "dark")):
            browser.resize(width, 900)
            browser.prefer(scheme)
            browser.open(page)
            assert browser.run(WIDER) <= 0, f"at {width} pixels the page is wider than the screen"
            assert browser.run(PAPER) == {"light": "rgb(255, 255, 255)"}.get(
                scheme, "rgb(20, 24, 29)"
            )
            asked = [one["request"]["url"] for one in browser.of_kind("Network.requestWillBeSent")]
            assert {url for url in asked if not url.startswith("data:,")} == {page}
        _keys(browser)
        assert browser.run(f"window.{MARKER}") is None
        failed = browser.of_kind("Runtime.exceptionThrown", "Runtime.consoleAPICalled")
        assert failed + browser.of_kind("Log.entryAdded") == []


def _keys(browser: Browser) -> None:
    """Reach the page by keyboard alone."""
    browser.press("Tab")
    assert browser.run("document.activeElement.className") == "skip"
    browser.run(f"{CHART}.focus()")
    browser.press("ArrowRight")
    text = browser.run(f"{CHART}.querySelector('output').textContent")
    assert text.startswith("step ") and "busy" in text
    whole = browser.run(BOX)
    browser.press("+")
    assert browser.run(BOX) != whole
    browser.press("Escape")
    assert browser.run(BOX) == whole
    browser.run("document.querySelector('.tools input').click()")
    assert browser.run("getComputedStyle(document.querySelector('#run0 .lane')).display") == "none"
