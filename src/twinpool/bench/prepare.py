"""Before a load: does the service answer, what does it take, and how many tokens does it count for a prompt?"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, replace

from twinpool.bench.answer import Failed, StreamedAnswer, Usage
from twinpool.bench.load import body_of, exchange
from twinpool.bench.prompts import CYCLE_WORDS, NONCE_WORDS, Prompts, fit, with_nonce
from twinpool.bench.target import Target, complaint, find_model
from twinpool.errors import UserError
from twinpool.http1 import Deadlines, Pool

CALIBRATION_WORDS = (NONCE_WORDS, NONCE_WORDS + 2 * CYCLE_WORDS)
"""Lengths whose tokens are counted: few, since a service under test may be slow; apart by whole cycles of the filler, and with
the same nonce, so that a line through both is right at any length."""

_ENGINE_FIELDS: Mapping[str, object] = {"ignore_eos": True, "temperature": 0}
_PLAIN_FIELDS: Mapping[str, object] = {"temperature": 0}
"""For services that refuse fields they do not know: their answers may be shorter than was asked."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A service that was seen to answer. `notes` are sentences for whoever reads the figures."""

    target: Target
    prompts: Prompts
    fields: dict[str, object]
    has_usage: bool
    notes: tuple[str, ...]


async def prepare(
    pool: Pool, target: Target, model: str | None, *, timeout_s: float, length_divisor: float = 1.0, needs_usage: bool = True
) -> Prepared:
    """Ask a few short questions; `UserError` in one line for each thing that can be wrong."""
    target = replace(target, model=await find_model(pool, target, model))
    prompts = Prompts(length_divisor=length_divisor)
    nonce = prompts.nonce()
    notes: list[str] = []
    fields = dict(_ENGINE_FIELDS)
    answer = await _question(pool, target, with_nonce(nonce, CALIBRATION_WORDS[0]), fields, timeout_s)
    if answer.status in (400, 422):
        fields = dict(_PLAIN_FIELDS)
        answer = await _question(pool, target, with_nonce(nonce, CALIBRATION_WORDS[0]), fields, timeout_s)
        notes.append("the service does not take ignore_eos: answers end when the model wants, and may be shorter than asked")
    first = _usage(target, answer, needs_usage=needs_usage)
    if first is None:
        notes.append("the service tells no usage: tokens are taken to be four characters of a prompt, one piece of an answer")
        return Prepared(target, Prompts(tokens_per_word=1.6, length_divisor=length_divisor), fields, False, tuple(notes))
    counts = [(CALIBRATION_WORDS[0], first.prompt_tokens)]
    for words in CALIBRATION_WORDS[1:]:
        answer = await _question(pool, target, with_nonce(nonce, words), fields, timeout_s)
        counted = _usage(target, answer, needs_usage=True)
        if counted is not None:
            counts.append((words, counted.prompt_tokens))
    (few, few_tokens), (many, many_tokens) = counts[0], counts[-1]
    if many_tokens <= few_tokens:
        raise UserError(
            f"{target.url} counts {few_tokens:,} prompt tokens for {few} words and {many_tokens:,} for {many}: "
            "its usage is wrong, so prompts cannot be made as long as asked. Measure an engine that counts"
        )
    base_tokens, rate = fit(counts)
    prompts = Prompts(base_tokens=base_tokens, tokens_per_word=rate, length_divisor=length_divisor)
    return Prepared(target, prompts, fields, True, tuple(notes))


async def _question(pool: Pool, target: Target, text: str, fields: dict[str, object], timeout_s: float) -> StreamedAnswer:
    answer = StreamedAnswer(asyncio.get_running_loop().create_future())
    asked = {"model": target.model, "stream": True, "stream_options": {"include_usage": True}, **fields}
    deadlines = Deadlines(connect_s=min(10.0, timeout_s), first_byte_s=timeout_s, idle_s=timeout_s)
    try:
        async with asyncio.timeout(timeout_s):
            await exchange(pool, target, body_of(target, text, 2, asked), answer, deadlines)
    except TimeoutError:
        answer.lose(Failed.TIMED_OUT, f"no whole answer within {timeout_s:g} s")
    return answer


def _usage(target: Target, answer: StreamedAnswer, *, needs_usage: bool) -> Usage | None:
    """What the answer counted; `UserError` where there was no answer to be had."""
    if answer.status not in (0, 200):
        raise complaint(target, answer.status, answer.headers, answer.message.partition(" ")[2])
    if answer.failure is not None:
        why = f"{answer.failure.replace('_', ' ')}{f' ({answer.message})' if answer.message else ''}"
        raise UserError(f"{target.url} did not answer a short question well: {why}")
    if answer.usage is None and needs_usage:
        raise UserError(
            f"{target.url} tells no usage in its streams (stream_options.include_usage), so tokens cannot be counted: "
            "measure an engine that does"
        )
    return answer.usage
