"""The balance tick: once a period, ask the policy whether a worker should change its pool, and do it softly.

    prefill ◄──► decode     a worker that changes takes new work of its new role at once, and ends what it has of the old one

A change is one assignment of ours and nothing of the engine's, so it cannot stop halfway; a worker that is lost meanwhile comes
back in the role it was given last. Nothing ticks while nobody could change, or nobody asked for anything for a while."""

from twinpool.config import BalanceMode
from twinpool.core import commands as do
from twinpool.core.books import Books
from twinpool.core.decisions import Balanced, WhyBalance
from twinpool.core.dispatching import dispatch, send_canaries
from twinpool.core.lifecycle import WorkerState
from twinpool.core.model import Role
from twinpool.core.policies import PoolView

_IDLE_S = 120.0  # after the last request, until the ticks stop: what was asked for has faded by then


def tick_if_due(books: Books, at: float, out: list[do.Command]) -> None:
    """Look, if it is time; and say when the next time is."""
    balance = books.balance
    if books.law.balance.mode is BalanceMode.OFF or balance.next_tick is None:
        return
    if at >= balance.next_tick:
        if not books.requests and at - balance.asked_at > _IDLE_S:
            balance.next_tick = None
            return
        balance.next_tick = at + books.law.balance.period_s
        _tick(books, at, out)
    books.alarm(balance.next_tick)


def start_ticking(books: Books, at: float) -> None:
    """Somebody asked for something."""
    balance = books.balance
    balance.asked_at = at
    if (
        balance.next_tick is None
        and not books.is_draining
        and books.law.balance.mode is not BalanceMode.OFF
        and _can_change(books)
    ):
        balance.next_tick = at + books.law.balance.period_s
        books.alarm(balance.next_tick)


def _can_change(books: Books) -> bool:
    """Somebody may stand in either pool, and what that is worth is known."""
    return any(books.policies.learner.is_known(kind) for kind in books.cluster.flexible_kinds())


def _tick(books: Books, at: float, out: list[do.Command]) -> None:
    balance = books.balance
    workers = [worker for worker in books.cluster if worker.story.state is WorkerState.READY]
    waiting = list(books.waiting)
    view = PoolView(at, workers, len(waiting), sum(request.prompt_tokens for request in waiting))
    found = books.policies.balance(view, balance.changed_at)
    if balance.last is None or _is_news(found, balance.last, books.law.balance.mode):
        out.append(do.RecordBalance(balanced=found))
    balance.last = found
    if found.worker is None or found.role is None or books.law.balance.mode is not BalanceMode.AUTO:
        return
    balance.changed_at = at
    change_role(books, found.worker, found.role, found.why, at, out)
    send_canaries(books, at, out)
    dispatch(books, at, out)


def _is_news(found: Balanced, last: Balanced, mode: BalanceMode) -> bool:
    """Every change is. Advice that nobody took is not, whoever of its pool has least to do at the moment."""
    if mode is BalanceMode.AUTO and found.worker is not None:
        return True
    return (found.why, found.role) != (last.why, last.role)


def change_role(books: Books, name: str, role: Role, why: WhyBalance, at: float, out: list[do.Command]) -> None:
    worker = books.cluster[name]
    worker.role = role
    out.append(do.RecordRole(worker=name, role=role, reason=why))
    books.pairs.take_roles(worker, at)
