"""Real worker processes with the real model: two that make up a pair, each on a core of its own, and odd ones."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tests.live.worker_process import Answer, Client, WorkerProcess, chat, eventually, fresh, text

from twinpool.worker.signing import Handle, Signer

pytestmark = pytest.mark.model

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


@pytest.fixture(scope="module")
def pair(default_model: Path) -> Iterator[tuple[WorkerProcess, WorkerProcess]]:
    with WorkerProcess(default_model, core=0) as prefill, WorkerProcess(default_model, core=1) as decode:
        yield prefill, decode


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


@pytest.fixture
def p(pair: tuple[WorkerProcess, WorkerProcess], session: aiohttp.ClientSession) -> Client:
    return Client(session, pair[0].url)


@pytest.fixture
def d(pair: tuple[WorkerProcess, WorkerProcess], session: aiohttp.ClientSession) -> Client:
    return Client(session, pair[1].url)


async def handed_over(p: Client, d: Client, path: str, body: dict[str, Any]) -> Answer:
    """The decode leg's answer, and proof that the KV moved."""
    handle = await p.prefill(path, body)
    before = await d.metric("prompt_tokens_computed_total")
    answer = await d.post(path, {**body, "kv_transfer_params": handle})
    assert answer.status == 200, answer.raw
    assert await d.metric("prompt_tokens_computed_total") - before <= 1
    return answer


def told(answer: Answer) -> Any:
    """What an answer says, without its id and time."""
    if not answer.headers["content-type"].startswith("text/event-stream"):
        return {key: value for key, value in answer.json.items() if key not in ("id", "created")}
    return [{key: value for key, value in event.items() if key not in ("id", "created")} for event in answer.events]


# -- a handed-over answer is the colocated one


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("topic", ["Why is the sky blue?", "日本の首都は？ 🗾", "Write a limerick about a queue."])
@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_the_answer_equals_the_colocated_one(p: Client, d: Client, path: str, topic: str, stream: bool) -> None:
    fields: dict[str, Any] = {"max_tokens": 24}
    if stream:
        fields |= {"stream": True, "stream_options": {"include_usage": True}}
    body = (chat if path == CHAT else text)(fresh(topic), **fields)
    here = await handed_over(p, d, path, body)
    there = await d.post(path, {**body, "cache_prompt": False})
    assert told(here) == told(there)


async def test_a_long_prompt_too_and_its_handoff_costs_little(p: Client, d: Client) -> None:
    loop = asyncio.get_running_loop()
    body = chat(fresh("Continue the list.", words=600))
    began = loop.time()
    handle = await p.prefill(CHAT, body)
    prefill_s = loop.time() - began
    assert handle["remote_num_tokens"] > 1000
    here = await d.post(CHAT, {**body, "kv_transfer_params": handle})
    assert here.headers["x-twinpool-handoff-transport"] == "shared_memory"
    assert int(here.headers["x-twinpool-handoff-bytes"]) > 23_000 * 1000
    assert float(here.headers["x-twinpool-handoff-s"]) < 0.05 * prefill_s
    before = await d.metric("prompt_tokens_computed_total")
    there = await d.post(CHAT, body)
    assert told(here) == told(there)
    computed = await d.metric("prompt_tokens_computed_total") - before
    assert computed == handle["remote_num_tokens"], "what came by a handoff is no prefix to start from"


async def test_log_probabilities_survive_a_handoff(p: Client, d: Client) -> None:
    body = text(fresh("The capital of France is"), logprobs=2, max_tokens=6)
    here = await handed_over(p, d, TEXT, body)
    logprobs = here.json["choices"][0]["logprobs"]
    assert [len(logprobs[name]) for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")] == [6] * 4
    assert "".join(logprobs["tokens"]) == here.json["choices"][0]["text"]
    assert told(here) == told(await d.post(TEXT, {**body, "cache_prompt": False}))


async def test_a_cached_prefix_changes_neither_answer_nor_honesty(p: Client, d: Client) -> None:
    """The prefill leg reuses two blocks; its decode leg's usage says so."""
    start = fresh("", words=400)
    first = await p.post(CHAT, chat(start + "Continue.", max_tokens=4))
    assert first.json["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    body = chat(start + "What was the last item?")
    before = await p.metric("prompt_tokens_computed_total")
    here = await handed_over(p, d, CHAT, body)
    usage = here.json["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert cached == 512
    assert await p.metric("prompt_tokens_computed_total") - before <= usage["prompt_tokens"] - cached + 1
    cold = await p.post(CHAT, {**body, "cache_prompt": False})
    assert cold.json["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert cold.json["choices"] == here.json["choices"]


# -- handles


async def test_a_handle_is_good_once(p: Client, d: Client) -> None:
    body = chat(fresh("Once."))
    handle = await p.prefill(CHAT, body)
    answers = await asyncio.gather(*(d.post(CHAT, {**body, "kv_transfer_params": handle}) for _ in range(4)))
    assert sorted(answer.status for answer in answers) == [200, 409, 409, 409]
    assert {answer.code for answer in answers if answer.status == 409} == {"handle_spent"}
    assert await p.metric('kv_handles{state="held"}') == 0


async def test_what_was_not_signed_by_this_fleet_is_refused_unasked(p: Client, d: Client) -> None:
    body = chat(fresh("Forged."))
    handle = await p.prefill(CHAT, body)
    with socket.create_server(("127.0.0.1", 0)) as trap:
        trap.settimeout(0)
        moved = {**handle, "remote_port": trap.getsockname()[1]}
        forged = await d.post(CHAT, {**body, "kv_transfer_params": moved})
        signed = Signer("another fleet's").write(
            Handle(
                handle_id=handle["remote_request_id"],
                engine_id=handle["remote_engine_id"],
                host="127.0.0.1",
                port=trap.getsockname()[1],
                prompt_tokens=handle["remote_num_tokens"],
                cached_tokens=0,
                expires_at=handle["remote_blocks_expiry_time"],
                prompt_sha256=handle["twinpool_prompt_sha256"],
                model=handle["twinpool_model"],
            )
        )
        foreign = await d.post(CHAT, {**body, "kv_transfer_params": signed})
        with pytest.raises(BlockingIOError):
            trap.accept()
    assert (forged.status, forged.code) == (403, "handle_forged")
    assert (foreign.status, foreign.code) == (403, "handle_foreign")
    assert await p.release(handle, "0" * 64) == 403
    assert await p.release(handle) == 204


async def test_a_handle_of_another_prompt_is_refused_and_stays_good(p: Client, d: Client) -> None:
    body = chat(fresh("Mine."))
    handle = await p.prefill(CHAT, body)
    wrong = await d.post(CHAT, {**chat(fresh("Not mine.")), "kv_transfer_params": handle})
    assert wrong.status == 400
    assert wrong.json["error"]["param"] == "kv_transfer_params"
    assert (await d.post(CHAT, {**body, "kv_transfer_params": handle})).status == 200


async def test_a_released_handle_frees_its_memory_at_once(p: Client, d: Client) -> None:
    body = chat(fresh("Released."))
    handle = await p.prefill(CHAT, body)
    assert await p.metric("kv_held_bytes") > 0
    assert await p.release(handle) == 204
    assert await p.release(handle) == 204, "twice is no error"
    assert await p.metric("kv_held_bytes") == 0
    late = await d.post(CHAT, {**body, "kv_transfer_params": handle})
    assert late.status == 410


async def test_a_decode_leg_of_one_token_that_is_dropped_releases_too(p: Client, d: Client) -> None:
    body = chat(fresh("Dropped."))
    handle = await p.prefill(CHAT, body)
    dropped = asyncio.create_task(d.post(CHAT, {**body, "max_tokens": 1, "kv_transfer_params": handle}))
    await eventually(lambda: _any(d.metric("requests_running")), 5)
    dropped.cancel()
    await eventually(lambda: _none(p.metric('kv_handles{state="held"}')), 5)
    await eventually(lambda: _none(d.metric("requests_running")), 5)


async def _none(value: Any) -> bool:
    return bool(await value == 0)


async def _any(value: Any) -> bool:
    return bool(await value > 0)


async def _all(value: Any, count: int) -> bool:
    return bool(await value == count)


# -- choices


async def test_two_choices_are_prefilled_once_and_counted_twice(p: Client, d: Client) -> None:
    body = chat(fresh("Tell me a story.", words=100), n=2, temperature=1.0, seed=7, max_tokens=8)
    before = await d.metric("prompt_tokens_computed_total")
    answer = (await d.post(CHAT, body)).json
    one, other = answer["choices"]
    assert [one["index"], other["index"]] == [0, 1]
    assert one["message"]["content"] != other["message"]["content"]
    usage = answer["usage"]
    assert usage["completion_tokens"] == 16
    assert await d.metric("prompt_tokens_computed_total") - before == usage["prompt_tokens"] + 1
    again = (await d.post(CHAT, body)).json
    assert again["usage"]["total_tokens"] == usage["total_tokens"]
    alone = (await d.post(CHAT, {**body, "n": 1})).json
    assert alone["choices"][0]["message"]["content"], "the first choice has the client's own seed"


async def test_streamed_choices_after_a_handoff(p: Client, d: Client) -> None:
    options = {"stream": True, "stream_options": {"include_usage": True}}
    body = chat(fresh("Name three colours."), n=5, temperature=1.0, seed=1, max_tokens=6, **options)
    answer = await handed_over_many(p, d, body)
    *chunks, last = answer.events
    assert {chunk["id"] for chunk in [*chunks, last]} == {chunks[0]["id"]}
    assert {chunk["choices"][0]["index"] for chunk in chunks} == {0, 1, 2, 3, 4}, "more choices than slots"
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 30
    finished = [chunk["choices"][0]["index"] for chunk in chunks if chunk["choices"][0]["finish_reason"]]
    assert sorted(finished) == [0, 1, 2, 3, 4]


async def handed_over_many(p: Client, d: Client, body: dict[str, Any]) -> Answer:
    handle = await p.prefill(CHAT, body)
    before = await d.metric("prompt_tokens_computed_total")
    answer = await d.post(CHAT, {**body, "kv_transfer_params": handle})
    assert await d.metric("prompt_tokens_computed_total") - before == body["n"]
    return answer


async def test_a_list_of_prompts_is_answered_in_order(d: Client) -> None:
    answer = (await d.text(["1 2 3 4 5", "a b c d e"], n=2, max_tokens=3)).json
    texts = [choice["text"] for choice in answer["choices"]]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert texts[0] == texts[1] != texts[2] == texts[3]
    assert answer["usage"]["completion_tokens"] == 12
    single = (await d.text("a b c d e", max_tokens=3)).json
    assert texts[2] == single["choices"][0]["text"]


# -- shapes


async def test_no_usage_in_a_stream_that_did_not_ask(d: Client) -> None:
    for answer in (await d.chat("Hi", stream=True), await d.text("Hi", stream=True)):
        assert all("usage" not in event and "timings" not in event for event in answer.events)
        assert answer.headers["content-type"].startswith("text/event-stream")


async def test_ids_objects_and_the_models_name(d: Client) -> None:
    for answer, prefix, kind in (
        (await d.chat("Hi"), "chatcmpl-", "chat.completion"),
        (await d.text("Hi"), "cmpl-", "text_completion"),
    ):
        assert answer.json["id"].startswith(prefix)
        assert (answer.json["object"], answer.json["model"]) == (kind, "smol")
        assert "timings" not in answer.json


async def test_who_and_what_a_worker_is(d: Client) -> None:
    identity = (await d.get("/twinpool/identity")).json
    health = await d.get("/health")
    assert health.headers["x-twinpool-incarnation"] == identity["incarnation"]
    assert identity["kind"] == "twinpool-worker"
    assert (identity["context_tokens"], identity["slots"], identity["kv_bytes_per_token"]) == (8192, 4, 23_056)
    (model,) = (await d.get("/v1/models")).json["data"]
    assert (model["id"], model["max_model_len"]) == ("smol", 8192)


@pytest.mark.parametrize(
    ("fields", "status", "code"),
    [
        ({"max_tokens": 0}, 400, "invalid_value"),
        ({"max_tokens": 1_000_000}, 400, "context_length_exceeded"),
        ({"max_tokens": 8190}, 400, "context_length_exceeded"),
        ({"model": "another"}, 404, "model_not_found"),
        ({"messages": [{"role": "user", "content": "hi " * 9000}]}, 400, "context_length_exceeded"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, 400, None),
        ({"grammar": "root ::= ((", "stream": True}, 400, "invalid_request"),
    ],
)
async def test_bad_requests_leave_the_worker_well(d: Client, fields: dict[str, Any], status: int, code: str | None) -> None:
    answer = await d.chat("Hi", **fields)
    assert answer.status == status
    assert answer.json["error"]["message"]
    assert code is None or answer.code == code
    assert (await d.chat("Hi", max_tokens=1)).status == 200
    assert await d.metric("requests_running") == 0


async def test_wrong_ways_in(d: Client) -> None:
    assert (await d.get("/v1/nowhere")).code == "no_such_route"
    wrong = await d.get(CHAT)
    assert (wrong.status, wrong.code) == (405, "method_not_allowed")


# -- clients that go


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_goes_while_tokens_come_stops_the_engine(d: Client, stream: bool) -> None:
    going = asyncio.create_task(d.chat("Count to one thousand.", max_tokens=2000, stream=stream))
    await eventually(lambda: _any(d.metric("requests_running")), 5)
    going.cancel()
    assert await eventually(lambda: _none(d.metric("requests_running")), 5) < 1.0


async def test_a_client_that_goes_during_a_prefill_stops_it_within_a_step(p: Client) -> None:
    before = await p.metric("prompt_tokens_computed_total")
    going = asyncio.create_task(p.chat(fresh("", words=1500)))
    await eventually(lambda: _any(p.metric("requests_running")), 5)
    going.cancel()
    await eventually(lambda: _none(p.metric("requests_running")), 10)
    assert await p.metric("prompt_tokens_computed_total") - before <= 512
    assert (await p.chat("Hi", max_tokens=1)).status == 200


# -- an odd one: a short context, a short lease, a short queue, no shared memory


@pytest.fixture(scope="module")
def odd(default_model: Path) -> Iterator[WorkerProcess]:
    with WorkerProcess(
        default_model,
        core=1,
        context_tokens=1024,
        lease_s=1.0,
        queue_limit=1,
        queue_timeout_s=0.3,
        shared_memory=False,
        body_timeout_s=0.5,
        max_body_bytes=100_000,
    ) as worker:
        yield worker


@pytest.fixture
def o(odd: WorkerProcess, session: aiohttp.ClientSession) -> Client:
    return Client(session, odd.url)


async def test_kv_also_goes_over_tcp(o: Client, d: Client) -> None:
    body = chat(fresh("Over the wire."))
    here = await handed_over(o, d, CHAT, body)
    assert here.headers["x-twinpool-handoff-transport"] == "tcp"
    sent = await o.metric('handoff_bytes_total{direction="out",transport="tcp"}')
    assert sent == int(here.headers["x-twinpool-handoff-bytes"])
    assert told(here) == told(await d.post(CHAT, {**body, "cache_prompt": False}))


async def test_an_expired_handle_is_gone_and_so_is_its_memory(o: Client, d: Client) -> None:
    body = chat(fresh("Too late."))
    handle = await o.prefill(CHAT, body)
    assert await o.metric("kv_held_bytes") > 0
    assert await eventually(lambda: _none(o.metric("kv_held_bytes")), 3) > 0.5
    late = await d.post(CHAT, {**body, "kv_transfer_params": handle})
    assert (late.status, late.code) == (410, "handle_expired")
    assert await o.metric('kv_handles_total{end="expired"}') == 1


async def test_the_queue_is_bounded_in_length_and_time(o: Client) -> None:
    running = [asyncio.create_task(o.chat("Count to one thousand.", max_tokens=900)) for _ in range(4)]
    await eventually(lambda: _all(o.metric("requests_running"), 4), 5)
    waiting = asyncio.create_task(o.chat("Hi"))
    await eventually(lambda: _any(o.metric("requests_waiting")), 5)
    refused = await o.chat("Hi")
    assert (refused.status, refused.code) == (429, "queue_full")
    assert refused.headers["retry-after"]
    late = await waiting
    assert late.status == 503
    assert late.headers["retry-after"]
    for task in running:
        task.cancel()
    await eventually(lambda: _none(o.metric("requests_running")), 5)


async def test_too_much_and_too_slow(o: Client, odd: WorkerProcess) -> None:
    large = await o.chat("x" * 200_000)
    assert (large.status, large.code) == (413, "body_too_large")
    port = int(odd.url.rpartition(":")[2])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
    answer = await asyncio.wait_for(reader.readuntil(b"\r\n"), 5)
    assert answer.startswith(b"HTTP/1.1 408 ")
    writer.close()


# -- beginnings and ends


def _folders(process: subprocess.Popen[str]) -> list[Path]:
    return list(Path("/dev/shm" if Path("/dev/shm").is_dir() else "/tmp").glob(f"twinpool-*/{process.pid}-*"))  # noqa: S108


def test_a_start_that_fails_says_why_in_one_line(default_model: Path, tmp_path: Path) -> None:
    other = tmp_path / "model.gguf"
    other.write_text("hello")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        cases: list[tuple[Path, dict[str, Any], str]] = [
            (tmp_path / "missing.gguf", {}, "cannot read the model"),
            (other, {}, "not a GGUF"),
            (default_model, {"port": port}, "choose another --port"),
            (default_model, {"context_tokens": 10**9}, "fewer --slots or --context-tokens"),
            (default_model, {"surprise": 1}, "surprise"),
        ]
        for model, settings, why in cases:
            worker = WorkerProcess(model, core=0, **settings)
            complaint = worker.complaint()
            assert why in complaint
            assert complaint.count("\n") == 1
            assert worker.process.returncode == 2
            assert _folders(worker.process) == []
            worker.__exit__()


async def test_a_worker_asked_to_end_finishes_what_runs(default_model: Path, d: Client, session: aiohttp.ClientSession) -> None:
    with WorkerProcess(default_model, core=0, context_tokens=512, slots=2, lease_s=20) as worker:
        client = Client(session, worker.url)
        body = chat(fresh("Held."))
        handle = await client.prefill(CHAT, body)
        unlike = await d.post(CHAT, {**body, "kv_transfer_params": handle})
        assert (unlike.status, unlike.code) == (403, "handle_foreign"), "it has another number of slots"
        running = asyncio.create_task(client.chat("Count to fifty.", max_tokens=60))
        await eventually(lambda: _any(client.metric("requests_running")), 5)
        worker.process.send_signal(signal.SIGTERM)
        await eventually(lambda: _draining(client), 5)
        refused = await client.chat("Hi")
        assert (refused.status, refused.code) == (503, "draining")
        assert (await running).status == 200
        assert worker.process.poll() is None, "a handle is held"
        assert await client.release(handle) == 204
        await asyncio.to_thread(worker.process.wait, 10)
        assert worker.process.returncode == 0
        assert _folders(worker.process) == []


async def _draining(client: Client) -> bool:
    return bool((await client.get("/health")).json["status"] == "draining")


def test_a_worker_ends_with_its_parent_even_one_that_was_killed(default_model: Path) -> None:
    """The parent holds the other end of a pipe; here a process that only sleeps stands in for it."""
    ours, theirs = os.pipe()
    parent = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=(theirs,))
    os.close(theirs)
    with WorkerProcess(default_model, core=1, context_tokens=512, pass_fds=(ours,), exit_with_fd=ours) as worker:
        os.close(ours)
        assert worker.process.poll() is None
        parent.kill()
        parent.wait()
        worker.process.wait(10)
        assert _folders(worker.process) == []
    assert parent.stdin is not None
    parent.stdin.close()


async def test_a_killed_workers_handles_are_lost_and_its_memory_goes_with_the_next_start(
    default_model: Path, d: Client, session: aiohttp.ClientSession
) -> None:
    with WorkerProcess(default_model, core=0, context_tokens=512) as first:
        body = chat(fresh("Orphaned."))
        handle = await Client(session, first.url).prefill(CHAT, body)
        first.process.kill()
        first.process.wait()
        lost = await d.post(CHAT, {**body, "kv_transfer_params": handle})
        assert (lost.status, lost.code) == (502, "handoff_failed")
        assert len(_folders(first.process)) == 2, "its folder and lock stayed"
        with WorkerProcess(default_model, core=0, context_tokens=512):
            assert _folders(first.process) == []
