"""The files of the dashboard, as served. What they do is tested in tests/server/browser."""

import re

import pytest

from paceline.server.dashboard.routes import STATIC
from tests.server.fakes import served

FILES = sorted(str(path.relative_to(STATIC)) for path in STATIC.rglob("*") if path.is_file())
TYPES = {"html": "text/html", "css": "text/css", "js": "javascript", "svg": "image/svg+xml"}


def test_the_page_is_at_the_root_and_runs_nothing_from_elsewhere() -> None:
    response = served().call("GET", "/")
    assert response.headers["content-type"].startswith("text/html")
    assert "default-src 'self'" in response.headers["content-security-policy"]
    assert "frame-ancestors 'none'" in response.headers["content-security-policy"]
    assert "<title>Paceline</title>" in response.text


@pytest.mark.parametrize("name", FILES)
def test_every_file_is_served_as_what_it_is(name: str) -> None:
    response = served().call("GET", f"/dashboard/{name}")
    assert response.status_code == 200
    assert response.headers["x-content-type-options"] == "nosniff"
    assert TYPES.get(name.rpartition(".")[2], "") in response.headers["content-type"]


def test_every_file_that_is_named_is_there() -> None:
    page = (STATIC / "index.html").read_text("utf-8")
    named = set(re.findall(r'(?:href|src)="dashboard/([^"]+)"', page))
    for script in STATIC.glob("*.js"):
        named |= set(re.findall(r'from "\./([^"]+)"', script.read_text("utf-8")))
    assert named <= set(FILES)
    assert set(FILES) - named == {"index.html", "vendor/uPlot.LICENSE"}


def test_nothing_comes_from_another_host() -> None:
    for path in STATIC.glob("*.*"):
        urls = re.findall(r"https?://[^\s\"')]+", path.read_text("utf-8"))
        assert urls in ([], ["http://www.w3.org/2000/svg"]), path.name


@pytest.mark.parametrize(
    "path", ["/dashboard/../serve.py", "/dashboard/%2e%2e/serve.py", "/dashboard/none.js", "/dashboard/"]
)
def test_nothing_else_is(path: str) -> None:
    response = served().call("GET", path)
    assert response.status_code == 404
    assert set(response.json()) == {"error"}


def test_no_route_of_the_page_is_in_the_document() -> None:
    paths = served().app.openapi()["paths"]
    assert "/v1/paceline/overview" in paths
    assert not [path for path in paths if path == "/" or path.startswith("/dashboard")]
