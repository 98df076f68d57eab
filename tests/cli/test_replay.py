import json
from pathlib import Path

from click.testing import CliRunner, Result

from twinpool import __version__
from twinpool.assemble import build_controller
from twinpool.cli.group import cli
from twinpool.config import Routing
from twinpool.core import events as on
from twinpool.core.journal import Header, encode_header, encode_step
from twinpool.core.model import RequestFacts, Role, WorkerFacts


def record() -> list[bytes]:
    """A journal: one worker joins, one request is sent to it."""
    worker = WorkerFacts(
        worker="colocated-0",
        url="http://a:1",
        incarnation="1",
        engine="e",
        models=("m",),
        role=Role.COLOCATED,
        allowed_roles=(Role.COLOCATED,),
    )
    request = RequestFacts(model="m", endpoint="chat", stream=False, prompt_chars=10)
    controller = build_controller(Routing())
    events = [on.WorkerJoined(at=1.0, facts=worker), on.RequestArrived(at=2.0, request="r", facts=request)]
    return [
        encode_header(Header(version=__version__, rules=Routing())),
        *(encode_step(e, controller.handle(e)) for e in events),
    ]


def replay(path: Path, lines: list[bytes], *options: str) -> Result:
    path.write_bytes(b"".join(lines))
    return CliRunner().invoke(cli, ["replay", str(path), *options])


def test_the_same_commands_again(tmp_path: Path) -> None:
    result = replay(tmp_path / "journal", record())
    assert (result.exit_code, result.stdout) == (0, "2 events replayed: every command is the same.\n")


def test_the_first_difference_is_shown(tmp_path: Path) -> None:
    header, joined, arrived = record()
    forged = arrived.replace(b'"worker":"colocated-0"', b'"worker":"colocated-1"')
    assert forged != arrived
    result = replay(tmp_path / "journal", [header, joined, forged])
    assert result.exit_code == 1
    assert "line 3 differs" in result.stdout
    recorded, now = result.stdout.split("  now:\n")
    assert "colocated-1" in recorded
    assert "colocated-0" in now
    outcome = json.loads(replay(tmp_path / "journal", [header, joined, forged], "--json").stdout)
    assert outcome["difference"]["line"] == 3


def test_a_journal_cut_short_is_still_good(tmp_path: Path) -> None:
    *whole, last = record()
    result = replay(tmp_path / "journal", [*whole, last[:20]])
    assert result.exit_code == 0
    assert "cut short" in result.stdout


def test_what_is_no_journal(tmp_path: Path) -> None:
    for lines in ([], [b"hello\n"]):
        result = replay(tmp_path / "journal", lines)
        assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
