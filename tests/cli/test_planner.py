import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from typer.testing import CliRunner, Result

from paceline.cli.commands import cli
from tests.planning.planner.test_gateway_metrics import page


@contextmanager
def gateway(finished: int = 400) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A server with the metrics of a growing load, of which `finished` requests end between two scrapes. It keeps what is put
    to /admin/plan."""
    plans: list[dict[str, Any]] = []
    scrapes = iter(range(1, 1000))

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            n = next(scrapes)
            text = page(
                finished=finished * n,
                started=400 * n,
                fast=finished * n,
                prompt=1000 * finished * n,
                output=100 * finished * n,
                running=50,
            )
            self.send_response(200)
            self.end_headers()
            self.wfile.write(text.encode())

        def do_PUT(self) -> None:
            plans.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with serving(Handler) as url:
        yield url, plans


@contextmanager
def serving(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """The address of a server on a free port."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ("planner", *arguments), env={"COLUMNS": "200"})


def test_it_advises_with_a_reason_and_reports_to_the_gateway() -> None:
    with gateway() as (url, plans):
        result = run("--url", url, "--interval", "0.1", "--count", "4", "--max-workers", "6")
    assert result.exit_code == 0, result.output
    assert "advises; --act changes the pools" in " ".join(result.stderr.split())
    text = " ".join(result.stdout.split())
    assert "advise target 1 -> 6" in text
    assert "The limits allow 6 of" in text
    assert len(plans) == 3
    assert plans[-1]["sizes"]["target"] == 6
    assert plans[-1]["is_acting"] is False


def test_it_says_once_why_nothing_changes() -> None:
    with gateway(finished=0) as (url, _):
        result = run("--url", url, "--interval", "0.1", "--count", "5")
    text = " ".join(result.stdout.split())
    assert "keep target 1, draft 1: steady. Fewer than" in text
    assert text.count("keep") == 1


def test_a_gateway_that_does_not_answer_is_one_line() -> None:
    result = run("--url", "http://127.0.0.1:9", "--interval", "0.1", "--count", "1")
    assert result.exit_code == 0
    assert "cannot read the metrics: no server answers at http://127.0.0.1:9" in " ".join(result.stderr.split())


def test_a_lasting_error_is_printed_once_and_its_end_too() -> None:
    """The gateway refuses twice with one message, once with another, and then answers."""
    refusals = iter((503, 503, 500))

    class Restarting(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(next(refusals, 200))
            self.end_headers()

        def do_PUT(self) -> None:  # no admin routes
            self.send_response(404)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with serving(Restarting) as url:
        result = run("--url", url, "--interval", "0.1", "--count", "5")
    lines = result.stderr.splitlines()[1:]  # the first says what it does
    assert lines == [
        f"error: cannot read the metrics: {url} is not ready: status 503",
        f"error: cannot read the metrics: {url}/metrics: status 500",
        "can read the metrics again",
    ]


def test_acting_needs_a_cluster(tmp_path: Path) -> None:
    assert "--act needs --config" in " ".join(run("--act").stderr.split())
