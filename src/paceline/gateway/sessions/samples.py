"""Samples of finished streams of keys that agreed: token ids in a bounded ring in memory, never text and never on disk."""

import hashlib
import itertools
import secrets
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.core.output import StepOutput
from paceline.core.request import ValidatedRequest
from paceline.core.sequence import Origin
from paceline.gateway.auth import ApiKey

MAX_ANSWER_TOKENS = 65_536
"""Tokens of one answer to a learner; the next call continues."""


@dataclass(frozen=True, slots=True)
class LearningSample:
    """One finished choice of a request, as a learner receives it."""

    number: int
    """Position in the stream of samples, from 1."""
    prompt: tuple[int, ...]
    output: tuple[int, ...]
    accepted: tuple[int, ...]
    """Indices of output tokens that were drafted and accepted."""
    drafted: int
    """Tokens drafted in all rounds."""
    rounds: int
    """Steps that committed tokens, the first one included."""
    tenant: str
    """Salted hash of the API key; another process has another salt."""
    category: str

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.output)


@dataclass(frozen=True, slots=True)
class SampleBatch:
    """What a learner receives."""

    epoch: str
    """Identifier of this ring. With another epoch, numbers start again at 1."""
    last: int
    """Number to pass as `after` in the next call."""
    samples: tuple[LearningSample, ...]


class SampleRing:
    """The newest samples of one model. All calls come from the gateway's event loop."""

    def __init__(self, max_samples: int, max_tokens: int) -> None:
        self._max_samples, self._max_tokens = max_samples, max_tokens
        self._samples: deque[LearningSample] = deque()
        self._numbers = itertools.count(1)
        self._salt = secrets.token_bytes(32)
        self._read = 0
        """Largest number that a learner has received."""
        self.epoch = secrets.token_hex(8)
        self.num_tokens = 0
        """Tokens in the ring."""
        self.num_added = 0
        self.num_dropped = 0
        """Samples that left the ring before a learner received them."""

    def __len__(self) -> int:
        return len(self._samples)

    def tenant(self, key_id: str) -> str:
        """The name of a tenant in samples."""
        return hashlib.blake2b(key_id.encode(), key=self._salt, digest_size=8).hexdigest()

    def add(
        self,
        prompt: Sequence[int],
        output: Sequence[int],
        accepted: Sequence[int],
        drafted: int,
        rounds: int,
        tenant: str,
        category: str,
    ) -> None:
        """Adds a sample. The oldest ones leave if the ring is full."""
        sample = LearningSample(
            next(self._numbers), tuple(prompt), tuple(output), tuple(accepted), drafted, rounds, tenant, category
        )
        self.num_added += 1
        self._samples.append(sample)
        self.num_tokens += sample.num_tokens
        while self._samples and (len(self._samples) > self._max_samples or self.num_tokens > self._max_tokens):
            oldest = self._samples.popleft()
            self.num_tokens -= oldest.num_tokens
            self.num_dropped += oldest.number > self._read

    def after(self, number: int, max_tokens: int = MAX_ANSWER_TOKENS) -> SampleBatch:
        """The oldest samples after `number`, up to `max_tokens` and at least one."""
        found: list[LearningSample] = []
        tokens = 0
        for sample in self._samples:
            if sample.number <= number:
                continue
            tokens += sample.num_tokens
            if found and tokens > max_tokens:
                break
            found.append(sample)
        last = found[-1].number if found else number
        self._read = max(self._read, last if found else 0)
        return SampleBatch(self.epoch, last, tuple(found))


@dataclass(slots=True)
class _Choice:
    """The output of one choice so far."""

    tokens: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    drafted: int = 0
    rounds: int = 0


class SampleCollector:
    """Adds every choice of a session to the ring when it finishes. A cancelled or failed choice adds nothing."""

    def __init__(self, ring: SampleRing, key: ApiKey, requests: Sequence[ValidatedRequest]) -> None:
        self._ring, self._tenant = ring, ring.tenant(key.id)
        # A resumed stream lacks the origins of its first tokens, and a verification has no output of its own.
        self._requests = {
            request.id: request for request in requests if not request.committed and request.draft is None
        }
        self._choices: dict[tuple[str, int], _Choice] = {}

    def add(self, outputs: Sequence[StepOutput]) -> None:
        for output in outputs:
            request = self._requests.get(output.request_id)
            if request is None:
                continue
            place = output.request_id, output.choice
            choice = self._choices.setdefault(place, _Choice())
            start = len(choice.tokens)
            choice.tokens += output.tokens
            choice.accepted += [start + i for i, origin in enumerate(output.origins) if origin is Origin.ACCEPTED]
            choice.drafted += output.drafted
            choice.rounds += bool(output.tokens)
            if output.finish_reason is not None:
                del self._choices[place]
                self._finish(request, choice)

    def _finish(self, request: ValidatedRequest, choice: _Choice) -> None:
        if choice.tokens:
            self._ring.add(
                request.prompt_ids,
                choice.tokens,
                choice.accepted,
                choice.drafted,
                choice.rounds,
                self._tenant,
                request.category,
            )


def make_collector(
    ring: SampleRing | None, key: ApiKey, is_strict: bool, requests: Sequence[ValidatedRequest]
) -> SampleCollector | None:
    """None if the server does not collect, the key did not agree, or the session is strict, which uses no drafts."""
    if ring is None or not key.learning or is_strict:
        return None
    return SampleCollector(ring, key, requests)
