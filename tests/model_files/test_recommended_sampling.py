"""Recommended sampling: from generation_config.json, or from our card of a model."""

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.gateway.config.config import SamplingDefaults
from paceline.model_files.checksums import recommended_sampling


def test_the_embedded_model_has_a_card() -> None:
    assert recommended_sampling("smollm2") == {"temperature": 0.2, "top_p": 0.9}
    assert recommended_sampling("inflate:llama-8b?base=smollm2") == {"temperature": 0.2, "top_p": 0.9}


def test_generation_config(tmp_path: Path) -> None:
    values = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "repetition_penalty": 1.05, "eos_token_id": 2}
    (tmp_path / "generation_config.json").write_text(json.dumps(values))
    assert recommended_sampling(str(tmp_path)) == {name: values[name] for name in values if name != "eos_token_id"}


@pytest.mark.parametrize("content", ["{", "[]", '{"temperature": "hot", "top_p": 7, "top_k": true, "min_p": null}', ""])
def test_a_bad_file_recommends_nothing(tmp_path: Path, content: str) -> None:
    (tmp_path / "generation_config.json").write_text(content)
    assert recommended_sampling(str(tmp_path)) == {}


def test_a_model_that_is_not_here_recommends_nothing() -> None:
    assert recommended_sampling("owner/not-here") == {}


@pytest.mark.parametrize(
    ("configured", "given", "expected"),
    [
        ({}, {}, (0.2, 0.9)),
        ({"temperature": 1.0}, {}, (1.0, 0.9)),
        ({"temperature": 1.0}, {"temperature": 0.0, "top_p": None}, (0.0, 0.9)),
    ],
)
def test_a_request_precedes_the_configuration_and_that_the_model(
    configured: dict[str, Any], given: dict[str, Any], expected: tuple[float, float]
) -> None:
    params = SamplingDefaults(**configured).params("smollm2", **given)
    assert (params.temperature, params.top_p) == expected
