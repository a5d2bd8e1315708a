"""The methods of routes in docs/api.md are those of the server."""

import re
from pathlib import Path

from tests.gateway.fakes import served

PAGE = Path(__file__).parents[2] / "docs" / "api.md"
KEY = "open-sesame"
HEADERS = {"authorization": f"Bearer {KEY}"}


def documented() -> set[tuple[str, str]]:
    """(method, path) of the first table."""
    found = set()
    for line in PAGE.read_text("utf-8").partition("## ")[0].splitlines():
        cell = line.split("|")[1] if line.startswith("| `") else ""
        methods = set(re.findall(r"\b(GET|POST|PUT|PATCH|DELETE)\b", cell))
        found |= {(method, path) for method in methods for path in re.findall(r"/[\w/.-]*(?:\{\w+\})?", cell)}
    return found


def test_the_server_accepts_the_documented_methods() -> None:
    server = served(admin_key=KEY)
    assert server.call("POST", "/admin/plan", headers=HEADERS).status_code == 405
    refused = {
        (method, path) for method, path in documented() if server.call(method, path, headers=HEADERS).status_code == 405
    }
    assert documented() >= {("PUT", "/admin/plan"), ("GET", "/v1/models/{name}")}
    assert not refused
