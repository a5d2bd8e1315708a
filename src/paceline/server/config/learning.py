"""Settings of `paceline learn`: what the gateway collects, and the learner that the server starts."""

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
    folder: str | None = None
    """Folder of the learned versions. If set, the server collects and starts a learner beside it; none: start
    `paceline learn` yourself."""
    draft: str | None = None
    """Draft that the learner starts with, a name or a folder; none: the server's `draft`."""
    device: str = "cpu"
    """Device of the learner: cpu, cuda, or auto. It needs the target's weights there."""
    share: float = 0.25
    """Share of its time in which the learner computes; the rest is left to the server."""

    def __post_init__(self) -> None:
        if self.max_samples < 1 or self.max_tokens < 1:
            raise InvalidConfig("learning.max_samples and learning.max_tokens must be at least 1")
        if not 0.0 < self.share <= 1.0:
            raise InvalidConfig(f"learning.share must be over 0 and at most 1, got {self.share}")

    @property
    def is_collecting(self) -> bool:
        return self.enabled or self.folder is not None
