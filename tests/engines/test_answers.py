"""What an engine's answer means to the router."""

import pytest

from twinpool.core.model import Failure, Usage
from twinpool.engines.answers import failure_of_loss, failure_of_status, read_ending, retry_after_s
from twinpool.engines.events import read_closing
from twinpool.http1 import Loss, UpstreamLost


@pytest.mark.parametrize(
    ("status", "body", "failure"),
    [
        (400, b"{}", Failure.REJECTED),
        (404, b"not json", Failure.REJECTED),
        (422, b'{"error":{"code":422}}', Failure.REJECTED),
        (409, b'{"error":{"code":"handle_spent"}}', Failure.HANDLE_REFUSED),
        (410, b'{"error":{"code":"handle_expired"}}', Failure.HANDLE_REFUSED),
        (429, b"", Failure.BUSY),
        (503, b"", Failure.BUSY),
        (503, b'{"error":{"code":"handoff_failed"}}', Failure.NO_HANDLE),
        (500, b"", Failure.ERROR),
        (302, b"", Failure.ERROR),
    ],
)
def test_statuses(status: int, body: bytes, failure: Failure) -> None:
    assert failure_of_status(status, body) is failure


@pytest.mark.parametrize("loss", list(Loss))
def test_every_way_to_lose_an_engine_is_known(loss: Loss) -> None:
    assert failure_of_loss(UpstreamLost(loss, "http://e")) in Failure


def test_a_stale_connection_is_not_held_against_the_engine() -> None:
    lost = UpstreamLost(Loss.CLOSED_BEFORE_HEAD, "http://e", is_reused=True)
    assert failure_of_loss(lost) is Failure.UNREACHABLE
    assert failure_of_loss(UpstreamLost(Loss.CLOSED_BEFORE_HEAD, "http://e")) is Failure.BROKEN


@pytest.mark.parametrize(
    ("value", "seconds"), [(b"3", 3.0), (b"Wed, 21 Oct 2015 07:28:00 GMT", None), (b"-1", None), (b"9" * 5000, None)]
)
def test_retry_after_is_a_number_of_seconds(value: bytes, seconds: float | None) -> None:
    assert retry_after_s([(b"retry-after", value)]) == seconds


def test_a_failure_under_200_is_seen() -> None:
    ending = read_ending(b'{"choices":[{"finish_reason":"abort"}]}')
    assert ending is not None
    assert ending.is_failure
    assert read_ending(b"not json") is None


def test_llama_cpp_tells_what_it_counted_unasked() -> None:
    timings = b'"timings":{"cache_n":300,"prompt_n":20,"prompt_ms":1.5,"predicted_n":7}'
    last = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}],' + timings + b"}\n\n"
    is_whole, ending = read_closing(last + b"data: [DONE]\n\n")
    assert is_whole
    assert ending.counted() == Usage(320, 7, 300)
    counted = read_ending(b'{"usage":{"prompt_tokens":5,"completion_tokens":6},' + timings + b"}")
    assert counted is not None
    assert counted.counted() == Usage(5, 6), "usage says it where there is some"
    strange = read_ending(b'{"usage":{"prompt_tokens":5,"completion_tokens":6},"timings":[]}')
    assert strange is not None
    assert strange.counted() == Usage(5, 6)
    older = read_ending(b'{"timings":{"prompt_n":20,"predicted_n":7}}')
    assert older is not None
    assert older.counted() is None, "without its cache nobody knows how long the prompt was"
