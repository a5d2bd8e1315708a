"""`paceline draft swap --server`: progress, verdict and exit status, against a server that answers as planned."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from paceline.cli import draft_swap
from paceline.cli.commands import cli
from paceline.cli.draft_swap import ServerDraft

RUNNING = {"verdict": "continue", "draft": "old", "reason": "8 periods against 8"}
KEPT = {"verdict": "keep", "draft": "new", "reason": "+12.0% goodput, 9 periods against 9"}
ROLLED_BACK = {"verdict": "roll back", "draft": "old", "reason": "-9.0% goodput, 9 periods against 9"}


@contextmanager
def server(*states: dict[str, Any], status: int = 200) -> Iterator[tuple[str, list[tuple[str, str, Any]]]]:
    """Answers the calls with the states in order; keeps method, key and body of each call."""
    calls: list[tuple[str, str, Any]] = []
    answers = iter(states)

    class Handler(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            size = int(self.headers.get("content-length") or 0)
            body = json.loads(self.rfile.read(size)) if size else None
            calls.append((f"{self.command} {self.path}", self.headers.get("authorization", ""), body))
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(next(answers)).encode())

        do_GET = do_POST = do_DELETE = _answer

        def log_message(self, format: str, *args: object) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{http.server_port}", calls
    finally:
        http.shutdown()
        http.server_close()
        thread.join()


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_swap, "PAUSE", 0.0)


def swap(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ("draft", "swap", *arguments), env={"COLUMNS": "200"})


def test_a_draft_that_is_kept_exits_with_0(tmp_path: Path) -> None:
    with server(RUNNING, RUNNING, KEPT) as (url, calls):
        result = swap("--server", url, str(tmp_path), "--api-key", "secret", "--seconds", "60", "--period", "2")
    assert result.exit_code == 0, result.output
    assert "the server drafts with new: +12.0% goodput" in result.stdout
    assert calls[0] == (
        "POST /admin/draft",
        "Bearer secret",
        {"draft": str(tmp_path.resolve()), "seconds": 60.0, "period": 2.0},
    )
    assert [call[0] for call in calls[1:]] == ["GET /admin/draft"] * 2


def test_a_draft_that_is_rolled_back_exits_with_1() -> None:
    with server(ROLLED_BACK) as (url, calls):
        result = swap("--server", url, "a-name", "--model", "m")
    assert result.exit_code == 1
    assert "the server keeps old: -9.0% goodput" in result.stdout
    assert calls[0][2] == {"draft": "a-name", "model": "m", "seconds": 600.0, "period": 4.0}


def test_an_interruption_ends_the_trial() -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    with server(RUNNING, ROLLED_BACK) as (url, calls), pytest.raises(KeyboardInterrupt):
        ServerDraft(url, None).swap("x", 1.0, 1.0, interrupt, lambda text: None)
    assert [call[0] for call in calls] == ["POST /admin/draft", "DELETE /admin/draft"]


@pytest.mark.parametrize(
    ("status", "message"),
    [(401, "scope `admin`"), (404, "no admin routes"), (409, "another draft"), (503, "not ready")],
)
def test_errors_say_what_to_do(status: int, message: str) -> None:
    with server({"error": {"message": "another draft is tried now"}}, status=status) as (url, _):
        result = swap("--server", url, "x")
    assert result.exit_code != 0
    assert message in " ".join(result.output.split())


def test_a_pool_is_needed_without_a_server_and_refused_with_one() -> None:
    for arguments in (["folder"], ["--server", "http://127.0.0.1:9", "pool", "folder"]):
        result = swap(*arguments)
        assert result.exit_code != 0
        assert "POOL and FOLDER" in " ".join(result.output.split())
