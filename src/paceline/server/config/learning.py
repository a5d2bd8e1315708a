"""Settings of `paceline learn`: what the gateway collects."""

from dataclasses import dataclass

from paceline.core.errors import InvalidConfig


@dataclass(frozen=True, slots=True)
class LearningConfig:
    """Section `learning` of the configuration. `learning: true` in a file is short for `learning: {enabled: true}`."""

    enabled: bool = False
    """Whether to collect token ids of finished streams in memory for `paceline learn`. With `api_keys`, only of keys created
    with `--learning`. See docs/learning.md."""
    max_samples: int = 4096
    """Streams in memory; the oldest ones leave first."""
    max_tokens: int = 1_000_000
    """Tokens of those streams in memory."""

    def __post_init__(self) -> None:
        if self.max_samples < 1 or self.max_tokens < 1:
            raise InvalidConfig("learning.max_samples and learning.max_tokens must be at least 1")

    @property
    def is_collecting(self) -> bool:
        return self.enabled
