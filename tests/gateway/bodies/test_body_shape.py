import json
import time
from typing import Any

import pytest

from paceline.gateway.api.errors import BadRequest
from paceline.gateway.bodies.check import MAX_DEPTH, check_shape, max_values

MOST = max_values(8192)


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": [1] * 60_000},
        {"prompt": 'a, [b], {c}: "d" \\' * 20_000},
        {"prompt": nested(MAX_DEPTH - 1)},
        {"prompt": "\\" * 1001 + "[" * 1000},
        {"prompt": "😀" * 1000},
        {},
    ],
    ids=["ids", "text", "depth", "escapes", "characters", "empty"],
)
def test_usual_bodies_pass(body: Any) -> None:
    check_shape(json.dumps(body).encode(), MOST)
    check_shape(json.dumps(body, ensure_ascii=False).encode(), MOST)


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b'{"prompt": [' + b"7, " * 999_999 + b"7]}", "too_many_values"),
        (b'{"prompt": [' + b'"a", ' * 499_999 + b'"a"]}', "too_many_values"),
        (b"{" + b", ".join(b'"%d": 1' % i for i in range(300_000)) + b"}", "too_many_values"),
        (b"[" * 4_000_000, "too_many_values"),
        (b'"' * 4_000_000, "too_many_values"),
        (b'{"prompt": ' + b"[" * 100 + b"]" * 100 + b"}", "too_deep"),
        (b'{"a":' * 100 + b"1" + b"}" * 100, "too_deep"),
    ],
    ids=["ids", "texts", "fields", "brackets", "quotes", "lists", "objects"],
)
def test_hostile_bodies_are_rejected_in_milliseconds(body: bytes, code: str) -> None:
    began = time.process_time()
    with pytest.raises(BadRequest) as raised:
        check_shape(body, MOST)
    assert raised.value.code == code
    assert time.process_time() - began < 0.2
