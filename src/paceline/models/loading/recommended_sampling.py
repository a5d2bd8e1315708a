"""Sampling parameters that a model's authors recommend, for requests that set none."""

import json
from pathlib import Path
from typing import Any

from paceline.core.errors import InvalidRequest, PacelineError
from paceline.core.sampling import SamplingParams
from paceline.models.architectures.inflation import PREFIX, Inflation
from paceline.models.loading.hub import EMBEDDED, find_model

FIELDS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
CARDS: dict[str, dict[str, float]] = {EMBEDDED: {"temperature": 0.2, "top_p": 0.9}}
"""Recommendations of models whose files have none."""
MAX_BYTES = 2**20


def recommended_sampling(model: str) -> dict[str, float]:
    """Fields of `SamplingParams` from the model's generation_config.json, or from our card of it; empty if there are none.
    Values that `SamplingParams` does not allow are left out."""
    if model.startswith(PREFIX):
        model = Inflation.parse(model).base
    if model in CARDS:
        return dict(CARDS[model])
    return {name: value for name, value in _read(model).items() if name in FIELDS and _is_valid(name, value)}


def _read(model: str) -> dict[str, Any]:
    try:
        path = find_model(model)
        file = (path if path.is_dir() else path.parent) / "generation_config.json"
        if not file.is_file() or file.stat().st_size > MAX_BYTES:
            return {}
        values = json.loads(Path(file).read_text("utf-8"))
    except (PacelineError, OSError, ValueError, RecursionError):
        return {}
    return values if isinstance(values, dict) else {}


def _is_valid(name: str, value: Any) -> bool:
    try:
        SamplingParams(**{name: value})
    except (InvalidRequest, TypeError):
        return False
    return not isinstance(value, bool)
