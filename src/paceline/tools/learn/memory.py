"""The samples that a learner remembers: the newest ones, held-out ones, and some older ones to replay. They are in memory
only."""

import hashlib
import random
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from paceline.gateway.sessions import LearningSample


@dataclass(frozen=True, slots=True)
class MemoryLimits:
    recent_tokens: int = 65_536
    """Tokens of the newest samples. As many tokens of older samples are kept to replay."""
    held_out: float = 0.125
    replay: float = 0.25
    tenant_share: float = 0.5


class SampleMemory:
    """Bounded. A sample is held out by a hash of its prompt, so that no prompt is trained on and held out."""

    def __init__(self, limits: MemoryLimits, seed: int = 0) -> None:
        self._limits, self._draw = limits, random.Random(seed)
        self._recent, self._held_out = (
            _Window(limits.recent_tokens),
            _Window(int(limits.recent_tokens * limits.held_out)),
        )
        self._older: list[LearningSample] = []
        self._older_tokens = 0
        self.new_tokens = 0
        """Tokens of samples to train on since the last `forget_new`."""
        self.num_seen = 0

    def add(self, samples: Iterable[LearningSample]) -> None:
        for sample in samples:
            self.num_seen += 1
            if is_held_out(sample, self._limits.held_out):
                self._held_out.add(sample)
                continue
            self.new_tokens += sample.num_tokens
            for left in self._recent.add(sample):
                self._keep_older(left)

    def forget_new(self) -> None:
        """The newest samples were trained on."""
        self.new_tokens = 0

    def training(self) -> list[LearningSample]:
        """The newest samples, and older ones for the share `replay` of the tokens."""
        recent = balanced(self._recent.samples, self._limits.tenant_share)
        wanted = self._limits.replay / (1.0 - self._limits.replay) * sum(sample.num_tokens for sample in recent)
        chosen: list[LearningSample] = []
        for sample in self._draw.sample(self._older, len(self._older)):
            if wanted <= 0:
                break
            chosen.append(sample)
            wanted -= sample.num_tokens
        return [*chosen, *recent]

    def held_out(self) -> list[LearningSample]:
        """The newest held-out samples."""
        return balanced(self._held_out.samples, self._limits.tenant_share)

    @property
    def num_tokens(self) -> int:
        return self._recent.num_tokens + self._held_out.num_tokens + self._older_tokens

    def _keep_older(self, sample: LearningSample) -> None:
        """Replaces random older samples, so that the kept ones thin out with age."""
        self._older.append(sample)
        self._older_tokens += sample.num_tokens
        while self._older_tokens > self._limits.recent_tokens:
            index = self._draw.randrange(len(self._older))
            self._older[index], self._older[-1] = self._older[-1], self._older[index]
            self._older_tokens -= self._older.pop().num_tokens


class _Window:
    """The newest samples up to a number of tokens."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens, self.num_tokens = max_tokens, 0
        self.samples: deque[LearningSample] = deque()

    def add(self, sample: LearningSample) -> list[LearningSample]:
        """Returns the samples that leave. The newest one stays, however long it is."""
        self.samples.append(sample)
        self.num_tokens += sample.num_tokens
        left = []
        while self.num_tokens > self._max_tokens and len(self.samples) > 1:
            left.append(self.samples.popleft())
            self.num_tokens -= left[-1].num_tokens
        return left


def is_held_out(sample: LearningSample, share: float) -> bool:
    """The same for every sample with the same prompt."""
    text = ",".join(map(str, sample.prompt)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") < share * 2**64


def balanced(samples: Sequence[LearningSample], share: float) -> list[LearningSample]:
    """The samples without the oldest ones of a tenant that has more than `share` of all tokens, if there are several."""
    tokens = Counter[str]()
    for sample in samples:
        tokens[sample.tenant] += sample.num_tokens
    if len(tokens) < 2:
        return list(samples)
    most = share * sum(tokens.values())
    kept = []
    for sample in samples:  # oldest first
        if tokens[sample.tenant] > most:
            tokens[sample.tenant] -= sample.num_tokens
        else:
            kept.append(sample)
    return kept
