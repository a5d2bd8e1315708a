"""The texts of `goodput_replay_served.py`, the runs that generate them, and what steps cost on an H200."""

from bisect import bisect_left
from dataclasses import dataclass, field
from statistics import quantiles

MS = 1e-3
PASSES = {
    1: 3.97, 8: 4.10, 16: 4.39, 32: 4.39, 64: 4.39, 128: 5.16, 256: 6.99, 384: 8.95, 512: 10.6, 640: 13.0, 768: 15.5,
    1024: 19.6, 1536: 30.4, 2048: 40.4, 4096: 79.2, 8192: 154.9,
}  # fmt: skip
"""Milliseconds of a pass by rows, without attention to contexts, of the 8B shape."""
PER_TOKEN = 28e-9
"""Seconds per token of context in a pass."""
DRAFTS = {1: 0.59, 2: 0.63, 4: 0.64, 8: 0.68, 16: 0.82, 32: 1.03, 64: 1.03, 128: 1.24, 256: 1.4}
"""Milliseconds of a draft step by sequences; the last one is assumed."""
DRAFT_PREFILL = 1.03e-6
"""Seconds per token of a draft prefill alone."""
MIXED = 0.5 * MS
"""Time of a step with prompts beside its pass."""
PROMPTS = (40, 60, 80, 100, 200, 300, 600, 900)
MAX_DEPTH, MAX_DRAFT_TOKENS, MAX_GAP, TOKENS, CATEGORY = 8, 512, 8192, 128, "draft/chat"
EARLY_TOKENS, EARLY_ALPHA = 12, 0.96


def interpolate(points: dict[int, float], at: float) -> float:
    sizes, values = [*points], [*points.values()]
    i = min(max(1, bisect_left(sizes, at)), len(sizes) - 1)
    share = (at - sizes[i - 1]) / (sizes[i] - sizes[i - 1])
    return (values[i - 1] + (values[i] - values[i - 1]) * share) * MS


@dataclass(eq=False)
class Text:
    id: int
    prompt: int
    alpha: float
    arrives: float
    computed: int = 0
    made: int = 0
    cached: int = 0
    """Tokens in the draft's cache."""
    is_current: bool = False
    has_drafted: bool = False
    began: float = 0.0
    ended: float = 0.0

    @property
    def size(self) -> int:
        return self.prompt + self.made

    @property
    def limit(self) -> int:
        return max(0, min(MAX_DEPTH, TOKENS - self.made - 1))


@dataclass
class Run:
    now: float = 0.0
    texts: list[Text] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(("prefill", "drafts", "probes"), 0.0))

    num_baselines: int = 0

    @property
    def rate(self) -> float:
        return TOKENS * len(self.texts) / self.now

    @property
    def tpots(self) -> list[float]:
        return [(text.ended - text.began) / (TOKENS - 1) / MS for text in self.texts]

    def tpot(self, percent: int) -> float:
        return quantiles(self.tpots, n=100)[percent - 1] if len(self.texts) > 1 else self.tpots[0]
