"""`paceline serve MODEL`: the model as an argument, as in vLLM."""

from typing import Any

import pytest
from typer.testing import CliRunner

from paceline.cli.commands import cli


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    configs: list[Any] = []
    monkeypatch.setattr("paceline.deploy.serving.serve", lambda config, on_ready: configs.append(config) or 0)
    monkeypatch.setattr("paceline.cli.serve.check_or_fetch", lambda engine: None)  # there are no such models
    return configs


def run(*arguments: str) -> Any:
    return CliRunner().invoke(cli, ["serve", *arguments])


@pytest.mark.parametrize(
    "arguments", [("some/model", "--port", "9"), ("--port", "9", "some/model"), ("--model", "some/model")]
)
def test_the_model_is_the_first_argument(served: list[Any], arguments: tuple[str, ...]) -> None:
    assert run(*arguments).exit_code == 0
    assert served[0].engine.model == "some/model"


def test_without_a_model_the_embedded_one_is_served(served: list[Any]) -> None:
    assert run().exit_code == 0
    assert served[0].engine.model == "smollm2"


def test_two_different_models_are_an_error(served: list[Any]) -> None:
    result = run("one/model", "--model", "other/model")
    assert result.exit_code == 2
    assert served == []
