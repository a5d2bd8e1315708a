"""Generated requests that follow the OpenAPI document never cause a 5xx, and every error is the error object of its API."""

import json
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.strategies import one_of
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from paceline.core.config import EngineConfig
from tests.gateway.fakes import served

KEY = "open-sesame"
server = served("Hi.", admin_key=KEY, engine=EngineConfig(model="fake", max_num_seqs=64, max_model_len=512))
schema = schemathesis.openapi.from_asgi("/openapi.json", server.app)
schema.config.generation.update(modes=list(schemathesis.GenerationMode))

CHECKS = (not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance)


def check_error_object(path: str, response: Any) -> None:
    body = json.loads(response.content)
    if path.startswith("/v1/messages"):
        assert set(body) == {"type", "error"}
        assert set(body["error"]) == {"type", "message"}
        return
    assert set(body) == {"error"}
    if path.startswith("/api/"):
        assert isinstance(body["error"], str)
        return
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert isinstance(body["error"]["message"], str)


def check(case: schemathesis.Case) -> None:
    headers = {"Authorization": f"Bearer {KEY}"} if case.path.startswith("/admin") else None
    response = case.call_and_validate(headers=headers, checks=CHECKS)
    if response.status_code >= 400:
        check_error_object(case.path, response)


SETTINGS = settings(
    max_examples=25,
    derandomize=True,
    database=None,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
OPERATIONS = [(path, method) for path, methods in server.app.openapi()["paths"].items() for method in methods]


@pytest.mark.parametrize(("path", "method"), OPERATIONS)
def test_generated_requests(path: str, method: str) -> None:
    """Requests are generated in the test: `schema.parametrize` would make thousands whenever tests are collected. It is used by
    test_openapi_boundaries.py."""
    operation = schema[path][method.upper()]
    cases = one_of(*(operation.as_strategy(generation_mode=mode) for mode in schemathesis.GenerationMode))
    SETTINGS(given(case=cases)(check))()


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/models", "/tokenize", "/metrics"])
def test_the_document_lists_routes_and_errors(path: str) -> None:
    document = server.app.openapi()
    (operation,) = document["paths"][path].values()
    assert {"200", "400", "429", "503"} <= set(operation["responses"])
    assert "422" not in operation["responses"]
    assert operation["responses"]["400"]["content"]["application/json"]["schema"]["$ref"].endswith("/ErrorBody")
