"""How long lookups take on this host, measured once at the start: the depth policy cannot learn it before it drafts, and the
first drafts of a batch take much longer, because they index whole prompts."""

from dataclasses import dataclass

from paceline.core.clock import Clock
from paceline.speculation.depth.costs.draft_time import LinearCost
from paceline.speculation.proposer import Proposer, SequenceProgress
from paceline.vllm.batch import UNKNOWN

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
