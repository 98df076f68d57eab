"""A journal is replayed to the last command, and a doctored one is noticed."""

import io

import pytest
from tests.core.afternoon import busy_afternoon
from tests.core.stage import Stage, worker

from twinpool import __version__
from twinpool.assemble import Difference, Replay, replay
from twinpool.config import Routing
from twinpool.core.commands import SendPrefill, SendWhole
from twinpool.core.journal import Header, encode_header, encode_step
from twinpool.errors import UserError

RULES = Routing(max_waiting=6, queue_timeout_s=5.0)


def recorded(stage: Stage) -> bytes:
    header = encode_header(Header(version=__version__, rules=RULES))
    return header + b"".join(encode_step(event, done) for event, done in zip(stage.events, stage.commands, strict=True))


def lines(journal: bytes) -> io.BytesIO:
    return io.BytesIO(journal)


def test_every_command_of_a_journal_is_reproduced() -> None:
    stage = busy_afternoon(1, rules=RULES)  # not every seed has a worker that is unreachable
    kinds = {type(command).__name__ for commands in stage.commands for command in commands}
    assert {"SendPrefill", "SendDecode", "SendWhole", "CancelLeg", "ReleaseHandle", "FailRequest", "ProbeWorker"} <= kinds
    assert replay(lines(recorded(stage))) == Replay(events=len(stage.events))


def test_a_doctored_command_is_noticed_at_its_line() -> None:
    stage = Stage(worker("p1"), worker("p2"), worker("d1"), rules=RULES)
    stage.arrives("r1")
    stage.arrives("r2")
    journal = recorded(stage).replace(
        b'"SendPrefill","request":"r2","attempt":1,"worker":"p2"', b'"SendPrefill","request":"r2","attempt":1,"worker":"p1"'
    )
    result = replay(lines(journal))
    assert result.events == 5
    assert result.difference is not None
    assert result.difference.line == 6
    assert result.difference.expected[-1] == SendPrefill(request="r2", attempt=1, worker="p1")
    assert result.difference.got[-1] == SendPrefill(request="r2", attempt=1, worker="p2")


def test_an_event_taken_out_is_noticed_where_it_first_matters() -> None:
    stage = Stage(worker("c1"), worker("c2"), rules=RULES)
    stage.arrives("r1")
    stage.arrives("r2")
    kept = recorded(stage).splitlines(keepends=True)
    del kept[3]
    result = replay(kept)
    assert isinstance(result.difference, Difference)
    assert result.difference.line == 4
    assert result.difference.got[-1] == SendWhole(request="r2", attempt=1, worker="c1")


def test_other_rules_are_noticed() -> None:
    stage = Stage(worker("c1", slots=1), rules=RULES)
    for n in range(9):
        stage.arrives(f"r{n}")
    assert replay(lines(recorded(stage))).difference is None
    doctored = recorded(stage).replace(b'"max_waiting":6', b'"max_waiting":7')
    difference = replay(lines(doctored)).difference
    assert difference is not None
    assert difference.line == 10


def test_nothing_is_fed_after_the_first_difference() -> None:
    stage = Stage(worker("c1"), rules=RULES)
    for n in range(3):
        stage.arrives(f"r{n}")
    journal = recorded(stage).replace(b'"worker":"c1"}', b'"worker":"x"}')
    assert replay(lines(journal)).events == 2


def test_a_journal_that_a_crash_cut_short_is_replayed_as_far_as_it_goes() -> None:
    stage = Stage(worker("c1"), rules=RULES)
    stage.arrives("r")
    assert replay(lines(recorded(stage)[:-9])) == Replay(events=1, is_cut=True)


def test_a_header_alone_holds_no_events() -> None:
    assert replay(lines(encode_header(Header(version=__version__, rules=RULES)))) == Replay(events=0)


@pytest.mark.parametrize(
    ("journal", "message"),
    [
        (b"", "the journal is empty"),
        (b"hello\n", "this is not a journal"),
        (encode_header(Header(version=__version__, rules=RULES)) + b"hello\n", "line 2 of the journal is broken"),
        (encode_header(Header(version="99.0", rules=RULES)), "written by Twinpool 99.0"),
    ],
)
def test_what_cannot_be_replayed_is_said_in_one_line(journal: bytes, message: str) -> None:
    with pytest.raises(UserError, match=message) as raised:
        replay(lines(journal))
    assert "\n" not in str(raised.value)
