"""Every invalid request gets a 4xx with an OpenAI error object that names the parameter."""

from typing import Any

import httpx
import pytest

from paceline.core.config import EngineConfig
from tests.gateway.fakes import Served, served

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "Hi"}]
TOOL = {"type": "function", "function": {"name": "f"}}
NAMED = {"type": "function", "function": {"name": "g"}}


@pytest.fixture(scope="module")
def server() -> Served:
    return served(
        max_waiting=8, max_body_bytes=4096, engine=EngineConfig(model="fake", max_num_seqs=4, max_model_len=512)
    )


def error(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    return body["error"]


@pytest.mark.parametrize(
    ("change", "param", "code"),
    [
        ({"messages": None}, "messages", "missing_required_parameter"),
        ({"messages": []}, "messages", "invalid_value"),
        ({"messages": "Hi"}, "messages", "invalid_value"),
        ({"messages": [{"role": "user"}]}, "messages.0.content", "missing_required_parameter"),
        ({"messages": [{"role": "robot", "content": ""}]}, "messages.0.role", "invalid_value"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages.0.content", "invalid_value"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages.0.content.0",
            "unsupported_value",
        ),
        ({"temperature": -1}, "temperature", "invalid_value"),
        ({"temperature": "hot"}, "temperature", "invalid_value"),
        ({"max_tokens": 0}, "max_tokens", "invalid_value"),
        ({"max_tokens": 2.5}, "max_tokens", "invalid_value"),
        ({"max_tokens": True}, "max_tokens", "invalid_value"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens", "invalid_value"),
        ({"n": 0}, "n", "invalid_value"),
        ({"n": 100}, "n", "invalid_value"),
        ({"seed": -1}, "seed", "invalid_value"),
        ({"stop": [""]}, "stop.0", "invalid_value"),
        ({"stop": 3}, "stop", "invalid_value"),
        ({"logit_bias": {"x": 1}}, "logit_bias.x", "invalid_value"),
        ({"logit_bias": {"5": 101}}, "logit_bias.5", "invalid_value"),
        ({"logit_bias": {"99999": 1}}, "logit_bias", "invalid_value"),
        ({"top_logprobs": 3}, "top_logprobs", "invalid_value"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "invalid_value"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nope"}}}},
            "response_format",
            "invalid_value",
        ),
        ({"tools": [TOOL, TOOL]}, "tools", "invalid_value"),
        ({"tools": [TOOL], "tool_choice": NAMED}, "tool_choice", "invalid_value"),
        ({"tool_choice": "required"}, "tool_choice", "invalid_value"),
        (
            {
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "nope"}}}],
                "tool_choice": "required",
            },
            "tools",
            "invalid_value",
        ),
        ({"speculation": {"depth": 3}}, "speculation.depth", "unknown_parameter"),
        ({"speculation": {"method": "psychic"}}, "speculation.method", "invalid_value"),
        ({"metadata": {"category": "x" * 65}}, "metadata.category", "invalid_value"),
        ({"messages": [{"role": "user", "content": "x" * 3000}]}, "messages", "context_length_exceeded"),
        ({"temprature": 1}, "temprature", "unknown_parameter"),
        ({"echo": True}, "echo", "unsupported_parameter"),
        ({"bad_words": ["x"]}, "bad_words", "unsupported_parameter"),
        ({"include_stop_str_in_output": True}, "include_stop_str_in_output", "unsupported_parameter"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "invalid_value"),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs", "invalid_value"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens", "invalid_value"),
        ({"functions": [{"name": "f"}]}, "functions", "unsupported_parameter"),
        ({"modalities": ["audio"]}, "modalities", "unsupported_parameter"),
        ({"reasoning_effort": 3}, "reasoning_effort", "invalid_value"),
        ({"guided_json": "{"}, "structured_outputs", "invalid_value"),
        ({"guided_json": {}, "guided_regex": "a"}, "guided_regex", "invalid_value"),
        ({"guided_regex": "("}, "response_format", "invalid_value"),
        ({"structured_outputs": {}}, "structured_outputs", "invalid_value"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs", "invalid_value"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag", "unsupported_parameter"),
        ({"guided_choice": ["a"], "tools": [TOOL]}, "tool_choice", "invalid_value"),
    ],
)
def test_invalid_chat_requests(server: Served, change: dict[str, Any], param: str, code: str | None) -> None:
    error_body = error(server.post(CHAT, {"messages": HI, **change}), 400)
    assert error_body["type"] == "invalid_request_error"
    assert (error_body["param"], error_body["code"]) == (param, code)


def test_an_unknown_role_is_named_with_the_possible_ones(server: Served) -> None:
    message = error(server.post(CHAT, {"messages": [{"role": "usr", "content": ""}]}), 400)["message"]
    assert message == "messages.0.role: must be one of 'system', 'developer', 'user', 'assistant', 'tool', got 'usr'"


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt.0"),
        ({"prompt": [1, "a"]}, "prompt.1"),
        ({"prompt": [70000]}, "prompt"),
        ({"prompt": "a" * 600}, "prompt"),
        ({"best_of": 2}, "best_of"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"suffix": "."}, "suffix"),
        ({"logprobs": True}, "logprobs"),
    ],
)
def test_invalid_completion_requests(server: Served, change: dict[str, Any], param: str) -> None:
    assert error(server.post(COMPLETIONS, {"prompt": "x", **change}), 400)["param"] == param


@pytest.mark.parametrize(
    "ignored",
    [
        {"store": True},
        {"service_tier": "flex"},
        {"prediction": {"type": "content", "content": "x"}},
        {"request_id": "r"},
        {"length_penalty": 1.0},
        {"modalities": ["text"]},
        {"audio": None},
        {"stream_options": {"include_obfuscation": True}},
        {"tools": []},
        {"metadata": {"trace": "1"}},
    ],
)
def test_unsupported_parameters_with_neutral_values_are_accepted(server: Served, ignored: dict[str, Any]) -> None:
    assert server.post(CHAT, {"messages": HI, **ignored}).status_code == 200


def test_error_messages(server: Served) -> None:
    def message(**change: Any) -> str:
        return error(server.post(CHAT, {"messages": HI, **change}), 400)["message"]

    assert message(temprature=1) == "unknown parameter temprature; did you mean temperature?"
    nested = "unknown parameter speculation.max_dept; did you mean speculation.max_depth?"
    assert message(speculation={"max_dept": 1}) == nested
    assert message(response_format={"type": "text", "typ": 1}).endswith("did you mean response_format.type?")
    assert message(functions=[{}]) == "functions is not supported: use `tools`"
    assert message(messages=None) == "messages is required"


def test_a_rejected_stream_has_an_error_status(server: Served) -> None:
    error(server.post(CHAT, {"messages": HI, "stream": True, "logit_bias": {"99999": 1}}), 400)


def test_unknown_model(server: Served) -> None:
    error_body = error(server.post(CHAT, {"messages": HI, "model": "gpt-9"}), 404)
    assert (error_body["param"], error_body["code"]) == ("model", "model_not_found")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b'"text"',
        b"null",
        b"[" * 3000,
        b'{"prompt": "x", "temperature": NaN}',
        b'{"prompt": "x", "temperature": 1e999}',
        b'{"prompt": "x", "seed": 1%s}' % (b"0" * 400),
        rb'{"prompt": "\ud800"}',
        b"\xff\xfe",
    ],
)
def test_invalid_bodies(server: Served, content: bytes) -> None:
    headers = {"content-type": "application/json"}
    error(server.call("POST", COMPLETIONS, content=content, headers=headers), 400)


def test_complete_surrogate_pairs_are_accepted(server: Served) -> None:
    content, headers = rb'{"prompt": "\ud83d\ude00"}', {"content-type": "application/json"}
    assert server.call("POST", COMPLETIONS, content=content, headers=headers).status_code == 200
    assert server.target.tokenizer.decode(server.target.requests[-1].prompt_ids) == "😀"


OTHER_TEXT = {
    **{name: '{"prompt": "Hi"}'.encode(name) for name in ("utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le")},
    "latin-1": '{"prompt": "\xe4"}'.encode("latin-1"),
    "the bytes of a surrogate": b'{"prompt": "\xed\xa0\x80"}',
    "a zero byte": b'{"prompt": "a\0"}',
}


@pytest.mark.parametrize("body", OTHER_TEXT.values(), ids=OTHER_TEXT)
@pytest.mark.parametrize("size", [0, 2000])
def test_a_body_is_utf_8(server: Served, body: bytes, size: int) -> None:
    response = server.call(
        "POST", COMPLETIONS, content=body + b" " * size, headers={"content-type": "application/json"}
    )
    assert error(response, 400)["code"] == "invalid_json"


def test_a_body_that_is_not_json(server: Served) -> None:
    error_body = error(
        server.call("POST", COMPLETIONS, content=b"prompt=x", headers={"content-type": "text/plain"}), 400
    )
    assert error_body["code"] == "invalid_json"


def test_unknown_routes_and_methods(server: Served) -> None:
    assert error(server.call("GET", "/v2/nothing"), 404)["message"] == "no route /v2/nothing"
    assert "did you mean /v1/models?" in error(server.call("GET", "/models"), 404)["message"]
    assert "did you mean /v1/chat/completions?" in error(server.post("/v1" + CHAT, {}), 404)["message"]
    assert "`admin_key`" in error(server.call("GET", "/admin/flags"), 404)["message"]
    response = server.call("GET", CHAT)
    error(response, 405)
    assert response.headers["allow"] == "POST"


def test_large_bodies_with_and_without_content_length(server: Served) -> None:
    error(server.post(COMPLETIONS, {"prompt": "x" * 5000}), 413)

    async def pieces() -> Any:
        for _ in range(5):
            yield b"x" * 1000

    error(server.call("POST", COMPLETIONS, content=pieces()), 413)
