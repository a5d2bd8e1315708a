"""A page that makes its own name resolve to this server (DNS rebinding) is rejected by its `Host` header."""

from pathlib import Path
from typing import Any

import pytest

from paceline.core.errors import InvalidConfig
from paceline.gateway.auth.api_keys import KeyFile
from paceline.gateway.http.middleware import is_allowed, parse_hosts
from tests.gateway.fakes import served

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}
LOCAL = [
    "127.0.0.1:8000",
    "[::1]:8000",
    "192.168.1.7",
    "localhost:8000",
    "paceline:8000",
    "llm.default.svc",
    "gpu1.local",
]
PUBLIC = ["evil.example:8000", "evil.example", "127.0.0.1.evil.example", "localhost.evil.example", "evil.localhost.com"]


@pytest.mark.parametrize("host", PUBLIC)
def test_an_open_server_rejects_a_rebound_name(host: str) -> None:
    server = served()
    response = server.post(CHAT, BODY, headers={"Host": host, "Origin": f"http://{host}"})
    assert (response.status_code, response.json()["error"]["code"]) == (403, "unknown_host")
    assert server.target.requests == []
    assert 'reason="unknown_host"} 1.0' in server.gateway.metrics.render().decode()


@pytest.mark.parametrize("host", LOCAL)
def test_an_open_server_accepts_local_names(host: str) -> None:
    assert served().post(CHAT, BODY, headers={"Host": host}).status_code == 200


def test_a_server_with_keys_accepts_every_name(tmp_path: Path) -> None:
    file = KeyFile(tmp_path / "keys.json")
    headers = {"Host": "api.example.com", "Authorization": f"Bearer {file.add('ann')}"}
    assert served(api_keys=str(file.path)).post(CHAT, BODY, headers=headers).status_code == 200
    listed = served(api_keys=str(file.path), allowed_hosts="other.example.com")
    assert listed.post(CHAT, BODY, headers=headers).status_code == 403


def test_a_list_names_the_hosts() -> None:
    hosts = parse_hosts("API.example.com, *.lab.example")
    assert is_allowed("api.example.com:443", hosts, has_keys=False)
    assert is_allowed("a.lab.example", hosts, has_keys=False)
    assert is_allowed("127.0.0.1", hosts, has_keys=False)  # health checks use the address
    for other in ("lab.example", "xlab.example", "example.com", "gateway"):
        assert not is_allowed(other, hosts, has_keys=False)
    assert is_allowed("evil.example", parse_hosts("*"), has_keys=False)


@pytest.mark.parametrize("text", ["https://a.example", "a.example:80", "a b", "a/..", "*.*"])
def test_an_invalid_host_is_rejected(text: str) -> None:
    with pytest.raises(InvalidConfig, match="is not a host name"):
        parse_hosts(text)
