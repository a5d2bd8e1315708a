"""Sampling parameters of requests that do not set them."""

from dataclasses import asdict, dataclass
from typing import Any

from paceline.core.errors import InvalidConfig, InvalidRequest
from paceline.core.sampling import SamplingParams
from paceline.models.loading.recommended_sampling import recommended_sampling


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Sampling parameters of requests that do not set them; see `SamplingParams`. If a parameter is None, the model's
    recommendation holds (`models/loading/recommended_sampling.py`), or the model's distribution stays unchanged."""

    max_tokens: int | None = None
    """Output tokens; none: the rest of the context window, and 16 for /v1/completions, as OpenAI does."""
    temperature: float | None = None
    """Sampling temperature; 0 is greedy. None: as the model's generation_config.json recommends, otherwise 1."""
    top_k: int | None = None
    """Candidates per token; 0 means no limit. None: as the model recommends, otherwise 0."""
    top_p: float | None = None
    """Probability mass of the candidates; 1 means no limit. None: as the model recommends, otherwise 1."""
    min_p: float | None = None
    """Least probability relative to the best candidate; 0 means no limit. None: as the model recommends, otherwise 0."""
    repetition_penalty: float | None = None
    """Divisor of repeated tokens' logits; 1 means no penalty. None: as the model recommends, otherwise 1."""
    presence_penalty: float = 0.0
    """Penalty of tokens that occurred; 0 means no penalty."""
    frequency_penalty: float = 0.0
    """Penalty of tokens per occurrence; 0 means no penalty."""

    def __post_init__(self) -> None:
        values = {name: value for name, value in asdict(self).items() if value is not None}
        try:
            SamplingParams(**values)
        except InvalidRequest as error:
            raise InvalidConfig(f"sampling.{error}") from None

    def params(self, model: str, **given: Any) -> SamplingParams:
        """The given fields, then these, then those that `model` recommends. A given None counts as absent."""
        own = {name: value for name, value in asdict(self).items() if value is not None}
        present = {name: value for name, value in given.items() if value is not None}
        return SamplingParams(**(recommended_sampling(model) | own | present))
