"""The page of the admin port in a real browser, before a real gateway with scripted engines behind it."""

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from importlib.resources import files
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect
from tests.page.browser import chromium, watched
from tests.page.fleet import Fleet, engines, gateway

HOSTILE = "<img src=x onerror=\"document.title='owned'\"></p><script>document.title='owned'</script>\u202e"
PATIENCE_MS = 20_000
LOADED = {"prefill_s_per_token": 0.0002, "token_interval_s": 0.005, "slots": 8}

POINTS = """number => Chart.getChart(document.querySelectorAll("canvas")[number])
    .data.datasets.map(line => line.data.filter(point => point.y != null).length)"""
TOO_WIDE = """() => [...document.querySelectorAll("body *")]
    .filter(node => node.getBoundingClientRect().right > 391).map(node => node.outerHTML)"""

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("page")
    with (
        engines("prefill", "prefill", "decode", models=(HOSTILE,), **LOADED) as workers,
        gateway(folder, workers, "--balance", "advise") as found,
    ):
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda words: found.ask(words), [20, 2000] * 12))
        yield found


def opened(page: Page, url: str, looks: int = 2) -> None:
    page.goto(url)
    looked(page, looks)


def looked(page: Page, looks: int = 1) -> None:
    """Wait until it has asked the gateway so often, and shown what it got."""
    page.wait_for_function(
        "looks => Number(document.documentElement.dataset.looks ?? 0) >= looks", arg=looks, timeout=PATIENCE_MS
    )


def test_it_tells_the_story_asks_nobody_else_and_nothing_goes_wrong(fleet: Fleet, browser: Browser) -> None:
    with watched(browser) as seen:
        page = seen.page
        opened(page, fleet.admin_url)
        inked = seen.ink()
        assert len(inked) == 6
        assert min(inked) > 2000, inked
        assert page.inner_text("#sentence").startswith("The service is well")
        assert page.locator("#findings li").count() == 0
        for text in ("TTFT of long prompts", "limit 1.3 s, mean of 12", "Use at the peak", "floor 85%", "Prefill", "Decode"):
            assert text in page.inner_text("main"), text
        assert page.locator('.pool[data-role="prefill"] .worker').count() == 2
        assert "reads, decode-0 writes: both have room" in page.inner_text("#decisions")
        assert page.inner_text("#balance").startswith("Balance (advise): ")
        assert page.get_attribute("canvas >> nth=0", "aria-label") == "Workers in each pool. Now: prefill 2, decode 1"
        drawn = page.evaluate(POINTS, 2)
        assert all(count >= 1 for count in drawn), "TTFT of long and of short prompts, and the limit"
        assert seen.asked
        assert all(url.startswith(f"{fleet.admin_url}/") for url in seen.asked)
        assert seen.errors == []


def test_what_others_named_is_text(fleet: Fleet, browser: Browser) -> None:
    with watched(browser) as seen:
        opened(seen.page, fleet.admin_url)
        assert "<img src=x onerror=" in seen.page.inner_text("#service")
        assert seen.page.locator("img").count() == 1, "our own icon"
        assert seen.page.locator("script").count() == 2
        assert seen.page.title() == "Twinpool"
        assert seen.errors == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_needs_no_scrolling_to_the_side(fleet: Fleet, browser: Browser, scheme: str) -> None:
    with watched(browser, viewport={"width": 390, "height": 844}, color_scheme=scheme, is_mobile=True) as seen:
        opened(seen.page, fleet.admin_url)
        assert seen.page.evaluate("document.documentElement.scrollWidth") <= 390
        wide = seen.page.evaluate(TOO_WIDE)
        assert wide == []
        ground = seen.page.evaluate("getComputedStyle(document.body).color")
        assert sum(map(int, re.findall(r"\d+", ground)[:3])) > 600 if scheme == "dark" else 150


def test_a_worker_that_changes_its_pool_is_seen_to(fleet: Fleet, browser: Browser) -> None:
    with watched(browser) as seen:
        page = seen.page
        opened(page, fleet.admin_url)
        fleet.give_role("prefill-1", "decode")
        card = page.locator('.pool[data-role="decode"] .worker', has_text="prefill-1")
        expect(card).to_be_visible(timeout=PATIENCE_MS)
        assert re.search(r"manual, moved \d+ s ago", card.inner_text())
        assert page.locator('.pool[data-role="prefill"] .worker').count() == 1
        assert "prefill-1 moved to decode, because a person asked for it" in page.inner_text("#moves")
        assert seen.errors == []
    fleet.give_role("prefill-1", "prefill")


def test_it_says_what_is_wrong_and_what_to_do(tmp_path: Path, browser: Browser) -> None:
    with watched(browser) as seen, engines("prefill") as alone, ExitStack() as other:
        page = seen.page
        ending = other.enter_context(engines("decode"))
        with gateway(tmp_path, alone + ending) as found:
            opened(page, found.admin_url)
            assert page.inner_text("#sentence").startswith("The service is well")
            other.close()
            expect(page.locator("#sentence")).to_contain_text("needs a look: decode-0 is not up", timeout=PATIENCE_MS)
            assert "What to do: " in page.inner_text("#findings")
            assert page.title() == "⚠ Twinpool"
            assert "lost" in page.locator(".worker", has_text="decode-0").inner_text()


def test_a_gateway_that_is_gone_is_told_of_and_comes_back_by_itself(tmp_path: Path, browser: Browser) -> None:
    with watched(browser) as seen, engines("colocated") as workers:
        page = seen.page
        with gateway(tmp_path, workers) as found:
            opened(page, found.admin_url)
        expect(page.locator("#sentence")).to_have_text("The gateway does not answer.", timeout=PATIENCE_MS)
        assert re.match(r"Since \d\d:\d\d:\d\d, \d+ s ago\.", page.inner_text("#since"))
        assert page.locator("#told").evaluate("node => node.classList.contains('stale')")
        before = int(page.get_attribute("html", "data-looks") or 0)
        with gateway(tmp_path, workers, "--admin-port", found.admin_url.rpartition(":")[2]):
            looked(page, before + 1)
            assert page.inner_text("#sentence").startswith("The service is well")
            assert page.inner_text("#since") == ""
            assert not page.locator("#told").evaluate("node => node.classList.contains('stale')")


def test_where_a_token_is_wanted_the_page_asks_for_it(tmp_path: Path, browser: Browser) -> None:
    token = tmp_path / "token"
    token.write_text("0123456789abcdef\n")
    with watched(browser) as seen, engines("colocated") as workers:
        page = seen.page
        with gateway(tmp_path, workers, "--admin-token-file", str(token)) as found:
            page.goto(found.admin_url)
            field = page.get_by_label("This port wants its token")
            expect(field).to_be_focused(timeout=PATIENCE_MS)
            assert not page.locator("#told").is_visible()
            page.keyboard.type("wrong")
            with page.expect_response(re.compile("/admin/state")) as answered:
                page.keyboard.press("Enter")
            assert answered.value.status == 401
            expect(field).to_be_visible()
            page.keyboard.type("no header can have \u2192")
            page.keyboard.press("Enter")
            expect(field).to_have_value("")
            page.reload()
            expect(field).to_be_focused(timeout=PATIENCE_MS)
            page.keyboard.type("0123456789abcdef")
            page.keyboard.press("Enter")
            looked(page)
            assert page.locator("#told").is_visible()
            assert not field.is_visible()
            page.reload()
            looked(page)


def test_nobody_is_asked_while_nobody_looks(fleet: Fleet, browser: Browser) -> None:
    hide = """is => {
        Object.defineProperty(document, "hidden", {value: is, configurable: true});
        document.dispatchEvent(new Event("visibilitychange"));
    }"""
    with watched(browser) as seen:
        seen.page.clock.install()
        opened(seen.page, fleet.admin_url)
        seen.page.evaluate(hide, True)
        looks, asked = int(seen.page.get_attribute("html", "data-looks") or 0), len(seen.asked)
        seen.page.clock.fast_forward(60_000)
        assert len(seen.asked) == asked
        seen.page.evaluate(hide, False)
        looked(seen.page, looks + 1)


# What can be said without a browser

STYLE = (files("twinpool.page") / "live" / "live.css").read_text()
LIGHT, DARK = (dict(re.findall(r"--([a-z]+): (#[0-9a-f]{6});", block)) for block in STYLE.split("@media (prefers-color", 1))


def luminance(color: str) -> float:
    parts = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("colors", [LIGHT, DARK], ids=["light", "dark"])
@pytest.mark.parametrize(
    "name", ["text", "muted", "good", "warn", "bad", "unknown", "prefill", "decode", "colocated", "first", "second"]
)
def test_every_colour_of_text_can_be_read_on_both_grounds(colors: dict[str, str], name: str) -> None:
    """4.5 to 1, as WCAG 2 asks for."""
    for ground in ("card", "ground"):
        light, dark = sorted((luminance(colors[name]), luminance(colors[ground])), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 4.5, ground


def test_nothing_is_ever_built_from_text() -> None:
    scripts = [file.read_text() for file in (files("twinpool.page") / "live").iterdir() if file.name.endswith(".js")]
    assert len(scripts) > 5
    for script in scripts:
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function|setAttribute\(.on", script
        )
        assert not re.search(r"https?://", script)
