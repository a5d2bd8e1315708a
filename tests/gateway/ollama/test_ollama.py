"""Ollama's API: chats and texts as lines of JSON, models, and what its clients send."""

import json
from typing import Any

import httpx
import pytest

from paceline.gateway.ollama.routes import VERSION
from tests.gateway.fakes import TEMPLATE, Served, byte_tokenizer, served
from tests.gateway.openai.test_client_requests import CALL, prompt_of

CHAT, GENERATE = "/api/chat", "/api/generate"
HI = {"role": "user", "content": "hi", "images": []}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "look", "description": "w", "parameters": SCHEMA}}
THINKING = byte_tokenizer(TEMPLATE + "{# <think></think> #}{% if enable_thinking is false %}off{% endif %}")


def post(server: Served, path: str = CHAT, **body: Any) -> httpx.Response:
    given = {"messages": [HI]} if path == CHAT else {"prompt": "hi"}
    response = server.post(path, {"model": "fake", **given, **body})
    assert response.status_code == 200, response.text
    return response


def ask(server: Served, path: str = CHAT, **body: Any) -> dict[str, Any]:
    answer: dict[str, Any] = post(server, path, stream=False, **body).json()
    return answer


def lines(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in response.text.splitlines()]


@pytest.mark.parametrize("path", [CHAT, GENERATE])
def test_a_text(path: str) -> None:
    answer = ask(served(), path, keep_alive="5m", options={})
    assert (answer["message"]["content"] if path == CHAT else answer["response"]) == "Hello there!"
    assert (answer["done"], answer["done_reason"], answer["model"]) == (True, "stop", "fake")
    assert (answer["prompt_eval_count"] > 0, answer["eval_count"]) == (True, len("Hello there!"))
    assert answer["total_duration"] >= answer["prompt_eval_duration"] + answer["eval_duration"] - 1
    assert answer["created_at"].endswith("Z")


@pytest.mark.parametrize("headers", [{}, {"content-type": "application/x-www-form-urlencoded"}])
def test_a_body_is_json_whatever_its_type(headers: dict[str, str]) -> None:
    """`curl -d` says that it sends a form."""
    body = json.dumps({"model": "fake", "stream": False, "messages": [HI]})
    response = served("Hello").call("POST", CHAT, content=body, headers=headers)
    assert response.status_code == 200, response.text
    assert response.json()["message"]["content"] == "Hello"
    refused = served("Hello").call("POST", CHAT, content="model=fake", headers=headers)
    assert refused.status_code == 400


@pytest.mark.parametrize("path", [CHAT, GENERATE])
def test_a_stream_is_the_default(path: str) -> None:
    *parts, last = lines(post(served(), path))
    texts = [part["message"]["content"] if path == CHAT else part["response"] for part in (*parts, last)]
    assert ("".join(texts), len(parts), texts[-1]) == ("Hello there!", 4, "")
    assert [part["done"] for part in (*parts, last)] == [False] * 4 + [True]


def test_options() -> None:
    server = served()
    options = {"num_ctx": 4096, "num_predict": 5, "temperature": 0, "seed": 1, "top_k": 5, "repeat_penalty": 1.1}
    answer = ask(server, options={**options, "stop": ["x"], "any_name": {}})
    assert (answer["message"]["content"], answer["done_reason"]) == ("Hello", "length")
    sampling = server.target.requests[0].sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.seed, sampling.top_k) == (5, 0, 1, 5)
    assert (sampling.repetition_penalty, sampling.stop) == (1.1, ("x",))
    ask(server, options={"num_predict": -1, "seed": -1, "stop": []})
    assert server.target.requests[1].sampling.max_tokens == 4096


@pytest.mark.parametrize("form", ["json", SCHEMA])
@pytest.mark.parametrize("path", [CHAT, GENERATE])
def test_the_form_of_the_answer(path: str, form: Any) -> None:
    server = served('{"city": "Rome"}')
    ask(server, path, format=form)
    assert server.target.requests[0].sampling.json_schema == (SCHEMA if form == SCHEMA else {"type": "object"})
    ask(server, path, format="")
    assert server.target.requests[1].sampling.json_schema is None


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("naming", ["tool_name", "tool_call_id", "none"])
def test_two_turns_with_a_tool(is_stream: bool, naming: str) -> None:
    server = served(CALL)
    if is_stream:
        found = lines(post(server, tools=[TOOL]))
        (call,) = [call for line in found for call in line["message"].get("tool_calls", ())]
    else:
        (call,) = ask(server, tools=[TOOL])["message"]["tool_calls"]
    assert (call["function"]["name"], call["function"]["arguments"]) == ("look", {"city": "Rome"})
    sent_back = {"function": {"name": "look", "arguments": {"city": "Rome"}}}
    names = {"tool_name": {"tool_name": "look"}, "tool_call_id": {"tool_call_id": call["id"]}, "none": {}}[naming]
    answer = {"role": "assistant", "content": "", "images": [], "tool_calls": [sent_back]}
    ask(server, messages=[HI, answer, {"role": "tool", "content": "Sunny.", **names}], tools=[TOOL])
    assert '{"name": "look", "arguments": {"city": "Rome"}}' in prompt_of(server)
    assert "<tool_response>\nSunny.\n</tool_response>" in prompt_of(server)


def test_thinking() -> None:
    server = served("<think>Rome, then.</think>Sunny.", tokenizer=THINKING)
    for think, is_off in ((None, False), (True, False), ("low", False), (False, True)):
        message = ask(server, think=think)["message"]
        assert (message["thinking"], message["content"]) == ("Rome, then.", "Sunny.")
        assert prompt_of(server).endswith("off") == is_off
    found = lines(post(server, GENERATE))
    assert "".join(line.get("thinking", "") for line in found) == "Rome, then."
    template = "{% for m in messages %}{{ m.role }}:{{ m.reasoning }}|{{ m.content }}\n{% endfor %}"
    other = served(tokenizer=byte_tokenizer(template))
    ask(other, messages=[HI, {"role": "assistant", "content": "Sunny.", "thinking": "Rome, then."}, HI])
    assert "assistant:Rome, then.|Sunny." in prompt_of(other)


def test_a_text_with_and_without_the_template() -> None:
    server = served()
    ask(server, GENERATE, system="be brief", raw=False, images=[])
    assert prompt_of(server).startswith("<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhi")
    ask(server, GENERATE, raw=True)
    assert prompt_of(server) == "hi"
    without_template = served(tokenizer=byte_tokenizer(None))
    ask(without_template, GENERATE)
    assert prompt_of(without_template) == "hi"
    special = ("<fim_prefix>", "<fim_suffix>", "<fim_middle>")
    ask(middle := served(tokenizer=byte_tokenizer(special=special)), GENERATE, suffix="ho")
    assert prompt_of(middle) == "<fim_prefix>hi<fim_suffix>ho<fim_middle>"


def test_a_request_without_a_prompt_says_that_the_model_is_loaded() -> None:
    server = served()
    assert ask(server, messages=[])["done_reason"] == "load"
    assert ask(server, GENERATE, prompt="", keep_alive=0)["response"] == ""
    assert not server.target.requests


def test_models() -> None:
    server = served()
    (listed,) = server.call("GET", "/api/tags").json()["models"]
    assert (listed["name"], listed["model"]) == ("fake", "fake")
    (running,) = server.call("GET", "/api/ps").json()["models"]
    assert running["context_length"] == 4096
    for body in ({"model": "fake"}, {"name": "fake"}, {"model": "fake:latest", "verbose": True}):
        shown = server.post("/api/show", body).json()
        assert shown["model_info"][f"{shown['model_info']['general.architecture']}.context_length"] == 4096
        assert (shown["capabilities"], shown["template"]) == (["completion", "tools"], TEMPLATE)
    shown = served(tokenizer=THINKING).post("/api/show", {"model": "fake"}).json()
    assert "thinking" in shown["capabilities"]
    assert server.call("GET", "/api/version").json() == {"version": VERSION}
    assert post(server, model="fake:latest").status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        (CHAT, {"model": "other"}, 404, "does not serve the model 'other'"),
        (CHAT, {"messages": [{**HI, "images": ["iVBORw0KGgo="]}]}, 400, "images are not supported"),
        (CHAT, {"format": "yaml"}, 400, 'format must be "json"'),
        (CHAT, {"option": {}}, 400, "did you mean options?"),
        (GENERATE, {"images": ["iVBORw0KGgo="]}, 400, "images are not supported"),
        ("/api/show", {"model": None}, 400, "model is required"),
        ("/api/pull", {}, 404, "no route /api/pull"),
    ],
)
def test_errors_are_a_text(path: str, body: dict[str, Any], status: int, words: str) -> None:
    given = {"messages": [HI]} if path == CHAT else {"prompt": "hi"} if path == GENERATE else {}
    response = served().post(path, {"model": "fake", **given, **body})
    assert response.status_code == status
    assert words in response.json()["error"]
