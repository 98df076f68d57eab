"""Canaries: small handoffs of our own, which show that a pair of workers can be trusted with a client's.

    a prompt nobody has sent before ──► P: one token, its log-probabilities, a handle
                        the handle  ──► D: one token, its log-probabilities

P's own first token is what a colocated answer would begin with, so the two must agree: D's token must be among P's likeliest,
at the same log-probability within a tolerance. That D agrees does not yet show that KV moved, since an engine that lost it may
read the prompt again in silence: so D must also have computed one prompt token at most, or have counted bytes that came in.
"""

import asyncio
import ipaddress
import random
from collections.abc import Callable
from time import monotonic
from typing import Any, NamedTuple

import msgspec

from twinpool.config import Routing, Timeouts
from twinpool.core import events as on
from twinpool.core.model import Failure, WorkerFacts
from twinpool.engines.answers import failure_of_loss, failure_of_status
from twinpool.engines.metrics import EngineMetrics
from twinpool.engines.probe import ProbeError
from twinpool.gateway.guard import Scrape
from twinpool.gateway.place import Place
from twinpool.handoff import nixl
from twinpool.handoff.body import Fields, take_apart
from twinpool.http1 import Pool, Response, UpstreamLost

_PATH = "/v1/completions"
_WORDS = tuple(
    "apple river stone cloud tiger paper green seven music bread horse light winter garden silver ocean candle window coffee "  # noqa: SIM905
    "forest bridge summer yellow rabbit pencil mirror castle orange doctor island".split()
)
_LIST_WORDS = 96  # some two hundred tokens: several blocks of KV, a few milliseconds of an engine's time
_REPEATED_WORDS = 12
_TOP = 5
_HANDSHAKE_S = 300.0  # the first one of two stock engines may take minutes on a busy machine
_COUNTED_WITHIN_S = 5.0  # an engine publishes what it moved some steps later
_POLL_S = 0.2
_NOT_TRIED = frozenset({Failure.BUSY, Failure.UNREACHABLE, Failure.BROKEN, Failure.TIMED_OUT})


class _FailedError(Exception):
    """Why the canary did not arrive; whether it set out at all."""

    def __init__(self, why: str, *, was_tried: bool = True) -> None:
        super().__init__(why)
        self.was_tried = was_tried


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Logprobs(msgspec.Struct):
    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] | None = None


class _Choice(msgspec.Struct):
    logprobs: _Logprobs | None = None


class _Reach(msgspec.Struct):
    remote_host: Any = None


class _Answer(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None


class _FirstToken(NamedTuple):
    token: str
    logprob: float
    top: dict[str, float]


class _Moved(NamedTuple):
    bytes: int | None
    seconds: float | None


class Canaries:
    """Those under way, one task each; each ends with one event."""

    def __init__(
        self, pool: Pool, rules: Routing, timeouts: Timeouts, feed: Callable[[on.Event], None], scrape: Scrape
    ) -> None:
        self._pool = pool
        self._rules = rules
        self._timeouts = timeouts
        self._feed = feed
        self._scrape = scrape
        self._words = random.SystemRandom()
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, canary: int, prefill: Place, decode: Place) -> None:
        task = asyncio.get_running_loop().create_task(self._fly(canary, prefill, decode))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _fly(self, canary: int, prefill: Place, decode: Place) -> None:
        began = monotonic()
        try:
            moved = await self._hand_over(prefill, decode)
        except _FailedError as failed:
            at = monotonic()
            event: on.Event = on.HandoffNotProved(
                at=at, canary=canary, took_s=at - began, why=str(failed), was_tried=failed.was_tried
            )
        else:
            at = monotonic()
            event = on.HandoffProved(at=at, canary=canary, took_s=at - began, moved_bytes=moved.bytes, moved_s=moved.seconds)
        self._feed(event)

    async def _hand_over(self, prefill: Place, decode: Place) -> _Moved:
        before = await self._counted(decode)
        fields = self._prompt(prefill.facts, decode.facts)
        first = await self._send("prefill", prefill, nixl.prefill_body(fields), self._timeouts.prefill_s)
        granted = monotonic()
        try:
            handle = nixl.read_prefill_answer(first.body).handle
        except nixl.HandoffMissingError as missing:
            raise _FailedError(f"{missing}: is its connector set up?") from missing
        _check_reach(handle, prefill.origin.host, decode.origin.host)
        patience_s = self._timeouts.first_byte_s if decode.facts.vouches else _HANDSHAKE_S
        second = await self._send("decode", decode, nixl.decode_body(fields, handle), patience_s)
        took_s = monotonic() - granted
        self._check_lease(prefill.facts, took_s)
        ours, theirs = _read(second), _read(first)
        self._check_answer(theirs, ours)
        return await self._check_moved(decode, second, ours, before)

    def _prompt(self, prefill: WorkerFacts, decode: WorkerFacts) -> Fields:
        words = self._words.choices(_WORDS, k=_LIST_WORDS)
        text = f"{' '.join(words)}. And again: {' '.join(words[:_REPEATED_WORDS])}"
        bases = [m for m in prefill.models if m in decode.models and m not in prefill.loras]
        model = bases[0] if bases else prefill.models[0]
        body = {"model": model, "prompt": text, "max_tokens": 1, "temperature": 0, "logprobs": _TOP}
        return take_apart(msgspec.json.encode(body))

    async def _send(self, leg: str, place: Place, body: bytes, timeout_s: float) -> Response:
        headers = [(b"content-type", b"application/json")]
        try:
            answer = await self._pool.fetch(place.origin, "POST", _PATH, headers, body, timeout_s=timeout_s)
        except UpstreamLost as lost:
            failure = failure_of_loss(lost)
            has_hung = leg == "decode" and failure is Failure.TIMED_OUT  # as between two whose fabric broke
            was_tried = has_hung or failure not in _NOT_TRIED
            raise _FailedError(f"the {leg} leg of a canary: {lost}", was_tried=was_tried) from lost
        if answer.status != 200:
            failure = failure_of_status(answer.status, answer.body)
            said = answer.body[:200].decode("utf-8", "replace")
            why = f"the {leg} leg of a canary was answered {answer.status}: {said}"
            raise _FailedError(why, was_tried=failure not in _NOT_TRIED)
        return answer

    def _check_lease(self, prefill: WorkerFacts, took_s: float) -> None:
        lease_s = prefill.lease_s if prefill.lease_s is not None else self._rules.lease_s
        if not prefill.vouches and took_s > lease_s - self._rules.lease_margin_s:
            raise _FailedError(f"its handoff took {took_s:.1f} s, too near the {lease_s:g} s of the lease")

    def _check_answer(self, theirs: _Answer, ours: _Answer) -> None:
        of_prefill, of_decode = _first_token(theirs), _first_token(ours)
        expected = of_prefill.top.get(of_decode.token, of_prefill.logprob if of_prefill.token == of_decode.token else None)
        if expected is None:
            raise _FailedError(f"decode began with {of_decode.token!r}, which prefill does not have among its likeliest")
        if abs(expected - of_decode.logprob) > self._rules.canary_tolerance:
            raise _FailedError(
                f"the first token's log-probability is {of_decode.logprob:.3f} on decode and {expected:.3f} on prefill"
            )
        counts = [answer.usage.prompt_tokens for answer in (theirs, ours) if answer.usage is not None]
        if len(set(counts)) > 1:
            raise _FailedError(f"they count the same prompt differently: {counts[0]} and {counts[1]} tokens")

    async def _check_moved(self, decode: Place, answer: Response, said: _Answer, before: EngineMetrics | None) -> _Moved:
        told = answer.header(b"x-twinpool-handoff-bytes")
        if told is not None and told.isdigit() and int(told) > 0:
            return _Moved(int(told), _number(answer.header(b"x-twinpool-handoff-s")))
        details = said.usage.prompt_tokens_details if said.usage is not None else None
        is_computed = details is not None and details.cached_tokens is not None
        has_moved = (
            said.usage is not None
            and details is not None
            and details.cached_tokens is not None
            and said.usage.prompt_tokens - details.cached_tokens <= 1
        )
        moved = await self._count_moved(decode, before)
        if moved is not None:
            return moved
        if has_moved:
            return _Moved(None, None)
        if is_computed or before is not None:
            raise _FailedError("decode answered rightly, but no KV reached it: it read the prompt itself")
        raise _FailedError("nothing shows whether KV moved: decode tells neither what its connector moved nor cached tokens")

    async def _count_moved(self, decode: Place, before: EngineMetrics | None) -> _Moved | None:
        """What D has counted since; None where it counts nothing, or nothing more within a while."""
        if before is None or before.handoff_bytes is None:
            return None
        deadline = monotonic() + _COUNTED_WITHIN_S
        while monotonic() < deadline:
            now = await self._counted(decode)
            if now is not None and now.handoff_bytes is not None and now.handoff_bytes > before.handoff_bytes:
                is_alone = (now.handoffs or 0) - (before.handoffs or 0) == 1
                seconds = (now.handoff_seconds or 0.0) - (before.handoff_seconds or 0.0)
                return _Moved(now.handoff_bytes - before.handoff_bytes, seconds) if is_alone else _Moved(None, None)
            await asyncio.sleep(_POLL_S)
        return None

    async def _counted(self, place: Place) -> EngineMetrics | None:
        if not place.facts.has_metrics:
            return None
        try:
            return await self._scrape(place.facts.worker)
        except (ProbeError, KeyError):
            return None


def _check_reach(handle: msgspec.Raw, prefill: str, decode: str) -> None:
    """A prefill engine that tells its peers to come to their own loopback: vLLM's default for its side channel."""
    told = msgspec.json.decode(handle, type=_Reach).remote_host
    if isinstance(told, str) and _is_loopback(told) and not _is_loopback(decode) and prefill != decode:
        raise _FailedError(
            f"prefill tells others to fetch its KV at {told}, which is their own machine: set VLLM_NIXL_SIDE_CHANNEL_HOST there"
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _read(answer: Response) -> _Answer:
    try:
        return msgspec.json.decode(answer.body, type=_Answer)
    except (msgspec.DecodeError, UnicodeDecodeError) as broken:
        raise _FailedError(f"the answer to a canary is not understood: {broken}") from broken


def _first_token(answer: _Answer) -> _FirstToken:
    logprobs = answer.choices[0].logprobs if answer.choices else None
    if logprobs is None or not logprobs.tokens or not logprobs.token_logprobs or logprobs.token_logprobs[0] is None:
        raise _FailedError("the answer to a canary has no log-probabilities")
    top = (logprobs.top_logprobs or [None])[0] or {}
    return _FirstToken(logprobs.tokens[0], logprobs.token_logprobs[0], top)


def _number(value: bytes | None) -> float | None:
    try:
        return None if value is None else float(value)
    except ValueError:
        return None
