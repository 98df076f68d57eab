"""Every error that Twinpool raises on purpose.

    TwinpoolError
    ├── UserError                  one line on the terminal that says what to do; exit 2
    ├── IllegalMoveError           a bug of ours: a lifecycle was asked for a move its table does not have
    └── RequestError               what a client of ours gets, in OpenAI's shape
        ├── BadRequestError        400
        ├── UnauthorizedError      401
        ├── NotFoundError          404
        ├── RequestTimeoutError    408  the client was too slow to send its request
        ├── TooLargeError          413
        ├── HandleError            409, 410, 403  a handle that must not be spent: unknown, spent, expired, foreign, forged
        ├── OverloadedError        429  with Retry-After
        ├── UpstreamError          502  an engine failed
        ├── UnavailableError       503  with Retry-After
        └── DeadlineError          504

The reason of a `RequestError` comes from the closed list `Reason`, so that dashboards and clients can rely on it; it is the
``code`` of the OpenAI error envelope.
"""

from enum import StrEnum
from typing import Any, ClassVar


class Reason(StrEnum):
    """Why a request was refused or failed. Closed: add a member here before using a new one."""

    INVALID_JSON = "invalid_json"
    INVALID_REQUEST = "invalid_request"
    INVALID_VALUE = "invalid_value"
    MISSING_FIELD = "missing_required_parameter"
    UNSUPPORTED = "unsupported"
    CONTEXT_LENGTH = "context_length_exceeded"
    INVALID_API_KEY = "invalid_api_key"
    MODEL_NOT_FOUND = "model_not_found"
    NO_SUCH_ROUTE = "no_such_route"
    METHOD_NOT_ALLOWED = "method_not_allowed"
    NO_SUCH_WORKER = "no_such_worker"
    REQUEST_TIMEOUT = "request_timeout"
    BODY_TOO_LARGE = "body_too_large"
    HANDLE_UNKNOWN = "handle_unknown"
    HANDLE_SPENT = "handle_spent"
    HANDLE_EXPIRED = "handle_expired"
    HANDLE_FOREIGN = "handle_foreign"
    HANDLE_FORGED = "handle_forged"
    QUEUE_FULL = "queue_full"
    QUEUE_TIMEOUT = "queue_timeout"
    WOULD_BE_LATE = "would_be_late"
    NO_WORKER = "no_worker"
    DRAINING = "draining"
    UPSTREAM_FAILED = "upstream_failed"
    UPSTREAM_UNREACHABLE = "upstream_unreachable"
    HANDOFF_FAILED = "handoff_failed"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    INTERNAL = "internal_error"


class TwinpoolError(Exception):
    """The root: whoever embeds Twinpool can catch this one."""


class UserError(TwinpoolError):
    """Something the person at the terminal can mend. The message is one line and says how."""


class IllegalMoveError(TwinpoolError):
    """A lifecycle was asked for a move that its table does not have; carries the story so far."""

    def __init__(self, what: str, state: str, move: str, story: tuple[str, ...]) -> None:
        self.what, self.state, self.move, self.story = what, state, move, story
        super().__init__(f"{what} is {state}: no move '{move}' from there; so far: {' > '.join(story) or 'nothing'}")


class RequestError(TwinpoolError):
    """Ends one request with an HTTP status and an OpenAI error envelope."""

    status = 500
    kind = "server_error"  # the envelope's `type`
    default_reason = Reason.INTERNAL

    def __init__(
        self, message: str, reason: Reason | None = None, *, param: str | None = None, retry_after_s: int | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason or self.default_reason
        self.param = param
        self.retry_after_s = retry_after_s

    def envelope(self) -> dict[str, Any]:
        """The body of the answer, as OpenAI's clients read it."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.reason.value}}


class BadRequestError(RequestError):
    status, kind, default_reason = 400, "invalid_request_error", Reason.INVALID_REQUEST


class UnauthorizedError(RequestError):
    status, kind, default_reason = 401, "authentication_error", Reason.INVALID_API_KEY


class NotFoundError(RequestError):
    status, kind, default_reason = 404, "invalid_request_error", Reason.NO_SUCH_ROUTE


class RequestTimeoutError(RequestError):
    status, kind, default_reason = 408, "invalid_request_error", Reason.REQUEST_TIMEOUT


class TooLargeError(RequestError):
    status, kind, default_reason = 413, "invalid_request_error", Reason.BODY_TOO_LARGE


class HandleError(RequestError):
    """A KV handle that must not be spent. Always a 4xx and never text (an engine that answered anyway would be the
    silent corruption this project exists to rule out)."""

    kind, default_reason = "handle_error", Reason.HANDLE_UNKNOWN
    _STATUS: ClassVar[dict[Reason, int]] = {
        Reason.HANDLE_UNKNOWN: 410,
        Reason.HANDLE_SPENT: 409,
        Reason.HANDLE_EXPIRED: 410,
        Reason.HANDLE_FOREIGN: 403,
        Reason.HANDLE_FORGED: 403,
    }

    def __init__(self, message: str, reason: Reason) -> None:
        super().__init__(message, reason)
        self.status = self._STATUS[reason]


class OverloadedError(RequestError):
    status, kind, default_reason = 429, "overloaded_error", Reason.QUEUE_FULL


class UpstreamError(RequestError):
    status, kind, default_reason = 502, "upstream_error", Reason.UPSTREAM_FAILED


class UnavailableError(RequestError):
    status, kind, default_reason = 503, "unavailable_error", Reason.NO_WORKER


class DeadlineError(RequestError):
    status, kind, default_reason = 504, "timeout_error", Reason.DEADLINE_EXCEEDED
