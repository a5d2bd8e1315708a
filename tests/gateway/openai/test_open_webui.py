"""The requests that the backend of Open WebUI sends to an OpenAI-compatible server."""

import json
from typing import Any

import pytest

from paceline.core.request import Request
from tests.gateway.fakes import Served, events, served

CHAT = "/v1/chat/completions"
HEADERS = {
    "content-type": "application/json",
    "authorization": "Bearer none",
    "x-openwebui-user-name": "Ada%20L",
    "x-openwebui-user-id": "3f6e",
    "x-openwebui-user-email": "ada@example.org",
    "x-openwebui-user-role": "admin",
    "x-openwebui-chat-id": "c1",
}
HISTORY = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello!"},
    {"role": "user", "content": [{"type": "text", "text": "Why is the sky blue?"}]},
]
ADVANCED = {
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 40,
    "min_p": 0.05,
    "frequency_penalty": 0.1,
    "presence_penalty": 0.1,
    "seed": 42,
    "stop": ["###"],
    "max_tokens": 64,
    "logit_bias": {"65": -100},
}
"""Advanced parameters of a chat; those that the user leaves alone are absent."""
TOOL = {
    "type": "function",
    "function": {
        "name": "get_time",
        "description": "The time of day.",
        "parameters": {"type": "object", "properties": {"zone": {"type": "string"}}, "required": ["zone"]},
    },
}


def server(text: str = "It scatters.") -> Served:
    return served(text)


def test_the_list_of_models_is_read() -> None:
    response = server().call("GET", "/v1/models", headers=HEADERS)
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("application/json")
    (model,) = response.json()["data"]
    assert isinstance(model["id"], str)
    assert response.json()["object"] == "list"


@pytest.mark.parametrize("params", [{}, ADVANCED, {"stop": []}], ids=["default", "advanced", "no stops"])
def test_a_chat_streams_with_its_usage(params: dict[str, Any]) -> None:
    body = {"stream": True, "model": "fake", "messages": HISTORY, "stream_options": {"include_usage": True}, **params}
    response = server().post(CHAT, body, headers=HEADERS)
    assert response.headers["content-type"].startswith("text/event-stream")
    *data, done = events(response)
    assert done == "[DONE]"
    chunks = [json.loads(item) for item in data]
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    assert "".join(delta.get("content") or "" for delta in deltas) == "It scatters."
    assert chunks[-1]["usage"]["total_tokens"] > 0


@pytest.mark.parametrize("limit", [{"max_tokens": 1000}, {"max_completion_tokens": 1000}, {}])
def test_titles_tags_and_follow_ups_are_generated(limit: dict[str, int]) -> None:
    """The title's limit of 1,000 tokens may exceed what is left of the context window."""
    answer = '{"title": "Blue sky"}'
    asked = [{"role": "user", "content": "### Task:\nGenerate a title.\n### Output:\nJSON format"}]
    response = server(answer).post(
        CHAT, {"model": "fake", "messages": asked, "stream": False, **limit}, headers=HEADERS
    )
    assert response.status_code == 200, response.text
    assert response.json()["choices"][0]["message"]["content"] == answer


def test_a_response_format_of_the_model_settings_is_used() -> None:
    body = {"model": "fake", "messages": HISTORY, "stream": False, "response_format": {"type": "json_object"}}
    one = server("{}")
    assert one.post(CHAT, body, headers=HEADERS).status_code == 200
    request: Request = one.target.requests[0]
    assert request.sampling.json_schema == {"type": "object"}


def test_native_tool_calls_and_their_results_are_read() -> None:
    call = {"id": "call_1", "type": "function", "index": 0, "function": {"name": "get_time", "arguments": "{}"}}
    messages = [
        *HISTORY,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "12:00"},
    ]
    body = {"model": "fake", "messages": messages, "stream": True, "tools": [TOOL]}
    *_, done = events(server().post(CHAT, body, headers=HEADERS))
    assert done == "[DONE]"


def test_an_error_is_json_with_a_message() -> None:
    """Open WebUI shows `error.message` of any status from 400."""
    response = server().post(CHAT, {"model": "fake", "messages": [], "stream": True}, headers=HEADERS)
    assert response.status_code == 400
    assert response.headers["content-type"].startswith("application/json")
    assert response.json()["error"]["message"]
