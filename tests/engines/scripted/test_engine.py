"""The scripted engine keeps its own promises: the tests of everything else stand on them."""

import asyncio
import json
import sys
from typing import Any

import pytest

from twinpool.engines.metrics import read_metrics
from twinpool.engines.scripted import GARBAGE, Default, End, Reply, Script, ScriptedEngine, answer_text
from twinpool.http1 import Deadlines, Loss, Origin, Pool, Response, UpstreamLost

CHAT = {"model": "scripted", "messages": [{"role": "user", "content": "please answer n17"}]}
PROMPT = "user: please answer n17"
TO_PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}


@pytest.fixture
async def pool():
    pool = Pool()
    yield pool
    await pool.close()


async def post(pool: Pool, engine: ScriptedEngine, body: Any, path: str = "/v1/chat/completions") -> Response:
    origin = Origin(engine.host, engine.port)
    return await pool.fetch(origin, "POST", path, body=json.dumps(body).encode(), timeout_s=10)


async def get(pool: Pool, engine: ScriptedEngine, path: str) -> Response:
    return await pool.fetch(Origin(engine.host, engine.port), "GET", path, timeout_s=10)


async def until(condition, timeout_s: float = 5.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110  what it waits for is plain state
            await asyncio.sleep(0.001)


def events(response: Response) -> list[Any]:
    datas = [block.removeprefix("data: ") for block in response.body.decode().split("\n\n") if block]
    return [data if data == "[DONE]" else json.loads(data) for data in datas]


def said(response: Response) -> str:
    return json.loads(response.body)["choices"][0]["message"]["content"]


async def prefill(pool: Pool, engine: ScriptedEngine, body: Any = CHAT, path: str = "/v1/chat/completions") -> Any:
    leg = await post(pool, engine, body | {"max_tokens": 1, "kv_transfer_params": TO_PREFILL}, path)
    return json.loads(leg.body)["kv_transfer_params"]


async def test_an_answer_tells_whose_prompt_it_is(pool):
    async with ScriptedEngine() as engine:
        answer = json.loads((await post(pool, engine, CHAT | {"max_tokens": 3})).body)
    content = answer["choices"][0]["message"]["content"]
    assert content.split()[0].startswith("n17.0#")
    assert content.split()[1:] == ["n17.1", "n17.2"]
    assert content == answer_text(PROMPT, 3)
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"] == {
        "prompt_tokens": 4,
        "completion_tokens": 3,
        "total_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


async def test_without_a_limit_it_stops_by_itself(pool):
    async with ScriptedEngine(Script(answer_tokens=5)) as engine:
        answer = json.loads((await post(pool, engine, CHAT)).body)
    assert answer["usage"]["completion_tokens"] == 5
    assert answer["choices"][0]["finish_reason"] == "stop"


async def test_a_stream_says_the_same(pool):
    body = CHAT | {"stream": True, "n": 2, "stream_options": {"include_usage": True}}
    async with ScriptedEngine(Script(answer_tokens=4, token_interval_s=0.001)) as engine:
        streamed = events(await post(pool, engine, body))
        whole = json.loads((await post(pool, engine, CHAT | {"n": 2})).body)
    assert streamed.pop() == "[DONE]"
    usage = streamed.pop()
    assert usage["choices"] == []
    assert usage["usage"] == whole["usage"]
    for choice in whole["choices"]:
        mine = [event["choices"][0] for event in streamed if event["choices"][0]["index"] == choice["index"]]
        assert mine[0]["delta"]["role"] == "assistant"
        assert "".join(part["delta"].get("content", "") for part in mine) == choice["message"]["content"]
        assert [part["finish_reason"] for part in mine if part["finish_reason"]] == ["stop"]
    assert whole["choices"][0]["message"] != whole["choices"][1]["message"]


async def test_stop_cuts_the_text(pool):
    async with ScriptedEngine() as engine:
        answer = json.loads((await post(pool, engine, CHAT | {"stop": "n17.2"})).body)
    assert answer["choices"][0]["message"]["content"] == answer_text(PROMPT, 2) + " "
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == 3


async def test_a_prompt_that_ends_in_its_own_answer_is_gone_on_with(pool):
    begun = answer_text(PROMPT, 3)
    messages = [*CHAT["messages"], {"role": "assistant", "content": begun}]
    body = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False, "max_tokens": 4}
    async with ScriptedEngine() as engine:
        rest = said(await post(pool, engine, body))
        text = await post(pool, engine, {"prompt": PROMPT + answer_text(PROMPT, 3, is_chat=False)}, "/v1/completions")
    assert begun + rest == answer_text(PROMPT, 7)
    assert json.loads(text.body)["choices"][0]["text"].split() == answer_text(PROMPT, 16).split()[3:]


async def test_batches_and_logprobs(pool):
    body = {"prompt": ["one a1", "two b2"], "n": 2, "logprobs": 1, "max_tokens": 2}
    async with ScriptedEngine() as engine:
        answer = json.loads((await post(pool, engine, body, "/v1/completions")).body)
        chat = json.loads((await post(pool, engine, CHAT | {"logprobs": True, "top_logprobs": 2})).body)
    assert [choice["text"].split()[1] for choice in answer["choices"]] == ["a1.1", "a1/1.1", "b2.1", "b2/1.1"]
    assert answer["choices"][0]["logprobs"]["text_offset"][0] == 0
    content = chat["choices"][0]["logprobs"]["content"]
    assert "".join(part["token"] for part in content) == chat["choices"][0]["message"]["content"]
    assert len(content[0]["top_logprobs"]) == 2


@pytest.mark.parametrize(
    ("change", "status", "words"),
    [
        ({"max_tokens": 1, "min_tokens": 5}, 400, "min_tokens must be less than or equal"),
        ({"stream_options": {"include_usage": True}}, 400, "Stream options can only be defined"),
        ({"max_tokens": 0}, 400, "max_tokens must be at least 1"),
        ({"temperature": -1}, 400, "temperature"),
        ({"max_tokens": 9000}, 400, "maximum context length"),
        ({"model": "other"}, 404, "does not exist"),
        ({"messages": []}, 400, "messages"),
        ({"n": 0}, 400, "n must be"),
    ],
)
async def test_it_objects_as_vllm_does(pool, change, status, words):
    async with ScriptedEngine() as engine:
        answer = await post(pool, engine, CHAT | change)
        fine = await post(pool, engine, CHAT | {"x_future": {"a": [1]}})
    assert answer.status == status
    assert words in json.loads(answer.body)["error"]["message"]
    assert fine.status == 200


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_handoff_gives_the_colocated_answer(pool, path, stream):
    body = (CHAT if "chat" in path else {"prompt": PROMPT}) | {"max_tokens": 6, "stream": stream}
    async with ScriptedEngine() as one, ScriptedEngine() as two:
        handle = await prefill(pool, one, body | {"stream": False}, path)
        assert one.ledger.held == 1
        disaggregated = await post(pool, two, body | {"kv_transfer_params": handle}, path)
        assert (two.computed_prompt_tokens, two.pulled_tokens) == (1, 4)
        colocated = await post(pool, two, body, path)
        assert one.ledger.held == 0
        assert one.is_idle

    def content(response: Response) -> Any:
        if stream:
            return [event if isinstance(event, str) else event["choices"] for event in events(response)]
        answer = json.loads(response.body)
        return answer["choices"], answer["usage"]["total_tokens"]

    assert content(disaggregated) == content(colocated)


@pytest.mark.parametrize("misuse", ["twice", "expired", "restarted", "forged"])
async def test_a_misused_handle_gives_200_and_garbage(pool, misuse):
    async with ScriptedEngine() as one, ScriptedEngine() as two:
        handle = await prefill(pool, one)
        match misuse:
            case "twice":
                await post(pool, two, CHAT | {"kv_transfer_params": handle})
            case "expired":
                one.ledger.expire(all_now=True)
            case "restarted":
                await one.restart()
            case "forged":
                handle["remote_request_id"] = "feedbeef"
        answer = await post(pool, two, CHAT | {"kv_transfer_params": handle})
        assert answer.status == 200
        assert GARBAGE in said(answer)
        assert one.ledger.misuses == 1
        expired = read_metrics((await get(pool, one, "/metrics")).body).expired_handles
        assert expired == (misuse == "expired")


async def test_kv_of_another_prompt_gives_that_prompts_answer(pool):
    async with ScriptedEngine() as one, ScriptedEngine() as two:
        handle = await prefill(pool, one)
        other = {"messages": [{"role": "user", "content": "something else n99"}], "kv_transfer_params": handle}
        assert said(await post(pool, two, other)).startswith("n17.0")


async def test_a_lease_ends(pool):
    async with ScriptedEngine(Script(lease_s=0.01)) as one:
        await prefill(pool, one)
        await until(lambda: one.ledger.held == 0)
        assert json.loads((await get(pool, one, "/ledger")).body)["expired"] == 1


@pytest.mark.parametrize("policy", ["fail", "recompute"])
async def test_a_poisoned_pair_fails_while_health_is_200(pool, policy):
    async with ScriptedEngine() as one, ScriptedEngine(Script(load_failure=policy)) as two:
        two.script.poisoned_peers.add(one.address)
        answer = await post(pool, two, CHAT | {"kv_transfer_params": await prefill(pool, one)})
        assert (await get(pool, two, "/health")).status == 200
    assert answer.status == (500 if policy == "fail" else 200)
    assert two.failed_transfers == 1
    assert two.computed_prompt_tokens == (0 if policy == "fail" else 4)


async def test_kv_that_is_readable_only_later(pool):
    async with ScriptedEngine(Script(kv_readable_after_s=0.05)) as one, ScriptedEngine() as two:
        two.script.unreadable_kv = "refuse"
        handle = await prefill(pool, one)
        refused = await post(pool, two, CHAT | {"kv_transfer_params": handle})
        assert refused.status == 503
        assert one.ledger.held == 1
        two.script.unreadable_kv = "wait"
        assert said(await post(pool, two, CHAT | {"kv_transfer_params": handle})) == answer_text(PROMPT)


async def test_a_dead_prefill_engine_fails_the_load(pool):
    async with ScriptedEngine() as one, ScriptedEngine() as two:
        handle = await prefill(pool, one)
        await one.stop()
        assert (await post(pool, two, CHAT | {"kv_transfer_params": handle})).status == 500


async def test_handles_can_be_withheld_and_widened(pool):
    async with ScriptedEngine(Script(handle_extras={"x_new": 1})) as one:
        assert (await prefill(pool, one))["x_new"] == 1
        one.script.replies.extend([Default(handle=None), Default(handle={"own": True})])
        assert await prefill(pool, one) is None
        assert await prefill(pool, one) == {"own": True}
        one.script.replies.append(Default(handle="absent"))
        answer = await post(pool, one, CHAT | {"max_tokens": 1, "kv_transfer_params": TO_PREFILL})
        assert "kv_transfer_params" not in json.loads(answer.body)


async def test_replies_are_played_byte_by_byte(pool):
    async with ScriptedEngine() as engine:
        engine.script.replies.append(Reply.stream(b"da", b"ta: 1\n", b"\nrest"))
        assert (await post(pool, engine, CHAT)).body == b"data: 1\n\nrest"
        engine.script.on_request = lambda recorded: Reply.error(429, headers=((b"retry-after", b"3"),))
        answer = await post(pool, engine, CHAT)
        assert (answer.status, answer.header(b"retry-after")) == (429, b"3")
        engine.script.on_request = lambda recorded: Reply(chunks=((0, b"HTTP/1.1 200 OK\r\nbad"),), is_raw=True)
        with pytest.raises(UpstreamLost):
            await post(pool, engine, CHAT)


@pytest.mark.parametrize(
    ("end", "loss"), [(End.RESET, Loss.RESET_MID_BODY), (End.CLOSE, Loss.TRUNCATED), (End.HANG, Loss.IDLE_TIMEOUT)]
)
@pytest.mark.parametrize("scripted", [True, False])
async def test_ends(pool, end, loss, scripted):
    class Reader:
        def __init__(self) -> None:
            self.body = b""
            self.lost: asyncio.Future[UpstreamLost] = asyncio.get_running_loop().create_future()

        def on_head(self, status, headers):
            assert status == 200

        def on_body(self, data):
            self.body += data

        def on_end(self):
            self.lost.cancel()

        def on_lost(self, error):
            self.lost.set_result(error)

    async with ScriptedEngine() as engine:
        decision = Reply.stream(b"data: 1\n\n", b"data: 2\n\n", end=end) if scripted else Default(0, 4, end)
        engine.script.replies.append(decision)
        reader = Reader()
        origin = Origin(engine.host, engine.port)
        body = json.dumps(CHAT | {"stream": True}).encode()
        with await pool.request(origin, "POST", "/v1/chat/completions", (), body, reader, Deadlines(idle_s=0.05)):
            lost = await asyncio.wait_for(reader.lost, 5)
        assert lost.loss is loss
        assert reader.body.count(b"\n\n") == (2 if scripted else 4)
        if end is End.HANG:
            await until(lambda: engine.last.disconnected_at is not None)
        await until(lambda: engine.is_idle)


async def test_it_sees_a_client_leave(pool):
    async with ScriptedEngine(Script(prefill_s_per_token=60)) as engine:
        asking = asyncio.create_task(post(pool, engine, CHAT))
        await until(lambda: engine.running == 1)
        asking.cancel()
        await until(lambda: engine.running == 0)
        assert engine.last.disconnected_at is not None
        assert engine.last.finished_at is None


async def test_it_records_what_was_asked(pool):
    async with ScriptedEngine() as engine:
        for _ in range(2):
            headers = ((b"x-request-id", b"r1"), (b"authorization", b"Bearer W"))
            body = json.dumps(CHAT).encode()
            await pool.fetch(Origin(engine.host, engine.port), "POST", "/v1/chat/completions", headers, body, timeout_s=5)
        assert [recorded.attempt for recorded in engine.recorded] == [1, 2]
        assert engine.last.headers["authorization"] == "Bearer W"
        assert engine.last.body == CHAT
        assert engine.last.status == 200


async def test_a_restart_keeps_the_port_and_changes_the_incarnation(pool):
    async with ScriptedEngine() as engine:
        port, engine_id = engine.port, engine.ledger.engine_id
        await post(pool, engine, CHAT)
        await engine.restart()
        assert engine.port == port
        assert engine.ledger.engine_id != engine_id
        assert engine.incarnation == 2
        assert (await get(pool, engine, "/health")).status == 200


async def test_pages(pool):
    async with ScriptedEngine(Script(models=("a", "b"))) as engine:
        models = json.loads((await get(pool, engine, "/v1/models")).body)
        assert [model["id"] for model in models["data"]] == ["a", "b"]
        assert "version" in json.loads((await get(pool, engine, "/version")).body)
        engine.script.metrics |= {"vllm:num_requests_running": 7, "vllm:num_requests_waiting": None}
        metrics = (await get(pool, engine, "/metrics")).body
        assert b'vllm:num_requests_running{model_name="a",engine="0"} 7\n' in metrics
        assert b"num_requests_waiting" not in metrics
        assert (await get(pool, engine, "/nowhere")).status == 404
        engine.script.health_status = 503
        assert (await get(pool, engine, "/health")).status == 503
        engine.script.api_key = "W"
        assert (await get(pool, engine, "/health")).status == 401


async def test_it_can_be_as_frank_as_the_embedded_worker(pool):
    async with ScriptedEngine(Script(is_embedded=True, slots=3)) as one, ScriptedEngine(Script(is_embedded=True)) as two:
        said = json.loads((await get(pool, one, "/twinpool/identity")).body)
        assert (said["incarnation"], said["slots"]) == (one.ledger.engine_id, 3)
        answer = await post(pool, two, CHAT | {"kv_transfer_params": await prefill(pool, one)})
        assert answer.header(b"x-twinpool-handoff-bytes") == b"%d" % (4 * one.script.bytes_per_token)
        assert float(answer.header(b"x-twinpool-handoff-s")) > 0
    async with ScriptedEngine() as stock:
        assert (await get(pool, stock, "/twinpool/identity")).status == 404


async def test_an_embedded_one_frees_a_handle_for_who_can_sign(pool):
    async with ScriptedEngine(Script(is_embedded=True)) as engine:
        handle = await prefill(pool, engine)
        origin, target = Origin(engine.host, engine.port), f"/v1/kv/{handle['remote_request_id']}"
        forged = await pool.fetch(origin, "DELETE", target, [(b"x-twinpool-signature", b"forged")], timeout_s=5)
        assert (forged.status, engine.ledger.held) == (403, 1)
        signature = handle["twinpool_signature"].encode()
        freed = await pool.fetch(origin, "DELETE", target, [(b"x-twinpool-signature", signature)], timeout_s=5)
        assert (freed.status, engine.ledger.held) == (204, 0)


async def test_tokens_can_wait_for_the_tests_word(pool):
    async with ScriptedEngine(Script(steps=asyncio.Semaphore(0))) as engine:
        asking = asyncio.create_task(post(pool, engine, CHAT | {"max_tokens": 2, "stream": True}))
        await until(lambda: engine.running == 1)
        engine.script.steps.release()
        await until(lambda: engine.script.steps.locked() and engine.generated_tokens == 2)
        assert not asking.done()
        engine.script.steps.release()
        assert events(await asking)[-1] == "[DONE]"


async def test_abort_takes_a_prefix_for_an_id_as_sglang_does(pool):
    async with ScriptedEngine(Script(prefill_s_per_token=60)) as engine:
        asking = [asyncio.create_task(post(pool, engine, CHAT | {"rid": rid})) for rid in ("req-1", "req-10", "req-2")]
        await until(lambda: engine.running == 3)
        assert (await post(pool, engine, {"rid": "req-1"}, "/abort_request")).status == 200
        await until(lambda: engine.running == 1)
        assert {recorded.body["rid"] for recorded in engine.recorded if recorded.was_aborted} == {"req-1", "req-10"}
        ends = await asyncio.gather(*asking[:2], return_exceptions=True)
        assert all(isinstance(end, UpstreamLost) for end in ends)
        assert not asking[2].done()
        asking[2].cancel()
        await asyncio.wait(asking)


async def test_a_script_can_be_changed_from_afar(pool):
    order = {
        "answer_tokens": 2,
        "poisoned_peers": ["127.0.0.1:1"],
        "replies": [
            {"status": 429, "headers": {"Retry-After": "3"}, "body": {"error": "full"}},
            {"chunks": [[0, "da"], [0, "ta"]]},
            {"finish_reason": "abort"},
        ],
    }
    async with ScriptedEngine() as engine:
        assert (await post(pool, engine, order, "/script")).status == 200
        full = await post(pool, engine, CHAT)
        assert (full.status, full.header(b"retry-after"), full.body) == (429, b"3", b'{"error":"full"}')
        assert (await post(pool, engine, CHAT)).body == b"data"
        assert json.loads((await post(pool, engine, CHAT)).body)["choices"][0]["finish_reason"] == "abort"
        assert said(await post(pool, engine, CHAT)) == answer_text(PROMPT, 2)
        assert engine.script.poisoned_peers == {"127.0.0.1:1"}
        for wrong in ({"answer_tokenz": 3}, {"answer_tokens": "x"}, {"answer_tokens": 5, "replies": 3}, []):
            assert (await post(pool, engine, wrong, "/script")).status == 400
        assert engine.script.answer_tokens == 2
        recorded = json.loads((await get(pool, engine, "/recorded")).body)
        assert [one["status"] for one in recorded] == [429, 200, 200, 200]


async def test_it_can_be_a_process_of_its_own(pool):
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "twinpool.engines.scripted", "--answer-tokens", "3", stdout=asyncio.subprocess.PIPE
    )
    try:
        port = int(json.loads(await process.stdout.readline())["url"].rpartition(":")[2])
        answer = await pool.fetch(
            Origin("127.0.0.1", port), "POST", "/v1/chat/completions", body=json.dumps(CHAT).encode(), timeout_s=10
        )
        assert said(answer) == answer_text(PROMPT, 3)
    finally:
        process.terminate()
        assert await process.wait() == 0


async def test_it_counts_what_it_moved_as_vllm_does(pool):
    """In whole blocks, and the prompt as handed over to its last token."""
    async with ScriptedEngine() as one, ScriptedEngine(Script(caches_prompts=True)) as two:
        for _ in range(2):
            handle = await prefill(pool, one)
            assert said(await post(pool, two, CHAT | {"kv_transfer_params": handle})) == answer_text(PROMPT)
        read = read_metrics((await get(pool, two, "/metrics")).body)
        assert (read.handoffs, read.handoff_bytes) == (1, 16 * 1024), "what it has in its cache it leaves"
        assert (read.handed_over_prompt_tokens, read.cached_prompt_tokens, read.prompt_tokens) == (4, 3, 8)
        assert one.ledger.held == 0


@pytest.mark.parametrize("flavour", ["poisoned_peers", "garbled_peers"])
async def test_a_pair_can_be_bad_while_both_ends_are_well(pool, flavour):
    async with ScriptedEngine() as one, ScriptedEngine() as other, ScriptedEngine() as two:
        setattr(two.script, flavour, {one.address})
        bad = await post(pool, two, CHAT | {"kv_transfer_params": await prefill(pool, one)})
        assert bad.status == (500 if flavour == "poisoned_peers" else 200)
        assert flavour == "poisoned_peers" or said(bad).startswith(f" {GARBAGE}")
        good = await post(pool, two, CHAT | {"kv_transfer_params": await prefill(pool, other)})
        assert said(good) == answer_text(PROMPT)
        assert one.ledger.held == (flavour == "poisoned_peers")


async def test_first_log_probabilities_are_the_same_from_both_ends_and_others_for_garbage(pool):
    body = CHAT | {"logprobs": True, "top_logprobs": 2}

    def first(answer: Response) -> Any:
        return json.loads(answer.body)["choices"][0]["logprobs"]["content"][0]

    async with ScriptedEngine() as one, ScriptedEngine() as two:
        leg = await post(pool, one, body | {"max_tokens": 1, "kv_transfer_params": TO_PREFILL})
        handle = json.loads(leg.body)["kv_transfer_params"]
        assert first(await post(pool, two, body | {"kv_transfer_params": handle})) == first(leg)
        assert first(await post(pool, two, body | {"kv_transfer_params": handle}))["logprob"] < -4


async def test_a_decode_leg_that_is_rejected_has_the_handle_freed_unread(pool):
    async with ScriptedEngine() as one, ScriptedEngine() as two:
        refused = await post(pool, two, CHAT | {"temperature": -1, "kv_transfer_params": await prefill(pool, one)})
        assert (refused.status, one.ledger.held, two.pulled_tokens) == (400, 0, 0)
        assert one.ledger.report()["released"] == 1


async def test_an_idle_engine_counts_a_late_read_when_its_next_request_comes(pool):
    async def counted(engine: ScriptedEngine) -> int | None:
        return read_metrics((await get(pool, engine, "/metrics")).body).late_notifications

    async with ScriptedEngine() as one, ScriptedEngine() as two:
        handle = await prefill(pool, one)
        one.ledger.expire(all_now=True)
        assert said(await post(pool, two, CHAT | {"kv_transfer_params": handle})).startswith(f" {GARBAGE}")
        assert await counted(one) == 0
        await post(pool, one, CHAT)
        assert await counted(one) == 1
