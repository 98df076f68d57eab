"""The admin port: every route wants the token, every mistake gets an answer that says so, every change is one that holds."""

import asyncio
from typing import Any

import pytest
from tests.gateway.house import House, house, told, until

from twinpool.config import Config, Server
from twinpool.core.model import Role
from twinpool.engines.scripted import Script, ScriptedEngine
from twinpool.errors import UserError
from twinpool.gateway.app import Gateway
from twinpool.page.served import assets

TOKEN = "t0k3n"
ROUTES = [
    ("GET", "/admin/state"),
    ("GET", "/admin/decisions"),
    ("GET", "/admin/history"),
    ("POST", "/admin/workers"),
    ("DELETE", "/admin/workers/p0"),
    ("POST", "/admin/workers/p0/role"),
    ("DELETE", "/admin/workers/p0/role"),
    ("POST", "/admin/workers/p0/drain"),
    ("GET", "/admin/nothing"),
]
OPEN = sorted(("GET", path) for path in assets())
"""The page's own files: they have no secret in them, and a browser cannot send a token before it has them."""


async def admin(h: House, method: str, path: str, body: Any = None, token: str | None = None) -> Any:
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    return await h.ask(h.admin_url + path, body, method=method, headers=headers)


async def test_the_routes_above_are_all_there_are() -> None:
    async with house(prefill=1, decode=1) as h:
        app = h.gateway._admin.app()
        known = {
            (route.method, route.resource.canonical)
            for route in app.router.routes()
            if route.method != "HEAD" and route.resource is not None
        }
        assert known == {(method, path.replace("p0", "{id}")) for method, path in ROUTES[:-1]} | set(OPEN)


@pytest.mark.parametrize(("method", "path"), ROUTES)
@pytest.mark.parametrize("given", [None, "Bearer wrong", f"Basic {TOKEN}", "Bearer ", f"Bearer {TOKEN}x", TOKEN])
async def test_without_the_token_every_route_is_401_and_nothing_happens(method: str, path: str, given: str | None) -> None:
    async with house(prefill=1, decode=1, admin_token=TOKEN) as h:
        headers = {} if given is None else {"Authorization": given}
        answer = await h.ask(h.admin_url + path, {"role": "decode"}, method=method, headers=headers)
        assert (answer.status, answer.error["code"]) == (401, "invalid_api_key")
        assert h.controller.cluster["p0"].story.state == "ready"


@pytest.mark.parametrize(("method", "path"), ROUTES)
async def test_with_the_token_every_route_answers(method: str, path: str) -> None:
    bodies = {"/admin/workers": {"id": "x1", "url": "http://127.0.0.1:1"}, "/admin/workers/p0/role": {"role": "prefill"}}
    async with house(prefill=1, decode=1, admin_token=TOKEN) as h:
        answer = await admin(h, method, path, bodies.get(path), TOKEN)
        assert answer.status == (201 if path == "/admin/workers" else 404 if path == "/admin/nothing" else 200)


async def test_the_page_s_files_are_for_everybody_and_only_to_be_read() -> None:
    async with house(prefill=1, decode=1, admin_token=TOKEN) as h:
        for method, path in OPEN:
            answer = await admin(h, method, path)
            assert (answer.status, bool(answer.body)) == (200, True)
            assert "script-src 'self'" in answer.headers["content-security-policy"]
            assert "default-src 'none'" in answer.headers["content-security-policy"]
            assert (answer.headers["cache-control"], answer.headers["x-content-type-options"]) == ("no-cache", "nosniff")
            again = await h.get(h.admin_url + path, {"If-None-Match": answer.headers["etag"]})
            assert (again.status, again.body) == (304, b"")
            assert (await h.get(h.admin_url + path, {"If-None-Match": '"another"'})).body == answer.body
            assert (await admin(h, "POST", path)).status == 401
            assert (await admin(h, "POST", path, token=TOKEN)).status == 405
        kinds = {path.rpartition(".")[2]: (await admin(h, "GET", path)).headers["content-type"] for _, path in OPEN}
        assert kinds["js"] == "text/javascript; charset=utf-8"
        assert kinds["/"] == "text/html; charset=utf-8"


FOREIGN = [
    {"Sec-Fetch-Site": "cross-site"},
    {"Sec-Fetch-Site": "same-site"},
    {"Origin": "http://evil.example"},
    {"Origin": "null"},
    {"Origin": "http://["},
    {"Host": "evil.example"},
    {"Host": "evil.example:8001"},
]


@pytest.mark.parametrize("headers", FOREIGN)
async def test_a_page_of_another_site_gets_nothing_and_changes_nothing(headers: dict[str, str]) -> None:
    """Whoever opens a page somewhere must not thereby drain a worker here, nor show it what stands here."""
    async with house(prefill=1, decode=1) as h:
        for method, path in ROUTES:
            answer = await h.ask(h.admin_url + path, {"role": "prefill"}, method=method, headers=headers)
            assert answer.status == 403, path
        assert h.controller.cluster["p0"].story.state == "ready"


@pytest.mark.parametrize(
    "headers", [{}, {"Sec-Fetch-Site": "same-origin"}, {"Sec-Fetch-Site": "none"}, {"Host": "localhost:1"}, {"Host": "[::1]:1"}]
)
async def test_our_own_page_and_programs_get_all(headers: dict[str, str]) -> None:
    async with house(prefill=1, decode=1) as h:
        answer = await h.get(f"{h.admin_url}/admin/state", headers)
        assert (answer.status, answer.headers["cache-control"]) == (200, "no-store")


async def test_the_history_has_a_value_for_every_window_and_one_for_now() -> None:
    async with house(prefill=1, decode=1) as h:
        for n in range(3):
            await h.chat(f"n{n}", stream=True)
        history = (await admin(h, "GET", "/admin/history")).json()
        columns = [value for value in history.values() if isinstance(value, list)]
        columns += [*history["workers"].values(), *history["ended"].values()]
        assert len({len(column) for column in columns}) == 1
        assert history["window_s"] == 10
        assert 0 <= history["passed_s"] < 10
        assert sum(history["ended"]["ok"]) == 3
        assert history["workers"] == {"prefill": [1], "decode": [1], "colocated": [0]} or len(columns[0]) > 1
        assert max(filter(None, history["ttft_short_s"])) > 0
        assert not any(history["ttft_long_s"])
        assert max(filter(None, history["worst_gap_s"])) > 0


async def test_a_change_of_role_is_told_with_its_reason_and_a_person_s_is_marked() -> None:
    async with house(prefill=1, decode=1, allowed_roles=tuple(Role)) as h:
        await admin(h, "POST", "/admin/workers/p0/role", {"role": "decode"})
        state = (await admin(h, "GET", "/admin/state")).json()
        (change,) = state["role_changes"]
        assert (change["worker"], change["role"], change["why"], change["number"]) == ("p0", "decode", "manual", 1)
        assert change["words"] == "p0 moved to decode, because a person asked for it"
        assert {worker["id"]: worker["held"] for worker in state["workers"]} == {"p0": True, "d0": False}
        assert (await admin(h, "GET", "/admin/decisions")).json()["role_changes"][0]["words"] == change["words"]


async def test_the_first_token_of_one_that_waited_is_told_from_its_arrival() -> None:
    async with house(colocated=Script(slots=1, prefill_s_per_token=0.02)) as h:
        await asyncio.gather(*(h.chat(f"n{n}", stream=True) for n in range(2)))
        decisions = (await admin(h, "GET", "/admin/decisions")).json()["decisions"]
        came = [each["ttft_s"] for each in decisions if each["choice"] == "colocated"]
        assert [each["choice"] for each in decisions].count("wait") == 1
        assert sum(came) == pytest.approx(await h.metric("twinpool_ttft_seconds_sum"), abs=2e-4)


async def test_a_token_that_is_no_text_is_401() -> None:
    async with house(prefill=1, decode=1, admin_token=TOKEN) as h:
        reader, writer = await asyncio.open_connection("127.0.0.1", h.gateway.admin_port)
        writer.write(b"GET /admin/state HTTP/1.1\r\nhost: h\r\nauthorization: Bearer \xff\xfe\r\n\r\n")
        assert (await asyncio.wait_for(reader.readuntil(b"\r\n"), 5)).startswith(b"HTTP/1.1 401 ")
        writer.close()
        await writer.wait_closed()


async def test_an_admin_port_for_everyone_needs_a_token() -> None:
    gateway = Gateway(Config(server=Server(port=0, admin_port=0, admin_host="0.0.0.0")))  # noqa: S104
    with pytest.raises(UserError, match="needs a token"):
        await gateway.start()
    await gateway.close()


async def test_the_public_port_has_no_admin_routes() -> None:
    async with house(prefill=1, decode=1) as h:
        for method, path in ROUTES[:-1]:
            assert (await h.ask(path, {}, method=method)).status in (404, 405)


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("POST", "/admin/workers", b"", 400),
        ("POST", "/admin/workers", b"{", 400),
        ("POST", "/admin/workers", [], 400),
        ("POST", "/admin/workers", b'{"id":"\xff","url":"http://h:1"}', 400),
        ("POST", "/admin/workers", {"id": "x"}, 400),
        ("POST", "/admin/workers", {"id": "x", "url": 7}, 400),
        ("POST", "/admin/workers", {"id": "x", "url": "ftp://h:1"}, 400),
        ("POST", "/admin/workers", {"id": "x", "url": "http://h:99999"}, 400),
        ("POST", "/admin/workers", {"id": "x", "url": "http://h:1/v2"}, 400),
        ("POST", "/admin/workers", {"id": "x", "url": "http://h:1?a=b"}, 400),
        ("POST", "/admin/workers", {"id": "x", "url": "http://u:p@h:1"}, 400),
        ("POST", "/admin/workers", {"id": "x", "url": "http://h:1", "role": "boss"}, 400),
        ("POST", "/admin/workers", {"id": "x", "url": "http://h:1", "role": "decode", "allowed_roles": ["prefill"]}, 400),
        ("POST", "/admin/workers", {"id": "x", "url": "http://h:1", "surprise": 1}, 400),
        ("POST", "/admin/workers", {"id": "x", "url": "http://h:1", "api_key_file": "/etc/passwd"}, 400),
        ("POST", "/admin/workers", {"id": "x", "url": "http://h:1", "lease_s": 0}, 400),
        ("POST", "/admin/workers", {"id": "x", "url": "http://h:1", "role": "decode", "kv_role": "kv_producer"}, 400),
        ("POST", "/admin/workers", {"id": "x", "url": "http://[::1"}, 400),
        ("POST", "/admin/workers", {"id": "x", "url": "http://a\r\nb:1"}, 400),
        ("POST", "/admin/workers", {"id": "x", "url": "http://a b:1"}, 400),
        ("POST", "/admin/workers", {"id": "..", "url": "http://h:1"}, 400),
        ("POST", "/admin/workers", {"id": "", "url": "http://h:1"}, 400),
        ("POST", "/admin/workers", {"id": "a/b", "url": "http://h:1"}, 400),
        ("POST", "/admin/workers", {"id": "a\r\nset-cookie: b", "url": "http://h:1"}, 400),
        ("POST", "/admin/workers", {"id": "p0", "url": "http://h:1"}, 409),
        ("POST", "/admin/workers", b"[" * 100_000, 400),
        ("POST", "/admin/workers", b" " * (2 << 20), 413),
        ("DELETE", "/admin/workers/nobody", None, 404),
        ("POST", "/admin/workers/nobody/role", {"role": "decode"}, 404),
        ("DELETE", "/admin/workers/nobody/role", None, 404),
        ("POST", "/admin/workers/nobody/drain", None, 404),
        ("POST", "/admin/workers/p0/role", {"role": "boss"}, 400),
        ("POST", "/admin/workers/p0/role", {}, 400),
        ("POST", "/admin/workers/p0/role", b"decode", 400),
        ("POST", "/admin/workers/p0/role", {"role": "decode"}, 409),
        ("GET", "/admin/decisions?limit=0", None, 400),
        ("GET", "/admin/decisions?limit=-1", None, 400),
        ("GET", "/admin/decisions?limit=many", None, 400),
        ("GET", "/admin/decisions?limit=1001", None, 400),
        ("GET", "/admin/decisions?limit=%C2%B2", None, 400),
        ("GET", "/admin/decisions?limit=" + "9" * 5000, None, 400),
        ("PUT", "/admin/state", None, 405),
        ("GET", "/admin/workers", None, 405),
    ],
    ids=lambda value: str(value)[:40],
)
async def test_a_mistake_is_told_and_changes_nothing(method: str, path: str, body: Any, status: int) -> None:
    async with house(prefill=1, decode=1) as h:
        before = [(w["id"], w["role"], w["state"]) for w in (await admin(h, "GET", "/admin/state")).json()["workers"]]
        answer = await admin(h, method, path, body)
        assert answer.status == status
        assert answer.error["message"]
        after = [(w["id"], w["role"], w["state"]) for w in (await admin(h, "GET", "/admin/state")).json()["workers"]]
        assert after == before
        assert (await h.chat("n1")).text == told("n1")


async def test_decisions_come_newest_last_and_as_many_as_asked() -> None:
    async with house(prefill=1, decode=1) as h:
        for n in range(5):
            await h.chat(f"n{n}")
        everything = (await admin(h, "GET", "/admin/decisions")).json()["decisions"]
        assert len(everything) == 5
        ages = [decision["age_s"] for decision in everything]
        assert ages == sorted(ages, reverse=True)
        two = (await admin(h, "GET", "/admin/decisions?limit=2")).json()["decisions"]
        assert [decision["request"] for decision in two] == [decision["request"] for decision in everything[-2:]]
        last = two[-1]
        assert (last["choice"], last["why"]) == ("disaggregated", "pair_ready")
        assert (last["prefill"], last["decode"]) == ("p0", "d0")


async def test_a_worker_that_is_added_serves_and_one_that_is_removed_does_not() -> None:
    async with ScriptedEngine(Script(is_embedded=True)) as late, house(prefill=1, decode=1) as h:
        added = await admin(h, "POST", "/admin/workers", {"id": "late", "url": late.url + "/", "role": "decode"})
        assert (added.status, added.json()["state"]) == (201, "joining")
        await h.up("late")
        assert (await admin(h, "DELETE", "/admin/workers/d0")).json() == {"removed": "d0"}
        assert (await h.chat("n2")).headers["x-twinpool-decode"] == "late"
        state = (await admin(h, "GET", "/admin/state")).json()
        assert [worker["id"] for worker in state["workers"]] == ["p0", "late"]
        assert (await admin(h, "DELETE", "/admin/workers/late")).status == 200
        assert (await h.chat("n3")).headers["x-twinpool-path"] == "colocated"
        await until(lambda: late.running == 0)


async def test_a_worker_that_is_removed_finishes_what_it_runs() -> None:
    async with house(colocated=[Script(steps=asyncio.Semaphore(0)), Script()]) as h:
        asking = asyncio.create_task(h.chat("n4"))
        await until(lambda: h.c.running == 1)
        await admin(h, "DELETE", "/admin/workers/c0")
        assert (await h.chat("n5")).text == told("n5")
        for _ in range(100):
            h.c.script.steps.release()
        assert (await asking).text == told("n4")


async def test_a_role_that_is_allowed_is_taken() -> None:
    async with house(prefill=1, decode=1, allowed_roles=tuple(Role)) as h:
        changed = await admin(h, "POST", "/admin/workers/p0/role", {"role": "colocated"})
        assert (changed.status, changed.json()["role"]) == (200, "colocated")
        assert (await h.chat("n6")).headers["x-twinpool-path"] == "colocated"
        seen = h.p.pages["/twinpool/identity"]
        await until(lambda: h.p.pages["/twinpool/identity"] > seen + 2)
        assert h.controller.cluster["p0"].role is Role.COLOCATED, "a probe does not take it back"


async def test_the_state_shows_loads_handles_and_why_a_worker_is_not_up() -> None:
    async with house(prefill=1, decode=Script(slots=1, steps=asyncio.Semaphore(0))) as h:
        asking = [asyncio.create_task(h.chat(f"n{n}")) for n in range(2)]
        await until(lambda: h.d.running == 1 and h.controller.waiting_requests() == 1)
        await admin(h, "POST", "/admin/workers", {"id": "gone", "url": "http://127.0.0.1:1", "role": "decode"})
        await until(lambda: h.gateway._members.get("gone").failures)
        state = (await admin(h, "GET", "/admin/state")).json()
        workers = {worker["id"]: worker for worker in state["workers"]}
        assert state["requests"] == {"live": 2, "waiting": 1}
        assert workers["d0"]["sequences"] == 1
        assert workers["gone"]["state"] == "joining"
        assert workers["gone"]["reason"]
        assert state["gateway"]["models"] == ["scripted"]
        for _ in range(200):
            h.d.script.steps.release()
        await asyncio.gather(*asking)


async def test_what_has_not_joined_can_neither_drain_nor_change() -> None:
    async with house(prefill=1, decode=1) as h:
        await admin(h, "POST", "/admin/workers", {"id": "gone", "url": "http://127.0.0.1:1"})
        for path, body in (("role", {"role": "colocated"}), ("drain", None)):
            assert (await admin(h, "POST", f"/admin/workers/gone/{path}", body)).status == 409
