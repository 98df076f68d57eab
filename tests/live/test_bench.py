"""``twinpool bench`` as people run it."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser
from tests.live.scripted_process import scripted_process
from tests.live.service import run
from tests.page.browser import chromium, watched

QUICK = ("--rate", "40", "--duration", "4", "--scale-lengths", "20")


@pytest.fixture(scope="module")
def engine() -> Iterator[str]:
    with scripted_process(token_interval_s=0.02, prefill_s_per_token=0.0005) as url:
        yield url


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found


def drawn(browser: Browser, path: Path) -> str:
    """Opens the file; returns its text. Every chart must have ink on it, and nothing may be asked of any network."""
    with watched(browser) as seen:
        seen.page.goto(path.as_uri())
        seen.page.wait_for_selector("html[data-drawn]")
        inked = seen.ink()
        assert len(inked) == int(seen.page.get_attribute("html", "data-drawn") or 0) >= 3
        assert min(inked) > 1000, inked
        assert (seen.asked, seen.errors) == ([path.as_uri()], [])
        return seen.page.inner_text("body")


def test_the_figures_as_json_and_the_page_in_a_browser(engine: str, tmp_path: Path, browser: Browser) -> None:
    found = run("bench", engine, *QUICK, "--json", str(tmp_path / "out.json"), "--html", str(tmp_path / "out.html"))
    assert found.returncode == 0, found.stderr
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["requests"] > 80
    assert result["failed"] == 0
    assert result["long"]["requests"] > 10
    assert result["generator"]["sent"] == pytest.approx(160, rel=0.4)
    assert result["traffic"]["scale_lengths"] == 20
    assert "TTFT, long" in found.stdout
    assert "divided by 20" in found.stdout
    assert "TTFT by length class" in drawn(browser, tmp_path / "out.html")


def test_json_alone_on_standard_output(engine: str) -> None:
    found = run("bench", engine, *QUICK, "--json")
    assert json.loads(found.stdout)["verdict"] == "unknown"
    assert "Verdict" in found.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("bench", "http://127.0.0.1:9", *QUICK), "nobody answers at http://127.0.0.1:9 (connection refused)"),
        (("bench", "ENGINE", *QUICK, "--model", "gpt-9"), "the model 'gpt-9' does not exist"),
        (("bench", "ENGINE", *QUICK, "--mix", "blend"), "no such mix or file: blend (mixes: mixed-60-40"),
        (("bench", "ENGINE", *QUICK, "--rate", "0"), "--rate"),
        (("bench", "ENGINE", *QUICK, "--arrivals", "flood"), "--arrivals is one of poisson, constant, burst, ramp"),
        (("bench", "ENGINE", *QUICK, "--json", "/no/such/folder/x"), "there is no folder /no/such/folder"),
        (("bench", "ENGINE", *QUICK, "--metrics", "http://127.0.0.1:9"), "nobody answers at http://127.0.0.1:9"),
        (("bench", "ENGINE", *QUICK, "--metrics", "ENGINE/v1/models"), "is no page of Prometheus metrics"),
        (("bench", "ENGINE", *QUICK, "--api-key-file", "/no/such/key"), "no such file: /no/such/key"),
    ],
)
def test_a_mistake_is_one_line(engine: str, arguments: tuple[str, ...], says: str) -> None:
    found = run(*(argument.replace("ENGINE", engine) for argument in arguments))
    assert found.returncode == 2
    assert says in found.stderr
    assert found.stderr.count("\n") == 1
    assert "Traceback" not in found.stderr


def test_a_trace_is_offered_as_it_was_recorded_or_faster(engine: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    same = {"output_length": 20, "hash_ids": [0]}
    rows = [{"timestamp": at * 100, "input_length": [600, 2000][at % 2], **same} for at in range(60)]
    trace.write_text("\n".join(map(json.dumps, rows)))
    found = run("bench", engine, "--mix", str(trace), "--rate", "30", "--scale-lengths", "10", "--json")
    assert found.returncode == 0, found.stderr
    result = json.loads(found.stdout)
    assert result["generator"]["sent"] == 60
    assert result["traffic"]["duration_s"] == pytest.approx(3.0, abs=0.1)
    assert result["long"]["prompt_tokens_mean"] == pytest.approx(200, rel=0.01)


@pytest.mark.timeout(160)
def test_five_hundred_a_second_take_a_fraction_of_one_core(engine: str) -> None:
    """By the client's own processor time, which a busy machine does not stretch as it does the clock. Whether they also went
    out in time is what the client says of itself."""
    found = run("bench", engine, "--rate", "500", "--duration", "4", "--scale-lengths", "40", "--json", timeout_s=150)
    assert found.returncode == 0, found.stderr
    generator = json.loads(found.stdout)["generator"]
    assert generator["sent"] == pytest.approx(2000, rel=0.1)
    assert generator["cpu_share"] * generator["planned_s"] < 4.0
    assert generator["kept_schedule"] == (generator["lag_p99_s"] <= 0.025)
