"""The site in a browser: nothing complains, nothing leaves the machine, it fits a narrow screen."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.browser import Browser, NoBrowser

pytestmark = pytest.mark.timeout(400)  # the first test builds the site
PAGES = ["", "tutorials/two-unequal-gpus/", "explanation/method/", "reference/api/", "start/faq/"]


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    """Where the site is served, on loopback only."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(site)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    try:
        with Browser(tmp_path_factory.mktemp("profile")) as one:
            yield one
    except NoBrowser as reason:
        pytest.skip(str(reason))


@pytest.mark.parametrize("page", PAGES)
def test_a_page_opens_without_complaint_and_asks_nobody_else(
    page: str, address: str, browser: Browser
) -> None:
    browser.resize(1200, 900)
    browser.open(address + page)

    asked = [
        one["request"]["url"]
        for one in browser.of_kind("Network.requestWillBeSent")
        if not one["request"]["url"].startswith((address, "data:", "blob:"))
    ]
    logged = [one["entry"]["text"] for one in browser.of_kind("Log.entryAdded")]
    assert not asked
    assert not logged
    assert not browser.of_kind("Runtime.exceptionThrown")
    assert browser.run("document.querySelectorAll('article h1').length") == 1


@pytest.mark.parametrize("page", PAGES)
def test_it_fits_a_narrow_screen(page: str, address: str, browser: Browser) -> None:
    browser.resize(360, 740)
    browser.open(address + page)

    assert browser.run("document.documentElement.scrollWidth") <= 360


def test_a_reader_without_a_mouse_gets_past_the_navigation(address: str, browser: Browser) -> None:
    browser.resize(1200, 900)
    browser.open(address + "tutorials/two-unequal-gpus/")

    browser.press("Tab")

    assert browser.run("document.activeElement.getAttribute('href')").startswith("#")


def test_the_picture_is_shown_and_described(address: str, browser: Browser) -> None:
    browser.open(address)

    drawn = "document.querySelector('article img')"
    assert browser.run(f"{drawn}.complete && {drawn}.naturalWidth") > 0
    assert "four steps" in browser.run(f"{drawn}.alt")
