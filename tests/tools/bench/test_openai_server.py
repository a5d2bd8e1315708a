import asyncio
import json
from typing import Any

import httpx
import pytest

from paceline.core.clock import VirtualClock
from paceline.core.request import SamplingParams
from paceline.tools.bench.runner import ServerContender, ServerFailed, connect
from paceline.tools.prompts.prompts import AnswerTimes


def events(*chunks: Any) -> bytes:
    return "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks).encode() + b"data: [DONE]\n\n"


def delta(text: str) -> dict[str, Any]:
    return {"choices": [{"delta": {"content": text}}]}


def answer(
    content: bytes, status: int = 200, sampling: SamplingParams | None = None
) -> tuple[AnswerTimes, dict[str, Any]]:
    asked: dict[str, Any] = {}

    def handle(request: httpx.Request) -> httpx.Response:
        asked.update(json.loads(request.content), path=request.url.path)
        return httpx.Response(status, content=content)

    async def run() -> AnswerTimes:
        async with httpx.AsyncClient(base_url="http://test/v1/", transport=httpx.MockTransport(handle)) as client:
            contender = ServerContender(client, "m", VirtualClock())
            return await contender.answer([{"role": "user", "content": "hi"}], sampling or SamplingParams(seed=1), "x")

    return asyncio.run(run()), asked


def test_streamed_answer_becomes_a_trace() -> None:
    trace, asked = answer(events(delta("Hel"), delta("lo"), {"choices": [], "usage": {"completion_tokens": 2}}))
    assert trace.text == "Hello"
    assert [arrival.tokens for arrival in trace.arrivals] == [1, 1]
    assert trace.token_ids is None
    assert asked["path"] == "/v1/chat/completions"
    assert asked["stream_options"] == {"include_usage": True}
    assert "top_k" not in asked
    assert "response_format" not in asked


def test_tokens_are_distributed_by_length() -> None:
    trace, _ = answer(
        events(delta("a"), delta("bcdefgh"), delta("ij"), {"choices": [], "usage": {"completion_tokens": 7}})
    )
    assert [arrival.tokens for arrival in trace.arrivals] == [1, 5, 1]


def test_rounds_come_from_the_server_or_are_unknown() -> None:
    usage = {"choices": [], "usage": {"completion_tokens": 9}}
    speculative = usage | {"metrics": {"speculative_decoding": {"num_accepted_draft_tokens": 4}}}
    assert answer(events(delta("abc"), speculative))[0].num_rounds == 4
    assert answer(events(delta("abc"), usage))[0].num_rounds == 0


def test_nonstandard_fields_are_sent_only_if_set() -> None:
    _, asked = answer(events(delta("{}")), sampling=SamplingParams(top_k=5, json_schema={"type": "object"}))
    assert asked["top_k"] == 5
    assert asked["response_format"]["json_schema"]["schema"] == {"type": "object"}


@pytest.mark.parametrize(
    ("content", "status", "complaint"),
    [
        (b'{"error": "busy"}', 429, "answered 429.*busy"),
        (events({"error": {"message": "lost"}}), 200, "lost"),
        (b"data: what\n\n", 200, "not JSON"),
    ],
)
def test_failures_raise_server_failed(content: bytes, status: int, complaint: str) -> None:
    with pytest.raises(ServerFailed, match=complaint):
        answer(content, status)


def test_unreachable_server() -> None:
    async def run() -> None:
        async with connect("http://127.0.0.1:9", None, VirtualClock()):
            pass

    with pytest.raises(ServerFailed, match=r"no server at http://127\.0\.0\.1:9/v1"):
        asyncio.run(run())
