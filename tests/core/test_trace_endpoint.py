import pytest

from paceline.core.errors import InvalidConfig
from paceline.core.trace_endpoint import trace_url


@pytest.mark.parametrize(
    ("endpoint", "url"),
    [
        ("http://collector:4318", "http://collector:4318/v1/traces"),
        ("https://collector/", "https://collector/v1/traces"),
        ("http://collector:4318/v1/traces", "http://collector:4318/v1/traces"),
        ("https://collector/otlp/v1/traces", "https://collector/otlp/v1/traces"),
    ],
)
def test_a_host_alone_gets_the_usual_path(endpoint: str, url: str) -> None:
    assert trace_url(endpoint) == url


@pytest.mark.parametrize("endpoint", ["collector:4318", "", "grpc://collector:4317", "http://", "http://c:port"])
def test_what_is_no_url_is_said(endpoint: str) -> None:
    with pytest.raises(InvalidConfig, match="trace_endpoint must be a URL such as"):
        trace_url(endpoint)
