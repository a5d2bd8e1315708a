"""POST /v1/chat/completions: responses, streams, parameters and tools."""

import json
from typing import Any

import pytest

from paceline.core.request import Request
from tests.gateway.fakes import FINGERPRINT, Served, events, served

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Hi"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look at a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def chat(server: Served, **body: Any) -> dict[str, Any]:
    response = server.post(CHAT, {"messages": MESSAGES, **body})
    assert response.status_code == 200, response.text
    return response.json()


def chunks(server: Served, **body: Any) -> list[dict[str, Any]]:
    response = server.post(CHAT, {"messages": MESSAGES, "stream": True, **body})
    assert response.status_code == 200, response.text
    *data, done = events(response)
    assert done == "[DONE]"
    return [json.loads(item) for item in data]


def prompt_of(server: Served) -> str:
    return server.target.tokenizer.decode(server.target.requests[-1].prompt_ids, skip_special=False)


def test_a_response() -> None:
    answer = chat(served("Hello there!"), model="fake")
    assert answer["object"] == "chat.completion"
    assert answer["id"].startswith("chatcmpl-")
    assert answer["system_fingerprint"] == FINGERPRINT
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hello there!"},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    usage = answer["usage"]
    assert usage["completion_tokens"] == 12
    assert usage["total_tokens"] == usage["prompt_tokens"] + 12
    assert usage["prompt_tokens_details"] == {"cached_tokens": 3}


def test_speculation_metrics() -> None:
    metrics = chat(served("123456789", per_step=4))["metrics"]["speculative_decoding"]
    assert metrics == {
        "mean_acceptance_length": 4.0,
        "draft_acceptance_rate": 1.0,
        "acceptance_histogram": [0, 0, 0, 2, 0, 0, 0, 0, 0],
        "num_spec_steps": 2,
        "num_accepted_draft_tokens": 6,
        "num_draft_tokens": 6,
        "num_spec_tokens": 8,
    }


def test_a_stream_has_one_chunk_per_step_and_metrics_in_the_last() -> None:
    parts = chunks(served("Hello there!", per_step=5))
    assert [part["choices"][0]["delta"] for part in parts] == [
        {"role": "assistant", "content": "Hello"},
        {"content": " ther"},
        {"content": "e!"},
    ]
    assert [part["choices"][0]["finish_reason"] for part in parts] == [None, None, "stop"]
    assert ["metrics" in part for part in parts] == [False, False, True]
    assert not any("usage" in part for part in parts)
    assert len({part["id"] for part in parts}) == 1


def test_include_usage_adds_a_last_chunk() -> None:
    *parts, last = chunks(served("Hello"), n=2, stream_options={"include_usage": True})
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 10
    assert last["metrics"]["speculative_decoding"]["num_spec_tokens"] == 8
    assert all(part["usage"] is None for part in parts)
    assert not any("metrics" in part for part in parts)


def test_choices_are_separate() -> None:
    answer = chat(served("Hi!"), n=3)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    texts: dict[int, str] = {}
    for part in chunks(served("Hello!"), n=3):
        choice = part["choices"][0]
        texts[choice["index"]] = texts.get(choice["index"], "") + choice["delta"].get("content", "")
    assert texts == {0: "Hello!", 1: "Hello!", 2: "Hello!"}


def test_logprobs() -> None:
    content = chat(served("Hé"), logprobs=True, top_logprobs=2)["choices"][0]["logprobs"]["content"]
    assert [item["bytes"] for item in content] == [[72], [0xC3], [0xA9]]
    assert content[0]["token"] == "H"
    assert content[0]["logprob"] == -0.5
    assert [len(item["top_logprobs"]) for item in content] == [2, 2, 2]
    parts = chunks(served("Hé", per_step=1), logprobs=True)
    assert [part["choices"][0]["logprobs"]["content"][0]["bytes"] for part in parts] == [[72], [0xC3], [0xA9]]


def test_parameters_reach_the_engine() -> None:
    server = served()
    chat(
        server,
        max_completion_tokens=7,
        temperature=0.5,
        top_p=0.9,
        seed=11,
        stop="end",
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        logit_bias={"65": -100},
        top_k=-1,
        min_p=0.1,
        repetition_penalty=1.1,
        ignore_eos=True,
        stop_token_ids=[3],
        cache_salt="salt",
        priority=-2,
        speculation={"enabled": False, "max_depth": 2, "verification": "rejection"},
        metadata={"category": "code"},
        user="someone",
    )
    request = server.target.requests[0]
    sampling = request.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.seed) == (7, 0.5, 0.9, 11)
    assert (sampling.stop, sampling.stop_token_ids, sampling.ignore_eos) == (("end",), (3,), True)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (0.5, -0.5, 1.1)
    assert (sampling.logit_bias, sampling.top_k, sampling.min_p) == ({65: -100}, 0, 0.1)
    assert (request.cache_salt, request.priority, request.category) == ("salt", -2, "code")
    speculation = request.speculation
    assert (speculation.enabled, speculation.max_depth, speculation.verification) == (False, 2, "rejection")


def test_defaults() -> None:
    server = served()
    chat(server)
    chat(server, temperature=None, stop=None, tools=None, function_call=None)
    for request in server.target.requests:
        assert request.sampling.max_tokens == 4096
        assert request.sampling.temperature == 1.0
        assert request.category == "prose"
    assert server.target.requests[0].sampling.seed != server.target.requests[1].sampling.seed


def test_the_header_sets_the_category() -> None:
    server = served()
    server.post(CHAT, {"messages": MESSAGES, "metadata": {"category": "b"}}, headers={"X-Paceline-Category": "a"})
    assert server.target.requests[0].category == "a"


def test_content_parts_and_developer_role() -> None:
    server = served()
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    chat(server, messages=[{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts}])
    assert prompt_of(server) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\none two<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    ("form", "schema"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, {"type": "object"}),
        (
            {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "array"}, "strict": True}},
            {"type": "array"},
        ),
    ],
)
def test_response_formats(form: dict[str, Any], schema: dict[str, Any] | None) -> None:
    server = served()
    chat(server, response_format=form)
    assert server.target.requests[0].sampling.json_schema == schema


CALL = 'Wait.\n<tool_call>{"name": "look", "arguments": {"city": "Rome"}}</tool_call>'


def test_a_tool_call() -> None:
    server = served(CALL)
    choice = chat(server, tools=[TOOL])["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "Wait."
    call = choice["message"]["tool_calls"][0]
    assert call["type"] == "function"
    assert call["function"] == {"name": "look", "arguments": '{"city": "Rome"}'}
    assert '"description": "Look at a city."' in prompt_of(server)


def test_a_tool_call_in_a_stream() -> None:
    parts = chunks(served(CALL), tools=[TOOL])
    deltas = [part["choices"][0]["delta"] for part in parts]
    assert "".join(delta.get("content") or "" for delta in deltas) == "Wait."
    first, *others = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert (first["index"], first["type"], first["function"]["name"]) == (0, "function", "look")
    assert all(call.keys() == {"index", "function"} for call in others)
    assert len(others) > 2
    assert "".join(call["function"]["arguments"] for call in (first, *others)) == '{"city": "Rome"}'
    assert parts[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_a_truncated_tool_call_is_text() -> None:
    choice = chat(served(CALL), tools=[TOOL], max_tokens=30)["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["message"] == {"role": "assistant", "content": CALL[:30]}


def test_tool_choice_none() -> None:
    server = served(CALL)
    assert chat(server, tools=[TOOL], tool_choice="none")["choices"][0]["message"]["content"] == CALL
    assert "look" not in prompt_of(server)


def test_a_named_tool_is_forced_and_streamed() -> None:
    server = served('{"city": "Rome"}', per_step=4)
    parts = chunks(server, tools=[TOOL], tool_choice={"type": "function", "function": {"name": "look"}})
    assert server.target.requests[0].sampling.json_schema == TOOL["function"]["parameters"]
    calls = [call for part in parts for call in part["choices"][0]["delta"].get("tool_calls", ())]
    assert calls[0]["function"]["name"] == "look"
    assert len(calls) == 4
    assert "".join(call["function"]["arguments"] for call in calls) == '{"city": "Rome"}'


def test_tool_choice_required_forces_any_tool() -> None:
    def generate(request: Request) -> str:
        return '{"name": "other", "arguments": {"x": 1}}'

    server = served(generate)
    parameters = {"type": "object", "properties": {"x": {"$ref": "#/$defs/X"}}, "$defs": {"X": {"type": "integer"}}}
    other = {"type": "function", "function": {"name": "other", "parameters": parameters}}
    choice = chat(server, tools=[TOOL, other], tool_choice="required")["choices"][0]
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "other", "arguments": '{"x": 1}'}
    schema = server.target.requests[0].sampling.json_schema
    assert schema is not None
    moved = schema["anyOf"][1]["properties"]["arguments"]
    assert moved["properties"]["x"] == {"$ref": "#/anyOf/1/properties/arguments/$defs/X"}


def test_earlier_tool_calls_are_written_as_text() -> None:
    server = served()
    message = chat(served(CALL), tools=[TOOL])["choices"][0]["message"]
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "Sunny."}
    chat(server, messages=[*MESSAGES, {**message, "refusal": None, "annotations": []}, result], tools=[TOOL])
    prompt = prompt_of(server)
    assert '<tool_call>\n{"name": "look", "arguments": {"city": "Rome"}}\n</tool_call>' in prompt
    assert "<|im_start|>user\n<tool_response>\nSunny.\n</tool_response><|im_end|>" in prompt


def test_parallel_tool_calls_false_stops_after_one_call() -> None:
    server = served()
    chat(server, tools=[TOOL], parallel_tool_calls=False, stop=["x"])
    assert server.target.requests[0].sampling.stop == ("x", "</tool_call>")
