"""/v1/messages: blocks in, blocks and events out, and errors in the words of Anthropic's clients."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from paceline.core.config import EngineConfig
from paceline.gateway.auth.api_keys import KeyFile, KeyLimits
from tests.gateway.fakes import TEMPLATE, Served, byte_tokenizer, served
from tests.gateway.openai.test_client_requests import CALL, prompt_of

PATH = "/v1/messages"
HI = {"role": "user", "content": "hi"}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"name": "look", "input_schema": SCHEMA, "cache_control": {"type": "ephemeral"}}
THINKING = byte_tokenizer(TEMPLATE + "{# <think></think> #}{% if enable_thinking is false %}off{% endif %}")


def body_of(messages: list[Any] | None = None, **body: Any) -> dict[str, Any]:
    return {"messages": messages or [HI], "max_tokens": 100, **body}


def ask(server: Served, messages: list[Any] | None = None, **body: Any) -> dict[str, Any]:
    response = server.post(PATH, body_of(messages, **body))
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def events(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.status_code == 200, response.text
    found = []
    for block in response.text.strip().split("\n\n"):
        name, data = block.splitlines()[-2:]
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def stream(server: Served, messages: list[Any] | None = None, **body: Any) -> list[dict[str, Any]]:
    return events(server.post(f"{PATH}?beta=true", body_of(messages, stream=True, **body)))


def kinds(found: list[dict[str, Any]]) -> list[str]:
    names = [event["type"] for event in found]
    return [name for before, name in zip(["", *names], names, strict=False) if name != before]


def test_a_text() -> None:
    server = served()
    answer = ask(server, system="be brief", temperature=0.5, top_k=3, metadata={"user_id": "u"})
    assert answer["content"] == [{"type": "text", "text": "Hello there!"}]
    assert (answer["role"], answer["stop_reason"], answer["stop_sequence"]) == ("assistant", "end_turn", None)
    usage = answer["usage"]
    assert (usage["cache_read_input_tokens"], usage["output_tokens"]) == (3, len("Hello there!"))
    counted = server.post(f"{PATH}/count_tokens", {"messages": [HI], "system": "be brief"}).json()
    assert counted == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}
    sampling = server.target.requests[0].sampling
    assert (sampling.temperature, sampling.top_k, sampling.max_tokens) == (0.5, 3, 100)


def test_the_events_of_a_text() -> None:
    found = stream(served())
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert kinds(found) == ["message_start", "ping", *block, "message_delta", "message_stop"]
    assert "".join(event["delta"]["text"] for event in found if event["type"] == block[1]) == "Hello there!"
    assert found[0]["message"]["usage"]["output_tokens"] == 0
    assert found[-2]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert found[-2]["usage"]["output_tokens"] == len("Hello there!")


def test_thinking_and_its_events() -> None:
    server = served("<think>Rome, then.</think>Sunny.", tokenizer=THINKING)
    found = stream(server, thinking={"type": "adaptive", "display": "omitted"}, output_config={"effort": "xhigh"})
    assert "off" not in prompt_of(server)
    types = [event["delta"]["type"] for event in found if event["type"] == "content_block_delta"]
    assert list(dict.fromkeys(types)) == ["thinking_delta", "signature_delta", "text_delta"]
    answer = ask(server, thinking={"type": "enabled", "budget_tokens": 31999})
    thinking, text = answer["content"]
    assert (thinking["thinking"], text["text"]) == ("Rome, then.", "Sunny.")
    assert thinking["signature"]
    template = "{% for m in messages %}{{ m.role }}:{{ m.reasoning }}|{{ m.content }}\n{% endfor %}"
    other = served(tokenizer=byte_tokenizer(template))
    ask(other, [HI, {"role": "assistant", "content": answer["content"]}, HI])
    assert "assistant:Rome, then.|Sunny." in prompt_of(other)


@pytest.mark.parametrize("thinking", [None, {"type": "disabled"}])
def test_without_thinking_the_template_turns_it_off(thinking: Any) -> None:
    server = served(tokenizer=THINKING)
    ask(server, thinking=thinking)
    assert prompt_of(server).endswith("off")


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("result", ["Sunny.", [{"type": "text", "text": "Sunny."}]])
def test_two_turns_with_a_tool(is_stream: bool, result: Any) -> None:
    server = served("Let me see." + CALL)
    if is_stream:
        found = stream(server, tools=[TOOL], tool_choice={"type": "auto", "disable_parallel_tool_use": False})
        starts = [event["content_block"] for event in found if event["type"] == "content_block_start"]
        assert [event["index"] for event in found if event["type"] == "content_block_stop"] == [0, 1]
        deltas = [event["delta"] for event in found if event["type"] == "content_block_delta"]
        arguments = "".join(delta.get("partial_json", "") for delta in deltas)
        call = {**starts[1], "input": json.loads(arguments)}
        text = {"type": "text", "text": "".join(delta.get("text", "") for delta in deltas)}
        assert found[-2]["delta"]["stop_reason"] == "tool_use"
    else:
        answer = ask(server, tools=[{**TOOL, "type": "custom", "eager_input_streaming": True, "strict": True}])
        text, call = answer["content"]
        assert answer["stop_reason"] == "tool_use"
    assert text == {"type": "text", "text": "Let me see."}
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "look", {"city": "Rome"})
    assert call["id"].startswith("toolu_")
    part = {"type": "tool_result", "tool_use_id": call["id"], "content": result, "is_error": False}
    more = {"type": "text", "text": "And now?", "cache_control": {"type": "ephemeral"}}
    back = [HI, {"role": "assistant", "content": [text, call]}, {"role": "user", "content": [part, more]}]
    ask(server, back, tools=[TOOL])
    asked = prompt_of(server)
    assert 'Let me see.\n<tool_call>\n{"name": "look", "arguments": {"city": "Rome"}}' in asked
    assert "<tool_response>\nSunny.\n</tool_response>" in asked
    assert asked.index("Sunny.") < asked.index("And now?")


@pytest.mark.parametrize(("choice", "is_forced"), [("any", True), ("tool", True), ("auto", False), ("none", False)])
def test_tool_choice(choice: str, is_forced: bool) -> None:
    server = served('{"city": "Rome"}')
    named = {"name": "look"} if choice == "tool" else {}
    answer = ask(server, tools=[TOOL], tool_choice={"type": choice, **named})
    assert (server.target.requests[0].sampling.json_schema == SCHEMA) == is_forced
    assert (answer["stop_reason"] == "tool_use") == is_forced
    assert ('"look"' in prompt_of(server)) == (choice != "none")


def test_tools_of_other_servers_and_deferred_ones_are_left_out() -> None:
    server = served()
    deferred = {"name": "later", "input_schema": {"type": "object"}, "defer_loading": True}
    tools = [TOOL, {"type": "web_search_20250305", "name": "web_search"}, deferred]
    ask(server, tools=tools)
    assert '"look"' in prompt_of(server)
    assert "web_search" not in prompt_of(server)
    assert "later" not in prompt_of(server)
    found = {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "tool_reference", "tool_name": "later"}]}
    use = {"type": "tool_use", "id": "1", "name": "look", "input": {}}
    ask(server, [HI, {"role": "assistant", "content": [use]}, {"role": "user", "content": [found]}], tools=tools)
    assert '"later"' in prompt_of(server)


def test_the_system_prompt_and_system_messages() -> None:
    server = served()
    system = [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cc_entrypoint=cli;"},
        {"type": "text", "text": "You are an agent.", "cache_control": {"type": "ephemeral"}},
    ]
    texts = []
    for content in ("Environment", [{"type": "text", "text": "Environment", "cache_control": {"type": "ephemeral"}}]):
        ask(server, [HI, {"role": "system", "content": content, "output_config": {"effort": "low"}}], system=system)
        texts.append(prompt_of(server))
    assert texts[0] == texts[1]
    assert "billing" not in texts[0]
    assert texts[0].startswith("<|im_start|>system\nYou are an agent.<|im_end|>\n<|im_start|>user\nhi<|im_end|>")
    assert "<|im_start|>system\nEnvironment<|im_end|>" in texts[0]


def test_a_template_that_takes_one_system_message_gets_one() -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('system first') }}"
        "{% endif %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    )
    server = served(tokenizer=byte_tokenizer(template))
    late = {"role": "system", "content": "Environment"}
    ask(server, [HI, late, {"role": "assistant", "content": "ok"}, late, HI], system="Be.")
    assert prompt_of(server) == "[system]Be.[user]hi\n\nEnvironment[assistant]ok[user]Environment\n\nhi"


def test_a_stream_continues_after_an_event() -> None:
    server = served()
    body = body_of(stream=True, stream_options={"resumable": True})
    blocks = server.post(PATH, body).text.strip().split("\n\n")
    at = [number for number, block in enumerate(blocks) if block.startswith("id: ")][1]
    last = blocks[at].splitlines()[0].removeprefix("id: ")
    rest = server.post(PATH, body, headers={"last-event-id": last}).text.strip().split("\n\n")
    assert [block.splitlines()[-2:] for block in rest][:-2] == [block.splitlines()[-2:] for block in blocks[at + 1 :]][
        :-2
    ]
    assert rest[-1].endswith('data: {"type":"message_stop"}')


def test_an_answer_continues_a_last_message_of_the_assistant() -> None:
    server = served()
    answer = ask(server, [HI, {"role": "assistant", "content": "The"}])
    assert answer["content"][0]["text"] == "Hello there!"
    assert prompt_of(server).endswith("<|im_start|>assistant\nThe")


def test_stop_reasons() -> None:
    server = served()
    answer = ask(server, stop_sequences=["END", "there"])
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", "there")
    assert answer["content"][0]["text"] == "Hello "
    assert ask(server, stop_sequences=["END"])["stop_reason"] == "end_turn"
    assert ask(server, max_tokens=5)["stop_reason"] == "max_tokens"
    assert ask(server, max_tokens=128_000)["stop_reason"] == "end_turn"  # beyond the window


def test_a_call_that_is_cut_is_left_out() -> None:
    answer = ask(served(CALL), tools=[TOOL], max_tokens=55)
    assert answer["stop_reason"] == "max_tokens"
    assert answer["content"] == [{"type": "text", "text": ""}]


def test_a_schema_of_the_answer() -> None:
    server = served('{"city": "Rome"}')
    ask(server, output_config={"format": {"type": "json_schema", "schema": SCHEMA}, "effort": "medium"})
    assert server.target.requests[0].sampling.json_schema == SCHEMA


def test_what_agents_add_is_ignored_and_typing_errors_are_not() -> None:
    server = served()
    ask(
        server,
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        safeguards=[{"type": "dangerous_tool_use"}],
        service_tier="auto",
        a_field_of_tomorrow=1,
    )
    response = server.post(PATH, body_of(temprature=1))
    assert response.status_code == 400
    message = "unknown parameter temprature; did you mean temperature?"
    assert response.json() == {"type": "error", "error": {"type": "invalid_request_error", "message": message}}


@pytest.mark.parametrize(
    ("body", "status", "kind"),
    [
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, 400, "invalid_request_error"),
        ({"messages": []}, 400, "invalid_request_error"),
        ({"model": "claude"}, 404, "not_found_error"),
    ],
)
def test_errors_have_the_form_that_clients_read(body: dict[str, Any], status: int, kind: str) -> None:
    response = served().post(PATH, {**body_of(), **body})
    assert response.status_code == status
    assert (response.json()["type"], response.json()["error"]["type"]) == ("error", kind)


def test_errors_before_the_route_have_it_too(tmp_path: Path) -> None:
    keys = KeyFile(tmp_path / "keys.json")
    key = keys.add("ann", limits=KeyLimits(requests_per_minute=1))
    server = served(api_keys=str(tmp_path / "keys.json"))
    response = server.post(PATH, body_of())
    assert (response.status_code, response.json()["error"]["type"]) == (401, "authentication_error")
    assert server.post(PATH, body_of(), headers={"x-api-key": "pl-wrong"}).status_code == 401
    assert server.post(PATH, body_of(), headers={"x-api-key": key}).status_code == 200
    response = server.post(PATH, body_of(), headers={"authorization": f"Bearer {key}"})
    assert (response.status_code, response.json()["error"]["type"]) == (429, "rate_limit_error")
    assert int(response.headers["retry-after"]) > 0


def test_a_full_server_answers_529() -> None:
    engine = EngineConfig(model="fake", max_num_seqs=1, max_model_len=4096)
    server = served(hold=True, engine=engine, max_waiting=0)

    async def run() -> httpx.Response:
        async with server.client() as client:
            first = asyncio.create_task(client.post(PATH, json=body_of()))
            while not server.target.requests:
                await asyncio.sleep(0)
            refused = await client.post(PATH, json=body_of())
            server.target.release()
            assert (await first).status_code == 200
            return refused

    response = asyncio.run(run())
    assert (response.status_code, response.json()["error"]["type"]) == (529, "overloaded_error")
    assert int(response.headers["retry-after"]) > 0


def test_a_prompt_that_is_too_long() -> None:
    server = served(engine=EngineConfig(model="fake", max_num_seqs=4, max_model_len=64))
    response = server.post(PATH, body_of([{"role": "user", "content": "x" * 64}]))
    assert response.status_code == 400
    count = server.post(f"{PATH}/count_tokens", {"messages": [{"role": "user", "content": "x" * 64}]}).json()
    message = f"prompt is too long: {count['input_tokens']} tokens > 63 maximum"
    assert response.json()["error"] == {"type": "invalid_request_error", "message": message}


def test_counting_waits_for_no_generation() -> None:
    server = served(hold=True)
    counts = [server.post(f"{PATH}/count_tokens", {"messages": [HI], "tools": [TOOL]}) for _ in range(26)]
    assert {response.status_code for response in counts} == {200}
    assert not server.target.requests
