"""Recorded traffic, in lines of the public traces: AzurePublicDataset (CC-BY) and kvcache-ai/Mooncake (Apache-2.0)."""

from collections.abc import Iterator

import pytest

from twinpool.errors import UserError
from twinpool.workload.offered import Offered
from twinpool.workload.traces import trace

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:15:51.2224670,3879,0
"""
MOONCAKE = """{"timestamp": 0, "input_length": 2758, "output_length": 500, "hash_ids": [0, 1, 2, 3, 4, 5]}
{"timestamp": 3000, "input_length": 1500, "output_length": 490, "hash_ids": [0, 14, 15]}
"""


def test_azure_s_times_count_from_the_first_request() -> None:
    first, second, third = trace(AZURE.splitlines())
    assert first == Offered(0.0, 374, 44, is_long=False)
    assert second.at_s == pytest.approx(4.314579, abs=1e-6)
    assert (third.prompt_tokens, third.output_tokens, third.is_long) == (3879, 1, True)


def test_mooncake_s_blocks_come_along() -> None:
    first, second = trace(MOONCAKE.splitlines())
    assert (first.at_s, first.is_long, first.prefix) == (0.0, True, tuple(range(6)))
    assert (second.at_s, second.is_long, second.prefix) == (3.0, False, (0, 14, 15))  # 1,500 is not over 1,500


def test_later_azure_traces_name_their_zone_and_files_may_begin_with_a_mark() -> None:
    lines = [
        "\ufeffTIMESTAMP,ContextTokens,GeneratedTokens",
        "2024-05-10 00:00:00.009930+00:00,1,2",
        "",
        "2024-05-10 00:00:01+00:00,3,4",
    ]
    assert [round(request.at_s, 4) for request in trace(lines)] == [0.0, 0.9901]


def test_times_of_several_zones_are_on_one_clock() -> None:
    head = AZURE.splitlines()[0]
    requests = trace([head, "2023-11-16 19:15:46+01:00,1,1", "2023-11-16 18:15:47+00:00,1,1"])
    assert [request.at_s for request in requests] == [0.0, 1.0]


def test_a_trace_is_read_as_it_is_used() -> None:
    read = 0

    def lines() -> Iterator[str]:
        nonlocal read
        yield "TIMESTAMP,ContextTokens,GeneratedTokens"
        while True:
            read += 1
            yield "2023-11-16 18:15:46,1,1"

    requests = trace(lines())
    for _ in range(3):
        next(requests)
    assert read == 3


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "empty"),
        ("time,in,out\n1,2,3", "first line"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "no request"),
        (AZURE + "2023-11-16 18:15:52,many,1", "line 5.*many"),
        (AZURE + "2023-11-16 18:15:52", "line 5.*1 of the columns TIMESTAMP"),
        (AZURE + "2023-11-16 18:15:52,-3,1", "line 5.*less than none"),
        (AZURE + "2023-11-16 18:15:52,1," + "9" * 400, "line 5.* 9{40} tokens are more"),
        (AZURE + "tomorrow,3,1", "line 5.*'tomorrow' is no time"),
        (AZURE + "2023-11-16 18:15:40.0,1,1", "line 5.*sort"),
        (MOONCAKE + '{"timestamp": 9}', "line 3.*input_length"),
        (MOONCAKE + '{"timestamp": 9, "input_length": -1, "output_length": 2}', "line 3.*>= 0"),
        (MOONCAKE + '{"timestamp": 9, "input_length": 1e30, "output_length": 2}', "line 3.*input_length"),
        (MOONCAKE + "{", "line 3"),
    ],
)
def test_a_broken_trace_names_its_line(text: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        list(trace(text.splitlines()))
