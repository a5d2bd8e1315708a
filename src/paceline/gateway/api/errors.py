"""Errors with an HTTP status, as OpenAI's error object: `{"error": {"message", "type", "param", "code"}}`.

Routes of other APIs have other error bodies: `error_answer` returns the one of a path.
"""

import logging
from typing import Any

from paceline.core.errors import (
    EngineClosed,
    GenerationFailed,
    InvalidRequest,
    PacelineError,
    PromptTooLong,
    TextTooLong,
    WeightsChanged,
)

logger = logging.getLogger(__name__)

MAX_REASON = 300
"""Characters of an error message in the log."""


class ApiError(PacelineError):
    """An error with an HTTP status."""

    status = 500
    type = "server_error"

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.param = param
        self.code = code
        self.headers = headers or {}

    def body(self) -> dict[str, Any]:
        return {"error": {"message": str(self), "type": self.type, "param": self.param, "code": self.code}}


class BadRequest(ApiError):
    status, type = 400, "invalid_request_error"


class PromptRefused(BadRequest):
    """The prompt fills the context window."""

    def __init__(self, error: PromptTooLong) -> None:
        # OpenAI's code, which clients check for
        super().__init__(str(error), param=error.field, code="context_length_exceeded")
        self.claude_message = str(error)
        if not isinstance(
            error, TextTooLong
        ):  # these words, and the numbers in them, are read by clients of Anthropic's API
            self.claude_message = f"prompt is too long: {error.num_tokens} tokens > {error.window - 1} maximum"


class Unauthorised(ApiError):
    status, type = 401, "authentication_error"


class Forbidden(ApiError):
    status, type = 403, "permission_error"


class NotFound(ApiError):
    status, type = 404, "invalid_request_error"


class MethodNotAllowed(ApiError):
    status, type = 405, "invalid_request_error"


class RequestTimeout(ApiError):
    """The request passed its time limit. A retry would take as long, so a header tells clients not to retry."""

    status, type = 408, "timeout_error"

    def __init__(self, seconds: float) -> None:
        super().__init__(
            f"the request did not finish within {seconds:g} seconds: request fewer tokens or a longer `timeout`",
            param="timeout",
            code="timeout",
            headers={"x-should-retry": "false"},
        )


class BodyTooLarge(ApiError):
    status, type = 413, "invalid_request_error"

    def __init__(self, limit: int) -> None:
        super().__init__(
            f"the body is larger than {limit} bytes: send less, or increase `max_body_bytes`", code="too_large"
        )


class UnsupportedEncoding(ApiError):
    """The body is compressed."""

    status, type = 415, "invalid_request_error"

    def __init__(self, encoding: str) -> None:
        super().__init__(
            f"Content-Encoding {encoding[:40]!r} is not supported: send the body without compression",
            code="unsupported_encoding",
        )


class SlowBody(ApiError):
    """The body arrives too slowly."""

    status, type = 408, "timeout_error"

    def __init__(self, bytes_per_second: int) -> None:
        super().__init__(
            f"the body arrives at less than {bytes_per_second} bytes a second: send it faster, or a shorter one",
            code="slow_body",
        )


class Overloaded(ApiError):
    """A queue is full."""

    status, type = 429, "rate_limit_error"

    def __init__(
        self, retry_after: int, reason: str = "the batch and the queue are full", code: str = "overloaded"
    ) -> None:
        super().__init__(
            f"{reason}: retry in about {retry_after} s",
            code=code,
            headers={"retry-after": str(retry_after)},
        )
        self.retry_after = retry_after


class RateLimited(ApiError):
    """The API key reached one of its limits."""

    status, type = 429, "rate_limit_error"

    def __init__(self, message: str, retry_after: int, code: str = "rate_limit_exceeded") -> None:
        super().__init__(
            f"{message}: retry in {retry_after} s",
            code=code,
            headers={"retry-after": str(retry_after)},
        )
        self.retry_after = retry_after


class ClientDisconnected(ApiError):
    """The client closed the connection. Only logs show this status."""

    status, type = 499, "client_closed_request"

    def __init__(self) -> None:
        super().__init__("the client disconnected")


class Unavailable(ApiError):
    """The server is starting, draining or has failed."""

    status, type = 503, "service_unavailable_error"

    def __init__(self, message: str) -> None:
        super().__init__(message, code="unavailable", headers={"retry-after": "5"})


def log_refusal(error: ApiError, path: str) -> None:
    """Writes the reason of a 4xx to the log, at level `info`. A request that ran has its own line."""
    if 400 <= error.status < 500 and not isinstance(error, RequestTimeout):
        reason = error.code or error.type
        logger.info("refused: %.*s", MAX_REASON, error, extra={"status": error.status, "path": path, "reason": reason})


def to_api_error(error: Exception) -> ApiError:
    """The error to send to the client. Details of internal errors stay in the log."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, PromptTooLong):
        return PromptRefused(error)
    if isinstance(error, InvalidRequest):
        return BadRequest(str(error), param=error.field, code="invalid_value")
    if isinstance(error, EngineClosed):
        return Unavailable(str(error))
    if isinstance(error, WeightsChanged):
        return ApiError(str(error), code="weights_changed")
    if isinstance(error, GenerationFailed):
        return ApiError(str(error), code="generation_failed", headers={"x-should-retry": "false"})
    if isinstance(error, PacelineError):
        return ApiError(str(error), code="server_error")
    return ApiError("internal error: see the server's log", code="server_error")


MESSAGES_PATH, OLLAMA_PATH = "/v1/messages", "/api"
CLAUDE_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    529: "overloaded_error",
}
"""Types of Anthropic's errors by status. Other 4xx are `invalid_request_error`, other 5xx `api_error`."""


def is_under(path: str, prefix: str) -> bool:
    return path == prefix or path.startswith(f"{prefix}/")


def error_answer(error: ApiError, path: str) -> tuple[int, dict[str, Any]]:
    """Status and body of the error, as clients of the API at `path` expect them."""
    if is_under(path, MESSAGES_PATH):
        status = 529 if isinstance(error, Overloaded) else error.status
        return status, claude_error(error, status)
    if is_under(path, OLLAMA_PATH):
        return error.status, {"error": str(error)}
    return error.status, error.body()


def claude_error(error: ApiError, status: int) -> dict[str, Any]:
    """Anthropic's error object."""
    kind = CLAUDE_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    message = error.claude_message if isinstance(error, PromptRefused) else str(error)
    return {"type": "error", "error": {"type": kind, "message": message}}
