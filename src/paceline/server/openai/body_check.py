"""Checks large request bodies in a process of its own: shape, characters, JSON, schema and length of the text.

`python -m paceline.server.openai.body_check` is that process. It reads the limits as a line of JSON, then for each body a line
with its path and size, and the body. It answers each body with a line: null, or the error.
"""

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from pydantic import ValidationError

from paceline.core.errors import InvalidRequest, TextTooLong
from paceline.core.machine import lower_priority
from paceline.server.gateway.body_shape import check_characters, check_shape
from paceline.server.openai.body_errors import body_error, not_json
from paceline.server.openai.errors import ApiError, BadRequest, to_api_error
from paceline.server.openai.schemas.body import Body
from paceline.server.openai.schemas.chat import ChatBody, conversation_length
from paceline.server.openai.schemas.completions import CompletionBody, DetokenizeBody, TokenizeBody
from paceline.server.openai.schemas.verify import VerifyBody

NICE = 5
"""Priority of the process below that of the server: about a quarter of a processor that the engine uses."""
SCHEMAS: Mapping[str, type[Body]] = {
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
    "/v1/verify": VerifyBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
}
"""Schemas by path. Bodies of other routes are checked for their shape alone."""


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """What the bodies of one server may hold."""

    max_values: int
    max_chars: Mapping[str, int]
    """Characters of a prompt, by model."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "BodyLimits":
        return cls(**json.loads(text))


def check_body(path: str, body: bytes, limits: BodyLimits) -> None:
    """Raise what the route at `path` would raise for this body: `ApiError` or `InvalidRequest`."""
    check_shape(body, limits.max_values)
    check_characters(body)
    schema = SCHEMAS.get(path)
    if schema is None:
        return
    try:
        value = json.loads(body)
    except json.JSONDecodeError as error:
        raise not_json(error) from None
    except (ValueError, RecursionError):  # bytes that are no text: the route reports them
        return
    try:
        parsed = schema.model_validate(value, from_attributes=True)  # as FastAPI calls it: the words differ
    except ValidationError as invalid:
        errors = [{**error, "loc": ("body", *error["loc"])} for error in invalid.errors(include_url=False)]
        raise body_error(errors, value, schema) from None
    _check_length(parsed, limits.max_chars)


def _check_length(body: Body, max_chars: Mapping[str, int]) -> None:
    most = max_chars.get(getattr(body, "model", None) or "", max(max_chars.values()))
    if isinstance(body, ChatBody | TokenizeBody) and body.messages is not None:
        length, field = conversation_length(body.messages, body.tools or ()), "messages"
    elif isinstance(body, CompletionBody):
        length, field = max((len(prompt) for prompt in body.prompts if isinstance(prompt, str)), default=0), "prompt"
    elif isinstance(body, TokenizeBody):
        length, field = len(body.prompt or ""), "prompt"
    else:
        return
    if length > most:
        raise TextTooLong(length, most, field)


def error_line(error: ApiError | None) -> str:
    """One line of JSON; null without an error."""
    return json.dumps(error and [str(error), error.param, error.code])


def read_error(line: str) -> BadRequest | None:
    """The error in a line of `error_line`."""
    values: Any = json.loads(line)
    return values and BadRequest(values[0], param=values[1], code=values[2])


def _answer(path: str, body: bytes, limits: BodyLimits) -> str:
    try:
        check_body(path, body, limits)
    except (ApiError, InvalidRequest) as error:
        return error_line(to_api_error(error))
    return error_line(None)


def main() -> None:
    lower_priority(NICE)
    source = sys.stdin.buffer
    limits = BodyLimits.from_json(source.readline().decode())
    while header := source.readline():
        path, size = json.loads(header)
        print(_answer(path, source.read(size), limits), flush=True)


if __name__ == "__main__":
    main()
