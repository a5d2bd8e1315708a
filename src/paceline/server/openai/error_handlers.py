"""Exception handlers: every error of a route becomes an OpenAI error object."""

import difflib
import logging
from collections.abc import Sequence
from typing import Any, get_args, get_origin

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from paceline.core.errors import PacelineError
from paceline.server.openai.errors import ApiError, BadRequest, MethodNotAllowed, NotFound, log_refusal, to_api_error

logger = logging.getLogger(__name__)

CODES = {
    "missing": "missing_required_parameter",
    "extra_forbidden": "unknown_parameter",
    "unsupported_parameter": "unsupported_parameter",
    "unsupported_content": "unsupported_value",
    "json_invalid": "invalid_json",
}


def install_error_handlers(app: FastAPI) -> None:
    """Makes every error of a route an OpenAI error object."""
    app.add_exception_handler(RequestValidationError, _handle_invalid_body)
    app.add_exception_handler(HTTPException, _handle_http_error)
    app.add_exception_handler(PacelineError, _handle_paceline_error)
    app.add_exception_handler(Exception, _handle_bug)


def error_response(error: ApiError) -> JSONResponse:
    return JSONResponse(error.body(), error.status, error.headers)


def _answer(request: Request, error: ApiError) -> JSONResponse:
    """The response. The log has the reason of a 4xx."""
    log_refusal(error, request.url.path)
    return error_response(error)


async def _handle_invalid_body(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    body = error.body
    if isinstance(body, bytes):
        api_error = BadRequest("the body must be JSON with content-type application/json", code="invalid_json")
    else:
        field = getattr(request.scope.get("route"), "body_field", None)
        schema = getattr(getattr(field, "field_info", None), "annotation", None)
        api_error = body_error(error.errors(), body, schema)
    return _answer(request, api_error)


async def _handle_http_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    headers = dict(error.headers or {})
    if error.status_code == 404:
        return _answer(request, NotFound(f"no route {request.url.path}", code="not_found"))
    if error.status_code == 405:
        message = f"{request.method} is not allowed at {request.url.path}"
        return _answer(request, MethodNotAllowed(message, code="method_not_allowed", headers=headers))
    api_error = BadRequest(str(error.detail), headers=headers)
    api_error.status = error.status_code
    return _answer(request, api_error)


async def _handle_paceline_error(request: Request, error: Exception) -> JSONResponse:
    api_error = to_api_error(error)
    if api_error is not error and api_error.status >= 500:
        logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return _answer(request, api_error)


async def _handle_bug(request: Request, error: Exception) -> JSONResponse:
    """Starlette raises the error again after this response, and uvicorn logs it."""
    return error_response(to_api_error(error))


def body_error(errors: Sequence[dict[str, Any]], body: Any, schema: Any) -> BadRequest:
    """One sentence that names the wrong parameter. `errors` come from pydantic; `schema` is the type of the body."""
    paths = [_path(error, body) for error in errors]
    # Pydantic reports every member of a union: keep the errors of the member that matched deepest.
    deepest = max(len(path) for path in paths)
    matched = [(error, path) for error, path in zip(errors, paths, strict=True) if len(path) == deepest]
    error, path = matched[0]
    kind = error["type"]
    param = error.get("ctx", {}).get("param") or ".".join(str(part) for part in path) or None
    if kind == "unsupported_parameter":
        param = ".".join([*(str(part) for part in path), error["ctx"]["name"]])
    message = str(error["msg"])
    if kind == "json_invalid":
        message, param = f"the body is not JSON: {error.get('ctx', {}).get('error', message)}", None
    elif kind == "missing":
        message = f"{param or 'the body'} is required" if path else "the request needs a JSON body"
    elif kind == "extra_forbidden":
        *above, name = (str(part) for part in path)
        nearest = difflib.get_close_matches(name, _field_names(schema, path[:-1]), n=1)
        message = f"unknown parameter {param}"
        message += f"; did you mean {'.'.join([*above, *nearest])}?" if nearest else ""
    elif kind not in ("inconsistent", "unsupported_parameter"):
        reasons = dict.fromkeys(str(other["msg"]) for other, position in matched if position == path)
        message = f"{param or 'the body'}: {', or '.join(reasons)}"
    return BadRequest(message, param=param, code=CODES.get(kind, "invalid_value"))


def _field_names(schema: Any, path: Sequence[str | int]) -> set[str]:
    """Fields that an object at `path` in a body of this type may have, over all members of unions."""
    if isinstance(schema, type) and issubclass(schema, BaseModel):
        fields = schema.model_fields
        if not path:
            return set(fields)
        return _field_names(fields[path[0]].annotation, path[1:]) if path[0] in fields else set()
    path = path[1:] if get_origin(schema) is list else path
    return set().union(*(_field_names(member, path) for member in get_args(schema)))


def _path(error: dict[str, Any], body: Any) -> tuple[str | int, ...]:
    """The error's position in the body: pydantic's position without the names of union members."""
    path: list[str | int] = []
    value, parts = body, error["loc"][1:]
    for depth, part in enumerate(parts, 1):
        is_inside = isinstance(value, dict) and part in value
        is_inside = is_inside or (isinstance(value, list) and isinstance(part, int) and part < len(value))
        if is_inside:
            value = value[part]
        if is_inside or (error["type"] == "missing" and depth == len(parts)):
            path.append(part)
    return tuple(path)
