"""Stock vLLM as it is, one process a name: started with the flags of vLLM's own documentation, watched by its own routes."""

import json
import os
import random
import signal
import socket
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from tests.live.scrape import Scrape
from tests.live.waiting import until
from tests.vllm import environment

MODEL = "SmolLM2-135M-Instruct"
START_S = 400.0  # 40 to 60 s on two idle cores; two at once on a busy machine take minutes
ANSWER_S = 300.0  # the first prompt after a start takes a minute on a busy machine

BLOCK_TOKENS = 128  # vLLM's own choice on a CPU
BLOCKS = 32
"""Few, so that memory that was freed is soon used again, and what is held shows."""
CONTEXT_TOKENS = 2048
STEP_TOKENS = 256  # longer prompts take several steps: an engine says what it does at the end of each


@dataclass
class Engine:
    """One vLLM on loopback. `kv_role` is kv_both: it reads prompts for others and writes from others' KV."""

    name: str
    folder: Path
    lease_s: int
    dtype: str
    port: int
    side_channel_port: int
    connector: bool = True
    _process: "subprocess.Popen[bytes] | None" = field(default=None, init=False)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> Path:
        return self.folder / f"{self.name}.log"

    def start(self) -> None:
        """Begin to start; `wait_until_up` waits for it."""
        with self.log.open("ab") as log:
            self._process = self._spawn(log)

    def _spawn(self, log: BinaryIO) -> "subprocess.Popen[bytes]":
        handed_down = {
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            # One thread, on whichever core is free: two engines share a machine of two cores with all that asks them.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
            # The model runs within the engine's process: a worker of its own spins on a core while it waits for the next step.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(self.side_channel_port),
            "UCX_TLS": "tcp,sm,self",
        }
        handoff = {
            "kv_connector": "NixlConnector",
            "kv_role": "kv_both",
            "kv_buffer_device": "cpu",
            "kv_connector_extra_config": {"kv_lease_duration": self.lease_s},
        }
        command = [environment.program("vllm"), "serve", environment.weights(), "--served-model-name", MODEL]
        command += ["--host", "127.0.0.1", "--port", str(self.port), "--dtype", self.dtype, "--enforce-eager"]
        command += ["--max-model-len", str(CONTEXT_TOKENS), "--num-gpu-blocks-override", str(BLOCKS)]
        command += ["--max-num-batched-tokens", str(STEP_TOKENS), "--distributed-executor-backend", "uni"]
        command += ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
        if self.connector:
            command += ["--kv-transfer-config", json.dumps(handoff)]
        return subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | handed_down, start_new_session=True)

    def wait_until_up(self) -> None:
        """Until it answers; fails with its last words when it ended before."""
        process = self._running()

        def is_up() -> bool:
            assert process.poll() is None, f"{self.name} ended with {process.returncode}:\n{self.last_words()}"
            with suppress(OSError):
                return ask(f"{self.url}/health", timeout_s=5.0)[0] == 200
            return False

        until(is_up, within_s=START_S, story=self.last_words)

    def warm_up(self) -> None:
        """The first prompt of each shape costs what no later one does."""
        status, answer = ask(f"{self.url}/v1/completions", {"model": MODEL, "prompt": "One, two,", "max_tokens": 4})
        assert status == 200, answer

    def kill(self) -> None:
        """``kill -9`` of the engine with all its processes, as the machine's own killer does it."""
        process = self._running()
        for pid in [process.pid, *_descendants(process.pid)]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()

    def stop(self) -> None:
        """End it in order; what will not end in time is killed."""
        if self._process is None or self._process.poll() is not None:
            return
        family = _descendants(self._process.pid)
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(20)
        for pid in [self._process.pid, *family]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()

    def scrape(self) -> Scrape:
        return Scrape(self.url)

    def kv_usage(self) -> float:
        """The share of its KV memory that is in use, held for others included."""
        return self.scrape().total("vllm:kv_cache_usage_perc")

    def moved_bytes(self) -> float:
        """What NIXL has brought here so far."""
        return self.scrape().total("vllm:nixl_bytes_transferred_sum")

    def expired(self) -> float:
        """Handles whose lease ran out here."""
        return self.scrape().total("vllm:nixl_num_kv_expired_reqs_total")

    def is_idle(self) -> bool:
        """It computes nothing, nothing waits and nothing is held."""
        page = self.scrape()
        names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        return not any(page.total(f"vllm:{name}") for name in names)

    def last_words(self) -> str:
        return self.log.read_text(errors="replace")[-4000:]

    def _running(self) -> "subprocess.Popen[bytes]":
        assert self._process is not None, f"{self.name} was not started"
        return self._process


@contextmanager
def two_engines(folder: Path, *, lease_s: int, dtype: str = "float32") -> Iterator[tuple[Engine, Engine]]:
    """Two engines alike, up and warm, until the end of the block.

    In float32 log-probabilities of the two ways to an answer differ in the fifth decimal; in bfloat16 by up to 0.15.
    """
    ports = free_ports(4)
    engines = (
        Engine("a", folder, lease_s, dtype, ports[0], ports[1]),
        Engine("b", folder, lease_s, dtype, ports[2], ports[3]),
    )
    try:
        for engine in engines:
            engine.start()
        for engine in engines:
            engine.wait_until_up()
            engine.warm_up()
        yield engines
    finally:
        for engine in engines:
            engine.stop()


def kv_bytes_a_token(dtype: str = "float32") -> int:
    """Keys and values of every layer, from the model's configuration."""
    config = json.loads((environment.weights() / "config.json").read_text())
    item_bytes = {"float32": 4, "bfloat16": 2}[dtype]
    return int(2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"] * item_bytes)


def ask(url: str, body: dict[str, Any] | None = None, *, timeout_s: float = ANSWER_S) -> tuple[int, Any]:
    """Status and content: what JSON says, or the bytes where it is none."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"})  # noqa: S310  # our own, on loopback
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:  # noqa: S310
            status, content = answer.status, answer.read()
    except urllib.error.HTTPError as refused:
        with refused:
            status, content = refused.code, refused.read()
    try:
        return status, json.loads(content)
    except ValueError:
        return status, content


def free_ports(count: int) -> list[int]:
    """Below those that the system gives to outgoing connections: an engine takes some of its ports half a minute later."""
    found: list[int] = []
    for port in random.SystemRandom().sample(range(20000, 32000), 1000):
        if len(found) == count:
            break
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            found.append(port)
    return found


def _descendants(pid: int) -> list[int]:
    """All processes below this one. vLLM's workers are found only while their parents live."""
    children: dict[int, list[int]] = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parent = int(status.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(status.parent.name))
    found = list(children.get(pid, []))
    for child in found:
        found.extend(children.get(child, []))
    return found
