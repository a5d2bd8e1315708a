"""The session of a request: one validation, and one close of all its parts."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from paceline.core.request import Request, ValidatedRequest
from paceline.gateway.audit.audit_log import verify
from tests.gateway.fakes import Served, served

CHAT = "/v1/chat/completions"
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}


@pytest.mark.parametrize(
    "body",
    [
        BODY,
        {**BODY, "stream": True},
        {**BODY, "response_format": {"type": "json_object"}},
        {**BODY, "tools": [TOOL], "tool_choice": "required"},
    ],
)
def test_a_request_is_validated_once(body: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    server = served("{}")
    validate, validated = server.target.validate, []

    def counted(request: Request) -> ValidatedRequest:
        validated.append(request.id)
        return validate(request)

    monkeypatch.setattr(server.target, "validate", counted)
    assert server.post(CHAT, body).status_code == 200
    assert len(validated) == 1
    (request,) = server.target.requests
    assert isinstance(request, ValidatedRequest)


def test_a_request_has_the_id_of_its_answer() -> None:
    server = served()
    chat, first = server.post(CHAT, BODY).json(), server.target.requests[0]
    assert first.id == chat["id"]
    text = server.post("/v1/completions", {"prompt": ["a", "b"]}).json()
    assert [request.id for request in server.target.requests[1:]] == [f"{text['id']}/0", f"{text['id']}/1"]


def test_prompts_of_one_body_share_a_seed() -> None:
    server = served()
    server.post("/v1/completions", {"prompt": ["a", "b"]})
    first, second = server.target.requests
    assert first.sampling.seed == second.sampling.seed is not None


@pytest.mark.parametrize("stream", [False, True])
def test_every_end_closes_all_parts(stream: bool, tmp_path: Path) -> None:
    """After a finished, a late and a disconnected request nothing is admitted, charged or open in the audit log."""
    server = served(hold=True, audit_trail=str(tmp_path / "audit.jsonl"))
    body = {**BODY, "stream": stream, "speculation": {"strict": True}}

    async def run() -> None:
        async with server.client() as client:
            finished = asyncio.create_task(client.post(CHAT, json=body))
            await _wait_for_requests(server, 1)
            server.target.release()
            assert (await finished).status_code == 200
            assert (await client.post(CHAT, json={**body, "timeout": 0.02})).status_code == 408
            disconnected = asyncio.create_task(client.post(CHAT, json=body))
            await _wait_for_requests(server, 3)
            disconnected.cancel()
            with pytest.raises(asyncio.CancelledError):
                await disconnected
            assert await server.gateway.drain() is True

    asyncio.run(run())
    assert server.gateway.queue.num_admitted == 0
    assert [account.num_running for account in server.gateway.limits._accounts.values()] == [0]
    assert verify(tmp_path / "audit.jsonl").unfinished == ()


async def _wait_for_requests(server: Served, count: int) -> None:
    async with asyncio.timeout(20):
        while len(server.target.requests) < count:
            await asyncio.sleep(0.001)
