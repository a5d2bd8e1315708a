"""Which streams are collected, and what of them."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from paceline.gateway.auth.api_keys import KeyFile
from paceline.gateway.config.config import LearningConfig
from tests.gateway.fakes import Served, served

ON = LearningConfig(enabled=True)
ADMIN = "an-admin-key"
CHAT = {"model": "fake", "messages": [{"role": "user", "content": "Hi"}]}


def chat(server: Served, key: str | None = None, **body: Any) -> int:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    return server.post("/v1/chat/completions", {**CHAT, **body}, headers=headers).status_code


def samples(server: Served, after: int = 0) -> Any:
    response = server.call(
        "GET", f"/admin/learning/samples?after={after}", headers={"Authorization": f"Bearer {ADMIN}"}
    )
    assert response.status_code == 200, response.text
    return response.json()


def test_nothing_is_collected_by_default() -> None:
    server = served(admin_key=ADMIN)
    assert chat(server) == 200
    assert server.gateway.samples is None
    response = server.call("GET", "/admin/learning/samples", headers={"Authorization": f"Bearer {ADMIN}"})
    assert response.status_code == 404
    assert "learning: true" in response.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_an_open_server_collects_token_ids_and_which_were_drafted(stream: bool) -> None:
    server = served("Hello!", per_step=4, learning=ON, admin_key=ADMIN)
    assert chat(server, stream=stream) == 200
    batch = samples(server)
    (sample,) = batch["samples"]
    tokenizer = server.target.tokenizer
    assert tokenizer.decode(sample["output"]) == "Hello!"
    assert "Hi" in tokenizer.decode(sample["prompt"])
    assert sample["accepted"] == [0, 1, 2, 4]  # steps of 4 and 2 tokens, the last of each not drafted
    assert (sample["drafted"], sample["rounds"], sample["number"], batch["last"]) == (4, 2, 1, 1)
    assert "Hello" not in str(batch)
    assert samples(server, after=1)["samples"] == []
    assert 'paceline_learning_samples_total{model="fake"} 1.0' in server.call("GET", "/metrics").text


def test_every_choice_is_a_sample() -> None:
    server = served("Hello!", learning=ON, admin_key=ADMIN)
    assert chat(server, n=3) == 200
    assert len(samples(server)["samples"]) == 3


def test_only_keys_that_agreed_are_collected(tmp_path: Path) -> None:
    keys = KeyFile(tmp_path / "keys.json")
    agreed, other = keys.add("agreed", learning=True), keys.add("other")
    server = served("Hello!", learning=ON, admin_key=ADMIN, api_keys=str(keys.path))
    assert chat(server, other) == 200
    assert samples(server)["samples"] == []
    assert chat(server, agreed) == 200
    (sample,) = samples(server)["samples"]
    (record,) = (key for key in keys.read() if key.learning)
    assert sample["tenant"] not in (record.id, record.name)
    assert server.gateway.samples is not None
    assert sample["tenant"] == server.gateway.samples.tenant(record.id)


def test_a_strict_key_is_never_collected(tmp_path: Path) -> None:
    keys = KeyFile(tmp_path / "keys.json")
    strict = keys.add("strict", learning=True, strict=True)
    trail = str(tmp_path / "audit.jsonl")
    server = served("Hello!", learning=ON, admin_key=ADMIN, api_keys=str(keys.path), audit_trail=trail)
    assert chat(server, strict) == 200
    assert samples(server)["samples"] == []


def test_a_cancelled_stream_is_not_collected() -> None:
    server = served("Hello!", learning=ON, admin_key=ADMIN, hold=True, request_timeout=0.05)
    assert chat(server) == 408
    assert samples(server)["samples"] == []


def test_samples_need_the_admin_key() -> None:
    server = served("Hello!", learning=ON, admin_key=ADMIN)
    assert server.call("GET", "/admin/learning/samples").status_code == 401
    assert served("Hello!", learning=ON).call("GET", "/admin/learning/samples").status_code == 404


def test_another_model_is_unknown() -> None:
    server = served("Hello!", learning=ON, admin_key=ADMIN)
    headers = {"Authorization": f"Bearer {ADMIN}"}
    response = server.call("GET", "/admin/learning/samples?model=other", headers=headers)
    assert response.status_code == 404


def test_a_disconnected_reader_loses_nothing() -> None:
    """The same `after` gives the same samples again."""
    server = served("Hello!", learning=ON, admin_key=ADMIN)
    for _ in range(3):
        assert chat(server) == 200
    assert samples(server) == samples(server)
    assert asyncio.run(_count(server)) == 3


async def _count(server: Served) -> int:
    assert server.gateway.samples is not None
    return len(server.gateway.samples.after(0).samples)
