"""Where traces are sent."""

from urllib.parse import urlsplit

from paceline.core.errors import InvalidConfig

PATH = "/v1/traces"


def trace_url(endpoint: str) -> str:
    """The URL that spans are posted to: a host alone gets the path that collectors listen at. Raises `InvalidConfig`."""
    try:
        parts = urlsplit(endpoint)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        good = False
    if not good:
        raise InvalidConfig(f"trace_endpoint must be a URL such as http://127.0.0.1:4318, got {endpoint!r}")
    return endpoint.rstrip("/") + PATH if parts.path in ("", "/") else endpoint
