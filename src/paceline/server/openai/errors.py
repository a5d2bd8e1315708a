"""Every failure as OpenAI's error object: `{"error": {"message", "type", "param", "code"}}`."""

from typing import Any

from paceline.core.errors import EngineClosed, InvalidRequest, PacelineError, PromptTooLong


class ApiError(PacelineError):
    """A failure with an HTTP status."""

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


class Unauthorised(ApiError):
    status, type = 401, "authentication_error"


class Forbidden(ApiError):
    status, type = 403, "permission_error"


class NotFound(ApiError):
    status, type = 404, "invalid_request_error"


class MethodNotAllowed(ApiError):
    status, type = 405, "invalid_request_error"


class TimedOut(ApiError):
    """The request took longer than it was given. Asking again would only take as long again, and the header says so."""

    status, type = 408, "timeout_error"

    def __init__(self, seconds: float) -> None:
        super().__init__(
            f"not finished after {seconds:g} seconds: ask for fewer tokens, or give a longer `timeout`",
            param="timeout",
            code="timeout",
            headers={"x-should-retry": "false"},
        )


class BodyTooLarge(ApiError):
    status, type = 413, "invalid_request_error"

    def __init__(self, limit: int) -> None:
        super().__init__(f"the body is larger than {limit} bytes: send less, or raise max_body_bytes", code="too_large")


class Overloaded(ApiError):
    """The queue is full."""

    status, type = 429, "rate_limit_error"

    def __init__(self, retry_after: int) -> None:
        super().__init__(
            f"every seat is taken and the queue is full: try again in about {retry_after} s",
            code="overloaded",
            headers={"retry-after": str(retry_after)},
        )
        self.retry_after = retry_after


class RateLimited(ApiError):
    """The caller has used up what their key allows."""

    status, type = 429, "rate_limit_error"

    def __init__(self, message: str, retry_after: int) -> None:
        super().__init__(
            f"{message}: try again in {retry_after} s",
            code="rate_limit_exceeded",
            headers={"retry-after": str(retry_after)},
        )
        self.retry_after = retry_after


class ClientGone(ApiError):
    """Nobody is left to answer. The status is the customary one; it is only ever seen in logs."""

    status, type = 499, "client_closed_request"

    def __init__(self) -> None:
        super().__init__("the client went away")


class Unavailable(ApiError):
    """Starting, draining, or broken."""

    status, type = 503, "service_unavailable_error"

    def __init__(self, message: str) -> None:
        super().__init__(message, code="unavailable", headers={"retry-after": "5"})


def as_api_error(error: Exception) -> ApiError:
    """What to tell the caller about `error`. What was not meant for them stays in the log."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, PromptTooLong):
        return BadRequest(
            str(error), param=error.field, code="context_length_exceeded"
        )  # OpenAI's, which clients look for
    if isinstance(error, InvalidRequest):
        return BadRequest(str(error), param=error.field, code="invalid_value")
    if isinstance(error, EngineClosed):
        return Unavailable(str(error))
    if isinstance(error, PacelineError):
        return ApiError(str(error), code="server_error")
    return ApiError("the server failed; its log says why", code="server_error")
