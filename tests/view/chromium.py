"""A real browser without a screen: Debian's Chromium, driven by playwright.  Pages must open without an error."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest


@contextmanager
def chromium() -> Iterator[Any]:
    """The browser, until the context ends."""
    path = shutil.which("chromium")
    if path is None:
        pytest.skip("there is no chromium: apt-get install chromium")
    playwright = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path)
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def opened(browser: Any, where: Path | str, **settings: Any) -> Iterator[Any]:
    """A page, which has fetched nothing, and in the end has had no error."""
    page = browser.new_page(**settings)
    complaints: list[str] = []
    fetched: list[str] = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on(
        "console", lambda message: complaints.append(message.text) if message.type in ("error", "warning") else None
    )
    page.on("request", lambda request: fetched.append(request.url))
    address = where if isinstance(where, str) else where.absolute().as_uri()
    page.goto(address)
    page.wait_for_selector("html[data-ready=yes]", timeout=60_000)
    try:
        yield page
        assert complaints == []
        assert [url for url in fetched if not url.startswith((address, "data:", "blob:"))] == []
        assert page.evaluate("window.broken") is None, "a name became code"
        assert [title for title in _titles(page) if "Share" in title] == [], "a button would send data away"
    finally:
        page.close()


def _titles(page: Any) -> list[str]:
    """The titles of the buttons that charts have."""
    return page.eval_on_selector_all(".modebar-btn", "buttons => buttons.map((each) => each.dataset.title ?? '')")


def texts(page: Any, selector: str) -> list[str]:
    """The texts of all elements that a selector finds."""
    return [text.strip() for text in page.locator(selector).all_text_contents()]
