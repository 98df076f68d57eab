"""Twinpool before the two engines, attached to what already runs: either engine may take either role."""

import json
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.live.scrape import Scrape
from tests.live.service import process
from tests.live.waiting import until
from tests.vllm.engine import MODEL, Engine, ask
from tests.vllm.relay import Relay, relay

PROVED_S = 120.0  # the first handshake of a pair takes seconds; on a busy machine its canary is late, and another one flies


@dataclass(frozen=True)
class Front:
    """The gateway, its engines, and the slow network that may lie before each."""

    url: str
    admin_url: str
    engines: dict[str, Engine]
    relays: dict[str, Relay]
    journal: Path

    def complete(self, **fields: Any) -> "Answer":
        """A completion, greedy unless told otherwise."""
        return self._ask("/v1/completions", fields)

    def chat(self, text: str, **fields: Any) -> "Answer":
        return self._ask("/v1/chat/completions", {"messages": [{"role": "user", "content": text}], **fields})

    def _ask(self, path: str, fields: dict[str, Any]) -> "Answer":
        body = json.dumps({"model": MODEL, "temperature": 0, **fields}).encode()
        request = urllib.request.Request(self.url + path, body, {"content-type": "application/json"})  # noqa: S310
        with urllib.request.urlopen(request, timeout=300) as answer:  # noqa: S310  # our own, on loopback
            headers = {name.lower(): value for name, value in answer.headers.items()}
            return Answer(json.load(answer), headers)

    def state(self) -> dict[str, Any]:
        status, state = ask(f"{self.admin_url}/admin/state", timeout_s=10)
        assert status == 200, state
        found: dict[str, Any] = state
        return found

    def worker(self, name: str) -> dict[str, Any]:
        url = self.relays[name].url
        return next(worker for worker in self.state()["workers"] if worker["url"] == url)

    def name_of(self, worker_id: str) -> str:
        """Which engine a worker's id means."""
        (url,) = (worker["url"] for worker in self.state()["workers"] if worker["id"] == worker_id)
        return next(name for name, between in self.relays.items() if between.url == url)

    def name_of_decode(self) -> str:
        """The engine whose role it is now to write."""
        (name,) = (name for name in self.engines if self.worker(name)["role"] == "decode")
        return name

    def set_role(self, name: str, role: str) -> None:
        status, answer = ask(f"{self.admin_url}/admin/workers/{self.worker(name)['id']}/role", {"role": role}, timeout_s=10)
        assert status == 200, answer

    def wait_until_proved(self, *, pairs: int = 2) -> None:
        until(lambda: self.state()["pairs"]["proved"] == pairs, within_s=PROVED_S, story=lambda: self.state()["pairs"])

    def at_work(self) -> dict[str, float]:
        """Whatever runs, waits or is held, as the gateway and each engine count it."""
        page = Scrape(self.url)
        found = {name: page.total(name) for name in ("twinpool_requests_live", "twinpool_kv_handles")}
        for name, engine in self.engines.items():
            scrape = engine.scrape()
            for series in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
                found[f"{name} {series}"] = scrape.total(f"vllm:{series}")
        return {name: value for name, value in found.items() if value}

    def wait_until_idle(self, within_s: float) -> float:
        return until(lambda: not self.at_work(), within_s=within_s, story=self.at_work)


@dataclass(frozen=True)
class Answer:
    content: dict[str, Any]
    headers: dict[str, str]

    @property
    def path(self) -> str:
        return self.headers["x-twinpool-path"]

    @property
    def text(self) -> str:
        (choice,) = self.content["choices"]
        text: str = choice["text"] if "text" in choice else choice["message"]["content"]
        return text


@contextmanager
def front(folder: Path, prefill: Engine, decode: Engine, *, lease_s: int) -> Iterator[Front]:
    """Until the end of the block; its pairs are proved when it begins."""
    folder.mkdir(exist_ok=True)
    with relay(prefill.port) as before_prefill, relay(decode.port) as before_decode:
        config = folder / "twinpool.toml"
        config.write_text(_CONFIG.format(lease_s=lease_s, prefill=before_prefill.url, decode=before_decode.url))
        journal = folder / "journal.jsonl"
        with process(folder, "--config", str(config), "--expose-route", "--journal", str(journal)) as ready:
            behind = Front(
                ready["gateway"]["url"],
                ready["admin_url"],
                {prefill.name: prefill, decode.name: decode},
                {prefill.name: before_prefill, decode.name: before_decode},
                journal,
            )
            behind.wait_until_proved()
            yield behind


_CONFIG = """
[routing]
lease_s = {lease_s}
canary_interval_s = 3600   # tests count what was moved, for themselves alone
canary_idle_s = 3600
canary_share = 0.5        # on a CPU a canary takes seconds, and the other direction waits a hundred times as long

[[workers]]
url = "{prefill}"
role = "prefill"
allowed_roles = ["prefill", "decode"]

[[workers]]
url = "{decode}"
role = "decode"
allowed_roles = ["prefill", "decode"]
"""
