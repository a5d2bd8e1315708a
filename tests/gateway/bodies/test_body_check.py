"""What the process that checks large bodies refuses: the same as the routes, with the same words."""

import json
from typing import Any

import pytest

from paceline.core.errors import InvalidRequest
from paceline.gateway.api.errors import ApiError, BadRequest, to_api_error
from paceline.gateway.bodies.check import SCHEMAS, BodyLimits, check_body, error_line, read_error
from paceline.gateway.http.middleware import LARGE
from tests.gateway.fakes import served

CHAT, TEXT, TOKENIZE = "/v1/chat/completions", "/v1/completions", "/tokenize"
LIMITS = BodyLimits(24_576, {"fake": 4096 * 12})
"""Those of the server in `served`: `test_the_limits_are_those_of_the_server`."""
HI = [{"role": "user", "content": "Hi"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"description": "x" * 60_000}}}


def test_every_route_with_a_body_has_its_schema() -> None:
    found = {}
    for path, operations in served().app.openapi()["paths"].items():
        if "requestBody" in operations.get("post", {}):
            content = operations["post"]["requestBody"]["content"]["application/json"]
            found[path] = content["schema"]["$ref"].rpartition("/")[2]
    assert found == {path: schema.__name__ for path, schema in SCHEMAS.items()}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": HI, "tools": [TOOL]}),
        (CHAT, {"messages": [{"role": "user", "content": "x" * 60_000}]}),
        (CHAT, {"messages": [{"role": "unknown"}] * 10}),
        (CHAT, {"messages": [{"role": "user", "content": ""}] * 2049}),
        (CHAT, {"messages": HI, "temperatur": 1}),
        (TEXT, {"prompt": "x" * 60_000}),
        (TEXT, {"prompt": ["x", "y" * 60_000]}),
        (TEXT, {"prompt": [1, -1]}),
        (TEXT, {"prompt": ["x", None]}),
        (TEXT, {"prompt": "x", "logit_bias": {str(i): 0 for i in range(5000)}}),
        (TEXT, {"prompt": "x", **{f"unknown_{i}": 1 for i in range(300)}}),
        (TEXT, {"prompt": "x", "max_tokens": 0}),
        (TEXT, {}),
        (TEXT, []),
        (TEXT, b'{"prompt": "x"'),
        (TEXT, b'{"prompt": "\\ud800"}'),
        (TEXT, '{"prompt": "x"}'.encode("utf-16")),
        (TEXT, '{"prompt": "x"}'.encode("utf-32-le")),
        (TEXT, b'{"prompt": "\xed\xa0\x80"}'),
        (TEXT, b"[" * 100 + b"]" * 100),
        (TOKENIZE, {"prompt": "x" * 60_000}),
        (TOKENIZE, {"prompt": "x", "messages": HI}),
    ],
)
def test_the_error_is_that_of_the_route(path: str, body: Any) -> None:
    """The bodies are small enough for the gateway's process to check them itself."""
    data = body if isinstance(body, bytes) else json.dumps(body, separators=(",", ":")).encode()
    assert len(data) <= LARGE
    with pytest.raises((ApiError, InvalidRequest)) as raised:
        check_body(path, data, LIMITS)
    response = served().call("POST", path, content=data, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert response.json() == to_api_error(raised.value).body()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": HI, "store": True}),
        (TEXT, {"prompt": "x" * 40_000}),
        (TEXT, {"model": "unknown", "prompt": "x"}),
        ("/v1/verify", {"prompt": [1, 2], "temperature": 0}),
        ("/detokenize", {"tokens": [1] * 100}),
        ("/admin/flags", {"any": "value"}),
        ("", "not of this type"),
    ],
)
def test_other_bodies_pass(path: str, body: Any) -> None:
    check_body(path, json.dumps(body).encode(), LIMITS)


def test_the_text_of_an_unknown_model_has_a_limit_too() -> None:
    with pytest.raises(InvalidRequest, match="characters"):
        check_body(TEXT, json.dumps({"model": "unknown", "prompt": "x" * 60_000}).encode(), LIMITS)


def test_the_limits_are_those_of_the_server() -> None:
    assert served().gateway.max_chars == LIMITS.max_chars["fake"]
    assert BodyLimits.from_json(LIMITS.to_json()) == LIMITS


def test_errors_pass_the_pipe_unchanged() -> None:
    error = BadRequest("a line\nand another", param="prompt", code="invalid_value")
    line = error_line(error)
    assert "\n" not in line
    read = read_error(line)
    assert read is not None
    assert (read.status, read.body()) == (error.status, error.body())
    assert read_error(error_line(None)) is None
