"""Sampling parameters of one request."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.core.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Parameters of the target distribution `p` and of where generation stops.

    `temperature=0` is greedy. `top_k=0`, `top_p=1` and `min_p=0` each switch off their truncation.
    If `seed` is None, a seed is drawn when the request is validated. The text depends on seed and model alone.
    """

    max_tokens: int = 128
    min_tokens: int = 0
    """Output tokens before which no end token is sampled and no stop string ends the text."""
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    n: int = 1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    """Number of alternatives reported with each token. None if no log-probabilities are reported."""
    prompt_logprobs: int | None = None
    """Number of alternatives reported with each prompt token after the first. The engine then computes the whole prompt,
    without the prefix cache. None if no log-probabilities of the prompt are reported."""
    skip_special_tokens: bool = True
    """Whether the text leaves out special tokens."""
    blocked_ids: tuple[int, ...] = ()
    """End tokens that are not sampled before `min_tokens`; the validator sets them."""
    json_schema: Mapping[str, Any] | None = None
    """JSON schema that the output satisfies; `{}` allows any JSON value."""

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        object.__setattr__(self, "stop", tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        for name in ("max_tokens", "min_tokens", "top_k", "seed", "n", "logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, int):
                raise InvalidRequest(f"{name} must be an integer, got {value!r}", field=name)
        checks = (
            ("max_tokens", self.max_tokens >= 1, "at least 1"),
            ("min_tokens", 0 <= self.min_tokens <= self.max_tokens, f"between 0 and max_tokens ({self.max_tokens})"),
            ("temperature", 0.0 <= self.temperature <= 10.0, "between 0 (greedy) and 10"),
            ("top_k", self.top_k >= 0, "0 (off) or more"),
            ("top_p", 0.0 < self.top_p <= 1.0, "in (0, 1]"),
            ("min_p", 0.0 <= self.min_p <= 1.0, "in [0, 1]"),
            ("repetition_penalty", 0.0 < self.repetition_penalty <= 10.0, "in (0, 10]"),
            ("presence_penalty", -2.0 <= self.presence_penalty <= 2.0, "in [-2, 2]"),
            ("frequency_penalty", -2.0 <= self.frequency_penalty <= 2.0, "in [-2, 2]"),
            ("seed", self.seed is None or 0 <= self.seed < 2**63, "in [0, 2**63)"),
            ("n", 1 <= self.n <= 128, "in [1, 128]"),
            ("stop", all(isinstance(stop, str) and stop for stop in self.stop), "non-empty strings"),
            ("logprobs", self.logprobs is None or 0 <= self.logprobs <= 20, "in [0, 20]"),
            ("prompt_logprobs", self.prompt_logprobs is None or 0 <= self.prompt_logprobs <= 20, "in [0, 20]"),
        )
        for name, good, allowed in checks:
            if not good:
                raise InvalidRequest(f"{name} must be {allowed}, got {getattr(self, name)!r}", field=name)
        for token, bias in self.logit_bias.items():
            if not -100.0 <= bias <= 100.0:
                raise InvalidRequest(f"logit_bias[{token}] must be in [-100, 100], got {bias!r}", field="logit_bias")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0
