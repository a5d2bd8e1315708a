"""Several models behind one server."""

import time
from typing import cast

import httpx
import pytest
from starlette.testclient import TestClient

from paceline.core.config import EngineConfig
from paceline.gateway.auth.access import Access
from paceline.gateway.auth.rate_limit import RateLimits
from paceline.gateway.config.config import ServerConfig
from paceline.gateway.config.flags import FlagStore
from paceline.gateway.http.app import create_app
from paceline.gateway.metrics.metrics import Metrics
from paceline.gateway.sessions.gateway import Gateway
from paceline.gateway.sessions.models import ServedModels
from paceline.targets.client import TargetClient
from tests.gateway.fakes import FakeTarget


@pytest.fixture
def client() -> httpx.Client:
    """A server of `first` and `second`, each of which says its name."""
    gateways, limits = [], RateLimits(time.monotonic)
    for name in ("first", "second"):
        engine = EngineConfig(model=name, max_num_seqs=4, max_model_len=4096)
        target = FakeTarget(lambda request, name=name: f"I am {name}", 3, False, engine)  # type: ignore[misc]
        metrics = Metrics(name)
        metrics.add_engine(target.engine_status)
        settings = ServerConfig(engine=engine, served_model_name=f"{name}, alias-of-{name}")
        gateways.append(
            Gateway(
                cast(TargetClient, target), settings, metrics, FlagStore(None, target.validate_flags), limits=limits
            )
        )
    return TestClient(create_app(ServedModels(gateways), Access.from_config(ServerConfig(), lambda: 0.0)))


def ask(client: httpx.Client, **body: str) -> httpx.Response:
    return client.post("/v1/completions", json={"prompt": "Hello", **body})


@pytest.mark.parametrize("name", ["first", "second"])
def test_model_in_the_request_routes(client: httpx.Client, name: str) -> None:
    answer = ask(client, model=name).json()
    assert (answer["model"], answer["choices"][0]["text"]) == (name, f"I am {name}")
    chat = client.post(
        "/v1/chat/completions", json={"model": name, "messages": [{"role": "user", "content": "Hello"}]}
    ).json()
    assert (chat["model"], chat["choices"][0]["message"]["content"]) == (name, f"I am {name}")
    assert client.post("/tokenize", json={"model": name, "prompt": "Hello"}).json()["count"] == 5
    assert client.get(f"/v1/models/{name}").json()["id"] == name


def test_a_model_answers_to_its_other_names(client: httpx.Client) -> None:
    assert ask(client, model="alias-of-second").json()["model"] == "second"
    assert ask(client, model="alias-of-third").status_code == 404


def test_every_model_is_listed(client: httpx.Client) -> None:
    assert [model["id"] for model in client.get("/v1/models").json()["data"]] == ["first", "second"]


def test_unknown_model_is_404_as_openai_says(client: httpx.Client) -> None:
    for response in (ask(client, model="third"), client.get("/v1/models/third")):
        error = response.json()["error"]
        assert (response.status_code, error["code"], error["param"]) == (404, "model_not_found", "model")
        assert error["type"] == "invalid_request_error"
        assert "'first', 'second'" in error["message"]


def test_request_without_a_model_is_rejected_if_there_are_several(client: httpx.Client) -> None:
    response = ask(client)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "model")


def test_metrics_hold_every_model_in_one_family(client: httpx.Client) -> None:
    ask(client, model="first")
    ask(client, model="second")
    text = client.get("/metrics").text
    assert text.count("# TYPE paceline_requests_total") == 1
    for name in ("first", "second"):
        assert f'paceline_sequences_running{{model="{name}"}}' in text
        assert f'paceline_queue_choices{{model="{name}"}} 0.0' in text
    assert client.get("/ready").status_code == 200
    assert client.get("/health").status_code == 200


def test_the_dashboard_has_the_data_of_every_model(client: httpx.Client) -> None:
    for query, name in (("", "first"), ("?model=second", "second")):
        report = client.get(f"/v1/paceline/overview{query}").json()
        assert (report["model"], report["models"]) == (name, ["first", "second"])
    assert client.get("/v1/paceline/overview?model=third").status_code == 404
