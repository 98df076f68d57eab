"""A wrong answer under HTTP 200, and how it does not come about: the same two stock vLLM engines behind two routers.

    P, reads prompts ◄────── vllm-router | Twinpool ─────── late ───────► D, writes answers
    │  its lease on the KV ends after 6 s; other prompts are read into that memory     ▲
    └────────────────────────── KV, whatever it is by then ────────────────────────────┘

No engine is changed and none fails: one decode leg is late, as on a busy network or behind a slow first handshake. Prints what
one engine alone answers, what the client of each router got, what P counted, and what Twinpool's journal says.

    python -m demos.corruption [--json FILE]
"""

import argparse
import contextlib
import json
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from tests.live import prompts
from tests.live.waiting import until
from tests.vllm import environment
from tests.vllm.engine import MODEL, Engine, ask, free_ports, two_engines
from tests.vllm.late import arrive_late
from tests.vllm.relay import Relay, relay
from tests.vllm.service import Front, front

from twinpool.core import commands as do
from twinpool.core import events as on
from twinpool.core.journal import Step

LEASE_S = 6
QUESTION_TOKENS = 300  # more than one block of KV
ROUTER_START_S = 120.0
HANDSHAKE_S = 120.0


@dataclass
class Arm:
    """One router's part: what its client got, what it should have been, and how far P's counters rose."""

    router: str
    right: str
    status: int = 0
    answer: str = ""
    decode_leg_late_by_s: float = 0.0
    took_s: float = 0.0
    leases_ended: int = 0
    read_after_the_end: int = 0
    journal: list[str] = field(default_factory=list)


def main() -> None:
    parser = argparse.ArgumentParser(description="A wrong answer under HTTP 200, and how it does not come about.")
    parser.add_argument("--json", type=Path, metavar="FILE", help="what was found, for programs")
    wanted = parser.parse_args()
    if reason := environment.cannot_run():
        raise SystemExit(f"This takes two real vLLM engines. {reason}")
    environment.build()
    with tempfile.TemporaryDirectory() as scratch:
        print("Starting two vLLM engines: a minute or two")
        with two_engines(Path(scratch), lease_s=LEASE_S) as (prefill, decode):
            arms = [behind_vllm_router(Path(scratch), prefill, decode), behind_twinpool(Path(scratch), prefill, decode)]
    for arm in arms:
        show(arm)
    if wanted.json:
        wanted.json.write_text(json.dumps([asdict(arm) for arm in arms], indent=1))
    if arms[1].answer != arms[1].right:
        raise SystemExit("Twinpool's answer is not the right one")


def behind_vllm_router(folder: Path, prefill: Engine, decode: Engine) -> Arm:
    with relay(decode.port) as network, vllm_router(folder, prefill.url, network.url) as url:
        return put_to_the_test("vllm-router", url, network, prefill)


def behind_twinpool(folder: Path, prefill: Engine, decode: Engine) -> Arm:
    with front(folder / "twinpool", prefill, decode, lease_s=LEASE_S) as gateway:
        arm = put_to_the_test("Twinpool", gateway.url, gateway.relays[decode.name], prefill)
        arm.journal = list(told(gateway))
        return arm


def put_to_the_test(router: str, url: str, network: Relay, prefill: Engine) -> Arm:
    """One question whose decode leg is late."""
    print(f"Asking {router}")
    warm = {"messages": [{"role": "user", "content": prompts.text(20)}], "max_tokens": 4}
    # The pair shakes hands, so that lateness is the network's alone; a first handshake may outlast so short a lease.
    until(lambda: chat(url, warm)[0] == 200, within_s=HANDSHAKE_S)
    question = ask_about(prompts.text(QUESTION_TOKENS))
    _, right = chat(prefill.url, question | {"cache_salt": "asked of one engine alone"})
    arm = Arm(router, right=text_of(right))
    ended, late = counted(prefill)
    with ThreadPoolExecutor(1) as clients:
        began = time.monotonic()
        asking = clients.submit(chat, url, question)
        arrive_late(network, prefill)
        arm.decode_leg_late_by_s = round(time.monotonic() - began, 1)
        arm.status, answer = asking.result()
        arm.took_s = round(time.monotonic() - began, 1)
    arm.answer = text_of(answer) if arm.status == 200 else str(answer)
    # An engine that holds nothing sleeps, and looks at what its readers told it when the next prompt comes.
    until(
        lambda: chat(prefill.url, warm)[0] == 200 and counted(prefill)[1] > late,
        within_s=20,
        story=lambda: (counted(prefill), arm),
    )
    rose = [int(now - before) for now, before in zip(counted(prefill), (ended, late), strict=True)]
    arm.leases_ended, arm.read_after_the_end = rose
    return arm


def ask_about(note: str) -> dict[str, Any]:
    """A question with one right answer, after a note that fills some blocks of KV and is new each time."""
    shots = [("Italy", "Rome"), ("Spain", "Madrid"), ("Germany", "Berlin")]
    messages = [{"role": "system", "content": f"{note}\nYou answer with one word."}]
    for country, city in shots:
        messages += [{"role": "user", "content": f"What is the capital of {country}?"}, {"role": "assistant", "content": city}]
    return {"messages": [*messages, {"role": "user", "content": "What is the capital of France?"}], "max_tokens": 16}


def chat(url: str, fields: dict[str, Any]) -> tuple[int, Any]:
    return ask(f"{url}/v1/chat/completions", {"model": MODEL, "temperature": 0, **fields})


def text_of(answer: dict[str, Any]) -> str:
    text: str = answer["choices"][0]["message"]["content"]
    return text


def counted(prefill: Engine) -> tuple[float, float]:
    """How many leases ended there before they were read, and how many reads came after that."""
    page = prefill.scrape()
    names = ("num_kv_expired_reqs", "num_notifications_after_expiry")
    ended, late = (page.total(f"vllm:nixl_{name}_total") for name in names)
    return ended, late


def told(gateway: Front) -> Iterator[str]:
    """What the journal says of the request that was asked last, in words."""
    lines = gateway.journal.read_bytes().split(b"\n")[1:-1]
    steps = [msgspec.json.decode(line, type=Step) for line in lines]
    arrived = [step.event for step in steps if isinstance(step.event, on.RequestArrived)][-1]
    for step in steps:
        event = step.event
        if getattr(event, "request", None) != arrived.request and not any(_is_of(arrived.request, c) for c in step.commands):
            continue
        at = f"{event.at - arrived.at:6.1f} s"
        if isinstance(event, on.PrefillFinished):
            yield f"{at}  attempt {event.attempt}: prefill has read {event.prompt_tokens} tokens"
        elif isinstance(event, on.LegFailed):
            yield f"{at}  attempt {event.attempt}: the {event.leg} leg failed: {event.failure}"
        elif isinstance(event, on.RequestFinished):
            yield f"{at}  attempt {event.attempt}: the answer went out"
        for command in step.commands:
            if isinstance(command, do.RecordDecision) and command.request == arrived.request:
                decision = command.decision
                yield f"{at}  attempt {command.attempt}: {decision.choice}, because {decision.why}"


def _is_of(request: str, command: do.Command) -> bool:
    return isinstance(command, do.RecordDecision) and command.request == request


def show(arm: Arm) -> None:
    verdict = "right" if arm.answer == arm.right else "WRONG"
    print(f"\n{arm.router}: HTTP {arm.status}, {verdict}")
    print(f"  one engine alone  {arm.right!r}")
    print(f"  its client got    {arm.answer!r}")
    print(f"  P counted         {arm.leases_ended} leases ended, {arm.read_after_the_end} reads after the end")
    for line in arm.journal:
        print(f"  journal {line}")


@contextlib.contextmanager
def vllm_router(folder: Path, prefill: str, decode: str) -> Iterator[str]:
    """vLLM's own router as its README starts it for prefill and decode with NIXL; gives its URL."""
    port, metrics_port = free_ports(2)
    command: list[str | Path] = [environment.program("vllm-router"), "--vllm-pd-disaggregation", "--kv-connector", "nixl"]
    command += ["--prefill", prefill, "--decode", decode, "--host", "127.0.0.1", "--port", str(port)]
    command += ["--prometheus-port", str(metrics_port)]
    url = f"http://127.0.0.1:{port}"
    log = folder / "vllm-router.log"
    with log.open("wb") as words, subprocess.Popen(command, stdout=words, stderr=words) as running:
        try:
            until(_answers(url, running, log), within_s=ROUTER_START_S)
            yield url
        finally:
            running.kill()


def _answers(url: str, running: "subprocess.Popen[bytes]", log: Path) -> Callable[[], bool]:
    def is_up() -> bool:
        assert running.poll() is None, log.read_text()
        with contextlib.suppress(OSError):
            return ask(f"{url}/health", timeout_s=5.0)[0] == 200
        return False

    return is_up


if __name__ == "__main__":
    main()
