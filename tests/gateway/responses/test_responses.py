"""/v1/responses: items in, items and events out, and responses that are continued."""

import json
from typing import Any

import httpx
import pytest

from paceline.core.config import EngineConfig
from tests.gateway.fakes import TEMPLATE, Served, byte_tokenizer, served
from tests.gateway.openai.test_client_requests import CALL, prompt_of

PATH = "/v1/responses"
TOOL = {
    "type": "function",
    "name": "look",
    "strict": True,
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
THINKING = byte_tokenizer(TEMPLATE + "{# <think></think> #}")


def ask(server: Served, given: Any = "hi", **body: Any) -> dict[str, Any]:
    response = server.post(PATH, {"input": given, **body})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def refusal(server: Served, given: Any = "hi", **body: Any) -> tuple[int, dict[str, Any]]:
    response = server.post(PATH, {"input": given, **body})
    return response.status_code, response.json()["error"]


def events(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.status_code == 200, response.text
    found = []
    for block in response.text.strip().split("\n\n"):
        name, data = block.splitlines()[-2:]
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


def stream(server: Served, given: Any = "hi", **body: Any) -> list[dict[str, Any]]:
    return events(server.post(PATH, {"input": given, "stream": True, **body}))


def kinds(found: list[dict[str, Any]]) -> list[str]:
    """The types of events, repeated ones once."""
    names = [event["type"].removeprefix("response.") for event in found]
    return [name for before, name in zip(["", *names], names, strict=False) if name != before]


def test_a_text() -> None:
    server = served()
    answer = ask(server, instructions="be brief", max_output_tokens=50, temperature=0)
    (item,) = answer["output"]
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "completed")
    assert item["content"] == [{"type": "output_text", "text": "Hello there!", "annotations": [], "logprobs": []}]
    assert (answer["status"], answer["object"], answer["error"]) == ("completed", "response", None)
    assert answer["usage"]["total_tokens"] == answer["usage"]["input_tokens"] + answer["usage"]["output_tokens"]
    assert answer["usage"]["input_tokens_details"] == {"cached_tokens": 3}
    assert answer["metrics"]["speculative_decoding"]["num_draft_tokens"] > 0
    assert prompt_of(server).startswith("<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhi")
    assert server.target.requests[0].sampling.temperature == 0


def test_the_events_of_a_text() -> None:
    found = stream(served())
    assert kinds(found) == [
        *("created", "in_progress", "output_item.added", "content_part.added", "output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done", "completed"),
    ]
    assert "".join(event.get("delta", "") for event in found) == "Hello there!"
    assert found[-1]["response"]["output"] == [found[-2]["item"]]
    assert found[0]["response"]["output"] == []
    assert len({event["item_id"] for event in found if "item_id" in event} | {found[-2]["item"]["id"]}) == 1


@pytest.mark.parametrize("is_summary", [False, True])
def test_reasoning_and_its_events(is_summary: bool) -> None:
    options = {"reasoning": {"effort": "low", "summary": "auto"}} if is_summary else {}
    server = served("<think>Rome, then.</think>Sunny.", tokenizer=THINKING)
    found = stream(server, **options, include=["reasoning.encrypted_content"])
    inner = (
        ["reasoning_summary_part.added", "reasoning_summary_text.delta", "reasoning_summary_text.done"]
        if is_summary
        else ["content_part.added", "reasoning_text.delta", "reasoning_text.done"]
    )
    end = "reasoning_summary_part.done" if is_summary else "content_part.done"
    assert kinds(found)[2:8] == ["output_item.added", *inner, end, "output_item.done"]
    reasoning, message = found[-1]["response"]["output"]
    part = (reasoning["summary"] if is_summary else reasoning["content"])[0]
    assert part["text"] == "Rome, then."
    assert message["content"][0]["text"] == "Sunny."
    assert found[-1]["response"]["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
    for kept in (
        {"summary": [], "content": None, "encrypted_content": reasoning["encrypted_content"]},
        {"summary": [{"type": "summary_text", "text": "Rome, then."}], "encrypted_content": "c3R1Yg=="},
        {"summary": [], "content": [{"type": "reasoning_text", "text": "Rome, then."}]},
    ):
        template = "{% for m in messages %}{{ m.role }}:{{ m.reasoning }}|{{ m.content }}\n{% endfor %}"
        other = served(tokenizer=byte_tokenizer(template))
        ask(other, [{"role": "user", "content": "hi"}, {"type": "reasoning", "id": "rs_1", **kept}, message])
        assert "assistant:Rome, then.|Sunny." in prompt_of(other)


@pytest.mark.parametrize("is_stream", [False, True])
def test_two_turns_with_a_call(is_stream: bool) -> None:
    server = served(CALL)
    if is_stream:
        found = stream(server, tools=[TOOL], tool_choice="auto")
        assert kinds(found)[2:6] == [
            *("output_item.added", "function_call_arguments.delta"),
            *("function_call_arguments.done", "output_item.done"),
        ]
        answer = found[-1]["response"]
        assert [event["item"] for event in found if event["type"] == "response.output_item.done"] == answer["output"]
    else:
        answer = ask(server, tools=[TOOL], tool_choice="auto")
    (call,) = answer["output"]
    assert (call["type"], call["name"], call["status"]) == ("function_call", "look", "completed")
    assert json.loads(call["arguments"]) == {"city": "Rome"}
    result = {"type": "function_call_output", "id": "fco_1", "call_id": call["call_id"], "output": "Sunny."}
    sent_back = {name: value for name, value in call.items() if name not in ("id", "status")}
    for item in (call, sent_back):
        ask(server, [{"role": "user", "content": "hi"}, item, result], tools=[TOOL])
        assert '<tool_call>\n{"name": "look", "arguments": {"city": "Rome"}}\n</tool_call>' in prompt_of(server)
        assert "<tool_response>\nSunny.\n</tool_response>" in prompt_of(server)
    ask(server, [result], previous_response_id=answer["id"], tools=[TOOL])
    assert "user\nhi<|im_end|>" in prompt_of(server)
    assert prompt_of(server).index('"Rome"') < prompt_of(server).index("Sunny.")


def test_a_custom_tool_gets_a_text_and_is_sent_back() -> None:
    tool = {"type": "custom", "name": "patch", "description": "apply", "format": {"type": "text"}}
    server = served('<tool_call>{"name": "patch", "arguments": {"input": "a\\nb"}}</tool_call>')
    found = stream(server, tools=[tool])
    assert kinds(found)[2:6] == [
        *("output_item.added", "custom_tool_call_input.delta"),
        *("custom_tool_call_input.done", "output_item.done"),
    ]
    (call,) = found[-1]["response"]["output"]
    assert (call["type"], call["input"]) == ("custom_tool_call", "a\nb")
    result = {"type": "custom_tool_call_output", "call_id": call["call_id"], "output": "ok"}
    ask(server, [{"role": "user", "content": "hi"}, call, result], tools=[tool])
    assert '{"name": "patch", "arguments": {"input": "a\\nb"}}' in prompt_of(server)


def test_hosted_tools_are_left_out_and_unknown_ones_refused() -> None:
    server = served()
    hosted = [
        {"type": "namespace", "name": "agents", "description": "", "tools": [TOOL]},
        {"type": "web_search", "external_web_access": True},
        {"type": "web_search_preview_2025_03_11"},
    ]
    ask(server, tools=hosted, tool_choice="auto", parallel_tool_calls=True)
    assert "look" not in prompt_of(server)
    ask(server, tools=[*hosted, TOOL])
    assert '"look"' in prompt_of(server)
    status, error = refusal(server, tools=[{**TOOL, "type": "fuction"}])
    assert (status, error["message"]) == (
        400,
        "tools.0: tools of type fuction are not supported: send functions",
    )


@pytest.mark.parametrize(
    "choice",
    [
        {"type": "function", "name": "look"},
        {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "look"}]},
        "required",
    ],
)
def test_a_forced_call(choice: Any) -> None:
    server = served('{"city": "Rome"}')
    (call,) = ask(server, tools=[TOOL], tool_choice=choice)["output"]
    assert (call["name"], call["arguments"]) == ("look", '{"city": "Rome"}')
    assert server.target.requests[0].sampling.json_schema == TOOL["parameters"]


def test_a_schema_of_the_text() -> None:
    schema = {"type": "object", "properties": {"days": {"type": "integer"}}}
    server = served('{"days": 3}')
    form = {"type": "json_schema", "name": "Trip", "strict": True, "schema": schema}
    answer = ask(server, text={"format": form, "verbosity": "low"})
    assert server.target.requests[0].sampling.json_schema == schema
    assert answer["text"]["format"]["schema"] == schema


def test_items_in_all_forms() -> None:
    server = served()
    items = [
        {"role": "developer", "content": "d"},
        {"type": "message", "role": "system", "content": [{"type": "input_text", "text": "s"}]},
        {"role": "user", "content": [{"type": "input_text", "text": "u"}], "id": "msg_1", "status": "completed"},
        {"role": "assistant", "content": [{"type": "output_text", "text": "a", "annotations": []}]},
        {"type": "item_reference", "id": "rs_unknown"},
        {"role": "user", "content": ""},
    ]
    ask(server, items, client_metadata={"turn": "1"}, prompt_cache_key="k", include=["x"], store=False, user="u")
    roles = [line.partition("\n")[0] for line in prompt_of(server).split("<|im_start|>")[1:]]
    assert roles == ["system", "system", "user", "assistant", "user", "assistant"]
    ask(server, "")


@pytest.mark.parametrize(
    ("body", "message", "code"),
    [
        ({"input": [{"type": "message", "role": "user", "content": [{"type": "input_image"}]}]}, "text only", "value"),
        ({"input": [{"type": "computer_call", "id": "1"}]}, "input.0.type: must be one of", "value"),
        ({"max_output_token": 3}, "did you mean max_output_tokens?", "unknown_parameter"),
        ({"background": True}, "background is not supported", "unsupported_parameter"),
        ({"temperature": 11}, "temperature", "invalid_value"),
        ({"tools": [TOOL, TOOL]}, "two tools have the same name", "invalid_value"),
        ({"previous_response_id": "resp_1"}, "not found", "previous_response_not_found"),
    ],
)
def test_refused_bodies(body: dict[str, Any], message: str, code: str) -> None:
    response = served().post(PATH, {"input": "hi", **body})
    assert response.status_code == 400
    error = response.json()["error"]
    assert message in error["message"]
    assert code in error["code"]


def test_a_new_field_of_an_agent_is_ignored() -> None:
    ask(served(), stream_tool_progress=True)


def test_a_prompt_that_is_too_long() -> None:
    server = served(engine=EngineConfig(model="fake", max_num_seqs=4, max_model_len=64))
    for is_stream in (False, True):
        status, error = refusal(server, "x" * 64, stream=is_stream)
        assert (status, error["code"]) == (400, "context_length_exceeded")


@pytest.mark.parametrize("is_stream", [False, True])
def test_an_answer_that_is_cut_is_incomplete(is_stream: bool) -> None:
    server = served()
    if is_stream:
        found = stream(server, max_output_tokens=5)
        assert found[-1]["type"] == "response.incomplete"
        answer = found[-1]["response"]
    else:
        answer = ask(server, max_output_tokens=5)
    assert (answer["status"], answer["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert answer["output"][0]["status"] == "incomplete"
    assert answer["output"][0]["content"][0]["text"] == "Hello"


def test_a_response_is_kept_for_its_key_until_it_is_deleted() -> None:
    server = served()
    first = ask(server, instructions="be brief")
    assert server.call("GET", f"{PATH}/{first['id']}").json() == first
    second = ask(server, "more", previous_response_id=first["id"])
    assert second["previous_response_id"] == first["id"]
    assert "user\nhi<|im_end|>\n<|im_start|>assistant\nHello there!<|im_end|>\n<|im_start|>user\nmore" in prompt_of(
        server
    )
    assert "be brief" not in prompt_of(server)  # instructions are those of one response
    reference = {"type": "item_reference", "id": first["output"][0]["id"]}
    ask(server, [{"role": "user", "content": "hi"}, reference, {"role": "user", "content": "again"}])
    assert "assistant\nHello there!<|im_end|>" in prompt_of(server)
    deleted = server.call("DELETE", f"{PATH}/{first['id']}").json()
    assert deleted == {"id": first["id"], "object": "response", "deleted": True}
    assert server.call("GET", f"{PATH}/{first['id']}").status_code == 404
    assert server.call("DELETE", f"{PATH}/{first['id']}").status_code == 404
    assert refusal(server, previous_response_id=first["id"])[1]["code"] == "previous_response_not_found"
    assert refusal(server, [{**reference, "id": "msg_1"}])[0] == 404


def test_a_stream_continues_after_an_event() -> None:
    server = served()
    body = {"input": "hi", "stream": True, "stream_options": {"resumable": True}}
    blocks = server.post(PATH, body).text.strip().split("\n\n")
    at = [number for number, block in enumerate(blocks) if block.startswith("id: ")][1]
    last = blocks[at].splitlines()[0].removeprefix("id: ")
    rest = server.post(PATH, body, headers={"last-event-id": last}).text.strip().split("\n\n")
    assert [block.splitlines()[-2] for block in rest] == [block.splitlines()[-2] for block in blocks[at + 1 :]]
    final, again = (json.loads(block.splitlines()[-1].removeprefix("data: ")) for block in (blocks[-1], rest[-1]))
    assert final["response"]["output"] == again["response"]["output"]
    assert final["response"]["id"] == again["response"]["id"]


def test_store_false_keeps_nothing() -> None:
    server = served()
    answer = ask(server, store=False)
    assert answer["store"] is False
    assert server.call("GET", f"{PATH}/{answer['id']}").status_code == 404


def test_input_tokens() -> None:
    server = served()
    count = server.post(f"{PATH}/input_tokens", {"input": "hi", "instructions": "be brief", "tools": [TOOL]}).json()
    assert count["object"] == "response.input_tokens"
    assert count["input_tokens"] == ask(server, instructions="be brief", tools=[TOOL])["usage"]["input_tokens"]
