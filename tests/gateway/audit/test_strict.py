"""Strict mode: no drafts, and audit records with hashes instead of text."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from paceline.core.output import StepOutput
from paceline.core.request import Request, SamplingParams
from paceline.core.sequence import FinishReason
from paceline.gateway.audit.audit_log import AuditWriteError, verify
from paceline.gateway.audit.strict import sampling_record, text_hash, token_hash
from paceline.gateway.auth.api_keys import KeyFile
from tests.gateway.fakes import Served, events, served

CHAT = "/v1/chat/completions"
SECRET = "the launch code is swordfish"
STRICT: dict[str, Any] = {
    "messages": [{"role": "user", "content": SECRET}],
    "speculation": {"strict": True},
    "seed": 7,
    "stop": ["launch code"],
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "audit.jsonl"


def records(path: Path, kind: str | None = None) -> list[dict[str, Any]]:
    verify(path)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [record for record in lines if kind in (None, record["kind"])]


def served_with_log(path: Path, **options: Any) -> Served:
    return served(audit_trail=str(path), **options)


@pytest.mark.parametrize("stream", [False, True])
def test_a_strict_request_has_a_start_and_an_end_record(stream: bool, path: Path) -> None:
    server = served_with_log(path)
    response = server.post(CHAT, {**STRICT, "n": 2, "stream": stream})
    assert response.status_code == 200
    answer_id = json.loads(events(response)[0])["id"] if stream else response.json()["id"]
    opened, started, finished = records(path)
    assert (opened["kind"], opened["model"], opened["weights"]) == ("opened", "fake", "0" * 64)
    (request,) = server.target.requests
    assert started["request"] == finished["request"] == answer_id
    assert (started["kind"], started["key"], started["model"], started["weights"]) == (
        "started",
        "anyone",
        "fake",
        "0" * 64,
    )
    assert started["prompts"] == [{"tokens": len(request.prompt_ids), "token_sha256": token_hash(request.prompt_ids)}]
    assert started["sampling"]["seed"] == 7
    ids = server.target.tokenizer.encode("Hello there!", add_special=False)
    one = {
        "tokens": 12,
        "token_sha256": token_hash(ids),
        "text_sha256": text_hash("Hello there!"),
        "finish": "stop",
    }
    assert finished["outputs"] == [one, one]
    for word in ("launch", "swordfish", "Hello"):
        assert word not in path.read_text()


def test_audit_trail_text_adds_the_texts(path: Path) -> None:
    server = served_with_log(path, audit_trail_text=True)
    server.post(CHAT, STRICT)
    (started,), (finished,) = records(path, "started"), records(path, "finished")
    assert SECRET in started["prompts"][0]["text"]
    (output,) = finished["outputs"]
    assert (output["text"], output["text_sha256"]) == ("Hello there!", text_hash("Hello there!"))


def test_strict_requests_do_not_speculate(path: Path) -> None:
    server = served_with_log(path)
    server.post(CHAT, STRICT)
    server.post(CHAT, {"messages": STRICT["messages"]})
    strict, normal = server.target.requests
    assert (strict.speculation.enabled, normal.speculation.enabled) == (False, True)
    assert len(records(path, "started")) == 1


def test_a_strict_key_overrides_the_body(path: Path, tmp_path: Path) -> None:
    file = KeyFile(tmp_path / "keys.json")
    key = file.add("bank", strict=True)
    server = served_with_log(path, api_keys=str(file.path))
    headers = {"Authorization": f"Bearer {key}"}
    body = {"prompt": ["one", "two"], "speculation": {"enabled": True, "method": "ngram", "max_depth": 4}}
    assert server.post("/v1/completions", body, headers=headers).status_code == 200
    assert [request.speculation.enabled for request in server.target.requests] == [False, False]
    (started,), (finished,) = records(path, "started"), records(path, "finished")
    assert started["key"] == "bank"
    assert [prompt["tokens"] for prompt in started["prompts"]] == [3, 3]
    assert len(finished["outputs"]) == 2


@pytest.mark.parametrize(
    "rest", [{"enabled": True}, {"method": "ngram"}, {"max_depth": 3}, {"verification": "coupled"}]
)
def test_strict_excludes_other_speculation_options(rest: dict[str, Any], path: Path) -> None:
    response = served_with_log(path).post(CHAT, {**STRICT, "speculation": {"strict": True, **rest}})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "speculation.strict")


def test_strict_mode_needs_an_audit_log() -> None:
    server = served()
    response = server.post(CHAT, STRICT)
    assert (response.status_code, response.json()["error"]["code"]) == (400, "strict_unavailable")
    assert server.target.requests == []


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_without_a_record_is_not_sent(stream: bool, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = served_with_log(path)
    assert server.gateway.strict is not None
    append, fails = server.gateway.strict.log.append, {"started"}

    def full(kind: str, **fields: Any) -> str:
        if kind in fails:
            raise AuditWriteError("the disk is full")
        return append(kind, **fields)

    monkeypatch.setattr(server.gateway.strict.log, "append", full)
    response = server.post(CHAT, {**STRICT, "stream": stream})
    assert response.status_code == 503
    assert "Hello" not in response.text
    fails.clear()
    fails.add("finished")
    response = server.post(CHAT, {**STRICT, "stream": stream})
    if stream:  # the log has the start record, and the stream ends with an error
        assert json.loads(events(response)[-2])["error"]["code"] == "unavailable"
    else:
        assert response.status_code == 503
        assert "Hello" not in response.text
    assert len(verify(path).unfinished) == 1


def test_a_cancelled_request_has_an_end_record(path: Path) -> None:
    server = served_with_log(path, hold=True)

    async def run() -> None:
        async with server.client() as client:
            task = asyncio.create_task(client.post(CHAT, json={**STRICT, "timeout": 0.05}))
            assert (await task).status_code == 408

    asyncio.run(run())
    (finished,) = records(path, "finished")
    assert finished["outputs"] == [
        {"tokens": 0, "token_sha256": token_hash([]), "text_sha256": text_hash(""), "finish": None}
    ]


def test_flag_changes_are_recorded_and_the_head_is_reported(path: Path) -> None:
    server = served_with_log(path, admin_key="open-sesame")
    headers = {"Authorization": "Bearer open-sesame"}
    server.call("PATCH", "/admin/flags", json={"enabled": False}, headers={**headers, "X-Paceline-Who": "ann"})
    (flags,) = records(path, "flags")
    assert (flags["who"], flags["changes"]) == ("admin (ann)", {"enabled": False})
    report = server.call("GET", "/admin/trail", headers=headers).json()
    assert report == {"records": 2, "head": flags["hash"]}
    without = served(admin_key="open-sesame").call("GET", "/admin/trail", headers=headers)
    assert without.status_code == 404


def test_hashes_match_the_documentation() -> None:
    assert token_hash([]) == text_hash("") == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    assert token_hash([1, 256]) == text_hash("\x01" + "\0" * 8 + "\x01" + "\0" * 6)
    assert token_hash([1, 2]) != token_hash([2, 1])


def test_sampling_record_has_numbers_and_hashes() -> None:
    schema = {"type": "object", "properties": {"secret": {"const": "0000"}}}
    sampling = SamplingParams(temperature=0.5, seed=3, stop=("secret",), logit_bias={5: 1.0}, json_schema=schema)
    record = sampling_record(sampling)
    assert (record["temperature"], record["seed"]) == (0.5, 3)
    assert "secret" not in json.dumps(record)
    assert record != sampling_record(SamplingParams(temperature=0.5, seed=3, stop=("other",)))
    assert sampling_record(SamplingParams())["stop_sha256"] is None


def test_outputs_are_hashed_in_order(path: Path) -> None:
    server = served_with_log(path)

    async def run() -> None:
        assert server.gateway.strict is not None
        async with server.gateway.strict.record("a", "ann", [Request("r", (1,))]) as record:
            record.add([StepOutput("r", 0, 0, (5, 6), (), "ab"), StepOutput("r", 0, 0, (7,), (), "c")])
            record.add([StepOutput("r", 0, 0, (), (), "", finish_reason=FinishReason.LENGTH)])

    asyncio.run(run())
    (finished,) = records(path, "finished")
    assert finished["outputs"] == [
        {"tokens": 3, "token_sha256": token_hash([5, 6, 7]), "text_sha256": text_hash("abc"), "finish": "length"}
    ]
