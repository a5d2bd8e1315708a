"""/v1/models, /tokenize, /detokenize, health, metrics and flags."""

from tests.gateway.fakes import FINGERPRINT, served


def test_models() -> None:
    server = served(served_model_name="team/model")
    models = server.call("GET", "/v1/models").json()
    assert [model["id"] for model in models["data"]] == ["team/model"]
    assert models["data"][0]["max_model_len"] == 4096
    assert server.call("GET", "/v1/models/team/model").json()["id"] == "team/model"
    assert models["data"][0]["system_fingerprint"] == FINGERPRINT
    server.target.fingerprint = ""  # workers with different fingerprints
    assert server.call("GET", "/v1/models/team/model").json()["system_fingerprint"] is None
    assert server.call("GET", "/v1/models/other").status_code == 404


def test_tokenize_and_detokenize() -> None:
    server = served()
    answer = server.post("/tokenize", {"prompt": "Hé", "return_token_strs": True}).json()
    assert answer["count"] == 3
    assert answer["max_model_len"] == 4096
    assert answer["token_strs"] == ["H", "Ã", "©"]
    assert server.post("/detokenize", {"tokens": answer["tokens"]}).json() == {"prompt": "Hé"}
    assert server.post("/detokenize", {"tokens": [9999]}).json()["error"]["param"] == "tokens"


def test_tokenize_matches_the_chat_prompt() -> None:
    server = served()
    messages = [{"role": "user", "content": "Hi"}]
    server.post("/v1/chat/completions", {"messages": messages})
    tokens = server.post("/tokenize", {"messages": messages}).json()["tokens"]
    assert tuple(tokens) == server.target.requests[0].prompt_ids


def test_tokenize_needs_a_prompt_or_messages() -> None:
    server = served()
    assert server.post("/tokenize", {}).json()["error"]["param"] == "prompt"


def test_a_long_prompt_is_tokenized_on_another_thread() -> None:
    server = served()
    assert server.post("/tokenize", {"prompt": "x" * 20_000}).json()["count"] == 20_000


def test_health_and_metrics() -> None:
    server = served()
    assert server.call("GET", "/health").json() == {"status": "ok"}
    assert [server.call("HEAD", path).status_code for path in ("/health", "/ready")] == [200, 200]
    assert server.call("GET", "/ready").json() == {"status": "ready"}
    server.post("/v1/completions", {"prompt": "x"})
    response = server.call("GET", "/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=")
    assert 'paceline_requests_total{category="prose",model="fake",outcome="stop"} 1.0' in response.text
    server.target.fail()
    assert server.call("GET", "/health").status_code == 503
    assert server.call("GET", "/ready").status_code == 503
    assert server.post("/v1/completions", {"prompt": "x"}).status_code == 503


KEY = {"Authorization": "Bearer open-sesame"}


def test_flags_need_the_admin_key() -> None:
    assert served().call("GET", "/admin/flags", headers=KEY).status_code == 404
    server = served(admin_key="open-sesame")
    response = server.call("GET", "/admin/flags")
    assert response.status_code == 401
    assert response.json()["error"]["code"] == "invalid_api_key"
    assert (
        server.call("PATCH", "/admin/flags", json={}, headers={"Authorization": "Bearer é".encode()}).status_code == 401
    )


def test_flags_change_and_have_a_history() -> None:
    server = served(admin_key="open-sesame")
    headers = {**KEY, "X-Paceline-Who": "ann"}
    report = server.call("PATCH", "/admin/flags", json={"enabled": False, "max_depth": 2}, headers=headers).json()
    assert report["flags"] == {"enabled": False, "method": None, "max_depth": 2}
    assert report["effective"]["enabled"] is False
    report = server.call("PATCH", "/admin/flags", json={"enabled": None}, headers=headers).json()
    assert report["flags"] == {"enabled": None, "method": None, "max_depth": 2}
    history = server.call("GET", "/admin/flags", headers=KEY).json()["history"]
    assert [(change["who"], change["changes"]) for change in history] == [
        ("admin (ann)", {"enabled": False, "max_depth": 2}),
        ("admin (ann)", {"enabled": None}),
    ]
    bad = server.call("PATCH", "/admin/flags", json={"method": "psychic"}, headers=KEY)
    assert (bad.status_code, bad.json()["error"]["param"]) == (400, "method")
    bad = server.call("PATCH", "/admin/flags", json={"depth": 1}, headers=KEY)
    assert (bad.status_code, bad.json()["error"]["param"]) == (400, "depth")
