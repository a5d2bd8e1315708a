"""POST /v1/completions."""

import asyncio
import json
import threading
from typing import Any

import pytest

from tests.gateway.fakes import Served, events, served


def complete(server: Served, **body: Any) -> dict[str, Any]:
    response = server.post("/v1/completions", body)
    assert response.status_code == 200, response.text
    return response.json()


def test_a_response() -> None:
    server = served("and so on")
    answer = complete(server, prompt="once", model="fake")
    assert answer["object"] == "text_completion"
    assert answer["choices"] == [{"index": 0, "text": "and so on", "logprobs": None, "finish_reason": "stop"}]
    assert answer["usage"]["prompt_tokens"] == 4
    assert server.target.requests[0].sampling.max_tokens == 16


def test_token_id_prompts() -> None:
    server = served("!")
    complete(server, prompt=[5, 6])
    complete(server, prompt=[[5], [6, 7]])
    assert [request.prompt_ids for request in server.target.requests] == [(5, 6), (5,), (6, 7)]


def test_choices_of_several_prompts_have_consecutive_indices() -> None:
    server = served(lambda request: f"<{len(request.prompt_ids)}>", max_waiting=8)
    answer = complete(server, prompt=["a", "bb"], n=2)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert [choice["text"] for choice in answer["choices"]] == ["<1>", "<1>", "<2>", "<2>"]
    assert answer["usage"]["prompt_tokens"] == 3
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 6}


def test_logprobs_are_parallel_lists() -> None:
    choice = complete(served("Hey"), prompt="x", logprobs=1)["choices"][0]
    assert choice["logprobs"]["tokens"] == ["H", "e", "y"]
    assert choice["logprobs"]["token_logprobs"] == [-0.5, -0.5, -0.5]
    assert choice["logprobs"]["text_offset"] == [0, 1, 2]
    assert [len(top) for top in choice["logprobs"]["top_logprobs"]] == [1, 1, 1]


def test_a_stream() -> None:
    response = served("abcdef").post(
        "/v1/completions", {"prompt": "x", "stream": True, "logprobs": 0, "stream_options": {"include_usage": True}}
    )
    *data, done = events(response)
    assert done == "[DONE]"
    *parts, last = [json.loads(item) for item in data]
    assert [part["choices"][0]["text"] for part in parts] == ["abc", "def"]
    assert parts[1]["choices"][0]["logprobs"]["text_offset"] == [3, 4, 5]
    assert parts[1]["choices"][0]["finish_reason"] == "stop"
    assert last["usage"]["completion_tokens"] == 6


def test_prompts_after_one_that_is_too_long_are_not_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    server, encoded = served("!", max_waiting=100), list[str]()
    backend = server.target.tokenizer
    monkeypatch.setattr(
        type(backend), "encode", lambda self, text, *_: encoded.append(text) or [0] * (10_000 if "long" in text else 1)
    )
    response = server.post("/v1/completions", {"prompt": ["a", "long", *["b"] * 60]})
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"
    assert encoded == ["a", "long"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize"])
def test_a_client_that_leaves_while_its_text_waits_for_a_thread_frees_its_place(path: str) -> None:
    """The thread ends what it has begun; nothing else of the request remains."""
    server, begun, release = served("!"), threading.Event(), threading.Event()
    encode = type(server.target.tokenizer).encode

    def held(self: Any, *values: Any) -> Any:
        begun.set()
        release.wait(10)
        return encode(self, *values)

    text = "x" * 10_000
    body = {"prompt": text} if "chat" not in path else {"messages": [{"role": "user", "content": text}]}

    async def run() -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(server.target.tokenizer), "encode", held)
            async with server.client() as client:
                calls = [asyncio.create_task(client.post(path, json=body)) for _ in range(4)]
                threads = server.gateway.encoders
                while not begun.is_set() or threads.num_waiting < 3:
                    await asyncio.sleep(0.001)
                for call in calls:
                    call.cancel()
                await asyncio.gather(*calls, return_exceptions=True)
                assert (threads.num_running, threads.num_waiting) == (1, 0)
            release.set()
            while threads.num_running:
                await asyncio.sleep(0.001)

    asyncio.run(run())
    assert server.target.requests == []
