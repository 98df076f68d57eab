"""Who goes now and where: requests out of the queue, prompts that are read to their decode worker, canaries.

Everything that is sent sets out here. Policies propose the way; here it is taken, and what it weighs is counted.
"""

from twinpool.core import commands as do
from twinpool.core import events as on
from twinpool.core.books import Books
from twinpool.core.cluster import Worker
from twinpool.core.decisions import Choice, Decision, Why
from twinpool.core.endings import refuse, release, retry
from twinpool.core.lifecycle import PairState, RequestMove, WorkerState
from twinpool.core.model import Dialect, Leg
from twinpool.core.pairs import Pair
from twinpool.core.requests import Request
from twinpool.core.waiting import Lane

_LOOKED_AT = 64
"""Of those that wait: enough for every worker to find a prompt that fits."""


# members under names of this module: through its class each takes 0.2 µs on Python 3.11, several dozen times a request
_PREFILL, _DECODE, _WHOLE = Leg
_GO_PREFILL, _SERVE, _HAND_OFF = RequestMove.PREFILL, RequestMove.SERVE, RequestMove.HAND_OFF
_WAIT, _DECODE_SOONER, _SGLANG, _PROVED = Choice.WAIT, Why.DECODE_SOONER, Dialect.SGLANG, PairState.PROVED
_OTHER_ROUTE = Why.OTHER_ROUTE


def dispatch(books: Books, at: float, out: list[do.Command]) -> None:
    """Send on its way whoever can go. While the first one waits, a shorter one behind it may go where the first has no use for
    the room: to be read beside what a worker writes. (One as long as another that could not is not asked.)"""
    for lane in books.waiting.lanes():
        while _dispatch_lane(books, lane, at, out):
            pass


def _dispatch_lane(books: Books, lane: Lane, at: float, out: list[do.Command]) -> bool:
    """Whether to look again: all that were looked at have left, and of those that were refused no event will come that looks at
    the ones behind them."""
    workers = books.cluster.routable(lane.model, at)
    ahead = gone = refused = 0
    shortest: int | None = None
    for request in books.waiting.first(lane, _LOOKED_AT):
        if shortest is not None and request.prompt_tokens >= shortest:
            ahead += request.prompt_tokens
            continue
        decision = books.policies.route(request.pending(at, ahead), workers)
        if books.rules.refuse_late and refuse_if_late(books, request, decision, at, out):
            refused += 1
            gone += 1
            continue
        is_let_by = ahead == 0 or decision.why is _DECODE_SOONER
        if decision.choice is not _WAIT and is_let_by:
            books.waiting.remove(request, request.prompt_tokens - decision.cached_tokens)
            _start(books, request, decision, at, out)
            gone += 1
            continue
        if not request.shown_waiting and decision.choice is _WAIT:
            request.shown_waiting = True
            out.append(do.RecordDecision(request=request.id, attempt=request.attempt, decision=decision))
        if decision.forecast is None:
            break
        shortest = request.prompt_tokens
        ahead += request.prompt_tokens
    return refused > 0 and gone == _LOOKED_AT


def refuse_if_late(books: Books, request: Request, decision: Decision, at: float, out: list[do.Command]) -> bool:
    """Whether admission has given up on one that waits: what it would get by now comes too late. Not on one that was tried
    before: it has cost work already, and somebody promised it an answer."""
    if request.attempt:
        return False
    late_s = books.policies.late(request.facts, request.prompt_tokens, at - request.waits_since, decision)
    if late_s is None:
        return False
    books.waiting.remove(request)
    refuse(books, request, Why.LATE, out, late_s=late_s)
    return True


def _start(books: Books, request: Request, decision: Decision, at: float, out: list[do.Command]) -> None:
    request.attempt += 1
    request.sent_at = at
    request.shown_waiting = False
    request.counted_tokens = None
    request.mark = None
    request.held_tokens = 0
    tokens, sequences = request.prompt_tokens, request.facts.sequences
    request.cached_tokens = min(decision.cached_tokens, tokens - 1)
    unread = tokens - request.cached_tokens
    out.append(do.RecordDecision(request=request.id, attempt=request.attempt, decision=decision))
    if decision.decode is None:
        raise ValueError(f"{decision} names no worker to decode on")
    decode = books.cluster[decision.decode]
    request.decode = decode.engine
    if decision.prefill is None:
        request.prefill = request.dialect = None
        request.story.move(_SERVE)
        books.cluster.take(
            request.key(_WHOLE),
            decode,
            prefill_tokens=unread,
            kv_tokens=tokens * sequences,
            sequences=sequences,
            work_s=decision.read_s,
        )
        _begin_unseen(books, request, _WHOLE, decision.read_s)
        _send(books, request, _WHOLE, out)
        return
    prefill = books.cluster[decision.prefill]
    request.prefill = prefill.engine
    request.dialect = prefill.facts.dialect
    books.cluster.take(request.key(_PREFILL), prefill, prefill_tokens=unread, work_s=decision.read_s)
    books.cluster.take(request.key(_DECODE), decode, kv_tokens=tokens)
    if request.dialect is _SGLANG:
        request.story.move(RequestMove.PAIR)
        _send(books, request, _PREFILL, out)
        _send(books, request, _DECODE, out)
    else:
        request.story.move(_GO_PREFILL)
        _send(books, request, _PREFILL, out)


def hand_off(books: Books, request: Request, event: on.PrefillFinished, out: list[do.Command]) -> None:
    """The prompt is read and P holds it: give the handle to D at once, or to another D where that one should get nothing
    now. A D that drains or is busy honours its reservation where there is no other; where it is gone, the prefill was in
    vain."""
    prefill, decode = request.engines()
    request.counted_tokens = event.prompt_tokens
    lease_s = prefill.lease_s if prefill.lease_s is not None else books.rules.lease_s
    books.handles.hold((request.id, request.attempt), prefill, event.at + lease_s)
    reserved = books.cluster.get(decode.worker)
    pair = books.pairs.get(prefill.worker, decode.worker)
    is_doubted = pair is not None and pair.story.state is not _PROVED
    if reserved is None or not reserved.is_open(event.at) or is_doubted:
        other = _other_decode(books, request, prefill.worker, event.at)
        if other is not None:
            key = request.key(_DECODE)
            books.cluster.give_back(key)
            books.cluster.take(key, other, kv_tokens=request.prompt_tokens)
            reserved = other
        elif reserved is None or reserved.story.state is WorkerState.LOST or is_doubted:
            release(books, request, out)
            retry(books, request, event.at, out)
            return
    request.decode = reserved.engine
    request.story.move(_HAND_OFF)
    books.handles.send((request.id, request.attempt))
    is_vouched = prefill.vouches and reserved.engine.vouches
    # when within this attempt the lease began nobody tells: P's answer may have been long on its way
    began_at = request.sent_at if request.sent_at is not None else event.at - lease_s
    trusted_until = None if is_vouched else began_at + lease_s - books.rules.lease_margin_s
    _begin_unseen(books, request, _DECODE, 0.0)
    _send(books, request, _DECODE, out, trusted_until)


def _begin_unseen(books: Books, request: Request, leg: Leg, read_s: float) -> None:
    """Nobody tells of the first token of an answer that is not streamed: it is taken to be written from now on, and its prompt
    to be read beside within `read_s`, where that was predicted."""
    if request.facts.stream or request.facts.obstacle is _OTHER_ROUTE:
        return
    request.mark = books.cluster.begun(request.key(leg))
    if read_s:
        books.alarm(books.cluster.reads_unseen(request.key(leg), read_s))


def _other_decode(books: Books, request: Request, prefill: str, at: float) -> Worker | None:
    holder = books.cluster.get(prefill)
    if holder is None:
        return None
    workers = books.cluster.routable(request.facts.model, at)
    chosen = books.policies.pick_decode(request.pending(at), holder, workers)
    return None if chosen is None else books.cluster[chosen]


def _send(books: Books, request: Request, leg: Leg, out: list[do.Command], trusted_until: float | None = None) -> None:
    request.out.append(leg)
    name, attempt = request.id, request.attempt
    if leg is _WHOLE and request.decode is not None:
        out.append(do.SendWhole(request=name, attempt=attempt, worker=request.decode.worker))
        return
    prefill, decode = request.engines()
    if leg is _PREFILL:
        out.append(do.SendPrefill(request=name, attempt=attempt, worker=prefill.worker))
    else:
        out.append(
            do.SendDecode(
                request=name,
                attempt=attempt,
                worker=decode.worker,
                prefill_worker=prefill.worker,
                trusted_until=trusted_until,
            )
        )


def send_canaries(books: Books, at: float, out: list[do.Command]) -> None:
    """Those that are due; and what has changed between two workers is told."""
    out.extend(map(_record, books.pairs.take_news()))
    if books.is_draining:
        return
    sent = books.pairs.send_due(at)
    out.extend(do.ProveHandoff(canary=pair.canary, prefill=pair.prefill, decode=pair.decode) for pair in sent)
    due = books.pairs.next_due(at)
    if due is not None:
        books.alarm(due)


def _record(pair: Pair) -> do.RecordPair:
    return do.RecordPair(
        prefill=pair.prefill,
        decode=pair.decode,
        state=pair.state,
        why=pair.trouble,
        bytes_per_s=pair.bytes_per_s,
        is_slow=pair.is_slow,
    )
