"""``twinpool check`` as people run it, against an engine in a process of its own."""

import json
from collections.abc import Iterator

import pytest
from tests.live.scripted_process import order, scripted_process
from tests.live.service import run

QUICK = ("--long-prompt-tokens", "150", "--duration", "40")


@pytest.fixture(scope="module")
def engine() -> Iterator[str]:
    """It reads a long prompt in 0.2 s, disturbs nobody, and says nothing of its use."""
    with scripted_process(token_interval_s=0.01, prefill_s_per_token=0.001) as url:
        order(url, {"metrics": {"vllm:num_requests_running": None}})
        yield url


@pytest.mark.timeout(160)
@pytest.mark.parametrize(
    ("options", "code", "verdict"), [((), 2, "unknown"), (("--ttft-limit", "0.05"), 1, "fail")], ids=["unknown", "fail"]
)
def test_the_exit_code_is_the_verdict(engine: str, options: tuple[str, ...], code: int, verdict: str) -> None:
    found = run("check", engine, *QUICK, *options, "--json", timeout_s=150)
    assert found.returncode == code, found.stderr
    result = json.loads(found.stdout)
    assert (result["verdict"], result["exit_code"]) == (verdict, code)
    assert result["long"]["requests"] >= 20
    assert result["interference"]["found"] == "no"
    assert "Verdict" in found.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "give the URL of one service"),
        (("a", "b", "c"), "give the URL of one service"),
        (("http://127.0.0.1:9",), "nobody answers at http://127.0.0.1:9"),
        (("ENGINE", "--metrics", "http://127.0.0.1:9"), "nobody answers at http://127.0.0.1:9"),
        (("ENGINE", "--metrics", "ENGINE"), "does not tell how busy its workers are"),
        (("ENGINE", "--model", "gpt-9"), "does not exist"),
        (("ENGINE", "ENGINE", "--metrics", "ENGINE"), "--metrics is for one service"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_two(engine: str, arguments: tuple[str, ...], says: str) -> None:
    found = run("check", *(argument.replace("ENGINE", engine) for argument in arguments))
    assert found.returncode == 2
    assert says in found.stderr
    assert found.stderr.count("\n") == 1
