"""The pictures in docs/images: the page of a gateway, as Chromium draws it, after a quarter of an hour of `demos.afternoon`.

python -m demos.screenshots [--seconds 885] [--out docs/images]
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from demos.small_png import small_png
from playwright.sync_api import Browser, Page, Route
from tests.page.browser import chromium

from twinpool.page.served import assets

ROOT = Path(__file__).parents[1]
ADDRESS = "http://127.0.0.1:8001"
PICTURES: dict[str, dict[str, Any]] = {
    "page": {"viewport": {"width": 1240, "height": 900}, "color_scheme": "light"},
    "page-dark": {"viewport": {"width": 1240, "height": 900}, "color_scheme": "dark"},
    "page-phone": {"viewport": {"width": 390, "height": 1180}, "color_scheme": "light", "is_mobile": True},
}


def main() -> None:
    parser = argparse.ArgumentParser(description="The pictures of the page.")
    parser.add_argument("--seconds", type=float, default=885.0, help="of traffic before the look")
    parser.add_argument("--answers", type=Path, help="what `python -m demos.afternoon` said, in place of playing it again")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images")
    asked = parser.parse_args()
    answers = read(asked.answers.read_bytes() if asked.answers else play(asked.seconds))
    asked.out.mkdir(parents=True, exist_ok=True)
    with chromium() as browser:
        for name, options in PICTURES.items():
            take(browser, answers, asked.out / f"{name}.png", options)
            print(asked.out / f"{name}.png")


def play(seconds: float) -> bytes:
    """What the gateway's admin port said, by path. In a process of its own: its only clock is the virtual one."""
    command = [sys.executable, "-m", "demos.afternoon", str(seconds)]
    return subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout


def read(said: bytes) -> dict[str, Any]:
    answers: dict[str, Any] = json.loads(said)
    answers["admin/state"]["gateway"]["url"] = "http://127.0.0.1:8000"  # a port that was free is no picture for the docs
    return answers


def take(browser: Browser, answers: dict[str, Any], file: Path, options: dict[str, Any]) -> None:
    context = browser.new_context(**options, reduced_motion="reduce")
    page = context.new_page()
    page.route("**/*", lambda route: answer(route, answers))
    page.goto(f"{ADDRESS}/")
    page.wait_for_function("() => Number(document.documentElement.dataset.looks) >= 1")
    settled(page)
    picture = page.screenshot(full_page=options["viewport"]["width"] > 700)
    page.goto("about:blank")
    file.write_bytes(small_png(page, picture))
    context.close()


def answer(route: Route, answers: dict[str, Any]) -> None:
    """In place of the gateway."""
    path = route.request.url.removeprefix(f"{ADDRESS}/")
    if path in answers:
        route.fulfill(json=answers[path])
    else:
        asset = assets()[f"/{path}"]
        route.fulfill(body=asset.body, headers=asset.headers)


def settled(page: Page) -> None:
    """A chart is drawn in the frame after the one in which it got its size."""
    page.evaluate("() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")


if __name__ == "__main__":
    main()
