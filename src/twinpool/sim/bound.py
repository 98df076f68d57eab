"""What no policy can exceed: the best mixture of steady steps under the ITL limit, as a linear program.

A worker that repeats one step (B sequences decode, c tokens of prompts are read) serves c/τ prompt tokens and B/τ output
tokens a second, τ being the step's time; it is allowed where τ keeps the ITL limit, or where nobody decodes. A fleet spends
its time on such steps in any shares, and requests need both kinds of tokens in the proportion of the traffic:

    max λ   with  Σ f·c/τ ≥ λ·prompt,  Σ f·B/τ ≥ λ·output,  Σ f = workers

Two constraints, so its dual has one free price and is found by a search. No queue, no handoff, no TTFT: it is a ceiling, not a
forecast. (A hair above it is possible: a request may miss the limit with one in a hundred of its own gaps, and the
objectives with one in ten requests.)
"""

from collections.abc import Callable, Iterable
from itertools import takewhile
from math import fsum, inf
from typing import NamedTuple

from twinpool.profile import Profile
from twinpool.sim.cost import StepCost
from twinpool.sim.fleet import Kind
from twinpool.workload.offered import BLOCK_TOKENS, Offered


class Demand(NamedTuple):
    """Means of a request: prompt tokens to read, pairs attended to meanwhile (for a whole prompt its length squared), tokens
    to write after the first one, and the context that a token is written with."""

    prompt_tokens: float
    attended: float
    decode_tokens: float
    context_tokens: float


class Configuration(NamedTuple):
    """Tokens a second of one worker that repeats one step."""

    prompt_tokens_s: float
    output_tokens_s: float


class DemandSum:
    """Adds up requests as they pass. A block that came before counts as read already: no cache can save more."""

    __slots__ = ("_attended", "_blocks", "_context", "_decode", "_prompt", "requests")

    def __init__(self) -> None:
        self.requests = self._prompt = self._attended = self._decode = self._context = 0
        self._blocks: set[int] = set()

    def add(self, request: Offered) -> int:
        """How many tokens of its prompt count as read already."""
        prompt, written = request.prompt_tokens, request.output_tokens - 1
        cached = self._known(request) if request.prefix else 0
        self.requests += 1
        self._prompt += prompt - cached
        self._attended += prompt * prompt - cached * cached
        self._decode += written
        self._context += written * (prompt + request.output_tokens // 2)
        return cached

    def _known(self, request: Offered) -> int:
        known = sum(1 for _ in takewhile(self._blocks.__contains__, request.prefix))
        self._blocks.update(request.prefix)
        return min(known * BLOCK_TOKENS, request.prompt_tokens - 1)

    def mean(self) -> Demand:
        """Raises `ValueError` where nothing was added."""
        if not self.requests:
            raise ValueError("a demand of no requests")
        prompt = self._prompt / self.requests
        context = self._context / self._decode if self._decode else prompt
        return Demand(prompt, self._attended / self.requests, self._decode / self.requests, context)


def demand_of(requests: Iterable[Offered]) -> Demand:
    total = DemandSum()
    for request in requests:
        total.add(request)
    return total.mean()


def least_ttft_s(requests: Iterable[Offered], cost: StepCost, share: float) -> float:
    """Seconds within which this share of the requests could have their first token, each alone on a worker that has read all
    that came before: no way of serving is faster."""
    total = DemandSum()
    seconds = []
    for request in requests:
        cached = total.add(request)
        unread = request.prompt_tokens - cached
        seconds.append(cost.prefill(unread, unread * (unread + 2 * cached)))
    return sorted(seconds)[min(int(share * len(seconds)), len(seconds) - 1)]


def configurations(
    profile: Profile,
    cost: StepCost,
    demand: Demand,
    itl_s: float,
    *,
    budget_tokens: int = 8192,
    reads: bool = True,
    writes: bool = True,
) -> list[Configuration]:
    """The steps worth taking: for a batch, chunks at the corners of the piecewise-linear cost and at the ITL limit."""
    attended_a_token = demand.attended / demand.prompt_tokens
    corners = [tokens for tokens, _ in profile.prefill_ms if tokens <= budget_tokens] + [budget_tokens]
    found = []
    if reads:
        found += [Configuration(c / cost.prefill(c, c * attended_a_token), 0.0) for c in corners]
    if not writes:
        return _hull(found)
    most = min(profile.max_sequences, int(profile.kv_tokens / demand.context_tokens))
    for batch in range(1, most + 1):
        context = batch * demand.context_tokens
        alone_s = cost.decode(batch, context)
        if alone_s > itl_s:
            break
        found.append(Configuration(0.0, batch / alone_s))
        if not reads:
            continue

        def step_s(chunk: int, batch: int = batch, context: float = context) -> float:
            return cost.mixed(batch, context, chunk, chunk * attended_a_token)

        top = _largest(step_s, itl_s, budget_tokens - batch)
        for chunk in {top, *(corner - batch for corner in corners)}:
            if 0 < chunk <= top:
                seconds = step_s(chunk)
                found.append(Configuration(chunk / seconds, batch / seconds))
    return _hull(found)


def fleet_bound_req_s(demand: Demand, kinds: Iterable[Kind], itl_s: float) -> float:
    """Of any policy on these workers, each free to do either half, at the budgets their engines have."""
    groups = []
    for kind in kinds:
        budget = max([kind.group.budget_tokens, *kind.group.budget_by_role.values()])
        steps = configurations(kind.profile, kind.cost, demand, itl_s, budget_tokens=budget)
        groups.append((kind.group.count, steps))
    return capacity_req_s(demand, groups)


def capacity_req_s(demand: Demand, groups: Iterable[tuple[int, list[Configuration]]]) -> float:
    """λ for workers in groups, each with its own possible steps. 0 where they cannot do both halves at all."""
    groups = list(groups)
    if not demand.decode_tokens:
        return (
            fsum(count * max((each.prompt_tokens_s for each in steps), default=0.0) for count, steps in groups)
            / demand.prompt_tokens
        )

    def value(share: float) -> float:
        """Of the dual, with this share of a request's price on its prompt."""
        read, write = share / demand.prompt_tokens, (1 - share) / demand.decode_tokens
        return fsum(
            count * max((read * each.prompt_tokens_s + write * each.output_tokens_s for each in steps), default=0.0)
            for count, steps in groups
        )

    low, high = 0.0, 1.0  # the dual is convex in the share
    for _ in range(60):
        one, two = low + (high - low) / 3, high - (high - low) / 3
        if value(one) <= value(two):
            high = two
        else:
            low = one
    return min(value(low), value(high), value(0.0), value(1.0))


def _largest(step_s: Callable[[int], float], limit_s: float, most: int) -> int:
    """The largest chunk whose step keeps the limit, 0 where none does."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if step_s(middle) <= limit_s:
            low = middle
        else:
            high = middle - 1
    return low


def _hull(points: list[Configuration]) -> list[Configuration]:
    """Only corners of the upper right hull can be optimal for any prices."""
    corners: list[Configuration] = []
    best_below = -inf
    for point in sorted(points, key=lambda point: (-point.prompt_tokens_s, -point.output_tokens_s)):
        if point.output_tokens_s <= best_below:
            continue
        best_below = point.output_tokens_s
        while len(corners) >= 2 and _turns_inward(corners[-2], corners[-1], point):
            corners.pop()
        corners.append(point)
    return corners


def _turns_inward(one: Configuration, two: Configuration, three: Configuration) -> bool:
    run, rise = two.prompt_tokens_s - one.prompt_tokens_s, two.output_tokens_s - one.output_tokens_s
    return run * (three.output_tokens_s - two.output_tokens_s) - rise * (three.prompt_tokens_s - two.prompt_tokens_s) >= 0
