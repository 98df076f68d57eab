"""The ways to lose an engine, told apart because the router treats them differently.

connecting ──► request sent ──► head ──► body ──► end
    │               │            │         │
    │               │            │         ├ RESET_MID_BODY  TRUNCATED  IDLE_TIMEOUT  TOO_LARGE
    │               ├ CLOSED_BEFORE_HEAD   HEAD_TIMEOUT
    ├ CONNECT  CONNECT_TIMEOUT
                                             anywhere: PROTOCOL (not HTTP), CLOSED_BY_US (the pool was closed)
"""

from enum import StrEnum

from twinpool.errors import TwinpoolError


class Loss(StrEnum):
    """Where in an exchange the engine was lost, and how."""

    CONNECT = "connect"  # refused, unreachable, no such name, TLS
    CONNECT_TIMEOUT = "connect_timeout"
    CLOSED_BEFORE_HEAD = "closed_before_head"  # by FIN or RST; it may have done the work all the same
    HEAD_TIMEOUT = "head_timeout"
    RESET_MID_BODY = "reset_mid_body"
    TRUNCATED = "truncated"  # closed in good order, but without a final chunk or short of its length
    IDLE_TIMEOUT = "idle_timeout"
    TOO_LARGE = "too_large"
    PROTOCOL = "protocol"
    CLOSED_BY_US = "closed_by_us"


_TIMEOUTS = frozenset({Loss.CONNECT_TIMEOUT, Loss.HEAD_TIMEOUT, Loss.IDLE_TIMEOUT})
_NOT_SENT = frozenset({Loss.CONNECT, Loss.CONNECT_TIMEOUT})


class UpstreamLost(TwinpoolError):  # noqa: N818  an event of the network's, not an error of the program
    """An engine did not give a whole answer. `is_reused`: on a connection that had served before, so that
    CLOSED_BEFORE_HEAD may only mean that the engine had closed it for being idle."""

    def __init__(self, loss: Loss, where: str, detail: str = "", *, is_reused: bool = False) -> None:
        self.loss = loss
        self.where = where
        self.is_reused = is_reused
        super().__init__(f"{where}: {loss.value.replace('_', ' ')}{f' ({detail})' if detail else ''}")

    @property
    def is_timeout(self) -> bool:
        return self.loss in _TIMEOUTS

    @property
    def may_have_arrived(self) -> bool:
        """The engine may have seen the request: a request that may be done only once must not be sent again."""
        return self.loss not in _NOT_SENT
