"""A worker in a process of its own, for tests, and what they ask it."""

import asyncio
import json
import os
import secrets
import subprocess
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

SECRET = "the fleet's"
MODEL = "smol"
PREFILL_LEG = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


class WorkerProcess:
    """Use it as a context: the process ends with it."""

    def __init__(self, model: Path, *, core: int, pass_fds: tuple[int, ...] = (), **settings: Any) -> None:
        cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [0]
        told = {
            "model_path": str(model),
            "model_name": MODEL,
            "cores": [cores[core % len(cores)]],
            "handoff_secret": SECRET,
            **settings,
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", "twinpool.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=pass_fds,
            text=True,
        )
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(told))
        self.process.stdin.close()

    def ready(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the worker did not start: {self.complaint()}"
        told: dict[str, Any] = json.loads(line)
        return told

    def complaint(self) -> str:
        assert self.process.stderr is not None
        self.process.wait(30)
        return self.process.stderr.read()

    def __enter__(self) -> "WorkerProcess":
        self.url: str = self.ready()["url"]
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        complaint = self.complaint()
        for stream in (self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()
        assert "Traceback" not in complaint, complaint


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    headers: dict[str, str]
    raw: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.raw)

    @property
    def code(self) -> str:
        return str(self.json["error"]["code"])

    @property
    def events(self) -> list[dict[str, Any]]:
        """Of a streamed answer; it must have ended as it should."""
        *events, done = self.raw.decode().removesuffix("\n\n").split("\n\n")
        assert done == "data: [DONE]", self.raw
        return [json.loads(event.removeprefix("data: ")) for event in events]


class Client:
    """Asks one worker."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self.session, self.url = session, url

    async def post(self, path: str, body: Any) -> Answer:
        async with self.session.post(self.url + path, json=body) as response:
            return Answer(response.status, {k.lower(): v for k, v in response.headers.items()}, await response.read())

    async def chat(self, content: str, **fields: Any) -> Answer:
        return await self.post("/v1/chat/completions", chat(content, **fields))

    async def text(self, prompt: Any, **fields: Any) -> Answer:
        return await self.post("/v1/completions", text(prompt, **fields))

    async def prefill(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """The handle."""
        leg = {**body, "stream": False, "max_tokens": 1, "kv_transfer_params": PREFILL_LEG}
        leg.pop("stream_options", None)
        answer = await self.post(path, leg)
        assert answer.status == 200, answer.raw
        handle: dict[str, Any] = answer.json["kv_transfer_params"]
        return handle

    async def get(self, path: str) -> Answer:
        async with self.session.get(self.url + path) as response:
            return Answer(response.status, {k.lower(): v for k, v in response.headers.items()}, await response.read())

    async def release(self, handle: dict[str, Any], signature: str | None = None) -> int:
        headers = {"x-twinpool-signature": signature or handle["twinpool_signature"]}
        url = f"{self.url}/v1/kv/{handle['remote_request_id']}"
        async with self.session.delete(url, headers=headers) as response:
            return response.status

    async def metric(self, name: str) -> float:
        """The sum of a metric's series whose line begins with the name."""
        lines = (await self.get("/metrics")).raw.decode().splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"twinpool_worker_{name}"))


def chat(content: str, **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": 12, **fields}


def text(prompt: Any, **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": prompt, "temperature": 0, "max_tokens": 12, **fields}


def fresh(topic: str, words: int = 0) -> str:
    """A prompt that no cache has: the nonce comes first. Filler of about 1.4 tokens a word behind it."""
    filler = " ".join(f"item {number} of the list," for number in range(words // 5))
    return f"[{secrets.token_hex(8)}] {filler} {topic}"


async def eventually(holds: Callable[[], Awaitable[bool]], within_s: float) -> float:
    """Waits until it holds; how long that took. Fails if it does not in time."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    while not await holds():
        assert loop.time() - began < within_s, f"not so after {within_s} s"
        await asyncio.sleep(0.01)
    return loop.time() - began
