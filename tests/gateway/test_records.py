"""The journal and the access log: bounded, each file good on its own, and never a reason for the service to stop."""

import asyncio
import json
import os
import random
import threading
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from tests.core.afternoon import busy_afternoon
from tests.core.stage import Stage
from tests.gateway.house import CHAT, House, chat, files_of, house, told

from twinpool.assemble import build_controller, replay
from twinpool.cli.group import cli
from twinpool.config import Kept, Routing, Timeouts
from twinpool.core.law import Law
from twinpool.engines.scripted import Default, End, Reply, Script
from twinpool.errors import UserError
from twinpool.gateway.journal import Journal
from twinpool.gateway.lines import LineWriter

QUICK = Timeouts(connect_s=0.2, prefill_s=0.2, first_byte_s=0.2, idle_s=0.2, release_s=0.2)


def faulty(seed: int) -> Script:
    chance = random.Random(seed)
    faults = (Reply.error(500), Reply.error(503), Reply.hang(), Reply.reset(), Default(stops_after_events=3, end=End.RESET))
    script = Script(token_interval_s=0.001, lease_s=1.0)  # an answer that is lost takes its handle with it
    script.on_request = lambda recorded: chance.choice(faults) if chance.random() < 0.15 else None
    return script


async def traffic(h: House, count: int) -> None:
    """Some whole, some streamed, some whose client leaves in the middle; engines fail as they like."""

    async def one(n: int) -> None:
        await asyncio.sleep(n * 0.003)
        if n % 5 == 0:
            async with h.stream(f"n{n}") as stream:
                if stream.status == 200:
                    await stream.event()
        else:
            await h.chat(f"n{n}", stream=n % 2 == 0)

    async with asyncio.TaskGroup() as clients:
        for n in range(count):
            clients.create_task(one(n))


def header_of(file: Path) -> tuple[dict[str, Any], int]:
    line = file.read_bytes().splitlines()[0]
    return json.loads(line), len(line)


def is_bounded(file: Path, kept: Kept) -> bool:
    longest = max(len(line) + 1 for line in file.read_bytes().splitlines()[1:])
    return file.stat().st_size <= max(kept.max_bytes, 2 * header_of(file)[1] + 2) + longest


# The journal


async def test_every_file_of_a_journal_under_faults_replays_on_its_own() -> None:
    kept = Kept(max_bytes=20_000, keep=1000)
    async with house(prefill=[faulty(1), faulty(2)], decode=[faulty(3), faulty(4)], timeouts=QUICK, kept=kept) as h:
        await traffic(h, 200)
        await h.settle()
        ended = sum((await h.outcomes()).values())
        await h.gateway.close()
        h.is_closed = True
        files = h.journals()
        assert len(files) > 4
        assert h.arrivals() == ended == 200, "no event is lost between two files"
        assert all(is_bounded(file, kept) for file in files)
        snapshots = [header_of(file)[0].get("snapshot") for file in files]
        assert [snapshot is None for snapshot in snapshots] == [True] + [False] * (len(files) - 1)
        assert max(len(snapshot["requests"]) for snapshot in snapshots if snapshot) > 5, "they were begun under way"
        for name in ("journal", "journal.2"):
            result = CliRunner().invoke(cli, ["replay", str(h.journal.with_name(name))])
            assert result.exit_code == 0
            assert result.stdout.endswith(" events replayed: every command is the same.\n")


async def test_a_journal_keeps_so_many_files_and_drops_the_oldest() -> None:
    kept = Kept(max_bytes=20_000, keep=2)
    async with house(prefill=[faulty(5), faulty(6)], decode=[faulty(7), faulty(8)], timeouts=QUICK, kept=kept) as h:
        await traffic(h, 150)
        await h.settle()
        await h.gateway.close()
        h.is_closed = True
        files = h.journals()
        assert [file.name for file in files] == ["journal.2", "journal.1", "journal"]
        assert all(is_bounded(file, kept) for file in files)
        assert all(header_of(file)[0]["snapshot"] for file in files)


async def test_a_disk_that_fails_while_files_are_shifted_ends_the_journal_and_not_the_service(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async with house(prefill=1, decode=1, kept=Kept(max_bytes=5000, keep=1)) as h:
        h.journal.with_name("journal.1").mkdir()
        for n in range(40):
            assert (await h.chat(f"n{n}")).text == told(f"n{n}")
        await h.settle()
        await h.gateway.close()
        h.is_closed = True
        assert capsys.readouterr().err.count("twinpool: the journal ends here, the service goes on: ") == 1
        assert h.journals() == [h.journal]
        assert h.journal.stat().st_size < 10_000


@cache
def afternoon() -> Stage:
    return busy_afternoon(requests=60)


def record(path: Path, kept: Kept) -> int:
    """Write an afternoon's journal; how many events it had."""
    stage = afternoon()
    controller = build_controller(Routing())
    journal = Journal(path, Routing(), Law(), kept, controller.remember)
    for event in stage.events:
        journal.write(event, controller.handle(event))
    journal.close()
    return len(stage.events)


def replayed(file: Path) -> int:
    with file.open("rb") as lines:
        result = replay(lines)
    assert result.difference is None
    assert not result.is_cut
    return result.events


@pytest.mark.parametrize("max_bytes", [1, 3000, 50_000, 10_000_000])
def test_the_files_together_have_every_event_once(tmp_path: Path, max_bytes: int) -> None:
    """However small they are, snapshots are not most of what is written."""
    kept = Kept(max_bytes=max_bytes, keep=10_000)
    events = record(tmp_path / "journal", kept)
    files = files_of(tmp_path / "journal")
    assert sum(map(replayed, files)) == events
    assert sum(header_of(file)[1] for file in files[:-1]) <= sum(file.stat().st_size for file in files) / 2
    assert (len(files) == 1) == (max_bytes == 10_000_000)
    assert all(is_bounded(file, kept) for file in files if replayed(file))


def test_a_start_begins_anew_and_keeps_what_the_last_run_wrote(tmp_path: Path) -> None:
    """The journal of a run that crashed is the one that somebody will want."""
    journal = tmp_path / "journal"
    for _ in range(4):
        record(journal, Kept(keep=2))
    assert [file.name for file in files_of(journal)] == ["journal.2", "journal.1", "journal"]
    assert all("snapshot" not in header_of(file)[0] for file in files_of(journal))
    assert len(set(map(replayed, files_of(journal)))) == 1


# Files of lines


def lines_of(path: Path) -> list[list[bytes]]:
    return [file.read_bytes().split() for file in files_of(path)]


@pytest.mark.parametrize(
    ("keep", "left"), [(0, [[b"4"]]), (1, [[b"3"], [b"4"]]), (9, [[b"0"], [b"1"], [b"2"], [b"3"], [b"4"]])]
)
def test_so_many_older_files_are_kept(tmp_path: Path, keep: int, left: list[list[bytes]]) -> None:
    writer = LineWriter(tmp_path / "log", "log", appends=True, keep=keep)
    for n in range(5):
        writer.write(b"%d\n" % n)
        assert writer.size == 2
        if n < 4:
            assert writer.turn_over()
    writer.close()
    assert lines_of(tmp_path / "log") == left


def test_a_file_that_somebody_took_away_is_not_missed(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.with_name("log.1").write_bytes(b"old\n")
    writer = LineWriter(path, "log", appends=True, keep=3)
    path.unlink()
    writer.turn_over()
    writer.write(b"new\n")
    writer.close()
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == {"log": b"new\n", "log.1": b"old\n"}


def test_a_file_that_is_gone_on_with_counts_what_it_has(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"before\n")
    writer = LineWriter(path, "log", appends=True, keep=1)
    assert writer.size == 7
    writer.write(b"after\n")
    writer.close()
    assert lines_of(path) == [[b"before", b"after"]]


def test_a_link_stays_and_the_files_are_where_it_leads(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    link = tmp_path / "log"
    link.symlink_to(tmp_path / "disk" / "log")
    writer = LineWriter(link, "log", appends=False, keep=1)
    writer.write(b"1\n")
    writer.turn_over()
    writer.write(b"2\n")
    writer.close()
    assert link.is_symlink()
    assert lines_of(tmp_path / "disk" / "log") == [[b"1"], [b"2"]]


def test_a_pipe_is_written_to_and_never_turned_over(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        writer = LineWriter(path, "log", appends=False, keep=1)
        writer.write(b"1\n")
        assert not writer.turn_over()
        writer.write(b"2\n")
        writer.close()
        assert os.read(reader, 100) == b"1\n2\n"
    finally:
        os.close(reader)
    assert [file.name for file in tmp_path.iterdir()] == ["pipe"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device of Linux")
def test_a_full_disk_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    writer = LineWriter(Path("/dev/full"), "log", appends=True, keep=1)
    for _ in range(3):
        writer.write(b"x\n")
    writer.close()
    assert capsys.readouterr().err == ("twinpool: the log ends here, the service goes on: [Errno 28] No space left on device\n")


def test_no_file_is_moved_by_the_thread_that_writes_lines_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop's thread hands over and goes on, also while a disk takes its time to rename."""
    may_move = threading.Event()
    movers = []
    really_replace = os.replace

    def replace(*paths: Path) -> None:
        movers.append(threading.current_thread())
        assert may_move.wait(5)
        really_replace(*paths)

    writer = LineWriter(tmp_path / "log", "log", appends=True, keep=1)
    monkeypatch.setattr("twinpool.gateway.lines.os.replace", replace)
    writer.write(b"1\n")
    writer.turn_over()
    writer.write(b"2\n")
    may_move.set()
    writer.close()
    assert movers
    assert threading.current_thread() not in movers
    assert lines_of(tmp_path / "log") == [[b"1"], [b"2"]]


def test_a_file_that_cannot_be_opened_is_a_mistake_of_the_person(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot write the log"):
        LineWriter(tmp_path, "log", appends=True, keep=1)


# The access log


async def test_the_access_log_is_bounded_and_every_line_whole() -> None:
    async with house(prefill=1, decode=1, kept=Kept(max_bytes=2000, keep=1000)) as h:
        for n in range(40):
            await h.chat(f"n{n}")
        await h.gateway.close()
        h.is_closed = True
        files = files_of(h.access_log)
        assert len(files) > 4
        assert all(file.stat().st_size <= 2000 + 1000 for file in files)
        lines = [json.loads(line) for file in files for line in file.read_bytes().splitlines()]
        assert [line["outcome"] for line in lines] == ["ok"] * 40
        assert len({line["request"] for line in lines}) == 40


async def test_the_access_log_tells_where_the_time_went_and_nothing_of_the_content() -> None:
    async with house(prefill=1, decode=1, kept=Kept(max_bytes=1 << 20, keep=1), api_keys=frozenset({"secret-key"})) as h:
        key = {"authorization": "Bearer secret-key"}
        answer = await h.ask(CHAT, chat("n-secret", stream=True), headers=key)
        assert answer.status == 200
        await h.gateway.close()
        h.is_closed = True
        raw = h.access_log.read_text()
        (line,) = map(json.loads, raw.splitlines())
        assert sum(line["ttft_part_s"].values()) == pytest.approx(line["ttft_s"], abs=1e-5)
        assert (line["path"], line["attempts"], line["stream"]) == ("disaggregated", 1, True)
        for hidden in ("n-secret", "secret-key", "remote_", "messages"):
            assert hidden not in raw
