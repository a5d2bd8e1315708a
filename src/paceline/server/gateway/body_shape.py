"""Bounds the number and the depth of the values in a JSON body before it is parsed, and refuses half characters.

Parsing and validating cost far more per value than per byte. The checks here cost a few milliseconds for the largest body.
"""

import json
import re

from paceline.server.openai.errors import BadRequest

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
    """Rejects half a surrogate pair: JSON can contain it, tokenizers cannot encode it."""
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
