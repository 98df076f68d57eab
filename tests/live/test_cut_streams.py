"""A stream whose worker is killed at a random token goes on: text, ids and usage are those of an unbroken one."""

import json
import os
import secrets
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import requests
from tests.live.service import process, worker_of
from tests.live.waiting import until

pytestmark = [pytest.mark.model, pytest.mark.timeout(180)]

CUTS = 6
TOKENS = 48


@dataclass
class Answer:
    text: str = ""
    ids: set[str] = field(default_factory=set)
    roles: int = 0
    finish: str | None = None
    usage: dict[str, Any] | None = None
    errors: list[Any] = field(default_factory=list)
    done: bool = False

    def add(self, line: str) -> None:
        if line == "data: [DONE]":
            self.done = True
        if not line.startswith("data: {"):
            return
        event = json.loads(line[6:])
        if "error" in event:
            self.errors.append(event["error"])
            return
        self.ids.add(event["id"])
        self.usage = event.get("usage") or self.usage
        for choice in event["choices"]:
            delta = choice.get("delta", {})
            self.roles += "role" in delta
            self.text += delta.get("content") or choice.get("text") or ""
            self.finish = choice.get("finish_reason") or self.finish


@pytest.fixture
def fragile(default_model: Path, tmp_path: Path) -> Iterator[dict[str, Any]]:
    """A service of its own, whose workers may be killed; it must end well all the same."""
    with process(tmp_path, "--model", str(default_model), "--log", str(tmp_path / "log")) as ready:
        yield ready


def ask(url: str, body: dict[str, Any], cut: Callable[[], None], *, at: int | None = None) -> Answer:
    """The streamed answer; `cut` is called when `at` events have come."""
    answer, events = Answer(), 0
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    with requests.post(url + path, json=body, timeout=60, stream=True) as response:
        assert response.status_code == 200
        for line in response.iter_lines(chunk_size=1, decode_unicode=True):
            answer.add(line)
            events += line.startswith("data: {")
            if events == at:
                at = None
                cut()
    return answer


def test_a_cut_stream_is_the_unbroken_one(fragile: dict[str, Any]) -> None:
    url, model = fragile["gateway"]["url"], fragile["gateway"]["models"][0]

    def workers() -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = requests.get(fragile["admin_url"] + "/admin/state", timeout=5).json()["workers"]
        return found

    def kill_the_writer() -> None:
        (writer,) = (worker for worker in workers() if worker["role"] == "decode")
        os.kill(worker_of(writer).pid, signal.SIGKILL)

    def all_are_back() -> bool:
        return all(worker["state"] == "ready" for worker in workers())

    for nth in range(CUTS):
        question = f"{secrets.token_hex(4)} Write a long letter about the {secrets.choice(['sea', 'wind', 'city'])}."
        body = {
            "model": model,
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": 0,
            "max_tokens": TOKENS,
            "ignore_eos": True,
            **({"messages": [{"role": "user", "content": question}]} if nth % 2 else {"prompt": question}),
        }
        broken = ask(url, body, kill_the_writer, at=1 + secrets.randbelow(TOKENS - 8))
        assert broken.errors == []
        assert broken.done
        assert (len(broken.ids), broken.roles) == (1, nth % 2)
        until(all_are_back, within_s=60)
        whole = ask(url, body, kill_the_writer)
        assert (broken.text, broken.finish, broken.usage) == (whole.text, whole.finish, whole.usage)
