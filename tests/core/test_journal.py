"""The journal's lines: what goes in comes out, and what is no journal is said to be none."""

from typing import get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.core.anything import anything
from tests.core.stage import Stage, worker

from twinpool import __version__
from twinpool.config import Routing
from twinpool.core.commands import Command, SendPrefill
from twinpool.core.events import Event, RequestArrived, TimePassed
from twinpool.core.journal import Cut, Header, Step, decode_header, decode_steps, encode_header, encode_step
from twinpool.errors import UserError

GOOD = encode_step(TimePassed(at=1.5), [])


@pytest.mark.parametrize("kind", [*get_args(Event), *get_args(Command)], ids=lambda kind: kind.__name__)
def test_every_event_and_command_goes_through_json_and_back(kind: type) -> None:
    union = Event if kind in get_args(Event) else Command

    @settings(deadline=None)
    @given(anything(kind))
    def goes_through(record: object) -> None:
        back = msgspec.json.decode(msgspec.json.encode(record), type=union)
        assert back == record
        assert type(back) is kind

    goes_through()


@settings(deadline=None)
@given(anything(Event), st.lists(anything(Command), max_size=4))
def test_a_step_is_one_line_and_comes_back_equal(event: Event, commands: list[Command]) -> None:
    line = encode_step(event, commands)
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    assert list(decode_steps([line])) == [(2, Step(event, tuple(commands)))]


@settings(deadline=None)
@given(anything(Routing))
def test_the_header_carries_the_rules(rules: Routing) -> None:
    line = encode_header(Header(version=__version__, rules=rules))
    assert line.count(b"\n") == 1
    assert decode_header(line) == Header(version=__version__, rules=rules)


def test_a_line_reads_as_people_would_write_it() -> None:
    line = encode_step(TimePassed(at=1.5), [SendPrefill(request="r", attempt=1, worker="p1")])
    assert line == (
        b'{"event":{"type":"TimePassed","at":1.5},'
        b'"commands":[{"type":"SendPrefill","request":"r","attempt":1,"worker":"p1"}]}\n'
    )


def test_a_journal_has_no_word_of_a_prompt() -> None:
    stage = Stage(worker("c1"))
    stage.arrives("r")
    assert isinstance(stage.events[-1], RequestArrived)
    facts = msgspec.to_builtins(stage.events[-1].facts)
    text = {name for name, value in facts.items() if isinstance(value, str)}
    assert text == {"model", "endpoint"}


@pytest.mark.parametrize("version", ["0.0.1", "9.9.9"])
def test_a_journal_of_another_version_says_which_twinpool_can_replay_it(version: str) -> None:
    newer = b'{"version":"%s","rules":{"unheard_of":1},"more":true}\n' % version.encode()
    with pytest.raises(UserError, match=f"written by Twinpool {version}, this is {__version__}: replay it with {version}"):
        decode_header(newer)


@pytest.mark.parametrize(
    "line",
    [b"", b"\n", b"{", b"[]\n", b"{}\n", b"\xff\xfe\n", b'{"version":7}\n', b'{"version":"%s"}\n' % __version__.encode(), GOOD],
)
def test_what_is_no_header_is_said_to_be_none(line: bytes) -> None:
    with pytest.raises(UserError, match="this is not a journal"):
        decode_header(line)


@pytest.mark.parametrize(
    "line",
    [
        b"\n",
        b"{}\n",
        b"\xff\n",
        GOOD[:-3] + b"\n",
        b'{"event":{"type":"Unheard","at":1.0},"commands":[]}\n',
        b'{"event":{"type":"TimePassed"},"commands":[]}\n',
        b'{"event":{"type":"TimePassed","at":1.0},"commands":[{"type":"Unheard"}]}\n',
        GOOD[:-1] + GOOD,
    ],
)
def test_a_broken_line_is_named_by_its_number(line: bytes) -> None:
    with pytest.raises(UserError, match="line 3 of the journal is broken"):
        list(decode_steps([GOOD, line, GOOD]))


@pytest.mark.parametrize("length", range(1, len(GOOD) - 1))
def test_a_last_line_cut_short_is_told_and_no_error(length: int) -> None:
    steps = list(decode_steps([GOOD, GOOD[:length]]))
    assert steps == [(2, Step(TimePassed(at=1.5), ())), (3, Cut())]


def test_a_last_line_that_lacks_only_its_end_is_whole() -> None:
    assert list(decode_steps([GOOD[:-1]])) == [(2, Step(TimePassed(at=1.5), ()))]
