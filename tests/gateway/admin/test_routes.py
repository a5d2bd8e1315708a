"""The dashboard's files over HTTP. tests/gateway/browser tests the page itself."""

import re

import pytest

from paceline.gateway.admin.routes import STATIC
from tests.gateway.fakes import served

FILES = sorted(str(path.relative_to(STATIC)) for path in STATIC.rglob("*") if path.is_file())
TYPES = {"html": "text/html", "css": "text/css", "js": "javascript", "svg": "image/svg+xml"}


@pytest.mark.parametrize(
    ("path", "title"), [("/", "Paceline"), ("/dashboard", "Paceline dashboard"), ("/planner", "Paceline planner")]
)
def test_every_page_has_a_content_security_policy(path: str, title: str) -> None:
    response = served().call("GET", path)
    assert response.headers["content-type"].startswith("text/html")
    assert "default-src 'self'" in response.headers["content-security-policy"]
    assert "frame-ancestors 'none'" in response.headers["content-security-policy"]
    assert f"<title>{title}</title>" in response.text


@pytest.mark.parametrize("name", FILES)
def test_every_file_has_its_content_type(name: str) -> None:
    response = served().call("GET", f"/dashboard/{name}")
    assert response.status_code == 200
    assert response.headers["x-content-type-options"] == "nosniff"
    assert TYPES.get(name.rpartition(".")[2], "") in response.headers["content-type"]


def test_every_referenced_file_exists() -> None:
    page = "".join(one.read_text("utf-8") for one in STATIC.glob("*.html"))
    referenced = set(re.findall(r'(?:href|src)="dashboard/([^"]+)"', page))
    for script in STATIC.glob("*.js"):
        referenced |= set(re.findall(r'from "\./([^"]+)"', script.read_text("utf-8")))
    assert referenced <= set(FILES)
    licences = {"vendor/uPlot.LICENSE", "vendor/marked.LICENSE"}
    assert set(FILES) - referenced == {"index.html", "dashboard.html", "planner.html", "docs.html", *licences}


def test_no_file_uses_another_host() -> None:
    for path in STATIC.glob("*.*"):
        urls = re.findall(r"https?://[^\s\"')]+", path.read_text("utf-8"))
        assert urls in ([], ["http://www.w3.org/2000/svg"]), path.name


@pytest.mark.parametrize(
    "path", ["/dashboard/../serve.py", "/dashboard/%2e%2e/serve.py", "/dashboard/none.js", "/dashboard/"]
)
def test_other_paths_are_404(path: str) -> None:
    response = served().call("GET", path)
    assert response.status_code == 404
    assert set(response.json()) == {"error"}


def test_the_openapi_document_leaves_out_the_page() -> None:
    paths = served().app.openapi()["paths"]
    assert "/v1/paceline/overview" in paths
    assert not [path for path in paths if path == "/" or path.startswith("/dashboard")]


def test_the_page_of_the_api_loads_nothing_from_other_sites() -> None:
    server = served()
    page = server.call("GET", "/docs")
    assert page.status_code == 200
    assert "default-src 'self'" in page.headers["content-security-policy"]
    for link in re.findall(r'(?:src|href)="([^"]+)"', page.text):
        assert "//" not in link
        assert server.call("GET", f"/{link}").status_code == 200
    assert server.call("GET", "/redoc").status_code == 404


def test_health_fails_while_the_engine_fails_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    server = served()
    assert server.call("GET", "/health").status_code == 200
    text = "the engine failed to start 3 times in a row: see the log"
    monkeypatch.setattr(type(server.target), "failure", text)
    response = server.call("GET", "/health")
    assert (response.status_code, response.json()["error"]["message"]) == (503, text)
