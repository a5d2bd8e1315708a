"""Reasoning in answers of /v1/chat/completions, and in the messages of a later turn."""

import json
from typing import Any

import pytest

from tests.gateway.fakes import TEMPLATE, Served, byte_tokenizer, events, served

CHAT = "/v1/chat/completions"
HI = {"role": "user", "content": "hi"}
OPEN = "{% if enable_thinking is not defined or enable_thinking %}<think>\n{% endif %}"
HISTORY = "{% for m in messages %}{% if m.reasoning_content %}[{{ m.reasoning_content }}]{% endif %}{% endfor %}"
THINKS = HISTORY + TEMPLATE + OPEN
TOOL = {"type": "function", "function": {"name": "look"}}


def server(text: str, template: str = THINKS, **config: Any) -> Served:
    return served(text, tokenizer=byte_tokenizer(template), **config)


def message(found: Served, **body: Any) -> dict[str, Any]:
    response = found.post(CHAT, {"messages": [HI], **body})
    assert response.status_code == 200, response.text
    parsed: dict[str, Any] = response.json()["choices"][0]["message"]
    return parsed


def deltas(found: Served, **body: Any) -> list[dict[str, Any]]:
    response = found.post(CHAT, {"messages": [HI], "stream": True, **body})
    return [json.loads(event)["choices"][0]["delta"] for event in events(response)[:-1]]


def prompt_of(found: Served) -> str:
    return found.target.tokenizer.decode(found.target.requests[-1].prompt_ids, skip_special=False)


def test_reasoning_is_apart_from_the_answer() -> None:
    found = message(server("Hm, so.\n</think>\n\nRome."))
    assert found == {"role": "assistant", "content": "Rome.", "reasoning": "Hm, so.", "reasoning_content": "Hm, so."}


def test_reasoning_is_streamed_under_both_names() -> None:
    parts = deltas(server("Hm, so.\n</think>\n\nRome."))
    assert parts[0]["role"] == "assistant"
    for name in ("reasoning", "reasoning_content"):
        assert "".join(part.get(name, "") for part in parts) == "Hm, so."
    assert "".join(part.get("content") or "" for part in parts) == "Rome."


def test_reasoning_can_be_left_out_turned_off_and_kept_in_the_text() -> None:
    text = "Hm.</think>Rome."
    assert message(server(text), include_reasoning=False) == {"role": "assistant", "content": "Rome."}
    for body in ({"chat_template_kwargs": {"enable_thinking": False}}, {"reasoning_effort": "none"}):
        off = server("Rome.")
        assert message(off, **body) == {"role": "assistant", "content": "Rome."}
        assert not prompt_of(off).endswith("<think>\n")
    assert message(server(text, reasoning_parser="none"))["content"] == text


def test_reasoning_of_a_template_without_marks_can_be_named() -> None:
    found = message(server("[THINK]Hm.[/THINK]Rome.", TEMPLATE, reasoning_parser="brackets"))
    assert (found["reasoning"], found["content"]) == ("Hm.", "Rome.")


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_reasoning_is_accepted_back_under_both_names(name: str) -> None:
    found = server("Rome.</think>")
    message(found, messages=[HI, {"role": "assistant", "content": "Rome.", name: "Hm."}, HI])
    assert prompt_of(found).startswith("[Hm.]")


def test_templates_find_reasoning_under_their_own_name() -> None:
    shown = (
        "{% for m in messages %}({{ m.reasoning }}|{{ m.reasoning_content }}|{{ m.thinking }}){% endfor %}{{ tools }}"
    )
    found = server("ok", shown)
    call = {"id": "c", "function": {"name": "look", "arguments": "{}"}}
    for content, thinking in (("Rome.", ""), (None, "Hm.")):
        turn = {"role": "assistant", "content": content, "reasoning_content": "Hm.", "tool_calls": [call]}
        message(found, messages=[turn, {"role": "tool", "tool_call_id": "c", "content": "ok"}], tools=[TOOL])
        assert prompt_of(found).startswith(f"(Hm.|Hm.|{thinking})(||)")


def test_a_constrained_answer_has_no_reasoning() -> None:
    found = server('{"a": 1}')
    assert message(found, response_format={"type": "json_object"})["content"] == '{"a": 1}'


def test_a_call_follows_reasoning() -> None:
    text = 'Hm.\n</think>\n\n<tool_call>\n{"name": "look", "arguments": {"x": 1}}\n</tool_call>'
    found = message(server(text), tools=[TOOL])
    assert (found["reasoning"], found["content"]) == ("Hm.", None)
    assert found["tool_calls"][0]["function"] == {"name": "look", "arguments": '{"x": 1}'}


def test_markers_that_are_special_tokens_are_part_of_the_text_that_is_parsed() -> None:
    tokenizer = byte_tokenizer(TEMPLATE + "{# [TOOL_CALLS] [ARGS] #}", ("[TOOL_CALLS]",))
    for tools, skips in (([TOOL], False), (None, True)):
        found = served('[TOOL_CALLS]look[ARGS]{"x": 1}', tokenizer=tokenizer)
        answer = message(found, tools=tools)
        assert found.target.requests[0].sampling.skip_special_tokens is skips
        assert answer["content"] == (None if tools else 'look[ARGS]{"x": 1}')
        for call in answer.get("tool_calls", ()):
            assert call["function"]["arguments"] == '{"x": 1}'
            assert len(call["id"]) == 9


def test_ids_of_calls_are_short_for_mistral() -> None:
    """Its templates raise for other ids, and a client may send back those of another server."""
    shown = "{% for m in messages %}{{ m.tool_call_id }}{% for c in m.tool_calls %}{{ c.id }},{% endfor %}{% endfor %}"
    found = server("ok", shown + "{{ tools }} [TOOL_CALLS]")
    for given in ("call_0123456789abcdef", "abcDEF123"):
        call = {"id": given, "function": {"name": "look", "arguments": "{}"}}
        result = {"role": "tool", "tool_call_id": given, "content": "ok"}
        message(found, messages=[HI, {"role": "assistant", "tool_calls": [call]}, result], tools=[TOOL])
        first, second = prompt_of(found).split("[{")[0].split(",")
        assert first == second
        assert (len(first), first.isalnum()) == (9, True)
        assert first == given or len(given) != 9


def test_arguments_are_texts_for_a_template_that_joins_them() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": '{"x": 1}'}}
    messages = [HI, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "c", "content": "ok"}]
    shown = "{% for m in messages %}{% for c in m.tool_calls %}NAME {{ ARGUMENTS }}{% endfor %}{% endfor %}{{ tools }}"
    for arguments, expected in (
        ("c.function.arguments|items|list", "NAME [('x', 1)]"),
        ("('a' + c.function.arguments)", 'NAME a{"x": 1}'),
    ):
        found = server("ok", shown.replace("ARGUMENTS", arguments))
        message(found, messages=messages, tools=[TOOL])
        assert prompt_of(found).startswith(expected)
