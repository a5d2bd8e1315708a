"""The parts of vLLM's protocol that its clients rely on: guidellm, AIPerf, `vllm bench serve`, lm-eval."""

import json
import logging
from typing import Any

import pytest

from paceline.core.config import EngineConfig
from paceline.core.version import VERSION
from paceline.gateway.api import bodies
from paceline.model_files.tokenizer.gguf_tokenizer import tokenizer_from_gguf
from tests.gateway.fakes import TEMPLATE, Served, byte_tokenizer, events, served
from tests.model_files.tokenizer.test_tokenizer import SENTENCEPIECE

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "hi"}]


def post(server: Served, path: str, **body: Any) -> dict[str, Any]:
    response = server.post(path, {**({"messages": HI} if path == CHAT else {"prompt": "abc"}), **body})
    assert response.status_code == 200, response.text
    return response.json()


def chunks(server: Served, path: str, **body: Any) -> list[dict[str, Any]]:
    given = {"messages": HI} if path == CHAT else {"prompt": "abc"}
    *data, done = events(server.post(path, {**given, "stream": True, **body}))
    assert done == "[DONE]"
    return [json.loads(item) for item in data]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_continuous_usage_is_in_every_chunk(path: str) -> None:
    """guidellm counts output tokens by the usage of each chunk."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    *parts, last = chunks(served("abcdefg"), path, stream_options=options)
    assert [part["usage"]["completion_tokens"] for part in parts] == [3, 6, 7]
    assert all(part["usage"]["prompt_tokens"] == last["usage"]["prompt_tokens"] for part in parts)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 7


def test_continuous_usage_needs_include_usage() -> None:
    parts = chunks(served("abc"), CHAT, stream_options={"continuous_usage_stats": True})
    assert not any("usage" in part for part in parts)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    "options", [{}, {"include_usage": True}, {"include_usage": True, "continuous_usage_stats": True}]
)
@pytest.mark.parametrize("n", [1, 2])
def test_exactly_one_chunk_has_the_speculation_metrics(path: str, options: dict[str, bool], n: int) -> None:
    """AIPerf drops the metrics of a stream that sends them twice, and those whose histogram has another length."""
    parts = chunks(served("abcdefg"), path, stream_options=options, n=n)
    (metrics,) = [part["metrics"]["speculative_decoding"] for part in parts if part.get("metrics")]
    assert parts[-1]["metrics"]["speculative_decoding"] == metrics
    histogram = metrics["acceptance_histogram"]
    assert len(histogram) == metrics["num_spec_tokens"] + 1
    assert sum(histogram) == metrics["num_spec_steps"] == 2 * n
    assert sum(count * rounds for count, rounds in enumerate(histogram)) == metrics["num_accepted_draft_tokens"]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_every_chunk_with_choices_has_text_for_vllm_bench(path: str) -> None:
    """`vllm bench serve` takes any chunk with choices as a token, and reads usage from the others."""
    *parts, last = chunks(served("abcdef"), path, stream_options={"include_usage": True}, ignore_eos=True)
    for part in parts:
        (choice,) = part["choices"]
        assert choice["delta"]["content"] if path == CHAT else choice["text"]
    assert last["usage"]["completion_tokens"] == 6


def test_echo_with_logprobs_starts_with_the_prompt() -> None:
    """lm-eval: a prompt of token ids, one generated token, which it cuts off."""
    server = served("!")
    answer = post(server, COMPLETIONS, prompt=[[97, 98, 99]], max_tokens=1, logprobs=1, echo=True, temperature=0)
    (choice,) = answer["choices"]
    text = server.target.tokenizer.decode([97, 98, 99])
    assert choice["text"] == text + "!"
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == [*text, "!"]
    assert logprobs["token_logprobs"] == [None, -0.25, -0.25, -0.5]
    assert logprobs["top_logprobs"][0] is None
    assert [len(top) for top in logprobs["top_logprobs"][1:]] == [1, 1, 1]
    assert logprobs["text_offset"] == [0, 1, 2, 3]
    assert server.target.requests[0].sampling.prompt_logprobs == 1


def test_echo_of_a_stream_is_in_the_first_chunk() -> None:
    first, second = chunks(served("defg"), COMPLETIONS, prompt="abc", echo=True, logprobs=0)
    assert [first["choices"][0]["text"], second["choices"][0]["text"]] == ["abcdef", "g"]
    assert first["choices"][0]["logprobs"]["tokens"] == [*"abcdef"]
    assert second["choices"][0]["logprobs"]["text_offset"] == [6]


def test_echo_of_several_prompts_and_choices() -> None:
    answer = post(served("!", max_waiting=8), COMPLETIONS, prompt=["a", "bc"], n=2, echo=True, logprobs=0)
    assert [choice["text"] for choice in answer["choices"]] == ["a!", "a!", "bc!", "bc!"]
    assert [len(choice["logprobs"]["tokens"]) for choice in answer["choices"]] == [2, 2, 3, 3]


def test_echo_without_output() -> None:
    answer = post(served("xyz"), COMPLETIONS, prompt="abc", max_tokens=0, echo=True, logprobs=0)
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("abc", "length")
    assert choice["logprobs"]["tokens"] == [*"abc"]
    assert answer["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_prompt_logprobs(path: str) -> None:
    answer = post(served("!"), path, prompt_logprobs=2)
    scores = answer["prompt_logprobs"] if path == CHAT else answer["choices"][0]["prompt_logprobs"]
    assert scores[0] is None
    assert len(scores) == answer["usage"]["prompt_tokens"]
    for entry in scores[1:]:
        assert {"logprob": -0.25, "rank": 4} in [
            {"logprob": one["logprob"], "rank": one["rank"]} for one in entry.values()
        ]
        assert len(entry) in (2, 3)


def test_token_ids_of_a_completion() -> None:
    server = served("defg")
    (choice,) = post(server, COMPLETIONS, return_token_ids=True)["choices"]
    encode = server.target.tokenizer.encode
    assert (choice["prompt_token_ids"], choice["token_ids"]) == (encode("abc"), encode("defg"))
    first, second = chunks(server, COMPLETIONS, return_token_ids=True)
    assert first["choices"][0]["prompt_token_ids"] == encode("abc")
    assert second["choices"][0]["prompt_token_ids"] is None
    assert [part["choices"][0]["token_ids"] for part in (first, second)] == [encode("def"), encode("g")]


def test_token_ids_of_a_chat() -> None:
    server = served("defg")
    answer = post(server, CHAT, return_token_ids=True)
    encode = server.target.tokenizer.encode
    assert answer["choices"][0]["token_ids"] == encode("defg")
    assert tuple(answer["prompt_token_ids"]) == server.target.requests[0].prompt_ids
    first, second = chunks(server, CHAT, return_token_ids=True)
    assert tuple(first["prompt_token_ids"]) == server.target.requests[0].prompt_ids
    assert "prompt_token_ids" not in second
    assert [part["choices"][0]["token_ids"] for part in (first, second)] == [encode("def"), encode("g")]


def test_special_tokens_are_part_of_the_text_on_request() -> None:
    for skip, text in ((True, "ab"), (False, "a<|im_start|>b")):
        server = served("a<|im_start|>b")
        assert post(server, COMPLETIONS, skip_special_tokens=skip)["choices"][0]["text"] == text
        parts = chunks(server, COMPLETIONS, skip_special_tokens=skip, stream_options={"include_origins": True})
        pieces = [piece["text"] for part in parts for piece in part["choices"][0]["origins"]]
        assert "".join(pieces) == text


@pytest.mark.parametrize(("keep", "length"), [(2, 2), (100, 6), (-1, 6)])
def test_a_prompt_is_truncated_on_the_left(keep: int, length: int) -> None:
    server = served("!")
    post(server, COMPLETIONS, prompt="abcdef", truncate_prompt_tokens=keep)
    assert server.target.requests[0].prompt_ids == tuple(server.target.tokenizer.encode("abcdef"))[-length:]


def test_a_prompt_is_truncated_to_leave_room_for_the_output() -> None:
    server = served("!", engine=EngineConfig(model="fake", max_model_len=64))
    post(server, COMPLETIONS, prompt="a" * 100, truncate_prompt_tokens=-1, max_tokens=24)
    assert len(server.target.requests[0].prompt_ids) == 40


def test_a_suffix_is_written_as_the_model_was_trained() -> None:
    marks = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
    server = served("b", tokenizer=byte_tokenizer(special=marks))
    assert post(server, COMPLETIONS, prompt="a", suffix="c")["choices"][0]["text"] == "b"
    post(server, COMPLETIONS, prompt="a", suffix="")
    prompts = [server.target.tokenizer.decode(request.prompt_ids, False) for request in server.target.requests]
    assert prompts == ["<|fim_prefix|>a<|fim_suffix|>c<|fim_middle|>", "a"]
    for body in ({"prompt": [1]}, {"prompt": "a", "echo": True}):
        refused = server.post(COMPLETIONS, {**body, "suffix": "c"})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "suffix")


def test_a_completion_of_a_sentencepiece_model_keeps_its_first_space() -> None:
    """An answer of a chat does not begin with it."""
    tokenizer = tokenizer_from_gguf(SENTENCEPIECE | {"tokenizer.chat_template": TEMPLATE})
    server = served("ab bab", tokenizer=tokenizer)
    assert post(server, COMPLETIONS, prompt="b")["choices"][0]["text"] == " ab bab"
    assert post(server, COMPLETIONS, prompt=[1])["choices"][0]["text"] == "ab bab"
    assert post(server, CHAT)["choices"][0]["message"]["content"] == "ab bab"
    for path, text in ((COMPLETIONS, " ab bab"), (CHAT, "ab bab")):
        parts = [part["choices"][0] for part in chunks(server, path, stream_options={"include_origins": True})]
        assert "".join(part["text"] if path == COMPLETIONS else part["delta"]["content"] for part in parts) == text
        assert "".join(piece["text"] for part in parts for piece in part["origins"]) == text


def test_the_best_of_one_is_that_one() -> None:
    assert post(served("abc"), COMPLETIONS, best_of=1)["choices"][0]["text"] == "abc"


def test_sampling_fields_reach_the_engine() -> None:
    server = served("!")
    post(server, CHAT, min_tokens=3, max_tokens=5, skip_special_tokens=False)
    sampling = server.target.requests[0].sampling
    assert (sampling.min_tokens, sampling.skip_special_tokens) == (3, False)
    assert sampling.blocked_ids == tuple(sorted(server.target.tokenizer.eos_ids))
    post(server, COMPLETIONS, best_of=1, n=1)


def test_chat_template_variables() -> None:
    server = served("!")
    post(server, CHAT, chat_template_kwargs={"enable_thinking": False, "unknown": 1})
    post(server, CHAT)
    post(server, CHAT, add_generation_prompt=False)
    prompts = [server.target.tokenizer.decode(one.prompt_ids, skip_special=False) for one in server.target.requests]
    assert prompts[0] == prompts[1]
    assert prompts[1] == prompts[2] + "<|im_start|>assistant\n"


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    ("form", "constraint"),
    [
        ({"json": {"type": "integer"}}, {"type": "integer"}),
        ({"json": '{"type": "integer"}'}, {"type": "integer"}),
        ({"json_object": True, "disable_any_whitespace": False}, {"type": "object"}),
        ({"regex": r"\d+/\d\/\n|a\nb"}, r"start: /\d+\/\d\/\n|a\nb/"),
        ({"choice": ["yes", 'n"o', "é\n"]}, r'start: "yes" | "n\"o" | "é\n"'),
        ({"grammar": 'root ::= "a" [0-9]'}, 'root ::= "a" [0-9]'),
    ],
)
def test_structured_outputs(path: str, form: dict[str, Any], constraint: Any) -> None:
    server = served("!")
    post(server, path, structured_outputs=form)
    (name, value), *_ = form.items()
    if name != "json_object":
        post(server, path, **{f"guided_{name}": value})
    for request in server.target.requests:
        assert request.sampling.constraint == constraint


def test_ignored_parameters_are_logged_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "_warned", set())
    server = served("!")
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            post(server, CHAT, store=True, request_id="r")
    assert sorted(record.args[0] for record in caplog.records) == ["request_id", "store"]


def test_a_refused_request_is_logged_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        served("!").post(CHAT, {"messages": HI, "temprature": 1})
    (record,) = [one for one in caplog.records if one.name == "paceline.gateway.api.errors"]
    assert record.getMessage() == "refused: unknown parameter temprature; did you mean temperature?"
    fields = vars(record)
    assert (fields["status"], fields["path"], fields["reason"]) == (400, CHAT, "unknown_parameter")


def test_routes_of_vllm() -> None:
    server = served("!")
    assert server.call("GET", "/version").json() == {"version": VERSION}
    assert (server.call("GET", "/ping").status_code, server.post("/ping", {}).status_code) == (200, 200)
    assert server.call("GET", "/v1/models").json()["data"][0]["root"] == server.target.config.model


def test_a_continued_answer_of_a_sentencepiece_model_keeps_its_first_space() -> None:
    server = served("ab bab", tokenizer=tokenizer_from_gguf(SENTENCEPIECE | {"tokenizer.chat_template": TEMPLATE}))
    messages = [{"role": "user", "content": "b"}, {"role": "assistant", "content": "a"}]
    answer = post(server, CHAT, messages=messages, continue_final_message=True)
    assert answer["choices"][0]["message"]["content"] == " ab bab"
