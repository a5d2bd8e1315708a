"""The client against a small HTTP server."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from paceline.tools.learn.server import LearningServer, ServerFailure


class Handler(BaseHTTPRequestHandler):
    answers: list[tuple[int, Any]]
    calls: list[tuple[str, str, Any]]

    def _answer(self) -> None:
        size = int(self.headers.get("content-length") or 0)
        body = json.loads(self.rfile.read(size)) if size else None
        self.calls.append((self.command, self.path, body))
        status, content = self.answers.pop(0)
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_POST = do_DELETE = _answer

    def log_message(self, *arguments: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[tuple[type[Handler], str]]:
    handler = type("One", (Handler,), {"answers": [], "calls": []})
    http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield handler, f"http://127.0.0.1:{http.server_address[1]}"
    http.shutdown()
    http.server_close()
    thread.join()


def state(verdict: str | None, draft: str = "base", candidate: str = "new") -> dict[str, Any]:
    return {"draft": draft, "candidate": candidate, "verdict": verdict, "gain": 0.1, "reason": "because"}


def run(client: LearningServer, limit: int = 100) -> Any:
    waits = iter(range(limit))
    return client.run(Path("new"), lambda: next(waits, None) is not None, lambda text: None)


def test_a_trial_is_polled_until_its_verdict(server: tuple[type[Handler], str]) -> None:
    handler, url = server
    handler.answers += [(200, state("continue")), (200, state("continue")), (200, state("keep"))]
    verdict = run(LearningServer(url, "key", trial_seconds=9.0))
    assert (verdict.is_passed, verdict.gain, verdict.reason) == (True, 0.1, "because")
    assert handler.calls[0] == ("POST", "/admin/draft", {"draft": "new", "seconds": 9.0})
    assert [call[0] for call in handler.calls] == ["POST", "GET", "GET"]


@pytest.mark.parametrize("verdict", ["roll back", "mixed"])
def test_any_other_verdict_refuses(server: tuple[type[Handler], str], verdict: str) -> None:
    handler, url = server
    handler.answers += [(200, state(verdict))]
    assert not run(LearningServer(url, None)).is_passed


def test_a_verdict_on_another_draft_does_not_count(server: tuple[type[Handler], str]) -> None:
    handler, url = server
    handler.answers += [(200, state("keep", candidate="other"))]
    assert not run(LearningServer(url, None)).is_passed


def test_giving_up_ends_the_trial(server: tuple[type[Handler], str]) -> None:
    handler, url = server
    handler.answers += [(200, state("continue")), (200, state("roll back"))]
    assert run(LearningServer(url, None), limit=0) is None
    assert [call[0] for call in handler.calls] == ["POST", "DELETE"]


def test_another_trial_is_waited_for(server: tuple[type[Handler], str]) -> None:
    handler, url = server
    handler.answers += [(409, {"error": {"message": "running"}}), (200, state("keep"))]
    assert run(LearningServer(url, None)).is_passed


def test_errors_say_whether_to_try_again(server: tuple[type[Handler], str]) -> None:
    handler, url = server
    for status, is_temporary in ((401, False), (404, False), (503, True), (429, True)):
        handler.answers += [(status, {"error": {"message": "no"}})]
        with pytest.raises(ServerFailure, match=r"/admin|not ready") as failure:
            LearningServer(url, None).samples(0)
        assert failure.value.is_temporary == is_temporary
    with pytest.raises(ServerFailure) as failure:
        LearningServer("http://127.0.0.1:9", None).samples(0)
    assert failure.value.is_temporary


def test_samples(server: tuple[type[Handler], str]) -> None:
    handler, url = server
    one = {
        "number": 4, "prompt": [1, 2], "output": [3], "accepted": [0], "drafted": 1, "rounds": 1, "tenant": "t",
        "category": "chat",
    }  # fmt: skip
    handler.answers += [(200, {"epoch": "e", "last": 4, "samples": [one]}), (200, {"epoch": "e"})]
    client = LearningServer(url, None, model="llama")
    batch = client.samples(3)
    assert (batch.epoch, batch.last, batch.samples[0].prompt, batch.samples[0].output) == ("e", 4, (1, 2), (3,))
    assert handler.calls[0][1] == "/admin/learning/samples?after=3&model=llama"
    with pytest.raises(ServerFailure, match="another version"):
        client.samples(4)
