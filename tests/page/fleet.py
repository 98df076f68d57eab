"""Scripted engines behind a real gateway, all of them processes of their own, for browsers to look at."""

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests
from tests.live.scripted_process import scripted_process
from tests.live.service import process

_ALLOWED = {"prefill": ["prefill", "decode"], "decode": ["prefill", "decode"], "colocated": ["colocated"]}


@dataclass(frozen=True)
class Fleet:
    url: str
    admin_url: str
    model: str

    def state(self) -> dict[str, Any]:
        return dict(requests.get(f"{self.admin_url}/admin/state", timeout=10).json())

    def ask(self, words: int = 20, max_tokens: int = 8) -> None:
        """A streamed request to its end; the prompt has so many tokens, and one or two more."""
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": " ".join(["word"] * words)}],
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        answer = requests.post(f"{self.url}/v1/chat/completions", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        assert answer.text.rstrip().endswith("[DONE]")

    def give_role(self, worker: str, role: str) -> None:
        answer = requests.post(f"{self.admin_url}/admin/workers/{worker}/role", json={"role": role}, timeout=10)
        assert answer.status_code == 200, answer.text


@contextmanager
def engines(*roles: str, **script: Any) -> Iterator[list[tuple[str, str]]]:
    """Role and URL of each."""
    with ExitStack() as stack:
        order = {"is_embedded": True, **script}
        yield [(role, stack.enter_context(scripted_process(**order))) for role in roles]


@contextmanager
def gateway(folder: Path, workers: list[tuple[str, str]], *options: str) -> Iterator[Fleet]:
    """`twinpool serve` before them; it must end well."""
    file = folder / "twinpool.toml"
    file.write_text(
        "\n".join(
            f"[[workers]]\nurl = {json.dumps(url)}\nrole = {json.dumps(role)}\nallowed_roles = {json.dumps(_ALLOWED[role])}"
            for role, url in workers
        )
    )
    with process(folder, "--config", str(file), *options) as ready:
        yield Fleet(ready["gateway"]["url"], ready["admin_url"], (ready["gateway"]["models"] or [""])[0])
