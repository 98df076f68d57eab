"""The promise *same events, same commands*, on the journal of the service that all these tests use.

The whole of it is replayed once more when that service has ended (see `conftest`).
"""

import json
from pathlib import Path

import pytest
from tests.live import prompts, wire
from tests.live.service import Service, run

pytestmark = [pytest.mark.model, pytest.mark.timeout(60, func_only=True)]


@pytest.fixture(scope="module")
def journal(service: Service, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what was written so far: at least one request of each kind, one refused and one whose client left."""
    for fields in ({}, {"stream": True}, {"n": 2}):
        body = prompts.body("completions", 20, model=service.model, max_tokens=2, **fields)
        assert wire.post(service.url, "completions", body).status == 200
    refused = prompts.body("completions", 20, model=service.model, max_tokens=1_000_000)
    assert wire.post(service.url, "completions", refused).status == 400
    left = prompts.body("completions", 20, model=service.model, max_tokens=500, stream=True)
    with wire.sent(service.url, wire.request_bytes("completions", left)) as connection:
        wire.read_until(connection, b"data: ")
    service.wait_until_idle()
    copy = tmp_path_factory.mktemp("journal") / "journal.jsonl"
    lines = service.journal.read_bytes().splitlines(keepends=True)
    copy.write_bytes(b"".join(line for line in lines if line.endswith(b"\n")))
    return copy


def test_every_command_is_reproduced(journal: Path) -> None:
    replayed = run("replay", str(journal))
    assert replayed.returncode == 0, replayed.stdout
    assert replayed.stderr == ""
    assert f"{len(journal.read_bytes().splitlines()) - 1:,}" in replayed.stdout


def test_the_first_command_that_differs_is_told(journal: Path, tmp_path: Path) -> None:
    lines = journal.read_text().splitlines(keepends=True)
    doctored = next(number for number, line in enumerate(lines, 1) if '"type":"SendDecode"' in line)
    step = json.loads(lines[doctored - 1])
    (command,) = (command for command in step["commands"] if command["type"] == "SendDecode")
    command["worker"] = "decode-7"
    lines[doctored - 1] = json.dumps(step) + "\n"
    other = tmp_path / "doctored.jsonl"
    other.write_text("".join(lines))

    replayed = run("replay", str(other))
    assert replayed.returncode == 1
    assert f"line {doctored} " in replayed.stdout
    assert "decode-7" in replayed.stdout
    assert "Traceback" not in replayed.stderr

    as_json = run("replay", "--json", str(other))
    assert as_json.returncode == 1
    assert json.loads(as_json.stdout)["difference"]["line"] == doctored


def test_a_journal_that_a_crash_cut_short_replays(journal: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.jsonl"
    cut.write_bytes(journal.read_bytes()[:-9])
    assert run("replay", str(cut)).returncode == 0


def test_what_is_no_journal_is_told_in_one_line(tmp_path: Path) -> None:
    other = tmp_path / "notes.txt"
    other.write_text("shopping: bread, milk\n")
    for path in (other, tmp_path / "none"):
        replayed = run("replay", str(path))
        assert replayed.returncode == 2
        assert replayed.stderr.startswith("twinpool: ")
        assert len(replayed.stderr.splitlines()) == 1
