"""Decisions of the plugin that the depth policy does not make: whether a batch drafts, and when to ask the policy.

`LatencyLimit` requires that drafts pay for most sequences of a batch, not only on average. Every sequence waits for the whole
step. If a few sequences with good drafts make each step longer, the remaining sequences become slower, and a batch ends with
its slowest sequence. A batch therefore drafts only if three of four of its sequences are faster with drafts than without.

`LookupTime` says how long lookups take on this host, measured once at the start: the depth policy cannot learn it before it
drafts, and the first drafts of a batch take much longer, because they index whole prompts.

`OutputLengths` estimates how many tokens a text is likely to have left. vLLM does not pass the limit of a request to the
plugin.

`Pause` leaves the depth policy out of a step: while nothing is drafted, decisions may take a small share of the time only.

`UnverifiedDrafts` are compared with the text and never verified. They show what drafts are worth while none are returned. A
verified draft slows the step of the whole batch; an unverified draft takes the time of a lookup. A few sequences of the batch
are enough.
"""

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median_low

from paceline.core.clock import Clock
from paceline.policy.cost.curve import LinearCost
from paceline.policy.depth.observation import RoundObservation
from paceline.speculation import Proposer, SequenceProgress
from paceline.vllm.sequences import UNKNOWN, DraftRecord, TrackedSequence, traffic_class

SLOW_SHARE = 4
"""Inverse share of the sequences that may be slower with drafts. A smaller batch has no limit but the depth policy's."""
RECENT = 16
"""Steps of a kind whose median counts."""
MIN_STEPS = 2
"""Steps of a kind before its time is known."""
FORGET_CALLS = 256
"""Decisions against drafts at a scale after which its steps with drafts are measured again."""
MIN_DRAFTING = 4
"""Decisions for drafts before they are judged again: the first round of a sequence shows little."""
START_MARGIN = 1.2
"""Speed, over that without drafts, from which a batch starts to draft. It stops below 1."""


class LatencyLimit:
    """Compares the times of steps with and without drafts, by the scale of the batch."""

    def __init__(self, max_depth: int) -> None:
        self._max_depth = max_depth
        self._seconds: dict[tuple[int, bool], deque[float]] = {}
        self._is_drafting = False
        self._num_drafting = 0
        """Decisions for drafts since the batch started to draft."""
        self._num_refused = Counter[int]()
        """Decisions against drafts, by scale, since the last step with drafts."""

    def observe(self, batch: int, is_drafted: bool, seconds: float) -> None:
        """A step without prompts, with the time of drafting for it, took `seconds`."""
        scale = batch.bit_length()
        self._seconds.setdefault((scale, is_drafted), deque(maxlen=RECENT)).append(seconds)
        if is_drafted:
            self._num_refused[scale] = 0

    def allows(self, records: Sequence[DraftRecord], num_sampled: int) -> bool:
        """Whether the batch of these sequences may draft. `num_sampled` sequences with a record are enough to judge the batch
        by. With fewer, sequences without a record count as those whose drafts are poor."""
        ratio = self._ratio(len(records))
        if ratio is None or len(records) < SLOW_SHARE:
            return True
        known = [record for record in records if record.num_trials]
        judged = known if len(known) >= num_sampled else records
        tokens = sorted(record.tokens(self._max_depth) for record in judged)
        speed = tokens[len(tokens) // SLOW_SHARE] / ratio
        is_held = self._is_drafting and self._num_drafting < MIN_DRAFTING
        self._is_drafting = is_held or speed >= (1.0 if self._is_drafting else START_MARGIN)
        self._num_drafting = self._num_drafting + 1 if self._is_drafting else 0
        if not self._is_drafting:
            self._refuse(len(records).bit_length())
        return self._is_drafting

    def _refuse(self, scale: int) -> None:
        self._num_refused[scale] += 1
        if self._num_refused[scale] >= FORGET_CALLS:
            self._num_refused[scale] = 0
            del self._seconds[scale, True]

    def _ratio(self, batch: int) -> float | None:
        """Time of a step with drafts over that of a step without drafts. None if it is not known."""
        drafted, plain = (self._seconds.get((batch.bit_length(), kind), ()) for kind in (True, False))
        if len(drafted) < MIN_STEPS or len(plain) < MIN_STEPS:
            return None
        return median_low(drafted) / median_low(plain)


SEQUENCES, TOKENS, PERIOD, ROUNDS = 4, 256, 61, 6
MAX_SCALE = 10
"""Batches of up to 2 ** MAX_SCALE sequences have a line of their own."""


@dataclass(frozen=True, slots=True)
class LookupTime:
    per_sequence: float
    """Seconds of one draft of a sequence that is indexed, whatever its depth."""
    per_token: float
    """Seconds to index one token of a prompt."""

    @classmethod
    def measure(cls, proposer: Proposer, clock: Clock, depth: int) -> "LookupTime":
        """`proposer` is used for nothing else."""
        ids = {number: [(number + i) % PERIOD for i in range(TOKENS)] for number in range(SEQUENCES)}
        seconds = []
        for _ in range(ROUNDS):
            started = clock.now()
            proposer.observe(
                [
                    SequenceProgress(i, tokens, depth, UNKNOWN.params, UNKNOWN.seed, 0, TOKENS, "coupled")
                    for i, tokens in ids.items()
                ]
            )
            proposer.collect(list(ids), clock.now())
            seconds.append(clock.now() - started)
            for tokens in ids.values():
                tokens.append(tokens[-1] + 1)
        first, later = seconds[0], min(seconds[1:])
        return cls(later / SEQUENCES, max(0.0, first - later) / (SEQUENCES * TOKENS))

    @property
    def lines(self) -> dict[int, LinearCost]:
        """Times by number of sequences, for the depth policy."""
        return {2**scale: LinearCost(self.per_sequence * 2**scale, 0.0) for scale in range(MAX_SCALE + 1)}

    def drafting_share(self, num_sequences: int, num_indexed: int) -> float:
        """Share of the time of a call that drafts for `num_sequences` and indexes `num_indexed` tokens of new sequences,
        without the indexing."""
        drafting, indexing = num_sequences * self.per_sequence, num_indexed * self.per_token
        return drafting / (drafting + indexing) if drafting + indexing else 1.0


KEPT = 128
"""Ended texts that are remembered."""
FEW = 8
"""Ended texts below which nothing is expected."""


class OutputLengths:
    """Learns from the texts that have ended."""

    def __init__(self) -> None:
        self._ended: deque[int] = deque(maxlen=KEPT)

    def add(self, length: int) -> None:
        """A text has ended after `length` tokens."""
        self._ended.append(length)

    def remaining(self, generated: int) -> int | None:
        """Tokens that a text with `generated` tokens is expected to have left, which is the mean over the longer texts. 1 if no
        text was longer. None if few texts have ended."""
        if len(self._ended) < FEW:
            return None
        longer = [length - generated for length in self._ended if length > generated]
        return max(1, round(sum(longer) / len(longer))) if longer else 1


SHARE = 0.01
"""Share of the time of vLLM's steps that decisions take while the policy drafts nothing. Trial drafts come on top."""
MAX_STEPS = 32
"""Steps that one decision is paid for with, at most."""


class Pause:
    """Every step pays back `SHARE` of its time. While a decision is not paid back, and the policy would keep it anyway, steps
    are not observed. A step in which rows start, end or gain several tokens is never left out."""

    def __init__(self) -> None:
        self._debt = 0.0
        """Seconds that decisions took and that are not paid back."""
        self._num_rows: int | None = None
        """Rows for which the policy keeps its decision not to draft. None if it decides in the next step."""

    def covers(self, sampled: Sequence[Sequence[int]], seconds: float) -> bool:
        """Whether this step is left out. `seconds` is the time of vLLM's step."""
        self._debt = max(0.0, self._debt - SHARE * seconds)
        return self._debt > 0.0 and len(sampled) == self._num_rows and set(map(len, sampled)) == {1}

    @property
    def is_paid(self) -> bool:
        """Whether all decisions are paid back."""
        return self._debt <= 0.0

    def begin(self, num_rows: int) -> None:
        """The policy keeps its decision not to draft for this many rows."""
        self._num_rows = num_rows

    def end(self) -> None:
        """The policy decides in the next step."""
        self._num_rows = None

    def add_cost(self, cost: float, seconds: float) -> None:
        """A call without drafts took `cost`, after a step of `seconds`."""
        self._debt = min(self._debt + cost, MAX_STEPS * SHARE * seconds)


LEAST, UNVERIFIED_SHARE = 4, 8
"""At least `LEAST` sequences are looked up, and one of `UNVERIFIED_SHARE`."""
FIRST_STEPS, MORE_STEPS = 3, 5
"""Steps after the start of a sequence in which drafts are compared, whatever they cost. `MORE_STEPS` follow while most drafts
are right."""


def sample_size(batch: int) -> int:
    return min(batch, max(LEAST, batch // UNVERIFIED_SHARE))


def sample(batch: Sequence[TrackedSequence]) -> list[TrackedSequence]:
    """The sequences that are looked up. Those that are already indexed come first, then the newest."""
    return sorted(batch, key=lambda sequence: (not sequence.has_drafted, -sequence.id))[: sample_size(len(batch))]


class UnverifiedDrafts:
    def __init__(self, method: str, max_depth: int) -> None:
        self._method, self._max_depth = method, max_depth
        self._drafts: list[tuple[TrackedSequence, int, tuple[int, ...]]] = []
        """The sequence, its number of tokens when the draft was made, and the draft."""
        self._num_steps = 0
        """Steps that are still to be compared after the start of a sequence."""
        self._num_more = 0

    @property
    def is_waiting(self) -> bool:
        """Whether the next step is to be compared, whatever that costs."""
        return self._num_steps > 0 or (self._num_more > 0 and bool(self._drafts))

    def start(self) -> None:
        """Sequences have started."""
        self._num_steps, self._num_more = FIRST_STEPS, MORE_STEPS

    def add(self, sequences: Sequence[TrackedSequence], drafts: Mapping[int, tuple[int, ...]]) -> None:
        """`drafts` by sequence were made for the sequences as they are now."""
        self._drafts = [(sequence, len(sequence.ids), drafts.get(sequence.id, ())) for sequence in sequences]
        self._num_steps = max(0, self._num_steps - 1)

    def compare(self) -> tuple[RoundObservation, ...]:
        """What the drafts would have gained, as far as the text is known by now. Each draft is compared once."""
        rounds = []
        for sequence, start, draft in self._drafts:
            text = sequence.ids[start : start + len(draft)]
            if draft and not text:
                continue
            accepted = next((i for i, token in enumerate(text) if token != draft[i]), len(text))
            drafted = len(text) if accepted == len(text) else len(draft)
            traffic = traffic_class(self._method, sequence.record.alpha)
            sequence.record.add(drafted, accepted)
            rounds.append(RoundObservation(sequence.id, traffic, drafted, accepted, self._max_depth))
        self._drafts = []
        num_right = sum(round_.drafted == round_.accepted > 0 for round_ in rounds)
        if self._num_more and not self._num_steps:
            is_right = 2 * num_right > len(rounds)
            self._num_steps, self._num_more = int(is_right), self._num_more - 1 if is_right else 0
        return tuple(rounds)

    def discard(self) -> None:
        self._drafts, self._num_steps = [], 0
