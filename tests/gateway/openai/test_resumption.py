"""Resumable streams: ids of events, and a stream that continues after any of them."""

import http.client
import json
import os
import signal
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil
import pytest

from tests.engine.start.test_build import save_checkpoint
from tests.gateway.fakes import Served, served
from tests.gateway.process import Process, server_process

TEXT = "the quick brown fox"
BODY: dict[str, Any] = {"prompt": "x", "max_tokens": 64, "temperature": 1.0, "stream": True, "stop": ["ox!"]}
RESUMABLE = {"stream_options": {"resumable": True, "include_usage": True}}


def stream(server: Served, last: str | None = None, **body: Any) -> list[tuple[str, dict[str, Any]]]:
    """Ids and data of the events, without `[DONE]`."""
    headers = {} if last is None else {"Last-Event-ID": last}
    response = server.post("/v1/completions", BODY | RESUMABLE | body, headers=headers)
    assert response.status_code == 200, response.text
    return parse(response)


def parse(response: httpx.Response) -> list[tuple[str, dict[str, Any]]]:
    *events, done = response.text.removesuffix("\n\n").split("\n\n")
    assert done == "data: [DONE]"
    found = []
    for event in events:
        data, name = event.split("\n")
        found.append((name.removeprefix("id: "), json.loads(data.removeprefix("data: "))))
    return found


def texts(events: list[tuple[str, dict[str, Any]]]) -> str:
    return "".join(choice["text"] for _, data in events for choice in data["choices"])


def test_a_stream_continues_after_any_event() -> None:
    server = served(TEXT)
    whole = stream(server)
    assert texts(whole) == TEXT
    for i, (last, _) in enumerate(whole):
        rest = stream(server, last)
        assert texts(whole[: i + 1]) + texts(rest) == TEXT
        assert {data["id"] for _, data in rest} <= {whole[0][1]["id"]}
        if rest:
            assert rest[-1][1]["usage"]["completion_tokens"] == len(TEXT)
    assert len({request.sampling.seed for request in server.target.requests}) == 1


def test_choices_continue_each_from_its_own_token() -> None:
    server = served(TEXT, max_waiting=8)
    whole = stream(server, n=2)
    for i in (0, 3, len(whole) - 3):
        seen, rest = whole[: i + 1], stream(server, whole[i][0], n=2)
        for choice in (0, 1):
            parts = [c["text"] for _, data in seen + rest for c in data["choices"] if c["index"] == choice]
            assert "".join(parts) == TEXT


def test_another_body_or_key_does_not_find_the_stream() -> None:
    server = served(TEXT)
    last = stream(server)[0][0]
    for changed in ({"prompt": "y"}, {"temperature": 0.5}, {"n": 2}, {"cache_salt": "other"}):
        response = server.post("/v1/completions", BODY | RESUMABLE | changed, headers={"Last-Event-ID": last})
        assert response.status_code == 404
        assert response.json()["error"]["code"] == "stream_not_found"


END = ":0123456789abcdef:fp_01"


@pytest.mark.parametrize(
    "last",
    ["", "7", "cmpl-12:3" + END, *("cmpl-" + "0" * 24 + end for end in (":x" + END, ":1..2" + END, ":3", ":3:0:fp_1"))],
)
def test_other_event_ids_are_refused(last: str) -> None:
    response = served(TEXT).post("/v1/completions", BODY | RESUMABLE, headers={"Last-Event-ID": last})
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "invalid_event_id"


def test_streams_have_no_ids_by_default() -> None:
    response = served(TEXT).post("/v1/completions", BODY)
    assert "id: " not in response.text
    refused = served(TEXT, max_waiting=8).post("/v1/completions", BODY | RESUMABLE | {"prompt": ["a", "b"]})
    assert refused.status_code == 400


@pytest.mark.parametrize(("usage", "body"), [(True, {}), (False, {"logprobs": 1}), (True, {"seed": 7})])
def test_a_stream_that_no_worker_knows_is_generated_again(usage: bool, body: dict[str, Any]) -> None:
    options = {**body, "stream_options": {"resumable": True, "include_usage": usage}}
    server = served(TEXT)
    whole = stream(server, **options)
    for per_step in (2, 64):
        for i, (last, _) in list(enumerate(whole))[::2]:
            fresh = served(TEXT, per_step=per_step)
            rest = stream(fresh, last, **options)
            assert texts(whole[: i + 1]) + texts(rest) == TEXT
            assert tokens(whole[: i + 1]) + tokens(rest) == tokens(whole)
            assert {data["id"] for _, data in rest} <= {whole[0][1]["id"]}
            assert [request.sampling.seed for request in fresh.target.requests] == [
                server.target.requests[0].sampling.seed
            ]
            if rest:
                assert rest[-1][0] == whole[-1][0]


def tokens(events: list[tuple[str, dict[str, Any]]]) -> list[str]:
    """Tokens of the log-probabilities."""
    choices = [choice for _, data in events for choice in data["choices"]]
    return [token for choice in choices if choice.get("logprobs") for token in choice["logprobs"]["tokens"]]


def test_choices_are_generated_again_each_from_its_own_token() -> None:
    whole = stream(served(TEXT, max_waiting=8), n=2)
    for i in range(len(whole)):
        seen, rest = whole[: i + 1], stream(served(TEXT, max_waiting=8, per_step=4), whole[i][0], n=2)
        for choice in (0, 1):
            parts = [c["text"] for _, data in seen + rest for c in data["choices"] if c["index"] == choice]
            assert "".join(parts) == TEXT


def test_a_chat_that_no_worker_knows_is_generated_again() -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "stream": True} | RESUMABLE
    whole = parse(served(TEXT).post("/v1/chat/completions", body))
    response = served(TEXT, per_step=2).post("/v1/chat/completions", body, headers={"Last-Event-ID": whole[1][0]})
    parts = [choice["delta"] for _, data in whole[:2] + parse(response) for choice in data["choices"]]
    assert "".join(part.get("content") or "" for part in parts) == TEXT
    assert [i for i, part in enumerate(parts) if "role" in part] == [0]


def refusal(server: Served, last: str, **body: Any) -> tuple[int, str]:
    response = server.post("/v1/completions", BODY | RESUMABLE | body, headers={"Last-Event-ID": last})
    return response.status_code, response.json()["error"]["code"]


def test_a_stream_of_another_fingerprint_is_refused() -> None:
    last = stream(served(TEXT))[1][0]
    server = served(TEXT)
    server.target.fingerprint = "fp_fedcba9876543210"
    assert refusal(server, last) == (404, "stream_changed")


def test_a_stream_is_not_generated_again_if_its_seed_does_not_decide_its_text() -> None:
    rejection = {"speculation": {"verification": "rejection"}}
    last = stream(served(TEXT), **rejection)[1][0]
    assert refusal(served(TEXT), last, **rejection) == (404, "stream_not_found")
    greedy = stream(served(TEXT), temperature=0.0, **rejection)
    assert texts(greedy[:2]) + texts(stream(served(TEXT), greedy[1][0], temperature=0.0, **rejection)) == TEXT
    unknown = last.rpartition(":")[0] + ":"  # of a server whose fingerprint was not known
    assert refusal(served(TEXT), unknown) == (404, "stream_not_found")


@pytest.mark.parametrize("position", ["40", "40f", "7f", "3.3"])
def test_an_event_that_the_stream_does_not_have_is_refused(position: str) -> None:
    answer_id, _, *rest = stream(served(TEXT))[0][0].split(":")
    last = ":".join([answer_id, position, *rest])
    assert refusal(served(TEXT), last) == (404, "stream_not_found")


class Reader:
    """A client of a stream, which reads as many events as a test wants."""

    def __init__(self, server: Process, body: dict[str, Any], last: str | None = None) -> None:
        parts = urlsplit(server.url)
        self._connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=120)
        headers = {"content-type": "application/json"} | ({} if last is None else {"Last-Event-ID": last})
        self._connection.request("POST", "/v1/completions", json.dumps(body), headers)
        self._response = self._connection.getresponse()
        self.last = last
        self.text = ""

    def read(self, most: int) -> None:
        """Reads up to so many events."""
        while most and (line := self._response.readline().strip()) != b"data: [DONE]":
            assert line, self._response.status
            data, most = json.loads(line.removeprefix(b"data: ")), most - 1
            self.last = self._response.readline().strip().removeprefix(b"id: ").decode()
            assert self._response.readline() == b"\n"
            self.text += "".join(choice["text"] for choice in data["choices"])

    def close(self) -> None:
        self._connection.close()


def test_streams_continue_after_the_gateway_and_the_target_were_killed_together(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "model")
    config: dict[str, Any] = {"model": str(tmp_path / "model"), "device": "cpu", "max_model_len": 256}
    bodies = [
        {
            "prompt": f"number {i}",
            "max_tokens": 120,
            "temperature": 1.0,
            "ignore_eos": True,
            "stream": True,
            **RESUMABLE,
        }
        | ({"seed": i} if i % 2 else {})
        for i in range(4)
    ]
    with server_process(**config) as server:
        first = [Reader(server, body) for body in bodies]
        for i, reader in enumerate(first):
            reader.read(1 + 3 * i)
        workers = psutil.Process(server.popen.pid).children(recursive=True)
        for pid in (server.popen.pid, *(worker.pid for worker in workers)):
            os.kill(pid, signal.SIGKILL)
        psutil.wait_procs(workers, timeout=60)
        for reader in first:
            reader.close()
    with server_process(**config) as server:
        for i, (body, reader) in enumerate(zip(bodies, first, strict=True)):
            assert reader.last is not None
            resumed = Reader(server, body, reader.last)
            resumed.read(1000)
            whole = Reader(server, body) if i % 2 else Reader(server, body, _before_all(reader.last))
            whole.read(1000)
            assert reader.text
            assert reader.text + resumed.text == whole.text
            assert resumed.last == whole.last or i % 2  # an answer that is not resumed has an id of its own
            for other in (resumed, whole):
                other.close()


def _before_all(last: str) -> str:
    """The id of an event before the first token."""
    answer_id, _, *rest = last.split(":")
    return ":".join([answer_id, "0", *rest])
