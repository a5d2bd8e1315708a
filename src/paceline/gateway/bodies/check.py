"""Checks large request bodies in a process of its own: shape, characters, JSON, schema and length of the text.

`python -m paceline.gateway.bodies.check` is that process. It reads the limits as a line of JSON, then for each body a line
with its path and size, and the body. It answers each body with a line: null, or the error.

`check_shape` bounds the number and the depth of the values in a JSON body before it is parsed. `check_characters` refuses what
is not UTF-8, and half characters. Parsing and validating cost far more per value than per byte. The checks here cost a few
milliseconds for the largest body.
"""

import json
import re
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from pydantic import ValidationError

from paceline.core.errors import InvalidRequest, TextTooLong
from paceline.core.machine import lower_priority
from paceline.gateway.api.bodies import Body
from paceline.gateway.api.chat_bodies import ChatBody
from paceline.gateway.api.completion_bodies import CompletionBody, DetokenizeBody, TokenizeBody, VerifyBody
from paceline.gateway.api.errors import ApiError, BadRequest, to_api_error
from paceline.gateway.api.messages import conversation_length
from paceline.gateway.api.messages_bodies import MessagesBody
from paceline.gateway.api.ollama_bodies import OllamaChatBody, OllamaGenerateBody, OllamaShowBody
from paceline.gateway.api.responses_bodies import ResponsesBody
from paceline.gateway.api.translated import TranslatedBody
from paceline.gateway.bodies.errors import not_json, translated, validation_error

MAX_DEPTH = 64
"""Levels of lists and objects."""
MAX_OTHER_VALUES = 16384
"""Most values of a body, without the token ids of prompts."""
PROMPTS, MAX_IDS = 8, 131072
"""Prompts of the largest size that a body may hold as token ids, and ids of all of them."""
SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
NOT_BRACKETS = bytes(byte for byte in range(256) if byte not in b"[]{}")


def max_values(max_model_len: int) -> int:
    """Most values of a body for a model with this context window."""
    return MAX_OTHER_VALUES + min(PROMPTS * max_model_len, MAX_IDS)


def check_shape(body: bytes, most: int) -> None:
    """Raise `BadRequest` if the JSON text has more than `most` values, or is nested too deeply."""
    if len(body) <= MAX_DEPTH:
        return
    if body.count(b'"') > 4 * most:  # names and texts; an escaped quote counts too
        raise _too_many(most)
    structure = _outside_texts(body)
    brackets = structure.translate(None, NOT_BRACKETS)
    if structure.count(b",") + len(brackets) > most:
        raise _too_many(most)
    if len(brackets) > MAX_DEPTH and _depth(brackets) > MAX_DEPTH:
        raise BadRequest(f"the body is nested more than {MAX_DEPTH} levels deep: send a flatter one", code="too_deep")


def check_characters(body: bytes) -> None:
    """Rejects bodies that are not UTF-8, and half a surrogate pair: JSON can contain it, tokenizers cannot encode it.

    `json.loads` also reads UTF-16 and UTF-32, whose values `check_shape` does not see, and lets surrogates of bytes pass.
    """
    try:
        body.decode()
    except UnicodeDecodeError:
        raise BadRequest("the body is not UTF-8: encode its JSON as UTF-8", code="invalid_json") from None
    if b"\0" in body:  # UTF-16 or UTF-32; no JSON contains it
        raise BadRequest("the body contains a zero byte: encode its JSON as UTF-8", code="invalid_json")
    if not SURROGATE.search(body):
        return
    try:
        text = json.dumps(json.loads(body), ensure_ascii=False)
    except (ValueError, RecursionError):  # not JSON: the route reports that
        return
    try:
        text.encode()
    except UnicodeEncodeError:
        raise BadRequest(
            "the body contains half a surrogate pair (\\ud800 to \\udfff): send complete characters",
            code="invalid_json",
        ) from None


def _too_many(most: int) -> BadRequest:
    return BadRequest(f"the body has more than {most} values: send less", code="too_many_values")


def _outside_texts(body: bytes) -> bytes:
    """The body without its strings. Text that is not JSON may leave any part of it."""
    if b"\\" in body:
        body = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    return b"".join(body.split(b'"')[::2])


def _depth(brackets: bytes) -> int:
    depth = deepest = 0
    for bracket in brackets:
        if bracket in b"[{":
            depth += 1
            deepest = max(deepest, depth)
        else:
            depth -= 1
    return deepest


NICE = 5
"""Priority of the process below that of the server: about a quarter of a processor that the engine uses."""
SCHEMAS: Mapping[str, type[Body]] = {
    "/api/chat": OllamaChatBody,
    "/api/generate": OllamaGenerateBody,
    "/api/show": OllamaShowBody,
    "/v1/messages": MessagesBody,
    "/v1/messages/count_tokens": MessagesBody,
    "/v1/responses": ResponsesBody,
    "/v1/responses/input_tokens": ResponsesBody,
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
    check_characters(body)
    check_shape(body, limits.max_values)
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
        raise validation_error(invalid, value, schema) from None
    _check_length(translated(parsed) if isinstance(parsed, TranslatedBody) else parsed, limits.max_chars)


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
