"""Chromium of this machine, and what a page did in it."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

_INK = """() => [...document.querySelectorAll("canvas")].map(canvas => {
    const bytes = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
    let ink = 0;
    for (let at = 3; at < bytes.length; at += 4) if (bytes[at]) ink += 1;
    return ink;
})"""


@contextmanager
def chromium() -> Iterator[Browser]:
    """CI has it (.ci/run), others may not. Not for a whole session: while it runs, no other event loop can in this thread."""
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None:
        assert not os.environ.get("CI"), "CI must have a browser"
        pytest.skip("no Chromium on this machine")
    with sync_playwright() as play:
        options = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
        browser = play.chromium.launch(executable_path=path, args=options)
        yield browser
        browser.close()


@dataclass
class Watched:
    """A page with all that it asked for, and all that went wrong in it."""

    page: Page
    asked: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def ink(self) -> list[int]:
        """How many pixels of each canvas are drawn."""
        return list(self.page.evaluate(_INK))


@contextmanager
def watched(browser: Browser, **options: Any) -> Iterator[Watched]:
    """A page of its own. `options` are those of a browser context."""
    context = browser.new_context(**options)
    found = Watched(context.new_page())
    found.page.on("request", lambda request: found.asked.append(request.url))
    found.page.on("pageerror", lambda error: found.errors.append(str(error)))
    found.page.on("console", lambda said: found.errors.append(said.text) if said.type in ("error", "warning") else None)
    try:
        yield found
    finally:
        context.close()
